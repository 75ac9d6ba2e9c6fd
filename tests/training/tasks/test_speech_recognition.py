"""Synthetic speech is what its configuration says; transcripts are scored; a training learns, resumes and is shared."""

import contextlib
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.configs import with_values
from tests.training.tasks.told import Told
from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.errors import UserError
from tfx_jax.models import SanCTCConfig
from tfx_jax.tasks.speech.speech_data import SpeechData, SyntheticSpeech, Utterance
from tfx_jax.tasks.speech.speech_recognition import (
    SpeechRecognitionConfig,
    SpeechRecognitionTask,
)
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run
from tfx_jax.training.sharding.strategies import make_mesh

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "san_ctc_synthetic_speech.py"


def tiny_config(**values):
    """One shape of batches is one program: all utterances are shorter than the first boundary."""
    config = tiny_variant(ExperimentConfig(SanCTCConfig(dropout_rate=0.0), SpeechRecognitionConfig()))
    config.model.attention_dropout_rate = 0.0
    data = config.task.data
    data.max_length = data.max_characters = 16
    data.min_frames, data.max_frames = 4, 6
    data.characters, data.max_silence, data.tokens_per_batch = "ab", 2, 512
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 10
    config.mesh.data = 1
    return validate(with_values(config, values))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = make_run(tiny_config(), tmp_path_factory.mktemp("workdir"))
    assert type(run.task) is SpeechRecognitionTask
    return run


def test_an_utterance_is_its_characters_one_after_the_other():
    """Without noise, the templates stand in it in the order of the transcript, silence around them."""
    data = SpeechData(characters="abc", num_features=3, noise=0.0, min_frames=2, max_frames=9, num_train=30)
    speech = SyntheticSpeech(data, "train")
    assert len(speech) == 30
    assert speech.templates.shape == (3, 6, 3)
    for frames, transcript in (speech[index] for index in range(30)):
        is_silence, spoken = ~frames.any(axis=1), []
        for frame in frames[~is_silence]:
            ((character, place),) = np.argwhere((speech.templates == frame).all(axis=-1))
            if not spoken or (place == 0 and spoken[-1][1] != 0):
                spoken.append(("abc"[character], place))
            assert spoken[-1][0] == "abc"[character]
            assert spoken[-1][1] <= place
            spoken[-1] = "abc"[character], place
        assert "".join(character for character, _ in spoken) == transcript
        assert 1 <= len(transcript) <= data.max_characters


def test_utterances_depend_on_seed_split_and_index_alone():
    data = SpeechData(num_train=40, num_heldout=20, max_length=40)
    train, again = SyntheticSpeech(data, "train"), SyntheticSpeech(data, "train")
    for index in (7, 3, 39):
        np.testing.assert_array_equal(train[index].frames, again[index].frames)
        assert train[index].transcript == again[index].transcript
    assert [len(train[index].frames) for index in range(40)] == train.lengths.tolist()
    assert 30 < train.lengths.max() <= 40
    others = [SyntheticSpeech(data, "validation"), SyntheticSpeech(data, "test")]
    others.append(SyntheticSpeech(SpeechData(num_train=40, max_length=40, seed=1), "train"))
    texts = [tuple(speech[index].transcript for index in range(20)) for speech in (train, *others)]
    assert len(set(texts)) == 4
    np.testing.assert_array_equal(others[0].templates, train.templates)
    assert not np.array_equal(others[2].templates, train.templates)
    with pytest.raises(IndexError):
        train[40]
    assert len(list(train)) == 40


def test_batches_hold_every_utterance_once_an_epoch(run):
    iterator = iter(run.train_data(make_mesh(data=1)))
    speech = run.config.task.splits()["train"]
    wanted = sorted((utterance.transcript, float(utterance.frames.sum())) for utterance in speech)
    found = []
    while len(found) < len(wanted):
        batch = next(iterator)
        assert batch["frames"].shape == (32, 16, 8)
        assert batch["labels"].shape == (32, 16)
        for frames, num_frames, labels, num_labels in zip(
            *(batch[name] for name in ("frames", "num_frames", "labels", "num_labels")), strict=True
        ):
            assert not frames[num_frames:].any()
            if num_frames:
                text = "".join("-ab"[label] for label in labels[:num_labels])
                found.append((text, float(frames[:num_frames].sum())))
    iterator.close()
    assert [text for text, _ in sorted(found)] == [text for text, _ in wanted]
    np.testing.assert_allclose([total for _, total in sorted(found)], [total for _, total in wanted], atol=1e-4)


def test_what_the_model_says_is_scored(run):
    """A path that stutters and pauses is the truth; silence is as many edits as there are characters."""
    references = [utterance.transcript for utterance in run.config.task.splits()["validation"]]

    def paths(batch):
        found = np.zeros((len(batch["index"]), 40), np.int32)
        for row, index in enumerate(batch["index"]):
            labels = np.array(["-ab".index(character) for character in references[index]]) if index >= 0 else []
            found[row, : 3 * len(labels)] = np.stack([labels, labels, 0 * np.array(labels)], axis=-1).ravel()
        return found

    metrics, summary = run.task.evaluate(Told(paths))
    assert metrics == {"cer": 0.0, "exact_match": 100.0}
    assert summary == "character error rate 0.00 %, exact match 100.00 %, 20 utterances"
    assert run.task.evaluate(Told(lambda batch: 0 * paths(batch))).metrics == {"cer": 100.0, "exact_match": 0.0}
    assert run.rank({"cer": 1.0}) > run.rank({"cer": 2.0})


def test_transcripts_do_not_depend_on_the_batch(run, draw_model):
    model = run.trained(jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model)))))
    utterances = list(run.config.task.splits()["validation"])
    found = run.task.predict(model, utterances)
    assert len(set(found)) > 3
    assert run.task.predict(model, utterances[::-1]) == found[::-1]


def test_what_cannot_be_learned_is_refused(run):
    frames = np.zeros((6, 8), np.float32)  # three steps
    assert run.task.encode([Utterance(frames, "aba")])[0]["labels"].tolist() == [1, 2, 1]
    for transcript, message in (
        ("abc", "a transcript has the character 'c', which no training transcript has: replace it"),
        ("aab", "'aab' needs 4 model steps, but 6 frames give only 3"),
        (
            17 * "a",
            f"the transcript '{17 * 'a'}' has 17 characters, but config.task.data.max_characters=16: raise it",
        ),
    ):
        with pytest.raises(UserError, match=f"^{message}$"):
            run.task.encode([Utterance(frames, transcript)])


def test_what_cannot_be_aligned_is_not_trained_on(run, monkeypatch):
    """As little as what is too long; where nothing is left, one line says so."""

    class Said(list):
        characters = "ab"
        transcripts = property(lambda self: [transcript for _, transcript in self])
        lengths = property(lambda self: np.array([len(frames) for frames, _ in self]))

    said = Said(Utterance(np.zeros((6, 8), np.float32), transcript) for transcript in ("aab", "aba"))
    monkeypatch.setattr(run.task, "_splits", {"train": said})
    batch = next(iter(run.task.train_data(LoaderOptions(seed=0))))
    assert {tuple(row[:3].tolist()) for row in batch["labels"] if row.any()} == {(1, 2, 1)}
    # What cannot be read is named before the first step, not at the one that reads it.
    for splits, message in (
        ({"train": Said([Utterance(np.zeros((90, 8), np.float32), 17 * "ab"), *said])}, None),  # left out: too long
        ({"train": said, "validation": Said([Utterance(np.zeros((90, 8), np.float32), "a")])}, "has 90 frames, but"),
    ):
        monkeypatch.setattr(run.task, "_splits", splits)
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            run.task.train_data(LoaderOptions(seed=0))
    said.append(Utterance(np.zeros((16, 8), np.float32), "ab"))
    monkeypatch.setattr(run.task, "_splits", {"train": said})
    monkeypatch.setattr(run.task.config.data, "max_characters", 1)
    with pytest.raises(UserError, match=r"^the transcript 'aba' has 3 characters, but .*max_characters=1: raise it$"):
        run.task.train_data(LoaderOptions(seed=0))
    monkeypatch.undo()
    monkeypatch.setattr(run.task, "_splits", {"train": Said(said[:1])})
    with pytest.raises(UserError, match=r"^no training utterance .* the first has 6 frames for 'aab'$"):
        run.task.train_data(LoaderOptions(seed=0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"characters": ""}, "characters must be one or more different characters, got ''"),
        ({"characters": "aba"}, "characters must be one or more different characters, got 'aba'"),
        ({"max_frames": 3}, "max_frames=3 must be at least min_frames=4"),
        ({"min_frames": 3}, "min_frames=3 must be at least 4, two steps of the model per character"),
        ({"max_length": 9}, "max_length=9 must be at least 10, the frames of the longest character"),
        ({"tokens_per_batch": 15}, "tokens_per_batch=15 must be at least max_length=16, the size of one utterance"),
    ],
)
def test_impossible_settings(values, message):
    with pytest.raises(UserError, match=f"^config.task.data.{message}$"):
        tiny_config(**{f"task.data.{name}": value for name, value in values.items()})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    config = tiny_config(
        num_steps=50, checkpoint_every=25, eval_every=10, log_every=25, **{"task.data.num_train": 2_000}
    )
    return workdir, config, train(config, workdir)


@pytest.mark.compiles(60, "two trainings and an evaluation from the workdir")
@pytest.mark.slow
def test_training_learns_and_goes_on_bit_for_bit(trained, tmp_path):
    workdir, config, result = trained
    first, *_, last = result.evaluations
    assert last["cer"] < 30 < first["cer"]
    assert load_run(workdir).evaluate(load_params(workdir)).metrics.items() <= last.items()
    assert "Frames seen" in (workdir / "report.md").read_text()
    for config.num_steps in (25, 50):
        train(config, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path), load_params(workdir))


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates(tmp_path, capsys):
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={tmp_path}", "--config.mesh.data=1"]) == 0
    capsys.readouterr()
    assert evaluate_cli.run([f"--workdir={tmp_path}", "--split=test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["character error rate", "exact match"]
