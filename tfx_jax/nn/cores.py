"""Attention cores: what multi-head attention calls between its projections, and how a configuration names them.

A core is a function of `tfx_jax.functional`, its options bound, or a Module with the same signature that owns the
parameters such a function takes. `AttentionConfig` names one; whatever can stand in for `dot_product_attention` can be
passed to a model as `attention_fn` instead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from tfx_jax.fields import documented
from tfx_jax.functional.attention.bigbird import bigbird_attention
from tfx_jax.functional.attention.chunked import chunked_attention
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.attention.hard import hard_attention
from tfx_jax.functional.attention.kernel_features import favor_attention, linear_attention, orthogonal_features
from tfx_jax.functional.attention.local import local_attention, sliding_window_attention
from tfx_jax.functional.attention.lsh import lsh_attention
from tfx_jax.functional.attention.nystrom import nystrom_attention
from tfx_jax.nn.attention_options import AttentionOptions
from tfx_jax.nn.learned_attention import AdditiveAttention, GeneralAttention, RelativeAttention, RoutingAttention

AttentionFn = Callable[..., Any]
"""A callable with the signature of `tfx_jax.functional.dot_product_attention`."""


@documented
@dataclasses.dataclass(unsafe_hash=True)
class AttentionConfig:
    """The self-attention of a model's layers, by name: `--config.model.attention.name=window`.

    Several names are a pattern that the layers repeat: of "window,window,dense" every third layer has dense attention.
    Each takes those of the options that are its own.
    """

    name: str = "dense"  # or others of `CORES`, comma-separated
    options: AttentionOptions = dataclasses.field(default_factory=AttentionOptions)

    def check(
        self,
        *,
        is_causal: bool = False,
        has_bias: bool = False,
        is_packed: bool = False,
        is_float32: bool = False,
        drops: str | None = None,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        d_k: int = 8,
    ) -> None:
        """Checks that there is such a core, that the options are its own, and that it does what a model needs.

        Args:
          is_causal: whether the model hides the future.
          has_bias: whether it adds a bias for each pair of positions.
          is_packed: whether several texts share a row without seeing each other.
          is_float32: whether it computes in float32.
          drops: the field by which training drops attention weights; None where it drops none.
          num_heads: N.
          num_kv_heads: K; None means N.
          d_k: size of a head.

        Raises:
          ValueError: if not; the message names the core and what does not fit.
        """
        given = self.options.given
        for name in self.names:
            if name not in CORES:
                raise ValueError(f"attention.name={name!r} is none of {', '.join(CORES)}")
        taken = list(dict.fromkeys(option for name in self.names for option in CORES[name].options))
        strange = [name for name in given if name not in taken]
        if strange:
            raise ValueError(
                f"attention.options.{strange[0]} is not for {self.name} attention, whose options: "
                f"{', '.join(taken) or 'none'}"
            )
        for name in self.names:
            core = CORES[name]
            missing = [option for option in core.required if option not in given]
            if missing:
                raise ValueError(f"{name} attention needs attention.options.{missing[0]}")
            if is_causal and not core.can_be_causal:
                raise ValueError(f"{name} attention has no causal form, which a model that generates needs")
            if has_bias and not core.takes_bias:
                raise ValueError(f"{name} attention takes no bias for each pair of positions, which this model adds")
            if is_packed and not core.takes_segments:
                raise ValueError(f"{name} attention cannot keep texts apart that share a row")
            if num_kv_heads not in (None, num_heads) and not core.takes_grouped_queries:
                raise ValueError(f"{name} attention needs as many key heads as query heads: leave num_kv_heads out")
            if drops is not None and not core.can_drop:
                raise ValueError(f"{drops} must be 0 with {name} attention, which can drop no weights")
            if is_float32 and core.needs_bfloat16:
                raise ValueError(f'dtype must be "bfloat16" with {name} attention')
        for attention in self.pattern():
            _check_options(attention, num_heads, d_k)

    @property
    def names(self) -> list[str]:
        """The cores of the pattern, first the one nearest to the input."""
        return self.name.split(",")

    def pattern(self) -> "list[AttentionConfig]":
        """Takes a pattern apart into the attention of its first, its second ... layer."""
        if len(self.names) == 1:
            return [self]
        return [AttentionConfig(name, self.options.only(CORES[name].options)) for name in self.names]

    def make(self, num_heads: int, d_k: int, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> AttentionFn:
        """Makes the core of one layer; functions of equal options are one object, so that programs are shared.

        Args:
          num_heads: N.
          d_k: H, the size of a query and a key.
          param_dtype: of the parameters that the core owns.
          rngs: stream `params` draws these.
        """
        core = CORES[self.name].core
        if isinstance(core, type):
            return core(num_heads, d_k, self.options, param_dtype=param_dtype, rngs=rngs)
        return _function(self.name, self.options)


@functools.lru_cache(maxsize=256)
def _check_options(attention: AttentionConfig, num_heads: int, d_k: int) -> None:
    """Has a core itself say what is wrong with its options, of shapes alone; kernels have none."""
    if attention.name in KERNEL_PLATFORMS:
        return
    x = jax.ShapeDtypeStruct((1, 8, num_heads, d_k), jnp.float32)
    try:
        jax.eval_shape(lambda x: attention.make(num_heads, d_k, rngs=nnx.Rngs(0))(x, x, x), x)
    except ValueError as error:
        raise ValueError(f"{attention.name} attention: {error}") from None


@functools.lru_cache(maxsize=256)
def _function(name: str, options: AttentionOptions) -> AttentionFn:
    function = CORES[name].core
    given = options.given
    if name in KERNEL_PLATFORMS:
        given["implementation"] = name
    return functools.partial(function, **given) if given else function


def _lsh(query: Array, *arguments: Any, seed: int = 0, **options: Any) -> Any:
    return lsh_attention(query, *arguments, rng=jax.random.key(seed), **options)


def _favor(query: Array, *arguments: Any, seed: int = 0, num_features: int | None = None, **options: Any) -> Any:
    size = query.shape[-1]
    projection = orthogonal_features(jax.random.key(seed), num_features or 4 * size, size)
    return favor_attention(query, *arguments, projection=projection, **options)


class Core(NamedTuple):
    """What is known of a named attention core."""

    core: AttentionFn
    """A function, or the class of a Module that owns the parameters of one.

    Such a class is called as `core(num_heads, d_k, options, param_dtype=..., rngs=...)`, and its objects with the
    arguments of `dot_product_attention`. One that scores each pair of query and key by itself has
    `scores_pairs = True`, and so decodes from cached keys and values; one that changes its own state in training has
    `has_running_statistics = True`, and is then called with `is_training`. Parameters whose names end in "bias" or
    "scale"
    are spared by weight decay.
    """
    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    can_be_causal: bool = True
    takes_bias: bool = True
    takes_segments: bool = True
    takes_grouped_queries: bool = True
    """Whether there may be fewer heads of keys and values than of queries."""
    can_drop: bool = True
    """Whether it forms weights, of which training may drop some."""
    needs_bfloat16: bool = False


KERNEL_PLATFORMS = {"splash": "tpu", "flash": "tpu", "cudnn": "gpu"}  # of cores that run on one kind of device only
_BIGBIRD = ("block_size", "num_global_blocks", "num_window_blocks", "num_random_blocks")
_PUBLISHED_BIGBIRD = ("num_last_global_blocks", "first_block_times", "dense_length")
_WITHOUT_PAIRS: dict[str, Any] = {"takes_bias": False, "takes_segments": False, "can_drop": False}

CORES = {
    "dense": Core(dot_product_attention),
    "chunked": Core(chunked_attention, ("chunk_size",)),
    "splash": Core(dot_product_attention, takes_bias=False, can_drop=False),
    "flash": Core(dot_product_attention, takes_grouped_queries=False, can_drop=False),
    "cudnn": Core(dot_product_attention, can_drop=False, needs_bfloat16=True),
    "local": Core(local_attention, ("block_size",), ("block_size",), takes_bias=False),
    "window": Core(sliding_window_attention, ("window", "block_size"), ("window",), takes_bias=False),
    "bigbird": Core(
        bigbird_attention,
        (*_BIGBIRD, *_PUBLISHED_BIGBIRD),
        _BIGBIRD,
        can_be_causal=False,
        takes_bias=False,
        takes_segments=False,
    ),
    "lsh": Core(
        _lsh,
        ("num_hashes", "num_buckets", "chunk_size", "seed"),
        ("num_buckets",),
        takes_bias=False,
        takes_grouped_queries=False,
    ),
    "favor": Core(_favor, ("num_features", "block_size", "seed"), **_WITHOUT_PAIRS),
    "linear": Core(linear_attention, ("block_size",), **_WITHOUT_PAIRS),
    "nystrom": Core(nystrom_attention, ("num_landmarks", "num_iterations"), can_be_causal=False, **_WITHOUT_PAIRS),
    "hard": Core(hard_attention),
    "additive": Core(AdditiveAttention, ("d_hidden",)),
    "general": Core(GeneralAttention),
    "relative": Core(RelativeAttention),
    # Tokens compete for places in a cluster: a later one changes the output of an earlier one, a text that of another.
    "routing": Core(
        RoutingAttention,
        ("num_clusters", "window", "decay"),
        ("num_clusters", "window"),
        can_be_causal=False,
        takes_bias=False,
        takes_segments=False,
    ),
}
"""All cores by the names that a configuration uses."""


def kernel_of(core: AttentionFn) -> str | None:
    """Returns the name of the fast kernel that computes a core, "splash", "flash" or "cudnn"; None for XLA's own code.

    >>> kernel_of(functools.partial(dot_product_attention, implementation="splash")), kernel_of(dot_product_attention)
    ('splash', None)
    """
    name = core.keywords.get("implementation") if isinstance(core, functools.partial) else None
    return name if name in KERNEL_PLATFORMS else None
