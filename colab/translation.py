# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Translation with attention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/translation.ipynb)
#
# From two sentences to a trained Transformer to its attention maps:
#
# 1. attention is a function,
# 2. positions,
# 3. sentence pairs to learn from,
# 4. the model,
# 5. training,
# 6. translating,
# 7. what the model looked at,
# 8. where to go next.
#
# You need to know NumPy arrays, nothing else. Training takes some minutes on the processor that Colab gives
# everybody, less on a GPU (*Runtime → Change runtime type*).

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
import dataclasses
import importlib.metadata
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from IPython.display import display

for package in ("tfx-jax", "jax", "flax"):
    print(package, importlib.metadata.version(package))
print("devices:", jax.devices())

# %% [markdown]
# ## 1. Attention is a function
#
# A sentence is a list of vectors, one for each word. Attention lets every word of one sentence collect what it needs
# from the words of another, or of its own:
#
# $$\operatorname{attention}(Q, K, V) = \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# Each row of $Q$ is a *query*: what a word is looking for. Each row of $K$ is a *key*: what a word offers to be found
# by. Their inner products say how well they match; softmax turns every row of them into weights that are positive and
# sum to one; and with these weights each query takes the mean of the *values* $V$. The root keeps the softmax soft:
# the inner product of two vectors of $d_k$ independent numbers of variance 1 has variance $d_k$.


# %%
def attention(query, key, value, mask=None):
    """Equation 1 of Vaswani et al. (2017); query [T, H], key [S, H], value [S, U], mask [T, S]."""
    scores = query @ key.T / jnp.sqrt(key.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return weights @ value, weights


# %% [markdown]
# Nothing has been learned yet, so here are two sentences of random vectors. We pretend that somebody did learn that
# *imouto* means sister, *hon* book and *yonda* read: these words get nearly the same vectors. The particles *wa* and
# *o* have no counterpart in English: they get short vectors, which match nothing in particular.

# %%
ENGLISH = ["sister", "read", "a", "book"]
JAPANESE = ["imouto", "wa", "hon", "o", "yonda"]
MEANS = {"imouto": "sister", "hon": "book", "yonda": "read"}
SIZE = 32

random = np.random.default_rng(0)
english = random.normal(size=(len(ENGLISH), SIZE)).astype(np.float32)
japanese = 0.3 * random.normal(size=(len(JAPANESE), SIZE)).astype(np.float32)
for word, meaning in MEANS.items():
    japanese[JAPANESE.index(word)] += english[ENGLISH.index(meaning)]
english, japanese = jnp.asarray(english), jnp.asarray(japanese)


def show_map(axes, weights, rows, columns, title):
    """Draws weights [T, S]: white is 0, black is 1."""
    axes.imshow(weights, cmap="gray_r", vmin=0, vmax=1)
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_xlabel(title)


_, weights = attention(japanese, english, english)
figure, axes = plt.subplots(figsize=(3, 3))
show_map(axes, weights, JAPANESE, ENGLISH, "who reads whom")
plt.show()

# %% [markdown]
# Rows ask, columns are read, and each row sums to one. *Yonda*, the last Japanese word, finds *read*, the second
# English one: attention goes by content, so order is no obstacle. A query that matches nothing spreads its weight.
#
# The library's function does the same for a batch of sentences and several *heads* at once. Its arrays are
# `[batch, length, heads, size]`, its weights `[batch, heads, queries, keys]`.

# %%
from tfx_jax.functional import causal_mask, dot_product_attention, padding_mask, sinusoidal_positions

query, key = japanese[None, :, None], english[None, :, None]
out, library_weights = dot_product_attention(query, key, key, return_weights=True)
print("query", query.shape, "key", key.shape, "out", out.shape, "weights", library_weights.shape)
np.testing.assert_allclose(library_weights[0, 0], weights, atol=1e-2)  # accelerators may round the products

# %% [markdown]
# ### Exercise
#
# What becomes of the map if all queries are multiplied by 0, and what if by 100? Think first, then run the answer.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for factor in (0, 1, 100):
    _, sharper = attention(factor * japanese, english, english)
    print(f"queries times {factor:>3}: largest weight of each row", np.round(sharper.max(axis=1), 2))
# By 0 all scores are 0 and all weights 1/4; by 100 each row is a lookup of one word.

# %% [markdown]
# ### Masks
#
# Not every key may be read. A mask is `True` where a query may look:
#
# * the **padding mask** hides what fills the shorter sentences of a batch up to the length of the longest;
# * the **causal mask** hides the future: a word that is being written cannot depend on words that come after it.
#
# Below, the English sentence reads itself (*self-attention*). Two random matrices make queries and keys of its
# vectors; in a Transformer these matrices are what is learned.

# %%
longest = len(JAPANESE)
batch = jnp.stack([jnp.pad(english, ((0, longest - len(ENGLISH)), (0, 0))), japanese])  # [B=2, T=5, SIZE]
to_query, to_key = random.normal(size=(2, SIZE, 1, SIZE)).astype(np.float32) / np.sqrt(SIZE)
query, key = (jnp.einsum("BTD,DNH->BTNH", batch, matrix) for matrix in (to_query, to_key))

padding = padding_mask(jnp.array([len(ENGLISH), len(JAPANESE)]), longest)  # [B, 1, 1, S]
causal = causal_mask(longest)  # [1, 1, T, S]
masks = {"no mask": None, "padding": padding, "padding & causal": padding & causal}

padded = [*ENGLISH, "(padding)"]
figure, panels = plt.subplots(1, len(masks), figsize=(9, 3), layout="constrained")
for panel, (name, mask) in zip(panels, masks.items(), strict=True):
    _, masked = dot_product_attention(query, key, key, mask=mask, return_weights=True)
    show_map(panel, masked[0, 0], padded, padded, name)
plt.show()

# %% [markdown]
# A hidden key has weight zero, and the rest of its row still sums to one. (The row of the padding itself is computed,
# too, but no one reads the result.)

# %% [markdown]
# ### Exercise
#
# Write a mask with which each word sees itself and the word before it, and nothing else. The library takes masks of
# four axes, `[batch, heads, queries, keys]`; `mask[None, None]` makes them of two.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
places = jnp.arange(longest)
distance = places[:, None] - places[None, :]  # [T, S], how far back a key is
band = (distance >= 0) & (distance <= 1)
_, banded = dot_product_attention(query, key, key, mask=band[None, None], return_weights=True)
assert ((banded > 0).sum(axis=-1) <= 2).all()
print(np.round(banded[1, 0], 2))

# %% [markdown]
# ## 2. Positions
#
# One thing is missing. Shuffle keys and values together, and attention does not notice:

# %%
shuffled = random.permutation(len(ENGLISH))
in_order, _ = attention(japanese, english, english)
out_of_order, _ = attention(japanese, english[shuffled], english[shuffled])
np.testing.assert_allclose(in_order, out_of_order, atol=1e-2)

# %% [markdown]
# To attention, *dog bites man* is *man bites dog*. So each position $p$ gets a vector of its own, which is added to the
# word's:
#
# $$P_{p,\,2i} = \sin\left(p / 10000^{2i/d}\right) \qquad P_{p,\,2i+1} = \cos\left(p / 10000^{2i/d}\right)$$
#
# Left columns tick fast and right ones slowly, like the hands of many clocks. Moving on by $k$ positions turns every
# hand by its own fixed angle, a linear map, so "three words to the left" is something that a matrix can learn.

# %%
encoding = sinusoidal_positions(jnp.arange(60), 32)  # [60, 32]

figure, (heat, curves) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
image = heat.imshow(encoding, cmap="RdBu", aspect="auto")
figure.colorbar(image, ax=heat)
heat.set(xlabel="column", ylabel="position")
for column in range(6, 10):
    curves.plot(encoding[:, column], label=f"column {column}")
curves.set(xlabel="position")
curves.legend(loc="lower left")
plt.show()

# %% [markdown]
# ### Exercise
#
# Add positions to the keys of both sentences above, the one in order and the shuffled one. Does attention now see
# the order?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
places = encoding[: len(ENGLISH)]
one, _ = attention(japanese, english + places, english)
other, _ = attention(japanese, english[shuffled] + places, english[shuffled])
print(f"largest difference {jnp.abs(one - other).max():.2f}")
print(f"without positions  {jnp.abs(in_order - out_of_order).max():.2f}")
assert jnp.abs(one - other).max() > 0.01  # yes

# %% [markdown]
# ## 3. Sentence pairs
#
# The library has a small grammar that speaks English and Japanese, so there is something real to translate without
# downloading anything. English puts the verb in the middle and a relative clause behind its noun; Japanese puts the
# verb last and the clause in front. To translate is to reorder.

# %%
from tfx_jax.synthetic.grammar import GrammarPairs

training_pairs = GrammarPairs("train")
print(f"{len(training_pairs):,} pairs, among them\n")
for index in range(6):
    pair = training_pairs[index]
    print(pair["source"], pair["target"], sep="\n", end="\n\n")

# %% [markdown]
# There are two more splits, `"validation"` and `"test"`. No training sentence has the content of one of theirs (who did
# what to whom), so a model cannot pass by remembering.
#
# ## 4. The model
#
# The Transformer is two stacks of layers. The *encoder* reads the source: in each layer every word attends to all words
# of the source, then passes through a small network of its own. The *decoder* writes the target one piece at a time:
# each piece attends to those before it (the causal mask of section 1) and, by *cross-attention*, to the source as the
# encoder left it. Every attention has several heads, which can look for different things.
#
# `TransformerConfig()` is the base model of the paper. This one is much smaller, to learn in minutes. Two more things
# differ: *pre-norm* normalizes what enters each sublayer and not what leaves it, which bears a higher learning rate;
# and there is no dropout, because the grammar has endless sentences and nothing can be learned by heart.

# %% tags=["config"]
from tfx_jax.models import Transformer, TransformerConfig

model_config = TransformerConfig(
    vocab_size=2_000, num_layers=2, d_model=128, num_heads=4, d_ff=256, dropout_rate=0.0, pre_norm=True
)

# %% [markdown]
# How many numbers will be learned? Count what such layers contain, then ask the model.

# %%
c = model_config
attention_size = 4 * c.d_model**2  # matrices for queries, keys, values and the output
network_size = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model  # up, down, and their offsets
norm_size = 2 * c.d_model  # layer normalization: scale and offset
encoder_layer = attention_size + network_size + 2 * norm_size
decoder_layer = 2 * attention_size + network_size + 3 * norm_size
stacks = c.num_layers * (encoder_layer + decoder_layer) + 2 * norm_size  # pre-norm: one more behind each stack
by_hand = c.vocab_size * c.d_model + stacks

model = Transformer(model_config, rngs=nnx.Rngs(0))
counted = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
print(f"{by_hand:,} by hand, {counted:,} in the model")
assert by_hand == counted

# %% [markdown]
# The embedding, one vector for each entry of the vocabulary, is counted once: it serves the source, the target and, as
# a matrix, the output.
#
# From a source and the beginning of a target, the model scores every entry of the vocabulary as the next piece, at all
# places of the target at once.

# %%
source = jnp.array([[11, 12, 13, 2]])  # token ids; 2 ends a sentence
target = jnp.array([[21, 22, 2]])
logits = model(source, target)
print("logits", logits.shape)

# %% [markdown]
# ### Exercise
#
# How many parameters more does a model with three layers on each side have? Compute it with the numbers above, then
# check it.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
deeper = nnx.eval_shape(lambda: Transformer(dataclasses.replace(model_config, num_layers=3), rngs=nnx.Rngs(0)))
deeper_size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(deeper)))
print(f"{encoder_layer + decoder_layer:,} by hand, {deeper_size - counted:,} in the model")
assert deeper_size - counted == encoder_layer + decoder_layer

# %% [markdown]
# ## 5. Training
#
# Training makes the right next piece likely, for many pairs, over and over. Text is cut into pieces by SentencePiece,
# which the library trains first; pairs of similar length share a batch; the learning rate rises for `warmup_steps`
# steps, then falls as the inverse square root of the step.
#
# An experiment is a *model*, a *task* that it learns, and how long and how fast. The task knows where its examples come
# from, what its loss is and how well a translation is scored.

# %% tags=["config"]
from tfx_jax.tasks import PairData, TranslationConfig
from tfx_jax.training import ExperimentConfig, OptimizerConfig, tiny_variant

VARIANT = os.environ.get("TFX_JAX_VARIANT", "demo")  # "test" runs in seconds, but learns nothing

config = ExperimentConfig(
    model=model_config,
    task=TranslationConfig(PairData(dataset="grammar", max_length=64, tokens_per_batch=2_048), label_smoothing=0.0),
    optimizer=OptimizerConfig(peak_learning_rate=0.004, warmup_steps=200),
    num_steps=1_500,
    checkpoint_every=100,
    keep_last=8,
    eval_every=400,
)
if VARIANT == "test":
    config = tiny_variant(config)

# %% [markdown]
# **On Kaggle** with eight TPU devices, each takes an eighth of every batch and has a copy of the model. To divide the
# parameters too: `config.mesh.data, config.mesh.fsdp = 1, 8`. Colab has one device, and nothing to divide.
#
# Checkpoints, the tokenizer and curves for TensorBoard go to a folder. Stop the next cell whenever you like: it saves,
# and when you run it again it resumes where it stopped.

# %%
from tfx_jax.training import train

WORKDIR = f"runs/colab_{VARIANT}"
result = train(config, WORKDIR)

# %% [markdown]
# Every `eval_every` steps the model translated the 500 sentences of the validation split. *Exact match* counts the
# translations that equal the reference word for word; BLEU counts shared runs of up to four words. (Training that was
# stopped before step 400 has no evaluation yet, and an empty picture.)

# %%
steps = [evaluation["step"] for evaluation in result.evaluations]
figure, axes = plt.subplots(figsize=(6, 3.5))
axes.plot(steps, [evaluation["exact_match"] for evaluation in result.evaluations], marker="o", label="exact match, %")
axes.plot(steps, [evaluation["bleu"] for evaluation in result.evaluations], marker="o", label="BLEU")
axes.set(xlabel="step", ylim=(-3, 103))
axes.legend()
plt.show()

# %% [markdown]
# ### Exercise
#
# The first loss that was logged is that of a model that has hardly learned anything. Which loss has a model that
# holds all entries of the vocabulary for equally probable?
#
# <details><summary>Answer</summary>
#
# log(vocabulary), in nats: with 2,000 entries 7.6. A first loss far above it means that something is wrong, such as
# a learning rate that is too high. The loss that training logs is a mean over the last steps, so it is lower
# already.
#
# </details>

# %% [markdown]
# ## 6. Translating
#
# The workdir is all it takes to use the model, now or in another program: `load_run` finds configuration, task and
# tokenizer, `load_params` the parameters as a tree of NumPy arrays. Those of one step are a little off in a random
# direction, so we take their mean over the last checkpoints, which translates better than any of them.

# %%
from tfx_jax.training import load_run
from tfx_jax.training.checkpoint import average_checkpoints, load_params

run = load_run(WORKDIR)
average_checkpoints(WORKDIR, last=config.keep_last, or_fewer=True)
params = load_params(WORKDIR, "average")
translator = run.task.translator(run.graphdef)

held_out = GrammarPairs("test", size=5)
pairs = [held_out[index] for index in range(len(held_out))]
translations = translator(params, [pair["source"] for pair in pairs])
for pair, translation in zip(pairs, translations, strict=True):
    print("source     ", pair["source"])
    print("reference  ", pair["target"])
    print("translation", translation, end="\n\n")

# %% [markdown]
# The translator writes piece by piece and keeps the four best beginnings (*beam search*). Try your own words; the
# grammar has a small vocabulary, so borrow from the sentences above.

# %%
SENTENCE = "my aunt found the banana that taro 's friend bought yesterday ."
translator(params, [SENTENCE])

# %% [markdown]
# ### Exercise
#
# What does the model do with words that the grammar does not have? Guess, then run the answer.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
print(*translator(params, ["the astronaut compiled the kernel .", "my aunt found the zeppelin ."]), sep="\n")
# It translates all the same, with words that it knows: nothing in its training said "I do not know this word".

# %% [markdown]
# ## 7. What the model looked at
#
# Attention weights are numbers, so we can ask for them: every layer, every head, one array each.

# %%
maps, source_pieces, target_pieces = run.task.attention(run.trained(params), SENTENCE)
for name, weights in maps.items():
    print(f"{name:<16} [heads, queries, keys] = {weights.shape}")

# %%
from tfx_jax.training.reporting.attention_plot import clean_piece, plot_attention

display(plot_attention(maps, source_pieces, target_pieces, target_inputs=["<s>", *target_pieces[:-1]]))

# %% [markdown]
# Read the large panel as Figure 3 of [Bahdanau et al. (2015)](https://arxiv.org/abs/1409.0473). The source runs along
# the top and the translation down the side; a row is one step of writing, and its dark cells are the source pieces that
# the decoder read in that step.
#
# * Languages with the same word order would give a dark **diagonal**.
# * Here the lines **cross**. The Japanese verb comes last, so the bottom rows reach back to the English verb on the
#   left. The clause *that taro 's friend bought yesterday* moves in front of *banana*, so its rows lie above the row of
#   *banana* while its columns lie to the right.
# * A particle such as は or を has no word of its own in English: its row reads the noun that it follows or the verb
#   that asks for it, or spreads. (A row named ␣ writes nothing but a space.)
#
# The large panel is a mean; below it are the heads that it is the mean of, and the two kinds of self-attention. The
# decoder's is empty above the diagonal: that is the causal mask. A map shows where information came from, not why, and
# some heads rest on a piece that tells them nothing, such as the end of the sentence.
#
# The darkest cell of each row is a word alignment that no one taught the model:

# %%
cross = np.mean([weights.mean(axis=0) for name, weights in maps.items() if name.endswith("cross")], axis=0)
for piece, row in zip(target_pieces, cross, strict=True):
    print(f"{clean_piece(source_pieces[row.argmax()]):>12}  {row.max():4.0%}  {clean_piece(piece)}")

# %% [markdown]
# ### Exercise
#
# Which heads point at one piece, and which spread their weight? The entropy of a row of weights says it: 0 for one
# piece, log S for all S alike.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for name, weights in maps.items():
    entropy = -(weights * np.log(np.maximum(weights, 1e-9))).sum(axis=-1).mean(axis=-1)  # [heads]
    print(f"{name:<16} {np.round(entropy, 2)} of at most {np.log(weights.shape[-1]):.2f} nats")

# %% [markdown]
# ## 8. Where next
#
# **Take the function alone.** `tfx_jax.functional` imports JAX, NumPy and jaxtyping only: wrap it in a module of
# whatever framework you use. In Flax Linen:

# %%
from flax import linen


class CausalAttention(linen.Module):
    num_heads: int
    head_size: int

    @linen.compact
    def __call__(self, x):
        heads = [linen.DenseGeneral((self.num_heads, self.head_size), use_bias=False)(x) for _ in range(3)]
        out = dot_product_attention(*heads, is_causal=True)
        return linen.DenseGeneral(x.shape[-1], axis=(-2, -1))(out)


out, _ = CausalAttention(num_heads=2, head_size=8).init_with_output(jax.random.key(0), batch)
print(out.shape)

# %% [markdown]
# **Train on your own text.** Files with one sentence a line take the place of the grammar:
#
# ```python
# PairData(
#     dataset="files", data_dir="FOLDER", source_language="de", target_language="en",
#     train_source="train.de", train_target="train.en",
#     validation_source="valid.de", validation_target="valid.en",
# )
# ```
#
# **Use a shell.** The command line does what this notebook did, and opens what it left behind:
#
# ```sh
# echo "the dog saw the cat ." | tfx-jax translate --workdir=runs/colab_demo
# tfx-jax attend --workdir=runs/colab_demo --source="the dog saw the cat ." --output=map.png
# tfx-jax evaluate --workdir=runs/colab_demo
# ```
#
# **Read the code.** A formula is in `tfx_jax/functional`, a parameter in `tfx_jax/nn`, a paper in `tfx_jax/models`, a
# task in `tfx_jax/tasks`, a paper's number in `experiments`. Each file fits in one sitting.
