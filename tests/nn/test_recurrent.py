"""Recurrent layers against PyTorch's, which share the order of the gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import draw, jitted, normal, params_of
from tfx_jax.functional.recurrent import scan_cell
from tfx_jax.nn.recurrent import CELLS, BidirectionalLayer, RecurrentLayer, run_layers, step_layers

B, S, D, INPUTS = 3, 7, 6, 5
LENGTHS = np.array([7, 4, 1])
MASK = np.arange(S) < LENGTHS[:, None]


def torch_weights(params, suffix):
    """By PyTorch's names: [G H, I], [G H, H] and two offsets, of which ours is the first."""
    weights = {"weight_ih": params["kernel"].T, "weight_hh": params["recurrent"].T, "bias_ih": params["bias"]}
    weights["bias_hh"] = np.zeros_like(params["bias"])
    return {f"{name}_{suffix}": weight for name, weight in weights.items()}


def run_torch(torch, module, weights, x):
    """Outputs at existing positions, zeros elsewhere, and the last of either direction, [B, directions * H]."""
    module.load_state_dict({name: torch.tensor(np.array(weight)) for name, weight in weights.items()})
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.tensor(x), torch.tensor(LENGTHS), batch_first=True)
    with torch.no_grad():
        out, last = module(packed)
    out, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    last = last[0] if isinstance(last, tuple) else last
    directions = 2 if module.bidirectional else 1
    return out.numpy(), np.concatenate([each.numpy() for each in last[-directions:]], axis=-1)


@pytest.mark.parity
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_is_that_of_pytorch(cell):
    """Its GRU resets behind the product, which is the same where U_n is diagonal."""
    torch = pytest.importorskip("torch")
    size = 5
    layer = draw(lambda: RecurrentLayer(CELLS[cell], D, size, rngs=nnx.Rngs(0)))
    if cell == "gru":
        diagonal = np.tile(np.eye(size, dtype=np.float32), 3) + (np.arange(3 * size) < 2 * size)
        layer.recurrent = nnx.Param(jax.device_put(params_of(layer)["recurrent"] * np.minimum(diagonal, 1)))

    def read(layer, x, state):
        return scan_cell(CELLS[cell].step, layer.gates(x), state, layer.weights, MASK)

    x = normal(1, B, S, D)
    out, (last, *_) = jitted(read)(layer, x, (np.zeros((B, size), np.float32),) * CELLS[cell].num_states)
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](D, size, batch_first=True)
    wanted, wanted_last = run_torch(torch, module, torch_weights(params_of(layer), "l0"), x)
    np.testing.assert_allclose(out * MASK[..., None], wanted, atol=1e-6)
    np.testing.assert_allclose(last, wanted_last, atol=1e-6)


@pytest.mark.parity
def test_two_bidirectional_layers_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    layers = [
        draw(lambda: BidirectionalLayer(CELLS["lstm"], D, input_size=INPUTS, rngs=nnx.Rngs(0)), seed=1),
        draw(lambda: BidirectionalLayer(CELLS["lstm"], D, rngs=nnx.Rngs(0)), seed=2),
    ]

    def read(layers, x):
        for layer in layers:
            x, last = layer(x, MASK)
        return x, last

    x, weights = normal(3, B, S, INPUTS), {}
    for number, layer in enumerate(layers):
        params = params_of(layer)
        weights |= torch_weights(params["forward"], f"l{number}")
        weights |= torch_weights(params["backward"], f"l{number}_reverse")
    out, last = jitted(read)(layers, x)
    module = torch.nn.LSTM(INPUTS, D // 2, 2, batch_first=True, bidirectional=True)
    wanted, wanted_last = run_torch(torch, module, weights, x)
    np.testing.assert_allclose(out * MASK[..., None], wanted, atol=1e-6)
    np.testing.assert_allclose(last, wanted_last, atol=1e-6)


@pytest.mark.parametrize("is_dropping", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_run_of_layers_is_a_loop_over_steps(cell, is_dropping):
    """What stands between layers is between each two of them, and not behind the last."""
    layers = [draw(lambda: RecurrentLayer(CELLS[cell], D, D, rngs=nnx.Rngs(0)), seed=seed) for seed in range(3)]
    x, states = normal(1, B, S, D), normal(2, 3, CELLS[cell].num_states, B, D)
    kept = np.maximum(normal(3, 3, B, D), 0) if is_dropping else None

    def run(layers, x, states):
        states = [tuple(state) for state in states]
        return run_layers(layers, layers[0].gates(x), states, between=lambda y: y * y, kept=kept)

    def loop(layers, x, states):
        now, outputs = [tuple(state) for state in states], []
        for step in range(S):
            now = step_layers(layers, layers[0].gates(x[:, step]), now, between=lambda y, _: y * y, kept=kept)
            outputs.append(now[-1][0])
        return jnp.stack(outputs, axis=1)

    np.testing.assert_allclose(jitted(run)(layers, x, states), jitted(loop)(layers, x, states), atol=1e-6)
