"""Our side: what `tfx-jax bench` measures, at the sizes that every side has, and JAX's own attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from benchmarks.peers.sizes import DECODER_SIZES, LABEL_SMOOTHING, RECURRENT_SIZES, SIZES
from benchmarks.peers.worker import Workload
from tfx_jax.models.gpt import GPTConfig
from tfx_jax.models.seq2seq import Seq2SeqConfig
from tfx_jax.models.transformer import Transformer, TransformerConfig
from tfx_jax.planning import workloads
from tfx_jax.tasks import LanguageModelConfig, PairData, TextData, TranslationConfig, translation_loss
from tfx_jax.training import ExperimentConfig
from tfx_jax.training.sharding.strategies import make_mesh
from tfx_jax.training.step import TrainState
from tfx_jax.training.train_setup import make_train_setup


def config_of(model: str, dtype: str, **overrides: Any) -> TransformerConfig:
    """Returns our configuration of a model, a key of `SIZES`."""
    return TransformerConfig(**SIZES[model]._asdict() | overrides, dtype=dtype)


def training(*, model: str, rows: int, length: int, dtype: str, count: str = "tokens") -> Workload:
    """Returns a step of `tfx-jax train`, counted in target tokens (`count` "tokens") or model FLOPs ("flops")."""
    ours = workloads.training_workload(config_of(model, dtype), batch=rows, length=length)
    assert ours.flops is not None
    return Workload(ours.run, ours.target_tokens if count == "tokens" else ours.flops, {"flops": ours.flops})


def gpt_training(*, model: str, rows: int, length: int, dtype: str) -> Workload:
    """Returns a training step of a GPT-2 without dropout, counted in tokens."""
    config = GPTConfig(**DECODER_SIZES[model]._asdict(), dropout_rate=0.0, attention_dropout_rate=0.0, dtype=dtype)
    task = LanguageModelConfig(TextData(max_length=length, tokens_per_batch=rows * length))
    ours, plan = workloads.planned_training_workload(ExperimentConfig(config, task))
    assert plan.batch["inputs"] == (rows, length)
    return Workload(ours.run, ours.target_tokens, {"flops": ours.flops})


def recurrent_training(*, model: str, rows: int, length: int, is_attending: bool, dtype: str) -> Workload:
    """Returns a training step of a `Seq2Seq` of LSTMs, if `is_attending` with Luong's attention, unscaled as theirs."""
    variant = "luong" if is_attending else "fixed"
    config = Seq2SeqConfig(**RECURRENT_SIZES[model]._asdict(), variant=variant, scaled=False, dtype=dtype)
    task = TranslationConfig(PairData(max_length=length, tokens_per_batch=rows * length))
    ours, plan = workloads.planned_training_workload(ExperimentConfig(config, task))
    assert plan.batch["target"] == (rows, length)
    return Workload(ours.run, ours.target_tokens)


def compiling(*, model: str, rows: int, length: int) -> dict[str, float]:
    """Returns the seconds of the phases from the step's function to the end of the first step."""
    ours = workloads.training_workload(config_of(model, "float32"), batch=rows, length=length)
    return {"trace": ours.trace_seconds, "compile": ours.compile_seconds, "first step": ours.first_seconds}


def decoding(
    *, model: str, rows: int, beam: int, source_length: int, length: int, dtype: str, int8: bool = False
) -> Workload:
    """Returns the beam search of `tfx-jax translate` to a forced length."""
    sizes = {"batch": rows, "beam_size": beam, "source_length": source_length, "length": length}
    ours = workloads.decoding_workload(config_of(model, dtype), int8=int8, **sizes)
    # The last token is the end of sentence, which not every side generates.
    best = ours.run()[:, : length - 1]
    return Workload(ours.run, ours.target_tokens, {"best": best.tolist()})


def attention(
    *, function: str, rows: int, length: int, heads: int, head_size: int, is_causal: bool, dtype: str
) -> Workload:
    """Returns forward and backward pass of one of our attention functions."""
    sizes: dict[str, Any] = {"batch": rows, "length": length, "num_heads": heads, "head_size": head_size}
    return Workload(workloads.attention_workload(function, is_causal=is_causal, dtype=dtype, **sizes).run, 1)


def jax_nn_attention(
    *, rows: int, length: int, heads: int, head_size: int, is_causal: bool, dtype: str, implementation: str
) -> Workload:
    """Returns forward and backward pass of `jax.nn.dot_product_attention`."""
    options: dict[str, Any] = {"implementation": implementation}
    attend = functools.partial(jax.nn.dot_product_attention, **options)
    program = workloads.attention_program(attend, is_causal, with_gradient=True)
    arrays = jax.random.normal(jax.random.key(0), (4, rows, length, heads, head_size), dtype)
    return Workload(lambda: jax.block_until_ready(program(*arrays)), 1)


def step_and_state(config: TransformerConfig) -> tuple[Callable[..., Any], TrainState]:
    """Returns (the trainer's step function for a model, the first state)."""

    def make_model() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(params=0))

    experiment = ExperimentConfig(model=config)
    loss_fn = functools.partial(translation_loss, label_smoothing=LABEL_SMOOTHING)
    step_fn, first_state, *_ = make_train_setup(experiment, make_model, loss_fn, make_mesh())
    return step_fn, first_state()


def parameters(model: str) -> Any:
    """Returns the random parameters that `decoding` uses, for sides that get our weights."""
    return nnx.to_pure_dict(nnx.state(Transformer(config_of(model, "float32"), rngs=nnx.Rngs(params=0))))
