"""Parallel text from files: what is read, and the one line a user gets for each kind of broken file."""

import errno
import functools
import gzip
import itertools
import os

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx_jax.data.sources import disk_array, lines, text
from tfx_jax.errors import UserError


def _write(path, content):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _pairs(tmp_path, source, target, **options):
    return text.read_pairs(_write(tmp_path / "a.en", source), _write(tmp_path / "a.ja", target), **options)


def _contents(pairs):
    return [(pairs[index]["source"], pairs[index]["target"]) for index in range(len(pairs))]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pairs_of_two_files(tmp_path, suffix):
    source = _write(tmp_path / f"train.en{suffix}", "a cat\nthe dog\n")
    target = _write(tmp_path / f"train.ja{suffix}", "猫 。\n犬\n")
    pairs = text.read_pairs(str(source), target)
    assert pairs[1] == {"source": "the dog", "target": "犬"}
    assert _contents(pairs) == [("a cat", "猫 。"), ("the dog", "犬")]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pairs_of_a_tsv(tmp_path, suffix):
    path = _write(tmp_path / f"train.tsv{suffix}", "a cat\t猫\r\nthe dog\t犬")
    assert _contents(text.read_tsv(path)) == [("a cat", "猫"), ("the dog", "犬")]


_VISIBLE = regex.compile(r"[^\s\p{Cc}\p{Default_Ignorable_Code_Point}\u2800\ufff9-\ufffb]")
_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"), max_size=12)


@given(
    sides=st.lists(
        st.tuples(_LINE | st.sampled_from([" ", "\u3000 ", "\u200b", "\xad\x01"]), _LINE | st.just("")),
        min_size=1,
        max_size=30,
    )
)
@settings(deadline=None, max_examples=100)
def test_pairs_without_text_are_dropped_or_kept_when_told(tmp_path_factory, sides):
    folder = tmp_path_factory.mktemp("text")
    paths = [
        _write(folder / name, "".join(line + "\n" for line in lines))
        for name, lines in zip("ab", zip(*sides, strict=True), strict=True)
    ]
    with_text = [pair for pair in sides if all(map(_VISIBLE.search, pair))]
    for keep_empty in (False, True):
        if with_text:
            pairs = text.read_pairs(*paths, keep_empty=keep_empty)
            assert _contents(pairs) == (sides if keep_empty else with_text)
            assert pairs.num_with_text == len(with_text)
        else:
            with pytest.raises(UserError, match=f"none of the {len(sides)} pairs has text on both sides"):
                text.read_pairs(*paths, keep_empty=keep_empty)


def test_empty_sides_of_a_tsv_are_dropped(tmp_path):
    path = _write(tmp_path / "train.tsv", "a\tb\n\tc\nd\t\ne\tf\ng\t")
    pairs = text.read_tsv(path)
    assert _contents(pairs) == [("a", "b"), ("e", "f")]
    assert len(text.read_tsv(path, keep_empty=True)) == 5


def test_a_line_of_100_000_tokens_is_a_line(tmp_path):
    pairs = _pairs(tmp_path, "a\n" + "b " * 100_000 + "\n", "c\nd\n")
    assert len(pairs[1]["source"].split()) == 100_000


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("is_tsv", [False, True])
def test_pairs_are_the_same_in_blocks_of_any_size(tmp_path, monkeypatch, suffix, is_tsv):
    """With a byte order mark, empty sides, line ends of both kinds and a last line without one."""
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 7)
    monkeypatch.setattr(text, "_LINES_PER_CHECK", 2)
    if is_tsv:
        content = "\ufeffa b\t猫\r\n\tx\ncc\t犬 犬\nd\t"
        read = functools.partial(text.read_tsv, _write(tmp_path / f"a.tsv{suffix}", content))
    else:
        source = _write(tmp_path / f"a.en{suffix}", "\ufeffa b\n\ncc\nd")
        read = functools.partial(text.read_pairs, source, _write(tmp_path / f"a.ja{suffix}", "猫\r\nx\n犬 犬\n\n"))
    assert _contents(read()) == [("a b", "猫"), ("cc", "犬 犬")]
    assert _contents(read(keep_empty=True)) == [("a b", "猫"), ("", "x"), ("cc", "犬 犬"), ("d", "")]
    assert read(keep_empty=True).__getitems__(np.array([3, 0])) == [
        {"source": "d", "target": ""},
        {"source": "a b", "target": "猫"},
    ]


def test_a_file_that_changes_while_it_is_in_use_is_an_error(tmp_path):
    pairs = _pairs(tmp_path, "a\nb\n", "c\nd\n")
    assert pairs[1]["target"] == "d"
    (tmp_path / "a.ja").write_text("d\nc\n")
    os.utime(tmp_path / "a.ja", ns=(1, 1))  # as a clock of coarse ticks might not tell
    with pytest.raises(
        UserError, match=r"a\.ja was changed while it was in use: start again, and do not edit it meanwhile$"
    ):
        pairs[1]


def test_a_file_that_is_replaced_while_it_is_in_use_stays_what_it_was(tmp_path):
    pairs = _pairs(tmp_path, "a\nb\n", "c\nd\n")
    (tmp_path / "new").write_text("x\ny\n")
    (tmp_path / "new").replace(tmp_path / "a.ja")
    assert pairs[1] == {"source": "b", "target": "d"}


def test_a_folder_for_temporary_files_that_is_gone(tmp_path, monkeypatch):
    """As some systems clear it below a process that lives long."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        UserError, match=r"^cannot keep data on disk: .*No such file.*: set TMPDIR to a writable folder"
    ):
        disk_array.UnnamedFile()


def test_no_room_for_what_is_unpacked(tmp_path, monkeypatch):
    def write(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_array.os, "write", write)
    with pytest.raises(UserError, match=r"^cannot keep data in .*: No space left on device: set TMPDIR to a folder"):
        text.read_tsv(_write(tmp_path / "a.tsv.gz", "a\tb\n"))


def test_index_out_of_range_ends_an_iteration(tmp_path):
    pairs = _pairs(tmp_path, "a\n\nc\n", "x\ny\nz\n")
    assert [pair["target"] for pair in pairs] == ["x", "z"]
    with pytest.raises(IndexError):
        pairs[2]


def test_several_sources_are_one():
    sizes = {"a": 3, "b": 0, "c": 4}
    parts = [[{"source": f"{part}{index}", "target": ""} for index in range(size)] for part, size in sizes.items()]
    joined = text.join_pairs(parts)
    assert [pair["source"] for pair in joined] == ["a0", "a1", "a2", "c0", "c1", "c2", "c3"]
    assert [pair["source"] for pair in joined.__getitems__(np.array([6, 0, 3, 2]))] == ["c3", "a0", "c0", "a2"]
    left, held_out = text.split_pairs(joined, 1)
    assert (len(left), len(held_out)) == (7, 0)
    assert text.get_pairs(left, [4, 1]) == [{"source": "c1", "target": ""}, {"source": "a1", "target": ""}]


def test_many_pairs_come_in_one_call_where_the_source_can():
    class Slow(list):
        def __getitems__(self, indices):
            return [f"{self[index]}!" for index in indices]

    assert text.get_pairs(["a", "b", "c"], [2, 0]) == ["c", "a"]
    assert text.get_pairs(Slow("abc"), np.array([2, 0])) == ["c!", "a!"]


@pytest.mark.parametrize(("count", "max_pairs"), [(1, None), (5000, None), (5000, 7), (5000, 9000), (10**12, 5)])
def test_lines_for_a_tokenizer_are_evenly_spaced(count, max_pairs):
    class Numbers:
        def __len__(self):
            return count

        def __getitem__(self, index):
            return {"source": f"s{index}", "target": f"t{index}"}

    lines = list(text.lines_of(Numbers(), max_pairs))
    number = min(count, max_pairs or count)
    places = [int(line[1:]) for line in lines[::2]]
    assert lines[1::2] == [f"t{place}" for place in places]
    assert len(set(places)) == number
    assert places[0] == 0
    gaps = [right - left for left, right in itertools.pairwise([*places, count])]
    assert set(gaps) <= {count // number, count // number + 1}


def test_sides_with_different_numbers_of_lines(tmp_path):
    with pytest.raises(UserError, match=r"a\.en has 1,201 lines and .*a\.ja has 2: line i of one must be"):
        _pairs(tmp_path, "x\n" * 1201, "y\ny\n")


@pytest.mark.parametrize(
    ("content", "line", "tabs"), [("a\tb\nc d\n", 2, 0), ("a\tb\tc\nd\te\n", 1, 2), ("a\tb\nc\td\n\n", 3, 0)]
)
def test_tsv_line_without_exactly_one_tab(tmp_path, content, line, tabs):
    with pytest.raises(UserError, match=rf"train\.tsv, line {line}: {tabs} TABs; a line must be"):
        text.read_tsv(_write(tmp_path / "train.tsv", content))


@pytest.mark.data
def test_real_text(shared_data):
    pairs = text.read_pairs(shared_data / "enja" / "train.en.gz", shared_data / "enja" / "train.ja.gz")
    assert len(pairs) == 50_000
    assert pairs[0]["target"] == "誰 が 一番 に 着 く か 私 に は 分か り ま せ ん 。"
