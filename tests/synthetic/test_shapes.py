"""Scenes of shapes: captions say what is to be seen, by pixels, and what is held out is in no training image."""

import collections
import itertools

import numpy as np
import pytest

from tfx_jax.synthetic.shapes import COLORS, IMAGE_SIZE, MAX_WORDS, SHAPES, draw_scene, is_held_out

TRAIN = [draw_scene((0, 0, index), held_out=False) for index in range(3_000)]
TEST = [draw_scene((0, 2, index), held_out=True) for index in range(600)]


def parse(words):
    """The shapes of a caption, (small, color, shape), its relation, and the place of a single shape."""
    text = " ".join(words)
    head, _, place = text.partition(" at the ")
    relation = next((relation for relation in (" above ", " left of ") if relation in head), None)
    first, _, rest = head.partition(relation) if relation else (head, "", "")
    shapes = []
    for part in (first, *(rest.split(" and ") if rest else ())):
        article, *small, color, shape = part.split()
        assert article == "a"
        assert small in ([], ["small"])
        assert color in COLORS
        assert shape in SHAPES
        shapes.append((bool(small), color, shape))
    assert bool(relation) == (len(shapes) > 1) == (not place)
    return shapes, relation and relation.strip(), place


def center(box):
    top, left, bottom, right = box
    return np.array([top + bottom, left + right]) / 2


def role_of(relation, place, number):
    return (relation, number) if relation else place


@pytest.mark.parametrize("scenes", [TRAIN, TEST], ids=["train", "test"])
def test_a_caption_says_what_is_to_be_seen(scenes):
    """From the pixels: boxes hold the color they are said to, sizes and places are as told."""
    for image, words, named, shapes in scenes[:400]:
        told, relation, place = parse(words)
        assert [(drawn.is_small, drawn.color, drawn.shape) for drawn in shapes] == told
        centers = [center(drawn.box) for drawn in shapes]
        for number, drawn in enumerate(shapes):
            top, left, bottom, right = drawn.box
            inside = image[top:bottom, left:right].astype(float)
            nearest = {
                color: np.abs(inside - rgb).sum(axis=-1) for color, rgb in (COLORS | {"none": (50, 50, 50)}).items()
            }
            seen = np.array(list(nearest))[np.stack(list(nearest.values())).argmin(axis=0)]
            assert collections.Counter(seen[seen != "none"]).most_common(1)[0][0] == drawn.color
            assert (max(bottom - top, right - left) <= 11) == drawn.is_small
            assert [words[at] for at in np.flatnonzero(np.array(named) == number)] == [drawn.color, drawn.shape]
        for one, other in itertools.combinations(shapes, 2):  # no shape hides another
            assert one.box[2] <= other.box[0] or other.box[2] <= one.box[0] or (
                one.box[3] <= other.box[1] or other.box[3] <= one.box[1]
            )  # fmt: skip
        if relation:
            axis = 0 if relation == "above" else 1
            assert all(centers[0][axis] + 10 < other[axis] for other in centers[1:])
        if len(shapes) == 3:
            assert centers[1][1 - axis] < centers[0][1 - axis] < centers[2][1 - axis]
        if place:
            row, column = centers[0] > IMAGE_SIZE / 2
            assert place == f"{'bottom' if row else 'top'} {'right' if column else 'left'}"


def test_what_is_held_out_is_in_no_training_image_and_in_every_other():
    def combinations(scene):
        shapes, relation, place = parse(scene.words)
        return {(color, shape, role_of(relation, place, at)) for at, (_, color, shape) in enumerate(shapes)}

    seen = set.union(*map(combinations, TRAIN))
    for scene in TEST:
        assert combinations(scene) - seen
    assert not any(is_held_out(*combination) for combination in seen)
    # All that may be in training is, and what is held out are all the others: of 6 x 4 x 10, a sixth.
    tested = set.union(*map(combinations, TEST))
    assert len(seen) == 200
    assert len(tested - seen) == 40
    assert {(color, shape) for color, shape, _ in seen} == set(itertools.product(COLORS, SHAPES))


def test_a_scene_depends_on_its_key_alone():
    again, other = draw_scene((0, 0, 7), held_out=False), draw_scene((1, 0, 7), held_out=False)
    np.testing.assert_array_equal(again.image, TRAIN[7].image)
    assert again[1:] == TRAIN[7][1:]
    assert not np.array_equal(other.image, again.image)
    assert again.image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert again.image.dtype == np.uint8


def test_captions_are_short_and_have_all_words():
    assert max(len(scene.words) for scene in TRAIN + TEST) == MAX_WORDS
    vocabulary = {word for scene in TRAIN for word in scene.words}
    assert {word for scene in TEST for word in scene.words} <= vocabulary
    others = {"a", "small", "at", "the", "top", "bottom", "left", "right", "above", "of", "and"}
    assert vocabulary == others | {*COLORS, *SHAPES}
    counts = collections.Counter(len(scene.shapes) for scene in TRAIN)
    assert all(abs(counts[number] / 3_000 - share) < 0.05 for number, share in ((1, 0.2), (2, 0.4), (3, 0.4)))
