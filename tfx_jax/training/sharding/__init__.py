"""Meshes, shardings and processes.

`strategies` says which array is sharded over which mesh axis. `attention` and `experts` run attention and experts on a
mesh; models get them from the context of `tfx_jax.nn.distributed`. `distributed` starts and coordinates processes.
"""
