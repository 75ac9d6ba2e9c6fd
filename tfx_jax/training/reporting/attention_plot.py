"""Draws attention maps: one large panel that shows the alignment, and below it every head of every layer.

Rows are queries and columns are keys, with the source along the top and the target down the side as in Figure 3 of
Bahdanau et al. (2015, https://arxiv.org/abs/1409.0473). This module depends on no model: it takes arrays and tokens.

The layout is computed in inches before anything is drawn, so that every label gets the space it needs, and the figure
grows with the sentence instead of the labels overlapping.
"""

import functools
import importlib.metadata
import io
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from tfx_jax.errors import UserError

_FONTS = ["DejaVu Sans", "IPAexGothic"]  # Matplotlib's default, then a Japanese font for missing characters
# Perceptually uniform, but starting at white, so that a weight of zero is blank.
_COLORS = LinearSegmentedColormap.from_list("attention", ["white", *colormaps["magma_r"](np.linspace(1 / 8, 1, 8))])
_LONGEST_LABEL = 18  # characters; a longer token is cut
_SMALLEST_TYPE = 3.5  # points; if tokens leave less space, only every second, third, ... token is labeled
_MARGIN, _GAP, _PAD = 0.3, 0.3, 0.06  # inches: around the figure, between panels, between label and panel
_POINTS = 72  # per inch
_COLOR_BAR_ROOM = 0.6  # inches beside a panel for the color bar
_MOST_PIXELS = 30e6  # larger images get a lower resolution
_SUFFIXES = (".png", ".pdf", ".svg")

# For each kind of map, (stack, kind of attention), the token sequences of its (rows, columns); in drawing order.
AXES = {
    ("encoder", "self"): ("source", "source"),
    ("encoder", "cross"): ("source", "target"),
    ("decoder", "self"): ("target", "target input"),
    ("decoder", "cross"): ("target", "source"),
}


class _Style(NamedTuple):
    """Maximum sizes of panels: lengths in inches, type in points."""

    cell: float  # side of one weight
    side: float  # longest side of a panel
    label_size: float
    title_size: float
    tilt: float  # of column labels that do not fit upright, in degrees


_LARGE = _Style(cell=0.42, side=10.0, label_size=13.0, title_size=13.0, tilt=60.0)
_SMALL = _Style(cell=0.12, side=3.2, label_size=6.5, title_size=7.5, tilt=90.0)


class _Panel(NamedTuple):
    """One map with the labels of its rows and columns."""

    title: str
    weights: np.ndarray  # [T, S]
    rows: list[str]
    columns: list[str]


class _Frame(NamedTuple):
    """Space that a panel needs, in inches, and the layout of its labels."""

    width: float  # of the map itself, and so its height
    height: float
    left: float  # row labels
    above: float  # column labels; the title is above them
    right: float  # overhang of tilted column labels
    title_width: float
    title_height: float
    title_size: float  # points
    label_size: float  # points
    every: int  # one label per this many tokens
    tilt: float  # degrees


class _Placed(NamedTuple):
    """A panel and the top left corner of its map, in inches from that of the figure."""

    panel: _Panel
    frame: _Frame
    left: float
    top: float


def clean_piece(piece: str) -> str:
    """Makes a SentencePiece token readable: removes the space mark, or shows ␣ if it is the whole token.

    >>> clean_piece("▁attention"), clean_piece("ion"), clean_piece("▁")
    ('attention', 'ion', '␣')
    """
    return piece.removeprefix("▁").replace("▁", " ") or "␣"


def plot_attention(
    maps: Mapping[str, Float[np.ndarray, "N T S"]],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    target_inputs: Sequence[str] | None = None,
    lead_layer: int | None = None,
) -> Figure:
    """Draws the attention weights of every head for one sentence pair, below the mean of the cross-attention.

    Args:
      maps: weights in [0, 1] by "encoder/LAYER/self", "decoder/LAYER/self" or "decoder/LAYER/cross", each [N, T, S]
        (queries in rows, keys in columns), or by "encoder/LAYER/cross" for models of pairs, whose first sentence
        attends to the second one as well. Any subset is allowed; the large panel needs cross-attention of the decoder.
      source_tokens: tokens that the encoder read, pieces or words; marks of pieces are removed.
      target_tokens: tokens that the decoder predicted at each step: the rows of its maps.
      target_inputs: tokens that the decoder read at each step, the columns of its self-attention: the target delayed by
        one step. None uses `target_tokens`.
      lead_layer: layer of the large panel; None means the mean over all layers.

    Returns:
      A figure that is not registered with pyplot, so it need not be closed.

    Raises:
      ValueError: if there is no map, or the name, rank or size of a map does not match the tokens.
      UserError: if layer `lead_layer` has no cross-attention.
    """
    tokens = {
        "source": [label(token) for token in source_tokens],
        "target": [label(token) for token in target_tokens],
        "target input": [label(token) for token in (target_tokens if target_inputs is None else target_inputs)],
    }
    groups = group_maps(maps, tokens)
    rows = [
        _head_panels(stack, layer, kind, weights, tokens)
        for (stack, kind), layers in groups.items()
        for layer, weights in sorted(layers.items())
    ]
    large = _large_panel(groups["decoder", "cross"], tokens, lead_layer)
    placed, (width, height) = _arrange(large, rows)
    figure = NotebookFigure(figsize=(width, height))
    FigureCanvasAgg(figure)
    for item in placed:
        _draw_panel(figure, item)
    # Beside the large panel or, without one, beside the last panel of the first row.
    _draw_color_bar(figure, placed[0] if large else placed[len(rows[0]) - 1])
    return figure


def save_attention(
    path: str | os.PathLike[str],
    maps: Mapping[str, Float[np.ndarray, "N T S"]],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    *,
    target_inputs: Sequence[str] | None = None,
    lead_layer: int | None = None,
) -> None:
    """Saves the figure of `plot_attention`, with its arguments; the suffix of `path` chooses PNG, PDF or SVG.

    Raises:
      ValueError: as `plot_attention`.
      UserError: as `plot_attention`, and if the suffix is unknown, the folder is missing or the file cannot be written.
    """
    options: dict[str, Any] = {"target_inputs": target_inputs, "lead_layer": lead_layer}
    save_figure(path, lambda: plot_attention(maps, source_tokens, target_tokens, **options))


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture even before `pyplot` is imported, when others are only named."""

    def _repr_png_(self) -> bytes:
        """Returns the picture; IPython calls this where no backend of matplotlib has taken over."""
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def save_figure(path: str | os.PathLike[str], draw: Callable[[], Figure]) -> None:
    """Writes a figure to a PNG, PDF or SVG file by the suffix of `path`, which is checked before drawing.

    Raises:
      UserError: if the suffix is unknown, the folder is missing or the file cannot be written.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(f"cannot draw {path}: its name must end in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}: create it first")
    figure = draw()
    width, height = figure.get_size_inches()
    try:
        figure.savefig(path, dpi=min(200.0, math.sqrt(_MOST_PIXELS / (width * height))))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def group_maps(
    maps: Mapping[str, Float[np.ndarray, "N T S"]], tokens: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], dict[int, Float[np.ndarray, "N T S"]]]:
    """Groups maps by kind, in the order of `AXES`, and within a kind by layer.

    Args:
      maps: weights by name, as `plot_attention` takes them.
      tokens: tokens of each sequence that `AXES` names.

    Returns:
      For each kind, (stack, kind of attention), its maps by layer, float32; {} for a kind without maps.

    Raises:
      ValueError: if there is no map, or the name, rank or size of a map does not match the tokens.
    """
    if not maps:
        raise ValueError("no attention maps to draw")
    groups: dict[tuple[str, str], dict[int, np.ndarray]] = {kind: {} for kind in AXES}
    for name, weights in maps.items():
        match name.split("/"):
            case [stack, layer, kind] if (stack, kind) in groups and layer.isdecimal():
                weights = np.asarray(weights, np.float32)
                rows, columns = AXES[stack, kind]  # names of token sequences
                _check_shape(name, weights, (rows, len(tokens[rows])), (columns, len(tokens[columns])))
                groups[stack, kind][int(layer)] = weights
            case _:
                raise ValueError(f"unknown attention map {name!r}: expected a name such as 'decoder/0/cross'")
    return groups


def _check_shape(name: str, weights: np.ndarray, rows: tuple[str, int], columns: tuple[str, int]) -> None:
    """Raises ValueError for a wrong shape; `rows` and `columns` are names of token sequences and their lengths."""
    problem = f"map '{name}' has shape {list(weights.shape)}"
    if not weights.size:
        raise ValueError(f"{problem}: there is nothing to draw")
    if weights.ndim != 3 or weights.shape[1:] != (rows[1], columns[1]):
        expected = f"{rows[1]} {rows[0]} tokens by {columns[1]} {columns[0]} tokens"
        raise ValueError(f"{problem}, but {expected} need [N, {rows[1]}, {columns[1]}]")


def _head_panels(
    stack: str, layer: int, kind: str, weights: np.ndarray, tokens: Mapping[str, list[str]]
) -> list[_Panel]:
    """Returns a small panel for each head of a layer, of `weights` [N, T, S]; only the first has query labels."""
    row_labels, column_labels = (tokens[sequence] for sequence in AXES[stack, kind])
    panels = []
    for head, head_weights in enumerate(weights):
        title = f"{stack} {layer} · {kind} · head {head}"
        panels.append(_Panel(title, head_weights, row_labels if head == 0 else [], column_labels))
    return panels


def _large_panel(
    crosses: Mapping[int, np.ndarray], tokens: Mapping[str, list[str]], layer: int | None
) -> _Panel | None:
    """Returns a panel of the mean cross-attention over the heads of one layer, or of all layers if `layer` is None.

    `crosses` has the weights [N, T, S] of each layer. Without any, the result is None.
    """
    if layer is not None and layer not in crosses:
        raise UserError(f"layer {layer} has no cross-attention: choose one of {sorted(crosses)}")
    if not crosses:
        return None
    if layer is None:
        chosen, where = list(crosses.values()), "all layers"
    else:
        chosen, where = [crosses[layer]], f"layer {layer}"
    mean = np.mean([weights.mean(axis=0) for weights in chosen], axis=0)  # [T, S]
    return _Panel(f"cross-attention · mean over the heads of {where}", mean, tokens["target"], tokens["source"])


def _frame(panel: _Panel, style: _Style) -> _Frame:
    """Computes the size of a panel's map in inches, and the space, type size and tilt of its labels."""
    num_rows, num_columns = panel.weights.shape
    cell = min(style.cell, style.side / max(num_rows, num_columns))
    # Largest type size in which the labels of neighboring tokens do not touch: tilted labels are cell * sin(tilt)
    # apart, and a line of text is 1 / 0.8 = 1.25 times as high as its type.
    fitting_size = min(style.label_size, 0.8 * _POINTS * cell * math.sin(math.radians(style.tilt)))
    label_size = max(fitting_size, _SMALLEST_TYPE)
    every = math.ceil(_SMALLEST_TYPE / fitting_size)  # every n-th token has a label: 1 unless neighbors would touch
    longest_row = max((_text_width(label, label_size) for label in panel.rows), default=0.0)
    longest_column = max(_text_width(label, label_size) for label in panel.columns)
    # Column labels are horizontal if the longest one fits, with some space around it, above the cells of its token.
    tilt = math.radians(0.0 if longest_column < 0.9 * cell * every else style.tilt)
    line = 1.2 * label_size / _POINTS  # height of a line of text
    return _Frame(
        width=num_columns * cell,
        height=num_rows * cell,
        left=longest_row + _PAD,
        above=longest_column * math.sin(tilt) + line * math.cos(tilt) + _PAD,
        right=longest_column * math.cos(tilt),
        title_width=_text_width(panel.title, style.title_size),
        title_height=1.6 * style.title_size / _POINTS,
        title_size=style.title_size,
        label_size=label_size,
        every=every,
        tilt=math.degrees(tilt),
    )


def _arrange(large: _Panel | None, rows: Sequence[Sequence[_Panel]]) -> tuple[list[_Placed], tuple[float, float]]:
    """Places the large panel, if any, at the top and the small ones in a grid below, both centered.

    Returns:
      A pair: the panels, the large one first, and the size of the figure (width, height) in inches.
    """
    framed = [[(panel, _frame(panel, _SMALL)) for panel in row] for row in rows]
    frames = [frame for row in framed for _, frame in row]
    # The grid: row labels at the left, then columns of equal width, as wide as the widest map or title. Without a large
    # panel, the color bar is beside the grid.
    indent = max(frame.left for frame in frames)
    pitch = max(max(frame.width, frame.title_width) for frame in frames) + _GAP
    grid_width = indent + pitch * max(len(row) for row in rows) - _GAP + (_COLOR_BAR_ROOM if large is None else 0)
    # `top` moves down the figure; `width` is that of the widest part, without margins.
    placed, top, width = [], _MARGIN, grid_width
    if large is not None:
        frame = _frame(large, _LARGE)
        # Right of the row labels: the map with its color bar or tilted labels, or the title if it is wider.
        large_width = frame.left + max(frame.width + max(frame.right, _COLOR_BAR_ROOM), frame.title_width)
        width = max(grid_width, large_width)
        top += frame.title_height + frame.above  # `_Placed` has the corner of the map, which is below its labels
        placed.append(_Placed(large, frame, left=_MARGIN + (width - large_width) / 2 + frame.left, top=top))
        top += frame.height + 2 * _GAP
    left = _MARGIN + (width - grid_width) / 2 + indent
    for row in framed:
        top += max(frame.title_height + frame.above for _, frame in row)
        placed += [
            _Placed(panel, frame, left=left + pitch * column, top=top) for column, (panel, frame) in enumerate(row)
        ]
        top += max(frame.height for _, frame in row) + _GAP
    # The last row needs no gap below it.
    return placed, (width + 2 * _MARGIN, top - _GAP + _MARGIN)


def _draw_panel(figure: Figure, item: _Placed) -> None:
    """Draws one map, its labels and its title."""
    panel, frame, left, top = item
    axes = _add_axes(figure, left, top, frame.width, frame.height)
    axes.imshow(panel.weights, cmap=_COLORS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    num_rows, num_columns = panel.weights.shape
    ruling = {"color": "0.88", "linewidth": 1.4 * frame.width / num_columns}  # thin lines between the cells
    axes.hlines(np.arange(0.5, num_rows - 1), -0.5, num_columns - 0.5, **ruling)
    axes.vlines(np.arange(0.5, num_columns - 1), -0.5, num_rows - 0.5, **ruling)
    axes.tick_params(length=0, pad=_PAD * _POINTS / 2, labeltop=True, labelbottom=False)
    axes.spines[:].set(color="0.7", linewidth=0.5)
    # Labels are tokens, not formulas: a lone "$" must not start one.
    text = text_options(frame.label_size)
    rotation = {}
    if frame.tilt:
        rotation = {"rotation": frame.tilt, "rotation_mode": "anchor", "ha": "left", "va": "center"}
        dip = 0.5 * frame.label_size * math.cos(math.radians(frame.tilt))  # of the lower corner of a rotated label
        axes.tick_params(axis="x", pad=_PAD * _POINTS / 2 + dip)
    columns = range(0, len(panel.columns), frame.every)
    axes.set_xticks(columns, [panel.columns[column] for column in columns], **text, **rotation)
    rows = range(0, len(panel.rows), frame.every)
    axes.set_yticks(rows, [panel.rows[row] for row in rows], **text)
    font = FontProperties(family=_FONTS, size=frame.title_size)
    # In the axes' coordinates, the map is from 0 to 1; the title is above the column labels.
    above = 1 + (frame.above + 0.3 * frame.title_size / _POINTS) / frame.height
    axes.text(0, above, panel.title, transform=axes.transAxes, fontproperties=font, va="bottom")


def _draw_color_bar(figure: Figure, item: _Placed) -> None:
    """Draws a color bar to the right of a panel."""
    frame = item.frame
    left = item.left + frame.width + 0.15
    axes = _add_axes(figure, left, item.top, width=0.12, height=min(frame.height, 2.0))
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), _COLORS), cax=axes, ticks=[0, 0.5, 1])
    bar.outline.set(edgecolor="0.7", linewidth=0.5)
    axes.tick_params(length=0, labelsize=8)


def _add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Adds axes at a position in inches from the top left corner; Matplotlib counts fractions from the bottom left."""
    figure_width, figure_height = figure.get_size_inches()
    bottom = 1 - (top + height) / figure_height
    return figure.add_axes((left / figure_width, bottom, width / figure_width, height / figure_height))


def text_options(size: float) -> dict[str, Any]:
    """Returns options for text of `size` points in Matplotlib, in fonts that have Japanese too; for `label`s."""
    _drawable()
    return {"fontproperties": FontProperties(family=_FONTS, size=size), "parse_math": False}


def label(token: str) -> str:
    """Shortens a token to the maximum label length, and replaces characters that neither font has."""
    text = clean_piece(token)
    if len(text) > _LONGEST_LABEL:
        text = text[: _LONGEST_LABEL - 1] + "…"
    return "".join(character if ord(character) in _drawable() else "�" for character in text)


@functools.lru_cache(maxsize=1024)
def _text_width(text: str, size: float) -> float:
    """Returns the width of a line of text of `size` points, in inches."""
    renderer = RendererAgg(1, 1, dpi=_POINTS)
    width, _, _ = renderer.get_text_width_height_descent(text, FontProperties(family=_FONTS, size=size), ismath=False)
    return width / _POINTS


@functools.cache
def _drawable() -> frozenset[int]:
    """Registers the Japanese font with Matplotlib, and returns the code points that one of the two fonts has.

    The package of the font is not imported, because its import changes the default font.
    """
    package = importlib.metadata.distribution("matplotlib-fontja")
    japanese = str(package.locate_file("matplotlib_fontja/fonts/ipaexg.ttf"))
    font_manager.fontManager.addfont(japanese)
    paths = [font_manager.findfont(_FONTS[0]), japanese]
    return frozenset(code for path in paths for code in font_manager.get_font(path).get_charmap())
