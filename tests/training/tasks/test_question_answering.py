"""Questions become the right windows; the answers that windows hold come out again; trainings from the command line."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.cli.train import load_config_file
from tfx_jax.data.squad import Answer, Question
from tfx_jax.errors import UserError
from tfx_jax.models.bert import BertConfig
from tfx_jax.tasks.answer_scores import answer_scores
from tfx_jax.tasks.question_answering import NO_ANSWER, Spans
from tfx_jax.training.config import ExperimentConfig, QuestionData
from tfx_jax.training.experiments import make_experiment
from tfx_jax.training.experiments.question_answering import QuestionAnsweringExperiment
from tfx_jax.training.sharding import make_mesh
from tfx_jax.training.validation import validate

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "bert_jaquad.py"
SIZES = {"max_length": 32, "stride": 7, "max_question_length": 12, "tokens_per_batch": 320}


def tiny_config(**data):
    model = BertConfig(600, max_length=128, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    return validate(ExperimentConfig(model=model, data=QuestionData(**SIZES | data)))


def opened(workdir, **data):
    experiment = make_experiment(tiny_config(**data))
    assert type(experiment) is QuestionAnsweringExperiment
    experiment.open(workdir)
    return experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return opened(tmp_path_factory.mktemp("workdir"))


def write_questions(path, *questions):
    """SQuAD's JSON with a paragraph for each of (question, context, answers)."""
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": str(number),
                    "question": question,
                    "answers": [{"text": answer, "answer_start": context.index(answer)} for answer in answers],
                }
            ],
        }
        for number, (question, context, answers) in enumerate(questions)
    ]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return {"dataset": "files", "data_dir": str(path.parent), "train_file": path.name, "validation_file": path.name}


def know_answers(model, batch):
    """A model that finds what the rows have as their answers, and is unsure where they have none."""
    return Spans(batch["first"], batch["last"], jnp.where(batch["first"] == NO_ANSWER, -5.0, 5.0))


def params_of(experiment):
    """Zeros, for models whose parameters do not matter; to draw some would take seconds."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(experiment.make_model)))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def test_rows_are_the_windows_of_all_questions(experiment):
    """Read off the text itself: what a row shows of the context, and the answer in it."""
    tokenizer, questions = experiment.tokenizer, experiment.split("train")[:300]
    rows = iter(experiment.rows(questions))
    counts = {True: 0, False: 0}
    for question in questions:
        asked = tokenizer.encode(question.question)[:12]
        context, offsets = tokenizer.encode_with_offsets(question.context)
        ((answer, begin),) = question.answers
        room = 32 - len(asked) - 3
        shown = set()
        for start in range(0, max(1, len(context) - room + 7), 7):
            row = next(rows)
            part = context[start : start + room]
            text = question.context[offsets[start, 0] : offsets[start + len(part) - 1, 1]]
            wanted = [tokenizer.cls_id, *asked, tokenizer.sep_id, *part, tokenizer.sep_id]
            assert row["tokens"].tolist() == wanted
            assert row["segments"].tolist() == [0] * (len(asked) + 2) + [1] * (len(part) + 1)
            assert row["is_token"].tolist() == [True] * len(wanted)
            assert np.flatnonzero(row["context_mask"]).tolist() == list(range(len(asked) + 2, len(wanted) - 1))
            assert row["row_weights"] == 1
            shown.update(range(start, start + len(part)))
            is_whole = offsets[start, 0] <= begin and begin + len(answer) <= offsets[start + len(part) - 1, 1]
            counts[is_whole] += 1
            if is_whole:
                first, last = (int(row[name]) - len(asked) - 2 + start for name in ("first", "last"))
                assert question.context[offsets[first, 0] : offsets[last, 1]] == answer
                assert answer in text
            else:
                assert row["first"] == row["last"] == NO_ANSWER
        assert shown == set(range(len(context)))
    assert next(rows, None) is None
    assert min(counts.values()) > 100


def test_answers_that_are_known_score_100(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "predict_batch", know_answers)
    experiment.__dict__.pop("predictor", None)
    scores, text = experiment.evaluate(params_of(experiment))
    assert scores == {"f1": 100, "exact_match": 100}
    assert text == "F1 100.00 %, exact match 100.00 %, 200 questions"
    experiment.__dict__.pop("predictor")


def test_wrong_answers_are_scored_as_squad_does(experiment, monkeypatch):
    """The first token of the context, whatever is asked."""

    def first_token(model, batch):
        place = batch["context_mask"].argmax(axis=1).astype(jnp.int32)
        return Spans(place, place, -place.astype(jnp.float32))

    monkeypatch.setattr(experiment, "predict_batch", first_token)
    experiment.__dict__.pop("predictor", None)
    questions = experiment.split("validation")
    firsts = {item.name: experiment.tokenizer.encode_with_offsets(item.context)[1][0] for item in questions}
    wanted = answer_scores(
        {item.name: item.context[slice(*firsts[item.name])] for item in questions},
        {item.name: [answer.text for answer in item.answers] for item in questions},
    )
    scores, _ = experiment.evaluate(params_of(experiment))
    experiment.__dict__.pop("predictor")
    assert scores == wanted._asdict()
    assert scores["exact_match"] < scores["f1"] < 50


def test_scores_do_not_depend_on_the_size_of_batches(experiment, tmp_path, draw_model):
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(experiment.make_model))))
    questions = [item for item in experiment.split("validation") if len(item.context) < 120][:40]
    answers = experiment.answers(params, questions)
    assert len(set(answers.values())) > 20
    assert all(answers[question.name] in question.context for question in questions)
    assert opened(tmp_path, tokens_per_batch=32).answers(params, questions) == answers  # a row at a time


def test_batches_hold_every_window(tmp_path):
    file = write_questions(tmp_path / "train.json", ("which", "w " * 40, ["w"]), ("who", "v u", ["v u"]))
    experiment = opened(tmp_path / "workdir", tokenizer="words", **file)
    wanted = sorted(row["tokens"].tolist() for row in experiment.rows(experiment.split("train")))
    assert len(wanted) == 3 + 1  # 28 tokens of 40 fit beside the first question, and each window begins 7 later
    iterator = iter(experiment.batches(make_mesh(data=1)))
    found = []
    while len(found) < len(wanted):
        batch = next(iterator)
        assert (batch["first"][batch["row_weights"] == 0] == NO_ANSWER).all()
        found += [
            row[mask].tolist() for row, mask in zip(batch["tokens"], batch["is_token"], strict=True) if mask.any()
        ]
    iterator.close()
    assert sorted(found) == wanted


def test_answers_across_the_edges_of_windows(tmp_path, monkeypatch):
    """Eight words of context fit into a window; a window begins every fourth, or every eighth, word."""
    words = [f"w{number}" for number in range(16)]
    spans = [(first, first + 3) for first in range(12)]
    file = write_questions(
        tmp_path / "train.json", *(("who", " ".join(words), [" ".join(words[a : b + 1])]) for a, b in spans)
    )
    for stride, shown in ((4, {*range(13)}), (8, {*range(5), *range(8, 13)})):
        experiment = opened(
            tmp_path / str(stride),
            tokenizer="words",
            **file | {"max_length": 12, "stride": stride, "max_question_length": 1},
        )
        monkeypatch.setattr(experiment, "predict_batch", know_answers)
        questions = experiment.split("train")
        rows = experiment.rows(questions)
        per_question = len(rows) // len(questions)
        for number, (first, _) in enumerate(spans):
            has_answer = [row["first"] != NO_ANSWER for row in rows[number * per_question :][:per_question]]
            assert any(has_answer) == (first in shown)
        scores, _ = experiment.evaluate(params_of(experiment))
        assert scores["exact_match"] == pytest.approx(100 * len([a for a, _ in spans if a in shown]) / len(spans))


def test_first_answer_is_learned_and_the_nearest_counts(tmp_path, monkeypatch):
    file = write_questions(tmp_path / "train.json", ("who", "a b c d e", ["b c", "b c d"]))
    experiment = opened(tmp_path / "workdir", tokenizer="words", **file)
    (row,) = experiment.rows(experiment.split("train"))
    context = row["tokens"][row["context_mask"]].tolist()
    assert experiment.tokenizer.decode(row["tokens"][row["first"] : row["last"] + 1]) == "b c"
    assert len(context) == 5
    monkeypatch.setattr(
        experiment, "predict_batch", lambda model, batch: know_answers(model, batch)._replace(last=batch["last"] + 1)
    )
    scores, _ = experiment.evaluate(params_of(experiment))
    assert scores == {"f1": 100, "exact_match": 100}  # of "b c" it is 80


def test_characters_are_scored_as_jaquad_does(tmp_path, monkeypatch):
    file = write_questions(tmp_path / "train.json", ("誰が", "猫が魚を食べた。", ["猫が"]))
    monkeypatch.setattr(
        QuestionAnsweringExperiment,
        "predict_batch",
        lambda self, model, batch: know_answers(model, batch)._replace(last=batch["last"] + 2),
    )
    for scoring, f1 in (("characters", 200 * 2 / 6), ("words", 0)):
        experiment = opened(tmp_path / scoring, tokenizer="characters", scoring=scoring, **file)
        scores, _ = experiment.evaluate(params_of(experiment))
        assert scores == {"f1": pytest.approx(f1), "exact_match": 0}


def test_context_and_answer_without_tokens(tmp_path):
    """WordPiece drops what nobody sees: an answer of it cannot be learned, and no context gives no answer."""
    file = write_questions(
        tmp_path / "train.json", ("who ?", "a \u200b b", ["\u200b"]), ("who ?", "\u200b", ["\u200b"])
    )
    experiment = opened(tmp_path / "workdir", **file)
    with_context, without = experiment.rows(experiment.split("train"))
    assert with_context["context_mask"].sum() == 2
    assert not without["context_mask"].any()
    assert len(without["tokens"]) == len(with_context["tokens"]) - 3
    assert all(row["first"] == row["last"] == NO_ANSWER for row in (with_context, without))
    answers = experiment.answers(params_of(experiment), experiment.split("train"))
    assert answers["0"] in ("a", "b", "a \u200b b")
    assert answers["1"] == ""
    scores, _ = experiment.evaluate(params_of(experiment))
    assert scores["exact_match"] == 0


@pytest.mark.data
def test_answers_of_jaquad_survive_characters(shared_data, tmp_path, monkeypatch):
    """Every answer is a span of tokens that some window shows whole: nothing keeps a model from 100 %."""
    config = load_config_file(str(FILE))
    config.task.data.data_dir, config.task.data.train_file = str(shared_data / "jaquad"), config.task.data.validation_file
    config.model.num_layers, config.model.d_model, config.model.num_heads = 1, 8, 2
    experiment = make_experiment(validate(config))
    experiment.open(tmp_path)
    monkeypatch.setattr(experiment, "predict_batch", know_answers)
    experiment._splits["validation"] = experiment.split("validation")[::5]
    scores, _ = experiment.evaluate(params_of(experiment))
    assert scores == {"f1": 100, "exact_match": 100}


def test_parts_that_are_named(tmp_path):
    file = write_questions(tmp_path / "train.json", ("who", "a b", ["b"]))
    assert make_experiment(tiny_config(**file)).has_validation
    experiment = opened(tmp_path / "workdir", **file | {"validation_file": ""})
    assert not experiment.has_validation
    assert experiment.labels == ()
    with pytest.raises(UserError, match=r"^config.task.data.validation_file names no file for the validation split$"):
        experiment.evaluate(params_of(experiment))


def test_tokenizer_is_trained_on_each_context_once(tmp_path):
    questions = [Question(str(number), f"q{number}", "same", (Answer("same", 0),)) for number in range(3)]
    experiment = make_experiment(tiny_config())
    assert sorted(experiment.texts(questions)) == ["q0", "q1", "q2", "same"]


def test_impossible_windows_are_refused():
    with pytest.raises(UserError, match=r"^config.task.data.max_length=15 leaves no token for the context"):
        tiny_config(max_length=15)
    tiny_config(max_length=16)
    with pytest.raises(UserError, match=r'^config.task.data.dataset must be "grammar" or "files", got \'squad\'$'):
        tiny_config(dataset="squad")


@pytest.mark.slow
def test_test_variant_on_the_command_line(tmp_path, capsys):
    workdir = str(tmp_path / "run")
    # One length and one device: one program to compile.
    quick = ["--config.task.data.max_length=20", "--config.mesh.data=1"]
    assert train_cli.run([f"--config={FILE}:test", f"--workdir={workdir}", *quick]) == 0
    assert "step 6: validation F1" in capsys.readouterr().err
    assert evaluate_cli.run([f"--workdir={workdir}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores.keys() == {"f1", "exact_match"}
    assert 0 < scores["f1"] < 100
