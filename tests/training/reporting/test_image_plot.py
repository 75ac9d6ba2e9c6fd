"""Pictures of what models look at in images, and the verb that draws them."""

import io
import warnings

import numpy as np
import PIL.Image
import pytest
from matplotlib.figure import Figure

from tests.training.tasks import test_image_classification
from tests.training.tasks.test_captioning import tiny_config
from tfx_jax.cli import main
from tfx_jax.synthetic.shapes import draw_scene
from tfx_jax.training.loop import train
from tfx_jax.training.reporting.image_plot import plot_maps


def test_each_map_has_the_image_lit_where_it_was_looked_at():
    """Six by nine pixels under a grid of two by three: each place lights its own pixels, the largest entirely."""
    image = np.random.default_rng(0).integers(100, 256, (6, 9, 3)).astype(np.uint8)
    weights = np.array([[[0.0, 0.5, 0.25], [0.0, 0.0, 0.25]], np.full((2, 3), 1 / 6)], np.float32)
    figure = plot_maps(image, ["red", "</s>"], weights)
    assert isinstance(figure, Figure)
    panels = [panel for panel in figure.axes if panel.images]
    assert [panel.get_title() for panel in panels] == ["", "red", "</s>"]
    whole, red, end = (np.asarray(panel.images[0].get_array()) for panel in panels)
    np.testing.assert_array_equal(whole, image)
    np.testing.assert_array_equal(end, image)
    np.testing.assert_array_equal(red[:3, 3:6], image[:3, 3:6])
    np.testing.assert_allclose(red[:, 6:], image[:, 6:] * (0.25 + 0.75 / 2), atol=1)
    np.testing.assert_allclose(red[3:, :6], image[3:, :6] * 0.25, atol=1)
    with pytest.raises(ValueError, match=r"^got 1 titles for 2 maps"):
        plot_maps(image, ["red"], weights)


def test_words_of_captions_have_glyphs():
    """Japanese ones too; what no font has is replaced, and dollars are no formula."""
    image = np.zeros((4, 4, 3), np.uint8)
    words = ["\N{CJK UNIFIED IDEOGRAPH-72AC}", "\U000100d0", "▁$a$"]
    figure = plot_maps(image, words, np.ones((3, 2, 2), np.float32))
    assert [panel.get_title() for panel in figure.axes][1:4] == [words[0], "\N{REPLACEMENT CHARACTER}", "$a$"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of glyphs that are missing
        figure.savefig(io.BytesIO(), format="png")


def test_gray_images_stay_grey():
    image = np.arange(16, dtype=np.uint8).reshape(4, 4, 1)
    panels = plot_maps(image, ["rollout"], np.eye(2, dtype=np.float32)[None]).axes
    whole, lit = (np.asarray(panel.images[0].get_array()) for panel in panels)
    np.testing.assert_array_equal(whole, np.repeat(image, 3, axis=2))
    np.testing.assert_array_equal(lit[:2, :2], whole[:2, :2])
    np.testing.assert_array_equal(lit[:2, 2:], whole[:2, 2:] // 4)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    train(tiny_config("soft", num_steps=1, checkpoint_every=1), workdir)
    return workdir


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("classifier")
    train(test_image_classification.tiny_config(num_steps=1, checkpoint_every=1), workdir)
    return workdir


@pytest.mark.slow
def test_attend_draws_a_file_or_an_image_of_a_split(workdir, tmp_path, capsys):
    scene = draw_scene((0, 2, 3), held_out=True)
    PIL.Image.fromarray(scene.image).save(tmp_path / "scene.png")
    drawn = []
    for image in (str(tmp_path / "scene.png"), "4"):
        arguments = [f"--image={image}", "--split=test", "--target=a red square", f"--output={tmp_path}/a.png"]
        assert main(["attend", f"--workdir={workdir}", *arguments]) == 0
        assert capsys.readouterr().out == f"drew 4 attention maps in {tmp_path}/a.png: a red square\n"
        with PIL.Image.open(tmp_path / "a.png") as picture:
            drawn.append(np.array(picture.convert("RGB")))
    np.testing.assert_array_equal(*drawn)
    assert len(np.unique(drawn[0].reshape(-1, 3), axis=0)) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--image=17", "--output=a.png"],
            "--image=17 must be a number from 1 to 16, the images of the validation split",
        ),
        (
            ["--image=0", "--output=a.png"],
            "--image=0 must be a number from 1 to 16, the images of the validation split",
        ),
        (["--image=none.png", "--output=a.png"], "there is no image none.png"),
        (["--image=3", "--html=a.html"], "--html is for text: for an image give --output=FILE"),
        (["--source=a", "--output=a.png"], "--source needs a model of text"),
    ],
)
def test_mistakes_are_one_line(workdir, arguments, message, capsys):
    assert main(["attend", f"--workdir={workdir}", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_attend_draws_what_makes_a_class(classifier, tmp_path, capsys):
    """Files may have any size: the square in their middle is what the model reads."""
    scene = draw_scene((0, 1, 2), held_out=True).image
    PIL.Image.fromarray(np.pad(scene, ((0, 0), (7, 7), (0, 0)))).save(tmp_path / "wide.png")
    drawn = []
    for image in (str(tmp_path / "wide.png"), "3"):
        arguments = [f"--workdir={classifier}", f"--image={image}", f"--output={tmp_path}/a.png"]
        assert main(["attend", *arguments]) == 0
        told, label = capsys.readouterr().out.rsplit(" ", 1)
        assert told == f"drew 3 attention maps in {tmp_path}/a.png:"
        assert label.strip() in ("1", "2", "3")
        with PIL.Image.open(tmp_path / "a.png") as picture:
            drawn.append(np.array(picture.convert("RGB")))
    np.testing.assert_array_equal(*drawn)


@pytest.mark.slow
def test_a_classifier_writes_no_caption(classifier, capsys):
    assert main(["attend", f"--workdir={classifier}", "--image=1", "--output=a.png", "--target=a cat"]) == 2
    assert "--target is a caption, but this model classifies images" in capsys.readouterr().err
