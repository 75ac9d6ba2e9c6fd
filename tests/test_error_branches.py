"""Errors that no other test reaches."""

import contextlib
import json
import pathlib
import re
import types
import zipfile
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx

from tests.training.configs import changed, default_config, with_values
from tfx_jax.cli import convert, main
from tfx_jax.cli.support.options import load_trained
from tfx_jax.data.sources.audio import SoundFiles
from tfx_jax.data.sources.lines import read_text
from tfx_jax.data.sources.trees import parse_tree
from tfx_jax.data.tokenizers.hf_tokenizer import TokenizerConfig
from tfx_jax.errors import UserError
from tfx_jax.functional import linear_attention
from tfx_jax.generation import TextGenerator
from tfx_jax.models import BertConfig, ConformerConfig, GPTConfig, ViTConfig, hf
from tfx_jax.models.captioning import Captioner
from tfx_jax.models.hf.folder import Fields
from tfx_jax.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tfx_jax.models.transformer_xl import TransformerXL
from tfx_jax.tasks import artifacts
from tfx_jax.tasks.events import EventClassificationTask
from tfx_jax.tasks.sequence.duplication import DuplicationConfig, DuplicationData
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech, _open_table
from tfx_jax.tasks.speech.speech_data import SpeechData
from tfx_jax.tasks.speech.speech_recognition import SpeechRecognitionConfig
from tfx_jax.tasks.text.bert_pretraining import BertPretrainingConfig
from tfx_jax.tasks.text.sentence_pairs import SentencePairTask
from tfx_jax.tasks.text.text_to_text import TextToTextTask
from tfx_jax.tasks.vision.image_classification import ImageClassificationConfig, ImageData
from tfx_jax.training.checkpoint.artifacts import WorkdirArtifacts, check_artifact, write_sealed
from tfx_jax.training.config import validate
from tfx_jax.training.init_from import init_from_state
from tfx_jax.training.sharding import distributed
from tfx_jax.training.sharding.layers import _attend_in_a_ring
from tfx_jax.training.workdir import find_workdir, make_workdir

VIT = (ViTConfig, ImageClassificationConfig, ImageData)
SPEECH = (ConformerConfig, SpeechRecognitionConfig, RecordedSpeech)


@pytest.mark.parametrize(
    ("classes", "values", "message"),
    [
        (None, {"optimizer.schedule": "cosine"}, 'schedule="cosine" needs config.optimizer.peak_learning_rate'),
        (
            None,
            {"mesh.sequence": 2, "model.attention.name": "window", "model.attention.options.window": 3},
            "config.mesh.sequence=2 shards positions, which window attention does not support: leave it at 1",
        ),
        (
            None,
            {"keep_every": 5, "checkpoint_every": 3},
            "config.keep_every=5 must be a multiple of checkpoint_every=3",
        ),
        (SPEECH, {"task.data.min_digits": 3, "task.data.max_digits": 2}, "max_digits=2 must be at least min_digits=3"),
        (
            VIT,
            {"model.image_size": 16, "task.data.image_size": 8},
            "config.model.image_size=16 must equal config.task.data",
        ),
        (
            VIT,
            {"task.data.dataset": "digits", "model.image_size": 16, "task.data.image_size": 16},
            "config.task.data.image_size=16 must be 8, the size of digits",
        ),
        (
            VIT,
            {
                **{"task.data.dataset": "digits", "model.image_size": 8, "task.data.image_size": 8},
                **{"model.patch_size": 2, "model.num_channels": 3, "task.data.num_channels": 3},
            },
            "config.task.data.num_channels=3 must be 1, as in digits",
        ),
        (
            VIT,
            {
                "task.data.dataset": "folder",
                "model.image_size": 48,
                "model.num_channels": 2,
                "task.data.num_channels": 2,
            },
            "config.task.data.num_channels=2 must be 3 .RGB. or 1 .gray.",
        ),
    ],
)
def test_configurations(classes, values, message):
    config = with_values(changed() if classes is None else default_config(classes), values)
    with pytest.raises(UserError, match=message):
        validate(config)


class NoRecords(list):
    source = "x.csv"


def _spelled(text):
    return text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_tree("  "), "the tree is empty"),
        (
            lambda: _attend_in_a_ring(None, linear_attention, None, None, None),
            "config.mesh.sequence shards positions, which only dense attention supports: leave it at 1",
        ),
        (
            lambda: EventClassificationTask.event_attention(
                types.SimpleNamespace(_splits={"test": NoRecords()}),
                None,
                "test",
                -1,
            ),
            "x.csv has no record 0: it has 0, counted from 1",
        ),
        (
            lambda: SentencePairTask.attention(types.SimpleNamespace(), None, "a dog", "  "),
            "a pair needs a second sentence: give --target=SENTENCE",
        ),
        (
            lambda: DuplicationConfig(DuplicationData(num_symbols=9)).setup(
                GPTConfig(vocab_size=9), None, types.SimpleNamespace(starts_from_model=True)
            ),
            "the initial model has 9 tokens, but the task needs 10",
        ),
        (
            lambda: changed(**{"task.data.dataset": "files", "task.data.train_source": "a.en"}).task.splits()["train"],
            "config.task.data.train_target is missing: name the target file; only a .tsv has both sides",
        ),
        (lambda: find_workdir(""), "--workdir is empty: name a folder"),
        (
            lambda: Fields({"attention_window": [6, 4]}, "config.json").window(),
            r"config.json: attention_window is \[6, 4\], but layers must have the same",
        ),
        (
            lambda: Fields({"attention_window": 5}, "config.json").window(),
            "config.json: attention_window is 5, not an even number above 0",
        ),
    ],
)
def test_calls(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_files_that_are_folders_or_empty(tmp_path):
    folder = tmp_path / "a.wav"
    for name in ("tokenizer.json", "with/tokenizer.json/below"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "empty.json").touch()
    with pytest.raises(UserError, match=r"^a\.wav in .* cannot be read: .*Is a directory"):
        SoundFiles(tmp_path).read("a.wav")
    with pytest.raises(UserError, match=r"^cannot write to .*a\.wav: .*tokenizer\.json"):
        convert._copy(folder / "with", folder)
    with pytest.raises(UserError, match=r"empty\.json is empty$"):
        read_text(tmp_path / "empty.json", 9)


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ("exists", OSError(36, "File name too long"), "w cannot be used (File name too long): name another folder"),
        ("exists", RuntimeError("no\nanswer"), "w cannot be reached (no answer)"),
        (
            "mkdir",
            OSError(30, "Read-only file system"),
            "w cannot be created (Read-only file system): use another workdir",
        ),
        ("mkdir", RuntimeError("no\nanswer"), "w cannot be reached (no answer)"),
    ],
)
def test_folders_that_whoever_has_them_does_not_give(place, error, message, monkeypatch):
    monkeypatch.setattr(type(epath.Path("w")), place, mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=re.escape(message)):
        make_workdir("w")


def test_labels_that_read_alike():
    class Task:
        labels = ("card_arrival", "Card arrival")
        as_written = staticmethod(_spelled)
        labels_as_written = TextToTextTask.labels_as_written

    with pytest.raises(
        UserError, match="'card_arrival' and 'Card arrival' are both written as 'card arrival': rename one"
    ):
        TextToTextTask._check_labels(Task())


def test_a_fixed_context_has_no_map():
    def read():
        model = Seq2Seq(Seq2SeqConfig(vocab_size=9, d_model=4, variant="fixed"), rngs=nnx.Rngs(0))
        tokens = jax.numpy.ones((1, 3), jax.numpy.int32)
        return model(tokens, tokens, return_attention=True)

    with pytest.raises(UserError, match='variant="fixed" has no attention: there is no map of it'):
        jax.eval_shape(read)


@pytest.mark.parametrize("text", ['{"eos_token_id": "2"}', '{"eos_token_id": [1, -1]}', '{"eos_token_id": [true]}'])
def test_ends_that_are_no_tokens(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(
        UserError, match=r"generation_config.json: eos_token_id must be a token id or a list of token ids, got"
    ):
        hf.end_ids(tmp_path)


def test_an_artifact_that_cannot_be_read(tmp_path):
    (tmp_path / "labels.json").mkdir()
    write_sealed(tmp_path / "artifacts.json", {"files": {"labels.json": "0" * 64}})
    with pytest.raises(UserError, match=r"cannot read .*labels.json: Is a directory"):
        check_artifact(tmp_path, "labels.json")


@pytest.mark.parametrize("model", [Captioner, Seq2Seq, TransformerXL])
def test_models_without_integers(model):
    with pytest.raises(UserError, match="does not support int8: leave int8 out"):
        model.decoder(types.SimpleNamespace(), int8=True)


@pytest.mark.parametrize(
    ("missing", "family", "meaning"),
    [
        ("cls_id", "bert", r"\[CLS\]"),
        ("sep_id", "bert", r"\[SEP\]"),
        ("pad_id", "bert", "padding"),
        ("mask_id", "pretraining", r"\[MASK\]"),
        ("eos_id", "gpt", "the end of a text"),
    ],
)
def test_tokenizers_of_elsewhere_that_lack_tokens(missing, family, meaning, monkeypatch):
    tokens = dict.fromkeys(("cls_id", "sep_id", "pad_id", "eos_id", "mask_id"), 1) | {missing: None}
    monkeypatch.setattr(artifacts, "load_folder_tokenizer", lambda _: types.SimpleNamespace(**tokens))
    workdir: Any = types.SimpleNamespace(
        folder=epath.Path("workdir"), starts_from_model=True, checked=lambda _: contextlib.nullcontext(False)
    )
    calls: Any = {
        "bert": lambda: artifacts.setup_tokenizer(workdir, BertConfig(), list, kind="words", family="bert"),
        "gpt": lambda: artifacts.setup_tokenizer(workdir, GPTConfig(), list, kind="words", family="gpt"),
        "pretraining": lambda: BertPretrainingConfig().setup(BertConfig(), None, workdir),
    }
    with pytest.raises(UserError, match=f"the tokenizer of workdir has no token for {meaning}, which this task needs"):
        calls[family]()


def test_a_line_without_tokens_and_nothing_to_start_with():
    tokenizer = types.SimpleNamespace(encode_prompt=lambda line: [])
    generator: Any = types.SimpleNamespace(_tokenizer=tokenizer, continues_prompts=True)
    with pytest.raises(UserError, match="prompt 8 has no tokens, and the tokenizer has no token to start a text with"):
        TextGenerator._encode(generator, "", 8)


def test_a_model_to_start_from_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer: config.init_from must be a workdir or Hugging Face folder"):
        artifacts._copy_tokenizer(epath.Path(tmp_path), epath.Path(tmp_path / "to"))


def test_a_model_to_start_from_that_has_nothing_in_common(monkeypatch):
    state = types.SimpleNamespace(variables={"a": np.zeros(3)})
    monkeypatch.setattr("tfx_jax.training.init_from.initial_params", lambda *_: {"a": np.zeros(4), "b": np.zeros(3)})
    with pytest.raises(UserError, match=r"config.init_from=\./other has no parameter of this model"):
        init_from_state(types.SimpleNamespace(first_state=lambda: state), "./other")


def test_labels_that_are_damaged(tmp_path):
    (tmp_path / "labels.json").write_text('["a", ')
    with pytest.raises(UserError, match=r"labels.json is damaged \(.*\): restore a copy"):
        artifacts.setup_json(WorkdirArtifacts(tmp_path, can_make=False), "labels.json", list)


def test_a_tokenizer_that_cannot_be_read(tmp_path):
    (tmp_path / "tokenizer_config.json").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config.json: Is a directory"):
        TokenizerConfig(epath.Path(tmp_path))


def test_processes_that_do_not_come_together(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", mock.Mock(side_effect=RuntimeError("barrier timed out\nmore")))
    with pytest.raises(UserError, match=r"^two were found \(barrier timed out\): start both$"):
        distributed._connect("two were found", "start both")


def test_a_model_that_no_folder_can_hold(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("tfx_jax.cli.convert.load_trained", lambda _: (object(), None))
    monkeypatch.setattr("tfx_jax.models.hf.completed", mock.Mock(side_effect=ValueError("there is no such family")))
    line = _fails(["convert", "--workdir=w", f"--output={tmp_path / 'new'}"], capfd)
    assert line.endswith("w: there is no such family")


@pytest.mark.parametrize("others", [float("inf"), "<a>", 3, True])
def test_special_tokens_that_are_no_list(tmp_path, others):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"additional_special_tokens": others}))
    with pytest.raises(UserError, match=f"special tokens are {others!r}, not a list or an object of them"):
        TokenizerConfig(epath.Path(tmp_path))


def test_a_table_of_recordings_that_is_not_utf8(tmp_path):
    """The table in a zip; others are read like all text."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        file.writestr("transcripts.tsv", b"a.wav\t\xff\n")
    with pytest.raises(UserError, match=r"transcripts.tsv in .*all.zip is not UTF-8"):
        _open_table(RecordedSpeech(), tmp_path / "all.zip")


def _fails(arguments, capfd):
    assert main(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "data", "--config=gpt_duplication:test", "--steps=1"], "bench data needs pairs of texts"),
        (["train", "--config=mine.py", "--workdir=w"], "defines no get_config(variant): write that function"),
        (["train", "--config=other.py", "--workdir=w"], "other.py must return an ExperimentConfig, got a int"),
        (
            ["train", "--config=transformer_demo:test", "--workdir=w", "--coordinator=localhost:1"],
            "--num-processes and --process-id missing: --coordinator, --num-processes, --process-id must be given",
        ),
    ],
)
def test_command_lines(arguments, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text("x = 3\n")
    pathlib.Path("other.py").write_text('def get_config(variant=""):\n    return 3\n')
    assert message in _fails(arguments, capfd)


def test_a_folder_that_cannot_be_written(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        pathlib.Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    assert "cannot write" in _fails(["experiments", "--copy=transformer_demo"], capfd)


def test_models_that_neither_read_nor_hear(capfd, monkeypatch):
    run = types.SimpleNamespace(task=types.SimpleNamespace(), config=types.SimpleNamespace())
    run.config.task = types.SimpleNamespace(data=SpeechData())
    # In this order: whichever of them is imported only now takes its function from the last.
    for verb in ("transcribe", "attend", "support.options"):
        monkeypatch.setattr(f"tfx_jax.cli.{verb}.load_model", lambda *_, **__: (run, {}))
    run.trained = lambda params: params
    with pytest.raises(
        UserError, match="digits holds a model without a tokenizer, but text needs one: name another run"
    ):
        load_trained(types.SimpleNamespace(workdir="digits"))
    line = "tfx-jax transcribe: tones was trained on synthetic frames, not on audio: name a run of recorded speech"
    assert _fails(["transcribe", "--workdir=tones", "a.wav"], capfd) == line
    line = _fails(["attend", "--workdir=tones", "--image=a.png", "--output=b.png"], capfd)
    assert "--image needs a model that captions or classifies images" in line
