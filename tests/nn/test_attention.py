"""Multi-head attention against the paper's equations, in float64 and one head at a time."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import draw, initial, jitted, normal, params_of
from tfx_jax.functional import dot_product_attention
from tfx_jax.nn import LayerNorm, Linear, MultiHeadAttention, RMSNorm
from tfx_jax.nn.attention import AttentionConfig, AttentionOptions, RotaryConfig

B, T, S, D, N, K, H, U = 2, 5, 7, 12, 4, 2, 3, 6
D_KEY, D_VALUE, D_OUT = 8, 10, 9
INPUTS = normal(2, B, T, D), normal(3, B, S, D_KEY), normal(4, B, S, D_VALUE)
MASK = np.ones((B, 1, T, S), bool)
"""The second sentence ends after 3 keys, and one query of the first sees nothing."""
MASK[1, ..., 3:] = False
MASK[0, 0, 2] = False


def _shapes(layer):
    return jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(nnx.state(layer)))


def _abstract(*sizes, **options):
    return nnx.eval_shape(lambda: MultiHeadAttention(*sizes, **options, rngs=nnx.Rngs(0)))


@functools.cache
def _unequal(**options):
    """A layer in which every size is different, and biases are not zero."""
    options = {"d_k": H, "d_v": U, "num_kv_heads": K, "use_bias": True} | options
    sizes = {"d_key_input": D_KEY, "d_value_input": D_VALUE, "d_out": D_OUT}
    return draw(lambda: MultiHeadAttention(D, N, **sizes, **options, rngs=nnx.Rngs(0)), stddev=0.5)


@jitted
def _attend(layer, queries, keys, values, mask):
    """The output and the weights, and the output that is computed without asking for weights."""
    with_weights = layer(queries, keys, values, mask=mask, return_weights=True)
    return *with_weights, layer(queries, keys, values, mask=mask)


def _oracle(layer, queries, keys, values, mask):
    """Section 3.2.2: head_n = attention(x Wq_n, memory Wk_n, memory Wv_n); the heads side by side, times Wo."""
    params = params_of(layer, np.float64)

    def project(name, x, head):
        projection = params[name]
        return np.asarray(x, np.float64) @ projection["kernel"][:, head] + projection["bias"][head]

    heads, weights = [], np.zeros((B, N, T, S))
    for head in range(N):
        group = head // (N // K)
        query, key, value = (
            project("query", queries, head),
            project("key", keys, group),
            project("value", values, group),
        )
        logits = np.where(mask[:, 0], query @ key.swapaxes(1, 2) / math.sqrt(H), -np.inf)
        scores = np.where(mask[:, 0], np.exp(logits - logits.max(-1, keepdims=True, initial=-1e9)), 0)
        weights[:, head] = scores / np.maximum(scores.sum(-1, keepdims=True), 1e-300)
        heads.append(weights[:, head] @ value)
    kernel = params["out"]["kernel"].reshape(N * U, D_OUT)
    return np.concatenate(heads, -1) @ kernel + params["out"]["bias"], weights


def test_equals_paper_equations():
    out, weights, without_weights = _attend(_unequal(), *INPUTS, MASK)
    want, want_weights = _oracle(_unequal(), *INPUTS, MASK)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(weights, want_weights, atol=1e-6)
    np.testing.assert_array_equal(out, without_weights)


def test_projecting_the_memory_ahead_changes_nothing():
    x, keys, values = INPUTS
    project = jitted(lambda layer: layer.project_memory(keys, values))
    ahead = jitted(lambda layer, *memory: layer.attend(x, *memory, mask=MASK))(_unequal(), *project(_unequal()))
    np.testing.assert_array_equal(ahead, _attend(_unequal(), *INPUTS, MASK)[2])


def test_memory_defaults():
    x, memory = normal(3, B, T, D), normal(4, B, T, D)

    @jitted
    def run(layer):
        itself = layer(x), layer(x, x, x)
        return itself, (layer(x, memory), layer(x, memory, memory)), layer(x, memory, x)

    itself, one_memory, values_of_another = run(draw(lambda: MultiHeadAttention(D, N, rngs=nnx.Rngs(0))))
    np.testing.assert_array_equal(*itself)
    np.testing.assert_array_equal(*one_memory)
    assert np.abs(one_memory[0] - values_of_another).max() > 1e-2


@pytest.mark.parametrize(
    ("d_model", "num_heads", "d_k", "d_v", "want_k", "want_v"),
    [
        (512, 8, None, None, 64, 64),  # base
        (512, 1, None, None, 512, 512),  # row A
        (512, 32, None, None, 16, 16),
        (512, 8, 16, 64, 16, 64),  # row B
        (512, 8, 16, None, 16, 16),
        (1024, 16, None, None, 64, 64),  # big
        (10, 4, 3, None, 3, 3),  # d_model is not a multiple of the heads, and need not be
    ],
)
def test_shapes_follow_table_3(d_model, num_heads, d_k, d_v, want_k, want_v):
    keys_and_queries = {"kernel": (d_model, num_heads, want_k)}
    want = {
        "query": keys_and_queries,
        "key": keys_and_queries,
        "value": {"kernel": (d_model, num_heads, want_v)},
        "out": {"kernel": (num_heads, want_v, d_model)},
    }
    chex.assert_trees_all_equal(_shapes(_abstract(d_model, num_heads, d_k=d_k, d_v=d_v)), want)


def test_every_size_can_differ():
    want = {
        "query": {"kernel": (D, N, H), "bias": (N, H)},
        "key": {"kernel": (D_KEY, K, H), "bias": (K, H)},
        "value": {"kernel": (D_VALUE, K, U), "bias": (K, U)},
        "out": {"kernel": (N, U, D_OUT), "bias": (D_OUT,)},
    }
    chex.assert_trees_all_equal(_shapes(_unequal()), want)


def test_values_are_made_from_what_keys_are_made_from():
    shapes = _shapes(_abstract(D, N, d_key_input=D_KEY))
    assert shapes["value"]["kernel"][0] == shapes["key"]["kernel"][0] == D_KEY


def test_kernels_start_glorot_uniform_over_all_heads():
    """Those of queries, keys and values with half the variance."""
    layer = initial(lambda: MultiHeadAttention(64, 8, d_k=32, d_v=16, rngs=nnx.Rngs(0)))
    starts = ((layer.query, 64 + 8 * 32, 0.5), (layer.value, 64 + 8 * 16, 0.5), (layer.out, 8 * 16 + 64, 1.0))
    for projection, fans, gain in starts:
        limit = math.sqrt(gain * 6 / fans)
        size = np.abs(np.asarray(projection.kernel))
        assert 0.99 * limit < size.max() <= limit
        np.testing.assert_allclose(size.mean(), limit / 2, rtol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "d_model=12 is not divisible by num_heads=5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        _abstract(D, **options)


def test_attention_fn_receives_what_was_projected_and_every_option():
    received = {}

    def attention_fn(query, key, value, **options):
        received.update(options, shapes=(query.shape, key.shape, value.shape))
        return jnp.zeros((*query.shape[:3], value.shape[-1]))

    def attend(x, memory, options):
        sizes = {"d_k": H, "d_v": U, "num_kv_heads": K}
        layer = MultiHeadAttention(D, N, **sizes, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        layer(x, memory, **options, is_causal=True)
        assert received.pop("shapes") == ((B, T, N, H), (B, S, K, H), (B, S, K, U))
        assert received.keys() == options.keys() | {"is_causal"}, "no dropout, no weights: nothing is said of them"
        assert received.pop("is_causal") is True
        assert all(received[name] is value for name, value in options.items())

    options = {
        "bias": np.ones((1, N, T, S), np.float32),
        "mask": MASK,
        "segment_ids": (np.ones((B, T), int), np.ones((B, S), int)),
    }
    jax.eval_shape(attend, normal(0, B, T, D), normal(1, B, S, D), options)


def test_any_attention_plugs_in():
    scaled = functools.partial(dot_product_attention, scale=0.1)

    @jitted
    def run(layer, plugged):
        projections = zip((layer.query, layer.key, layer.value), INPUTS, strict=True)
        query, key, value = (project(x) for project, x in projections)
        return plugged(*INPUTS), layer.out(scaled(query, key, value)), layer(*INPUTS)

    got, want, plain = run(_unequal(), _unequal(attention_fn=scaled))
    np.testing.assert_array_equal(got, want)
    assert np.abs(got - plain).max() > 1e-2


@pytest.mark.parametrize(
    ("axes", "queries", "keys", "out", "weights"),
    [
        (None, (3, 121, 16), (3, 100, 7), (3, 121, 16), (3, 500, 121, 100)),
        ((1,), (3, 121, 16), (3, 100, 7), (3, 121, 16), (3, 500, 121, 100)),
        ((-2,), (3, 121, 16), (3, 100, 7), (3, 121, 16), (3, 500, 121, 100)),
        ((2, 3), (3, 5, 3, 4, 16), (3, 5, 2, 2, 7), (3, 5, 3, 4, 16), (3, 5, 500, 3, 4, 2, 2)),
        ((-4, -2), (3, 5, 3, 4, 16), (3, 2, 3, 1, 7), (3, 5, 3, 4, 16), (3, 3, 500, 5, 4, 2, 1)),
    ],
    ids=str,
)
def test_attention_axes(axes, queries, keys, out, weights):
    """The first sizes are those of our second source document: 500 heads of size 2, widths 16 and 7."""

    def attend(x, memory):
        layer = MultiHeadAttention(16, 500, d_k=2, d_key_input=7, attention_axes=axes, rngs=nnx.Rngs(0))
        return layer(x, memory, return_weights=True)

    got = jax.eval_shape(attend, normal(0, *queries), normal(1, *keys))
    assert tuple(x.shape for x in got) == (out, weights)


def test_drops_weights_only_with_rngs():
    @jitted
    def run(layer, dropping):
        rngs = nnx.Rngs(dropout=0)
        silent = dropping(*INPUTS), layer(*INPUTS, rngs=nnx.Rngs(params=0))
        drawn = dropping(*INPUTS, rngs=rngs), dropping(*INPUTS, rngs=rngs), dropping(*INPUTS, rngs=nnx.Rngs(dropout=0))
        return layer(*INPUTS), silent, drawn, dropping(*INPUTS, rngs=nnx.Rngs(0))

    plain, silent, (first, second, again), other_stream = run(_unequal(), _unequal(dropout_rate=0.5))
    for found in silent:
        np.testing.assert_array_equal(found, plain)
    np.testing.assert_array_equal(again, first)
    assert min(np.abs(first - plain).max(), np.abs(first - second).max()) > 1e-2
    assert np.isfinite(other_stream).all()


def test_bfloat16_computes_in_bfloat16_on_float32_parameters():
    half = _unequal(dtype=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(half)), jnp.float32)
    out, weights, _ = _attend(half, *INPUTS, MASK)
    chex.assert_type([out, weights], [jnp.bfloat16, jnp.float32])
    want, want_weights, _ = _attend(_unequal(), *INPUTS, MASK)
    np.testing.assert_allclose(out.astype(np.float32), want, atol=0.15)
    np.testing.assert_allclose(weights, want_weights, atol=0.03)
    assert np.abs(out.astype(np.float32) - want).max() > 1e-4, "it was not computed in bfloat16"


def test_every_parameter_gets_a_gradient():
    gradient = jax.grad(lambda layer: jnp.square(layer(*INPUTS, is_causal=True)).sum())
    gradients = params_of(jitted(gradient)(_unequal()))
    # Adding one vector to every key moves all logits of a query alike, which softmax ignores.
    np.testing.assert_allclose(gradients["key"].pop("bias"), 0, atol=1e-3)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 1e-2


@pytest.mark.parametrize("is_training", [False, True])
def test_an_attention_with_running_statistics_is_told_when_it_trains(is_training):
    received = {}

    def attention_fn(query, key, value, **options):
        received.update(options)
        return jnp.zeros((*query.shape[:3], value.shape[-1]))

    attention_fn.has_running_statistics = True

    def attend(x):
        layer = MultiHeadAttention(D, N, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        layer(x, rngs=nnx.Rngs(0) if is_training else None)

    jax.eval_shape(attend, normal(0, B, T, D))
    assert received.get("is_training") is (True if is_training else None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"num_heads": 8, "in_features": 512}, "got unexpected arguments: in_features; Flax's in_features is d_model"),
        ({"d_model": 512, "num_heads": 8, "use_biass": True, "decode": False}, "got .* arguments: use_biass, decode;"),
        ({"d_model": 512}, r"needs d_model and num_heads: write MultiHeadAttention\(512, 8, rngs=rngs\)$"),
    ],
)
def test_arguments_of_flax_are_named_with_ours(arguments, problem):
    with pytest.raises(TypeError, match=f"^MultiHeadAttention {problem}"):
        MultiHeadAttention(**arguments, rngs=nnx.Rngs(0))


TOKENS = np.ones((B, T), bool)
"""The second sentence has padding in front and inside."""
TOKENS[1, [0, 2]] = False


@functools.cache
def _over_tokens(**options):
    """A layer of self-attention in which queries, keys and values have different sizes."""
    sizes = {"d_k": H, "d_v": U, "num_kv_heads": K, "use_bias": True}
    return draw(lambda: MultiHeadAttention(D, N, **sizes, **options, rngs=nnx.Rngs(0)), stddev=0.5)


@jitted
def _attend_causally(layer, x):
    return layer(x, mask=TOKENS[:, None, None, :], is_causal=True)


def _heads_of(params, name, x, width):
    """The projection of one sentence without padding in float64, its convolution and SiLU, token by token."""
    heads = np.einsum("td,dnh->tnh", x.astype(np.float64), params[name]["kernel"]) + params[name]["bias"]
    if not width:
        return heads
    kernel = params[f"{name}_convolution"]["kernel"]
    before = np.concatenate([np.zeros((width - 1, *heads.shape[1:])), heads])
    sums = np.stack([(before[t : t + width] * kernel).sum(axis=0) for t in range(len(heads))])
    return sums / (1 + np.exp(-sums))


def _self_attention_oracle(layer, x, width=0):
    """Of a sentence without padding: causal attention of what is projected, which a gate multiplies."""
    params = params_of(layer, np.float64)
    query, key, value = (_heads_of(params, name, x, width) for name in ("query", "key", "value"))
    key, value = (np.repeat(part, N // K, axis=1) for part in (key, value))
    logits = np.einsum("tnh,snh->nts", query, key) / math.sqrt(H)
    scores = np.exp(logits - logits.max()) * np.tri(len(x))
    out = np.einsum("nts,snu->tnu", scores / scores.sum(axis=-1, keepdims=True), value)
    if "output_gate" in params:
        gate = np.einsum("td,dnu->tnu", x.astype(np.float64), params["output_gate"]["kernel"])
        out = out / (1 + np.exp(-gate - params["output_gate"]["bias"]))
    return np.einsum("tnu,nud->td", out, params["out"]["kernel"]) + params["out"]["bias"]


@pytest.mark.parametrize("options", [{"convolution_width": 3, "use_output_gate": True}], ids=str)
def test_convolutions_and_gates_are_those_of_the_tokens_without_padding(options):
    layer, x = _over_tokens(**options), np.where(TOKENS[..., None], normal(5, B, T, D), np.nan)
    got = _attend_causally(layer, x)
    for row in range(B):
        want = _self_attention_oracle(layer, x[row][TOKENS[row]], options.get("convolution_width", 0))
        np.testing.assert_allclose(got[row][TOKENS[row]], want, rtol=1e-5, atol=1e-5)


def test_queries_of_a_low_rank_and_values_with_a_norm():
    def make():
        norms = {"query_rank_norm": RMSNorm(3), "value_norm": RMSNorm(U)}
        return MultiHeadAttention(D, N, d_k=H, d_v=U, query_rank=3, **norms, rngs=nnx.Rngs(0))

    layer, x = draw(make, stddev=0.5), np.float64(INPUTS[0])
    params = params_of(layer, np.float64)

    def normalized(x, name):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * params[name]["scale"]

    ranks = normalized(x @ params["query_down"]["kernel"], "query_rank_norm")
    query = np.einsum("btr,rnh->btnh", ranks, params["query"]["kernel"])
    key, value = (np.einsum("btd,dnh->btnh", x, params[name]["kernel"]) for name in ("key", "value"))
    scores = np.exp(np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(H))
    out = np.einsum("bnts,bsnu->btnu", scores / scores.sum(axis=-1, keepdims=True), normalized(value, "value_norm"))
    want = np.einsum("btnu,nud->btd", out, params["out"]["kernel"])
    np.testing.assert_allclose(jitted(lambda layer: layer(INPUTS[0]))(layer), want, atol=1e-5)


def test_heads_that_share_queries_and_keys_with_a_norm_and_a_gate_of_outputs():
    def make():
        options = {"num_key_heads": K, "output_norm": RMSNorm(U), "use_output_gate": True, "gate_fn": jax.nn.silu}
        return MultiHeadAttention(D, N, d_k=H, d_v=U, **options, rngs=nnx.Rngs(0))

    layer, x = draw(make, stddev=0.5), np.float64(INPUTS[0])
    params = params_of(layer, np.float64)
    names = ("query", "key", "value", "output_gate")
    query, key, value, gate = (np.einsum("btd,dnh->btnh", x, params[name]["kernel"]) for name in names)
    assert [part.shape[2] for part in (query, key, value, gate)] == [K, K, N, N]
    query, key = (np.repeat(part, N // K, axis=2) for part in (query, key))
    scores = np.exp(np.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(H))
    out = np.einsum("bnts,bsnu->btnu", scores / scores.sum(axis=-1, keepdims=True), value)
    out = out / np.sqrt((out**2).mean(axis=-1, keepdims=True) + 1e-6) * params["output_norm"]["scale"]
    want = np.einsum("btnu,nud->btd", out * gate / (1 + np.exp(-gate)), params["out"]["kernel"])
    np.testing.assert_allclose(jitted(lambda layer: layer(INPUTS[0]))(layer), want, atol=1e-5)


@pytest.mark.parametrize("options", [{"num_key_heads": 3}, {"num_key_heads": 2, "num_kv_heads": 2}])
def test_shared_queries_and_keys_divide_the_heads(options):
    with pytest.raises(ValueError, match=f"num_key_heads={options['num_key_heads']} must divide num_heads={N}, and"):
        MultiHeadAttention(D, N, d_k=H, **options, rngs=nnx.Rngs(0))


def test_a_convolution_is_for_the_tokens_of_one_sequence():
    layer, x = _over_tokens(convolution_width=3), normal(5, B, T, D)
    with pytest.raises(ValueError, match=r"a short convolution is for self-attention only: .*convolution_width=0"):
        layer(x, x)
    with pytest.raises(ValueError, match=r"takes only a padding mask, \[B, 1, 1, S\], got shape \(2, 1, 5, 5\): use"):
        layer(x, mask=np.ones((B, 1, T, T), bool))
    with pytest.raises(ValueError, match="convolution_width must be at least 0, got -1"):
        _abstract(D, N, convolution_width=-1)
    with pytest.raises(ValueError, match=r"convolution_width must be 0 with attention_axes, .* got 2"):
        _abstract(D, N, convolution_width=2, attention_axes=(1, 2))


@pytest.mark.parametrize(
    ("config", "d_k", "size"),
    [(AttentionConfig(), 7, 7), (AttentionConfig("latent", AttentionOptions(rope_size=3)), 8, 3)],
    ids=["dense", "latent"],
)
def test_rotary_positions_need_pairs_of_features(config, d_k, size):
    rngs = nnx.Rngs(0)
    attention_fn = config.make(num_heads=1, d_k=d_k, rngs=rngs)
    with pytest.raises(ValueError, match=f"rotary positions rotate pairs of features, but a head has {size}: set an"):
        MultiHeadAttention(8, 1, d_k=d_k, attention_fn=attention_fn, rotary=RotaryConfig(), rngs=rngs)


@pytest.mark.parametrize(
    "rotary",
    [
        RotaryConfig(scaling="dynamic", original_max_length=2, factor=2.0),
        RotaryConfig(scaling="longrope", short_factors=(1.0,), long_factors=(2.0,)),
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_that_depend_on_a_length_take_no_packed_rows(rotary):
    layer = MultiHeadAttention(8, 1, d_k=2 if rotary.short_factors else 8, rotary=rotary, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"rotary\.scaling='{rotary.scaling}' depends on the length of a text and"):
        layer(np.ones((1, 4, 8), np.float32), segment_ids=np.array([[1, 2, 2, 2]]))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 3), (2, 3), (3, 1), (3, 3)])
def test_positions_are_one_for_each_token(num_queries, num_keys):
    """A single position would rotate all keys of a memory alike."""
    x, memory, positions = normal(3, 1, num_queries, 8), normal(4, 1, num_keys, 8), np.arange(num_queries)[None]

    def attend():
        return MultiHeadAttention(8, 2, rotary=RotaryConfig(), rngs=nnx.Rngs(0))(x, memory, positions=positions)

    if num_queries == num_keys:
        assert jax.eval_shape(attend).shape == x.shape
        return
    with pytest.raises(ValueError, match=rf"one entry for each of {num_keys} tokens, got shape \(1, {num_queries}\)"):
        jax.eval_shape(attend)


def test_what_a_flax_user_types_works():
    def shapes():
        rngs = nnx.Rngs(0)
        x = Linear(3, 4, rngs=rngs)(jnp.ones((2, 3)))
        return RMSNorm(4, rngs=rngs)(LayerNorm(4, rngs=rngs)(x)), Linear(3, 4, rngs=rngs).kernel[...]

    out, kernel = jax.eval_shape(shapes)
    assert (out.shape, kernel.shape) == ((2, 4), (3, 4))


@pytest.mark.parity
def test_equals_the_gated_attention_of_qwen3_next():
    """With norms of queries and keys, grouped queries, and positions of which none rotates."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = {"hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H}
    config = modeling.Qwen3NextConfig(**sizes, attention_bias=False, attn_implementation="eager")
    reference, x = modeling.Qwen3NextAttention(config, 0).float(), normal(5, B, T, D)
    norms = {f"{name}_norm": RMSNorm(H, epsilon=config.rms_norm_eps, scale_offset=1.0) for name in ("query", "key")}
    layer = draw(
        lambda: MultiHeadAttention(D, N, d_k=H, num_kv_heads=K, use_output_gate=True, **norms, rngs=nnx.Rngs(0))
    )
    params = jax.tree.map(torch.tensor, params_of(layer))
    kernels = {name: params[name]["kernel"] for name in ("query", "key", "value", "output_gate")}
    matrices = {
        "q_proj": torch.cat([kernels["query"], kernels["output_gate"]], dim=-1).reshape(D, -1).T,
        "k_proj": kernels["key"].reshape(D, -1).T,
        "v_proj": kernels["value"].reshape(D, -1).T,
        "o_proj": params["out"]["kernel"].reshape(-1, D).T,
        "q_norm": params["query_norm"]["scale"],
        "k_norm": params["key_norm"]["scale"],
    }
    reference.load_state_dict({f"{name}.weight": matrix for name, matrix in matrices.items()})
    upright = torch.ones(1, T, H - 1), torch.zeros(1, T, H - 1)  # cosines and sines of an even number of features
    mask = torch.full((T, T), -1e30).triu(1)[None, None]
    want, _ = reference(torch.tensor(x), upright, mask)
    got = jitted(lambda layer: layer(x, is_causal=True))(layer)
    np.testing.assert_allclose(got, want.detach(), rtol=1e-5, atol=1e-5)
