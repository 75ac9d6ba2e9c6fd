# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tuning with LoRA
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tfx-jax/tfx-jax/blob/main/colab/fine_tuning.ipynb)
#
# A decoder learns to write in another style, from texts in a Parquet file:
#
# 1. the model to start from,
# 2. texts in a Parquet file,
# 3. fine-tune low-rank adapters,
# 4. generate, before and after,
# 5. export: merged, or the adapters alone.
#
# It is written for a CPU, the T4 and the v5e-1 of Colab, and the v5e-8 of Kaggle, whose eight chips share the
# parameters; only the CPU was tested. So that nothing has to be downloaded, the model is a small Llama that reads
# sentences of the library's built-in grammar for a minute. With a name on the Hugging Face hub,
# `BASE = "HuggingFaceTB/SmolLM2-135M"`, all that follows is the same.

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

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import tfx_jax as tfx

IS_TEST = os.environ.get("TFX_JAX_VARIANT") == "test"  # a few steps of training: quick, but nothing is learned
RUNS = pathlib.Path("runs/fine_tuning")
RUNS.mkdir(parents=True, exist_ok=True)

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

# %% [markdown]
# ## 1. The model to start from
#
# Two layers of a Llama, and a tokenizer of 600 tokens. `tfx-jax convert` writes a run as a Hugging Face folder.

# %%
from tfx_jax.cli import main
from tfx_jax.models import LlamaConfig
from tfx_jax.tasks import LanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig

OWN = str(RUNS / "base")
BASE = OWN

config = ExperimentConfig(
    LlamaConfig(
        vocab_size=600, max_length=64, num_layers=2, d_model=128, num_heads=4, num_kv_heads=2, d_ff=256, is_tied=True
    ),
    LanguageModelConfig(
        TextData("grammar", documents="lines", tokenizer="bpe", max_length=64, tokens_per_batch=1_024), is_packed=True
    ),
)
config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 3e-3, 50
config.num_steps = 4 if IS_TEST else 400
if IS_TEST:
    config.model.num_layers, config.model.d_model, config.model.d_ff = 1, 32, 32

if BASE == OWN and not pathlib.Path(BASE).exists():
    tfx.train(config, RUNS / "base_run")
    main(["convert", f"--workdir={RUNS}/base_run", f"--output={BASE}"])

# %% [markdown]
# ### Exercise
#
# How many parameters does this model have, and in which part are most of them?
#
# <details><summary>Answer</summary>
#
# 372,352. The embedding has 600 rows of 128 numbers, 76,800, and is the output layer too (`is_tied=True`). In each of
# the two layers, query and output are matrices of 128 x 128, key and value of 128 x 64 (two heads of 32, which the four
# heads of the query share), and the three of the feed-forward network of 128 x 256: 49,152 numbers for attention and
# 98,304 for the feed-forward network, the largest part. The five norms have 128 each. Llama 3 8B is no different: of
# its 8.0 billion parameters 5.6 are in feed-forward networks.
#
# </details>

# %% [markdown]
# ## 2. Texts in a Parquet file
#
# A row for each text. Here, sentences of the grammar as a pirate would end them; yours may come from anywhere that
# writes Parquet, or from the hub: `train_file="hf://datasets/OWNER/NAME/train-*.parquet"`.

# %%
import pyarrow
import pyarrow.parquet

from tfx_jax.synthetic.grammar import grammar_documents


def write_texts(split, count):
    sentences = [sentence for document in grammar_documents(split, count) for sentence in document]
    texts = [f"{sentence.rstrip(' .')} , arr !" for sentence in sentences]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), RUNS / f"{split}.parquet")
    return texts


print(*write_texts("train", 500)[:4], sep="\n")
_ = write_texts("validation", 20)

# %% [markdown]
# ### Exercise
#
# Which other file could `train_file` name?
#
# <details><summary>Answer</summary>
#
# Any file of texts on the page of [formats](https://github.com/tfx-jax/tfx-jax/blob/main/docs/formats.md), such as a
# `.txt` file with a line for each text, and several files separated by commas.
#
# </details>

# %% [markdown]
# ## 3. Fine-tune low-rank adapters
#
# LoRA ([Hu et al., 2021](https://arxiv.org/abs/2106.09685)) freezes every matrix W of the model and learns two thin
# ones, A and B, that are added to it: W + alpha / r A B, where r is their rank. `targets` is a regular expression for
# the names of the matrices. Sizes and tokenizer are those of the model that `init_from` names.
#
# Several devices share the parameters (`mesh.fsdp`): a model that is too large for one chip of Kaggle's eight may fit
# on all eight together. Colab has one device, so the line below says 1 and 1 there. On Kaggle (accelerator *TPU
# v5e-8*) it says 1 and 8; `config.mesh.data, config.mesh.fsdp = 2, 4` has two copies of the model, four devices each.

# %%
from tfx_jax.nn import LoraConfig

task = LanguageModelConfig(
    TextData(
        "files",
        data_dir=str(RUNS),
        train_file="train.parquet",
        validation_file="validation.parquet",
        documents="lines",
        max_length=64,
        tokens_per_batch=64 * max(16, jax.device_count()),
    ),
    is_packed=True,
)
config = ExperimentConfig(LlamaConfig(), task, init_from=BASE)
config.lora = LoraConfig(rank=8, alpha=16.0, targets="query|value|up|down")
config.optimizer.name, config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = "adamw", 5e-3, 10
config.mesh.data, config.mesh.fsdp = 1, jax.device_count()
if jax.default_backend() != "cpu":
    config.model.dtype = "bfloat16"
config.num_steps, config.eval_every, config.checkpoint_every = (4, 2, 2) if IS_TEST else (200, 20, 100)

result = tfx.train(config, RUNS / "lora")

# %%
steps, losses = zip(*((one["step"], one["loss"]) for one in result.evaluations), strict=True)
plt.figure(figsize=(6, 3), layout="constrained")
plt.plot(steps, losses, marker="o", color="#0072b2")
plt.xlabel("step")
plt.ylabel("validation loss, nats for each token")
plt.show()

# %% [markdown]
# The checkpoints hold the adapters and the state of their optimizer. The frozen parameters are those of `BASE`, and a
# checksum tells if that folder has changed since.

# %%
from tfx_jax.models import hf

tuned = tfx.load(RUNS / "lora")
trained, frozen = (
    sum(leaf.size for leaf in jax.tree.leaves(nnx.state(tuned.model, kind))) for kind in (nnx.Param, tfx.nn.Frozen)
)
print(f"{trained:,} parameters trained, {frozen:,} frozen")

# %% [markdown]
# ### Exercise
#
# An adapter of rank r beside a matrix of n rows and m columns has r (n + m) numbers. Does that give the number of
# trained parameters?

# %% cellView="form" jupyter={"source_hidden": true}
# @title Answer
c = tuned.model.config
head_size = c.d_model // c.num_heads
shapes = {
    "query": (c.d_model, c.d_model),
    "value": (c.d_model, c.num_kv_heads * head_size),
    "up": (c.d_model, c.d_ff),
    "down": (c.d_ff, c.d_model),
}
by_hand = c.num_layers * config.lora.rank * sum(rows + columns for rows, columns in shapes.values())
print(f"{by_hand:,} by hand, {trained:,} in the model")
assert by_hand == trained or BASE != OWN

# %% [markdown]
# ## 4. Generate, before and after

# %%
PROMPTS = ["my grandfather was waiting", "the elephant is", "yumi bought"]

for name, model in (("before", tfx.load(BASE)), ("after", tuned)):
    print(name)
    for prompt, text in zip(PROMPTS, tfx.generate(model, PROMPTS, max_new_tokens=16, temperature=0.5), strict=True):
        print("   ", (prompt + text).split("\n")[0])

# %% [markdown]
# ### Exercise
#
# What does the model write with `alpha = 0`, before and after training?
#
# <details><summary>Answer</summary>
#
# What the base model writes, both times: W + 0 / r A B is W, whatever A and B are.
#
# </details>

# %% [markdown]
# ## 5. Export
#
# Merged, W + alpha / r A B is a matrix like any other: the folder is that of a Llama, which `transformers` loads too.
# With `--adapter`, the folder holds A and B only, and the name of the model that they belong to; the library PEFT reads
# it.

# %%
main(["convert", f"--workdir={RUNS}/lora", f"--output={RUNS}/merged", "--overwrite"])
main(["convert", f"--workdir={RUNS}/lora", f"--output={RUNS}/adapter", "--adapter", "--overwrite"])

for path in sorted([*(RUNS / "merged").glob("*.safetensors"), *(RUNS / "adapter").glob("*.safetensors")]):
    print(f"{path.stat().st_size:>10,} bytes  {path.relative_to(RUNS)}")

# %% [markdown]
# All three compute the same:

# %%
tokens = np.array([tuned.tokenizer.encode(PROMPTS[0])])
expected = tuned.model(tokens)
for folder in ("merged", "adapter"):
    difference = np.abs(hf.load(RUNS / folder)(tokens) - expected).max() / np.abs(expected).max()
    print(f"{folder}: logits within {difference:.0e} of the trained model's")
    assert difference < (1e-5 if tuned.model.config.dtype == "float32" else 0.1)
