"""Attention maps as an interactive HTML page: choose layer and heads, and point at a token to see its weights.

The page contains its data, styles and script, so it opens without a server from a disk, a mail or a notebook.
"""

import html
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from tfx_jax.errors import UserError
from tfx_jax.training.reporting.attention_plot import AXES, clean_piece, group_maps

_ONE = 1000  # a weight of 1.0; weights are stored as thousandths, shorter than floats and finer than a screen shows


class AttentionView:
    """An interactive page of attention maps; notebooks display it as a cell's value."""

    def __init__(
        self,
        maps: Mapping[str, Float[np.ndarray, "N T S"]],
        source_tokens: Sequence[str],
        target_tokens: Sequence[str],
        *,
        target_inputs: Sequence[str] | None = None,
    ):
        """Builds the page; for the arguments and errors see `plot_attention`."""
        target_inputs = target_tokens if target_inputs is None else target_inputs
        sides = {"source": source_tokens, "target": target_tokens, "target input": target_inputs}
        tokens = {side: [clean_piece(token) for token in pieces] for side, pieces in sides.items()}
        listed = []  # what the page's script reads of each map
        for (stack, kind), layers in group_maps(maps, tokens).items():
            query_side, key_side = AXES[stack, kind]
            for layer, weights in sorted(layers.items()):
                listed.append(
                    {
                        "kind": f"{stack} {kind}",
                        "layer": layer,
                        "querySide": query_side,
                        "keySide": key_side,
                        "queries": tokens[query_side],
                        "keys": tokens[key_side],
                        "weights": np.rint(_ONE * weights).astype(int).tolist(),  # [N, T, S]
                    }
                )
        # A token such as "</script>" must not end the element that holds the data.
        sentences = {side: tokens[side] for side in ("source", "target")}
        data = json.dumps({"one": _ONE, "sentences": sentences, "maps": listed}, ensure_ascii=False)
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
