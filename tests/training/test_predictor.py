"""A model in one call, and the verb over lines: tasks answer as their own `predict` does, and errors name the input."""

import io
import json
import sys
import types

import pytest
from flax import nnx

from tests.nn.programs import draw
from tests.training.configs import default_config
from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig
from tfx_jax.models.decomposable import DecomposableConfig
from tfx_jax.tasks.text.classification import ClassificationConfig, LabeledData
from tfx_jax.tasks.text.language_modeling import LanguageModelConfig
from tfx_jax.tasks.text.parsing import ParsingConfig, TreeData
from tfx_jax.tasks.text.question_answering import QuestionAnsweringConfig, QuestionData
from tfx_jax.tasks.text.sentence_pairs import SentencePairConfig, SentencePairTask
from tfx_jax.tasks.text.tagging import TaggedData, TaggingConfig
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.tasks.text.translation import PairData, TranslationConfig
from tfx_jax.training.config import tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.predictor import Predictor, load
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
    predictor, texts = Predictor(run, params), examples_of(run)
    assert predictor.inputs == (("first text", "second text") if pairs else ("text",))
    found = predictor.predict([text[:-1] if pairs else text.text for text in texts])
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
    found = Predictor(run, params).predict([pair[:-1] for pair in pairs])
    assert [answer["label"] for answer in found] == run.task.predict(run.trained(params), pairs)


def test_tags_stand_beside_their_words(tmp_path):
    run, params = opened((BertConfig, TaggingConfig, TaggedData), tmp_path)
    sentences = examples_of(run)
    found = Predictor(run, params).predict([" ".join(sentence.words) for sentence in sentences] + [""])
    assert [answer["tags"] for answer in found[:-1]] == run.task.predict(run.trained(params), sentences)
    assert [answer["words"] for answer in found] == [*(sentence.words for sentence in sentences), []]
    assert found[-1]["tags"] == []


@pytest.mark.slow
def test_questions_are_answered_out_of_their_contexts(tmp_path):
    run, params = opened((BertConfig, QuestionAnsweringConfig, QuestionData), tmp_path)
    questions = examples_of(run)
    found = Predictor(run, params).predict([(one.question, one.context) for one in questions])
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
    found = Predictor(run, params).predict([inputs(one) for one in examples])
    assert [answer["answer"] for answer in found] == run.task.predict(run.trained(params), examples)


@pytest.mark.slow
def test_sentences_are_translated_and_parsed(tmp_path):
    run, params = opened((TransformerConfig, TranslationConfig, PairData), tmp_path / "translation")
    lines = [source for source, _ in examples_of(run)]
    found = Predictor(run, params).predict(lines)
    assert [answer["translation"] for answer in found] == run.task.translator(run.graphdef)(params, lines)
    run, params = opened((TransformerConfig, ParsingConfig, TreeData), tmp_path / "parsing")
    found = Predictor(run, params).predict(["the dog runs", "a cat sleeps"])
    assert [answer["tree"] for answer in found] == run.task.predict(
        run.trained(params), ["the dog runs", "a cat sleeps"]
    )


def test_what_answers_no_text_says_so(tmp_path):
    with pytest.raises(UserError, match="LanguageModelTask takes no lines of text, so there is nothing to predict"):
        Predictor(*opened((GPTConfig, LanguageModelConfig, TextData), tmp_path))


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
    predictor = Predictor(run, params)
    if isinstance(inputs, str | bytes):
        with pytest.raises(UserError, match=r"^inputs must be a list of strings, not a single string"):
            predictor.predict(inputs)
    elif isinstance(inputs, list):
        with pytest.raises(UserError, match=r"^input 1 must be sentence, each a string, got"):
            predictor.predict(inputs)
    else:
        assert len(predictor.predict(inputs)) == 1


BLANK = ["", " ", "\u200b", "\xad", "\x01", "\u3000\u2060"]


def test_tags_split_at_spaces_alone_and_what_did_not_fit_is_told(tmp_path, caplog):
    run, params = opened((BertConfig, TaggingConfig, TaggedData), tmp_path)
    predictor = Predictor(run, params)
    words = ["1\xa0000", "the\u3000dog", "runs"]
    (found,) = predictor.predict([f" {words[0]} {words[1]}\t{words[2]} "])
    assert found["words"] == words
    assert predictor.predict(BLANK) == [{"tags": [], "words": []}] * len(BLANK)
    assert not caplog.records
    (found,) = predictor.predict([" ".join(["dog"] * 70)])
    assert len(found["tags"]) == 70
    (record,) = caplog.records
    assert record.message.startswith("1 of 1 sentences have more than 62 tokens: their ends are not read")
    predictor.predict([" ".join(["dog"] * 70)])
    assert len(caplog.records) == 1  # the same sentence again
    predictor.predict(["dog", " ".join(["dog"] * 62), " ".join(["dog"] * 71)])
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
    predictor = Predictor(run, params)
    assert predictor.predict([make(text) for text in BLANK]) == [run.task.empty_answer] * len(BLANK)
    assert not caplog.records
    predictor.predict([make("the dog runs"), make(" ".join(["the dog runs"] * 30)), make("\u200b")])
    (record,) = caplog.records
    assert " of " in record.message
    assert "have more than" in record.message
