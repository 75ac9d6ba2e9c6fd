"""A model in one call, and the verb over lines: tasks answer as their own `predict` does, and errors name the input."""

import gzip
import io
import itertools
import json
import sys
import types

import jax
import numpy as np
import PIL.Image
import pytest
import scipy.io.wavfile
from flax import nnx

from tests.nn.programs import draw
from tests.training.configs import default_config
from tfx_jax.cli import main, predict, translate
from tfx_jax.errors import UserError
from tfx_jax.generation import generate
from tfx_jax.models import (
    BertConfig,
    CaptionerConfig,
    ConformerConfig,
    GPTConfig,
    Seq2VecConfig,
    T5Config,
    TransformerConfig,
    ViTConfig,
)
from tfx_jax.models.decomposable import DecomposableConfig
from tfx_jax.tasks.events import EventClassificationConfig, EventData
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech
from tfx_jax.tasks.speech.speech_recognition import SpeechRecognitionConfig
from tfx_jax.tasks.text.classification import ClassificationConfig, LabeledData
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.parsing import ParsingConfig, TreeData
from tfx_jax.tasks.text.question_answering import QuestionAnsweringConfig, QuestionData
from tfx_jax.tasks.text.sentence_pairs import SentencePairConfig, SentencePairTask
from tfx_jax.tasks.text.tagging import TaggedData, TaggingConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.tasks.text.translation import PairData, TranslationConfig
from tfx_jax.tasks.vision.captioning import CaptionData, CaptioningConfig
from tfx_jax.tasks.vision.image_classification import ImageClassificationConfig, ImageData
from tfx_jax.training import predictor as predictor_module
from tfx_jax.training.config import tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.predictor import LoadedModel, load, load_from_run
from tfx_jax.training.run import make_run

COUNT = 3


def opened(classes, workdir, **data):
    """A tiny run, and parameters that no one has trained."""
    config = tiny_variant(default_config(classes))
    for name, value in data.items():
        setattr(config.task.data, name, value)
    run = make_run(validate(config), workdir)
    return run, nnx.to_pure_dict(nnx.state(draw(run.make_model)))


def examples_of(run):
    split = run.config.task.splits()["validation"]
    return [split[index] for index in range(COUNT)]


@pytest.mark.parametrize("pairs", [False, True])
def test_labels_are_those_of_the_task_and_probabilities_add_up(pairs, tmp_path):
    data = {"dataset": "grammar_pairs" if pairs else "grammar"}
    run, params = opened((BertConfig, ClassificationConfig, LabeledData), tmp_path, **data)
    model, texts = load_from_run(run, params), examples_of(run)
    assert model.inputs == (("first text", "second text") if pairs else ("text",))
    found = model.predict([text[:-1] if pairs else text.text for text in texts])
    assert [answer["label"] for answer in found] == run.task.predict(run.trained(params), texts)
    for answer in found:
        assert [*answer] == ["label", "probability", "probabilities"]
        assert tuple(answer["probabilities"]) == run.task.labels
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert (
            answer["probability"] == answer["probabilities"][answer["label"]] == max(answer["probabilities"].values())
        )


def test_columns_of_files_name_the_inputs():
    data = LabeledData(first_column="premise", second_column="hypothesis", label_column="relation")
    task = types.SimpleNamespace(config=types.SimpleNamespace(data=data))
    assert SentencePairTask.inputs.fget(task) == ("premise", "hypothesis")


def test_alignments_answer_like_classifiers(tmp_path):
    classes = (DecomposableConfig, SentencePairConfig, LabeledData)
    run, params = opened(classes, tmp_path, dataset="grammar_pairs")
    pairs = examples_of(run)
    found = load_from_run(run, params).predict([pair[:-1] for pair in pairs])
    assert [answer["label"] for answer in found] == run.task.predict(run.trained(params), pairs)


def test_tags_stand_beside_their_words(tmp_path):
    run, params = opened((BertConfig, TaggingConfig, TaggedData), tmp_path)
    sentences = examples_of(run)
    found = load_from_run(run, params).predict([" ".join(sentence.words) for sentence in sentences] + [""])
    assert [answer["tags"] for answer in found[:-1]] == run.task.predict(run.trained(params), sentences)
    assert [answer["words"] for answer in found] == [*(sentence.words for sentence in sentences), []]
    assert found[-1]["tags"] == []


@pytest.mark.slow
def test_questions_are_answered_out_of_their_contexts(tmp_path):
    run, params = opened((BertConfig, QuestionAnsweringConfig, QuestionData), tmp_path)
    questions = examples_of(run)
    found = load_from_run(run, params).predict([(one.question, one.context) for one in questions])
    expected = run.task.predict(run.trained(params), questions)
    assert [answer["answer"] for answer in found] == [expected[one.name] for one in questions]
    assert all(answer["answer"] in one.context for answer, one in zip(found, questions, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("data", [LabeledData, TaggedData, QuestionData])
def test_text_to_text_writes_what_it_would_of_the_data(data, tmp_path):
    run, params = opened((T5Config, TextToTextConfig, data), tmp_path)
    examples = examples_of(run)
    inputs = {
        LabeledData: lambda one: one.text,
        TaggedData: lambda one: " ".join(one.words),
        QuestionData: lambda one: (one.question, one.context),
    }[data]
    found = load_from_run(run, params).predict([inputs(one) for one in examples])
    assert [answer["answer"] for answer in found] == run.task.predict(run.trained(params), examples)


@pytest.mark.slow
def test_sentences_are_translated_and_parsed(tmp_path):
    run, params = opened((TransformerConfig, TranslationConfig, PairData), tmp_path / "translation")
    lines = [source for source, _ in examples_of(run)]
    found = load_from_run(run, params).predict(lines)
    assert [answer["translation"] for answer in found] == run.task.translator(run.graphdef)(params, lines)
    run, params = opened((TransformerConfig, ParsingConfig, TreeData), tmp_path / "parsing")
    found = load_from_run(run, params).predict(["the dog runs", "a cat sleeps"])
    assert [answer["tree"] for answer in found] == run.task.predict(
        run.trained(params), ["the dog runs", "a cat sleeps"]
    )


def test_what_takes_neither_text_nor_files_says_so(tmp_path):
    with pytest.raises(
        UserError, match=r"the model.s task takes neither lines of text nor files, and the model writes no text"
    ):
        load_from_run(*opened((Seq2VecConfig, EventClassificationConfig, EventData), tmp_path)).predict([])


def test_a_language_model_continues_texts(tmp_path):
    run, params = opened((GPTConfig, LanguageModelConfig, TextData), tmp_path)
    found = load_from_run(run, params).predict(["the dog", "a", " "])
    tokenizer = run.task.tokenizer
    model = LoadedModel(nnx.merge(run.graphdef, params), tokenizer, eos_ids=(tokenizer.eos_id,))
    expected = generate(model, ["the dog", "a"], max_new_tokens=32, temperature=0)  # half of the positions
    assert found == [{"continuation": text} for text in [*expected, ""]]
    loaded = load_from_run(run, params)
    assert loaded.predict(["the dog", "a", " "]) == found
    with pytest.raises(UserError, match=r"^input 2: character 1 is half of a surrogate pair"):
        loaded.predict(["a", "\ud83d"])
    with pytest.raises(UserError, match=r"^input 1 must be text, each a string, got 3"):
        loaded.predict([3])
    for without_folder in (loaded, model):
        with pytest.raises(UserError, match=r"^the model was loaded without a folder, .*: use tfx_jax\.load$"):
            generate(without_folder, [{"role": "user", "content": "a"}], max_new_tokens=9)


def test_a_workdir_has_no_options(workdir):
    with pytest.raises(UserError, match=r"^dtype is for pretrained models, but .* is a workdir: leave it out$"):
        load(workdir, dtype="bfloat16")


def test_the_chat_template_of_a_workdir_is_that_of_its_tokenizer(tmp_path, monkeypatch):
    run, params = opened((GPTConfig, LanguageModelConfig, TextData), tmp_path)
    (tmp_path / "config.json").write_text('{"num_steps": 1}')
    monkeypatch.setattr(predictor_module, "load_chat_template", lambda folder: folder)
    monkeypatch.setattr(predictor_module, "load_run", lambda folder: run)
    monkeypatch.setattr(predictor_module, "load_best_params", lambda folder, **_: params)
    assert load(tmp_path).chat_template == tmp_path / "tokenizer"  # where `_copy_tokenizer` puts it


def commanded(monkeypatch, capfd, run, params, *arguments):
    """Output lines of `tfx-jax predict` with a model that was opened already; of a failure, the error."""
    monkeypatch.setattr(predict, "load_model", lambda *_: (run, params))
    monkeypatch.setattr(predict, "set_up_program", lambda: None)
    status = main(["predict", "--workdir=w", *map(str, arguments)])
    captured = capfd.readouterr()
    return captured.out.splitlines() if status == 0 else captured.err.splitlines()[-1]


def test_images_are_files_folders_or_arrays(tmp_path, monkeypatch, capfd):
    run, params = opened((ViTConfig, ImageClassificationConfig, ImageData), tmp_path)
    images = [image.image for image in examples_of(run)]
    files = [tmp_path / "images" / f"{number}.png" for number in range(COUNT)]
    files[0].parent.mkdir()
    for file, image in zip(files, images, strict=True):
        PIL.Image.fromarray(image).save(file)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    model = load_from_run(run, params)
    found = model.predict(images)
    assert [answer["label"] for answer in found] == run.task.predict(run.trained(params), images)
    assert sum(found[0]["probabilities"].values()) == pytest.approx(1)
    from_files = [answer | {"file": str(file)} for answer, file in zip(found, files, strict=True)]
    assert model.predict(files) == model.predict(tmp_path / "images") == from_files
    lines = [f"{one['file']}\t{one['label']}\t{one['probability']:.4f}" for one in from_files]
    assert commanded(monkeypatch, capfd, run, params, tmp_path / "images") == lines
    (line,) = commanded(monkeypatch, capfd, run, params, "--json", files[1])
    assert json.loads(line) == model.predict([files[1]])[0]
    assert "name some that end with .bmp or " in commanded(monkeypatch, capfd, run, params)
    assert "no.png" in commanded(monkeypatch, capfd, run, params, files[0], "no.png")
    (tmp_path / "empty").mkdir()
    assert "has no file that ends with" in commanded(monkeypatch, capfd, run, params, tmp_path / "empty")
    with pytest.raises(UserError, match=r"^an image must be an array \[\d+, \d+, 3\] of uint8, got \[1, 2, 3\]"):
        model.predict([np.zeros((1, 2, 3), np.int64)])
    with pytest.raises(UserError, match="input 2 must be image, a path or an array, got 3"):
        model.predict([images[0], 3])


def test_images_are_captioned(tmp_path):
    run, params = opened((CaptionerConfig, CaptioningConfig, CaptionData), tmp_path)
    images = [image.image for image in examples_of(run)]
    expected = run.task.predict(run.trained(params), images)
    assert load_from_run(run, params).predict(images) == [{"caption": caption} for caption in expected]


def test_recordings_are_files_or_arrays(tmp_path, monkeypatch, capfd):
    run, params = opened((ConformerConfig, SpeechRecognitionConfig, RecordedSpeech), tmp_path)
    data = run.config.task.data
    sounds = [example.frames.reshape(-1) for example in examples_of(run)]
    for number, sound in enumerate(sounds):
        scipy.io.wavfile.write(tmp_path / f"{number}.WAV", data.sample_rate, sound)
    found = load_from_run(run, params).predict(sounds)
    assert [*found[0]] == ["transcript"]
    from_files = [one | {"file": str(tmp_path / f"{number}.WAV")} for number, one in enumerate(found)]
    assert load_from_run(run, params).predict(str(tmp_path)) == from_files
    expected = [f"{one['file']}\t{one['transcript']}" for one in from_files]
    assert commanded(monkeypatch, capfd, run, params, tmp_path) == expected
    refused = commanded(monkeypatch, capfd, run, params, "--conll", "none.wav")
    assert "--conll is for models that tag words: leave it out" in refused  # before any file is read
    for wrong in (sounds[0].astype(np.float32), sounds[0][None]):
        with pytest.raises(UserError, match=r"^a recording must be an array \[samples\] of int16, got"):
            load_from_run(run, params).predict([wrong])
    with pytest.raises(UserError, match=r"the recording lasts .* seconds, but the model was trained on at most"):
        load_from_run(run, params).predict([np.zeros(data.hop * (data.max_length + 1), np.int16)])


def test_text_files_and_tags_beside_their_words(tmp_path, monkeypatch, capfd):
    run, params = opened((BertConfig, TaggingConfig, TaggedData), tmp_path)
    (tmp_path / "a.txt").write_text("the dog runs\na cat\n")
    (tmp_path / "b.txt").write_text("yes")
    found = load_from_run(run, params).predict(["the dog runs", "a cat", "yes"])
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    expected = [" ".join(one["tags"]) for one in found]
    assert commanded(monkeypatch, capfd, run, params, *files) == expected
    lines = [[*(f"{word}\t{tag}" for word, tag in zip(one["words"], one["tags"], strict=True)), ""] for one in found]
    assert commanded(monkeypatch, capfd, run, params, "--conll", *files) == [*itertools.chain(*lines)]
    assert "--json and --conll are two formats" in commanded(monkeypatch, capfd, run, params, "--conll", "--json")
    assert "none.txt cannot be read: No such file" in commanded(monkeypatch, capfd, run, params, "none.txt")
    (tmp_path / "c.txt").write_bytes(b"yes\n\xff\n")
    assert f"{tmp_path}/c.txt, line 2: not UTF-8" in commanded(monkeypatch, capfd, run, params, tmp_path / "c.txt")


class Echo:
    """A task whose label of a text is the text in capitals."""

    inputs = ("text",)
    empty_answer = types.MappingProxyType({"label": "", "probability": 0.0})
    config = types.SimpleNamespace(
        data=LabeledData(dataset="files", first_column="text", label_column="stars", train_file="train.csv")
    )

    def answer(self, model, rows):
        return [{"label": text.upper(), "probability": 0.5} for (text,) in rows]


def test_a_csv_is_read_by_the_columns_of_the_run(tmp_path, monkeypatch, capfd):
    run = types.SimpleNamespace(task=Echo(), graphdef=nnx.graphdef(nnx.Sequential()), trained=lambda *_: None)
    labeled, unlabeled = tmp_path / "a.csv", tmp_path / "b.CSV"
    labeled.write_text('stars,text\n3,the dog runs\n1,"a cat,\nand a dog"\n2,\n,yes\n')
    unlabeled.write_text('text\nthe dog runs\n"a cat,\nand a dog"\n""\nyes\n')
    labels = ["THE DOG RUNS", "A CAT,\nAND A DOG", "", "YES"]
    lines = [f"{' '.join(label.split())}\t0.5000" if label else "" for label in labels]
    for file in (labeled, unlabeled):
        assert commanded(monkeypatch, capfd, run, {}, file) == lines
        objects = [json.loads(line) for line in commanded(monkeypatch, capfd, run, {}, "--json", file)]
        assert [one["label"] for one in objects] == labels
    labeled.write_text("stars,review\n3,good\n")
    message = f"tfx-jax predict: {labeled}, line 1: 0 columns named 'text'; there are stars, review"
    assert commanded(monkeypatch, capfd, run, {}, labeled) == message
    labeled.write_text("stars,text\n3,the dog runs\n1\n")
    main(["predict", "--workdir=w", str(labeled)])
    captured = capfd.readouterr()
    assert captured.out.splitlines() == lines[:1]  # the row before the bad one is answered
    assert f"{labeled}, line 3: 1 columns, but line 1 names 2" in captured.err


PAIRS = LabeledData(dataset="files", first_column="premise", second_column="hypothesis", label_column="relation")
COLUMN = LabeledData(dataset="files", first_column="text", label_column="stars")
LABELS = ("card", "exchange", "3")


@pytest.mark.parametrize(
    ("data", "name", "text", "rows"),
    [
        (PAIRS, "a.jsonl", '{"hypothesis": "b", "premise": "a"}\n', [["a", "b"]]),
        (PAIRS, "a.tsv", "premise\thypothesis\na\tb\n", [["a", "b"]]),
        (PAIRS, "sick.txt", "id\thypothesis\tpremise\n1\tb\ta\n", [["a", "b"]]),
        (PAIRS, "lines.txt", "a\tb\n", None),
        (COLUMN, "lines.txt", "text, and more text\n", None),
        (LabeledData(dataset="files"), "a.tsv", "card\tMy card.\n3\tThree.\n", [["My card."], ["Three."]]),
        (LabeledData(dataset="files"), "a.txt", "__label__card My card.\n", [["My card."]]),
        (LabeledData(dataset="files"), "a.tsv", "cards\tMy card.\n", None),
        (TaggedData(dataset="files"), "a.conll", "\nNew\tB-place\nYork\tI-place\n\nHi\tO\n", [["New York"], ["Hi"]]),
        (TaggedData(dataset="files"), "eng", "-DOCSTART- -X- O\n\nEU NNP I-ORG\n", [["EU"]]),
        (TaggedData(dataset="files"), "a.txt", "New York sleeps\n", None),
        (TaggedData(dataset="files"), "a.conll", "Hi\tO\n\nNew\tB-place\nYork\tI-place\n", [["Hi"], ["New York"]]),
        (
            TreeData(dataset="files"),
            "a.ptb",
            "(TOP (NP (DT the)\n  (NN dog)))\n(TOP (NN (X (Y x))))\n",
            [["the dog"], ["x"]],
        ),
        (TreeData(dataset="files"), "a.txt", "( dog )\n", None),
        (
            QuestionData(dataset="files"),
            "a.json",
            '{"data": [{"paragraphs": [{"context": "Rome.", "qas": [{"id": 1, "question": "Where?"}]}]}]}',
            [["Where?", "Rome."]],
        ),
        (QuestionData(dataset="files"), "a.txt", "Where?\tRome.\n", None),
        (
            PairData(dataset="files", train_source="both.tsv"),
            "a.tsv",
            "A dog.\tEin Hund.\nA cat.\n",
            [["A dog."], ["A cat."]],
        ),
        (PairData(dataset="files", train_source="a.en", train_target="a.de"), "a.tsv", "A dog.\tNo\n", None),
    ],
)
def test_files_in_the_format_of_training_are_read_without_labels(data, name, text, rows, tmp_path):
    (tmp_path / name).write_text(text)
    task = types.SimpleNamespace(config=types.SimpleNamespace(data=data), labels=LABELS)
    found = predictor_module.read_inputs(task, str(tmp_path / name))
    assert (None if found is None else [list(row) for row in found]) == rows


def test_lines_of_a_packed_tsv_are_inputs_like_those_of_another(tmp_path):
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"Rome burns\n"))
    task = types.SimpleNamespace(config=types.SimpleNamespace(data=TaggedData(dataset="files")))
    assert predictor_module.read_inputs(task, str(tmp_path / "a.tsv.gz")) is None


def test_rows_of_parquet_are_read_and_tables_without_columns_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"stars": [1, 2], "text": ["a", "b"]}), file)
    for data in (COLUMN, TextData(dataset="files")):
        task = types.SimpleNamespace(config=types.SimpleNamespace(data=data))
        assert [list(row) for row in predictor_module.read_inputs(task, file)] == [["a"], ["b"]]
    task.config.data = LabeledData(dataset="files")
    for name in (file, "a.csv", "a.jsonl"):
        with pytest.raises(UserError, match="is a table, but the run names no column of text: write a text file"):
            predictor_module.read_inputs(task, name)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A classifier of pairs that was trained for two steps."""
    workdir = tmp_path_factory.mktemp("pairs")
    config = tiny_variant(default_config((BertConfig, ClassificationConfig, LabeledData)))
    config.task.data.dataset = "grammar_pairs"
    config.mesh.data, config.num_steps = 1, 2
    train(config, workdir)
    return workdir


LINES = ["the dog runs\ta dog runs", "a cat\tno cat", "\t"]


def typed(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(text.encode())))


@pytest.mark.slow
def test_lines_in_as_many_answers_out(workdir, monkeypatch, capfd):
    expected = load(workdir).predict([line.split("\t") for line in LINES])
    assert load(workdir).predict([]) == []
    typed(monkeypatch, "".join(f"{line}\n" for line in LINES))
    assert main(["predict", f"--workdir={workdir}"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"{answer['label']}\t{answer['probability']:.4f}" for answer in expected[:-1]] + [""]
    assert expected[-1] == {"label": "", "probability": 0.0, "probabilities": {}}
    typed(monkeypatch, "".join(f"{line}\n" for line in LINES))
    assert main(["predict", f"--workdir={workdir}", "--json"]) == 0
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == expected


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [[("a", "b"), ("a", "b \ud83d")], [("a", "b"), ("\ude00", "b")]])
def test_half_an_emoji_is_named(workdir, inputs):
    with pytest.raises(UserError, match=r"^input 2: character [13] is half of a surrogate pair \(U\+D"):
        load(workdir).predict(inputs)


def test_a_line_of_other_parts_is_named(workdir, monkeypatch, capfd):
    typed(monkeypatch, "a\tb\na b\n")
    assert main(["predict", f"--workdir={workdir}"]) == 2
    message = "tfx-jax predict: standard input, line 2: expected first text, TAB, second text, but the line has 0 TABs"
    assert capfd.readouterr().err.splitlines()[-1] == message
    with pytest.raises(UserError, match="input 2 must have 2 parts, first text and second text, got 1"):
        load(workdir).predict([("a", "b"), "a b"])


@pytest.mark.parametrize("inputs", ["a string", b"bytes", {"a": 1}.keys(), [None], [3, "a"], [("a", 1)]])
def test_what_is_no_list_of_texts_is_refused(inputs, tmp_path):
    run, params = opened((BertConfig, TaggingConfig, TaggedData), tmp_path)
    model = load_from_run(run, params)
    if isinstance(inputs, str | bytes):
        with pytest.raises(UserError, match=r"^inputs must be a list of strings, not a single string"):
            model.predict(inputs)
    elif isinstance(inputs, list):
        with pytest.raises(UserError, match=r"^input 1 must be sentence, each a string, got"):
            model.predict(inputs)
    else:
        assert len(model.predict(inputs)) == 1


BLANK = ["", " ", "\u200b", "\xad", "\x01", "\u3000\u2060"]


def test_tags_split_at_spaces_alone_and_what_did_not_fit_is_told(tmp_path, caplog):
    run, params = opened((BertConfig, TaggingConfig, TaggedData), tmp_path)
    model = load_from_run(run, params)
    words = ["1\xa0000", "the\u3000dog", "runs"]
    (found,) = model.predict([f" {words[0]} {words[1]}\t{words[2]} "])
    assert found["words"] == words
    assert model.predict(BLANK) == [{"tags": [], "words": []}] * len(BLANK)
    assert not caplog.records
    (found,) = model.predict([" ".join(["dog"] * 70)])
    assert len(found["tags"]) == 70
    (record,) = caplog.records
    assert record.message.startswith("1 of 1 sentences have more than 62 tokens: their ends are not read")
    model.predict([" ".join(["dog"] * 70)])
    assert len(caplog.records) == 1  # the same sentence again
    model.predict(["dog", " ".join(["dog"] * 62), " ".join(["dog"] * 71)])
    assert caplog.records[1].message.startswith("1 of 3 sentences")


@pytest.mark.parametrize(
    ("classes", "dataset", "make"),
    [
        ((BertConfig, ClassificationConfig, LabeledData), "grammar", str),
        ((DecomposableConfig, SentencePairConfig, LabeledData), "grammar_pairs", lambda text: ("a dog", text)),
        ((BertConfig, QuestionAnsweringConfig, QuestionData), "grammar", lambda text: (text, "a dog runs")),
        pytest.param((T5Config, TextToTextConfig, LabeledData), "grammar", str, marks=pytest.mark.slow),
        ((TransformerConfig, TranslationConfig, PairData), "grammar", str),
        pytest.param((TransformerConfig, ParsingConfig, TreeData), "grammar", str, marks=pytest.mark.slow),
    ],
    ids=["classes", "pairs", "questions", "text to text", "translation", "parsing"],
)
def test_blank_lines_have_empty_answers_and_long_ones_are_told(classes, dataset, make, tmp_path, caplog):
    run, params = opened(classes, tmp_path, dataset=dataset)
    model = load_from_run(run, params)
    assert model.predict([make(text) for text in BLANK]) == [run.task.empty_answer] * len(BLANK)
    assert not caplog.records
    model.predict([make("the dog runs"), make(" ".join(["the dog runs"] * 30)), make("\u200b")])
    (record,) = caplog.records
    assert " of " in record.message
    assert "have more than" in record.message


@pytest.mark.slow
def test_translations_are_explained(tmp_path, monkeypatch, capfd):
    run, params = opened((TransformerConfig, TranslationConfig, PairData), tmp_path)
    lines = ["the dog runs .", "", "yes \u2603 and \u2604 \u2603"]
    monkeypatch.setattr(translate, "load_model", lambda *_: (run, params))
    monkeypatch.setattr(translate, "set_up_program", lambda: None)
    typed(monkeypatch, "\n".join(lines))
    assert main(["translate", "--workdir=w", "--json"]) == 0
    captured = capfd.readouterr()
    assert captured.err == "line 3: the model does not know, and guesses, '\u2603', '\u2604'\n"
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert found[1] == {"translation": "", "score": None, "unknown": [], "source": [], "target": [], "attention": []}
    call = jax.jit(lambda params, *pair: nnx.merge(run.graphdef, params)(*pair, return_attention=True))
    tokenizer = run.task.tokenizer
    translations = run.task.translator(run.graphdef).translate_ids(params, lines)
    for one, line, target in zip(found[::2], lines[::2], translations[::2], strict=True):
        source = tokenizer.encode_with_specials(line).ids
        logits, maps = call(params, np.array([source]), np.array([target]))
        logits = np.asarray(logits[0], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert one["score"] == pytest.approx(log_probs[np.arange(len(target)), target].sum(), rel=1e-4)
        cross = [np.asarray(maps[name][0]) for name in maps if name.endswith("/cross")]
        np.testing.assert_allclose(one["attention"], np.mean(cross, axis=(0, 1)), atol=1e-4)
        assert (one["source"], one["target"]) == (tokenizer.pieces(source), tokenizer.pieces(target))
        assert one["translation"] == tokenizer.decode(target)
    assert [one["unknown"] for one in found[::2]] == [[], ["\u2603", "\u2604", "\u2603"]]
    monkeypatch.setattr(translate, "_MAX_REPORTS", 1)
    typed(monkeypatch, "\u2603\n\u2603\n")
    assert main(["translate", "--workdir=w"]) == 0
    assert capfd.readouterr().err.endswith("\n1 more lines have unknown parts\n")
