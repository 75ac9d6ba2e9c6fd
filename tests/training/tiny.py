"""What tests of the trainer share: a text, a model that compiles in no time, its trainings, what they leave behind."""

import dataclasses
import functools
import io
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
from etils import epath
from flax import nnx

from tfx_jax.functional.layers import dropout
from tfx_jax.models import TransformerConfig
from tfx_jax.training import loop
from tfx_jax.training.checkpoint.checkpoints import Checkpoints
from tfx_jax.training.config import ExperimentConfig
from tfx_jax.training.reporting import progress


class BagOfWords(nnx.Module):
    """The least that can be trained to translate: a token from the one before it and the sum of the source.

    Neither attention nor layers nor a scan: what the trainer promises, it promises of any model.
    """

    def __init__(self, config, *, rngs):
        self.config = config
        self.table = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, 6)))

    def __call__(self, source, target, *, rngs=None):
        before = jnp.concatenate([jnp.ones_like(target[:, :1]), target[:, :-1]], axis=1)
        x = self.table[...][before] + self._context(source)[:, None]
        return self._logits(dropout(x, self.config.dropout_rate, None if rngs is None else rngs.dropout()))

    vocab_size = property(lambda self: self.config.vocab_size)
    pad_id = property(lambda self: self.config.pad_id)
    continues_inputs = False

    def decoder(self, *, int8):
        return self

    def max_input_length(self, max_new_tokens):
        return None

    def encode(self, inputs, token_mask):
        return self._context(jnp.where(token_mask, inputs, self.pad_id))

    def init_cache(self, memory, *, max_length, num_beams):
        return memory, jnp.ones(memory.shape[:1], jnp.int32)

    def step(self, tokens, cache):
        return self._logits(self.table[...][tokens] + cache), cache

    def _context(self, source):
        return jnp.where(source[..., None] != self.config.pad_id, self.table[...][source], 0.0).sum(axis=1)

    def _logits(self, x):
        return jnp.tanh(x) @ self.table[...].T


def tiny_config(text, num_devices=1, validation="", **changes):
    """A translation from and to the words of `text`; to evaluate on "validation.tsv" is a program more."""
    config = ExperimentConfig()
    config.task.data.dataset, config.task.data.data_dir, config.task.data.train_source = "files", str(text), "train.tsv"
    config.task.data.source_language, config.task.data.target_language = "en", "de"
    config.task.data.validation_source = validation
    config.model.num_layers, config.model.d_model, config.model.num_heads, config.model.d_ff = 1, 16, 2, 32
    config.task.data.tokenizer, config.task.data.is_tokenized = "words", True
    config.task.data.max_length = 32
    config.task.data.tokens_per_batch = 256
    config.task.data.sort_buffer = 64
    config.optimizer.warmup_steps = 10
    config.task.decoding.extra_length, config.task.decoding.beam_size = 2, 2
    config.mesh.data = num_devices
    config.num_steps, config.checkpoint_every, config.log_every = 9, 3, 1
    return dataclasses.replace(config, **changes)


def write_text(folder):
    """Texts to reverse, word by word."""
    random = np.random.default_rng(0)
    for split, size in (("train", 200), ("validation", 4)):
        sentences = [[f"w{word}" for word in random.integers(30, size=random.integers(2, 12))] for _ in range(size)]
        lines = [f"{' '.join(words)}\t{' '.join(reversed(words))}\n" for words in sentences]
        (folder / f"{split}.tsv").write_text("".join(lines))


def _make(config, *, rngs):
    return BagOfWords(config, rngs=rngs)


@functools.wraps(loop.train)
def train(*arguments, **options):
    """Trains as `tfx-jax train` does, but a bag of words."""
    with mock.patch.object(TransformerConfig, "make", _make):
        return loop.train(*arguments, **options)


def whole_state(workdir):
    """Parameters, moments and step of the newest checkpoint, with the position in the data."""
    directory = workdir / "checkpoints"
    newest = max(int(path.name) for path in directory.iterdir() if path.name.isdigit())
    with Checkpoints(workdir) as checkpoints:
        checkpointer = checkpoints._checkpointer
        wanted = jax.tree.map(
            lambda leaf: np.empty(leaf.shape, leaf.dtype), checkpointer.checkpointables_metadata(newest).metadata
        )
        return newest, checkpointer.load_checkpointables(newest, wanted), checkpointer.metadata(newest).custom_metadata


def pictures(workdir):
    """Step and picture of each image "validation/attention" that a training wrote for TensorBoard."""
    return [
        (event.step, PIL.Image.open(io.BytesIO(value.image.encoded_image_string)))
        for path in sorted((workdir / "tensorboard").iterdir())
        for event in progress._read_events(epath.Path(path))
        for value in event.summary.value
        if value.tag == "validation/attention"
    ]
