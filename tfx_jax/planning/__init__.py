"""Plans and benchmarks: the predicted speed of a program on absent hardware, and its measured speed on this machine.

`plan` compiles a training step for a topology and reads memory, collectives and time from it. `measure` and `workloads`
time programs on the attached devices.
"""
