# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The attention family in pictures
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/attention_family.ipynb)
#
# One idea a section, and a picture of each:
#
# 1. a dictionary with soft answers,
# 2. kernel regression,
# 3. how to score: dot, general, additive,
# 4. why divide by the root of d,
# 5. masks,
# 6. heads and axes,
# 7. positions,
# 8. looking at less than everything,
# 9. random features,
# 10. memory,
# 11. hard attention,
# 12. one function, any framework.
#
# All the attentions of `tfx_jax.functional` are called alike: `attend(query, key, value, bias, mask, ...)`, with arrays
# `[batch, length, heads, size]`. You need to know NumPy arrays; the [translation notebook](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/translation.ipynb)
# is the place to meet attention for the first time.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Setup: installs tfx_jax where it is missing, as on Colab and Kaggle
import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys

VERSION = "main"  # what is installed where there is no tfx_jax yet, as on Colab: of a release, its tag

if importlib.util.find_spec("tfx_jax") is None:
    has_tpu = any(pathlib.Path("/dev").glob("accel*")) or pathlib.Path("/dev/vfio/0").exists()
    jax_for_device = "jax[cuda13]" if shutil.which("nvidia-smi") else "jax[tpu]" if has_tpu else "jax"
    package = f"tfx-jax[parquet] @ git+https://github.com/tfx-jax/tfx-jax@{VERSION}"
    loaded = {name: importlib.metadata.version(name) for name in ("jax", "numpy") if name in sys.modules}
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package, jax_for_device], check=True)
    if any(importlib.metadata.version(name) != version for name, version in loaded.items()):
        raise SystemExit("jax or numpy is another now: choose Runtime, Restart session, then run the notebook again")

# %%
import functools
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

IS_TEST = os.environ.get("TFX_JAX_VARIANT") == "test"  # fewer repetitions, nothing else

jax.config.update("jax_default_matmul_precision", "float32")  # equalities are checked below, on accelerators too
random = np.random.default_rng(0)


def normal(*shape):
    """Draws float32 numbers of mean 0 and variance 1."""
    return jnp.asarray(random.normal(size=shape), jnp.float32)


def show_map(axes, weights, title, largest=None):
    """Draws weights [T, S]: queries downwards, keys to the right, white is 0 and black is `largest`."""
    axes.imshow(weights, cmap="gray_r", vmin=0, vmax=largest, interpolation="nearest")
    axes.set(title=title, xlabel="key", ylabel="query")


# %% [markdown]
# ## 1. A dictionary with soft answers
#
# A dictionary finds the one key that equals the query. *Soft* lookup finds all of them a little: scores $a(q, k_i)$ say
# how well each key fits, softmax makes weights of the scores, and the answer is a weighted mean of the values
# ([Murphy, 2022](https://probml.github.io/book1), section 15.4):
#
# $$\operatorname{Attn}(q, (k_1, v_1) \ldots (k_m, v_m)) = \sum_i \alpha_i v_i, \qquad
# \alpha = \operatorname{softmax}(a(q, k_1) \ldots a(q, k_m))$$
#
# Everything in this notebook is a choice of $a$, or of the keys that are looked at. Here $a$ is the negative distance
# of two numbers, times a sharpness.

# %%
from tfx_jax.functional import attention_from_logits

dictionary = {1.0: 10.0, 2.0: 40.0, 3.0: 20.0, 4.0: 30.0}
keys, values = jnp.array(list(dictionary)), jnp.array(list(dictionary.values()))
QUERY = 2.2  # no key, but near one

figure, panels = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
for panel, sharpness in zip(panels, (0.5, 2.0, 20.0), strict=True):
    scores = -sharpness * jnp.abs(QUERY - keys)
    answer, weights = attention_from_logits(scores[None, None, None], values[None, :, None, None])
    panel.bar([f"{key:g}: {value:g}" for key, value in dictionary.items()], weights.ravel(), color="black")
    panel.set(title=f"sharpness {sharpness:g}: answer {answer.item():.1f}", xlabel="key: value")
panels[0].set_ylabel(f"weight for query {QUERY}")
plt.show()

# %% [markdown]
# From left to right the mean of all values turns into an ordinary lookup. In between, the answer is smooth in the query
# and in the keys, so both can be learned by gradient descent.

# %% [markdown]
# ### Exercise
#
# How sharp must the lookup be for an answer within 0.1 of 40, the value of the nearest key?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for sharpness in (1, 2, 4, 8, 9, 16):
    scores = -sharpness * jnp.abs(QUERY - keys)
    answer, _ = attention_from_logits(scores[None, None, None], values[None, :, None, None])
    print(f"sharpness {sharpness:>2}: {answer.item():.3f}")
# About 9: the second key, 0.6 further away, then has exp(-0.6 * 9) of the weight of the first, 1 in 220.

# %% [markdown]
# ## 2. Kernel regression
#
# Statistics knew this long before neural networks. To guess $f(x)$ from noisy points $(x_i, y_i)$,
# [Nadaraya (1964)](https://doi.org/10.1137/1109020) and Watson (1964) average the $y_i$ of the points near $x$. With a
# Gaussian kernel of standard deviation $1 / w$ that is attention: $x$ is the query, $x_i$ the keys, $y_i$ the values.
#
# $$f(x) = \sum_i \operatorname{softmax}_i\left(-\tfrac{1}{2} ((x - x_i)\, w)^2\right) y_i$$
#
# Upper row: which points each point reads. Lower row: the curve. A larger $w$ narrows the band, until each point reads
# no one but itself and the curve runs after the noise.

# %%
from tfx_jax.functional import kernel_regression


def truth(x):
    return 2 * np.sin(x) + x**0.8


x = np.sort(random.uniform(0, 5, 50)).astype(np.float32)
y = (truth(x) + random.normal(0, 0.5, 50)).astype(np.float32)
test_x = np.arange(0, 5, 0.1, dtype=np.float32)

figure, panels = plt.subplots(2, 4, figsize=(12, 6), layout="constrained")
bands = []
for (upper, lower), w in zip(panels.T, (1, 3, 10, 100), strict=True):
    _, weights = kernel_regression(x, x, y, inverse_bandwidth=w, return_weights=True)
    bands.append(float(jnp.mean(1 / jnp.square(weights).sum(axis=1))))  # 1 / n for n equal weights
    show_map(upper, weights, f"w = {w}: reads {bands[-1]:.1f} points")
    lower.plot(x, y, "o", color="lightgray", label="points")
    lower.plot(test_x, truth(test_x), "k--", label="truth")
    lower.plot(test_x, kernel_regression(test_x, x, y, inverse_bandwidth=w), label="estimate")
    lower.set(xlabel="x", ylabel="y")
panels[1, 0].legend()
plt.show()
assert bands == sorted(bands, reverse=True)

# %% [markdown]
# Which $w$ is best? Let the data say: predict each point from the *others* (a mask hides the point itself) and follow
# the gradient of the error with respect to $\log w$.


# %%
@jax.jit
def left_out_error(log_w):
    estimate = kernel_regression(x, x, y, mask=~jnp.eye(len(x), dtype=bool), inverse_bandwidth=jnp.exp(log_w))
    return jnp.mean((estimate - y) ** 2)


slope = jax.jit(jax.grad(left_out_error))
log_w = jnp.zeros(())
for _ in range(100):
    log_w = log_w - 0.3 * slope(log_w)

estimates = {"mean of all": y.mean()}
for w in (1.0, float(jnp.exp(log_w))):
    estimates[f"w = {w:.2f}"] = kernel_regression(test_x, x, y, inverse_bandwidth=w)
for name, estimate in estimates.items():
    print(f"{name:<12} squared error from the truth {np.mean((estimate - truth(test_x)) ** 2):.3f}")

# %% [markdown]
# ### Exercise
#
# What does the curve return far away from all points, at x = 100? And what with w = 0.001?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
far_away = kernel_regression(np.array([100.0], np.float32), x, y, inverse_bandwidth=1.0)
flat = kernel_regression(test_x, x, y, inverse_bandwidth=0.001)
print(f"at 100: {far_away.item():.3f}, the last point {y[-1]:.3f}; w = 0.001: {flat.mean():.3f}, mean {y.mean():.3f}")
np.testing.assert_allclose(far_away, y[-1:], atol=1e-3)  # the nearest point wins, however far away it is
np.testing.assert_allclose(flat, y.mean(), atol=1e-2)

# %% [markdown]
# ## 3. How to score: dot, general, additive
#
# | score | formula | parameters | paper |
# |---|---|---|---|
# | dot | $q \cdot k$ | none; equal sizes | [Luong et al. (2015)](https://arxiv.org/abs/1508.04025) |
# | general | $q^\top W k$ | $W$ | the same |
# | additive | $v \cdot \tanh(W_q q + W_k k)$ | all three | [Bahdanau et al. (2015)](https://arxiv.org/abs/1409.0473) |
#
# Luong's *concat*, $v \cdot \tanh(W [q; k])$, is the additive score with $W = [W_q\ W_k]$.
#
# A toy translation. Ten English words have vectors, and their French counterparts other ones, which have nothing to do
# with them. A French word asks, English words answer with their vectors. The parameters are trained on random sentences
# to return the vector of the right word; where to look, no one tells them.

# %%
from tfx_jax.functional import additive_attention, dot_product_attention, general_attention

WORDS = dict(
    the="la", red="rouge", house="maison", big="grande", car="voiture", old="vieille", a="une", door="porte",
    **{"is": "est", "and": "et"},
)  # fmt: skip
ENGLISH, FRENCH = list(WORDS), list(WORDS.values())
SIZE, HIDDEN = 16, 32
english, french = normal(len(WORDS), SIZE), normal(len(WORDS), SIZE)


def general(params, *arrays, **options):
    return general_attention(*arrays, w=params["w"], **options)


def additive(params, *arrays, **options):
    return additive_attention(*arrays, w_query=params["w_query"], w_key=params["w_key"], v=params["v"], **options)


def error(params, attend, english_ids, french_ids):
    """Squared distance of what French words find from the English vectors that they mean; ids [B, T]."""
    query, key = french[french_ids][:, :, None], english[english_ids][:, :, None]  # [B, T, N=1, SIZE]
    return jnp.mean((attend(params, query, key, key)[:, :, 0] - english[french_ids]) ** 2)


def trained(attend, params, num_steps=200, learning_rate=0.02):
    """Trains on 32 sentences of five random words a step, each in two random orders."""
    optimizer = optax.adam(learning_rate)

    def step(state, rng):
        params, optimizer_state = state
        rngs = jax.random.split(rng, 64).reshape(2, 32)
        english_ids = jax.vmap(lambda rng: jax.random.permutation(rng, len(WORDS))[:5])(rngs[0])
        french_ids = jax.vmap(jax.random.permutation)(rngs[1], english_ids)
        loss, gradient = jax.value_and_grad(error)(params, attend, english_ids, french_ids)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    state = params, optimizer.init(params)
    (params, _), losses = jax.jit(lambda: jax.lax.scan(step, state, jax.random.split(jax.random.key(0), num_steps)))()
    print(f"{attend.__name__:<9} error {losses[0]:.3f} -> {losses[-1]:.3f}")
    return params


general_params = trained(general, {"w": 0.1 * normal(SIZE, SIZE)})
additive_params = trained(
    additive,
    {"w_query": 0.2 * normal(SIZE, HIDDEN), "w_key": 0.2 * normal(SIZE, HIDDEN), "v": 0.2 * normal(HIDDEN)},
)

# %%
source = ["the", "red", "house", "is", "big"]
target = ["la", "maison", "rouge", "est", "grande"]
key = english[jnp.array([ENGLISH.index(word) for word in source])][None, :, None]
query = french[jnp.array([FRENCH.index(word) for word in target])][None, :, None]
shared = english[jnp.array([FRENCH.index(word) for word in target])][None, :, None]

toy_maps = {
    "dot, unrelated vectors": dot_product_attention(query, key, key, scale=1.0, return_weights=True)[1],
    "dot, shared vectors": dot_product_attention(shared, key, key, scale=1.0, return_weights=True)[1],
    "general, trained": general(general_params, query, key, key, return_weights=True)[1],
    "additive, trained": additive(additive_params, query, key, key, return_weights=True)[1],
}
figure, panels = plt.subplots(1, 4, figsize=(13, 3.6), layout="constrained")
for panel, (name, weights) in zip(panels, toy_maps.items(), strict=True):
    show_map(panel, weights[0, 0], name, largest=1)
    panel.set_xticks(range(len(source)), source, rotation=45)
    panel.set_yticks(range(len(target)), target)
plt.show()

# %% [markdown]
# *Maison* and *rouge* cross over *red* and *house*. The dot product needs no parameters, but it needs queries and keys
# that speak one language; the other two learn to translate between them. (A Transformer multiplies queries and keys by
# matrices and then takes the dot product: the general score in two factors.)
#
# The table's identities, in code:

# %%
projected = jnp.einsum("BTNH,HJ->BTNJ", query, general_params["w"])
as_dot = dot_product_attention(projected, key, key, scale=1.0)
np.testing.assert_allclose(as_dot, general(general_params, query, key, key), atol=1e-5)

joined = jnp.concatenate([additive_params["w_query"], additive_params["w_key"]])  # W, [2 * SIZE, HIDDEN]
pairs = jnp.concatenate(jnp.broadcast_arrays(query, key.swapaxes(1, 2)), axis=-1)  # [q; k], [B, T, S, 2 * SIZE]
concat = jnp.tanh(pairs @ joined) @ additive_params["v"]
as_concat, _ = attention_from_logits(concat[:, None], key)
np.testing.assert_allclose(as_concat, additive(additive_params, query, key, key), atol=1e-5)

# %% [markdown]
# What a decoder does with the answer differs as well. Bahdanau's feeds it into the recurrent cell of the next state;
# Luong's joins it to the state that asked, `attentional_vector`, and predicts the next word from that.

# %% [markdown]
# ### Exercise
#
# How many parameters has each score for vectors of size 512 and 512 hidden numbers?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
print(f"dot 0, general {512 * 512:,}, additive {2 * 512 * 512 + 512:,}")
sizes = jax.tree.map(jnp.size, (general_params, additive_params))  # and those above
assert sum(jax.tree.leaves(sizes)) == SIZE * SIZE + 2 * SIZE * HIDDEN + HIDDEN

# %% [markdown]
# ## 4. Why divide by the root of d
#
# Take vectors of $d$ independent numbers of mean 0 and variance 1. Each product $q_i k_i$ has variance 1, so
# $q \cdot k$ has variance $d$, and $q \cdot k / \sqrt d$ has variance 1 again
# ([Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2.1). Large scores saturate the softmax: one
# weight is 1, the others are 0, and a small change of a score changes nothing. Nothing can be learned there.

# %%
SIZES = (4, 16, 64, 256, 1024)
SCALES = {"q · k": lambda d: 1.0, "q · k / √d": lambda d: d**-0.5}
NUM_QUERIES, NUM_KEYS = 500 if IS_TEST else 2_000, 32

softmax_gradient = jax.jit(jax.vmap(jax.jacfwd(jax.nn.softmax)))  # [queries, weights, scores]
variances, gradients = ({name: [] for name in SCALES} for _ in range(2))
for d in SIZES:
    products = normal(NUM_QUERIES, d) @ normal(NUM_KEYS, d).T
    for name, scale in SCALES.items():
        variances[name].append(float(products.var()) * scale(d) ** 2)
        gradients[name].append(float(jnp.linalg.norm(softmax_gradient(products * scale(d)), axis=(1, 2)).mean()))

figure, panels = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for panel, curves, label in zip(
    panels, (variances, gradients), ("variance of the scores", "norm of the softmax's gradient"), strict=True
):
    for name, curve in curves.items():
        panel.loglog(SIZES, curve, marker="o", label=name)
    panel.set(xlabel="d", ylabel=label)
    panel.legend()
plt.show()

# %% [markdown]
# Additive scores do not need it: the tanh is at most 1, whatever the sizes. That is why additive attention beats the
# *unscaled* dot product for large $d$, and why the root was put in.

# %% [markdown]
# ### Exercise
#
# By what must products of vectors with 64 numbers of variance 4 be divided?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
products = (2 * normal(2_000, 64)) @ (2 * normal(2_000, 64)).T
print(f"variance {products.var():.0f}, divided by 4 √64 = 32: {(products / 32).var():.2f}")
assert 0.9 < (products / 32).var() < 1.1

# %% [markdown]
# ## 5. Masks
#
# A mask is boolean, `[B, N, T, S]` or broadcastable to it, and `True` where a query may look. Masks combine with `&`.
# A mask of two axes, `[T, S]`, gets the others by `mask[None, None]`.

# %%
from tfx_jax.functional import causal_mask, padding_mask, segment_mask

T = 8
packed = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])  # two sentences in one row, then padding
masks = {
    "causal": causal_mask(T),
    "padding, length 6": padding_mask(jnp.array([6]), T),
    "causal & padding": causal_mask(T) & padding_mask(jnp.array([6]), T),
    "segments 1, 2 and padding": segment_mask(packed, packed),
    "causal, last 3 of 8": causal_mask(3, T),
}
key = value = normal(1, T, 1, 16)

figure, panels = plt.subplots(2, len(masks), figsize=(14, 5), layout="constrained")
for (upper, lower), (name, mask) in zip(panels.T, masks.items(), strict=True):
    query = normal(1, 3 if mask.shape[2] == 3 else T, 1, 16)
    out, weights = dot_product_attention(query, key, value, mask=mask, return_weights=True)
    show_map(upper, jnp.broadcast_to(mask[0, 0], weights.shape[2:]), f"{name}: mask")
    show_map(lower, weights[0, 0], "weights", largest=1)
    visible = jnp.broadcast_to(mask, weights.shape)
    assert (weights[~visible] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), visible.any(axis=-1), atol=1e-5)
    if name.startswith("segments"):
        assert (out[0, -1] == 0).all()
plt.show()

# %% [markdown]
# Black may be seen. What is hidden has weight zero, exactly, and the rest of a row still sums to one. A query that sees
# nothing, such as the padding of the fourth picture, gets zeros and never a NaN. The last picture is a step of decoding
# with a cache: the newest three queries against all eight keys.

# %% [markdown]
# ### Exercise
#
# A *prefix language model* reads the first three tokens in both directions and continues from left to right. Make
# its mask of those above.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
prefix = causal_mask(T) | (jnp.arange(T) < 3)
print(prefix[0, 0].astype(int))
assert prefix[0, 0, :3, :3].all()
assert not prefix[0, 0, 4, 5]

# %% [markdown]
# ## 6. Heads and axes
#
# Several heads look for several things at once: each has its own matrices for queries, keys and values, of size
# $d_\mathrm{model} / h$, and one last matrix joins what they found
# ([Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2.2). More heads of a smaller size have as many
# parameters and take as many products, but $h$ arrays of weights, $h T S$ numbers, instead of one:

# %%
from tfx_jax.functional import attention_over_axes
from tfx_jax.nn import MultiHeadAttention

for num_heads in (1, 2, 8):
    layer = nnx.eval_shape(lambda n=num_heads: MultiHeadAttention(512, n, rngs=nnx.Rngs(0)))
    shapes = {name: getattr(layer, name).kernel.shape for name in ("query", "key", "value", "out")}
    print(f"{num_heads} heads: {sum(np.prod(shape) for shape in shapes.values()):,} parameters", shapes)

# %% [markdown]
# Sizes need not agree with each other. In the following layer 500 heads of size 2 read a source of 100 vectors of
# size 7, for a target of 121 vectors of size 16. `None` is the size of the batch, any number.

# %%
layer = MultiHeadAttention(16, 500, d_k=2, d_key_input=7, d_out=16, rngs=nnx.Rngs(0))
target_like = jax.ShapeDtypeStruct((2, 121, 16), jnp.float32)
source_like = jax.ShapeDtypeStruct((2, 100, 7), jnp.float32)
out, weights = jax.eval_shape(functools.partial(layer, return_weights=True), target_like, source_like)
print("output ", (None, *out.shape[1:]))
print("weights", (None, *weights.shape[1:]))
assert (out.shape[1:], weights.shape[1:]) == ((121, 16), (500, 121, 100))

# %% [markdown]
# Images and videos have more than one axis to attend over. `attention_axes` of the layer, or `attention_over_axes`
# around any attention function, names those that form the sequence; the others act as more batch. What one pixel of a
# picture (the cross) reads:

# %%
ROWS, COLUMNS, ROW, COLUMN = 6, 9, 2, 5
asking, picture = normal(2, 1, ROWS, COLUMNS, 1, 8)  # queries and keys, [B, rows, columns, N, H] each
read_by_pixel = {  # where the weights of this pixel are, and what they are weights of
    "axes=(1,): its column": ((1,), (0, COLUMN, 0, ROW), (slice(None), COLUMN)),
    "axes=(2,): its row": ((2,), (0, ROW, 0, COLUMN), (ROW, slice(None))),
    "axes=(1, 2): all": ((1, 2), (0, 0, ROW, COLUMN), (slice(None), slice(None))),
}
figure, panels = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for panel, (name, (axes, pixel, place)) in zip(panels, read_by_pixel.items(), strict=True):
    _, weights = attention_over_axes(dot_product_attention, asking, picture, picture, axes=axes, return_weights=True)
    grid = np.full((ROWS, COLUMNS), np.nan)
    grid[place] = weights[pixel]
    image = panel.imshow(grid, cmap="Blues", vmin=0)
    panel.plot(COLUMN, ROW, "rx")
    panel.set(title=f"{name}\nweights {weights.shape}", xlabel="column", ylabel="row")
    figure.colorbar(image, ax=panel, label="weight")
plt.show()

# %% [markdown]
# ## 7. Positions
#
# Attention does not see order: shuffle keys and values together, and nothing changes. So positions must be told.
#
# ### Sines and cosines, added to the embeddings
#
# $$P_{p,\,2i} = \sin\left(p / 10000^{2i/d}\right) \qquad P_{p,\,2i+1} = \cos\left(p / 10000^{2i/d}\right)$$
#
# ([Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.5.)

# %%
from tfx_jax.functional import sinusoidal_positions

few, encoding = sinusoidal_positions(jnp.arange(20), 128), sinusoidal_positions(jnp.arange(60), 32)

figure, panels = plt.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
for panel, table in zip(panels[:2], (few, encoding), strict=True):
    image = panel.imshow(table, cmap="RdBu", aspect="auto")
    panel.set(title=f"n = {table.shape[0]}, d = {table.shape[1]}", xlabel="column", ylabel="position")
    figure.colorbar(image, ax=panel)
for column in range(6, 10):
    panels[2].plot(encoding[:, column], label=f"column {column}")
panels[2].set(title="n = 60, d = 32", xlabel="position", ylabel="value")
panels[2].legend(loc="lower left")
image = panels[3].imshow(encoding @ encoding.T, cmap="gray_r")
panels[3].set(title="inner products of positions", xlabel="position", ylabel="position")
figure.colorbar(image, ax=panels[3])
plt.show()

# %% [markdown]
# Each pair of columns is the hand of a clock, fast on the left and slow on the right. A step of $\varphi$ positions
# turns every hand by its own fixed angle. That is one matrix, the same wherever the step begins, which a model can
# learn:
#
# $$M_\varphi = \operatorname{diag}\left(\begin{pmatrix}\cos \omega_i\varphi & \sin \omega_i\varphi \\
# -\sin \omega_i\varphi & \cos \omega_i\varphi\end{pmatrix}\right), \qquad P_{p + \varphi} = M_\varphi P_p,
# \qquad \omega_i = 10000^{-2i/d}$$

# %%
STEP, D = 7, 32
angles = STEP * 10_000.0 ** (-np.arange(0, D, 2) / D)
rotations = [[[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]] for angle in angles]
step = jax.scipy.linalg.block_diag(*jnp.asarray(rotations, jnp.float32))  # M, [D, D]
np.testing.assert_allclose(encoding[:-STEP] @ step.T, encoding[STEP:], atol=1e-5)

# %% [markdown]
# So the inner product of two positions depends on their distance alone (the stripes of the last picture). And the rows
# do not repeat after 10,000 positions, as one sometimes reads: the periods of the columns have no common multiple.

# %%
far = sinusoidal_positions(jnp.arange(1, 30_001), D)
print(f"nearest to position 0 among the next 30,000: {jnp.linalg.norm(far - encoding[0], axis=1).min():.2f} away")

# %% [markdown]
# ### Inside of attention
#
# Newer models tell attention about distances instead:
#
# * **rotary** ([Su et al., 2021](https://arxiv.org/abs/2104.09864)) turns queries and keys by the angles above, so that
#   $q \cdot k$ depends on the distance;
# * **T5** ([Raffel et al., 2020](https://arxiv.org/abs/1910.10683)) learns a bias for each *bucket* of distances, wide
#   buckets for far ones;
# * **ALiBi** ([Press et al., 2022](https://arxiv.org/abs/2108.12409)) subtracts the distance times a slope, another one
#   for each head;
# * **Transformer-XL** ([Dai et al., 2019](https://arxiv.org/abs/1901.02860)) scores the distance by a query of its own,
#   and keeps the previous segment as a memory to look back at.

# %%
from tfx_jax.functional import alibi_bias, relative_attention, relative_position_bias, rotary_embedding

T = 32
positions = jnp.arange(T)
same_query, same_key = (jnp.broadcast_to(normal(16), (1, T, 1, 16)) for _ in range(2))
rotary_scores = jnp.einsum("BTNH,BSNH->TS", *(rotary_embedding(x, positions) for x in (same_query, same_key)))
bucket_numbers = jnp.arange(16.0)[:, None]  # as the learned table, so that the bias shows the number of the bucket
buckets = functools.partial(relative_position_bias, bucket_numbers, T, max_distance=32)
linear_biases = jnp.where(causal_mask(T), alibi_bias(4, T), jnp.nan)[0]

pictures = {
    "rotary: scores of one q and k": rotary_scores,
    "T5: buckets, both directions": buckets()[0, 0],
    "T5: buckets, causal": buckets(is_bidirectional=False)[0, 0],
    "ALiBi: head 0 of 4": linear_biases[0],
    "ALiBi: head 1 of 4": linear_biases[1],
}
figure, panels = plt.subplots(1, len(pictures), figsize=(18, 3.4), layout="constrained")
for panel, (name, picture) in zip(panels, pictures.items(), strict=True):
    figure.colorbar(panel.imshow(picture, cmap="viridis"), ax=panel, shrink=0.8)
    panel.set(title=name, xlabel="position of the key", ylabel="position of the query")
plt.show()

# %% [markdown]
# All of them are constant along the diagonals: they know distances and nothing else. For Transformer-XL, a text of 24
# tokens: a segment of 8, and the 16 before it as memory. Within one layer, that gives what one pass over all of them
# gives. In a stack, each layer reads what the layer below remembered, so the reach grows with every layer.

# %%
SEGMENT, MEMORY = 8, 16
text = normal(1, MEMORY + SEGMENT, 1, 16) / 2
encoded_distances = sinusoidal_positions(jnp.arange(MEMORY + SEGMENT)[::-1], 16)[:, None]  # the longest first
by_distance = functools.partial(
    relative_attention,
    relative_key=encoded_distances,
    content_bias=jnp.zeros((1, 16)),
    position_bias=4 * encoded_distances[-1],  # likes what is near
    is_causal=True,
    return_weights=True,
)
(in_one, all_weights), (in_parts, weights) = by_distance(text, text, text), by_distance(text[:, MEMORY:], text, text)
np.testing.assert_allclose(in_one[:, MEMORY:], in_parts, atol=1e-5)

figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
show_map(panels[0], all_weights[0, 0], "one pass over 24 tokens")
show_map(panels[1], weights[0, 0], "8 queries, 16 tokens of memory")
panels[1].axvline(MEMORY - 0.5, color="red", label="end of the memory")
panels[1].legend()
plt.show()

# %% [markdown]
# ### Exercise
#
# Show that the scores of rotary positions depend on distances alone: move all positions by 100.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
moved = jnp.einsum("BTNH,BSNH->TS", *(rotary_embedding(x, positions + 100) for x in (same_query, same_key)))
print(f"largest change {jnp.abs(moved - rotary_scores).max():.1e}")
np.testing.assert_allclose(moved, rotary_scores, atol=1e-3)

# %% [markdown]
# ## 8. Looking at less than everything
#
# Dense attention scores every pair: twice the length, four times the work. Each of these scores fewer pairs, or none:
#
# | function | a query reads | paper |
# |---|---|---|
# | `local_attention` | its block | [Liu et al. (2018)](https://arxiv.org/abs/1801.10198) |
# | `sliding_window_attention` | its neighbors | [Beltagy et al. (2020)](https://arxiv.org/abs/2004.05150) |
# | `bigbird_attention` | near, random, global blocks | [Zaheer et al. (2020)](https://arxiv.org/abs/2007.14062) |
# | `lsh_attention` | what hashes alike | [Kitaev et al. (2020)](https://arxiv.org/abs/2001.04451) |
# | `routing_attention` | its cluster, found by online k-means | [Roy et al. (2020)](https://arxiv.org/abs/2003.05997) |
# | `favor_attention` | all, through random features | [Choromanski et al. (2021)](https://arxiv.org/abs/2009.14794) |
# | `linear_attention` | all, through elu(x) + 1 | [Katharopoulos et al. (2020)](https://arxiv.org/abs/2006.16236) |
#
# They get the same input: 64 tokens on four topics that take turns, a vector for each topic, and noise. Queries, keys
# and values are the same vectors of unit length. All can say what they looked at, `return_weights=True`, and always
# `out == weights @ value`.

# %%
from tfx_jax.functional import (
    bigbird_attention,
    favor_attention,
    layer_norm,
    linear_attention,
    local_attention,
    lsh_attention,
    orthogonal_features,
    routing_attention,
    sliding_window_attention,
    update_centroids,
)

T, H, NUM_TOPICS, SHARPNESS = 64, 16, 4, 3.0
topics, _ = np.linalg.qr(random.normal(size=(H, NUM_TOPICS)))
turns = np.concatenate([random.permutation(NUM_TOPICS) for _ in range(4)])  # each topic for four tokens at a time
tokens = topics.T[np.repeat(turns, 4)] + 0.08 * random.normal(size=(T, H))
tokens = jnp.asarray(tokens / np.linalg.norm(tokens, axis=1, keepdims=True), jnp.float32)[None, :, None]

centroids = layer_norm(normal(1, NUM_TOPICS, H))  # one head; in training, a step of k-means for each batch
step_of_k_means = jax.jit(functools.partial(update_centroids, decay=0.8))
for _ in range(20):
    centroids = step_of_k_means(centroids, tokens, tokens)

blocks = {"num_global_blocks": 1, "num_window_blocks": 3, "num_random_blocks": 2}
family = {
    "dense": functools.partial(dot_product_attention, scale=SHARPNESS),
    "local": functools.partial(local_attention, scale=SHARPNESS, block_size=16),
    "sliding window": functools.partial(sliding_window_attention, scale=SHARPNESS, window=8),
    "BigBird": functools.partial(bigbird_attention, scale=SHARPNESS, block_size=4, **blocks),
    "LSH": functools.partial(lsh_attention, scale=SHARPNESS, rng=jax.random.key(1), num_buckets=8, chunk_size=16),
    # It normalizes queries and keys, which then have H times the squared length of the others.
    "routing": functools.partial(routing_attention, scale=SHARPNESS / H, centroids=centroids, window=T // NUM_TOPICS),
    "FAVOR+": functools.partial(
        favor_attention, scale=SHARPNESS, projection=orthogonal_features(jax.random.key(0), 256, H)
    ),
    "linear": linear_attention,
}

figure, panels = plt.subplots(2, 4, figsize=(14, 7.4), layout="constrained")
for panel, (name, attend) in zip(panels.flat, family.items(), strict=True):
    out, weights = jax.jit(functools.partial(attend, return_weights=True))(tokens, tokens, tokens)
    np.testing.assert_allclose(jnp.einsum("BNTS,BSNH->BTNH", weights, tokens), out, atol=1e-5)
    if name == "dense":
        dense = weights
    overlap = jnp.minimum(weights, dense).sum(axis=-1).mean()
    show_map(panel, weights[0, 0], f"{name}: {overlap:.0%} of dense", largest=2 * float(dense.max()))
plt.show()

# %% [markdown]
# The number is the share of dense attention's weight that the other one puts in the same place. Blocks and windows
# find what is near, whatever it is about. BigBird adds chance, and four tokens that see all and are seen by all. LSH
# and routing find the topic wherever it is (LSH leaves out the token itself, as published; routing can miss some,
# because each cluster takes the same number of tokens). Random features see everything through a veil of noise; the
# fixed ones of linear attention hardly tell such short vectors apart: a model that uses them learns longer ones.

# %% [markdown]
# ### On real text
#
# The last clauses of Lincoln's address at Gettysburg (1863) say some words again and again. Give each word a random
# vector, equal words the same one. Which of these attentions see that *people* was said before?

# %%
ADDRESS = (
    "that this nation , under god , shall have a new birth of freedom , and that government of the people , "
    "by the people , for the people , shall not perish from the earth ."
)
LINCOLN = ADDRESS.split()
vector_of = {word: normal(H) for word in dict.fromkeys(LINCOLN)}
words = jnp.stack([vector_of[word] / jnp.linalg.norm(vector_of[word]) for word in LINCOLN])[None, :, None]

figure, panels = plt.subplots(1, 3, figsize=(15, 5.6), layout="constrained")
said_before = {
    "dense": functools.partial(dot_product_attention, scale=6.0),
    "sliding window of 4": functools.partial(sliding_window_attention, scale=6.0, window=4),
    "LSH": functools.partial(lsh_attention, scale=6.0, rng=jax.random.key(1), num_buckets=8, chunk_size=len(LINCOLN)),
}
word_maps = {
    name: jax.jit(functools.partial(attend, is_causal=True, return_weights=True))(words, words, words)[1][0, 0]
    for name, attend in said_before.items()
}
for panel, (name, weights) in zip(panels, word_maps.items(), strict=True):
    show_map(panel, weights, name, largest=1)
    panel.set_xticks(range(len(LINCOLN)), LINCOLN, rotation=90, fontsize=7)
    panel.set_yticks(range(len(LINCOLN)), LINCOLN, fontsize=7)
plt.show()

# %% [markdown]
# ### Exercise
#
# How much weight does the last *people* give to all *people* up to itself, under each attention? Why does the window
# of 4 give what it gives?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
places = [place for place, word in enumerate(LINCOLN) if word == "people"]
for name, weights in word_maps.items():
    print(f"{name:<20}", " ".join(f"{weights[places[-1], place]:.2f}" for place in places), "on positions", *places)
# From one "people" to the next are four words, as far as a window of 4 reaches: it sees the second, not the first.
# LSH leaves out the word itself.

# %% [markdown]
# ## 9. Random features
#
# FAVOR+ writes the exponential of the dot product as a mean over random directions $w_j$ from $\mathcal{N}(0, I)$:
#
# $$e^{q \cdot k} = \mathbb{E}[\phi(q) \cdot \phi(k)], \qquad
# \phi_j(x) = \frac{1}{\sqrt m} \exp\left(w_j \cdot x - \tfrac{1}{2} |x|^2\right)$$
#
# Then $\phi(Q) (\phi(K)^\top V)$ needs no pairs, and time grows as the length. How many features does it take?
# The two panels differ in the length of the vectors; directions may be independent or orthogonal to each other.

# %%
NUM_FEATURES, NUM_DRAWS = (16, 64, 256, 1024), 16 if IS_TEST else 100
kinds = {
    "independent": lambda rng, m: jax.random.normal(rng, (m, H)),
    "orthogonal": lambda rng, m: orthogonal_features(rng, m, H),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def drawn(kind, m):
    """Draws of the directions, [NUM_DRAWS, m, H]."""
    return jax.vmap(lambda rng: kinds[kind](rng, m))(jax.random.split(jax.random.key(0), NUM_DRAWS))


@jax.jit
def favor_error(vectors, draws):
    """Squared error of FAVOR+, relative to what dense attention returns, in the mean over draws of the directions."""
    wanted = dot_product_attention(*vectors, scale=1.0)

    def error(projection):
        out = favor_attention(*vectors, scale=1.0, projection=projection)
        return jnp.sum((out - wanted) ** 2) / jnp.sum(wanted**2)

    return jax.lax.map(error, draws).mean()


directions = normal(3, 1, 64, 1, H)
directions /= jnp.linalg.norm(directions, axis=-1, keepdims=True)

figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
for panel, length in zip(panels, (1.0, 2.0), strict=True):
    query, key, value = directions * jnp.array([length, length, 1.0])[:, None, None, None, None]
    for kind in kinds:
        errors = [float(favor_error((query, key, value), drawn(kind, m))) for m in NUM_FEATURES]
        panel.loglog(NUM_FEATURES, errors, marker="o", label=kind)
    panel.loglog(NUM_FEATURES, errors[-1] * NUM_FEATURES[-1] / np.array(NUM_FEATURES), "k:", label="1 / m")
    panel.set(title=f"queries and keys of length {length:g}", xlabel="features m", ylabel="relative squared error")
    panel.legend()
plt.show()

# %% [markdown]
# The relative variance of an estimate of $e^{q \cdot k}$ is $(e^{|q + k|^2} - 1) / m$ for independent directions, and
# less for orthogonal ones. Short vectors are easy: the squared error falls nearly as $1 / m$. The picture shows the
# error of the whole attention, a quotient of two such estimates, which follows $1 / m$ only where both are precise.
# For long ones most draws miss what matters, and many more features help little.

# %% [markdown]
# ### Exercise
#
# For short vectors, by what factor does the relative squared error fall from 16 features to 1,024? And the error
# itself?
#
# <details><summary>Answer</summary>
#
# Read the two ends of the left panel: the squared error falls by about 33 to 36, and the error by the root of it, 6.
# That is less than 1,024 / 16 = 64: $1 / m$ is the law of many features, and 16 are few.
#
# </details>

# %% [markdown]
# ## 10. Memory
#
# `chunked_attention` is dense attention, the same numbers, but it never holds the $T \times S$ weights
# ([Rabe and Staats, 2021](https://arxiv.org/abs/2112.05682); [Dao et al., 2022](https://arxiv.org/abs/2205.14135)).
# XLA knows how much memory a program takes before it runs. Below, that of the gradient, with one head of size 64:
# nothing is computed.

# %%
from tfx_jax.functional import chunked_attention

LENGTHS = tuple(1024 * 2**i for i in range(3 if IS_TEST else 5))
FUNCTIONS = {
    "dense": dot_product_attention,
    "chunked": functools.partial(chunked_attention, chunk_size=256),
    "sliding window": functools.partial(sliding_window_attention, window=128),
}


def gradient_megabytes(attend, length):
    """Temporary memory of the compiled gradient with respect to query, key and value."""
    like = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
    gradient = jax.grad(lambda *arrays: attend(*arrays, is_causal=True).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(gradient).lower(like, like, like).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, attend in FUNCTIONS.items():
    used = [gradient_megabytes(attend, length) for length in LENGTHS]
    axes.loglog(LENGTHS, used, marker="o", label=name)
    print(f"{name:<14}", *(f"{length}: {megabytes:.1f} MiB" for length, megabytes in zip(LENGTHS, used, strict=True)))
axes.set(xlabel="length", ylabel="temporary memory of the gradient, MiB")
axes.set_xticks(LENGTHS, LENGTHS)
axes.minorticks_off()
axes.legend()
plt.show()

query, key, value = normal(3, 1, 300, 1, 64)
chunked = chunked_attention(query, key, value, is_causal=True, chunk_size=256)
np.testing.assert_allclose(chunked, dot_product_attention(query, key, value, is_causal=True), atol=1e-5)

# %% [markdown]
# For twice the length, dense attention takes four times the memory, the others about twice: less where a fixed buffer
# is the larger part.

# %% [markdown]
# ### Exercise
#
# Does `chunk_size` change the result? Does it have to divide the length?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
exact = dot_product_attention(query, key, value, is_causal=True)
for chunk_size in (7, 64, 300):
    chunked = chunked_attention(query, key, value, is_causal=True, chunk_size=chunk_size)
    print(f"chunk_size {chunk_size:>3}: largest difference {jnp.abs(chunked - exact).max():.1e}")
# Neither: only rounding differs, and the last chunk may be shorter.

# %% [markdown]
# ## 11. Hard attention
#
# Soft attention reads a bit of everything. *Hard* attention reads one value, drawn with the weights as probabilities
# ([Xu et al., 2015](https://arxiv.org/abs/1502.03044), section 4.1). Here are draws from the additive attention of
# section 3, made less sure of itself: its scores are divided by eight.

# %%
from tfx_jax.functional import hard_attention, score_function_loss

key = english[jnp.array([ENGLISH.index(word) for word in source])][None, :, None]
query = french[jnp.array([FRENCH.index(word) for word in target])][None, :, None]
unsure = functools.partial(additive, additive_params)

_, soft = unsure(query, key, key, scale=1 / 8, return_weights=True)
draws = {"soft": soft}
for seed in range(2):
    _, draws[f"hard, draw {seed}"] = hard_attention(
        query, key, key, attention_fn=unsure, scale=1 / 8, rng=jax.random.key(seed), return_weights=True
    )
_, draws["hard, most probable"] = hard_attention(query, key, key, attention_fn=unsure, return_weights=True)

figure, panels = plt.subplots(1, 4, figsize=(13, 3.6), layout="constrained")
for panel, (name, weights) in zip(panels, draws.items(), strict=True):
    show_map(panel, weights[0, 0], name, largest=1)
    panel.set_xticks(range(len(source)), source, rotation=45)
    panel.set_yticks(range(len(target)), target)
plt.show()

# %% [markdown]
# A draw has no gradient. But the *mean* reward has one, and it can be estimated from draws
# ([Williams, 1992](https://doi.org/10.1007/BF00992696)): make a choice more probable by as much as its reward $r$ was
# above a baseline $b$,
#
# $$\nabla \mathbb{E}[r] = \mathbb{E}[(r - b)\, \nabla \log p].$$
#
# Any $b$ that does not know the draw is right in the mean; a good one takes much of the noise away. With five keys the
# exact gradient is easy to write down, $p_i (r_i - \mathbb{E}[r])$ for the score of key $i$, and the estimates can be
# held against it.

# %%
NUM_DRAWS = 4_000 if IS_TEST else 20_000
scores = jnp.array([1.0, 0.5, 0.0, -0.5, -1.0])
rewards = jnp.array([3.0, 5.0, 4.0, 6.0, 3.5])
probabilities = jax.nn.softmax(scores)
mean_reward = probabilities @ rewards
exact = probabilities * (rewards - mean_reward)


@jax.jit
def estimated_gradients(baseline):
    """One estimate for each draw, [NUM_DRAWS, 5]: unit vectors as keys make the query the scores."""
    key, value = jnp.eye(5)[None, :, None], rewards[None, :, None, None]

    def loss(query):
        read, log_prob = hard_attention(query, key, value, scale=1.0, rng=jax.random.key(0), return_log_prob=True)
        return score_function_loss(log_prob[0, 0], read[0, :, 0, 0], baseline).sum()

    return -jax.grad(loss)(jnp.broadcast_to(scores, (1, NUM_DRAWS, 1, 5)))[0, :, 0]


figure, (bars, curves) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
bars.bar(np.arange(5) - 0.3, exact, width=0.3, color="black", label="exact")
counts = np.arange(1, NUM_DRAWS + 1)
for i, (name, baseline) in enumerate({"no baseline": 0.0, "mean reward": mean_reward}.items()):
    estimates = np.asarray(estimated_gradients(baseline), np.float64)
    means = np.cumsum(estimates, axis=0) / counts[:, None]
    spread = np.std(estimates, axis=0) / np.sqrt(NUM_DRAWS)
    assert (np.abs(means[-1] - exact) < 5 * spread).all(), "the estimate is biased"
    bars.bar(np.arange(5) + 0.3 * i, means[-1], width=0.3, yerr=2 * spread, label=name)
    curves.loglog(counts, np.linalg.norm(means - exact, axis=1), label=name)
bars.set(xlabel="key", ylabel="gradient of its score")
bars.legend()
curves.loglog(counts, counts**-0.5, "k:", label="1 / √draws")
curves.set(xlabel="draws", ylabel="distance from the exact gradient")
curves.legend()
plt.show()

# %% [markdown]
# ### Exercise
#
# A baseline of the mean reward plus 100 does not know the draw either. Is the estimate still right? What is the
# price?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for name, baseline in {"mean reward": mean_reward, "mean reward + 100": mean_reward + 100}.items():
    estimates = np.asarray(estimated_gradients(baseline), np.float64)
    spread = np.std(estimates, axis=0)
    print(f"{name:<17} standard deviation of one estimate {spread.mean():6.2f}")
    assert (np.abs(estimates.mean(axis=0) - exact) < 5 * spread / np.sqrt(NUM_DRAWS)).all()
# Right in the mean, but many times as noisy: the same precision takes the square of that number of draws.

# %% [markdown]
# ## 12. One function, any framework
#
# `tfx_jax.functional` imports JAX, NumPy and jaxtyping only: no class to inherit from, no state, no flags. Here is
# the same attention in bare JAX and in the module systems that are installed, with the same parameters and one
# result.

# %%
KERNEL = normal(3, 16, 2, 8) / 4  # for queries, keys and values: [D, N, H] each


def causal_self_attention(x, kernel):
    return dot_product_attention(*jnp.einsum("BTD,IDNH->IBTNH", x, kernel), is_causal=True)


def in_linen(x):
    from flax import linen

    class Attention(linen.Module):
        @linen.compact
        def __call__(self, x):
            return causal_self_attention(x, self.param("kernel", lambda rng: KERNEL))

    return Attention().init_with_output(jax.random.key(0), x)[0]


def in_haiku(x):
    import haiku as hk

    def attention(x):
        return causal_self_attention(x, hk.get_parameter("kernel", KERNEL.shape, init=lambda *_: KERNEL))

    model = hk.without_apply_rng(hk.transform(attention))
    return model.apply(model.init(jax.random.key(0), x), x)


def in_equinox(x):
    import equinox as eqx

    class Attention(eqx.Module):
        kernel: jax.Array

        def __call__(self, x):  # one sequence, [T, D]
            return causal_self_attention(x[None], self.kernel)[0]

    return jax.vmap(Attention(KERNEL))(x)


x = normal(2, 6, 16)
wanted = jax.jit(causal_self_attention)(x, KERNEL)
for package, function in {"flax": in_linen, "haiku": in_haiku, "equinox": in_equinox}.items():
    if importlib.util.find_spec(package) is None:
        print(f"{package}: not installed here")
    else:
        np.testing.assert_allclose(function(x), wanted, atol=1e-5)
        print(f"{package}: the same output, {wanted.shape}")

# %% [markdown]
# The library's own layers are Flax NNX modules, and take any of the family: bind its options, pass it as
# `attention_fn`.

# %%
windowed = functools.partial(sliding_window_attention, window=2)
layer = MultiHeadAttention(16, 2, attention_fn=windowed, rngs=nnx.Rngs(0))
out, weights = layer(x, is_causal=True, return_weights=True)

figure, panels = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
for head, panel in enumerate(panels):
    show_map(panel, weights[0, head], f"head {head}", largest=1)
plt.show()

# %% [markdown]
# Each function's docstring has the formula, the paper and the shapes: try `help(local_attention)`.
