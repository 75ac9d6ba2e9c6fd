"""Attention and Transformers in JAX: pure functions, Flax modules and the experiments that train them.

Import what you need: `tfx_jax.functional` (jax and numpy only), `tfx_jax.nn`, `tfx_jax.models`, `tfx_jax.data`,
`tfx_jax.tasks`, `tfx_jax.training`.
"""

__version__ = "0.1.0.dev0"
