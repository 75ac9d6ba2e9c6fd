"""Questions become the right windows; the answers that windows hold come out again; trainings from the command line."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training.tasks.told import Told, no_answer
from tfx_jax.cli import evaluate as evaluate_cli
from tfx_jax.cli import train as train_cli
from tfx_jax.cli.train import load_config_file
from tfx_jax.data.sources.splits import Splits
from tfx_jax.data.sources.squad import Answer, Question
from tfx_jax.errors import UserError
from tfx_jax.metrics.answers import answer_scores
from tfx_jax.models.bert import BertConfig
from tfx_jax.tasks import artifacts
from tfx_jax.tasks.text.question_answering import (
    NO_ANSWER,
    QuestionAnsweringConfig,
    QuestionAnsweringTask,
    QuestionData,
    Spans,
    _window_examples,
)
from tfx_jax.training.config import ExperimentConfig, validate
from tfx_jax.training.run import make_run
from tfx_jax.training.sharding.strategies import make_mesh

FILE = pathlib.Path(__file__).parents[3] / "experiments" / "bert_jaquad.py"
SIZES = {"max_length": 32, "tokens_per_batch": 320}


def tiny_config(stride=7, max_question_length=12, **data):
    model = BertConfig(600, max_length=128, num_layers=1, d_model=16, num_heads=2, d_ff=32)
    task = QuestionAnsweringConfig(QuestionData(**SIZES | data), stride, max_question_length)
    return validate(ExperimentConfig(model=model, task=task))


def opened(workdir, **options):
    run = make_run(tiny_config(**options), workdir)
    assert type(run.task) is QuestionAnsweringTask
    return run


def questions_of(run, split):
    return run.config.task.splits()[split]


def examples_of(task, questions):
    """The windows of all questions, as the model reads them."""
    pairs = zip(questions, task.encode(questions), strict=True)
    return [example for pair in pairs for example in _window_examples(*pair)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
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


def know_answers(batch):
    """Finds what the windows have as their answers, and is unsure where they have none."""
    return Spans(batch["first"], batch["last"], np.where(batch["first"] == NO_ANSWER, -5.0, 5.0))


def test_examples_are_the_windows_of_all_questions(run):
    """Read off the text itself: what a row shows of the context, and the answer in it."""
    tokenizer, questions = run.task.tokenizer, questions_of(run, "train")[:300]
    rows = iter(examples_of(run.task, questions))
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
            assert row["token_type_ids"].tolist() == [0] * (len(asked) + 2) + [1] * (len(part) + 1)
            assert row["token_mask"].tolist() == [True] * len(wanted)
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


def test_answers_that_are_known_score_100(run):
    metrics, summary = run.task.evaluate(Told(know_answers))
    assert metrics == {"f1": 100, "exact_match": 100}
    assert summary == "F1 100.00 %, exact match 100.00 %, 200 questions"


def test_wrong_answers_are_scored_as_squad_does(run):
    """The first token of the context, whatever is asked."""

    def first_token(batch):
        place = batch["context_mask"].argmax(axis=1).astype(np.int32)
        return Spans(place, place, -place.astype(np.float32))

    questions = questions_of(run, "validation")
    firsts = {item.name: run.task.tokenizer.encode_with_offsets(item.context)[1][0] for item in questions}
    wanted = answer_scores(
        {item.name: item.context[slice(*firsts[item.name])] for item in questions},
        {item.name: [answer.text for answer in item.answers] for item in questions},
    )
    metrics, _ = run.task.evaluate(Told(first_token))
    assert metrics == wanted._asdict()
    assert metrics["exact_match"] < metrics["f1"] < 50


def test_answers_do_not_depend_on_the_size_of_batches(run, tmp_path, draw_model):
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    questions = [item for item in questions_of(run, "validation") if len(item.context) < 120][:40]
    answers = run.task.predict(run.trained(params), questions)
    assert len(set(answers.values())) > 20
    assert all(answers[question.name] in question.context for question in questions)
    row_by_row = opened(tmp_path, tokens_per_batch=32)
    assert row_by_row.task.predict(row_by_row.trained(params), questions) == answers


def test_answers_are_no_longer_than_the_configuration_says(run, tmp_path, draw_model):
    params = jax.device_get(nnx.to_pure_dict(nnx.state(draw_model(run.make_model))))
    questions = questions_of(run, "validation")[:40]
    lengths = {}
    for limit in (1, 30):
        other = opened(tmp_path / str(limit), max_answer_length=limit)
        answers = other.task.predict(other.trained(params), questions)
        lengths[limit] = {len(other.task.tokenizer.encode(answer)) for answer in answers.values()}
    assert lengths[1] == {1}
    assert max(lengths[30]) > 1


def test_batches_hold_every_window(tmp_path):
    file = write_questions(tmp_path / "train.json", ("which", "w " * 40, ["w"]), ("who", "v u", ["v u"]))
    run = opened(tmp_path / "workdir", tokenizer="words", **file)
    examples = examples_of(run.task, questions_of(run, "train"))
    wanted = sorted(example["tokens"].tolist() for example in examples)
    assert len(wanted) == 3 + 1  # 28 tokens of 40 fit beside the first question, and each window begins 7 later
    iterator = iter(run.train_data(make_mesh(data=1)))
    found = []
    while len(found) < len(wanted):
        batch = next(iterator)
        assert (batch["first"][batch["row_weights"] == 0] == NO_ANSWER).all()
        found += [
            row[mask].tolist() for row, mask in zip(batch["tokens"], batch["token_mask"], strict=True) if mask.any()
        ]
    iterator.close()
    assert sorted(found) == wanted


def test_answers_across_the_edges_of_windows(tmp_path):
    """Eight words of context fit into a window; a window begins every fourth, or every eighth, word."""
    words = [f"w{number}" for number in range(16)]
    spans = [(first, first + 3) for first in range(12)]
    file = write_questions(
        tmp_path / "train.json", *(("who", " ".join(words), [" ".join(words[a : b + 1])]) for a, b in spans)
    )
    for stride, shown in ((4, {*range(13)}), (8, {*range(5), *range(8, 13)})):
        sizes = {"max_length": 12, "stride": stride, "max_question_length": 1}
        run = opened(tmp_path / str(stride), tokenizer="words", **file | sizes)
        questions = questions_of(run, "train")
        rows = examples_of(run.task, questions)
        per_question = len(rows) // len(questions)
        for number, (first, _) in enumerate(spans):
            has_answer = [row["first"] != NO_ANSWER for row in rows[number * per_question :][:per_question]]
            assert any(has_answer) == (first in shown)
        metrics, _ = run.task.evaluate(Told(know_answers))
        assert metrics["exact_match"] == pytest.approx(100 * len([a for a, _ in spans if a in shown]) / len(spans))


def farther(batch, count):
    """The answers, but `count` tokens too long."""
    return know_answers(batch)._replace(last=batch["last"] + count)


def test_first_answer_is_learned_and_the_nearest_counts(tmp_path):
    file = write_questions(tmp_path / "train.json", ("who", "a b c d e", ["b c", "b c d"]))
    run = opened(tmp_path / "workdir", tokenizer="words", **file)
    (row,) = examples_of(run.task, questions_of(run, "train"))
    context = row["tokens"][row["context_mask"]].tolist()
    assert run.task.tokenizer.decode(row["tokens"][row["first"] : row["last"] + 1]) == "b c"
    assert len(context) == 5
    metrics, _ = run.task.evaluate(Told(lambda batch: farther(batch, 1)))
    assert metrics == {"f1": 100, "exact_match": 100}  # of "b c" it is 80


def test_characters_are_scored_as_jaquad_does(tmp_path):
    file = write_questions(tmp_path / "train.json", ("誰が", "猫が魚を食べた。", ["猫が"]))
    for scoring, f1 in (("characters", 200 * 2 / 6), ("words", 0)):
        run = opened(tmp_path / scoring, tokenizer="characters", scoring=scoring, **file)
        metrics, _ = run.task.evaluate(Told(lambda batch: farther(batch, 2)))
        assert metrics == {"f1": pytest.approx(f1), "exact_match": 0}


def test_context_and_answer_without_tokens(tmp_path):
    """WordPiece drops U+FFFD: an answer of it cannot be learned, and no context gives no answer."""
    file = write_questions(
        tmp_path / "train.json", ("who ?", "a \ufffd b", ["\ufffd"]), ("who ?", "\ufffd", ["\ufffd"])
    )
    run = opened(tmp_path / "workdir", **file)
    questions = questions_of(run, "train")
    with_context, without = examples_of(run.task, questions)
    assert with_context["context_mask"].sum() == 2
    assert not without["context_mask"].any()
    assert len(without["tokens"]) == len(with_context["tokens"]) - 3
    assert all(row["first"] == row["last"] == NO_ANSWER for row in (with_context, without))
    # Zeros, as the parameters do not matter; to draw some would take seconds.
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(run.make_model)))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    answers = run.task.predict(run.trained(params), questions)
    assert answers["0"] in ("a", "b", "a \ufffd b")
    assert answers["1"] == ""
    metrics, _ = run.evaluate(params)
    assert metrics["exact_match"] == 0


@pytest.mark.data
def test_answers_of_jaquad_survive_characters(shared_data, tmp_path):
    """Every answer is a span of tokens that some window shows whole: nothing keeps a model from 100 %."""
    config = load_config_file(str(FILE))
    data = config.task.data
    data.data_dir, data.train_file = str(shared_data / "jaquad"), data.validation_file
    config.model.num_layers, config.model.d_model, config.model.num_heads = 1, 8, 2
    task = make_run(validate(config), tmp_path).task
    questions = task.config.splits()["validation"][::5]
    metrics, _ = data.score(task.predict(Told(know_answers), questions), questions)
    assert metrics == {"f1": 100, "exact_match": 100}


def test_splits_that_are_named(tmp_path):
    file = write_questions(tmp_path / "train.json", ("who", "a b", ["b"]))
    assert "validation" in tiny_config(**file).task.splits()
    run = opened(tmp_path / "workdir", **file | {"validation_file": ""})
    assert "validation" not in run.config.task.splits()
    assert run.task.model_config.labels == run.config.model.labels  # it has none of its own
    assert not (tmp_path / "workdir" / "labels.json").exists()
    with pytest.raises(
        UserError, match=r"^config.task.data.validation_file is not set: the validation split needs a file$"
    ):
        run.task.evaluate(Told(no_answer))


def test_tokenizer_is_trained_on_each_context_once(tmp_path, monkeypatch):
    questions = [Question(str(number), f"q{number}", "same", (Answer("same", 0),)) for number in range(3)]
    texts = []
    train = artifacts.train_or_load_folder

    def remember(folder, begin, **options):
        texts.extend(begin())
        return train(folder, begin, **options)

    monkeypatch.setattr(artifacts, "train_or_load_folder", remember)
    config = tiny_config()
    make_run(config, tmp_path, splits=Splits(lambda split: True, lambda split: questions))
    assert sorted(texts) == ["q0", "q1", "q2", "same"]


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
