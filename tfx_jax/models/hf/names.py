"""What a table of names is made of: one row says where one of our parameters lies in a Hugging Face file, and how."""

import concurrent.futures
import dataclasses
import math
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

_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter of ours and the tensor that holds it.

    Attributes:
      ours: path in the nested dictionary of parameters; of a stack, for all its layers at once.
      theirs: name of the tensor; "{}" stands for the number of the layer, a second one for that of an expert.
      num_inputs: how many of the leading axes of a layer's parameter are inputs. They are one axis of the tensor, the
        others are another; without inputs the tensor is a vector.
      is_transposed: whether the tensor has the outputs first, as PyTorch's linear layers do.
      num_batch_axes: how many axes before these the tensor has as well: 1 where one tensor holds all experts.
      part: for a tensor that holds several parameters side by side in its outputs: which of how many this is.
      is_interleaved: whether the outputs of the parts take turns instead of lying side by side.
      kernel_size: of a convolution, whose tensor has these axes at the end, behind outputs and channels.
      num_ones: axes of one entry that the tensor has at the front besides.
      instead: name of the tensor that holds it in a folder without `theirs`.
      scale: what the tensor is multiplied by when it is read.
      columns: for a tensor that holds several parameters of different sizes in its outputs: where this one begins and
        ends, and how many there are.
      first_layer: number of the first layer of a stack.
      layer_step: how much the numbers of its layers grow, where other stacks have the layers in between.
    """

    ours: str
    theirs: str
    num_inputs: int = 0
    is_transposed: bool = False
    num_batch_axes: int = 0
    part: tuple[int, int] = (0, 1)
    is_interleaved: bool = False
    kernel_size: tuple[int, ...] = ()
    num_ones: int = 0
    instead: str = ""
    scale: float = 1.0
    columns: tuple[int, int, int] | None = None
    first_layer: int = 0
    layer_step: int = 1

    def tensor_names(self, shape: Shape) -> list[str]:
        """Names of the tensors of a parameter of this shape, one for each layer of a stack and each of its experts."""
        places = np.ndindex(shape[: self.num_stack_axes])
        return [
            self.theirs.format(*(self.first_layer + self.layer_step * layer for layer in place[:1]), *place[1:])
            for place in places
        ]

    @property
    def num_stack_axes(self) -> int:
        """Leading axes of the parameter along which each entry has its own tensor: layers, and experts."""
        return self.theirs.count("{}")

    def divided(self, param: np.ndarray) -> np.ndarray:
        """A view of the parameter with one leading axis, along which each entry has its own tensor."""
        return param.reshape(-1, *param.shape[self.num_stack_axes :])

    def their_shape(self, shape: Shape) -> Shape:
        """The shape of the tensor for a parameter of this shape."""
        shape = shape[self.num_stack_axes :]
        batch, shape = shape[: self.num_batch_axes], shape[self.num_batch_axes :]
        return (1,) * self.num_ones + batch + self._shape_behind_ones(shape)

    def _shape_behind_ones(self, shape: Shape) -> Shape:
        inputs, outputs = math.prod(shape[: self.num_inputs]), math.prod(shape[self.num_inputs :])
        outputs = outputs * self.part[1] if self.columns is None else self.columns[2]
        if self.kernel_size:
            return (outputs, inputs // math.prod(self.kernel_size), *self.kernel_size)
        if not self.num_inputs:
            return (outputs,)
        return (outputs, inputs) if self.is_transposed else (inputs, outputs)

    def to_ours(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Takes the parameter of one layer out of the tensor; a view of it where that is possible."""
        if self.num_batch_axes:
            row = dataclasses.replace(self, num_batch_axes=self.num_batch_axes - 1)
            return np.stack([row.to_ours(entry, shape[1:]) for entry in tensor])
        flat: np.ndarray = tensor.reshape(tensor.shape[self.num_ones :])
        flat = flat.reshape(flat.shape[0], -1).T if self.is_transposed else flat
        index, count = self.part
        if self.is_interleaved:
            return flat[..., index::count].reshape(shape)
        size = flat.shape[-1] // count
        start, stop = (index * size, (index + 1) * size) if self.columns is None else self.columns[:2]
        return flat[..., start:stop].reshape(shape)

    def to_theirs(self, param: np.ndarray) -> np.ndarray:
        """What the parameter of one layer contributes to the tensor, the whole of it unless there are more parts."""
        if self.num_batch_axes:
            row = dataclasses.replace(self, num_batch_axes=self.num_batch_axes - 1)
            return np.stack([row.to_theirs(entry) for entry in param])
        flat = param.reshape(math.prod(param.shape[: self.num_inputs]), -1) if self.num_inputs else param.reshape(-1)
        if self.is_transposed:
            flat = flat.T if self.columns else flat.T.reshape(self._shape_behind_ones(param.shape))
        return flat.reshape((1,) * self.num_ones + flat.shape)


def vector(ours: str, theirs: str, **options: Any) -> Row:
    """A bias, a gain or an offset."""
    return Row(ours, theirs, **options)


def table(ours: str, theirs: str) -> Row:
    """An embedding, [entries, size] on both sides."""
    return Row(ours, theirs, num_inputs=1)


def linear(ours: str, theirs: str, num_inputs: int = 1) -> Row:
    """The matrix of a linear layer of PyTorch, [outputs, inputs]."""
    return Row(ours, theirs, num_inputs, is_transposed=True)


def dense(ours: str, theirs: str) -> list[Row]:
    """A linear layer with offsets."""
    return [linear(f"{ours}/kernel", f"{theirs}.weight"), vector(f"{ours}/bias", f"{theirs}.bias")]


def under(ours: str, theirs: str, rows: Sequence[Row]) -> list[Row]:
    """The same rows for a part of a model, below these names."""
    return [dataclasses.replace(row, ours=f"{ours}/{row.ours}", theirs=f"{theirs}.{row.theirs}") for row in rows]


def projections(ours: str, theirs: str, *names: str) -> list[Row]:
    """The four linear layers of an attention, with offsets; `names` are theirs for query, key, value and output."""
    return [
        row
        for ours_name, name in zip(("query", "key", "value", "out"), names, strict=True)
        for row in (
            linear(f"{ours}/{ours_name}/kernel", f"{theirs}.{name}.weight", 2 if ours_name == "out" else 1),
            vector(f"{ours}/{ours_name}/bias", f"{theirs}.{name}.bias"),
        )
    ]


def norm(ours: str, theirs: str) -> list[Row]:
    """A layer normalization."""
    return [vector(f"{ours}/scale", f"{theirs}.weight"), vector(f"{ours}/bias", f"{theirs}.bias")]


def feed_forward(ours: str, up: str, down: str) -> list[Row]:
    """Two linear layers, named `up` and `down` over there."""
    return [
        linear(f"{ours}/up", f"{up}.weight"),
        vector(f"{ours}/up_bias", f"{up}.bias"),
        linear(f"{ours}/down", f"{down}.weight"),
        vector(f"{ours}/down_bias", f"{down}.bias"),
    ]


def read_params(
    rows: Sequence[Row], tensors: Tensors, prefix: str, shapes: Mapping[str, Shape], dtype: Any
) -> Iterator[tuple[str, np.ndarray, list[str]]]:
    """Reads every parameter, with its path, and names the tensors with values in it that are NaN or infinite.

    All names and shapes are checked before anything is read.

    Args:
      rows: one for each parameter; of several, which are written alike, the first is read.
      tensors: of the folder.
      prefix: what the names of the folder lack or have at the front of those in the table.
      shapes: of our parameters, by path.
      dtype: of our parameters.

    Raises:
      UserError: for a tensor that is missing or has another shape.
    """
    places: dict[str, list[str]] = {}
    rows = list({row.ours: row for row in reversed(rows)}.values())[::-1]
    for row in rows:
        shape = shapes[row.ours]
        names = [prefix + name for name in row.tensor_names(shape)]
        if row.instead and names[0] not in tensors.shapes:
            names = [prefix + row.instead]
        wanted = row.their_shape(shape)
        for name in names:
            if name not in tensors.shapes:
                raise UserError(f"the tensor {name} is missing")
            if (found := tensors.shapes[name]) != wanted:
                raise UserError(f"the tensor {name} has shape {list(found)}, but {list(wanted)} is needed")
        places[row.ours] = names

    def read(row: Row) -> tuple[str, np.ndarray, list[str]]:
        param, names, spoilt = _empty(shapes[row.ours], np.dtype(dtype)), places[row.ours], []
        for layer, name, tensor in zip(row.divided(param), names, tensors.read(names), strict=True):
            layer[...] = row.to_ours(tensor, layer.shape)
            if row.scale != 1.0:
                layer *= row.scale
            if not is_finite(layer):
                spoilt.append(name)
        return row.ours, param, spoilt

    # Most of the time goes into memory that is written for the first time, which threads share. More would hold more.
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(read, rows)


def _empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An array that begins where JAX can take it over on a CPU as it is; NumPy's own it would copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def write_params(rows: Sequence[Row], params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a folder, by name, made of our parameters."""
    parts: dict[str, list[tuple[int, int | None, np.ndarray]]] = {}
    for row in rows:
        param = params[row.ours]
        place = row.part[0] if row.columns is None else row.columns[0]
        axis = 0 if row.columns is not None and row.is_transposed else -1
        axis = None if row.is_interleaved else axis
        for name, layer in zip(row.tensor_names(param.shape), row.divided(param), strict=True):
            parts.setdefault(name, []).append((place, axis, row.to_theirs(layer)))
    return {name: _joined(found) for name, found in parts.items()}


def _joined(found: list[tuple[int, int | None, np.ndarray]]) -> np.ndarray:
    """A tensor of its parts, each with its place among them and their axis; None: their last axes are interleaved."""
    parts, axis = [part for *_, part in sorted(found, key=lambda part: part[0])], found[0][1]
    if axis is None:
        return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
    return np.ascontiguousarray(np.concatenate(parts, axis=axis))


def with_zeros(model: Any, config: Any) -> Any:
    """A model of the same class and another configuration: the parameters that `model` lacks are 0."""
    # Of shapes alone: to draw parameters only to replace them would take the time and the memory of a second model.
    graphdef, complete = nnx.split(nnx.eval_shape(lambda: type(model)(config, rngs=nnx.Rngs(0))))
    own = dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model))))

    def taken(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return own[path] if path in own else jax.device_put(np.zeros(leaf.shape, leaf.dtype))

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(taken, nnx.to_pure_dict(complete)))


def stored_as(dtype: DTypeLike, name: str, tensor: np.ndarray) -> np.ndarray:
    """Rounds a tensor to the dtype of a file.

    Raises:
      UserError: if a finite value would become infinite.
    """
    with np.errstate(over="ignore"):
        rounded = tensor.astype(jnp.dtype(dtype), copy=False)
    if rounded.dtype != tensor.dtype and (np.isinf(rounded) & ~np.isinf(tensor)).any():
        raise UserError(f"{name} has values that are too large for {rounded.dtype}: use bfloat16 or float32")
    return rounded
