"""Attention maps as an interactive HTML page: choose layers and heads, point at a token, search, zoom, save pictures.

The page contains its data, styles and script, so it opens without a server from a disk, a mail or a notebook.
"""

import base64
import html
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from tfx_jax.errors import UserError
from tfx_jax.training.reporting.attention_plot import AXES, clean_piece, group_maps

_ONE = 32_767  # a weight of 1.0; weights are stored as int16, in which one of 4,096 equal weights is still 8
_MOST_WEIGHTS = 2**28  # 512 MiB, about as much as a page of a browser may hold


class AttentionView:
    """An interactive page of attention maps; notebooks display it as a cell's value."""

    def __init__(
        self,
        maps: Mapping[str, Float[np.ndarray, "N T S"]],
        source_tokens: Sequence[str],
        target_tokens: Sequence[str],
        *,
        target_inputs: Sequence[str] | None = None,
        title: str = "Attention",
    ):
        """Builds the page; for the other arguments and ValueErrors see `plot_attention`.

        `title` is the heading of the page and of pictures saved from it.

        Raises:
          UserError: if there are more weights than a browser can hold.
        """
        target_inputs = target_tokens if target_inputs is None else target_inputs
        sides = {"source": source_tokens, "target": target_tokens, "target input": target_inputs}
        tokens = {side: [clean_piece(token) for token in pieces] for side, pieces in sides.items()}
        groups = group_maps(maps, tokens)
        count = sum(weights.size for layers in groups.values() for weights in layers.values())
        if count > _MOST_WEIGHTS:
            raise UserError(
                f"a page holds up to {_MOST_WEIGHTS:,} weights, but the maps have {count:,}: use a shorter text or "
                "fewer maps"
            )
        listed = []  # what the page's script reads of each map
        for (stack, kind), layers in groups.items():
            query_side, key_side = AXES[stack, kind]
            if key_side == "target input" and tokens[key_side] == tokens["target"]:  # as of a language model
                key_side = "target"
            for layer, weights in sorted(layers.items()):
                listed.append(
                    {
                        "kind": f"{stack} {kind}",
                        "layer": layer,
                        "querySide": query_side,
                        "keySide": key_side,
                        "heads": len(weights),
                        "weights": _packed(weights),  # [N, T, S]
                    }
                )
        # A token such as "</script>" must not end the element that holds the data.
        data = json.dumps({"title": title, "one": _ONE, "tokens": tokens, "maps": listed}, ensure_ascii=False)
        data = data.replace("<", "\\u003c")
        template = pathlib.Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        self.page = template.replace("DATA", data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file.

        Raises:
          UserError: if it cannot be written.
        """
        try:
            pathlib.Path(path).write_text(self.page, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    def _repr_html_(self) -> str:
        """Returns the page in an iframe, so that its styles and the notebook's do not affect each other."""
        return f'<iframe srcdoc="{html.escape(self.page)}" style="width:100%;height:640px;border:0"></iframe>'


def _packed(weights: Float[np.ndarray, "N T S"]) -> str:
    """Returns weights as little-endian int16 in units of 1 / _ONE, compressed by zlib, in base64; NaN becomes 0."""
    numbers = np.rint(_ONE * np.clip(np.nan_to_num(weights), -1, 1)).astype("<i2")
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode()
