"""Text in parts: nothing too early, nothing twice, nothing lost, and no more work as the text grows."""

import numpy as np
import pytest

from tfx_jax.data.tokenizers.streaming import TextStream


def decode_stream(decode, ids):
    """The parts that are not empty."""
    stream = TextStream(decode)
    for index in ids:
        if part := stream.push(index):
            yield part
    if part := stream.finish():
        yield part


def of_bytes(ids):
    return bytes(ids).decode(errors="replace")


def of_bytes_one_by_one(ids):
    """Each byte that is in no complete character is a broken character of its own, as in SentencePiece."""
    data, text = bytes(ids), ""
    while data:
        for length in (1, 2, 3, 4):
            try:
                text, data = text + data[:length].decode(), data[length:]
                break
            except UnicodeDecodeError:
                pass
        else:
            text, data = text + "\N{REPLACEMENT CHARACTER}", data[1:]
    return text


def of_words(ids):
    """Words have a space before them, which the first loses; id 0 is a space, which vanishes at the beginning."""
    return "".join(" " if index == 0 else f" w{index}" for index in ids).lstrip()


def test_parts_of_characters_wait_for_the_rest():
    text = "aé日🙂\N{REPLACEMENT CHARACTER}!"
    shown = []

    def ids():
        for byte in text.encode():
            yield byte
            shown.append("".join(parts))

    parts = []
    for part in decode_stream(of_bytes, ids()):
        parts.append(part)
    assert parts == ["a", "é", "日", "🙂", "\N{REPLACEMENT CHARACTER}!"]
    assert shown == ["a", "a", "aé", "aé", "aé", "aé日", *["aé日"] * 3, "aé日🙂", *["aé日🙂"] * 3, text]


@pytest.mark.parametrize("decode", [of_bytes, of_bytes_one_by_one, of_words])
def test_parts_are_the_text(decode):
    rng = np.random.default_rng(0)
    pool = np.frombuffer("aé日🙂 \N{REPLACEMENT CHARACTER}".encode(), np.uint8)
    for _ in range(2_000):
        size = rng.integers(0, 20)
        ids = (rng.choice(pool, size) if decode is not of_words else rng.integers(0, 3, size)).tolist()
        parts = list(decode_stream(decode, iter(ids)))
        assert "".join(parts) == decode(ids), ids
        assert all(parts)


def test_a_word_comes_with_the_space_before_it_at_once():
    parts = []
    for number, part in enumerate(decode_stream(of_words, [1, 2, 0, 3]), start=1):
        parts.append((number, part))
    assert parts == [(1, "w1"), (2, " w2"), (3, " "), (4, " w3")]


@pytest.mark.parametrize("text", ["naïve 日本🙂 " * 300, "a" * 4_000])
def test_the_work_for_a_token_does_not_grow(text):
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return of_bytes(ids)

    assert "".join(decode_stream(decode, text.encode())) == text
    assert max(lengths) <= 9
    assert len(lengths) <= 2 * len(text.encode())


def test_what_stays_broken_is_not_held_back_for_ever():
    stream = decode_stream(of_bytes, iter([0x80] * 10))
    assert next(stream) == "\N{REPLACEMENT CHARACTER}"
    assert "".join(stream) == "\N{REPLACEMENT CHARACTER}" * 9


def test_nothing():
    assert list(decode_stream(of_bytes, [])) == []
