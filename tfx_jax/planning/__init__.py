"""Plans and benchmarks: the predicted speed of a program on absent hardware, and its measured speed on this machine.

`plan` compiles a training step for a topology and reads memory, collectives and time from it. `measure` and `workloads`
time programs on the attached devices.

Where libtpu is installed and no TPU is attached, set `JAX_PLATFORMS=cpu` in the environment, or call
`jax.config.update("jax_platforms", "cpu")` first: otherwise JAX looks for TPUs, and libtpu warns that there are none.
The commands do it for you.
"""
