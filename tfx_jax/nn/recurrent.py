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
from tfx_jax.functional.recurrent import State, gru_cell, lstm_cell, narrow_product, scan_cell


class Cell(NamedTuple):
    """A recurrent cell: its step, how many blocks of H columns its matrices have, and the arrays of its state."""

    step: Callable[[Array, State, Array, Array | None], State]
    num_gates: int
    num_states: int


CELLS = {"lstm": Cell(lstm_cell, 4, 2), "gru": Cell(gru_cell, 3, 1)}


class RecurrentLayer(nnx.Module):
    """A cell's parameters: W [I, G H], U [H, G H] and b [G H]."""

    def __init__(self, cell: Cell, input_size: int, size: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        """Draws W as Glorot and Bengio (2010) do and each block of U orthogonal; the forget gate starts open."""
        glorot = nnx.initializers.glorot_uniform()
        blocks = range(cell.num_gates)
        draw = lambda init, rows: jnp.concatenate([init(rngs.params(), (rows, size)) for _ in blocks], axis=1)  # noqa: E731
        orthogonal = lambda rng, shape: orthogonal_of_normal(jax.random.normal(rng, shape))  # noqa: E731
        self.kernel = nnx.Param(draw(glorot, input_size))
        self.recurrent = nnx.Param(draw(orthogonal, size))
        bias = jnp.zeros(cell.num_gates * size)
        is_lstm = cell.step is lstm_cell
        self.bias = nnx.Param(bias.at[size : 2 * size].set(1.0) if is_lstm else bias)  # Jozefowicz et al. (2015)
        self.step, self.dtype = cell.step, dtype

    def gates(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch GH"]:
        """What inputs add to the gates, float32: of a whole sequence one product."""
        return add_bias(narrow_product(x.astype(self.dtype), self.kernel[...]), self.bias[...])

    def __call__(self, gates: Float[Array, "B GH"], state: State, kept: Float[Array, "B H"] | None = None) -> State:
        """Takes one step; `kept` is a mask of dropout, as the cells have it."""
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
        """Runs along a sequence, see `scan_cell`, with one mask at all steps."""
        step = lambda gates, state, recurrent: self.step(gates, state, recurrent, kept)  # noqa: E731
        return scan_cell(step, gates, state, self.weights, token_mask, is_reversed=is_reversed)

    @property
    def weights(self) -> Array:
        """U, as products take it."""
        return self.recurrent[...].astype(self.dtype)


class BidirectionalLayer(nnx.Module):
    """Two cells that read in opposite directions (Schuster and Paliwal, 1997), each with half the units."""

    def __init__(
        self,
        cell: Cell,
        size: int,
        *,
        input_size: int | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters; `input_size` is the output size by default."""
        input_size = size if input_size is None else input_size
        make = functools.partial(RecurrentLayer, cell, input_size, size // 2, dtype=dtype, rngs=rngs)
        self.forward, self.backward = make(), make()
        self.num_states = cell.num_states

    def __call__(
        self, x: Float[Array, "B S I"], token_mask: Bool[Array, "B S"], kept: Float[Array, "2 B D/2"] | None = None
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B D"]]:
        """Returns both outputs at each position beside each other, and the last ones of either direction.

        Args:
          x: inputs.
          token_mask: where there is one.
          kept: masks of dropout of either direction, as the cells have them.
        """
        outputs, last = [], []
        masks = (None, None) if kept is None else kept
        for layer, mask, is_reversed in zip((self.forward, self.backward), masks, (False, True), strict=True):
            gates, zeros = layer.gates(x), jnp.zeros((x.shape[0], layer.recurrent.shape[0]))
            state = (zeros,) * self.num_states
            read, state = layer.scan(gates, state, token_mask, kept=mask, is_reversed=is_reversed)
            outputs.append(read)
            last.append(state[0])
        return jnp.concatenate(outputs, axis=-1).astype(x.dtype), jnp.concatenate(last, axis=-1)


def run_layers(
    layers: Sequence[RecurrentLayer],
    gates: Float[Array, "B T GH"],
    states: Sequence[State],
    *,
    between: Callable[[Array], Array],
    kept: Float[Array, "L B H"] | None = None,
) -> Float[Array, "B T H"]:
    """Runs layers along whole sequences, one after the other: of each all products with inputs are one.

    Args:
      layers: from below.
      gates: what inputs add to the gates of the first.
      states: what each begins with.
      between: what becomes of a layer's outputs before the next one reads them, such as dropout.
      kept: a mask of dropout for each layer, as the cells have it.
    """
    (first, *above), (state, *others) = layers, states
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
    """Takes one step of each layer, for what `run_layers` cannot run: a decoder that is told what it wrote before.

    Args:
      layers: from below.
      gates: what inputs add to the gates of the first.
      states: what each was before.
      between: what becomes of the output of a layer, by its number, before the next one reads it.
      kept: a mask of dropout for each layer, the same at every step.
    """
    (first, *above), (state, *others) = layers, states
    mask, *masks = [None] * len(layers) if kept is None else kept
    after = [first(gates, state, mask)]
    for number, (layer, state, mask) in enumerate(zip(above, others, masks, strict=True)):
        after.append(layer(layer.gates(between(after[-1][0], number)), state, mask))
    return tuple(after)
