"""Rows of the tables of names: each says which tensor of a Hugging Face file holds one of our parameters, and how."""

import concurrent.futures
import dataclasses
import functools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tfx_jax.errors import UserError
from tfx_jax.models.finite import is_finite
from tfx_jax.models.hf.folder import Tensors

Shape = tuple[int, ...]

_BLOCK_BYTES = 1 << 22
_LARGE_PAGE = 1 << 21
_ALIGNMENT = 64  # bytes; JAX copies arrays to the CPU device that are aligned less


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter of a model and the tensor of a Hugging Face folder that holds it.

    Attributes:
      path: path of the parameter in the nested dictionary; for a stack, one path for all its layers.
      tensor: name of the tensor. The first "{}" stands for the index of the layer, a second one for that of an expert.
      num_inputs: number of leading axes of one layer's parameter that are inputs. The tensor has one axis for all
        inputs and one for all outputs; with `num_inputs=0` it is a vector.
      is_transposed: whether the tensor is [outputs, inputs], as in PyTorch's linear layers, not [inputs, outputs].
      num_batch_axes: number of leading axes that parameter and tensor share; 1 if one tensor holds all experts.
      part: (index, count) if the tensor holds `count` parameters of equal size side by side along its outputs.
      is_interleaved: whether the outputs of these parts alternate instead of lying side by side.
      kernel_size: of a convolution: sizes of the last axes of the tensor, [outputs, channels, *kernel_size].
      num_ones: number of axes of size 1 at the front of the tensor.
      instead: name of the tensor that holds the parameter in a folder without `tensor`.
      scale: factor by which the tensor is multiplied when it is read.
      outputs: indices of the tensor's outputs that are those of the parameter, in its order, if the tensor holds others
        too or has another order. None means all.
      num_outputs: number of the tensor's outputs, if `outputs` is set.
      is_per_head: whether the parameter is [heads, inputs, outputs of a head]; the tensor has the outputs of all heads
        side by side.
      first_layer: index, in the names of tensors, of the first layer of a stack.
      is_scalar: whether the tensor has no axis; the parameter has one entry.
      layer_step: difference between the indices of successive layers; above 1 if stacks alternate.
    """

    path: str
    tensor: str
    num_inputs: int = 0
    is_transposed: bool = False
    num_batch_axes: int = 0
    part: tuple[int, int] = (0, 1)
    is_interleaved: bool = False
    kernel_size: tuple[int, ...] = ()
    num_ones: int = 0
    instead: str = ""
    scale: float = 1.0
    outputs: Sequence[int] | None = None
    num_outputs: int = 0
    is_per_head: bool = False
    first_layer: int = 0
    layer_step: int = 1
    is_scalar: bool = False

    def tensor_names(self, shape: Shape) -> list[str]:
        """Returns the names of the tensors of a parameter of this shape: one per layer of a stack and per expert."""
        names: list[str] = []
        # An index is (), (layer,) or (layer, expert); only the layer is renumbered.
        for index in np.ndindex(shape[: self.num_stack_axes]):
            layer = [self.first_layer + self.layer_step * layer for layer in index[:1]]
            names.append(self.tensor.format(*layer, *index[1:]))
        return names

    @property
    def num_stack_axes(self) -> int:
        """Number of leading axes of the parameter along which each entry has its own tensor: layers, and experts."""
        return self.tensor.count("{}")

    def divided(self, param: np.ndarray) -> np.ndarray:
        """Returns a view of the parameter with one leading axis, along which each entry has its own tensor."""
        return param.reshape(-1, *param.shape[self.num_stack_axes :])

    def tensor_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the tensor for a parameter of this shape."""
        if self.is_scalar:
            return ()
        shape = shape[self.num_stack_axes :]
        batch, shape = shape[: self.num_batch_axes], shape[self.num_batch_axes :]
        return (1,) * self.num_ones + batch + self._shape_behind_ones(shape)

    def _shape_behind_ones(self, shape: Shape) -> Shape:
        """Returns the shape of the tensor without batch axes and axes of size 1, for that of one layer's parameter."""
        shape = (shape[1], shape[0], *shape[2:]) if self.is_per_head else shape
        inputs, outputs = math.prod(shape[: self.num_inputs]), math.prod(shape[self.num_inputs :])
        outputs = outputs * self.part[1] if self.outputs is None else self.num_outputs
        if self.kernel_size:
            return (outputs, inputs // math.prod(self.kernel_size), *self.kernel_size)
        if not self.num_inputs:
            return (outputs,)
        return (outputs, inputs) if self.is_transposed else (inputs, outputs)

    def to_param(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns the parameter of one layer, of this shape, from its tensor; a view if possible."""
        if self.is_scalar:
            return tensor.reshape(shape)
        if self.num_batch_axes:
            row = dataclasses.replace(self, num_batch_axes=self.num_batch_axes - 1)
            return np.stack([row.to_param(entry, shape[1:]) for entry in tensor])
        flat: np.ndarray = tensor.reshape(tensor.shape[self.num_ones :])
        flat = flat.reshape(flat.shape[0], -1).T if self.is_transposed else flat  # [inputs, outputs], or [outputs]
        index, count = self.part
        if self.is_interleaved:
            return flat[..., index::count].reshape(shape)
        if self.outputs is None:
            size = flat.shape[-1] // count
            flat = flat[..., index * size : (index + 1) * size]
        elif isinstance(self.outputs, range):
            flat = flat[..., self.outputs.start : self.outputs.stop]  # a view, unlike a list of indices
        else:
            flat = flat[..., list(self.outputs)]
        if self.is_per_head:
            return flat.reshape(shape[1], shape[0], -1).swapaxes(0, 1)
        return flat.reshape(shape)

    def to_tensor(self, param: np.ndarray) -> np.ndarray:
        """Returns the tensor for the parameter of one layer, or its part of a tensor that holds several."""
        if self.is_scalar:
            return param.reshape(())
        if self.num_batch_axes:
            row = dataclasses.replace(self, num_batch_axes=self.num_batch_axes - 1)
            return np.stack([row.to_tensor(entry) for entry in param])
        param = param.swapaxes(0, 1) if self.is_per_head else param
        flat = param.reshape(math.prod(param.shape[: self.num_inputs]), -1) if self.num_inputs else param.reshape(-1)
        if self.is_transposed:
            flat = flat.T if self.outputs is not None else flat.T.reshape(self._shape_behind_ones(param.shape))
        return flat.reshape((1,) * self.num_ones + flat.shape)


def vector(path: str, tensor: str, **options: Any) -> Row:
    """Returns the row of a vector, such as a bias or a scale; `path` is that of the parameter, `tensor` a name."""
    return Row(path, tensor, **options)


def table(path: str, tensor: str) -> Row:
    """Returns the row of an embedding, which is [entries, size] in both."""
    return Row(path, tensor, num_inputs=1)


def linear(path: str, tensor: str, num_inputs: int = 1) -> Row:
    """Returns the row of the matrix of a linear layer in PyTorch's layout, [outputs, inputs]."""
    return Row(path, tensor, num_inputs, is_transposed=True)


def dense(path: str, tensor: str) -> list[Row]:
    """Returns the rows of a linear layer with a bias."""
    return [linear(f"{path}/kernel", f"{tensor}.weight"), vector(f"{path}/bias", f"{tensor}.bias")]


def under(path: str, tensor: str, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a part of a larger model: with `path` before their paths and `tensor` before their names.

    An empty `tensor` leaves the names as they are.
    """
    prefix = f"{tensor}." if tensor else ""
    return [dataclasses.replace(row, path=f"{path}/{row.path}", tensor=f"{prefix}{row.tensor}") for row in rows]


def projections(path: str, tensor: str, *names: str) -> list[Row]:
    """Returns the rows of the four linear layers of an attention, with biases.

    Args:
      path: path of the attention.
      tensor: start of the tensors' names.
      *names: names, in the tensors, of the projections of query, key, value and output, in this order.
    """
    return [
        row
        for our_name, name in zip(("query", "key", "value", "out"), names, strict=True)
        for row in (
            linear(f"{path}/{our_name}/kernel", f"{tensor}.{name}.weight", 2 if our_name == "out" else 1),
            vector(f"{path}/{our_name}/bias", f"{tensor}.{name}.bias"),
        )
    ]


def norm(path: str, tensor: str) -> list[Row]:
    """Returns the rows of a layer normalization."""
    return [vector(f"{path}/scale", f"{tensor}.weight"), vector(f"{path}/bias", f"{tensor}.bias")]


def feed_forward(path: str, up: str, down: str) -> list[Row]:
    """Returns the rows of a feed-forward network; `up` and `down` are the names of its linear layers in the tensors."""
    return [
        linear(f"{path}/up", f"{up}.weight"),
        vector(f"{path}/up_bias", f"{up}.bias"),
        linear(f"{path}/down", f"{down}.weight"),
        vector(f"{path}/down_bias", f"{down}.bias"),
    ]


def read_params(
    rows: Sequence[Row],
    tensors: Tensors,
    prefix: str,
    shapes: Mapping[str, Shape],
    *,
    keep_bfloat16: bool = False,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Iterator[tuple[str, Any, list[str]]]:
    """Yields (path, array, nonfinite) of every parameter: `nonfinite` names its tensors with NaN or infinite values.

    All names and shapes are checked before any values are read. Arrays are NumPy arrays or, with `shardings`, JAX
    arrays, of which only the shards of this process are read.

    Args:
      rows: table of names. If several rows have the same parameter, which then is written several times, the first one
        is read.
      tensors: tensors of the folder.
      prefix: start of the names in the folder that the table omits.
      shapes: shapes of the model's parameters, by path.
      keep_bfloat16: whether parameters that are stored as bfloat16 stay so; all others are float32.
      shardings: sharding of each parameter, by path.

    Raises:
      UserError: if a tensor is missing or has the wrong shape.
    """
    names_by_path: dict[str, list[str]] = {}
    # The first row of each parameter, in their order: later entries of a dictionary replace earlier ones.
    rows = list({row.path: row for row in reversed(rows)}.values())[::-1]
    for row in rows:
        shape = shapes[row.path]
        names = [prefix + name for name in row.tensor_names(shape)]
        if row.instead and names[0] not in tensors.shapes:
            names = [prefix + row.instead]
        needed = row.tensor_shape(shape)
        for name in names:
            if name not in tensors.shapes:
                raise UserError(f"the tensor {name} is missing")
            if (stored := tensors.shapes[name]) != needed:
                raise UserError(f"the tensor {name} has shape {list(stored)}, but {list(needed)} is needed")
        names_by_path[row.path] = names

    def read(row: Row) -> tuple[str, Any, list[str]]:
        """Reads the parameter of one row from its tensors."""
        shape, names = shapes[row.path], names_by_path[row.path]
        is_bfloat16 = keep_bfloat16 and row.scale == 1.0 and all(map(tensors.is_bfloat16, names))
        dtype = np.dtype(jnp.bfloat16 if is_bfloat16 else np.float32)
        nonfinite: list[str] = []

        @functools.cache  # several devices may hold the same shard
        def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
            """Reads the elements of the parameter within `bounds`, (start, stop) along each axis."""
            in_stack = tuple(slice(*bound) for bound in bounds[: row.num_stack_axes])
            in_layer = tuple(slice(*bound) for bound in bounds[row.num_stack_axes :])
            param = _empty(tuple(stop - start for start, stop in bounds), dtype)
            names_in_stack = np.array(names).reshape(shape[: row.num_stack_axes])[in_stack].reshape(-1).tolist()
            layers = zip(row.divided(param), names_in_stack, tensors.read(names_in_stack), strict=True)
            for layer, name, tensor in layers:
                values = row.to_param(tensor, shape[row.num_stack_axes :])[in_layer]
                for block in _blocks(values.shape, dtype.itemsize):
                    layer[block] = values[block]
                    if not row.is_transposed:  # then the next block needs none of these pages
                        tensors.release(name)
                if row.scale != 1.0:
                    layer *= row.scale
                if not is_finite(layer):
                    nonfinite.append(name)
            return param

        if shardings is None:
            return row.path, part(tuple((0, size) for size in shape)), nonfinite

        def shard(index: Any) -> np.ndarray:
            """Reads a shard; `index` has a slice for each axis, such as slice(0, 4, None) or slice(None)."""
            return part(tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True)))

        array = jax.make_array_from_callback(shape, shardings[row.path], shard)
        return row.path, array, list(dict.fromkeys(nonfinite))

    # Most of the time is the first write to new memory, which two threads halve. More threads would use more memory.
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(read, rows)


def _blocks(shape: Shape, itemsize: int) -> Iterator[Any]:
    """Yields indices that cut an array along its first axis into blocks of a few MB, which fit into caches."""
    if not shape or not math.prod(shape):
        yield ...
        return
    size = max(1, _BLOCK_BYTES // (math.prod(shape[1:]) * itemsize))
    yield from (slice(start, start + size) for start in range(0, shape[0], size))


def _empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array that is aligned so that JAX can use it on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # the first write to each page takes much of the time: have few
        return np.frombuffer(pages, dtype).reshape(shape)
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT  # in Python, -x % size is the distance to the next multiple
    return buffer[start : start + size].view(dtype).reshape(shape)


def write_params(rows: Sequence[Row], params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of a folder, by name, for the parameters of a model, by path."""
    parts: dict[str, list[tuple[Row, np.ndarray]]] = {}  # of each tensor
    for row in rows:
        param = params[row.path]
        for name, layer in zip(row.tensor_names(param.shape), row.divided(param), strict=True):
            parts.setdefault(name, []).append((row, row.to_tensor(layer)))
    return {name: _join(parts_of_tensor) for name, parts_of_tensor in parts.items()}


def _join(parts_of_tensor: list[tuple[Row, np.ndarray]]) -> np.ndarray:
    """Joins the parts of a tensor, each with its row, along the axis of the outputs."""
    parts = [part for _, part in sorted(parts_of_tensor, key=lambda entry: entry[0].part[0])]
    row, first = parts_of_tensor[0]
    if row.outputs is not None:
        axis, shape = -2 if row.is_transposed else -1, list(first.shape)
        shape[axis] = row.num_outputs
        joined = np.empty(shape, first.dtype)
        for part_row, part in parts_of_tensor:
            np.moveaxis(joined, axis, 0)[list(part_row.outputs or ())] = np.moveaxis(part, axis, 0)
        return joined.reshape(row.num_outputs, -1, *row.kernel_size) if row.kernel_size else joined
    if row.is_interleaved:
        return np.stack(parts, axis=-1).reshape(*first.shape[:-1], -1)
    if len(parts) == 1:
        return np.asarray(first, order="C")  # which leaves a scalar without axes
    return np.ascontiguousarray(np.concatenate(parts, axis=-1))


def with_zeros(model: Any, config: Any) -> Any:
    """Returns a model of the same class with `config` and the parameters of `model`; parameters that it lacks are 0."""
    # Only shapes: initializing parameters and then replacing them would take the time and memory of a second model.
    graphdef, complete = nnx.split(nnx.eval_shape(lambda: type(model)(config, rngs=nnx.Rngs(0))))
    existing = dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))))

    def get_or_zeros(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return existing[path] if path in existing else jax.device_put(np.zeros(leaf.shape, leaf.dtype))

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(get_or_zeros, nnx.to_pure_dict(complete)))


def stored_as(dtype: DTypeLike, name: str, tensor: np.ndarray) -> np.ndarray:
    """Casts a tensor to the dtype of a file; `name` is for the error.

    Raises:
      UserError: if a finite value would become infinite.
    """
    with np.errstate(over="ignore"):
        rounded = tensor.astype(jnp.dtype(dtype), copy=False)
    if rounded.dtype != tensor.dtype and (np.isinf(rounded) & ~np.isinf(tensor)).any():
        raise UserError(f"{name} has values that are too large for {rounded.dtype}: use bfloat16 or float32")
    return rounded
