"""Meshes, shardings and processes.

`strategies` says which array is sharded over which mesh axis. `layers` runs attention and experts on a mesh; models get
this from the context of `tfx_jax.nn.distributed`. `distributed` starts and coordinates processes.
"""
