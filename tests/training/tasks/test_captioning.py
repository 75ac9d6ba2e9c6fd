"""Captions of shapes: what examples are made, how captions are scored, and that a training learns and goes on."""

import pathlib

import jax
import numpy as np
import PIL.Image
import pytest
from flax import nnx

from tests.training.configs import with_values
from tests.training.tasks.told import Told
from tests.training.tiny import pictures, whole_state
from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.errors import UserError
from tfx_jax.metrics.bleu import bleu_scores
from tfx_jax.models import CaptionerConfig
from tfx_jax.synthetic.shapes import COLORS, SHAPES
from tfx_jax.tasks.vision.captioning import Captioned, CaptioningConfig, CaptioningTask
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "captioning_shapes.py"


def tiny_config(variant="hard", **values):
    config = tiny_variant(ExperimentConfig(CaptionerConfig(), CaptioningConfig()))
    config.model.variant, config.model.channels = variant, (8, 8, 16)
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.02, 5
    config.mesh.data = 1
    return validate(with_values(config, values))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tiny_config("soft"), tmp_path_factory.mktemp("workdir"))
    assert type(run.task) is CaptioningTask
    return run


def test_examples_are_images_words_and_the_boxes_of_what_they_name(run):
    images = run.config.task.splits()["validation"]
    assert len(images) == 16
    for image in (images[index] for index in range(16)):
        (example,) = run.task.encode([image])
        words = run.task.tokenizer.pieces(example["caption"].tolist())
        assert " ".join(words) == f"{image.caption} </s>"
        np.testing.assert_array_equal(example["boxes"], [*image.boxes, (0, 0, 0, 0)])
        named = {word for word, box in zip(words, example["boxes"], strict=True) if box.any()}
        assert named == {*words} & {*COLORS, *SHAPES}
    with pytest.raises(IndexError):
        images[16]


def test_batches_hold_every_image_once_an_epoch_captions_mixed(run):
    images, found = run.config.task.splits()["train"], []
    iterator = iter(run.train_data(make_mesh(data=1)))
    while len(found) < len(images):
        batch = next(iterator)
        assert {name: array.shape for name, array in batch.items()} == {
            "image": (16, 48, 48, 3),
            "caption": (16, 16),
            "boxes": (16, 16, 4),
        }
        found += [int(image.sum()) for image in batch["image"]]
        assert len({(row != 0).sum() for row in batch["caption"]}) > 1
    iterator.close()
    assert sorted(found) == sorted(int(images[index].image.sum()) for index in range(len(images)))


def test_what_the_model_writes_is_scored(run):
    """The truth is all right; without its last word nothing is, though most tokens are."""
    images = run.task.rows("validation")
    references = [example["caption"] for example in run.task.encode([images[index] for index in range(16)])]

    def told(cut):
        searching = [True]  # captions are written before they are scored

        def answer(batch):
            if not searching:
                return {"accuracy": (3.0, 4.0), "on_object": (1.0, 8.0)}
            searching.pop()
            found = np.full((len(batch["index"]), 16), -1)
            for row, index in enumerate(batch["index"]):
                tokens = references[index][: len(references[index]) - cut]
                found[row, : len(tokens)] = tokens
            return found

        return Told(answer)

    metrics, summary = run.task.evaluate(told(1))  # all but the end, which is no word
    assert metrics == {"exact_match": 100.0, "accuracy": 75.0, "on_object": 12.5}
    assert summary == "exact match 100.00 %, accuracy 75.00 %, attention on the object 12.50 %, 16 captions"
    assert run.task.evaluate(told(2)).metrics["exact_match"] == 0.0


def test_captions_do_not_depend_on_the_batch_and_come_with_maps(run, draw_model):
    model = run.trained(jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model)))))
    images = [image.image for image in run.config.task.splits()["validation"]]
    captions = run.task.predict(model, images)
    assert len(set(captions)) > 3
    assert run.task.predict(model, images[::-1]) == captions[::-1]
    seen, words, weights, said = run.task.attention(model, images[3])
    assert (words, said) == ([*captions[3].split(), "</s>"], captions[3])
    assert seen is images[3]
    assert weights.shape == (len(words), 6, 6)
    np.testing.assert_allclose(weights.sum(axis=(1, 2)), 1, rtol=1e-5)


def test_a_caption_that_is_too_long_is_cut(run):
    (example,) = run.task.encode([Captioned(np.zeros((48, 48, 3), np.uint8), 20 * "a ")])
    assert run.task.tokenizer.pieces(example["caption"].tolist()) == [*15 * ["a"], "</s>"]


@pytest.fixture
def folder(tmp_path):
    """Four images of eight pixels, each with two captions."""
    (tmp_path / "images").mkdir()
    lines = []
    for number in range(4):
        pixels = np.full((8, 8, 3), 60 * number, np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        lines += [f"images/{number}.png\tnumber {number}", f"images/{number}.png\tthe gray {number} of all"]
    (tmp_path / "table.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def file_config(folder, **values):
    files = {f"task.data.{split}_file": "table.tsv" for split in ("train", "validation")}
    sizes = {"task.data.image_size": 8, "model.image_size": 8, "model.channels": (4, 8), "task.data.max_length": 5}
    return tiny_config(
        "soft", **{"task.data.dataset": "files", "task.data.data_dir": str(folder)} | files | sizes | values
    )


def test_images_of_files_are_read_with_their_captions(folder, tmp_path):
    run = make_run(file_config(folder), tmp_path)
    images = run.task.rows("validation")
    assert [(int(image.image[0, 0, 0]), image.caption) for image in (images[2], images[7])] == [
        (60, "number 1"),
        (180, "the gray 3 of all"),
    ]
    (example,) = run.task.encode([images[7]])
    assert run.task.tokenizer.pieces(example["caption"].tolist()) == ["the", "gray", "3", "of", "</s>"]
    assert not example["boxes"].any()
    assert [metric.name for metric in run.task.metrics] == ["bleu", "accuracy", "exact_match"]
    references = [images[index].caption for index in range(8)]

    def answer(batch):
        if not searching:
            return {"accuracy": (3.0, 4.0), "on_object": (0.0, 0.0)}
        searching.pop()
        assert len(batch["index"][batch["index"] >= 0]) == 4  # a caption is written for each image
        texts = [references[chosen[index]] for index in batch["index"] if index >= 0]
        rows = [run.task.tokenizer.encode_with_specials(text).ids for text in texts]
        return np.array([ids + [-1] * (7 - len(ids)) for ids in rows] + [[-1] * 7] * (len(batch["index"]) - len(rows)))

    searching, chosen = [True], (0, 3, 4, 7)  # of each image one of its captions
    found = run.task.evaluate(Told(answer))
    assert found.metrics == pytest.approx({"bleu": 100.0, "accuracy": 75.0, "exact_match": 100.0})
    searching, chosen = [True], (0, 3, 4, 5)  # of the last image that of another
    found = run.task.evaluate(Told(answer))
    several = [references[number : number + 2] for number in (0, 2, 4, 6)]
    bleu = bleu_scores([references[number] for number in (0, 3, 4, 5)], several, language="en").sacrebleu
    assert 0 < bleu < 100
    assert found.metrics == pytest.approx({"bleu": bleu, "accuracy": 75.0, "exact_match": 75.0})
    assert "8 captions of 4 images" in found.summary
    with pytest.raises(UserError, match=r"^config\.task\.data\.test_file is not set: the test split needs a file"):
        run.task.rows("test")


def test_an_image_of_another_size_is_named(folder, tmp_path):
    PIL.Image.fromarray(np.zeros((9, 8, 3), np.uint8)).save(folder / "images" / "2.png")
    images = make_run(file_config(folder), tmp_path).task.rows("train")
    with pytest.raises(UserError, match=r"images/2\.png has 8 x 9 pixels, but the model reads 8 x 8: resize it$"):
        images[4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/9.png\tnine", r"images/9\.png does not exist$"),
        ("images/1.png\t ", r"table\.tsv: 1 of 9 lines have no image or no caption: fill them or leave them out$"),
    ],
)
def test_lines_without_image_or_caption_are_named_at_once(folder, tmp_path, line, message):
    with (folder / "table.tsv").open("a") as table:
        table.write(line)
    with pytest.raises(UserError, match=message):
        make_run(file_config(folder), tmp_path)


@pytest.mark.slow
def test_a_training_on_files_learns_them(folder, tmp_path):
    config = file_config(folder, num_steps=60, checkpoint_every=60, eval_every=60)
    assert train(config, tmp_path / "run").evaluations[-1]["accuracy"] > 60
    assert [step for step, _ in pictures(tmp_path / "run")] == [60]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"task.data.max_length": 15},
            r"config\.task\.data\.max_length=15 must be more than 15, the words of the longest caption",
        ),
        (
            {"task.data.tokens_per_batch": 15},
            r"config\.task\.data\.tokens_per_batch=15 must be at least max_length=16, the size of one caption",
        ),
        ({"model.image_size": 64}, r"config\.model\.image_size=64 must equal config\.task\.data\.image_size=48"),
        (
            {"model.image_size": 64, "task.data.image_size": 64},
            r"config\.task\.data\.image_size=64 must be 48, the size of the built-in images",
        ),
        ({"task.data.tokenizer": "characters"}, r'config\.task\.data\.tokenizer must be "words" with dataset="shapes"'),
        ({"model.image_size": 44}, r"config\.model\.image_size=44 must be divisible by 8"),
    ],
)
def test_impossible_settings(values, message):
    with pytest.raises(UserError, match=f"^{message}"):
        tiny_config(**values)


@pytest.mark.slow
@pytest.mark.compiles(60, "two trainings and an evaluation from the workdir")
def test_training_learns_and_goes_on_bit_for_bit_with_its_baseline(tmp_path):
    config = tiny_config(num_steps=40, checkpoint_every=20, eval_every=20, log_every=20)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(config, whole)
    last = result.evaluations[-1]
    assert last["accuracy"] > 40
    assert load_run(whole).evaluate(load_params(whole)).metrics.items() <= last.items()
    for config.num_steps in (20, 40):
        train(config, parts)
    jax.tree.map(np.testing.assert_array_equal, whole_state(parts)[1], whole_state(whole)[1])
    (baseline,) = [leaf for path, leaf in jax.tree.leaves_with_path(load_params(whole)) if "baseline" in str(path)]
    assert -60 < baseline < -5  # nats of a caption


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates(tmp_path, capsys):
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={tmp_path}", "--config.mesh.data=1"]) == 0
    capsys.readouterr()
    assert evaluate_cli.run([f"--workdir={tmp_path}", "--split=test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["exact match", "accuracy", "attention on the object"]
