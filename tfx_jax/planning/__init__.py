"""Plans and benchmarks: how fast a program would run on hardware that is absent, and how fast it runs here.

`plan` compiles a training step for a topology and reads memory, exchanges and time from it; `measure` and `workloads`
time programs on the devices at hand.
"""
