"""Transcription and translation of speech with a Whisper."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, Float, Int

from tfx_jax.data.tokenizers.hf_tokenizer import HFTokenizer, load_folder_tokenizer
from tfx_jax.errors import UserError
from tfx_jax.functional.audio import WHISPER_HOP, whisper_features
from tfx_jax.functional.search import LENGTH_PENALTY
from tfx_jax.generation.decoding import BeamSearch, Greedy, check_length_penalty, decode
from tfx_jax.models import hf
from tfx_jax.models.hf.folder import read_json
from tfx_jax.models.whisper import Whisper

TASKS = ("transcribe", "translate")


class Transcriber:
    """Writes what is said in recordings, or its English translation.

    Attributes:
      max_samples: number of samples that the model reads at once, 30 seconds in the published models.
      languages: languages by code, with the ids of their tokens; empty for a model of English only.
    """

    def __init__(
        self,
        model: Whisper,
        tokenizer: HFTokenizer,
        *,
        banned_ids: Sequence[int] = (),
        banned_next_ids: Sequence[int] = (),
        beam_size: int = 1,
        length_penalty: float = LENGTH_PENALTY,
        is_multilingual: bool = True,
    ):
        """Prepares the model for decoding.

        Args:
          model: the model; it is not changed.
          tokenizer: its tokenizer.
          banned_ids: tokens that are never generated, such as signs that are not spoken.
          banned_next_ids: tokens that a transcript does not begin with.
          beam_size: above 1, beam search instead of greedy search.
          length_penalty: exponent of the length penalty of beam search; without one, it must be left out.
          is_multilingual: False for a model of English only, whose tokenizer may have tokens of languages as well.

        Raises:
          UserError: if `beam_size` is below 1, or 1 with a `length_penalty`.
        """
        if beam_size < 1:
            raise UserError(f"beam_size must be at least 1, got {beam_size}")
        check_length_penalty(length_penalty, beam_size)
        config = model.config
        self.model, self._decoder, self._tokenizer = model, model.decoder(), tokenizer
        self.max_samples = config.num_frames * WHISPER_HOP
        self.languages = tokenizer.languages if is_multilingual else {}
        self._features = jax.jit(functools.partial(whisper_features, num_bands=config.num_bands))
        options: dict[str, Any] = {
            "search": BeamSearch(beam_size, length_penalty) if beam_size > 1 else Greedy(),
            "eos_ids": (config.eos_id,),
            "max_length": config.learned_positions - 1,
            "banned_ids": tuple(banned_ids),
            "banned_next_ids": tuple(banned_next_ids),
        }
        self._decode = jax.jit(lambda decoder, frames, first: decode(decoder, frames, first_ids=first, **options))
        # Logits of the first token, which names the language, [V]; the model shifts the target, so any token will do.
        self._score_first = jax.jit(lambda model, frames: model(frames, jnp.zeros((1, 1), jnp.int32))[0, 0])

    @classmethod
    def load(cls, folder: epath.PathLike, *, allow_nonfinite: bool = False, **options: Any) -> "Transcriber":
        """Loads a Hugging Face folder of a Whisper, or a model on the hub; `options` are those of the constructor.

        Raises:
          UserError: if the folder is damaged or holds another model.
        """
        model = hf.load(folder, allow_nonfinite=allow_nonfinite)
        if not isinstance(model, Whisper):
            raise UserError(f"{folder} holds a {type(model).__name__}, which does not transcribe: name a Whisper")
        fields = {"banned_ids": "suppress_tokens", "banned_next_ids": "begin_suppress_tokens"}
        defaults: dict[str, Any] = {name: hf.token_ids(folder, field) for name, field in fields.items()}
        file = hf.base_folder(folder) / "generation_config.json"
        if file.exists():
            values = read_json(file)
            defaults["is_multilingual"] = bool(values.get("is_multilingual", True))
            if values.get("language") or values.get("task") not in (None, "transcribe"):
                logging.warning("%s: its language and task are not used: choose them for each recording", file)
        return cls(model, load_folder_tokenizer(folder), **defaults | options)

    def __call__(
        self, samples: Float[np.ndarray, " samples"], *, language: str | None = None, task: str = "transcribe"
    ) -> str:
        """Transcribes one recording.

        Args:
          samples: 16,000 samples per second, from -1 to 1.
          language: language spoken, such as "de"; None lets the model detect it.
          task: "transcribe", or "translate" into English.

        Raises:
          UserError: if the recording has several channels, is empty or longer than `max_samples`, or has other values
            than finite floats, or the model lacks the language or the task.
        """
        if samples.ndim != 1:
            raise UserError(f"the samples have the shape {samples.shape}, not one axis: mix the channels into one")
        if not len(samples):
            raise UserError("the recording has no samples")
        if not jnp.issubdtype(samples.dtype, jnp.floating) or not np.isfinite(samples).all():
            raise UserError(
                f"the samples are {samples.dtype}, but must be finite floats from -1 to 1: divide 16-bit integers by "
                "32,768"
            )
        if len(samples) > self.max_samples:
            raise UserError(
                f"the recording has {len(samples):,} samples, but at most {self.max_samples:,} are read: cut it into "
                "parts"
            )
        padded = np.pad(samples.astype(np.float32), (0, self.max_samples - len(samples)))
        frames = self._features(padded[None])
        tokens = np.asarray(self._decode(self._decoder, frames, self._first_ids(frames, language, task)))[0]
        return self._tokenizer.decode(tokens[tokens >= 0].tolist()).strip()

    def _first_ids(self, frames: Float[Array, "1 T F"], language: str | None, task: str) -> Int[np.ndarray, " F"]:
        """Returns the tokens that tell the model what to write: language, task, and not to write times."""
        special = self._tokenizer.special_tokens
        if task not in TASKS:
            raise UserError(f"the task must be {' or '.join(TASKS)}, got {task!r}")
        names = ["<|notimestamps|>"]
        first: list[int] = []
        if self.languages:
            names = [f"<|{task}|>", *names]
            first = [self._detect(frames) if language is None else self._tokenizer.language_id(language)]
        elif language is not None or task != "transcribe":
            raise UserError("the model knows English only: leave out the language, and transcribe instead of translate")
        if missing := [name for name in names if name not in special]:
            raise UserError(f"the tokenizer has no token {missing[0]}: take another copy of the model")
        return np.array([*first, *(special[name] for name in names)], np.int32)

    def _detect(self, frames: Float[Array, "1 T F"]) -> int:
        """Returns the id of the most probable language."""
        scores = np.asarray(self._score_first(self.model, frames))  # [V]
        ids = list(self.languages.values())
        return ids[int(scores[ids].argmax())]
