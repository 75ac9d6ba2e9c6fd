"""How attention and experts run on a mesh: the `tfx_jax.nn.Distribution` that a training step enters."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from tfx_jax.errors import UserError, one_line
from tfx_jax.functional.attention import SPECS
from tfx_jax.functional.attention.dense import make_request
from tfx_jax.functional.attention.dot_product import default_implementations, dot_product_attention
from tfx_jax.functional.attention.ring import ring_attention
from tfx_jax.functional.moe import Exchange
from tfx_jax.nn.attention import AttentionConfig, AttentionFn
from tfx_jax.nn.distribution import Distribution

BATCH_AXES = ("data", "fsdp", "expert")
"""Names of the mesh axes that shard the examples of a batch, the slowest-varying first."""

_HEADS = P(BATCH_AXES, "sequence", "tensor", None)  # queries, keys, values and outputs [B, T, N, H]
_WEIGHTS = P(BATCH_AXES, "tensor", "sequence")  # attention weights [B, N, T, S]

# Shardings of buffers [groups, experts, ...]: groups over all batch axes, or experts over the axis `expert`.
_BY_GROUP = P(BATCH_AXES)
_BY_EXPERT = P(tuple(axis for axis in BATCH_AXES if axis != "expert"), "expert")


def num_batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards that the examples of a batch are divided into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


@functools.cache  # one object per mesh, so that JAX finds the functions it has traced
def make_distribution(mesh: Mesh) -> Distribution:
    """Returns how attention and experts run on a mesh; a training step enters `tfx_jax.nn.distributed` with it.

    Evaluation and decoding do not enter it: examples and positions of their batches need not divide evenly. If
    parameters are sharded there, the compiler chooses how to shard attention.
    """
    return Distribution(shard_attention(mesh), num_batch_shards(mesh), functools.partial(expert_exchange, mesh))


def shard_attention(mesh: Mesh) -> Callable[..., Any]:
    """Returns the function that calls an attention function on a mesh: `Distribution.attend`.

    It pins the sharding of a layer's activations: batch over the batch axes, heads over "tensor". Without it, the
    compiler would shard activations as FSDP shards the matrices, and exchange them. If a fast kernel can be used, each
    device calls it on its own shard; if "sequence" shards positions, dense attention becomes `ring_attention`.
    """
    return functools.partial(_attend_in_a_ring if mesh.shape["sequence"] > 1 else _attend, mesh)


def check_kernels(attention: AttentionConfig, mesh: Mesh) -> None:
    """Raises UserError if the configuration names an attention kernel that the mesh's devices do not support."""
    platform = mesh.devices.flat[0].platform
    for name in attention.names:
        needed = SPECS[name].platform
        if needed is not None and platform != needed:
            raise UserError(
                f'config.model.attention.name="{name}" needs a {needed.upper()}, but the devices are {platform}: use '
                '"chunked", which runs anywhere'
            )


def with_supported_kernels(attention: AttentionConfig, platform: str) -> AttentionConfig:
    """Replaces kernels that a platform lacks with "dense" attention, which computes the same values."""
    names = [name if SPECS[name].platform in (None, platform) else "dense" for name in attention.names]
    return dataclasses.replace(attention, name=",".join(names))


def _attend(mesh: Mesh, core: AttentionFn, query: Array, key: Array, value: Array, *args: Any, **options: Any) -> Any:
    """Calls the attention function `core` on sharded arrays, if positions are not sharded.

    Kernels and fast implementations of dense attention run on each device; the compiler shards all other functions.

    Raises:
      UserError: if a kernel does not support the sizes, or the mesh does not divide them evenly.
    """
    is_even = query.shape[0] % num_batch_shards(mesh) == 0 and key.shape[2] % mesh.shape["tensor"] == 0
    if kernel := _kernel(core):
        if not is_even:
            raise UserError(
                f'config.model.attention.name="{kernel}" needs a batch and key heads that the mesh divides evenly, got '
                f"{query.shape[0]} examples over {num_batch_shards(mesh)} devices and {key.shape[2]} key heads over "
                f"{mesh.shape['tensor']}"
            )
        try:
            return _attend_on_each_device(mesh, core, query, key, value, *args, **options)
        except ValueError as error:  # for sizes that the kernel does not support
            raise UserError(f'config.model.attention.name="{kernel}": {one_line(error)}') from None
    if core is dot_product_attention and is_even:
        implementations = _fastest(mesh, query, key, value, *args, **options)
        if implementations != ("xla",):  # a kernel is among them, which the compiler cannot shard
            fastest = functools.partial(core, implementation=implementations)
            return _attend_on_each_device(mesh, fastest, query, key, value, *args, **options)
    if mesh.size == 1:
        return core(query, key, value, *args, **options)
    # Otherwise the compiler shards the computation; only the sharding of inputs and outputs is fixed.

    def place(array: Array) -> Array:
        """Shards an array [B, T, N, H]; heads that the mesh does not divide, such as one latent, are replicated."""
        heads = _HEADS if array.shape[2] % mesh.shape["tensor"] == 0 else P(BATCH_AXES)
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, heads))

    result = core(place(query), place(key), place(value), *args, **options)
    return (place(result[0]), result[1]) if options.get("return_weights") else place(result)


def _fastest(
    mesh: Mesh, *arrays: Any, return_weights: bool = False, query_lengths: Array | None = None, **options: Any
) -> tuple[str, ...]:
    """Returns the implementations of dense attention to try, in order, on each device; ignores `query_lengths`."""
    platform = mesh.devices.flat[0].platform
    return default_implementations(make_request(*arrays, **options), return_weights=return_weights, platform=platform)


def _attend_on_each_device(
    mesh: Mesh,
    core: AttentionFn,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    segment_ids: Any = None,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """Calls the attention function `core` on each device's examples and heads: the compiler cannot shard kernels."""
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays |= {"segment_ids": segment_ids, "dropout_rng": dropout_rng}
    arrays |= {name: options.pop(name) for name in ("sinks", "query_lengths", "key_lengths") if name in options}
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def sharding_spec(name: str, array: Any) -> Any:
        """Returns how an argument of the attention is sharded: over batch and heads, as far as it has these axes."""
        if name in ("bias", "mask"):  # [B or 1, N or 1, T, S]: an axis of size 1 is broadcast, and cannot be sharded
            return P(BATCH_AXES if array.shape[0] > 1 else None, "tensor" if array.shape[1] > 1 else None)
        if name in ("segment_ids", "query_lengths", "key_lengths"):  # [B, ...]
            return P(BATCH_AXES)
        return {"sinks": P("tensor"), "dropout_rng": P()}.get(name, _HEADS)

    def on_a_device(arrays: dict[str, Any]) -> Any:
        if dropout_rng is not None:  # dropout positions are counted per device
            arrays = arrays | {"dropout_rng": _device_rng(arrays["dropout_rng"])}
        return core(**arrays, return_weights=return_weights, **options)

    return jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=({name: sharding_spec(name, array) for name, array in arrays.items()},),
        out_specs=(_HEADS, _WEIGHTS) if return_weights else _HEADS,
        check_vma=False,  # kernels do not declare over which axes their results vary
    )(arrays)


def _attend_in_a_ring(
    mesh: Mesh,
    core: AttentionFn,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    dropout_rng: Array | None = None,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """Calls `ring_attention` on arrays whose positions are sharded; `bias` and `mask` must be [B or 1, 1, 1, S].

    Raises:
      UserError: if the attention function `core` is not dense attention.
    """
    if core is not dot_product_attention:
        raise UserError("config.mesh.sequence shards positions, which only dense attention supports: leave it at 1")
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, "dropout_rng": dropout_rng}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if options.get("sinks") is not None:
        arrays["sinks"] = options.pop("sinks")
    specs = dict.fromkeys(arrays, _HEADS) | {"dropout_rng": P(), "sinks": P("tensor")}
    for name in arrays.keys() & {"bias", "mask"}:  # [B or 1, 1, 1, S]
        batch_axes = BATCH_AXES if arrays[name].shape[0] > 1 else None
        specs[name] = P(batch_axes, None, None, "sequence")

    def on_a_device(arrays: dict[str, Array]) -> Any:
        if dropout_rng is not None:  # the same key for the devices of one ring; others have other examples and heads
            arrays = arrays | {"dropout_rng": _device_rng(arrays["dropout_rng"])}
        return ring_attention(**arrays, axis_name="sequence", return_weights=return_weights, **options)

    return jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=({name: specs[name] for name in arrays},),
        out_specs=(_HEADS, _WEIGHTS) if return_weights else _HEADS,
    )(arrays)


def _kernel(core: AttentionFn) -> str | None:
    """Returns the name of the kernel that computes an attention; None if XLA's own code does."""
    name = core.keywords.get("implementation") if isinstance(core, functools.partial) else None
    return name if name in SPECS and SPECS[name].platform else None


def _device_rng(rng: Array) -> Array:
    """Folds a device's batch and head shard into the key; call it inside `jax.shard_map`."""
    return jax.random.fold_in(rng, jax.lax.axis_index((*BATCH_AXES, "tensor")))


def expert_exchange(mesh: Mesh, num_groups: int, num_experts: int) -> Exchange | None:
    """Returns the all-to-alls that send tokens to the devices of their experts and back.

    Section 3.2 of Lepikhin et al. (2020). Buffers are [groups, experts, ...].

    Args:
      mesh: mesh from `tfx_jax.training.sharding.strategies.make_mesh`.
      num_groups: groups of tokens; the tokens of a group are routed together.
      num_experts: experts, which the axis `expert` of the mesh divides.

    Returns:
      A pair: the first function takes buffers sharded by group and returns them sharded by expert, the second is its
      inverse. None if every device has all experts, or the mesh does not divide groups and experts evenly; the compiler
      then chooses how to move tokens.
    """
    if mesh.shape["expert"] == 1 or num_groups % num_batch_shards(mesh) or num_experts % mesh.shape["expert"]:
        return None

    def make_all_to_all(*, split_axis: int, concat_axis: int, in_spec: P, out_spec: P) -> Callable[[Array], Array]:
        """Returns an all-to-all over the mesh axis "expert" that splits one axis and concatenates another."""
        return jax.shard_map(
            lambda buffers: jax.lax.all_to_all(
                buffers, "expert", split_axis=split_axis, concat_axis=concat_axis, tiled=True
            ),
            mesh=mesh,
            in_specs=in_spec,
            out_specs=out_spec,
        )

    to_experts = make_all_to_all(split_axis=1, concat_axis=0, in_spec=_BY_GROUP, out_spec=_BY_EXPERT)
    to_groups = make_all_to_all(split_axis=0, concat_axis=1, in_spec=_BY_EXPERT, out_spec=_BY_GROUP)
    return to_experts, to_groups
