"""Windows show every token and know where the answer is, and the best answer of all of them is found."""

import functools

import jax
import numpy as np
import pytest

from tests.data.tokenizers_made_here import make_tokenizer
from tfx_jax.data.sources.squad import read_questions
from tfx_jax.metrics.answers import answer_scores, character_exact_match, character_f1
from tfx_jax.tasks.text.question_answering import (
    NO_ANSWER,
    Spans,
    answer_positions,
    best_answer,
    best_spans,
    context_windows,
    text_of_span,
    token_span,
)

CLS, SEP, PAD = 1, 2, 0


def _windows(question, context, **options):
    return context_windows(question, context, cls_id=CLS, sep_id=SEP, pad_id=PAD, **options)


def _random_case(rng):
    question = list(range(1000, 1000 + rng.integers(1, 9)))
    context = list(range(10, 10 + rng.integers(1, 60)))  # every token another one: its place can be read off
    return question, context, {"max_length": int(rng.integers(15, 40)), "stride": int(rng.integers(1, 25))}


def test_windows_of_any_context():
    rng = np.random.default_rng(0)
    for _ in range(300):
        question, context, options = _random_case(rng)
        windows = _windows(question, context, **options)
        room = options["max_length"] - len(question) - 3
        step = min(options["stride"], room)
        seen = set()
        for number, (ids, types, mask) in enumerate(zip(*windows[:3], strict=True)):
            start = number * step
            shown = context[start : start + room]
            row = [CLS, *question, SEP, *shown, SEP]
            padding = [0] * (options["max_length"] - len(row))
            assert ids.tolist() == row + padding
            assert types.tolist() == [0] * (len(question) + 2) + [1] * (len(shown) + 1) + padding
            assert ids[mask].tolist() == shown
            assert windows.starts[number] == start
            assert ids[windows.offset] == context[start]
            seen.update(shown)
        assert seen == set(context)
        # No window is there for nothing: without the last, the end would be missing.
        assert len(windows.ids) == 1 or windows.starts[-2] + room < len(context)
        assert windows.ids.dtype == windows.token_types.dtype == windows.starts.dtype == np.int32


def test_long_questions_are_cut():
    windows = _windows(list(range(100, 200)), [5, 6, 7], max_length=20, stride=4, max_question_length=12)
    assert windows.ids.tolist() == [[CLS, *range(100, 112), SEP, 5, 6, 7, SEP, 0, 0]]


def test_empty_context():
    windows = _windows([5, 6], [], max_length=10, stride=4)
    assert windows.ids.tolist() == [[CLS, 5, 6, SEP, 0, 0, 0, 0, 0, 0]]
    assert not windows.context_mask.any()
    find = jax.jit(functools.partial(best_spans, max_answer_length=3))
    spans = find(*np.zeros((2, 1, 10), np.float32), windows.context_mask)
    assert spans.score[0] == -np.inf
    assert best_answer(windows, spans) is None


@pytest.mark.parametrize(("max_length", "stride"), [(7, 4), (20, 0)])
def test_no_window(max_length, stride):
    with pytest.raises(ValueError, match=f"max_length={max_length} leaves .* with a stride of {stride}"):
        _windows([5, 6, 7, 8], [9], max_length=max_length, stride=stride)


def test_answers_are_found_in_the_windows_that_show_them_whole():
    rng = np.random.default_rng(1)
    counts = {True: 0, False: 0}
    for _ in range(300):
        question, context, options = _random_case(rng)
        windows = _windows(question, context, **options)
        first = int(rng.integers(len(context)))
        last = int(rng.integers(first, min(len(context), first + 6)))
        begins, ends = answer_positions(windows, first, last)
        assert begins.dtype == ends.dtype == np.int32
        for ids, mask, begin, end in zip(windows.ids, windows.context_mask, begins, ends, strict=True):
            whole = {context[first], context[last]} <= set(ids[mask].tolist())
            counts[whole] += 1
            if whole:
                assert ids[begin : end + 1].tolist() == context[first : last + 1]
            else:
                assert begin == end == NO_ANSWER
    assert min(counts.values()) > 100


def test_best_answer_of_all_windows_is_that_of_the_whole_context():
    rng = np.random.default_rng(3)
    find = jax.jit(functools.partial(best_spans, max_answer_length=5))
    for _ in range(100):
        question, context, options = _random_case(rng)
        windows = _windows(question, context, **options)
        begin_of, end_of = rng.normal(size=(2, len(context))).astype(np.float32)
        # One shape for all cases, so that there is one program: rows and columns without context change nothing.
        mask = np.zeros((64, 40), bool)
        mask[: len(windows.ids), : options["max_length"]] = windows.context_mask
        logits = rng.normal(size=(2, *mask.shape)).astype(np.float32) + 5  # high where no context is
        for row, start in enumerate(windows.starts):
            stop = start + mask[row].sum()
            logits[0, row, mask[row]], logits[1, row, mask[row]] = begin_of[start:stop], end_of[start:stop]
        found = best_answer(windows, find(*logits, mask))
        # Of the whole context, less the spans that no window shows.
        spans = [
            (begin_of[i] + end_of[j], (i, j))
            for i in range(len(context))
            for j in range(i, min(len(context), i + 5))
            if any(s <= i and j < s + n for s, n in zip(windows.starts, windows.context_mask.sum(1), strict=True))
        ]
        assert found == max(spans)[1]


def test_best_answer_is_in_plain_numbers():
    windows = _windows([5], [6, 7, 8, 9, 10], max_length=7, stride=2)
    spans = Spans(*map(jax.device_put, (np.array([3, 4]), np.array([4, 5]), np.array([1.0, 2.0], np.float32))))
    assert best_answer(windows, spans) == (3, 4)
    assert all(type(place) is int for place in best_answer(windows, spans))


def test_tokens_of_characters_and_back():
    rng = np.random.default_rng(4)
    for _ in range(200):
        text = "".join(rng.choice(list("ab猫 "), 30))
        edges = np.sort(rng.choice(np.arange(1, 30), rng.integers(1, 12), replace=False))
        offsets = np.stack([np.concatenate([[0], edges]), np.concatenate([edges, [30]])], axis=1)
        begin = int(rng.integers(30))
        end = int(rng.integers(begin + 1, 31))
        first, last = token_span(offsets, begin, end)
        covering = [place for place, (b, e) in enumerate(offsets) if set(range(b, e)) & set(range(begin, end))]
        assert (first, last) == (covering[0], covering[-1])
        assert text[begin:end].strip() in text_of_span(text, offsets, first, last)
    assert text_of_span("ab cd", np.array([[0, 2], [2, 5]]), 1, 1) == "cd"


@pytest.mark.data
@pytest.mark.parametrize("folder", ["squadshifts", "jaquad"])
def test_real_answers_are_found_again(shared_data, folder):
    """From characters to tokens to the right positions of all windows, and from perfect logits back to characters."""
    questions = read_questions(shared_data / folder / "dev.json.gz")[::5][:80]
    contexts = sorted({question.context for question in questions})
    tokenizer = make_tokenizer(contexts, "sentencepiece", vocab_size=2500)
    find = jax.jit(functools.partial(best_spans, max_answer_length=64))
    predictions, several = {}, 0
    for question in questions:
        context, offsets = tokenizer.encode_with_offsets(question.context)
        answer = question.answers[0]
        span = token_span(offsets, answer.start, answer.start + len(answer.text))
        windows = _windows(tokenizer.encode(question.question), context, max_length=160, stride=64)
        several += len(windows.ids) > 1
        logits = np.zeros((2, 24, 160), np.float32)
        for side, places in zip(logits, answer_positions(windows, *span), strict=True):
            side[np.arange(len(places)), places] = 1
        mask = np.zeros((24, 160), bool)
        mask[: len(windows.ids)] = windows.context_mask
        assert best_answer(windows, find(*logits, mask)) == span
        predictions[question.name] = text_of_span(question.context, offsets, *span)
        assert answer.text.strip() in predictions[question.name]
    assert several > 40
    references = {question.name: [question.answers[0].text] for question in questions}
    scores = answer_scores(predictions, references, exact_match_fn=character_exact_match, f1_fn=character_f1)
    assert scores.f1 > 90  # less than 100 where a token goes over the end of the answer


def test_characters_between_tokens():
    offsets = np.array([[0, 3], [5, 8]])
    assert token_span(offsets, 2, 5) == (0, 0)
    with pytest.raises(ValueError, match="no token covers characters 3 to 5"):
        token_span(offsets, 3, 5)
