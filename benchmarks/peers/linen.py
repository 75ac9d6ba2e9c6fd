"""An encoder-decoder in Flax Linen as its WMT example is laid out: a Python loop over pre-norm layers, one embedding.

Written from the architecture (`flax/examples/wmt`): normalization before each sublayer and behind the last layer,
Linen's own attention without offsets, dropout of embeddings, attention weights, hidden units and sublayer outputs,
label smoothing through soft targets, AdamW.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.peers.sizes import ADAM, BOS_ID, LABEL_SMOOTHING, PAD_ID, SIZES, Sizes, pairs
from tfx_jax.functional.positions import sinusoidal_positions
from tfx_jax.planning.measure import compile_apart, timed


class FeedForward(nn.Module):
    """Two dense layers with ReLU and dropout between them."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms [B, T, D]."""
        x = nn.relu(nn.Dense(self.sizes.d_ff)(x))
        x = nn.Dropout(self.sizes.dropout_rate, deterministic=False)(x)
        return nn.Dense(self.sizes.d_model)(x)


class Layer(nn.Module):
    """A layer of the encoder or, with a memory, of the decoder."""

    sizes: Sizes

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array,
        memory: jax.Array | None = None,
        memory_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Transforms [B, T, D]."""
        c = self.sizes
        attention = functools.partial(
            nn.MultiHeadDotProductAttention,
            num_heads=c.num_heads,
            use_bias=False,
            kernel_init=nn.initializers.xavier_uniform(),
            dropout_rate=c.dropout_rate,
            broadcast_dropout=False,
            deterministic=False,
        )
        dropout = functools.partial(nn.Dropout(c.dropout_rate), deterministic=False)
        y = nn.LayerNorm()(x)
        x = x + dropout(attention()(y, mask=mask))
        if memory is not None:
            x = x + dropout(attention()(nn.LayerNorm()(x), memory, mask=memory_mask))
        return x + dropout(FeedForward(c)(nn.LayerNorm()(x)))


class Translator(nn.Module):
    """The encoder-decoder with its embedding."""

    sizes: Sizes

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Returns the logits of every target token, [B, T, V]."""
        c = self.sizes
        embedding = nn.Embed(c.vocab_size, c.d_model, embedding_init=nn.initializers.normal(1.0))
        dropout = functools.partial(nn.Dropout(c.dropout_rate), deterministic=False)
        inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)

        def embed(ids: jax.Array) -> jax.Array:
            return dropout(embedding(ids) + sinusoidal_positions(jnp.arange(ids.shape[1]), c.d_model))

        memory, mask = embed(source), nn.make_attention_mask(source != PAD_ID, source != PAD_ID)
        for _ in range(c.num_layers):
            memory = Layer(c)(memory, mask)
        memory = nn.LayerNorm()(memory)
        x = embed(inputs)
        causal = nn.combine_masks(
            nn.make_attention_mask(target != PAD_ID, target != PAD_ID), nn.make_causal_mask(target)
        )
        assert causal is not None
        cross = nn.make_attention_mask(target != PAD_ID, source != PAD_ID)
        for _ in range(c.num_layers):
            x = Layer(c)(x, causal, memory, cross)
        return embedding.attend(nn.LayerNorm()(x)) / np.sqrt(c.d_model)


def compiling(*, model: str, rows: int, length: int) -> dict[str, float]:
    """Returns the seconds of the phases from the step's function to the end of the first step."""
    sizes = SIZES[model]
    net = Translator(sizes)
    optimizer = optax.adamw(1e-4, **ADAM)
    source, target = pairs(sizes.vocab_size, rows, length)

    @jax.jit
    def first_state(rng: jax.Array):
        params = net.init({"params": rng, "dropout": rng}, source[:1], target[:1])["params"]
        return params, optimizer.init(params)

    def loss_fn(params: Any, source: jax.Array, target: jax.Array, rng: jax.Array) -> jax.Array:
        logits = net.apply({"params": params}, source, target, rngs={"dropout": rng})
        assert isinstance(logits, jax.Array)
        soft = optax.smooth_labels(jax.nn.one_hot(target, sizes.vocab_size), LABEL_SMOOTHING)
        weights = target != PAD_ID
        return (optax.softmax_cross_entropy(logits, soft) * weights).sum() / weights.sum()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, source: jax.Array, target: jax.Array, rng: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, source, target, rng)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = jax.block_until_ready(first_state(jax.random.key(0)))
    rng = jax.random.key(1)
    compilation = compile_apart(step, state, source, target, rng)
    _, first_seconds = timed(lambda: step(state, source, target, rng))
    return {"trace": compilation.trace_seconds, "compile": compilation.compile_seconds, "first step": first_seconds}
