"""Recorded speech: what is said and log_mel_features, tables of files, and that a training of a Conformer learns."""

import dataclasses
import gzip
import zipfile

import jax
import numpy as np
import pytest
import scipy.io.wavfile
import scipy.signal
from flax import nnx

from tests.training.configs import with_values
from tests.training.tasks.told import Told
from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.functional import log_mel
from tfx_jax.metrics.edit_distance import recognition_scores
from tfx_jax.models import ConformerConfig
from tfx_jax.tasks.speech.recorded_speech import (
    DIGITS,
    RecordedSpeech,
    Sound,
    SpokenDigits,
    Tones,
    log_mel_features,
    utterance_of,
)
from tfx_jax.tasks.speech.speech_recognition import SpeechRecognitionConfig, recognition_loss
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_run


def tiny_config(**values):
    config = tiny_variant(ExperimentConfig(ConformerConfig(), SpeechRecognitionConfig(RecordedSpeech())))
    config.model.dropout_rate = config.model.attention_dropout_rate = 0.0
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 10
    config.mesh.data = 1
    return validate(with_values(config, values))


def write_digits(path, num_files=2):
    """A sound of its own for each digit of two speakers: as many equal samples as the digit and the speaker say."""
    with zipfile.ZipFile(path, "w") as file:
        for digit in range(10):
            for number, speaker in enumerate(("ann", "bob")):
                for take in range(num_files):
                    samples = np.full(300 + 10 * digit, 1_000 * (number + 1) + 100 * digit + take, np.int16)
                    scipy.io.wavfile.write(path.parent / "one.wav", 1_000, samples)
                    file.write(path.parent / "one.wav", f"{digit}_{speaker}_{take}.wav")
        file.writestr("readme.txt", "digits")


def test_tones_are_told_apart_by_their_bands():
    """What is log_mel_features in the middle of a tone is loudest where its frequency is."""
    data = tiny_config().task.data
    tones = Tones(data, "train")
    assert [len(tones[index].frames) for index in range(30)] == tones.lengths[:30].tolist()
    letters = {}
    for index in range(60):
        frames, transcript = tones[index]
        assert (frames.dtype, frames.shape[1]) == (np.int16, 10)
        if len(transcript) == 1:
            loud = np.abs(frames).max(axis=1) > 3_000
            spectrum = np.abs(np.fft.rfft(frames[loud].ravel()))
            letters.setdefault(transcript, set()).add(int(spectrum.argmax() / len(spectrum) * 10 + 0.5))
    assert letters == {"a": {2}, "b": {4}, "c": {6}, "d": {8}}


def test_digits_are_of_one_speaker_in_the_order_of_the_transcript(tmp_path):
    write_digits(tmp_path / "train.zip")
    data = RecordedSpeech("fsdd", str(tmp_path), "train.zip", sample_rate=1_000, num_train=40, max_digits=3)
    speech = data.load("train")
    assert isinstance(speech, SpokenDigits)
    counts, speakers = set(), set()
    for index in range(40):
        frames, transcript = speech[index]
        assert len(frames) == speech.lengths[index]
        samples = frames.ravel()
        loud = samples[np.abs(samples) > 500]
        runs = np.split(loud, np.flatnonzero(np.diff(loud)) + 1)  # equal neighbors are one sound, or two equal ones
        said = [DIGITS.index(word) for word in transcript.split()]
        told = [
            int(run[0]) % 1_000 // 100 for run in runs for _ in range(len(run) // (300 + 10 * (run[0] % 1_000 // 100)))
        ]
        assert told == said
        counts.add(len(said))
        speakers.add(frozenset(int(run[0]) // 1_000 for run in runs))
    assert counts == {1, 2, 3}
    assert speakers == {frozenset({1}), frozenset({2})}
    np.testing.assert_array_equal(speech[7].frames, data.load("train")[7].frames)
    assert set(speech.characters) == set(" " + "".join(DIGITS))
    with pytest.raises(IndexError):
        speech[40]
    data.max_characters = 9
    assert max(len(data.load("train")[index].transcript) for index in range(40)) <= 9


def test_training_hears_each_utterance_slower_and_faster_too():
    """A tone of 200 Hz is one of 160 and of 240 then, in as many frames as were told before; nothing else changes."""
    data = dataclasses.replace(tiny_config().task.data, speed_spread=0.2, max_length=30)
    speech, own = data.load("train"), Tones(data, "train")
    assert speech.transcripts == 3 * own.transcripts
    assert [len(speech[index].frames) for index in range(len(speech))] == speech.lengths.tolist()
    peaks = {0: [], 1: [], 2: []}
    for index in (index for index, transcript in enumerate(own.transcripts) if transcript == "b"):
        for number in range(3):
            frames, transcript = speech[index + number * len(own)]
            assert (frames.dtype, frames.shape[1], transcript) == (np.int16, data.hop, "b")
            spectrum = np.abs(np.fft.rfft(frames.ravel(), 1_000))
            peaks[number].append(int(spectrum.argmax()))
    for number, frequency in enumerate((200, 160, 240)):
        assert peaks[number]
        assert np.abs(np.array(peaks[number]) - frequency).max() <= 3
    np.testing.assert_array_equal(speech[5].frames, own[5].frames)
    assert len(data.load("validation")) == data.num_heldout
    with pytest.raises(IndexError):
        speech[len(speech)]
    with pytest.raises(UserError, match=r"^config\.task\.data\.speed_spread must be at most 0\.5, got 0\.999$"):
        tiny_config(**{"task.data.speed_spread": 0.999})  # speeds are told to a hundredth, and this is none


def test_tables_name_files_beside_them_or_in_their_zip(tmp_path):
    rows = (("a.wav", 1_000, "hello  there"), ("sub/b.wav", 2_000, "ok"))
    (tmp_path / "sub").mkdir()
    for name, rate, _ in rows:
        scipy.io.wavfile.write(tmp_path / name, rate, np.zeros(rate, np.int16))
    table = "".join(f"{name}\t{transcript}\n" for name, _, transcript in rows)
    (tmp_path / "train.tsv").write_text(table)
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as file:
        file.writestr("transcripts.tsv", table)
        for name, *_ in rows:
            file.write(tmp_path / name, name)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(table.encode()))
    for name in ("train.tsv", "train.tsv.gz", "train.zip"):
        speech = RecordedSpeech("files", str(tmp_path), name, sample_rate=1_000).load("train")
        assert speech.lengths.tolist() == [100, 100]
        assert [speech[index].transcript for index in range(2)] == ["hello there", "ok"]
        assert speech.characters == " ehklort"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.wav", r"train\.tsv, line 1: a line must be a WAV file name, one TAB and the transcript$"),
        ("a.wav\t \n", r"train\.tsv, line 1: a line must be "),
        ("\n", r"train\.tsv has only blank lines: name a WAV file"),
        ("none.wav\thello\n", r"^there is no file none\.wav in "),
        (b"\xff\t\n", r"train\.tsv, line 1: not UTF-8"),
    ],
)
def test_mistakes_in_tables_are_named(tmp_path, content, message):
    (tmp_path / "train.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        RecordedSpeech("files", str(tmp_path), "train.tsv").load("train")
    with pytest.raises(UserError, match=r"has no file named DIGIT_SPEAKER_NUMBER\.wav$"):
        RecordedSpeech("fsdd", str(tmp_path.parent), tmp_path.name).load("train")


def test_what_is_heard_of_a_word_depends_neither_on_loudness_nor_on_silence_or_padding():
    rng = np.random.default_rng(0)
    samples = rng.integers(-9_000, 9_000, (2, 32, 10)).astype(np.int16)
    num_frames = np.array([32, 27], np.int32)
    samples[1, 27:] = 0
    samples[:, :10] = samples[:, 20:] = 0
    hear = jax.jit(log_mel_features, static_argnums=2)
    found = np.asarray(hear(samples, num_frames, Sound(1_000, 4)))
    energies = jax.jit(lambda x: log_mel(x, sample_rate=1_000, num_bands=4, floor=1e-6))(
        (samples / 32_768).reshape(2, -1).astype(np.float32)
    )
    for row, count in enumerate(num_frames):
        real = np.asarray(energies, np.float64)[row, :count] / np.log(10)
        wanted = np.maximum(real, real.max() - 8)
        np.testing.assert_allclose(found[row, :count], (wanted - real.max() + 4) / 4, atol=1e-5)
        assert (found[row, count:] == -1).all()
        assert found[row].max() == 1 > found[row, 12:18].min() > -0.5 > found[row, :7].max()
    louder = np.asarray(hear(2 * samples, num_frames, Sound(1_000, 4)))
    np.testing.assert_allclose(louder[:, 12:18], found[:, 12:18], atol=1e-4)
    tight = np.asarray(hear(np.ascontiguousarray(samples[:, 8:24]), np.full(2, 16, np.int32), Sound(1_000, 4)))
    np.testing.assert_allclose(tight[:, 4:10], found[:, 12:18], atol=1e-5)


def test_training_hides_and_evaluation_does_not(tmp_path):
    run = make_run(tiny_config(**{"task.masks.num_time_masks": 2, "task.masks.max_time_share": 0.5}), tmp_path)
    speech = run.config.task.splits()["validation"]
    (example,) = run.task.encode([speech[0]])
    batch = {name: np.asarray(array)[None] for name, array in example.items()}
    sound = run.config.task.data.sound

    class Listener:
        config = run.task.model_config

        def __call__(self, frames, num_frames, rngs=None):
            del num_frames, rngs
            hidden = (frames == 0).all(axis=2).sum()
            return jax.numpy.zeros((1, 24, 5)) + jax.numpy.array([0.0, 1, 2, 3, 4])[None, None] * hidden

    def plain(batch):
        frames = log_mel_features(batch["frames"], batch["num_frames"], sound)
        return recognition_loss(Listener(), batch | {"frames": frames}, None).loss

    def loss(batch, key):
        return run.task.loss(Listener(), batch, None if key is None else nnx.Rngs(dropout=key)).loss

    found = jax.jit(lambda batch, key: (plain(batch), loss(batch, None), loss(batch, key)))(batch, jax.random.key(0))
    unmasked, evaluated, trained = map(float, found)
    assert evaluated == unmasked != trained


def test_words_are_scored(tmp_path):
    """Two of the words of three transcripts are wrong; tones have one each."""
    run = make_run(tiny_config(), tmp_path)
    silent = run.task.evaluate(Told(lambda batch: np.zeros((len(batch["index"]), 24), np.int32)))
    assert silent.metrics == {"wer": 100.0, "cer": 100.0, "exact_match": 0.0}
    assert silent.summary.startswith("word error rate 100.00 %, character error rate 100.00 %")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    values = {"num_steps": 100, "checkpoint_every": 50, "eval_every": 50, "log_every": 50}
    config = tiny_config(**values, **{"task.data.num_train": 1_000})
    return workdir, config, train(config, workdir)


@pytest.mark.compiles(60, "two trainings, and a search of each kind")
@pytest.mark.slow
def test_training_learns_and_goes_on_bit_for_bit(trained, tmp_path):
    workdir, config, result = trained
    assert result.evaluations[-1]["cer"] < 25
    for config.num_steps in (50, 100):
        train(config, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path), load_params(workdir))
    run, params = load_run(workdir), load_params(workdir)
    scores = [run.evaluate(params).metrics["cer"]]
    run.config.task.beam_size = 8
    scores.append(run.evaluate(params).metrics["cer"])
    assert abs(scores[0] - scores[1]) < 5


@pytest.mark.slow
class TestTranscribe:
    def test_writes_a_line_for_each_file(self, trained, tmp_path, capsys):
        """Files of twice the rate, one of which is none: what is said in the others is written all the same."""
        workdir, config, _ = trained
        speech, files = config.task.splits()["validation"], []
        for index in range(3):
            samples = scipy.signal.resample_poly(speech[index].frames.ravel().astype(float), 2, 1)
            files.append(str(tmp_path / f"{index}.wav"))
            scipy.io.wavfile.write(files[-1], 2_000, np.rint(samples).astype(np.int16))
        (tmp_path / "bad.wav").write_text("no sound")
        arguments = ["transcribe", f"--workdir={workdir}", files[0], str(tmp_path / "bad.wav"), *files[1:]]
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert len(lines) == 4
        assert lines[1] == ""
        references = [speech[index].transcript for index in range(3)]
        assert recognition_scores([lines[0], *lines[2:]], references).cer < 60
        assert f"error: {tmp_path}/bad.wav cannot be read as a WAV file: " in err
        assert main(["transcribe", f"--workdir={workdir}", str(tmp_path)]) == 2
        assert capsys.readouterr().out.splitlines() == [lines[0], *lines[2:], ""]  # 0.wav, 1.wav, 2.wav, bad.wav

    def test_hears_silence_around_a_file_as_far_as_there_is_room(self, tmp_path):
        for count, silent in ((50, 10), (96 - 7, 3), (96, 0)):
            samples = np.full(10 * count, 1_000, np.int16)
            scipy.io.wavfile.write(tmp_path / "one.wav", 1_000, samples)
            frames, _ = utterance_of(str(tmp_path / "one.wav"), tiny_config().task.data)
            assert len(frames) == count + 2 * silent
            assert np.flatnonzero(frames.any(axis=1)).tolist() == list(range(silent, count + silent))

    def test_names_what_it_cannot_hear(self, trained, tmp_path, capsys):
        scipy.io.wavfile.write(tmp_path / "long.wav", 1_000, np.zeros(2_000, np.int16))
        files = [str(tmp_path / "long.wav"), str(tmp_path / "none.wav")]
        assert main(["transcribe", f"--workdir={trained[0]}", *files]) == 2
        out, err = capsys.readouterr()
        assert out == "\n\n"
        long, none = err.splitlines()[-2:]
        assert long == f"error: {files[0]} lasts 2.0 seconds, but the model was trained on at most 1.0: cut the file"
        assert none.startswith(f"error: {files[1]} cannot be read: ")
