"""Segment pairs: what follows really follows, what does not comes from another document, and the coin is fair."""

import itertools

import numpy as np
import pytest

from tfx_jax.data.objectives.next_sentence import next_sentence_pairs, pair_inputs, truncate_pair

CLS, SEP, PAD = 1, 2, 0


def _corpus(rng, num_documents=30, max_sentences=12):
    """Every token of the corpus is another one, so that it tells where it comes from."""
    fresh = itertools.count(10)
    return [
        [[next(fresh) for _ in range(rng.integers(1, 9))] for _ in range(rng.integers(1, max_sentences + 1))]
        for _ in range(num_documents)
    ]


def _places(documents):
    return {
        token: (number, line, position)
        for number, document in enumerate(documents)
        for line, sentence in enumerate(document)
        for position, token in enumerate(sentence)
    }


def _whole_sentences(tokens, documents, places):
    """(document, first sentence, end) of tokens that must be whole sentences in a row."""
    number, begin, _ = places[tokens[0]]
    end = places[tokens[-1]][1] + 1
    assert tokens == [token for sentence in documents[number][begin:end] for token in sentence]
    return number, begin, end


@pytest.mark.parametrize("max_length", [7, 20, 60])
def test_segments_are_neighbors_or_of_two_documents(max_length):
    rng = np.random.default_rng(0)
    for _ in range(20):
        documents = _corpus(rng)
        places = _places(documents)
        following = {number: 0 for number in range(len(documents))}
        for first, second, is_next in next_sentence_pairs(documents, rng, max_length=max_length):
            number, begin, middle = _whole_sentences(first, documents, places)
            other, resumed, end = _whole_sentences(second, documents, places)
            assert begin == following[number]  # no sentence of A is left out or comes twice
            assert (number == other) == is_next
            if is_next:
                assert resumed == middle
            following[number] = end if is_next else middle
        for number, document in enumerate(documents):
            # All is used but a last sentence that nothing follows.
            assert following[number] >= len(document) - 1


def test_half_of_the_pairs_are_neighbors():
    rng = np.random.default_rng(1)
    labels = [pair.is_next for _ in range(60) for pair in next_sentence_pairs(_corpus(rng), rng, max_length=24)]
    assert len(labels) > 3000
    assert abs(np.mean(labels) - 0.5) < 3 * 0.5 / np.sqrt(len(labels))
    # The coin remembers nothing.
    again = np.mean(np.array(labels[1:]) == np.array(labels[:-1]))
    assert abs(again - 0.5) < 3 * 0.5 / np.sqrt(len(labels) - 1)


def test_random_segments_come_from_all_other_documents_equally():
    documents = [[[10 * number + line + 10] * 3 for line in range(4)] for number in range(5)]
    rng = np.random.default_rng(2)
    counts = np.zeros((5, 5))
    for _ in range(2000):
        for first, second, is_next in next_sentence_pairs(documents, rng, max_length=9, short_rate=0):
            if not is_next:
                counts[first[0] // 10 - 1, second[0] // 10 - 1] += 1
    assert not np.diag(counts).any()
    totals = counts.sum(axis=1, keepdims=True)
    share = counts / totals
    error = np.sqrt(0.25 * 0.75 / totals)
    assert np.all(
        np.abs(share - 0.25)[~np.eye(5, dtype=bool)] < 4 * np.broadcast_to(error, (5, 5))[~np.eye(5, dtype=bool)]
    )


def test_inputs_are_filled_and_one_in_ten_is_short():
    documents = [[[7]] * 4000, [[8]] * 4000]
    rng = np.random.default_rng(3)
    lengths = [len(first) + len(second) for first, second, _ in next_sentence_pairs(documents, rng, max_length=43)]
    full = np.array(lengths) == 40
    # B of another document can meet its end; a short length is the full one in one of 39 cases.
    share = np.mean(~full)
    assert abs(share - 0.1 * 38 / 39) < 4 * np.sqrt(0.09 / len(lengths)) + 0.01
    assert max(lengths) == 40
    assert min(lengths) < 8
    exact = [
        len(pair.first) + len(pair.second) for pair in next_sentence_pairs(documents, rng, max_length=43, short_rate=0)
    ]
    assert np.mean(np.array(exact) == 40) > 0.97


def test_same_seed_same_pairs():
    documents = _corpus(np.random.default_rng(4))
    one, two, other = (
        list(next_sentence_pairs(documents, np.random.default_rng(seed), max_length=20)) for seed in (7, 7, 8)
    )
    assert one == two
    assert one != other


def test_empty_sentences_and_documents_are_passed_over():
    documents = [[[], [5], []], [], [[6], [], [7]]]
    pairs = list(next_sentence_pairs(documents, np.random.default_rng(0), max_length=8))
    assert [pair.first for pair in pairs] == [[6]]
    assert pairs[0].second in ([7], [5])


@pytest.mark.parametrize("documents", [[], [[[5], [6]]], [[[5]], [[6]]], [[[5], [6]], [[]]]])
def test_corpus_without_pairs(documents):
    with pytest.raises(ValueError, match="needs two documents"):
        list(next_sentence_pairs(documents, np.random.default_rng(0), max_length=8))


def test_no_room_for_pairs():
    with pytest.raises(ValueError, match="max_length=4 leaves no room"):
        list(next_sentence_pairs([[[5], [6]], [[7]]], np.random.default_rng(0), max_length=4))


def _truncate_by_hand(first, second, max_tokens):
    first, second = list(first), list(second)
    while len(first) + len(second) > max_tokens:
        (first if len(first) > len(second) else second).pop()
    return first, second


def test_truncation_is_that_of_the_loop():
    for n, m, room in itertools.product(range(9), range(9), range(19)):
        first, second = list(range(n)), list(range(20, 20 + m))
        assert truncate_pair(first, second, room) == _truncate_by_hand(first, second, room), (n, m, room)


def test_random_truncation_cuts_both_ends_and_as_many():
    rng = np.random.default_rng(0)
    first, second = list(range(30)), list(range(100, 112))
    fronts = []
    for _ in range(2000):
        one, two = truncate_pair(first, second, 20, rng)
        assert (len(one), len(two)) == (10, 10)
        assert one == list(range(one[0], one[0] + 10))
        assert two == list(range(two[0], two[0] + 10))
        fronts.append(one[0])
    assert abs(np.mean(fronts) - 10) < 3 * np.sqrt(20 / 4 / len(fronts))  # binomial of 20 tokens
    assert abs(np.var(fronts) - 5) < 0.6


def test_layout_of_a_pair():
    rng = np.random.default_rng(1)
    for _ in range(300):
        first, second = (
            rng.integers(5, 90, rng.integers(1, 12)).tolist(),
            rng.integers(5, 90, rng.integers(0, 12)).tolist(),
        )
        max_length = int(rng.integers(5, 30))
        ids, types = pair_inputs(first, second, max_length=max_length, cls_id=CLS, sep_id=SEP, pad_id=PAD)
        one, two = _truncate_by_hand(first, second, max_length - (3 if second else 2))
        expected = [CLS, *one, SEP, *([*two, SEP] if second else [])]
        assert ids.tolist() == expected + [PAD] * (max_length - len(expected))
        assert types.tolist() == [0] * (len(one) + 2) + [1] * (len(expected) - len(one) - 2) + [0] * (
            max_length - len(expected)
        )
        assert ids.dtype == types.dtype == np.int32


@pytest.mark.parametrize(("second", "max_length"), [([6], 4), ([], 2)])
def test_no_room_for_a_layout(second, max_length):
    pair_inputs([5], second, max_length=max_length + 1, cls_id=CLS, sep_id=SEP, pad_id=PAD)
    with pytest.raises(ValueError, match=f"max_length={max_length} leaves no room"):
        pair_inputs([5], second, max_length=max_length, cls_id=CLS, sep_id=SEP, pad_id=PAD)
