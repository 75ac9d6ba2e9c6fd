"""The Conformer against its equations in float64 NumPy, and what must not change its output."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import count_draws, draw, jitted, normal, params_of
from tfx_jax.models import Conformer, ConformerConfig

D, HEADS, KERNEL = 12, 2, 4
CONFIG = ConformerConfig(
    vocab_size=7, num_features=5, num_layers=2, d_model=D, num_heads=HEADS, d_ff=20, kernel_size=KERNEL
)
CONFIG.dropout_rate = CONFIG.attention_dropout_rate = 0.0
FRAMES = normal(0, 3, 23, 5)
NUM_FRAMES = np.array([23, 14, 0], np.int32)
NUM_STEPS = [6, 4, 0]

_run = jitted(lambda model, *args, **options: model(*args, **options), static=["return_attention"])


@functools.cache
def make_model(**overrides):
    """The same parameters each time, none of them zero, and statistics as if it had been trained."""
    config = dataclasses.replace(CONFIG, **overrides)
    model = draw(lambda: Conformer(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)
    move = lambda x: (x + 0.1 * rng.normal(size=x.shape)).astype(np.float32)  # noqa: E731
    is_variance = lambda path: "variance" in jax.tree_util.keystr(path)  # noqa: E731
    moved = jax.tree.map_with_path(lambda path, x: np.abs(move(x)) + 0.1 if is_variance(path) else move(x), state)
    return nnx.merge(graphdef, moved)


def _swish(x):
    return x / (1 + np.exp(-x))


def _norm(x, p):
    centerd = x - x.mean(-1, keepdims=True)
    return centerd / np.sqrt((centerd**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def _convolved(x, kernel, bias):
    """A convolution of 3 x 3 with strides of 2, zeros around, then ReLU: place by place."""
    height, width, _ = x.shape
    padded = np.pad(x, ((1, 2), (1, 2), (0, 0)))
    x = np.zeros((-(-height // 2), -(-width // 2), len(bias)))
    for i, j in np.ndindex(x.shape[:2]):
        x[i, j] = np.einsum("yxc,yxcd->d", padded[2 * i : 2 * i + 3, 2 * j : 2 * j + 3], kernel) + bias
    return np.maximum(x, 0)


def _layer(p, x, maps):
    def half(x, name):
        y = _norm(x, p[f"{name}_residual"]["norm"])
        y = _swish(y @ p[name]["up"] + p[name]["up_bias"]) @ p[name]["down"] + p[name]["down_bias"]
        return x + y / 2

    x = half(x, "first")
    attention, core = p["self_attention"], p["self_attention"]["attention_fn"]
    y, steps, out = _norm(x, p["self_attention_residual"]["norm"]), len(x), 0
    size = D // HEADS
    for head in range(HEADS):
        q, k, v = (y @ attention[n]["kernel"][:, head] + attention[n]["bias"][head] for n in ("query", "key", "value"))
        logits = np.zeros((steps, steps))
        for i in range(steps):
            for j in range(steps):
                angles = [(i - j) / 10_000 ** (2 * pair / D) for pair in range(D // 2)]
                encoding = np.array([wave(angle) for angle in angles for wave in (math.sin, math.cos)])
                r = encoding @ core["relative_key"][:, head]
                logits[i, j] = (q[i] + core["content_bias"][head]) @ k[j] + (q[i] + core["position_bias"][head]) @ r
        weights = np.exp(logits / math.sqrt(size))
        maps.append(weights / weights.sum(-1, keepdims=True))
        out = out + maps[-1] @ v @ attention["out"]["kernel"][head]
    x = x + out + attention["out"]["bias"]

    c = p["convolution"]
    y = _norm(x, p["convolution_residual"]["norm"]) @ c["gated"]["kernel"] + c["gated"]["bias"]
    y = y[:, :D] / (1 + np.exp(-y[:, D:]))
    before, behind = (KERNEL - 1) // 2, KERNEL // 2
    padded = np.pad(y, ((before, behind), (0, 0)))
    y = np.stack([(padded[s : s + KERNEL] * c["kernel"]).sum(0) for s in range(steps)]) + c["kernel_bias"]
    y = (y - c["mean"]) / np.sqrt(c["variance"] + 1e-5) * c["scale"] + c["bias"]
    x = x + _swish(y) @ c["out"]["kernel"] + c["out"]["bias"]
    return _norm(half(x, "second"), p["norm"])


def _oracle(model, frames):
    """Logits and attention maps of one row without padding."""
    params = nnx.to_pure_dict(nnx.state(model))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    s = params["subsampling"]
    x = _convolved(_convolved(frames[..., None], s["first"], s["first_bias"]), s["second"], s["second_bias"])
    x, maps = x.reshape(len(x), -1) @ s["out"]["kernel"] + s["out"]["bias"], []
    for index in range(2):
        x = _layer(jax.tree.map(lambda leaf, index=index: leaf[index], params["encoder_layers"]), x, maps)
    return x @ params["classifier"]["kernel"] + params["classifier"]["bias"], np.stack(maps)


def test_equals_the_equations_in_float64():
    """A row that is full and one that is not."""
    logits, maps = _run(make_model(), FRAMES, NUM_FRAMES, return_attention=True)
    assert (logits.shape, logits.dtype) == ((3, 6, 7), np.float32)
    assert list(maps) == ["encoder/0/self", "encoder/1/self"]
    for row, (length, steps) in enumerate(zip(NUM_FRAMES[:2], NUM_STEPS, strict=False)):
        expected, weights = _oracle(make_model(), FRAMES[row, :length].astype(np.float64))
        np.testing.assert_allclose(logits[row, :steps], expected, atol=5e-5)
        found = np.concatenate([w[row] for w in maps.values()])[:, :steps]
        np.testing.assert_allclose(found[..., :steps], weights, atol=1e-5)
        assert not found[..., steps:].any()


def test_padding_changes_nothing():
    """Neither what stands there, not a bit, nor how much of it there is, nor the other rows."""
    logits = _run(make_model(), FRAMES, NUM_FRAMES)
    assert np.isfinite(logits).all()
    changed = np.where(np.arange(23)[:, None] < NUM_FRAMES[:, None, None], FRAMES, np.float32(np.nan))
    longer = _run(make_model(), np.pad(changed, ((0, 0), (0, 9), (0, 0)), constant_values=9), NUM_FRAMES)
    alone = _run(make_model(), FRAMES[1:2, :14], NUM_FRAMES[1:2])
    changed = _run(make_model(), changed, NUM_FRAMES)
    assert longer.shape == (3, 8, 7)
    for row, steps in enumerate(NUM_STEPS):
        np.testing.assert_array_equal(changed[row, :steps], logits[row, :steps])
        np.testing.assert_allclose(longer[row, :steps], logits[row, :steps], atol=1e-5)
    np.testing.assert_allclose(alone[0], logits[1, :4], atol=1e-5)


def test_training_uses_and_remembers_the_statistics_of_steps_that_exist():
    """Of one layer, its convolution alone, against NumPy; evaluation leaves them as they are."""
    graphdef, state = nnx.split(make_model().encoder_layers.convolution)
    state = jax.tree.map(lambda leaf: np.asarray(leaf)[0], nnx.to_pure_dict(state))
    x, exists = normal(1, 2, 5, D), np.arange(5) < np.array([[5], [3]])

    @jax.jit
    def run(state, x, exists, key):
        convolution = nnx.merge(graphdef, state)
        out = convolution(x, exists, rngs=None if key is None else nnx.Rngs(dropout=key))
        return out, convolution.mean[...], convolution.variance[...]

    _, mean, variance = run(state, x, exists, jax.random.key(0))
    c = jax.tree.map(lambda leaf: leaf.astype(np.float64), state)
    y = x @ c["gated"]["kernel"] + c["gated"]["bias"]
    y = np.where(exists[..., None], y[..., :D] / (1 + np.exp(-y[..., D:])), 0)
    padded = np.pad(y, ((0, 0), ((KERNEL - 1) // 2, KERNEL // 2), (0, 0)))
    y = np.stack([(padded[:, s : s + KERNEL] * c["kernel"]).sum(1) for s in range(5)], 1) + c["kernel_bias"]
    np.testing.assert_allclose(mean, 0.99 * c["mean"] + 0.01 * y[exists].mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, 0.99 * c["variance"] + 0.01 * y[exists].var(0), rtol=1e-5)

    changed = np.where(exists[..., None], x, np.float32(7))
    for key in (jax.random.key(0), None):
        one, other = run(state, x, exists, key), run(state, changed, exists, key)
        np.testing.assert_array_equal(np.asarray(one[0])[exists], np.asarray(other[0])[exists])
    np.testing.assert_array_equal(run(state, x, exists, None)[1], state["mean"])


def test_dropout_draws_and_half_precision_gives_float32():
    model = make_model(dropout_rate=0.5, attention_dropout_rate=0.5, dtype="bfloat16")
    graphdef, state = nnx.split(model)
    state = nnx.to_pure_dict(state)

    def run(seed):
        return nnx.merge(graphdef, state)(FRAMES, NUM_FRAMES, rngs=nnx.Rngs(dropout=jax.random.key(seed)))

    assert count_draws(run, 0) == 1 + 2 * 7
    assert count_draws(lambda: model(FRAMES, NUM_FRAMES)) == 0
    found = jax.eval_shape(run, 0)
    assert (found.shape, found.dtype) == ((3, 6, 7), np.float32)


def test_parameters_by_hand():
    norm, feed_forward = 2 * D, 2 * D * 20 + 20 + D
    attention = 4 * (D * D + D) + D * D + 2 * D
    convolution = (D * 2 * D + 2 * D) + (KERNEL * D + D) + 2 * D + (D * D + D)
    statistics = 2 * D
    layer = 2 * feed_forward + attention + convolution + 5 * norm + statistics
    subsampling = (9 * D + D) + (9 * D * D + D) + (2 * D * D + D)
    expected = subsampling + 2 * layer + D * 7 + 7
    assert sum(leaf.size for leaf in jax.tree.leaves(params_of(make_model()))) == expected


@pytest.mark.parametrize(("name", "millions"), [("Conformer-S", 8.7), ("Conformer-M", 27.3), ("Conformer-L", 115.1)])
def test_published_sizes(name, millions):
    """Of the encoder and a layer for CTC; the paper's 10.3, 30.7 and 118.8 M are with the LSTM that writes."""
    model = jax.eval_shape(lambda: nnx.state(Conformer(ConformerConfig.published(name), rngs=nnx.Rngs(0)), nnx.Param))
    assert round(sum(leaf.size for leaf in jax.tree.leaves(model)) / 1e6, 1) == millions
    with pytest.raises(ValueError, match=r"^no published Conformer is called 'XL'; there are Conformer-S, "):
        ConformerConfig.published("XL")


@pytest.mark.parity
def test_a_layer_is_that_of_transformers():
    """`Wav2Vec2ConformerEncoderLayer` with relative positions, the parameters random."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
    config = theirs.Wav2Vec2ConformerConfig(
        hidden_size=D,
        num_attention_heads=HEADS,
        intermediate_size=20,
        hidden_act="swish",
        conv_depthwise_kernel_size=5,
        position_embeddings_type="relative",
        layer_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    layer = theirs.Wav2Vec2ConformerEncoderLayer(config).eval()
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.2 * torch.rand_like(tensor))
    x = normal(2, 2, 6, D)
    positions = theirs.Wav2Vec2ConformerRelPositionalEmbedding(config)(torch.tensor(x))
    with torch.no_grad():
        expected = layer(torch.tensor(x), relative_position_embeddings=positions)
    expected = (expected[0] if isinstance(expected, tuple) else expected).numpy()

    model = make_model(num_layers=1, kernel_size=5)
    ours = _from_torch({name: tensor.numpy() for name, tensor in layer.state_dict().items()})
    graphdef, state = nnx.split(model.encoder_layers)
    assert jax.tree.map(np.shape, ours) == jax.tree.map(lambda leaf: leaf.shape[1:], nnx.to_pure_dict(state))
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, jnp.ones(x.shape[:2], bool))[0])
    found = run(ours, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def _from_torch(tensors):
    """Their names and shapes as ours."""

    def norm(name):
        return {"scale": tensors[f"{name}.weight"], "bias": tensors[f"{name}.bias"]}

    def half(name, ours):
        up, down = f"{name}.intermediate_dense", f"{name}.output_dense"
        return {
            ours: {
                "up": tensors[f"{up}.weight"].T,
                "up_bias": tensors[f"{up}.bias"],
                "down": tensors[f"{down}.weight"].T,
                "down_bias": tensors[f"{down}.bias"],
            },
            f"{ours}_residual": {"norm": norm(f"{name}_layer_norm")},
        }

    def projection(name):
        kernel = tensors[f"self_attn.linear_{name}.weight"].T.reshape(D, HEADS, -1)
        return {"kernel": kernel, "bias": tensors[f"self_attn.linear_{name}.bias"].reshape(HEADS, -1)}

    conv = "conv_module"
    return {
        **half("ffn1", "first"),
        **half("ffn2", "second"),
        "self_attention_residual": {"norm": norm("self_attn_layer_norm")},
        "self_attention": {
            **{ours: projection(name) for ours, name in (("query", "q"), ("key", "k"), ("value", "v"))},
            "out": {
                "kernel": tensors["self_attn.linear_out.weight"].T.reshape(HEADS, -1, D),
                "bias": tensors["self_attn.linear_out.bias"],
            },
            "attention_fn": {
                "relative_key": tensors["self_attn.linear_pos.weight"].T.reshape(D, HEADS, -1),
                "content_bias": tensors["self_attn.pos_bias_u"],
                "position_bias": tensors["self_attn.pos_bias_v"],
            },
        },
        "convolution_residual": {"norm": norm(f"{conv}.layer_norm")},
        "convolution": {
            "gated": {
                "kernel": tensors[f"{conv}.pointwise_conv1.weight"][..., 0].T,
                "bias": np.zeros(2 * D, np.float32),
            },
            "kernel": tensors[f"{conv}.depthwise_conv.weight"][:, 0].T,
            "kernel_bias": np.zeros(D, np.float32),
            "scale": tensors[f"{conv}.batch_norm.weight"],
            "bias": tensors[f"{conv}.batch_norm.bias"],
            "mean": tensors[f"{conv}.batch_norm.running_mean"],
            "variance": tensors[f"{conv}.batch_norm.running_var"],
            "out": {
                "kernel": tensors[f"{conv}.pointwise_conv2.weight"][..., 0].T,
                "bias": np.zeros(D, np.float32),
            },
        },
        "norm": norm("final_layer_norm"),
    }
