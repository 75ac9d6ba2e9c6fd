"""Meshes, shardings and processes.

`strategies` says which array is sharded over which mesh axis; `attention` and `experts` run attention and experts on a
mesh; `distributed` starts and coordinates processes.
"""
