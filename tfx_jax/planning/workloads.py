"""Workloads to measure: training steps, beam search, and single attention functions.

Each function returns a `Workload` that is compiled and has run its first unit.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from tfx_jax.errors import UserError
from tfx_jax.generation.decoding import BeamSearch, decode
from tfx_jax.models.transformer import EOS_ID, Transformer, TransformerConfig
from tfx_jax.planning.attentions import ATTENTIONS
from tfx_jax.planning.measure import Compilation, Workload, compile_apart, timed
from tfx_jax.planning.plan import Plan, plan_step, read_plan
from tfx_jax.tasks.text.translation import translation_loss
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.flops import decoding_flops, training_flops
from tfx_jax.training.sharding.strategies import make_mesh, num_batch_shards, shard_batch
from tfx_jax.training.train_setup import base_rng, make_train_setup

MODELS: dict[str, Callable[..., TransformerConfig]] = {
    # As in experiments/transformer_tiny_multi30k.py, with a vocabulary like that of Multi30k.
    "tiny": functools.partial(
        TransformerConfig, vocab_size=10_000, num_layers=4, d_model=128, num_heads=4, d_ff=256, dropout_rate=0.3
    ),
    "base": TransformerConfig,
    "big": TransformerConfig.big,
}
"""Functions that return the configuration of a model size; their arguments override fields such as `dtype`."""


def training_workload(model: TransformerConfig, *, batch: int, length: int) -> Workload:
    """Returns one training step of a model: the trainer's program on all devices, without padding.

    Dropout is the model's; label smoothing is 0.1; the optimizer is the paper's. The batch is on the devices already.

    Args:
      model: configuration of the model.
      batch: number of sentence pairs.
      length: tokens of each source and each target.

    Raises:
      UserError: if the devices cannot share the batch equally, or lack the memory.
    """
    mesh = make_mesh()
    if batch % num_batch_shards(mesh):
        raise UserError(f"batch={batch} must be a multiple of the {num_batch_shards(mesh)} devices")
    config = ExperimentConfig(model=model)

    def make_model() -> Transformer:
        return Transformer(model, rngs=nnx.Rngs(params=config.seed))

    loss_fn = functools.partial(translation_loss, label_smoothing=0.1)
    step_fn, first_state, *_ = make_train_setup(config, make_model, loss_fn, mesh)
    state, rng = first_state(), base_rng(config)
    sides = {side: _sentences(model, batch, length, seed) for seed, side in enumerate(("source", "target"))}
    on_devices = shard_batch(sides, mesh)
    compilation = compile_apart(step_fn, state, on_devices, rng)

    def run() -> None:
        nonlocal state
        state, metrics = step_fn(state, on_devices, rng)
        jax.block_until_ready((state, metrics))

    flops = training_flops(make_model, loss_fn, sides)
    return _ready(run, compilation, target_tokens=batch * length, flops=flops, num_devices=mesh.size)


def planned_training_workload(config: ExperimentConfig) -> tuple[Workload, Plan]:
    """Returns a training step of an experiment on all devices, with random tokens in its largest shape, and its plan.

    Both are returned as a pair.

    Args:
      config: configuration of the experiment; its data is not read.

    Raises:
      UserError: as `tfx_jax.planning.plan.plan_training`, or if the devices lack the memory.
    """
    step = plan_step(config, jax.devices())
    state, rng = step.setup.first_state(), base_rng(config)
    batch = {
        name: jax.device_put(_example(name, array, config.model.vocab_size), array.sharding)
        for name, array in step.batch.items()
    }
    compilation = compile_apart(step.setup.step_fn, state, batch, rng)
    plan = read_plan(step, compilation.program)

    def run() -> None:
        nonlocal state
        state, metrics = step.setup.step_fn(state, batch, rng)
        jax.block_until_ready((state, metrics))

    workload = _ready(run, compilation, target_tokens=plan.tokens, flops=plan.model_flops, num_devices=plan.num_devices)
    return workload, plan


class ForcedLength(nnx.Module):
    """A decoder that ends no text early, so that the cost of a search does not depend on the weights.

    The last step of the search allows only EOS. Before it, this class makes EOS impossible: no hypothesis finishes, the
    search cannot stop early, and every hypothesis has the maximum length. Everything else is the real search: every
    step ranks, reorders and caches as for a trained model.
    """

    continues_inputs = False

    def __init__(self, decoder: Any):
        """Wraps the decoder of a model."""
        self.decoder = decoder

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the wrapped decoder."""
        return self.decoder.vocab_size

    @property
    def pad_id(self) -> int:
        """Padding token of the wrapped decoder."""
        return self.decoder.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns the limit of the wrapped decoder."""
        return self.decoder.max_input_length(max_new_tokens)

    def encode(self, inputs: Int[Array, "B S"], token_mask: Any = None) -> Any:
        """Encodes inputs with the wrapped decoder."""
        return self.decoder.encode(inputs, token_mask)

    def init_cache(self, memory: Any, *, max_length: int, num_beams: int = 1) -> tuple[Any, Int[Array, " B"]]:
        """Returns (cache, start tokens); the cache is (remaining steps without EOS, cache of the wrapped decoder)."""
        cache, start = self.decoder.init_cache(memory, max_length=max_length, num_beams=num_beams)
        return (jnp.full((), max_length - 1, jnp.int32), cache), start

    def step(self, tokens: Int[Array, " R"], cache: Any) -> tuple[Array, Any]:
        """Takes one step of the wrapped decoder, with EOS impossible until the last step."""
        steps_without_eos, inner_cache = cache
        logits, inner_cache = self.decoder.step(tokens, inner_cache)
        eos_logits = jnp.where(steps_without_eos > 0, -jnp.inf, logits[:, EOS_ID])
        return logits.at[:, EOS_ID].set(eos_logits), (steps_without_eos - 1, inner_cache)


def decoding_workload(
    model: TransformerConfig, *, batch: int, beam_size: int, source_length: int, length: int, int8: bool = False
) -> Workload:
    """Returns the beam search of `tfx-jax translate` for one batch, with random weights and targets of a fixed length.

    Args:
      model: configuration of the model.
      batch: number of sentences, without padding.
      beam_size: hypotheses per sentence.
      source_length: tokens of each source.
      length: tokens of every hypothesis, including EOS.
      int8: whether the decoder uses int8 weights, see `tfx_jax.tasks.text.translation.Translator`.

    Raises:
      UserError: if the device lacks the memory.
    """

    def make_model() -> Transformer:
        return Transformer(model, rngs=nnx.Rngs(params=0))

    decoder = ForcedLength(jax.jit(make_model)().decoder(int8=int8))
    source = _sentences(model, batch, source_length, seed=0)
    search: dict[str, Any] = {"search": BeamSearch(beam_size), "eos_ids": (EOS_ID,), "max_length": length}
    program = jax.jit(functools.partial(decode, **search))
    arguments = decoder, source, np.ones(source.shape, bool)
    compilation = compile_apart(program, *arguments)

    def run() -> np.ndarray:
        return np.asarray(program(*arguments))  # copied to the host, as for a translation

    flops = decoding_flops(decoder.decoder, source, max_length=length, num_beams=beam_size)
    return _ready(run, compilation, target_tokens=batch * length, flops=flops)


def attention_workload(
    function: str,
    *,
    length: int,
    batch: int = 1,
    num_heads: int = 8,
    head_size: int = 64,
    is_causal: bool = False,
    with_gradient: bool = True,
    dtype: str = "float32",
) -> Workload:
    """Returns self-attention of random inputs on one device: forward and, if `with_gradient`, backward.

    Its `flops` are those of exact attention: two products for each query and visible key, four more in the backward
    pass. They are None for a function that approximates attention.

    Args:
      function: a name in `ATTENTIONS`.
      length: tokens per sequence.
      batch: number of sequences.
      num_heads: heads of queries, keys and values.
      head_size: features per head.
      is_causal: whether to apply a causal mask; functions that are causal only always apply it.
      with_gradient: whether the gradients of query, key and value are computed too.
      dtype: dtype of the arrays.

    Raises:
      UserError: if there is no such function, it does not support these options, or the device lacks the memory.
    """
    if function not in ATTENTIONS:
        raise UserError(f"unknown function {function!r}; use one of {', '.join(ATTENTIONS)}")
    attention = ATTENTIONS[function]
    is_causal = is_causal or attention.causal_only
    program = attention_program(attention.make(length, num_heads, head_size), is_causal, with_gradient)
    like = jax.ShapeDtypeStruct((batch, length, num_heads, head_size), jnp.dtype(dtype))
    try:
        compilation = compile_apart(program, like, like, like, like)  # query, key, value, gradient of the output
    except ValueError as error:  # options that a kernel or a method does not support
        raise UserError(f"{function}: {' '.join(str(error).split())}") from None
    rngs = jax.random.split(jax.random.key(1), 4)
    arrays = [jax.random.normal(rng, like.shape, like.dtype) for rng in rngs]

    def run() -> None:
        jax.block_until_ready(compilation.program(*arrays))

    num_pairs = length * (length + 1) // 2 if is_causal else length**2  # of a query and a visible key
    # Forward: Q K^T and W V. Backward: the gradients of V, W, Q and K. A product takes 2 * H FLOPs for each pair.
    num_products = 6 if with_gradient else 2
    flops = 2 * num_products * batch * num_heads * head_size * num_pairs
    return _ready(run, compilation, target_tokens=batch * length, flops=flops if attention.is_exact else None)


def attention_program(attend: Callable[..., Any], is_causal: bool, with_gradient: bool) -> Any:
    """Returns the jitted function that `attention_workload` measures: of query, key, value and the output's gradient.

    Args:
      attend: the attention function.
      is_causal: whether to apply a causal mask.
      with_gradient: whether the function returns (output, gradients of query, key and value); otherwise it returns the
        output, and ignores its last argument.
    """
    attend = functools.partial(attend, is_causal=is_causal)

    def forward_and_backward(query: Array, key: Array, value: Array, gradient: Array) -> Any:
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(gradient)

    return jax.jit(forward_and_backward if with_gradient else lambda query, key, value, _: attend(query, key, value))


def _ready(
    run: Callable[[], Any], compilation: Compilation, target_tokens: int, flops: int | None, *, num_devices: int = 1
) -> Workload:
    """Runs the first unit of a compiled workload and returns the workload."""
    _, first_seconds = timed(run)
    return Workload(
        run=run,
        trace_seconds=compilation.trace_seconds,
        compile_seconds=compilation.compile_seconds,
        first_seconds=first_seconds,
        target_tokens=target_tokens,
        flops=flops,
        program_bytes=compilation.program_bytes,
        num_devices=num_devices,
    )


def _example(name: str, like: jax.ShapeDtypeStruct, vocab_size: int) -> np.ndarray:
    """Returns an array of a batch, of the shape and dtype of `like`.

    Inputs are random tokens. Labels, weights and masks are ones, which are always valid.
    """
    if name not in ("source", "target", "inputs", "tokens"):
        return np.ones(like.shape, like.dtype)
    return np.random.default_rng(0).integers(1, vocab_size, like.shape).astype(like.dtype)


def _sentences(model: TransformerConfig, num_sentences: int, length: int, seed: int) -> np.ndarray:
    """Returns random tokens [num_sentences, length], int32, without padding and special tokens."""
    shape = (num_sentences, length)
    return np.random.default_rng(seed).integers(EOS_ID + 1, model.vocab_size, shape, np.int32)
