# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Before the Transformer
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/before_the_transformer.ipynb)
#
# Attention was invented for a recurrent network that forgot. Here are the four years from 2014 to 2017 in four models,
# each trained in this notebook in about a minute, on the same sentences and for as many steps:
#
# 1. a sentence as one vector (Cho et al., 2014; Sutskever et al., 2014),
# 2. where the vector is too small,
# 3. looking again at every step (Bahdanau et al., 2015),
# 4. what it looks at,
# 5. the same with products alone (Luong et al., 2015),
# 6. long sentences,
# 7. attention without recurrence (Vaswani et al., 2017),
# 8. where to go next.
#
# You need to know NumPy arrays; the [translation notebook](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/translation.ipynb)
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
import os
import zlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

from tfx_jax.metrics import bleu_scores
from tfx_jax.models import TransformerConfig
from tfx_jax.models.seq2seq import Seq2SeqConfig
from tfx_jax.synthetic.grammar import GrammarPairs
from tfx_jax.tasks import PairData, TranslationConfig
from tfx_jax.training import ExperimentConfig, OptimizerConfig, load_run, tiny_variant, train
from tfx_jax.training.checkpoint import load_params

VARIANT = os.environ.get("TFX_JAX_VARIANT", "demo")  # "test" runs in seconds, but learns nothing

# %% [markdown]
# ## 1. A sentence as one vector
#
# The library has a small grammar that speaks English and Japanese. Japanese puts the verb last and a relative clause
# before its noun, so words have to move:

# %%
held_out = GrammarPairs("test", size=50 if VARIANT == "test" else 1_000)
sentences = [held_out[index]["source"] for index in range(len(held_out))]
references = [held_out[index]["target"] for index in range(len(held_out))]
for number in range(3):
    print(sentences[number], references[number], sep="\n", end="\n\n")

# %% [markdown]
# A recurrent network reads a sentence word by word. It keeps a *state* $h$, a vector, and each word $x_t$ changes it:
# $h_t = f(h_{t-1}, x_t)$. A *gated recurrent unit* decides how much of the old state to keep:
#
# $$r, z = \sigma(W x_t + U h_{t-1}) \qquad n = \tanh(W_n x_t + U_n (r \odot h_{t-1})) \qquad
# h_t = z \odot h_{t-1} + (1 - z) \odot n$$
#
# In the library a cell is a function of one step, and a loop that compiles to one program whatever the length runs it.
# The product of all inputs with $W$ needs no state, so it is made before the loop, for all words at once:

# %%
from tfx_jax.functional.recurrent import gru_cell, scan_cell

random = np.random.default_rng(0)
size, length = 4, 6
inputs = random.normal(size=(1, length, 3 * size)).astype(np.float32)  # x W of every word, [batch, length, 3 sizes]
recurrent = random.normal(size=(size, 3 * size)).astype(np.float32)  # U
start = (jnp.zeros((1, size)),)
states, last = scan_cell(gru_cell, inputs, start, recurrent, np.ones((1, length), bool))
print("states", states.shape, "and the last of them", last[0].shape)

# %% [markdown]
# An *encoder-decoder* is two such networks. The first reads the source; its last state, one vector, is all that the
# second one gets, which writes the translation. Everything that was said has to fit into that vector, whether the
# sentence has four words or twenty.

# %% [markdown]
# All of our models learn in the same way, so training is a function of the model. Each reads the same batches for as
# many steps:


# %%
def learn(name, model):
    """Trains a model on the grammar for 300 steps; returns the run, to use it, and its parameters."""
    config = ExperimentConfig(
        model=model,
        task=TranslationConfig(PairData(dataset="grammar", max_length=64, tokens_per_batch=1_024), label_smoothing=0.0),
        optimizer=OptimizerConfig(peak_learning_rate=0.01, warmup_steps=100, clip_norm=1.0),
        num_steps=300,
        checkpoint_every=300,
        eval_every=300,
        log_every=100,
    )
    if VARIANT == "test":
        config = tiny_variant(config)
    workdir = (
        f"runs/colab_before_{VARIANT}/{name}_{zlib.crc32(repr(config).encode()):08x}"  # other values, other folder
    )
    result = train(config, workdir)
    if result.signum is not None:
        raise RuntimeError(f"stopped at step {result.step}: run this cell again to go on")
    return load_run(workdir), load_params(workdir)


def recurrent_model(variant, cell="gru"):
    """Both sides have one layer, the encoder's in either direction."""
    return Seq2SeqConfig(
        vocab_size=2_000, num_layers=1, d_model=128, cell=cell, variant=variant, score="general", dropout_rate=0.0
    )


runs = {"fixed": learn("fixed", recurrent_model("fixed"))}

# %% [markdown]
# ### Exercise
#
# Which value of the gate z lets the state pass unchanged, and what is a cell with z = 0 and r = 1 everywhere?
#
# <details><summary>Answer</summary>
#
# With z = 1 the state stays what it was, however many words pass. With z = 0 and r = 1 it is tanh(W x + U h), the
# plain recurrent network: nothing is kept that the matrix U does not keep.
#
# </details>

# %% [markdown]
# ## 2. Where the vector is too small
#
# No training sentence has the content of a test sentence. Here is what the model makes of some, short ones first:


# %%
def translate(name, lines):
    """Translates by beam search."""
    run, params = runs[name]
    return run.task.translator(run.graphdef)(params, lines)


order = np.argsort([len(sentence.split()) for sentence in sentences], kind="stable")
some = [int(order[place]) for place in np.linspace(0, len(order) - 1, 6).round().astype(int)]
for number, translation in zip(some, translate("fixed", [sentences[number] for number in some]), strict=True):
    print("source     ", sentences[number])
    print("reference  ", references[number])
    print("translation", translation, end="\n\n")

# %% [markdown]
# Short ones are right or nearly so. In long ones the frame often survives and the details do not: another person,
# another number, another time. The vector remembers *that* somebody bought something somewhere, and fills in the rest
# with what is likely.

# %% [markdown]
# ### Exercise
#
# How many of the 20 shortest and of the 20 longest test sentences come out exactly right?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for kind, numbers in {"shortest": order[:20], "longest": order[-20:]}.items():
    found = translate("fixed", [sentences[number] for number in numbers])
    right = sum(text == references[number] for text, number in zip(found, numbers, strict=True))
    print(f"{right} of the 20 {kind}")

# %% [markdown]
# ## 3. Looking again at every step
#
# The encoder had made a state for *each* word, and all but the last were thrown away. Bahdanau, Cho and Bengio keep
# them. Before it writes a word, the decoder compares its own state $s$ with the state $h_j$ of every source word, by a
# small network, and reads the mean of the states with the softmax of these scores as weights:
#
# $$e_j = v^\top \tanh(W s + U h_j) \qquad \alpha = \operatorname{softmax}(e) \qquad c = \sum_j \alpha_j h_j$$
#
# The context $c$ is another vector at every step, and has room for one word's worth of source. The whole idea is a few
# lines, and the library's function does the same for batches, heads and several queries:

# %%
from tfx_jax.functional import additive_attention

h = random.normal(size=(length, size)).astype(np.float32)
s = random.normal(size=size).astype(np.float32)
W, U = random.normal(size=(2, size, size)).astype(np.float32)
v = random.normal(size=size).astype(np.float32)

scores = jnp.tanh(s @ W + h @ U) @ v
weights = jax.nn.softmax(scores)
context = weights @ h

keys = h[None, :, None]  # [batch, length, heads, size]
ours, our_weights = additive_attention(s[None, None, None], keys, keys, w_query=W, w_key=U, v=v, return_weights=True)
np.testing.assert_allclose(our_weights[0, 0, 0], weights, atol=1e-2)  # accelerators may round the products
np.testing.assert_allclose(ours[0, 0, 0], context, atol=1e-2)
print("weights", np.round(weights, 2))

# %%
runs["Bahdanau"] = learn("bahdanau", recurrent_model("bahdanau"))

# %% [markdown]
# ### Exercise
#
# What does the decoder read if v is 0?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
_, even = additive_attention(s[None, None, None], keys, keys, w_query=W, w_key=U, v=0 * v, return_weights=True)
print(np.round(even[0, 0, 0], 3))  # all scores are 0: the mean of all states, whatever s is
np.testing.assert_allclose(even, 1 / length, atol=1e-6)

# %% [markdown]
# ## 4. What it looks at
#
# The weights $\alpha$ are a row for each word written. No one told the model which word translates which:

# %%
from tfx_jax.training.reporting.attention_plot import plot_attention

SENTENCE = "my aunt found the banana that taro 's friend bought yesterday ."


def show_alignment(name):
    """Draws the source across, the translation down."""
    run, params = runs[name]
    maps, source_pieces, target_pieces = run.task.attention(run.trained(params), SENTENCE)
    display(plot_attention(maps, source_pieces, target_pieces))


show_alignment("Bahdanau")

# %% [markdown]
# This is Figure 3 of [Bahdanau et al. (2015)](https://arxiv.org/abs/1409.0473) for our two languages. The verb, last in
# Japanese, reaches back to the left; the clause moves in front of its noun. A state of a recurrent encoder has read its
# neighbors too, in both directions, so a step may rest one word beside the one that you would choose.
#
# ## 5. The same with products alone
#
# Luong, Pham and Manning simplified. The score is a product, with a matrix between (*general*) or without (*dot*),
#
# $$e_j = s^\top W h_j / \sqrt{d}$$
#
# which a processor does as one multiplication of matrices. The root is not theirs: the Transformer brought it, since a
# sum of many products makes a softmax that looks at one word and learns little (`scaled=False`). The decoder
# asks with its *new* state, and joins the answer to it, $\tilde{s} = \tanh(W_c [c; s])$, from which the word is read.
# What it found is fed to the next step, so that it knows where it has been.

# %%
runs["Luong"] = learn("luong", recurrent_model("luong", cell="lstm"))
show_alignment("Luong")

# %% [markdown]
# ### Exercise
#
# Why the root? Draw a query and ten keys of random numbers, and look at the largest weight of the softmax for
# vectors of 4, 64 and 1,024 numbers, with and without the division.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for d in (4, 64, 1_024):
    products = random.normal(size=(100, d)) @ random.normal(size=(10, d)).T  # [queries, keys]
    plain, scaled = (jax.nn.softmax(scores, axis=-1).max(axis=-1).mean() for scores in (products, products / d**0.5))
    print(f"d = {d:>5,}: largest weight {plain:.2f}, with the division {scaled:.2f}")

# %% [markdown]
# ## 6. Long sentences
#
# Figure 2 of the paper by Bahdanau et al. shows BLEU by length: without attention it falls, with attention it stays.
# Ours, on the test sentences, fall too, after so few steps, but those with attention by much less:


# %%
def bleu_by_length(name):
    """BLEU of the sentences of each range of lengths, in words of the source."""
    translations = translate(name, sentences)
    found = []
    for shortest, longest in RANGES:
        chosen = [n for n, sentence in enumerate(sentences) if shortest <= len(sentence.split()) <= longest]
        scores = bleu_scores(
            [translations[n] for n in chosen], [references[n] for n in chosen], language="ja", is_tokenized=True
        )
        found.append(scores.tokenized)
    return found


RANGES = ((1, 5), (6, 7), (8, 9), (10, 11), (12, 30))
curves = {name: bleu_by_length(name) for name in runs}


def show_curves():
    """Draws a line for each model."""
    _, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for name, values in curves.items():
        axes.plot(range(len(RANGES)), values, marker="o", label=name)
    axes.set_xticks(range(len(RANGES)), [f"{low} to {high}" for low, high in RANGES])
    axes.set(xlabel="words of the source", ylabel="BLEU", ylim=(0, 103))
    axes.legend(loc="lower left")
    plt.show()


show_curves()
for name, values in curves.items():
    print(f"{name:<12}", "  ".join(f"{value:5.1f}" for value in values))

# %% [markdown]
# ### Exercise
#
# How much BLEU does each model lose from the shortest sentences to the longest?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for name, values in curves.items():
    print(f"{name:<12} {values[0] - values[-1]:5.1f}")

# %% [markdown]
# ## 7. Attention without recurrence
#
# Two things are left that attention did not fix. The states are still made one after another, so a sentence of $n$
# words costs $n$ steps that no machine can take at the same time; and what the first word says reaches the last one
# through all the states between them. Vaswani et al. asked what the recurrence was still for. If the decoder may look
# at every source word, a source word may look at every other: *self-attention*. A layer is then a few products of
# matrices for all words at once, and any two words are one step apart. Order, which the recurrence knew by itself, has
# to be told: [positions](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/translation.ipynb).

# %%
runs["Transformer"] = learn(
    "transformer",
    TransformerConfig(
        vocab_size=2_000, num_layers=2, d_model=128, num_heads=4, d_ff=256, dropout_rate=0.0, pre_norm=True
    ),
)
curves["Transformer"] = bleu_by_length("Transformer")
show_curves()
for name, values in curves.items():
    print(f"{name:<12}", "  ".join(f"{value:5.1f}" for value in values))

# %% [markdown]
# After so few steps a recurrent model may well be ahead: it knows order from the start, where a Transformer has to
# learn what positions mean. Four things are worth trying here:
#
# * `num_steps=1_500` in `learn`, as the translation notebook has it, is long enough for all of them;
# * `d_model=32` in `recurrent_model`: which of the models suffers most from smaller vectors, and at which lengths?
# * `score="dot"`, which has no matrix between the states of both sides;
# * the tokens per second that training printed, on a GPU too: which model gains from it, and why?
#
# ## 8. Where next
#
# The command line trains the same models, on your own sentences too, and opens what they left behind:
#
# ```sh
# tfx-jax train --config=seq2seq_demo --workdir=runs/seq2seq
# tfx-jax attend --workdir=runs/seq2seq --source="the dog saw the cat ." --output=map.png
# tfx-jax experiments | grep seq2seq
# ```
#
# `tfx_jax/functional/recurrent.py` has the cells, `tfx_jax/functional/attention/additive.py` the scores, and
# `tfx_jax/models/seq2seq.py` the three models of this notebook. The next step of the story is the
# [attention family](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/attention_family.ipynb).
