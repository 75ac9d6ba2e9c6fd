# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Long context
#
# [![Open in
# Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/long_context.ipynb)
#
# Dense attention compares every token with every other one: twice the text, four times the work. Many have found
# ways to do less. Each of them gives something up, and papers seldom say what. Here you see, on tasks that train in
# about a minute each:
#
# 1. what attentions cost, as text grows,
# 2. a task that only a long look back can solve, and who solves it,
# 3. what each of them looked at,
# 4. hashing: more rounds when it counts,
# 5. random features: how many are enough,
# 6. layers that do not all look far,
# 7. a memory that goes from text to text,
# 8. what training keeps, and reversible layers,
# 9. what to choose.
#
# The [attention
# family](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/attention_family.ipynb) explains
# how each of them works; here they are measured.

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
import functools
import os
import pathlib
import re
import time
import zlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from tfx_jax.functional import (
    bigbird_attention,
    chunked_attention,
    dot_product_attention,
    favor_attention,
    linear_attention,
    lsh_attention,
    orthogonal_features,
    reversible_stack,
    sliding_window_attention,
)
from tfx_jax.models import GPTConfig
from tfx_jax.models.transformer_xl import TransformerXLConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.tasks import DuplicationConfig, DuplicationData, RecurrentLanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig, OptimizerConfig, load_run, train
from tfx_jax.training.checkpoint import load_params

IS_TEST = os.environ.get("TFX_JAX_VARIANT") == "test"  # runs in seconds, but learns nothing
RUNS = pathlib.Path("runs/colab_long_context" + ("_test" if IS_TEST else ""))

# %% [markdown]
# ## 1. What they cost
#
# A compiler knows how much memory a program needs before it runs. So nothing has to be computed to compare
# attentions at 32,768 tokens, forward and backward, for one row of four heads of 64:

# %%
HEADS, SIZE = 4, 64
attentions = {
    "dense": functools.partial(dot_product_attention, implementation="xla"),
    "chunked": chunked_attention,
    "window": functools.partial(sliding_window_attention, window=128),
    "BigBird": functools.partial(  # blocks as published
        bigbird_attention, block_size=64, num_global_blocks=2, num_window_blocks=3, num_random_blocks=3
    ),
    "LSH": functools.partial(lsh_attention, rng=jax.random.key(0), num_buckets=(32, 32)),  # for the longest texts below
    "FAVOR+": functools.partial(favor_attention, projection=orthogonal_features(jax.random.key(0), 256, SIZE)),
    "linear": linear_attention,
}


def forward_and_backward(attend):
    """The gradients of a sum, as training needs them."""
    return jax.grad(lambda *inputs: attend(*inputs).astype(jnp.float32).sum(), argnums=(0, 1, 2))


def compiled(attend, length):
    """The program for inputs of a length, without making any."""
    shape = jax.ShapeDtypeStruct((1, length, HEADS, SIZE), jnp.float32)
    return jax.jit(forward_and_backward(attend)).lower(shape, shape, shape).compile()


def seconds(program, length):
    """The shortest of three runs, on numbers drawn at random."""
    random = np.random.default_rng(0)
    inputs = [random.normal(size=(1, length, HEADS, SIZE)).astype(np.float32) for _ in range(3)]
    jax.block_until_ready(program(*inputs))
    found = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        found.append(time.perf_counter() - start)
    return min(found)


lengths = [512, 1_024] if IS_TEST else [512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768]
longest_run = 1_024 if IS_TEST else 4_096
memory, times = {}, {}
for name, attend in attentions.items():
    programs = {length: compiled(attend, length) for length in lengths}
    memory[name] = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs.values()]
    times[name] = [seconds(program, length) for length, program in programs.items() if length <= longest_run]

_, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
for (name, values), line in zip(memory.items(), ("-", "--", ":", "-.") * 2, strict=False):
    left.loglog(lengths, values, line, marker="o", label=name, base=2)
    right.loglog(lengths[: len(times[name])], times[name], line, marker="o", label=name, base=2)
left.set(xlabel="tokens", ylabel="MiB beside inputs and outputs")
right.set(xlabel="tokens", ylabel="seconds on this machine")
left.legend()
plt.show()
print(f"at {lengths[-1]:,} tokens:", ", ".join(f"{name} {values[-1]:,.0f} MiB" for name, values in memory.items()))

# %% [markdown]
# Two lessons. *Memory is not work*: `chunked_attention` gives the numbers of dense attention, to rounding, and
# never has the array of all pairs; so do the kernels that `dot_product_attention` calls on TPUs and GPUs. Where
# memory is all that hurts, nothing has to be given up. And *less work is not less time*: sorting, gathering and
# small blocks cost time too. So look in the right panel where each curve crosses that of dense attention. On two cores
# linear, window, FAVOR+ and BigBird were faster from 512 tokens on; a GPU or TPU may say otherwise.

# %% [markdown]
# ### Exercise
#
# Twice the text: by what does memory grow under each attention, at the largest lengths of the picture?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for name, values in memory.items():
    print(f"{name:<8} {values[-1] / values[-2]:.1f} times")
# 4 for an array of all pairs, 2 for what grows as the text does.

# %% [markdown]
# ## 2. A task that needs a long look back
#
# The model reads a random sequence twice, `0 w 0 w`, and has to say the second `w` ([Kitaev et al.,
# 2020](https://arxiv.org/abs/2001.04451), section 5). The model predicts the next symbol, and every symbol stands 31
# positions before the place where it is asked for: half the text, 32, less one. Nothing else helps: an attention that
# does not look there can only guess.

# %%
LENGTH, SYMBOLS = 64, 31


def steps(number):
    """How a training goes: so many steps, and an evaluation at their end."""
    number = 2 if IS_TEST else number
    return {"num_steps": number, "eval_every": number, "checkpoint_every": number, "log_every": 50}


NO_DROPOUT = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}


def duplication(attention, num_layers=1, learning_rate=3e-3):
    """A GPT that learns to say a sequence again."""
    sizes = {"num_layers": num_layers, "d_model": 128, "num_heads": 4, "d_ff": 128}
    return ExperimentConfig(
        GPTConfig(vocab_size=SYMBOLS + 1, max_length=LENGTH, attention=attention, **sizes, **NO_DROPOUT),
        DuplicationConfig(DuplicationData(SYMBOLS, LENGTH, eval_sequences=256, tokens_per_batch=32 * LENGTH)),
        optimizer=OptimizerConfig(peak_learning_rate=learning_rate, warmup_steps=50),
        **steps(250),
    )


def folder(name, config):
    """The folder of a run: another one for other values of the configuration."""
    return str(RUNS / f"{name}_{zlib.crc32(repr(config).encode()):08x}")


def learn(name, config):
    """Trains a model; run again, it resumes where it stopped."""
    workdir = folder(name, config)
    result = train(config, workdir)
    if result.signum is not None:
        raise RuntimeError(f"stopped at step {result.step}: run this cell again to go on")
    return load_run(workdir), load_params(workdir)


def options(name, **values):
    """An attention as configurations name it: `--config.model.attention.name=window`, and so on."""
    return AttentionConfig(name, AttentionOptions(**values))


choices = {
    "dense": options("dense"),
    "window of 16": options("window", window=16, block_size=16),
    "window of 40": options("window", window=40, block_size=16),
    "local blocks": options("local", block_size=16),
    "LSH": options("lsh", num_hashes=4, num_buckets=16, chunk_size=8),
    "FAVOR+": options("favor", num_features=64, block_size=16),
    "linear": options("linear", block_size=16),
}
if IS_TEST:
    choices = {name: choices[name] for name in ("dense", "LSH")}
runs, accuracy = {}, {}
for name, attention in choices.items():
    runs[name] = learn(name.replace(" ", "_"), duplication(attention))
    run, params = runs[name]
    accuracy[name] = run.evaluate(params).metrics["accuracy"]
for name, value in accuracy.items():
    print(f"{name:<14} {value:6.2f} % of the symbols")
print(f"{'by guessing':<14} {100 / SYMBOLS:6.2f} %")

# %% [markdown]
# A window of 16 positions cannot see 31 back, and neither can a local block: however long they train, they guess. A
# window of 40 does as dense attention does. LSH finds the symbol without being told where. FAVOR+ and linear
# attention see all positions at once through a narrow channel, and still single out one of 64: they lose nothing here,
# because training shaped their queries and keys for that channel. Section 5 asks another thing: how well FAVOR+
# imitates dense attention with queries and keys that were not made for it.

# %% [markdown]
# ### How far back does real text look?
#
# A word that was said before is easier to say again. This is Lincoln's address at Gettysburg (1863). How far back is
# the last occurrence of each word?

# %%
ADDRESS = """Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in
Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can
long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a
final resting place for those who here gave their lives that that nation might live. It is altogether fitting and
proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave
men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world
will little note, nor long remember what we say here, but it can never forget what they did here. It is for us the
living, rather, to be dedicated here to the unfinished work which they who fought here have thus far so nobly advanced.
It is rather for us to be here dedicated to the great task remaining before us -- that from these honored dead we take
increased devotion to that cause for which they gave the last full measure of
devotion -- that we here highly resolve that these dead shall not have died in
vain -- that this nation, under God, shall have a new birth
of freedom -- and that government of the people, by the people, for the people,
shall not perish from the earth."""

words = re.findall(r"[a-z]+", ADDRESS.lower())
last_place, distances = {}, []
for place, word in enumerate(words):
    if word in last_place:
        distances.append(place - last_place[word])
    last_place[word] = place
distances = np.sort(distances)

_, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
axes.step(distances, np.arange(1, len(distances) + 1) / len(distances), where="post")
axes.set(xlabel="words back to the last occurrence", ylabel="share of the words said again", ylim=(0, 1), xscale="log")
plt.show()
print(f"{len(words)} words, {len(distances)} of them said before")

# %% [markdown]
# ### Exercise
#
# How many words must a window have to see the last occurrence of half of the repeated words, and of 90 %? What does
# that say about real text, compared with the task above?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for share in (0.5, 0.9):
    print(f"{share:.0%}: a window of {int(np.quantile(distances, share, method='higher'))} words")
# Half of the repeated words are near, and a tenth is more than a hundred words away: windows in most layers and a long
# look in a few fit such text. In the task above every answer is at one distance, 31 tokens.

# %% [markdown]
# ## 3. What they looked at
#
# For one sequence, the largest weight over all heads. The line that has to be bright is 31 below the diagonal, where
# the answer stands:

# %%
sequence = DuplicationData(SYMBOLS, LENGTH).draw("validation")(0, 0)[0]["inputs"][None]
figure, panels = plt.subplots(2, 4, figsize=(14, 7.4), layout="constrained")
for panel in panels.flat:
    panel.set_axis_off()
for panel, (name, (run, params)) in zip(panels.flat, runs.items(), strict=False):
    model = nnx.merge(run.graphdef, params)
    _, maps = jax.jit(lambda model, tokens: model(tokens, return_attention=True))(model, sequence)
    weights = np.asarray(maps["decoder/0/self"][0]).max(axis=0)
    panel.imshow(weights, cmap="viridis", vmin=0, vmax=1)
    panel.set_title(f"{name}: {accuracy[name]:.0f} %")
plt.show()

# %% [markdown]
# ### Exercise
#
# The line should be 31 tokens back. For which share of the symbols that can be known does the largest weight of the
# dense model's heads lie there?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
run, params = runs["dense"]
_, maps = jax.jit(lambda model, tokens: model(tokens, return_attention=True))(nnx.merge(run.graphdef, params), sequence)
largest = np.asarray(maps["decoder/0/self"][0]).argmax(axis=-1)  # [heads, queries], positions of keys
asking = np.arange(LENGTH // 2, LENGTH - 1)  # positions from which the second w is predicted
print("share in each head:", (asking - largest[:, asking] == LENGTH // 2 - 1).mean(axis=-1).round(2))

# %% [markdown]
# ## 4. Hashing: more rounds when it counts
#
# LSH sorts tokens into buckets by a random rotation, and compares only those of a bucket. A key that falls into
# another bucket is missed; another rotation gives another chance. Rounds can be added after training, for the price
# of time. The model that was trained with four, read with one to sixteen:

# %%
run, params = runs["LSH"]
for rounds in (1, 2) if IS_TEST else (1, 2, 4, 8, 16):
    attention = options("lsh", num_hashes=rounds, num_buckets=16, chunk_size=8)
    config = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, attention=attention))
    found = load_run(folder("LSH", duplication(choices["LSH"])), config=config).evaluate(params).metrics["accuracy"]
    print(f"{rounds:>2} rounds {found:6.2f} %")

# %% [markdown]
# ### Exercise
#
# A key and its query fall into different buckets with probability p in each round, independently. How often are they
# in no common bucket after n rounds?
#
# <details><summary>Answer</summary>
#
# With probability p to the power of n, if the rounds are independent: if one misses 40 %, four miss 3 % and eight less
# than 0.1 %.
#
# </details>

# %% [markdown]
# ## 5. Random features: how many are enough
#
# FAVOR+ replaces $e^{q \cdot k}$ by a product of random features, right on average. How far off is it? That depends
# on the number of features, and much more on how *sharp* the attention is: on the length of queries and keys.

# %%
T = 256
directions = np.random.default_rng(0).normal(size=(2, 1, T, 1, 16)).astype(np.float32)
values = np.random.default_rng(1).normal(size=(1, T, 1, 16)).astype(np.float32)
numbers = [16, 64, 256, 1_024]


@functools.partial(jax.jit, static_argnames="number")
def relative_error(scale, number):
    """The length of the difference to dense attention over the length of that."""
    query, key = scale * directions
    projection = orthogonal_features(jax.random.key(0), number, 16)
    exact = dot_product_attention(query, key, values)
    return jnp.linalg.norm(favor_attention(query, key, values, projection=projection) - exact) / jnp.linalg.norm(exact)


_, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
for scale in (0.5, 1.0, 1.5, 2.0):
    errors = [float(relative_error(scale, number)) for number in numbers]
    axes.loglog(numbers, errors, marker="o", base=2, label=f"numbers of standard deviation {scale}")
axes.axhline(1, color="gray", linewidth=0.8)
axes.set(xlabel="features", ylabel="relative error")
axes.legend()
plt.show()

# %% [markdown]
# Four times the features would halve the error of a mean of independent numbers. Here they divide it by 1.4 to 2.2 for
# the shortest vectors, and by hardly more than 1 for the longer ones: most draws miss the few features that count, and
# one draw, as here, is subject to chance. The number that is needed grows exponentially with the squared length of
# queries and keys. Soft, spread-out attention is cheap to imitate, one that points at a single token is not. That
# does not contradict section 2: there the model was trained with its features, and found queries and keys that point
# at one token in spite of them. A model trained with dense attention cannot simply be read with FAVOR+.

# %% [markdown]
# ### Exercise
#
# How many features does a relative error below 0.25 take at each standard deviation of the picture? (Near the limit the
# answer depends on the draw, the key of `orthogonal_features`.)

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for scale in (0.5, 1.0, 1.5, 2.0):
    enough = [number for number in numbers if relative_error(scale, number) < 0.25]
    print(f"{scale}: {enough[0] if enough else f'more than {numbers[-1]:,}'}")

# %% [markdown]
# ## 6. Layers that do not all look far
#
# Attention need not be the same in every layer. Names with commas are a pattern that the layers repeat. Two windows
# of 16 see 32 positions back together, one through the other; a dense layer behind a window sees all:

# %%
patterns = {
    "two windows of 16": options("window", window=16, block_size=16),
    "two windows of 8": options("window", window=8, block_size=8),
    "window, then dense": options("window,dense", window=8, block_size=8),
}
for name, attention in list(patterns.items())[-1 if IS_TEST else 0 :]:
    run, params = learn(
        name.replace(" ", "_").replace(",", ""), duplication(attention, num_layers=2, learning_rate=1e-3)
    )
    print(f"{name:<18} {run.evaluate(params).metrics['accuracy']:6.2f} %")

# %% [markdown]
# Reach adds up: layers times window. But what two layers carry has to fit into the vector of the token between, and
# both have to learn their half of it before either is rewarded. Two windows of 16 reach far enough, and after 250 steps
# they still guess. Whether more steps help, `steps(1_000)` in `duplication` shows. A dense layer after a window
# learns at once. That mixed pattern, many cheap layers and a few dense ones, is what many of today's large models do.

# %% [markdown]
# ### Exercise
#
# How many layers with a window of 16 does `LENGTH = 128` take, and with a window of 8?
#
# <details><summary>Answer</summary>
#
# The symbol is then 63 positions back: 4 layers with a window of 16 reach 64, with a window of 8 it takes 8. And
# each has to learn its part first, so a dense layer is the better remedy.
#
# </details>

# %% [markdown]
# ## 7. A memory that goes from text to text
#
# Transformer-XL ([Dai et al., 2019](https://arxiv.org/abs/1901.02860)) reads a text in segments and keeps the
# vectors that each layer had for the last ones: they can be attended to, but no gradient flows into them. Our text
# says every line twice, and a line is longer than a segment:

# %%
RUNS.mkdir(parents=True, exist_ok=True)
random = np.random.default_rng(0)
letters = random.integers(ord("a"), ord("z") + 1, size=(200 if IS_TEST else 6_000, 23)).astype(np.uint8)
lines = [bytes(line).decode() for line in letters]
text = RUNS / "twice.txt"
text.write_text("".join(f"{line}\n{line}\n" for line in lines))


def with_memory(length):
    """A Transformer-XL with segments of 16 characters and a memory of so many."""
    sizes = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128}
    lengths = {"memory_length": length, "eval_memory_length": length}
    batches = {"tokenizer": "characters", "max_length": 16, "tokens_per_batch": 16 * 32}
    data = TextData(dataset="files", train_file=str(text), validation_share=0.1, **batches)
    return ExperimentConfig(
        TransformerXLConfig(vocab_size=64, **sizes, **lengths, **NO_DROPOUT),
        RecurrentLanguageModelConfig(data),
        optimizer=OptimizerConfig(peak_learning_rate=5e-3, warmup_steps=50, clip_norm=0.25),
        **steps(400),
    )


losses = {}
for length in (1,) if IS_TEST else (1, 16, 32):
    run, params = learn(f"memory_{length}", with_memory(length))
    losses[length] = run.evaluate(params).metrics["loss"]
    print(f"memory of {length:>2}: {losses[length]:.3f} nats a character")
first, second = np.log(26) * 23 / 24, 0.0
print(f"lines without a memory {first:.3f}, with a perfect one {(first + second) / 2:.3f}")

# %% [markdown]
# The first time a line is random, and costs $\log 26$ nats for each of its 23 letters whatever one remembers; the
# second time it costs nothing, if what stood 24 characters before can be seen. A memory of one character is none;
# one of 16 lets only some positions of a segment see that far, one of 32 all of them.

# %% [markdown]
# ### Exercise
#
# The lines get 50 letters. What memory does the model need now, and what is the loss per character with a perfect
# one?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
letters_of_line = 50
print(f"the answer stands {letters_of_line} characters before the query: one layer needs a memory of {letters_of_line}")
print(f"{np.log(26) * letters_of_line / (letters_of_line + 1) / 2:.3f} nats: the first time all letters, then nothing")

# %% [markdown]
# ## 8. What training keeps
#
# Attention is one thing that grows; the other is what the backward pass wants back from every layer. Recomputing it
# (`remat` in any of our models) costs a third more work. *Reversible* layers ([Gomez et al.,
# 2017](https://arxiv.org/abs/1707.04585)) recover the input of a layer from its output instead, so that memory does
# not grow with the number of layers at all:

# %%
WIDTH = 256


def half(matrix, x, rng):
    """What each half of a layer adds."""
    del rng
    return jnp.tanh(x @ matrix)


def kept(is_reversible, num_layers, length=1_024 if IS_TEST else 8_192):
    """MiB that the gradients of a stack need beside its inputs and outputs."""
    matrices = jax.ShapeDtypeStruct((num_layers, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((length, WIDTH), jnp.float32)

    def plain(params, x):
        def layer(streams, matrices):
            x1, x2 = streams
            x1 = x1 + half(matrices[0], x2, None)
            return (x1, x2 + half(matrices[1], x1, None)), None

        return jax.lax.scan(layer, (x, x), params)[0]

    def loss(params, x):
        y1, y2 = reversible_stack(half, half, params, x, x) if is_reversible else plain(params, x)
        return (y1 * y2).sum()

    program = jax.jit(jax.grad(loss)).lower((matrices, matrices), x).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


print("layers  plain  reversible")
for num_layers in (2, 8, 32):
    print(f"{num_layers:>6} {kept(False, num_layers):>6,.0f} {kept(True, num_layers):>11,.0f}  MiB")

# %% [markdown]
# ### Exercise
#
# How does the memory of each kind grow from 8 layers to 32?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for name, is_reversible in {"plain": False, "reversible": True}.items():
    print(f"{name:<10} {kept(is_reversible, 32) / kept(is_reversible, 8):.1f} times")
# Plain layers keep what the backward pass wants from each: nearly 4 times. Reversible ones keep the output of the last.

# %% [markdown]
# ## 9. What to choose
#
# * Up to a few thousand tokens: dense attention, by a kernel (`dot_product_attention` chooses it) or `chunked`.
# * What matters is near: `window`, in most layers, with a dense or global one now and then.
# * What matters is anywhere, but alike: LSH or routing. Measure whether they pay at your length.
# * What matters is spread over everything: `favor` or `linear`.
# * A stream without an end: a memory, as in Transformer-XL.
# * Memory, not time, is what is short: `remat`, reversible layers, sequences divided over devices (`ring`).
#
# Things to try here: `num_features=4` for FAVOR+, `LENGTH = 128` with the same window, `chunk_size=4` for LSH, more
# segments of memory than a line needs.
#
# <details><summary>Answer for LENGTH = 128</summary>
#
# The symbol is then 63 positions back, so the window of 40 guesses too: reach has to grow with the text, as that of
# dense attention, LSH, FAVOR+ and linear attention does by itself.
#
# </details>
#
# The same on the command line, for any model and any task:
#
# ```sh
# tfx-jax train --config=gpt_duplication:small --workdir=runs/lsh --config.model.attention.name=lsh \
#   --config.model.attention.options.num_hashes=2 --config.model.attention.options.num_buckets=16 \
#   --config.model.attention.options.chunk_size=8
# tfx-jax bench attention --function=lsh --length=16384
# ```
