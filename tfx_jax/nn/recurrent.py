"""Layers of recurrent cells."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from tfx_jax.functional.linear import add_bias
from tfx_jax.functional.orthogonal import orthogonal_of_normal
from tfx_jax.functional.recurrent import State, gru_cell, lstm_cell, narrow_product, scan_cell


class Cell(NamedTuple):
    """A recurrent cell: its step, how many blocks of H columns its matrices have, and the arrays of its state."""

    step: Callable[[Array, State, Array], State]
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

    def __call__(self, gates: Float[Array, "B GH"], state: State) -> State:
        """Takes one step."""
        return self.step(gates, state, self.weights)

    @property
    def weights(self) -> Array:
        """U, as products take it."""
        return self.recurrent[...].astype(self.dtype)


class BidirectionalLayer(nnx.Module):
    """Two cells that read in opposite directions (Schuster and Paliwal, 1997), each with half the units."""

    def __init__(self, cell: Cell, size: int, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        make = functools.partial(RecurrentLayer, cell, size, size // 2, dtype=dtype, rngs=rngs)
        self.forward, self.backward = make(), make()
        self.num_states = cell.num_states

    def __call__(
        self, x: Float[Array, "B S D"], token_mask: Bool[Array, "B S"]
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B D"]]:
        """Returns both outputs at each position beside each other, and the last ones of either direction."""
        outputs, last = [], []
        for layer, is_reversed in ((self.forward, False), (self.backward, True)):
            gates, zeros = layer.gates(x), jnp.zeros((x.shape[0], x.shape[-1] // 2))
            state = (zeros,) * self.num_states
            read, state = scan_cell(layer.step, gates, state, layer.weights, token_mask, is_reversed=is_reversed)
            outputs.append(read)
            last.append(state[0])
        return jnp.concatenate(outputs, axis=-1).astype(x.dtype), jnp.concatenate(last, axis=-1)


def run_layers(
    layers: Sequence[RecurrentLayer],
    gates: Float[Array, "B T GH"],
    states: Sequence[State],
    *,
    between: Callable[[Array], Array],
) -> Float[Array, "B T H"]:
    """Runs layers along whole sequences, one after the other: of each all products with inputs are one.

    Args:
      layers: from below.
      gates: what inputs add to the gates of the first.
      states: what each begins with.
      between: what becomes of a layer's outputs before the next one reads them, such as dropout.
    """
    (first, *above), (state, *others) = layers, states
    output, _ = scan_cell(first.step, gates, state, first.weights)
    for layer, state in zip(above, others, strict=True):
        output, _ = scan_cell(layer.step, layer.gates(between(output)), state, layer.weights)
    return output


def step_layers(
    layers: Sequence[RecurrentLayer],
    gates: Float[Array, "B GH"],
    states: Sequence[State],
    *,
    between: Callable[[Array, int], Array],
) -> tuple[State, ...]:
    """Takes one step of each layer, for what `run_layers` cannot run: a decoder that is told what it wrote before.

    Args:
      layers: from below.
      gates: what inputs add to the gates of the first.
      states: what each was before.
      between: what becomes of the output of a layer, by its number, before the next one reads it.
    """
    (first, *above), (state, *others) = layers, states
    after = [first(gates, state)]
    for number, (layer, state) in enumerate(zip(above, others, strict=True)):
        after.append(layer(layer.gates(between(after[-1][0], number)), state))
    return tuple(after)
