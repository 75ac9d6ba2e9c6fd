"""Runs an exported model with jax, numpy and flatbuffers; `tfx-jax export` writes this file beside model.npz as run.py.

python run.py 464 3797 3332    # continues the tokens, or prints the outputs of an encoder; of a model of images, call
                               # ExportedModel("model.npz") in Python
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np


class ExportedModel:
    """The programs and weights of a file that `tfx-jax export` wrote."""

    def __init__(self, path: Any):
        """Reads the file and prepares the weights on the default device."""
        with np.load(path) as stored:
            self.settings: dict[str, Any] = json.loads(stored["settings"].tobytes())
            self._programs = {
                name: jax.export.deserialize(bytearray(stored[name].tobytes())) for name in self.settings["programs"]
            }
            weights = [
                jax.device_put(stored[f"weight_{index}"].view(jax.numpy.dtype(dtype)))
                for index, dtype in enumerate(self.settings["dtypes"])
            ]
        if "prepare" in self._programs:
            weights = jax.jit(self._programs["prepare"].call)(weights)
            self._prefill = jax.jit(self._programs["prefill"].call)
            self._step = jax.jit(self._programs["step"].call, donate_argnums=2)
        else:
            self._call = jax.jit(self._programs["call"].call)
        self._weights = weights

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 64) -> list[list[int]]:
        """Returns the most probable next tokens of each prompt, up to a token of `eos_ids`, which is left out.

        Each output begins with the settings' `first_ids`, which count as new tokens.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        limit, eos_ids, pad_id = (self.settings[name] for name in ("max_length", "eos_ids", "pad_id"))
        tokens, token_mask = self._padded_rows(prompts)
        length = tokens.shape[1]
        total = length + max_new_tokens if self.settings["continues_inputs"] else max(length, max_new_tokens)
        if limit is not None and total > limit:
            raise ValueError(f"{length} tokens and {max_new_tokens} new ones, but the model reads {limit}")
        room = np.zeros(max_new_tokens, bool)  # only its size is read
        cache, newest = self._prefill(self._weights, tokens, token_mask, room)
        outputs: list[list[int]] = [[] for _ in prompts]
        is_over = np.zeros(len(prompts), bool)
        forced = self.settings["first_ids"]
        for index in range(max_new_tokens):
            logits, cache = self._step(self._weights, newest, cache)
            if pad_id >= 0:  # never generated
                logits = logits.at[:, pad_id].set(-np.inf)
            newest = logits.argmax(axis=-1).astype(np.int32)
            if index < len(forced):
                newest = np.full_like(newest, forced[index])
            for row, token in enumerate(np.asarray(newest).tolist()):
                is_over[row] |= token in eos_ids
                if not is_over[row]:
                    outputs[row].append(token)
            if is_over.all():
                break
        return outputs

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns the logits of the first token after each prompt, [prompts, vocabulary], to sample from."""
        num_new = 1 if self.settings["continues_inputs"] else 0
        tokens, token_mask = self._padded_rows(prompts, num_new)
        cache, newest = self._prefill(self._weights, tokens, token_mask, np.zeros(1, bool))
        return np.asarray(self._step(self._weights, newest, cache)[0])

    def _padded_rows(self, rows: Sequence[Sequence[int]], num_new: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns `_padded(rows)`; raises ValueError for what is no id of the vocabulary, or a row that is too long."""
        vocab_size, limit = self.settings["vocab_size"], self.settings["max_length"]
        for row in map(np.asarray, rows):
            if row.size and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= vocab_size):
                raise ValueError(f"a row has an id outside 0 .. {vocab_size - 1}, or one that is no integer")
        tokens, token_mask = _padded(rows)
        if limit is not None and tokens.shape[1] + num_new > limit:
            raise ValueError(f"a row has {tokens.shape[1]} tokens, but the model reads {limit - num_new}")
        return tokens, token_mask

    def __call__(self, inputs: Any) -> dict[str, np.ndarray]:
        """Returns the outputs of an encoder or classifier by name.

        Args:
          inputs: lists of tokens; or images, [B, Y, X, C].
        """
        arrays = [np.asarray(inputs, np.float32)] if self.settings["inputs"] == "images" else self._padded_rows(inputs)
        return {name: np.asarray(array) for name, array in self._call(self._weights, *arrays).items()}


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens, token mask), [rows, longest row, at least 2]: True where there is a token."""
    if not rows or not all(map(len, rows)):
        raise ValueError("a row has no tokens: pass rows with at least one token each")
    tokens = np.zeros((len(rows), max(2, *map(len, rows))), np.int32)
    token_mask = np.zeros(tokens.shape, bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], token_mask[row, : len(ids)] = ids, True
    return tokens, token_mask


def main(model: ExportedModel, arguments: Sequence[str]) -> None:
    """Prints what a model makes of token ids; exits with the usage for anything else, and for a model of images."""
    if model.settings["inputs"] == "images" or not arguments or not all(map(str.isdecimal, arguments)):
        sys.exit(__doc__)
    ids = [int(token) for token in arguments]
    if "prepare" in model.settings["programs"]:
        print(*model.generate([ids])[0])
    else:
        print(model([ids]))


if __name__ == "__main__":
    main(ExportedModel(pathlib.Path(__file__).with_name("model.npz")), sys.argv[1:])
