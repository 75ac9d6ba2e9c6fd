"""Draws attention maps over an image, once for each map, as in Figure 3 of Xu et al. (2015)."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tfx_jax.training.reporting.attention_plot import NotebookFigure, label, text_options

_COLUMNS = 6
_SIDE, _TITLE = 1.6, 0.35  # inches: side of an image, and height of the title above it
_DARKEST = 0.25  # brightness of the image where the weight is 0


def plot_maps(image: UInt8[np.ndarray, "Y X C"], titles: Sequence[str], weights: Float[np.ndarray, "T G G"]) -> Figure:
    """Draws an image, then a copy for each map that is bright where the attention weight is high.

    Args:
      image: RGB or gray image.
      titles: titles of the maps: the words of a caption, including EOS, or the layers of a classifier.
      weights: weights on a grid over the image. The largest weight of each map has full brightness.

    Returns:
      A figure that is not registered with pyplot, so it need not be closed.

    Raises:
      ValueError: if the numbers of maps and titles differ.
    """
    if len(titles) != len(weights):
        raise ValueError(f"got {len(titles)} titles for {len(weights)} maps: each map needs one title")
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    # Pairs (title, picture): the image itself, then a copy for each map.
    pictures = [("", image)]
    pictures += [(title, _illuminated(image, map_weights)) for title, map_weights in zip(titles, weights, strict=True)]
    columns = min(_COLUMNS, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure = NotebookFigure(figsize=(columns * _SIDE, rows * (_SIDE + _TITLE)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, (title, picture) in zip(panels, pictures, strict=False):
        panel.imshow(picture, interpolation="nearest")
        panel.set_title(label(title) if title else "", **text_options(11))
    return figure


def _illuminated(image: UInt8[np.ndarray, "Y X 3"], weights: Float[np.ndarray, "G G"]) -> UInt8[np.ndarray, "Y X 3"]:
    """Scales the brightness of an image by the weights; each weight applies to a rectangle of pixels."""
    (height, width), (grid_rows, grid_columns) = image.shape[:2], weights.shape
    # For each row and column of pixels, the row or column of the grid that it belongs to.
    rows = np.arange(height) * grid_rows // height
    columns = np.arange(width) * grid_columns // width
    light = weights[np.ix_(rows, columns)] / max(float(weights.max()), 1e-9)  # [Y, X] in [0, 1]
    return (image * (_DARKEST + (1 - _DARKEST) * light[..., None])).astype(np.uint8)
