"""Synthetic images of colored shapes, generated on access, each with the one caption that describes it.

    a red circle at the top left
    a small blue square above a green cross
    a yellow triangle left of a small red square and a white circle

Of two shapes the upper or left one comes first in the caption; of three, the one above, or left of, both others. All
small shapes are called small. A role is a shape's place, or whether it is the first, second or third of "above" or
"left of". Some combinations of color, shape and role are held out: no training image has one, and every validation or
test image has at least one. So a model that describes a test image correctly knows all words and relations from
training, but has not seen that shape in that color and role.
"""

import itertools
from typing import NamedTuple

import numpy as np

IMAGE_SIZE = 48
"""Height and width in pixels."""
MAX_WORDS = 15
"""Longest caption: "a small red circle left of a small blue square and a small white cross"."""

COLORS = {
    "red": (215, 45, 40),
    "green": (50, 170, 60),
    "blue": (50, 85, 220),
    "yellow": (225, 205, 45),
    "purple": (150, 55, 180),
    "white": (235, 235, 235),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
RELATIONS = ("above", "left of")

_ROLES = (*PLACES, *itertools.product(RELATIONS, range(3)))
_LOW, _HIGH = (9, 14), (34, 39)  # ranges of a shape's center near the begin and end of an axis, in pixels
_MIDDLE = (19, 29)  # range of the center between them, for the first of three shapes
_LEAN = 10  # maximum offset of two related shapes across the axis of their relation
_SMALL, _LARGE = (4.0, 5.0), (7.5, 8.5)  # ranges of half the side of a shape
_SHARES = (0.2, 0.6)  # cumulative fractions of images with one shape and with at most two; the others have three


class Drawn(NamedTuple):
    """A shape of an image.

    Attributes:
      color: one of `COLORS`.
      shape: one of `SHAPES`.
      is_small: whether it is small.
      role: one of `PLACES`, or (relation, index of the shape in the caption).
      box: bounding box (top, left, bottom, right), the last two exclusive.
    """

    color: str
    shape: str
    is_small: bool
    role: object
    box: tuple[int, int, int, int]


class Scene(NamedTuple):
    """An image with its caption.

    Attributes:
      image: RGB, [IMAGE_SIZE, IMAGE_SIZE, 3] uint8.
      words: words of the caption.
      named: for each word, the index of the shape whose color or shape it names; -1 for other words.
      shapes: shapes in the order of the caption.
    """

    image: np.ndarray
    words: tuple[str, ...]
    named: tuple[int, ...]
    shapes: tuple[Drawn, ...]


def is_held_out(color: str, shape: str, role: object) -> bool:
    """Returns whether a combination is held out of training: one of six colors for each shape and role."""
    return (list(COLORS).index(color) + SHAPES.index(shape) + _ROLES.index(role)) % len(COLORS) == 0


def draw_scene(key: tuple[int, ...], *, held_out: bool) -> Scene:
    """Generates an image with its caption; the same key always gives the same scene.

    Args:
      key: seed, non-negative integers.
      held_out: True for at least one held-out combination of color, shape and role; False for none.
    """
    rng = np.random.default_rng(key)
    count = 1 + int(np.searchsorted(_SHARES, rng.random(), side="right"))
    roles, centers = _single(rng) if count == 1 else _related(rng, count)
    colors = list(COLORS)
    while True:  # at most six attempts on average
        # A color and a shape for each of the `count` shapes.
        indices = rng.integers((len(COLORS), len(SHAPES)), size=(count, 2))
        looks = [(colors[color_index], SHAPES[shape_index]) for color_index, shape_index in indices]
        if any(is_held_out(*look, role) for look, role in zip(looks, roles, strict=True)) == held_out:
            break
    image, shapes = _background(rng), []
    for (color, shape), role, center in zip(looks, roles, centers, strict=True):
        is_small = bool(rng.integers(2))
        half = rng.uniform(*(_SMALL if is_small else _LARGE))  # half the side in pixels
        mask = _mask(shape, center, half)
        tint = rng.uniform(-15, 15, 3)  # of the whole shape
        noise = rng.normal(0, 6, (int(mask.sum()), 3))  # of each of its pixels
        image[mask] = np.array(COLORS[color]) + tint + noise
        shapes.append(Drawn(color, shape, is_small, role, _box(mask)))
    words, named = _caption(shapes)
    return Scene(np.clip(image, 0, 255).astype(np.uint8), words, named, tuple(shapes))


def _single(rng: np.random.Generator) -> tuple[list[object], list[np.ndarray]]:
    """Returns ([role], [center (row, column)]) of the only shape of an image."""
    place = PLACES[rng.integers(len(PLACES))]
    ranges = (_LOW if "top" in place else _HIGH), (_LOW if "left" in place else _HIGH)
    return [place], [np.array([rng.uniform(*center_range) for center_range in ranges])]


def _related(rng: np.random.Generator, count: int) -> tuple[list[object], list[np.ndarray]]:
    """Returns (roles, centers (row, column)) of `count` related shapes, two or three."""
    relation = RELATIONS[rng.integers(len(RELATIONS))]
    # Coordinates of the centers along the axis of the relation (rows for "above") and across it.
    along = [rng.uniform(*_LOW), *rng.uniform(*_HIGH, count - 1)]
    if count == 2:
        first = rng.uniform(_LOW[0], _HIGH[1])
        across = [first, np.clip(first + rng.uniform(-_LEAN, _LEAN), _LOW[0], _HIGH[1])]
    else:
        across = [rng.uniform(*_MIDDLE), rng.uniform(*_LOW), rng.uniform(*_HIGH)]
    centers = np.stack([along, across], axis=1)
    roles: list[object] = [(relation, index) for index in range(count)]
    return roles, list(centers if relation == "above" else centers[:, ::-1])


def _background(rng: np.random.Generator) -> np.ndarray:
    """Returns dark gray with noise, [IMAGE_SIZE, IMAGE_SIZE, 3] float32."""
    return rng.uniform(20, 80) + 8 * rng.standard_normal((IMAGE_SIZE, IMAGE_SIZE, 3), np.float32)


def _mask(shape: str, center: np.ndarray, half: float) -> np.ndarray:
    """Returns True for the pixels of a shape, [IMAGE_SIZE, IMAGE_SIZE] bool.

    Args:
      shape: one of `SHAPES`.
      center: row and column of the center in pixels.
      half: half the side in pixels.
    """
    # Coordinates of the pixels' centers, y down and x right, scaled so that the shape is in [-1, 1].
    pixel_centers = np.arange(IMAGE_SIZE) + 0.5
    y = (pixel_centers[:, None] - center[0]) / half  # [IMAGE_SIZE, 1]
    x = (pixel_centers[None] - center[1]) / half  # [1, IMAGE_SIZE]
    is_in_square = np.maximum(np.abs(y), np.abs(x)) <= 1
    if shape == "circle":
        return y**2 + x**2 <= 1
    if shape == "triangle":  # its tip is at the top (y = -1, x = 0), its base the lower side of the square
        return is_in_square & (2 * np.abs(x) <= y + 1)
    if shape == "cross":  # two bars through the center, 0.35 of the square wide
        return is_in_square & (np.minimum(np.abs(y), np.abs(x)) <= 0.35)
    return is_in_square


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Returns the bounding box (top, left, bottom, right) of the True pixels, the last two exclusive."""
    rows = np.flatnonzero(mask.any(axis=1))
    columns = np.flatnonzero(mask.any(axis=0))
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1


def _caption(shapes: list[Drawn]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns (words of the caption, index of the shape that each word names or -1); see `Scene`.

    "a red circle left of a blue square" is tagged 0 at "red" and "circle", 1 at "blue" and "square", and -1 elsewhere.
    """
    tagged_words: list[tuple[str, int]] = []
    relation = shapes[0].role[0] if isinstance(shapes[0].role, tuple) else ""
    words_before = ([], relation.split(), ["and"])  # before the first, the second and the third shape
    for index, drawn in enumerate(shapes):
        tagged_words += [(word, -1) for word in words_before[index]]
        tagged_words += [("a", -1), *([("small", -1)] if drawn.is_small else [])]
        tagged_words += [(drawn.color, index), (drawn.shape, index)]
    if not relation:
        tagged_words += [(word, -1) for word in f"at the {shapes[0].role}".split()]
    words, named = zip(*tagged_words, strict=True)
    return words, named
