"""Layers of recurrent cells."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.attention.kernel_features import orthogonal_of_normal
from tfx_jax.functional.layers import add_bias
from tfx_jax.functional.recurrent import State, gru_cell, lstm_cell, mixed_product, scan_cell


class Cell(NamedTuple):
    """A recurrent cell: its step function, its number of gates (blocks of H columns), and the arrays in its state."""

    step: Callable[[Array, State, Array, Array | None], State]
    num_gates: int
    num_states: int


CELLS = {"lstm": Cell(lstm_cell, num_gates=4, num_states=2), "gru": Cell(gru_cell, num_gates=3, num_states=1)}


class RecurrentLayer(nnx.Module):
    """A recurrent layer: a cell with its parameters W [I, G H], U [H, G H] and b [G H], where G is the number of gates.

    `gates` arguments are input projections x W + b. `kept` arguments are dropout masks, as in `lstm_cell`.
    """

    def __init__(self, cell: Cell, input_size: int, size: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        """Initializes each block of W by Glorot and Bengio (2010), each block of U orthogonal, and b with zeros.

        A block has the columns of one gate. The forget gates of an LSTM have a bias of 1. `input_size` is I, `size` is
        H, and `dtype` is that of the matrix products.
        """
        glorot = nnx.initializers.glorot_uniform()
        orthogonal = lambda rng, shape: orthogonal_of_normal(jax.random.normal(rng, shape))  # noqa: E731

        def init_blocks(init: Callable[..., Array], rows: int) -> Array:
            """Returns a matrix [rows, G H], initialized gate by gate."""
            return jnp.concatenate([init(rngs.params(), (rows, size)) for _ in range(cell.num_gates)], axis=1)

        self.kernel = nnx.Param(init_blocks(glorot, input_size))
        self.recurrent = nnx.Param(init_blocks(orthogonal, size))
        bias = jnp.zeros(cell.num_gates * size)
        is_lstm = cell.step is lstm_cell
        self.bias = nnx.Param(bias.at[size : 2 * size].set(1.0) if is_lstm else bias)  # Jozefowicz et al. (2015)
        self.step, self.dtype = cell.step, dtype

    def gates(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch GH"]:
        """Returns x W + b, float32; one product for a whole sequence."""
        return add_bias(mixed_product(x.astype(self.dtype), self.kernel[...]), self.bias[...])

    def __call__(self, gates: Float[Array, "B GH"], state: State, kept: Float[Array, "B H"] | None = None) -> State:
        """Takes one step from `state` and returns the new state."""
        return self.step(gates, state, self.weights, kept)

    def scan(
        self,
        gates: Float[Array, "B T GH"],
        state: State,
        token_mask: Bool[Array, "B T"] | None = None,
        *,
        kept: Float[Array, "B H"] | None = None,
        is_reversed: bool = False,
    ) -> tuple[Float[Array, "B T H"], State]:
        """Runs along a sequence, as `scan_cell` does, with the same dropout mask at all steps."""
        step = lambda gates, state, recurrent: self.step(gates, state, recurrent, kept)  # noqa: E731
        return scan_cell(step, gates, state, self.weights, token_mask, is_reversed=is_reversed)

    @property
    def weights(self) -> Array:
        """U, in the dtype of the computation."""
        return self.recurrent[...].astype(self.dtype)


class BidirectionalLayer(nnx.Module):
    """Two recurrent layers that read in opposite directions (Schuster and Paliwal, 1997), each with half the units."""

    def __init__(
        self,
        cell: Cell,
        size: int,
        *,
        input_size: int | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters; `input_size` is `size`, the size of the output, by default."""
        input_size = size if input_size is None else input_size
        make = functools.partial(RecurrentLayer, cell, input_size, size // 2, dtype=dtype, rngs=rngs)
        self.forward, self.backward = make(), make()
        self.num_states = cell.num_states

    def __call__(
        self, x: Float[Array, "B S I"], token_mask: Bool[Array, "B S"], kept: Float[Array, "2 B D/2"] | None = None
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B D"]]:
        """Returns the concatenated outputs of both directions at each position, and their concatenated final outputs.

        Args:
          x: inputs.
          token_mask: True for tokens, False for padding.
          kept: dropout masks of the forward and the backward direction.
        """
        outputs, last = [], []
        masks = (None, None) if kept is None else kept
        for layer, mask, is_reversed in zip((self.forward, self.backward), masks, (False, True), strict=True):
            gates, zeros = layer.gates(x), jnp.zeros((x.shape[0], layer.recurrent.shape[0]))
            state = (zeros,) * self.num_states
            output, state = layer.scan(gates, state, token_mask, kept=mask, is_reversed=is_reversed)
            outputs.append(output)
            last.append(state[0])  # h, the output
        return jnp.concatenate(outputs, axis=-1).astype(x.dtype), jnp.concatenate(last, axis=-1)


def run_layers(
    layers: Sequence[RecurrentLayer],
    gates: Float[Array, "B T GH"],
    states: Sequence[State],
    *,
    between: Callable[[Array], Array],
    kept: Float[Array, "L B H"] | None = None,
) -> Float[Array, "B T H"]:
    """Runs a stack of layers along whole sequences, layer by layer, so that each input projection is one product.

    Args:
      layers: the layers, from input to output.
      gates: input projections of the first layer.
      states: initial state of each layer.
      between: function applied to the outputs of a layer before the next one, such as dropout.
      kept: dropout mask of each layer.

    Returns:
      The outputs of the last layer.
    """
    first, *above = layers
    state, *others = states
    mask, *masks = [None] * len(layers) if kept is None else kept
    output, _ = first.scan(gates, state, kept=mask)
    for layer, state, mask in zip(above, others, masks, strict=True):
        output, _ = layer.scan(layer.gates(between(output)), state, kept=mask)
    return output


def step_layers(
    layers: Sequence[RecurrentLayer],
    gates: Float[Array, "B GH"],
    states: Sequence[State],
    *,
    between: Callable[[Array, int], Array],
    kept: Float[Array, "L B H"] | None = None,
) -> tuple[State, ...]:
    """Takes one step of a stack of layers, for decoders whose next input depends on the output of the step.

    Args:
      layers: the layers, from input to output.
      gates: input projections of the first layer.
      states: state of each layer.
      between: called as `between(output, index)` with the output of a layer and its index, before the next layer.
      kept: dropout mask of each layer, the same at every step.

    Returns:
      The new state of each layer.
    """
    first, *above = layers
    state, *others = states
    mask, *masks = [None] * len(layers) if kept is None else kept
    new_states = [first(gates, state, mask)]
    for index, (layer, state, mask) in enumerate(zip(above, others, masks, strict=True)):
        output, *_ = new_states[-1]
        new_states.append(layer(layer.gates(between(output, index)), state, mask))
    return tuple(new_states)
