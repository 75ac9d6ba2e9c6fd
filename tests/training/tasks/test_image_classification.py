"""Classes of images: what is read, how training changes it, what is looked at, and that a training learns."""

import dataclasses
import functools
import pathlib
import sys
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from flax import nnx

from tests.training.configs import with_values
from tests.training.tasks.told import Told
from tests.training.tiny import pictures
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.sources.images import read_center
from tfx_jax.data.sources.splits import SPLITS
from tfx_jax.errors import UserError
from tfx_jax.functional import attention_rollout
from tfx_jax.models import PatchPoolingConfig, ViTConfig
from tfx_jax.tasks.vision.image_classification import (
    Digits,
    ImageClassificationConfig,
    augment,
    image_classification_loss,
    normalized,
)
from tfx_jax.training.checkpoint.artifacts import WorkdirArtifacts
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh


def tiny_config(model=ViTConfig, **values):
    config = tiny_variant(ExperimentConfig(model(), ImageClassificationConfig()))
    config.mesh.data = 1
    return validate(with_values(config, values))


def folder_config(root, model=ViTConfig, **values):
    """Images of 8 pixels of two classes, dark and light, of many sizes and formats."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        for label, low in (("dark", 0), ("light", 128)):
            folder = root / split / label / "deeper"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(low, low + 128, (*rng.integers(8, 20, 2), 3)).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(folder / f"{number}.{('png', 'JPG')[number % 2]}")
    (root / "train" / "dark" / "notes.txt").write_text("no image")
    (root / "train" / ".cache").mkdir()
    data = {"dataset": "folder", "data_dir": str(root), "image_size": 8, "num_channels": 1}
    data = {f"task.data.{name}": value for name, value in data.items()}
    return tiny_config(model, **data | {"model.image_size": 8, "model.patch_size": 4, "model.num_channels": 1} | values)


class TestData:
    def test_the_class_of_shapes_is_how_many_there_are(self):
        splits = tiny_config().task.splits()
        train, validation = splits["train"], splits["validation"]
        assert (len(train), len(validation), train.labels) == (64, 16, ("1", "2", "3"))
        assert {train[index].label for index in range(64)} == {"1", "2", "3"}
        np.testing.assert_array_equal(train[3].image, tiny_config().task.splits()["train"][3].image)
        assert not np.array_equal(train[3].image, validation[3].image)
        with pytest.raises(IndexError):
            train[64]

    def test_without_scikit_learn_there_are_no_digits(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(UserError, match=r'^dataset="digits" is in scikit-learn: pip install scikit-learn$'):
            Digits(0, "train")

    def test_digits_are_split_without_a_loss(self):
        digits = pytest.importorskip("sklearn.datasets").load_digits()
        data = {"task.data.dataset": "digits", "task.data.image_size": 8, "task.data.num_channels": 1}
        model = {"model.image_size": 8, "model.patch_size": 2, "model.num_channels": 1}
        splits = tiny_config(**data | model).task.splits()
        assert [len(splits[name]) for name in SPLITS] == [1437, 180, 180]
        found = [splits[name][index] for name in SPLITS for index in range(len(splits[name]))]
        wanted = np.rint(digits.images * 255 / 16).astype(np.uint8)
        pairs = sorted((image.tobytes(), label) for image, label in found)
        assert pairs == sorted(zip((image.tobytes() for image in wanted), map(str, digits.target), strict=True))

    def test_folders_are_classes(self, tmp_path):
        splits = folder_config(tmp_path).task.splits()
        images = splits["train"]
        assert (len(images), images.labels) == (48, ("dark", "light"))
        assert [images[index].label for index in (0, 23, 24, 47)] == ["dark", "dark", "light", "light"]
        for index in range(48):
            image, label = images[index]
            assert (image.shape, image.dtype) == ((8, 8, 1), np.uint8)
            assert (image.mean() > 128) == (label == "light")
        with pytest.raises(UserError, match="test_folder is not set: the test split needs a folder"):
            splits["test"]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda root: None, r"there is no folder .*train: name one"),
            (lambda root: (root / "train").mkdir(), r"train has no folder for each class, such as .*cat$"),
            (lambda root: (root / "train" / "cat").mkdir(parents=True), r"cat has no image, a file that ends with one"),
        ],
    )
    def test_folders_without_images_are_refused(self, tmp_path, make, message):
        make(tmp_path)
        config = tiny_config(**{"task.data.dataset": "folder", "task.data.data_dir": str(tmp_path)})
        with pytest.raises(UserError, match=message):
            config.task.splits()["train"]

    def test_the_middle_of_a_picture_is_read(self, tmp_path):
        middle = np.random.default_rng(0).integers(0, 256, (12, 12, 3)).astype(np.uint8)
        PIL.Image.fromarray(np.pad(middle, ((0, 0), (5, 5), (0, 0)))).save(tmp_path / "wide.png")
        np.testing.assert_array_equal(read_center(tmp_path / "wide.png", 12, 3), middle)
        PIL.Image.fromarray(np.full((30, 20, 3), 77, np.uint8)).save(tmp_path / "even.png")
        np.testing.assert_array_equal(read_center(tmp_path / "even.png", 8, 1), np.full((8, 8, 1), 77))
        (tmp_path / "text.png").write_text("text")
        with pytest.raises(UserError, match=r"^.*text\.png cannot be read as an image: "):
            read_center(tmp_path / "text.png", 8, 3)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"model.image_size": 96}, r"^config.model.image_size=96 must equal config.task.data.image_size=48$"),
            (
                {"model.num_channels": 1, "task.data.num_channels": 1},
                r"^config.task.data.num_channels=1 must be 3, as in shapes$",
            ),
            (
                {"model.image_size": 24, "task.data.image_size": 24},
                r"^config.task.data.image_size=24 must be 48, the size of shapes$",
            ),
            ({"task.data.max_shift": 48}, r"max_shift=48 must be less than image_size=48$"),
            ({"model.patch_size": 7}, r"image_size=48 is not divisible by patch_size=7$"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, values, message):
        with pytest.raises(UserError, match=message):
            tiny_config(**values)


class TestChanges:
    """Rows of a batch, each moved and mirrored in a way of its own."""

    IMAGE = np.random.default_rng(0).integers(1, 256, (5, 6, 2)).astype(np.uint8)

    def drawn(self, rows=400, **options):
        images = np.broadcast_to(self.IMAGE, (rows, *self.IMAGE.shape))
        return np.asarray(jax.jit(functools.partial(augment, **options))(images, jax.random.key(0)))

    def expected(self, down, right, is_mirrored):
        image = self.IMAGE[:, ::-1] if is_mirrored else self.IMAGE
        moved = np.zeros_like(image)
        for y, x in np.ndindex(image.shape[:2]):
            if 0 <= y - down < image.shape[0] and 0 <= x - right < image.shape[1]:
                moved[y, x] = image[y - down, x - right]
        return moved.tobytes()

    @pytest.mark.parametrize(("max_shift", "is_mirrored"), [(2, False), (0, True), (1, True)])
    def test_all_changes_are_alike_likely_and_no_others(self, max_shift, is_mirrored):
        ways = range(-max_shift, max_shift + 1)
        mirrors = (False, True) if is_mirrored else (False,)
        wanted = {self.expected(y, x, m) for y in ways for x in ways for m in mirrors}
        found = [image.tobytes() for image in self.drawn(max_shift=max_shift, is_mirrored=is_mirrored)]
        assert set(found) == wanted
        counts = np.array([found.count(way) for way in wanted])
        expected = len(found) / len(wanted)
        assert ((counts - expected) ** 2 / expected).sum() < 3 * len(wanted)  # chi-squared

    def test_training_sees_changed_images_and_evaluation_does_not(self):
        batch = {
            "image": np.broadcast_to(self.IMAGE, (3, *self.IMAGE.shape)),
            "label": np.zeros(3, np.int32),
            "row_weights": np.ones(3, np.float32),
        }

        def model(images, rngs):
            del rngs
            return jnp.stack([images[:, 0, 0, 0], jnp.zeros(3)], axis=1)

        @jax.jit
        def loss(batch, key):
            rngs = None if key is None else nnx.Rngs(dropout=key)
            return image_classification_loss(model, batch, rngs, max_shift=2, is_mirrored=True).loss

        first = self.IMAGE[0, 0, 0] / 127.5 - 1
        evaluated = 3 * np.log1p(np.exp(-first))
        np.testing.assert_allclose(loss(batch, None), evaluated, rtol=1e-5)
        assert abs(loss(batch, jax.random.key(0)) - evaluated) > 0.01


def test_batches_hold_every_image_once_an_epoch(tmp_path):
    run = make_run(tiny_config(), tmp_path)
    images, found = run.config.task.splits()["train"], []
    iterator = iter(run.train_data(make_mesh(data=1)))
    while len(found) < len(images):
        batch = next(iterator)
        shapes = {name: array.shape for name, array in batch.items()}
        assert shapes == {"image": (16, 48, 48, 3), "label": (16,), "row_weights": (16,)}
        found += [
            (image.tobytes(), run.task.labels[label])
            for image, label in zip(batch["image"], batch["label"], strict=True)
        ]
    iterator.close()
    everything = [images[index] for index in range(len(images))]
    assert sorted(found) == sorted((image.tobytes(), label) for image, label in everything)


def test_what_is_predicted_is_scored(tmp_path):
    """All right but for one image, told to be of the next class."""
    task = make_run(tiny_config(), tmp_path).task

    def answer(batch):
        wrong = batch["label"].copy()
        wrong[batch["index"] == 3] = (wrong[batch["index"] == 3] + 1) % 3
        return wrong, batch["label"]

    result = task.evaluate(Told(answer))
    assert result.metrics["accuracy"] == pytest.approx(100 * 15 / 16)
    assert result.summary.endswith(", 16 images")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A training on folders, from the command line's configuration on."""
    return trained(tmp_path_factory.mktemp("images"), ViTConfig)


def trained(root, model):
    """The workdir of a training of a model on folders."""
    values = {"num_steps": 40, "eval_every": 40, "checkpoint_every": 40, "task.data.max_shift": 1}
    values |= {"task.data.is_mirrored": True, "optimizer.peak_learning_rate": 0.01, "optimizer.warmup_steps": 5}
    workdir = pathlib.Path(root / "workdir")
    train(folder_config(root, model, **values), workdir)
    return workdir


class TestTraining:
    def test_learns_light_from_dark_and_predicts_it(self, learned):
        run, params = load_run(learned), load_params(learned)
        model = run.trained(params)
        assert run.task.labels == ("dark", "light")
        assert run.task.evaluate(model).metrics["accuracy"] == 100
        images = [np.full((8, 8, 1), value, np.uint8) for value in (200, 60, 180)]
        assert run.task.predict(model, images) == ["light", "dark", "light"]

    def test_attention_is_that_of_the_class_token(self, learned):
        run, params = load_run(learned), load_params(learned)
        image = run.task.rows("validation")[2].image
        found = run.task.attention(run.trained(params), image)
        assert (found.answer, found.titles) == ("dark", ["rollout", "layer 1", "layer 2"])
        model = nnx.merge(run.trained(params).graphdef, params)
        _, maps = jax.jit(lambda model, images: model(images, return_attention=True))(model, normalized(image[None]))
        layers = [np.asarray(maps[f"encoder/{index}/self"]) for index in range(2)]
        wanted = [np.asarray(attention_rollout(layers))[0, 0, 1:], *(layer[0].mean(axis=0)[0, 1:] for layer in layers)]
        np.testing.assert_allclose(found.maps, np.reshape(wanted, (3, 2, 2)), atol=1e-6)

    def test_tensorboard_shows_what_the_first_image_of_validation_makes_of_it(self, learned):
        run = load_run(learned)
        seen = run.task.attention_example(run.trained(load_params(learned)))
        np.testing.assert_array_equal(seen.image, run.task.rows("validation")[0].image)
        ((step, picture),) = pictures(learned)
        assert (step, picture.size) == (40, (640, 195))  # the image and three maps, each 1.6 x 1.95 inches

    def test_a_class_that_was_never_trained_is_named(self, learned, tmp_path):
        run = load_run(learned)
        (tmp_path / "val" / "bright").mkdir(parents=True)
        PIL.Image.new("L", (8, 8)).save(tmp_path / "val" / "bright" / "1.png")
        run.config.task.data.data_dir = str(tmp_path)
        with pytest.raises(UserError, match=r"^the label 'bright' does not occur in the training split \(2 labels\)$"):
            run.task.train_data(LoaderOptions(seed=0))  # before the first step, not at the first evaluation


def test_a_model_that_pools_patches_learns_and_shows_what_it_pools(tmp_path):
    workdir = trained(tmp_path, PatchPoolingConfig)
    run, params = load_run(workdir), load_params(workdir)
    trained_model, image = run.trained(params), run.task.rows("validation")[2].image
    assert run.task.evaluate(trained_model).metrics["accuracy"] == 100
    found = run.task.attention(trained_model, image)
    assert (found.answer, found.titles) == ("dark", ["pooling"])
    model = nnx.merge(trained_model.graphdef, params)
    _, maps = jax.jit(lambda model, images: model(images, return_attention=True))(model, normalized(image[None]))
    np.testing.assert_allclose(found.maps, maps["pool/0/cross"].reshape(1, 2, 2), atol=1e-6)
    ((step, picture),) = pictures(workdir)
    assert (step, picture.size) == (40, (320, 195))  # the image and one map


@dataclasses.dataclass(unsafe_hash=True)
class MeanPoolingConfig:
    """The least image classifier: a layer for the mean of the pixels, without attention."""

    image_size: int = 48
    num_channels: int = 3
    labels: tuple[str, ...] = ("a",)
    dtype: str = "float32"

    kind: ClassVar[str] = "image_classifier"

    @property
    def vocab_size(self):
        return len(self.labels)

    def make(self, *, rngs):
        return MeanPooling(self, rngs=rngs)


class MeanPooling(nnx.Module):
    def __init__(self, config, *, rngs):
        self.output = nnx.Linear(config.num_channels, len(config.labels), rngs=rngs)

    def __call__(self, images, *, rngs=None):
        del rngs
        return self.output(images.mean(axis=(1, 2)))


def test_any_model_of_the_kind_is_trained_and_one_without_attention_draws_none(tmp_path):
    task_config, model_config = ImageClassificationConfig(), MeanPoolingConfig()
    task_config.tiny()
    task_config.validate(model_config)
    task = task_config.setup(model_config, task_config.splits(), WorkdirArtifacts(tmp_path, can_make=True))
    model = task.make_model(rngs=nnx.Rngs(0))
    iterator = iter(task.train_data(LoaderOptions(seed=0)))
    batch = next(iterator)
    iterator.close()
    grads = jax.jit(nnx.grad(lambda model: task.loss(model, batch, nnx.Rngs(dropout=0)).loss))(model)
    assert np.abs(grads.output.kernel[...]).min() > 0
    called = types.SimpleNamespace(map_batches=lambda function, batches: [function(model, batch) for batch in batches])
    with pytest.raises(UserError, match=r"^MeanPooling cannot return attention maps: its call has no argument"):
        task.attention_example(called)
