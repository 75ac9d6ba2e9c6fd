# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pretrained models
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/pretrained.ipynb)
#
# What is in a folder with a model, and what can be done with it:
#
# 1. load a folder,
# 2. generate text,
# 3. fill in hidden words,
# 4. fine-tune: classify, tag, answer,
# 5. look at heads,
# 6. save.
#
# The models that people share have hundreds of millions of parameters and have read books. So that this notebook needs
# no download and no GPU, it makes two small ones of the same architectures, GPT-2 and BERT, and lets them read
# sentences of the library's built-in grammar for a minute each. Everything else is done as with large ones.

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
import collections
import functools
import html
import os
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from IPython.display import HTML, display

IS_TEST = os.environ.get("TFX_JAX_VARIANT") == "test"  # a few steps of training: quick, but nothing is learned
RUNS = pathlib.Path("runs/pretrained")

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

# %% [markdown]
# ## 1. A model is a folder
#
# Hugging Face's folders hold three things: `config.json`, the sizes; `model.safetensors`, the parameters by name; and a
# tokenizer, which turns text into numbers. Here we write one ourselves. Its parameters are random: it has read nothing.

# %%
from tfx_jax.data.tokenizers import train_or_load_folder
from tfx_jax.models import GPT, GPTConfig, hf
from tfx_jax.synthetic.grammar import grammar_documents

documents = grammar_documents("train", 2_000)  # lists of sentences, about one person or thing each
print(*documents[0], sep="\n", end="\n\n")

RANDOM_GPT = RUNS / "random_gpt"
tokenizer = train_or_load_folder(
    RANDOM_GPT, lambda: ["\n".join(document) for document in documents], kind="bpe", family="gpt", vocab_size=600
)
sizes = GPTConfig(vocab_size=tokenizer.vocab_size, max_length=128, num_layers=2, d_model=128, num_heads=4)
hf.save(GPT(sizes, rngs=nnx.Rngs(0)), RANDOM_GPT, fields={"eos_token_id": tokenizer.eos_id})

for path in sorted(RANDOM_GPT.iterdir()):
    print(f"{path.stat().st_size:>9,} bytes  {path.name}")

# %% [markdown]
# `hf.load` reads such a folder, and `load_folder_tokenizer` its tokenizer. Neither torch nor transformers is needed,
# and nothing in the folder is executed.
#
# Do you have a model of your own on disk, GPT-2 for instance? Name its folder here: all that follows up to the training
# works with it too, and its sentences will be better than ours.

# %%
from tfx_jax.data.tokenizers import load_folder_tokenizer

FOLDER = RANDOM_GPT

model = hf.load(FOLDER)
tokenizer = load_folder_tokenizer(FOLDER)
print(type(model).__name__, "with", f"{sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))):,}", "parameters")
print(model.config)

# %% [markdown]
# The model is a function from tokens to *logits*: for every place of the text, a score for each token of the vocabulary
# to come next. Softmax makes probabilities of them.

# %%
PROMPT = "my grandfather was waiting for"

tokens = tokenizer.encode(PROMPT)
print(tokenizer.pieces(tokens), "(Ġ is a space)")

logits = model(jnp.array([tokens]))  # [batch, length, vocabulary]
print("logits", logits.shape)

probabilities = jax.nn.softmax(logits[0, -1])
for token in np.argsort(-probabilities)[:3].tolist():
    print(f"{probabilities[token]:6.2%} {tokenizer.decode([token])!r}")

# %% [markdown]
# No token stands out: one in six hundred would be 0.17 %. A model like that babbles:

# %%
from tfx_jax.generation import Generator, Sampling


def continued(model, folder, prompts, max_new_tokens=24, **sampling):
    """How a model continues prompts."""
    tokenizer = load_folder_tokenizer(folder)
    generator = Generator(model, eos_ids=hf.end_ids(folder), max_new_tokens=max_new_tokens, search=Sampling(**sampling))
    found = generator([tokenizer.encode(prompt) for prompt in prompts])
    return [prompt + tokenizer.decode(ids) for prompt, ids in zip(prompts, found, strict=True)]


print(*continued(model, FOLDER, [PROMPT]))

# %% [markdown]
# ### Exercise
#
# How probable does the model hold the tokens of the prompt, in the mean? Exponentiate the mean negative log
# probability: that is the *perplexity*.


# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
def perplexity(model, tokens):
    """exp of the mean negative log probability of all tokens but the first."""
    log_probabilities = jax.nn.log_softmax(model(jnp.array([tokens]))[0, :-1])
    return float(jnp.exp(-log_probabilities[jnp.arange(len(tokens) - 1), jnp.array(tokens[1:])].mean()))


print(f"{perplexity(model, tokens):.0f}, of {tokenizer.vocab_size} for equal probabilities")

# %% [markdown]
# ## 2. Generate
#
# So let it read. `train` is what `tfx-jax train` runs: `model` learns `task`, here to predict every next token of a
# text, and `init_from` is the folder to start with. (The same lines fine-tune a downloaded GPT-2 on a text of yours,
# with `TextData(dataset="files", ...)`; that is when a GPU helps.)

# %%
from tfx_jax.tasks import LanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig, OptimizerConfig, train

data = TextData(dataset="grammar", documents="articles", tokenizer="bpe", max_length=128, tokens_per_batch=2_048)
config = ExperimentConfig(
    model=GPTConfig(dropout_rate=0.0, attention_dropout_rate=0.0),  # sizes are those of the folder
    task=LanguageModelConfig(data, is_packed=True),  # documents share a row, but none sees another
    init_from=str(RANDOM_GPT),
    optimizer=OptimizerConfig(schedule="linear", peak_learning_rate=0.004, warmup_steps=30),
    num_steps=4 if IS_TEST else 400,
    log_every=100,
    checkpoint_every=400,
)
WORKDIR = RUNS / "training_gpt"
result = train(config, WORKDIR)

# %% [markdown]
# *Perplexity* is how many tokens the model hesitates between, so to speak: it began with 600, all of them. The
# validation split tells facts that training never told, so what is low there was not learned by heart.
#
# The training has left its own folder, with checkpoints to go on from. We make one out of it that anyone can load.

# %%
from tfx_jax.data.tokenizers.hf_tokenizer import TOKENIZER_FILES
from tfx_jax.training import load_run
from tfx_jax.training.checkpoint import load_params


def save_with_tokenizer(model, folder, tokenizer_folder, **fields):
    """A model and its tokenizer in one folder."""
    hf.save(model, folder, fields=fields)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).exists():
            shutil.copyfile(tokenizer_folder / name, folder / name)


GPT_FOLDER = RUNS / "gpt"
run = load_run(WORKDIR)
trained = nnx.merge(run.graphdef, load_params(WORKDIR))
save_with_tokenizer(trained, GPT_FOLDER, WORKDIR / "tokenizer", eos_token_id=run.task.tokenizer.eos_id)

gpt = hf.load(GPT_FOLDER)
print(*continued(gpt, GPT_FOLDER, [PROMPT], max_new_tokens=60, temperature=0))

# %% [markdown]
# Sentences, and about one person! But temperature 0 always takes the most probable token: the same text every time,
# which soon goes round in circles. To *draw* tokens is livelier, and there are three ways to keep unlikely ones out: a
# lower **temperature** sharpens all probabilities, **top-k** keeps the k most probable tokens, **top-p** the fewest
# tokens that have probability p together.

# %%
tokenizer = load_folder_tokenizer(GPT_FOLDER)
logits = gpt(jnp.array([tokenizer.encode(PROMPT)]))[0, -1]
order = np.argsort(-logits)[:20]

figure, panels = plt.subplots(1, 3, figsize=(12, 3), sharey=True, layout="constrained")
for panel, temperature in zip(panels, (0.5, 1.0, 2.0), strict=True):
    probabilities = np.asarray(jax.nn.softmax(logits / temperature))[order]
    in_nucleus = np.cumsum(probabilities) - probabilities < 0.8
    panel.bar(range(20), probabilities, color=np.where(in_nucleus, "#0072b2", "#b0b0b0"))
    panel.set_xticks(range(20), [tokenizer.decode([token]).strip() for token in order], rotation=90)
    panel.set_title(f"temperature {temperature:g}", loc="left")
panels[0].set_ylabel("probability of the next token")
figure.suptitle(f"{PROMPT} … (blue: top-p = 0.8)", x=0.01, ha="left")
plt.show()

# %%
PROMPTS = ["my grandfather was waiting for", "the elephant is", "yumi bought"]

for sampling in (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
):
    print(", ".join(f"{name} {value:g}" for name, value in sampling.items()))
    for text in continued(gpt, GPT_FOLDER, PROMPTS, **sampling):
        print("   ", text.split("\n")[0])

# %% [markdown]
# To print a text while it is being written, pass an `observer`: it is shown every token as it comes, and may end the
# text. `stream()` turns tokens into text as soon as it is certain; some characters take several tokens.

# %%
stream = tokenizer.stream()


def print_token(tokens):
    """Shown the newest token of every text, -1 where there is none; says which texts are to end."""
    if tokens[0] >= 0:
        print(stream.push(int(tokens[0])), end="", flush=True)
    return np.zeros(tokens.shape, bool)


print("ken saw", end="")
generator = Generator(
    gpt, eos_ids=hf.end_ids(GPT_FOLDER), max_new_tokens=60, search=Sampling(temperature=0.7), observer=print_token
)
written = generator([tokenizer.encode("ken saw")], seed=1)

# %% [markdown]
# ### On real text
#
# All that this model has read are sentences of a small grammar. The first sentence of Lincoln's address at Gettysburg
# (1863) is English of another kind:

# %%
LINCOLN = (
    "four score and seven years ago our fathers brought forth on this continent , a new nation , conceived in "
    "liberty , and dedicated to the proposition that all men are created equal ."
)
print(*tokenizer.pieces(tokenizer.encode(LINCOLN)))

# %% [markdown]
# ### Exercise
#
# Compare it with text of the grammar: how many tokens does a word take, and how high is the perplexity?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
grammar_text = " ".join(grammar_documents("validation", 1)[0])
for name, text in {"grammar": grammar_text, "Lincoln": LINCOLN}.items():
    tokens = tokenizer.encode(text)[:128]
    per_word = len(tokenizer.encode(text)) / len(text.split())
    print(f"{name:<8} {per_word:.1f} tokens a word, perplexity {perplexity(gpt, tokens):,.1f}")
# Unknown words fall into letters, and each letter surprises a model that has never seen such a word. So perplexities
# of models with different tokenizers cannot be compared.

# %% [markdown]
# ## 3. Fill in hidden words
#
# GPT reads from left to right. BERT ([Devlin et al., 2019](https://arxiv.org/abs/1810.04805)) sees both sides: some
# words of a text are hidden behind `[MASK]`, and it says what they were. So it cannot write, but it reads better, which
# section 4 makes use of.
#
# Besides the documents it reads single sentences of all kinds, and questions with the text that they are about: plain
# text, without any labels or answers. This time we train by hand, to see the pieces. First, rows of text:

# %%
from tfx_jax.data.objectives import mask_tokens
from tfx_jax.synthetic.grammar import grammar_labeled, grammar_questions

corpus = documents[:1_000]
corpus += [[example.text] for example in grammar_labeled("train", 3_000)]
corpus += [
    [question.question, *question.context.replace(" . ", " .\n").split("\n")]
    for question in grammar_questions("train", 2_000)
]

SHORT, LENGTH = 24, 40  # tokens of a row

BERT_FOLDER = RUNS / "bert"
bert_tokenizer = train_or_load_folder(
    BERT_FOLDER, lambda: map(" ".join, corpus), kind="wordpiece", family="bert", vocab_size=700
)
CLS, SEP, PAD, MASK = (getattr(bert_tokenizer, f"{name}_id") for name in ("cls", "sep", "pad", "mask"))


def text_row(tokens):
    """A text as BERT reads it, [CLS] text [SEP], with what its models ask for."""
    tokens = np.array([CLS, *tokens, SEP], np.int32)
    return {"tokens": tokens, "token_type_ids": np.zeros_like(tokens), "token_mask": np.ones(len(tokens), bool)}


def rows_of_corpus(length):
    """Whole sentences of a document side by side, as many as fit into a row."""
    rows = []
    for document in corpus:
        row = []
        for sentence in bert_tokenizer.encode_batch(document):
            if row and len(row) + len(sentence) > length - 2:
                rows.append(text_row(row))
                row = []
            row += sentence[: length - 2]
        rows.append(text_row(row))
    return rows


def masked(rows, epoch):
    """The rows, with other words hidden in each epoch."""
    rng = np.random.default_rng(epoch)
    options = {"mask_id": MASK, "vocab_size": bert_tokenizer.vocab_size, "special_ids": {0, 1, 2, 3, 4}, "rate": 0.25}
    hidden = (mask_tokens(row["tokens"], rng, **options) for row in rows)
    return [
        row | {"tokens": inputs, "targets": targets, "weights": weights}
        for row, (inputs, targets, weights) in zip(rows, hidden, strict=True)
    ]


rows = rows_of_corpus(LENGTH)
(example, *_) = masked(rows[:1], epoch=0)
print(*bert_tokenizer.pieces(example["tokens"]))
print("hidden:", *bert_tokenizer.pieces(example["targets"][example["weights"] == 1]))

# %% [markdown]
# Some hidden words are not masked but replaced by a random one, or left as they are: BERT should trust no word.
#
# Now the training loop. `update` is one step as a pure function: parameters and a batch in, better parameters out.
# `loss_fn` says what better means.

# %%
from tfx_jax.data.batching import BatchSpec, ExampleList, LoaderOptions, train_batches
from tfx_jax.training.optimizer import make_optimizer
from tfx_jax.training.step import new_state, update

SPEC = BatchSpec(boundaries=(SHORT, LENGTH), tokens_per_batch=2_000)  # batches are [83, 24] or [50, 40]


def fit(model, loss_fn, make_rows, num_steps, learning_rate):
    """A model trained on the rows that `make_rows(epoch)` gives, and the mean loss of each step."""
    num_steps = 4 if IS_TEST else num_steps
    settings = OptimizerConfig(schedule="linear", peak_learning_rate=learning_rate, warmup_steps=30)
    optimizer = make_optimizer(settings, model.config.d_model, num_steps)
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    state = new_state(params, optimizer)
    step = jax.jit(functools.partial(update, graphdef, loss_fn, optimizer))
    batches = train_batches(lambda epoch: ExampleList(make_rows(epoch)), SPEC, LoaderOptions(seed=0))
    losses = []
    for _, batch in zip(range(num_steps), batches, strict=False):
        state, metrics = step(state, batch, jax.random.key(0))
        losses.append(metrics.means["loss"].mean)
    return nnx.merge(graphdef, state.params), np.array(losses)


# %%
from tfx_jax.models import BertConfig, BertMaskedLM
from tfx_jax.tasks import pretraining_loss

bert_sizes = BertConfig(
    vocab_size=bert_tokenizer.vocab_size,
    max_length=LENGTH,
    num_layers=2,
    d_model=128,
    num_heads=4,
    d_ff=256,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
)
bert, bert_losses = BertMaskedLM(bert_sizes, rngs=nnx.Rngs(0)), []
for length, num_steps in ((SHORT, 600), (LENGTH, 250)):
    rows = rows_of_corpus(length)
    bert, losses = fit(
        bert, functools.partial(pretraining_loss, rate=0.25), functools.partial(masked, rows), num_steps, 0.004
    )
    bert_losses += losses.tolist()
hf.save(bert, BERT_FOLDER)  # beside its tokenizer


def smooth(losses):
    """Means of neighbors, to see the trend."""
    width = max(1, len(losses) // 40)
    return np.convolve(losses, np.ones(width) / width, mode="valid")


figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(smooth(bert_losses), color="#0072b2")
axes.axhline(np.log(bert_tokenizer.vocab_size), color="#b0b0b0", linestyle="--", label="all words equally probable")
axes.set(xlabel="step", ylabel="loss of a hidden word, nats", ylim=0)
axes.legend()
plt.show()

# %% [markdown]
# First the model learns which words are frequent, the plateau; then it finds out that the neighbors of a gap tell what
# fits. The jump is where the texts become longer: at places behind the 24th it had never seen a word. (BERT was trained
# like that as well, on long texts at the end only, because they cost more.)
#
# The folder is a model like any other; with one of your own, `BERT_FOLDER = "..."` and `hf.load` would take you here.

# %%
bert = hf.load(BERT_FOLDER)
bert_tokenizer = load_folder_tokenizer(BERT_FOLDER)

SENTENCES = [
    "my [MASK] is a nurse .",
    "she danced in [MASK] on monday .",
    "the cake is [MASK] .",
    "the elephant is bigger [MASK] the dog .",
]

found = [bert_tokenizer.encode_with_specials(sentence).ids for sentence in SENTENCES]
tokens = np.array([ids + [PAD] * (SHORT - len(ids)) for ids in found])
logits = bert(jnp.array(tokens), token_mask=jnp.array(tokens != PAD))

figure, panels = plt.subplots(1, 4, figsize=(13, 2.4), layout="constrained")
for panel, sentence, place, scores in zip(panels, SENTENCES, tokens == MASK, logits, strict=True):
    probabilities = np.asarray(jax.nn.softmax(scores[place.argmax()]))
    best = np.argsort(-probabilities)[:5]
    panel.barh(range(5), probabilities[best], color="#0072b2")
    panel.set_yticks(range(5), bert_tokenizer.pieces(best))
    panel.invert_yaxis()
    panel.set(xlim=(0, 1), xlabel="probability")
    panel.set_title(sentence.replace("[MASK]", "▢"), fontsize=9, loc="left")
plt.show()

# %% [markdown]
# The last gap leaves one word, the others a class of words: relatives, cities, what a cake may be. No one has told the
# model what a city is.

# %% [markdown]
# ### Exercise
#
# Hide two words of one sentence: does the model fill them in independently of each other?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
sentence = "my [MASK] [MASK] a nurse ."
ids = np.array(bert_tokenizer.encode_with_specials(sentence).ids)
scores = bert(jnp.array([ids]))[0]
for place in np.flatnonzero(ids == MASK):
    best = np.argsort(-np.asarray(scores[place]))[:3]
    print(f"place {place}:", *bert_tokenizer.pieces(best))
# Each place gets its own probabilities, computed while the other word is hidden: "is" or "was" may follow a plural.
# BERT does not say which words go together; to write, a model fills one in and asks again.

# %% [markdown]
# ## 4. Fine-tune
#
# To fill in words, the model had to learn what kinds of words there are and what belongs together. Other tasks need
# just that. So we take the body that has read, put a new *head* on top, hardly more than a matrix, and train both on a
# few examples of the task. Nothing of that is written by hand: `train` takes the examples from files, as yours would
# be, and `init_from` names the folder to start with.

# %%
from tfx_jax.training import load

FILES = RUNS / "files"
FILES.mkdir(parents=True, exist_ok=True)
NO_DROPOUT = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}


def fine_tune(name, task, num_steps, learning_rate, init_from=BERT_FOLDER):
    """Trains a head on a BERT, and the BERT with it; returns the scores on the validation split."""
    config = ExperimentConfig(
        model=BertConfig(**NO_DROPOUT),  # sizes are those of the folder
        task=task,
        init_from=str(init_from),
        optimizer=OptimizerConfig(schedule="linear", peak_learning_rate=learning_rate, warmup_steps=30),
        num_steps=4 if IS_TEST else num_steps,
        log_every=1 if IS_TEST else 5,
    )
    return train(config, RUNS / name).evaluations[-1]


# %% [markdown]
# ### Classify
#
# Twelve kinds of sentences, and only 200 examples in all:

# %%
labeled, held_out = grammar_labeled("train", 200), grammar_labeled("test", 200)
for name, examples in (("train.tsv", labeled), ("held_out.tsv", held_out)):
    (FILES / name).write_text("".join(f"{example.label}\t{example.text}\n" for example in examples))
for example in labeled[:8]:
    print(f"{example.label:<16} {example.text}")

# %% [markdown]
# How many of 200 held-out sentences get their label? By chance it would be one in twelve.

# %%
from tfx_jax.tasks import ClassificationConfig, LabeledData

sentences = LabeledData(
    dataset="files",
    data_dir=str(FILES),
    train_file="train.tsv",
    validation_file="held_out.tsv",
    max_length=SHORT,
    tokens_per_batch=2_000,
)
scores = fine_tune("classifier", ClassificationConfig(sentences), num_steps=120, learning_rate=0.001)
print(f"{scores['accuracy']:.1f} % right")

# %% [markdown]
# The training has left a folder, which is all that a prediction needs:

# %%
TEXTS = ["my sister bought a cake .", "is the elephant bigger than the dog ?"]
for text, answer in zip(TEXTS, load(RUNS / "classifier").predict(TEXTS), strict=True):
    print(f"{answer['label']:<16} {answer['probability']:4.0%}  {text}")

# %% [markdown]
# Are both right? Read the texts and judge for yourself: a probability says how sure the model is, not that it is
# right. How often it is wrong the held-out sentences told, and it may well be wrong with one of these two.

# %% [markdown]
# ### Exercise
#
# Which labels does the classifier confuse most often on the held-out sentences?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
answers = load(RUNS / "classifier").predict([example.text for example in held_out])
confused = collections.Counter(
    f"{example.label} taken for {answer['label']}"
    for example, answer in zip(held_out, answers, strict=True)
    if example.label != answer["label"]
)
for pair, count in confused.most_common(5):
    print(f"{count:>3}  {pair}")

# %% [markdown]
# ### Tag
#
# Now a label for each word: which words name a person, an animal, a place, a thing, a time? `B-` begins such a name,
# `I-` goes on, `O` is outside. A word may be several pieces for the tokenizer; its first piece gets the tag.
#
# There are only 200 sentences to learn from, in which many a noun does not occur. Beside the model that has read, the
# same one with random parameters. F1 counts names that are exactly right.

# %%
from tfx_jax.synthetic.grammar import grammar_tagged
from tfx_jax.tasks import TaggedData, TaggingConfig
from tfx_jax.training.reporting.progress import read_history

tagged, held_out_tagged = grammar_tagged("train", 200), grammar_tagged("test", 200)
for name, examples in (("train.conll", tagged), ("held_out.conll", held_out_tagged)):
    blocks = ("".join(f"{word}\t{tag}\n" for word, tag in zip(*example, strict=True)) for example in examples)
    (FILES / name).write_text("\n".join(blocks))
words = TaggedData(
    dataset="files",
    data_dir=str(FILES),
    train_file="train.conll",
    validation_file="held_out.conll",
    max_length=SHORT,
    tokens_per_batch=2_000,
)
RANDOM_BERT = RUNS / "random_bert"
save_with_tokenizer(BertMaskedLM(bert_sizes, rngs=nnx.Rngs(1)), RANDOM_BERT, BERT_FOLDER)

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, start, color in (("from scratch", RANDOM_BERT, "#d55e00"), ("pretrained", BERT_FOLDER, "#0072b2")):
    workdir = f"tagger_{start.name}"
    scores = fine_tune(workdir, TaggingConfig(words), num_steps=150, learning_rate=0.001, init_from=start)
    steps, losses = read_history(RUNS / workdir).curve("train/loss")
    axes.plot(steps, losses, color=color, label=f"{name}: F1 {scores['f1']:.0f} % on held-out sentences")
axes.set(xlabel="step", ylabel="loss of a word, nats", ylim=0)
figure.legend(loc="outside upper left")
plt.show()

# %% [markdown]
# The curves look alike, for both models learn the 200 sentences by heart. On other sentences they differ: who has read
# knows that *rabbit* is a word like *dog*, and needs no label for it.

# %%
from tfx_jax.metrics import entities_of_tags

COLORS = {"person": "#cfe8ff", "animal": "#ffe0b3", "place": "#d5f0d0", "thing": "#ead9f7", "time": "#ffd6d6"}


def in_color(words, tags):
    """A sentence as HTML, entities on colored ground."""
    words = [html.escape(word) for word in words]
    for entity in reversed(entities_of_tags(tags)):
        name = " ".join(words[entity.start : entity.end])
        style = f"background:{COLORS[entity.label]};color:black;border-radius:4px;padding:1px 4px"
        words[entity.start : entity.end] = [f'<span style="{style}">{name} <small>{entity.label}</small></span>']
    return f"<p>{' '.join(words)}</p>"


found = load(RUNS / "tagger_bert").predict([" ".join(sentence.words) for sentence in held_out_tagged[:8]])
display(HTML("".join(in_color(sentence["words"], sentence["tags"]) for sentence in found)))

# %% [markdown]
# ### Answer
#
# A question and a text; the answer is a part of the text. The head gives each token two numbers, for being the first of
# the answer and the last, and the best pair wins. BERT reads both at once, `[CLS] question [SEP] text [SEP]`; a long
# text is read in several windows that overlap.

# %%
from tfx_jax.tasks import QuestionAnsweringConfig, QuestionData

windows = QuestionData(dataset="grammar", max_length=LENGTH, max_answer_length=8, tokens_per_batch=2_000)
task = QuestionAnsweringConfig(windows, stride=12, max_question_length=16)
scores = fine_tune("reader", task, num_steps=300, learning_rate=0.002)
print(f"{scores['exact_match']:.0f} % of the answers exactly right")

# %%
questions = grammar_questions("test", 6)
answers = load(RUNS / "reader").predict([(question.question, question.context) for question in questions])
paragraphs = []
for question, answer in zip(questions, answers, strict=True):
    given, wanted = html.escape(answer["answer"]), html.escape(question.answers[0].text)
    verdict = "✓" if given == wanted else f"✗ (it is: {wanted})"
    context = html.escape(question.context).replace(given, f"<mark>{given}</mark>", 1)
    paragraphs.append(f"<p><b>{html.escape(question.question)}</b> {verdict}<br>{context}</p>")
display(HTML("".join(paragraphs)))

# %% [markdown]
# Look at the mistakes. Our reader has learned what kind of answer a question wants: a time for *when*, a person for
# *who*. Whether it is the right one it often guesses: to compare the question with every sentence takes more layers and
# more reading than a minute allows. Large models have both, and get most of such answers right.
#
# The same from a shell: `experiments/` has a lab note for each, and `--config.init_from=FOLDER` names the model to
# start from.
#
# ## 5. Look at heads
#
# Every model returns its attention maps if asked. Choose a layer and heads, and point at a word:

# %%
from tfx_jax.cli.support.attention_view import AttentionView
from tfx_jax.training.reporting.attention_plot import plot_attention

SENTENCE = "my mother 's dog ate the meat because it was hungry ."

tokens = bert_tokenizer.encode_with_specials(SENTENCE).ids
pieces = bert_tokenizer.pieces(tokens)
_, maps = bert(jnp.array([tokens]), return_attention=True)
maps = {name: np.asarray(weights[0]) for name, weights in maps.items()}  # [heads, queries, keys]
AttentionView(maps, pieces, pieces)

# %%
display(plot_attention(maps, pieces, pieces))

# %% [markdown]
# Diagonals! Some heads do nothing but look at the neighbor. [Clark et al. (2019)](https://arxiv.org/abs/1906.04341)
# found such heads in BERT, for the word before, the word behind and the separator. Ours, in the mean over 100 held-out
# sentences:

# %%
PATTERNS = ("word before", "itself", "word behind", "[CLS]", "[SEP]")
sums = np.zeros((bert.config.num_layers, bert.config.num_heads, len(PATTERNS)))
read = jax.jit(lambda tokens, token_mask: bert(tokens, token_mask=token_mask, return_attention=True)[1])
for example in held_out[:100]:
    tokens = bert_tokenizer.encode_with_specials(example.text).ids
    length = len(tokens)
    padded = np.pad(tokens, (0, LENGTH - length))[None]
    found = read(padded, np.arange(LENGTH)[None] < length)
    for layer, weights in enumerate(np.asarray(found[f"encoder/{i}/self"][0]) for i in range(len(found))):
        words = weights[:, 1 : length - 1, :length]  # what each word looks at
        for pattern, offset in enumerate((0, 1, 2)):
            sums[layer, :, pattern] += np.trace(words, offset, axis1=1, axis2=2) / (length - 2)
        sums[layer, :, 3] += words[:, :, 0].mean(axis=1)
        sums[layer, :, 4] += words[:, :, -1].mean(axis=1)

heads = [f"layer {layer}, head {head}" for layer in range(len(sums)) for head in range(sums.shape[1])]
figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
image = axes.imshow(sums.reshape(-1, len(PATTERNS)) / 100, cmap="gray_r", vmin=0, vmax=1)
axes.set_xticks(range(len(PATTERNS)), PATTERNS, rotation=30, ha="right")
axes.set_yticks(range(len(heads)), heads)
figure.colorbar(image, label="share of the attention")
plt.show()

# %% [markdown]
# ### Exercise
#
# Which head attends most to the word before, and which to the word behind?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
for pattern in ("word before", "word behind"):
    shares = sums[:, :, PATTERNS.index(pattern)] / 100
    layer, head = np.unravel_index(shares.argmax(), shares.shape)
    print(f"{pattern}: layer {layer}, head {head}, {shares.max():.0%} of its attention")

# %% [markdown]
# ## 6. Save
#
# The fine-tuned models go into folders too, for others to load: with this library, or with Hugging Face's.

# %%
TAGGER, TAGGER_FOLDER = RUNS / "tagger_bert", RUNS / "tagger"
save_with_tokenizer(nnx.merge(load_run(TAGGER).graphdef, load_params(TAGGER)), TAGGER_FOLDER, TAGGER / "tokenizer")

again = hf.load(TAGGER_FOLDER)
print(type(again).__name__, again.config.labels)

# %% [markdown]
# From a shell, `generate` continues text and `convert` writes such folders: of a training, or of a folder again, in
# the precision that you ask for.
#
# ```sh
# echo "my grandfather" | tfx-jax generate --model=runs/pretrained/gpt --temperature=0.7 --stream
# tfx-jax convert --workdir=runs/pretrained/reader --output=runs/pretrained/reader_folder
# tfx-jax convert --model=runs/pretrained/gpt --output=runs/pretrained/gpt_half --dtype=bfloat16
# ```
#
# The names in a folder and ours are one table for each family, in `tfx_jax/models/hf`; the models themselves are in
# `tfx_jax/models`, each in a file or two.
