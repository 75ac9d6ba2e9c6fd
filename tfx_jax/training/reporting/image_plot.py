"""Draws what a model looked at in an image: once for each map, as in Figure 3 of Xu et al. (2015)."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLUMNS = 6
_SIDE, _TITLE = 1.6, 0.35  # inches: of an image, and of the word above it
_DARKEST = 0.25  # how much of the image is seen where nothing is looked at


def plot_maps(image: UInt8[np.ndarray, "Y X C"], titles: Sequence[str], weights: Float[np.ndarray, "T G G"]) -> Figure:
    """Draws an image, then again for each map, bright where the model looked.

    Args:
      image: red, green and blue, or gray.
      titles: of the maps: the words of a caption, its end included, or the layers of a classifier.
      weights: of the places of a grid over the image. The largest of a map is fully bright, whatever its value.

    Returns:
      A figure that pyplot does not know, so that nothing needs closing.

    Raises:
      ValueError: if there is not one map for each title.
    """
    if len(titles) != len(weights):
        raise ValueError(f"{len(titles)} titles, but {len(weights)} maps")
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    pictures = [("", image), *((title, _lit(image, map)) for title, map in zip(titles, weights, strict=True))]
    columns = min(_COLUMNS, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure = Figure(figsize=(columns * _SIDE, rows * (_SIDE + _TITLE)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, (title, picture) in zip(panels, pictures, strict=False):
        panel.imshow(picture, interpolation="nearest")
        panel.set_title(title, fontsize=11)
    return figure


def _lit(image: UInt8[np.ndarray, "Y X 3"], weights: Float[np.ndarray, "G G"]) -> UInt8[np.ndarray, "Y X 3"]:
    """The image under a light of the shape of the weights, each place of which is a square of pixels."""
    rows, columns = (np.arange(side) * size // side for side, size in zip(image.shape[:2], weights.shape, strict=True))
    light = weights[np.ix_(rows, columns)] / max(float(weights.max()), 1e-9)
    return (image * (_DARKEST + (1 - _DARKEST) * light[..., None])).astype(np.uint8)
