"""T5's spans: the paper's example word for word, nothing lost, lengths that chance does not change, fair segments."""

import collections
import itertools
import math

import numpy as np
import pytest

from tfx_jax.data.objectives.span_corruption import (
    CorruptedTexts,
    corrupt_rows,
    corrupt_spans,
    longest_text,
    num_sentinels,
    random_spans,
    sentinel_ids,
    span_corruption_lengths,
)
from tfx_jax.errors import UserError

TEXT = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
SPANS = [(2, 4), (8, 9)]
EOS, PAD = 1, 0


@pytest.mark.parametrize(
    ("final_sentinel", "expected"),
    [(False, "<X> for inviting <Y> last <EOS>"), (True, "<X> for inviting <Y> last <Z> <EOS>")],
)
def test_example_of_the_paper(final_sentinel, expected):
    inputs, targets = corrupt_spans(TEXT, SPANS, ["<X>", "<Y>", "<Z>"], final_sentinel=final_sentinel)
    assert " ".join(inputs) == "Thank you <X> me to your party <Y> week"
    assert " ".join([*targets, "<EOS>"]) == expected


def _restore(inputs, targets, sentinels):
    """Puts the spans back where their sentinels stand, from the definition of the task alone."""
    spans, current = {}, None
    for token in targets:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [piece for token in inputs for piece in (spans[token] if token in sentinels else [token])]


@pytest.mark.parametrize("final_sentinel", [False, True])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 1.0), (0.9, 2.5), (0.15, 10.0), (0.01, 1.5)])
def test_nothing_is_lost_and_lengths_are_as_promised(final_sentinel, density, mean):
    rng = np.random.default_rng(0)
    sentinels = sentinel_ids(1000, 300)
    options = {"noise_density": density, "mean_span_length": mean}
    for num_tokens in [*range(40), 100, 257, 512]:
        text = rng.integers(2, 700, num_tokens).tolist()
        spans = random_spans(num_tokens, rng, **options)
        inputs, targets = corrupt_spans(text, spans, sentinels, final_sentinel=final_sentinel)
        assert _restore(inputs, targets, set(sentinels)) == text
        assert [token for token in inputs if token >= 700] == sentinels[: len(spans)]
        assert [token for token in targets if token >= 700] == sentinels[: len(spans) + final_sentinel]
        lengths = span_corruption_lengths(num_tokens, **options, final_sentinel=final_sentinel)
        assert lengths == (len(inputs) + 1, len(targets) + 1)


def test_counts_follow_the_program():
    rng = np.random.default_rng(1)
    for num_tokens in range(2, 600):
        spans = random_spans(num_tokens, rng)
        dropped = sum(end - begin for begin, end in spans)
        assert dropped == min(max(np.round(num_tokens * 0.15), 1), num_tokens - 1)
        assert len(spans) == max(1, np.round(dropped / 3))
        assert spans[0][0] > 0
        assert spans[-1][1] == num_tokens
        assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_density_and_mean_length_of_the_paper():
    rng = np.random.default_rng(2)
    spans = [random_spans(512, rng) for _ in range(50)]
    lengths = [end - begin for row in spans for begin, end in row]
    assert sum(lengths) / (50 * 512) == pytest.approx(0.15, abs=0.001)
    assert np.mean(lengths) == pytest.approx(3, abs=0.05)


def test_every_segmentation_is_as_likely():
    # 12 tokens, 6 of them dropped in 3 spans: comb(5, 2) ways for the dropped ones times as many for the kept ones.
    rng = np.random.default_rng(3)
    draws = 30_000
    seen = collections.Counter(
        tuple(random_spans(12, rng, noise_density=0.5, mean_span_length=2)) for _ in range(draws)
    )
    ways = math.comb(5, 2) ** 2
    assert len(seen) == ways
    mean = draws / ways
    assert np.all(np.abs(np.array(list(seen.values())) - mean) < 4 * np.sqrt(mean))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_texts_too_short_to_corrupt(num_tokens):
    assert random_spans(num_tokens, np.random.default_rng(0)) == []
    assert corrupt_spans(TEXT[:num_tokens], [], ["<X>"]) == (TEXT[:num_tokens], ["<X>"])


def test_length_of_text_for_inputs_of_512_tokens():
    # The two numbers that T5's program logs for its own pretraining, which has no final sentinel.
    assert longest_text(512) == 568
    assert span_corruption_lengths(568, final_sentinel=False) == (512, 114)


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.9, 1.0)])
def test_longest_text_is_the_longest(density, mean):
    options = {"noise_density": density, "mean_span_length": mean}
    for inputs_length in range(1, 120):
        best = longest_text(inputs_length, **options)
        fitting = [n for n in range(1500) if span_corruption_lengths(n, **options)[0] <= inputs_length]
        assert fitting == list(range(best + 1))
    with pytest.raises(ValueError, match="inputs_length=0"):
        longest_text(0, **options)


@pytest.mark.parametrize("final_sentinel", [False, True])
def test_rows_of_any_length(final_sentinel):
    rng = np.random.default_rng(4)
    sentinels = sentinel_ids(500)
    ids = np.zeros((40, 60), int)
    for row, length in zip(ids, [60, 60, 0, 1, 2, *rng.integers(0, 61, 35)], strict=True):
        row[:length] = rng.integers(2, 400, length)
    inputs, targets = corrupt_rows(ids, rng, sentinels=sentinels, eos_id=EOS, pad_id=PAD, final_sentinel=final_sentinel)
    widths = span_corruption_lengths(60, final_sentinel=final_sentinel)
    assert (inputs.shape, targets.shape) == ((40, widths[0]), (40, widths[1]))
    assert inputs.dtype == targets.dtype == np.int32
    for row, *sides in zip(ids, inputs, targets, strict=True):
        texts = []
        for side in sides:
            length = int((side != PAD).sum())
            assert not side[length:].any()
            assert side[length - 1] == EOS
            texts.append(side[: length - 1].tolist())
        assert _restore(*texts, set(sentinels)) == row[row != PAD].tolist()
    assert (inputs[:2] != PAD).all()
    assert (targets[:2] != PAD).all()


def test_whole_texts_have_the_same_inputs_and_themselves_as_targets():
    ids = np.zeros((20, 60), int)
    for row, length in zip(ids, [60, 0, 1, 2, *range(40, 56)], strict=True):
        row[:length] = 2 + np.arange(length)
    options = {"sentinels": range(400, 500), "eos_id": EOS, "pad_id": PAD, "noise_density": 0.3}
    inputs, targets = corrupt_rows(ids, np.random.default_rng(1), **options, whole_text=True)
    np.testing.assert_array_equal(inputs, corrupt_rows(ids, np.random.default_rng(1), **options)[0])
    assert (inputs.shape[1], targets.shape[1]) == span_corruption_lengths(60, noise_density=0.3, whole_text=True)
    for row, target in zip(ids, targets, strict=True):
        text = row[row != PAD].tolist()
        assert target.tolist() == [*text, EOS, *[PAD] * (60 - len(text))]


def test_same_seed_same_spans():
    one, two, other = (random_spans(300, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert one == two
    assert one != other


@pytest.mark.parametrize(
    "spans", [[(2, 2)], [(3, 2)], [(0, 11)], [(4, 6), (5, 7)], [(4, 6), (6, 7)], [(6, 7), (1, 2)], [(-1, 2)]]
)
def test_spans_out_of_place(spans):
    with pytest.raises(ValueError, match="must not be empty, must be inside the 10 tokens"):
        corrupt_spans(TEXT, spans, ["<X>", "<Y>", "<Z>"])


def test_wrong_arguments():
    with pytest.raises(ValueError, match="2 spans need at least 3 sentinels, got 2"):
        corrupt_spans(TEXT, SPANS, ["<X>", "<Y>"])
    for density, mean in ((0, 3), (1, 3), (0.15, 0.5)):
        with pytest.raises(ValueError, match="noise_density"):
            random_spans(10, np.random.default_rng(0), noise_density=density, mean_span_length=mean)
    with pytest.raises(ValueError, match=r"sentinels must be in 1 \.\. vocab_size=99, got 100"):
        sentinel_ids(99)


STREAM = np.arange(10, 510)
IDS = {"sentinels": sentinel_ids(1000, 30), "eos_id": EOS, "pad_id": PAD}
NOISES = [{}, {"noise_density": 0.5}, {"noise_density": 0.3, "mean_span_length": 8.0}]


def _rows(start=0, seed=(0, 0), stream=STREAM, text_length=64, **noise):
    texts = CorruptedTexts(stream, text_length, seed, start=start, **IDS, **noise)
    assert texts.lengths.tolist() == [span_corruption_lengths(text_length, **noise)[0]] * len(texts)
    return [texts[index] for index in range(len(texts))]


@pytest.mark.parametrize("start", [0, 1, 2, 33, 63])
@pytest.mark.parametrize("num_tokens", [64, 65, 127, 128, 500])
@pytest.mark.parametrize("noise", NOISES)
def test_every_token_of_a_stream_is_in_one_row(start, num_tokens, noise):
    stream, found = STREAM[:num_tokens], []
    rows = _rows(start, stream=stream, **noise)
    assert len(rows) == (start > 0) + math.ceil((num_tokens - start) / 64)
    for row in rows:
        assert (row["source"].shape, row["target"].shape) == tuple((n,) for n in span_corruption_lengths(64, **noise))
        sides = [side[side != PAD].tolist() for side in (row["source"], row["target"])]
        assert all(side.pop() == EOS for side in sides)
        found += _restore(*sides, set(IDS["sentinels"]))
    assert found == stream.tolist()


def test_rows_are_a_function_of_their_seed_and_place():
    first, again, other = _rows(), _rows(), _rows(seed=(0, 1))
    for row, same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(row["source"], same["source"])
        np.testing.assert_array_equal(row["target"], same["target"])
        assert (row["source"] != different["source"]).any()
    dropped = {tuple(np.flatnonzero(row["source"] >= 900)) for row in first[:-1]}
    assert len(dropped) == len(first) - 1  # each text has spans of its own


@pytest.mark.parametrize(("density", "span"), [(0.15, 3.0), (0.5, 3.0), (0.9, 7.0), (1e-9, 1.0)])
def test_the_longest_text_is_found_among_all(density, span):
    noise = {"noise_density": density, "mean_span_length": span}
    for limit in (1, 2, 3, 30, 128):
        fitting = [size for size in range(3_000) if span_corruption_lengths(size, **noise)[0] <= limit]
        assert longest_text(limit, **noise) == max(fitting)
    assert longest_text(128, noise_density=0.999_999, mean_span_length=1_000.0) > 10_000_000  # at once


def test_a_stream_shorter_than_a_text_is_refused():
    with pytest.raises(UserError, match="the text must have at least 64 tokens, for one row, got 63"):
        CorruptedTexts(STREAM[:63], 64, (0,), **IDS)
    with pytest.raises(IndexError):
        CorruptedTexts(STREAM, 64, (0,), **IDS)[8]


def test_number_of_sentinels_is_that_of_the_targets():
    for num_tokens in (0, 1, 2, 20, 64, 568):
        rng = np.random.default_rng(0)
        _, target = corrupt_rows(np.full((1, num_tokens), 5), rng, sentinels=range(100, 200), eos_id=EOS, pad_id=PAD)
        assert num_sentinels(num_tokens) == (target >= 100).sum()


def test_sentinels_are_the_last_ids_counted_down():
    sentinels = sentinel_ids(32_100)
    assert (sentinels[0], sentinels[1], sentinels[-1], len(sentinels)) == (32_099, 32_098, 32_000, 100)
