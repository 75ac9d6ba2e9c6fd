"""Mistakes in what is read, batched and corrupted."""

from tests.mutants.mutant import in_file

MUTANTS = (
    *in_file(
        "data/bucketing.py",
        "data/test_bucketing.py",
        (
            "a row too many for the budget",
            "tokens_per_batch // length // batch_multiple * batch_multiple",
            "-(-tokens_per_batch // length) // batch_multiple * batch_multiple",
        ),
        (
            "rows that devices cannot share",
            "tokens_per_batch // length // batch_multiple * batch_multiple",
            "tokens_per_batch // length",
        ),
        (
            "one bucket longer than needed",
            "np.searchsorted([bucket.length for bucket in buckets], lengths)",
            'np.searchsorted([bucket.length for bucket in buckets], lengths, side="right")',
        ),
        ("the rest is lost", "if waiting.size:", "if False:"),
        ("processes share rows unequally", "if batch_multiple % shard.count:", "if False:"),
        ("boundaries in disorder", "if list(boundaries) != sorted(set(boundaries)):", "if False:"),
    ),
    *in_file(
        "data/pairs.py",
        "data/test_pairs.py",
        ("cut without an end", "del ids[max_length - 1 :]", "del ids[max_length:]"),
        ("longer pairs are kept", "(longer <= self._max_length) & (shorter > 1)", "shorter > 1"),
        ("empty sides are kept", "(longer <= self._max_length) & (shorter > 1)", "longer <= self._max_length"),
        ("every epoch alike", "np.random.SeedSequence((seed, epoch))", "np.random.SeedSequence((seed, 0))"),
        ("other data goes on", "num_examples=len(pairs), is_shuffled", "is_shuffled"),
        ("a side begins in the one before", "self._ids[target:target_end]", "self._ids[target - 1 : target_end]"),
        ("sorted by the sources", "np.where(is_kept, longer, -1)", "np.where(is_kept, sizes[:, 0], -1)"),
        (
            "lengths that devices cannot share",
            "length_boundaries(max_length, options.length_multiple)",
            "length_boundaries(max_length)",
        ),
        (
            "a last buffer that is tiny",
            "(len(self._pairs) * edge // self._buffers_per_epoch for",
            "(min(edge * -(-len(self._pairs) // self._buffers_per_epoch), len(self._pairs)) for",
        ),
    ),
    *in_file(
        "data/batching.py",
        "data/test_batching.py",
        ("padding is 0", "self.pad_values.get(path, 0)", "0"),
        ("every epoch alike", "np.random.default_rng((self._seed, number))", "np.random.default_rng((self._seed, 0))"),
        (
            "the batch is not restored",
            'state["portion"], state["batch"], state["skipped"]',
            'state["portion"], 0, state["skipped"]',
        ),
        (
            "the loaded portion survives a restart",
            'state["num_examples"], None',
            'state["num_examples"], self._loaded',
            "data/test_pairs.py",
        ),
        ("other data goes on", "if self._num_examples not in (None, num_examples):", "if False:"),
        ("epochs must be of one size", "self._dataset.num_examples, None", "self._num_examples, None"),
        ("every other portion is skipped", "self._portion + 1, 0,", "self._portion + 2, 0,"),
        (
            "short batches first",
            "[plan[place] for place in rng.permutation(len(plan))]",
            "plan",
            "data/test_pairs.py",
        ),
        ("what is to be skipped is not", "order = order[lengths[order] >= 0]", "pass"),
        ("a name instead of a path", 'within = f"{path}/" if path else ""', 'within = ""'),
        ("an example too long is taken", "if (longest := lengths.max(initial=0)) > max_length:", "if longest := 0:"),
        (
            "shares overlap",
            "np.arange(shard.index, len(examples), shard.count)",
            "np.arange(0, len(examples), shard.count)",
        ),
        ("a process evaluates everything", "len(examples), shard.count)", "len(examples))"),
        (
            "the index of the sorted examples",
            "index[: len(members)] = order[members]",
            "index[: len(members)] = members",
        ),
        (
            "the index of padding is an example's",
            "index = np.full(bucket.rows, -1, np.int32)",
            "index = np.zeros(bucket.rows, np.int32)",
        ),
    ),
    *in_file(
        "data/process_shard.py",
        "data/test_pairs.py",
        (
            "every process takes the first rows",
            "slice(self.index * size, (self.index + 1) * size)",
            "slice(0, size)",
        ),
    ),
    *in_file(
        "data/packing.py",
        "data/test_packing.py",
        ("targets are the inputs", "self._stream[start + 1 : end + 1]", "self._stream[start:end]"),
        (
            "padding is predicted",
            "(np.arange(start, end) < self._num_targets)",
            "(np.arange(start, end) <= self._num_targets)",
        ),
        (
            "no target across a cut",
            "start + size + (not self._is_end[piece])",
            "start + size",
        ),
        (
            "positions count on",
            'row["positions"][place] = np.arange(size)',
            'row["positions"][place] = np.arange(column, column + size)',
        ),
        ("segments from 0", "self._edges[index + 1]), start=1)", "self._edges[index + 1]), start=0)"),
        (
            "any bin instead of the first",
            "int(first_with_room[size:].argmin())",
            "int(first_with_room[size:].argmax())",
        ),
    ),
    *in_file(
        "data/masked_lm.py",
        "data/test_masked_lm.py",
        ("nothing stays", "_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1", "_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.2"),
        (
            "specials are chosen",
            "_choose(~np.isin(ids, specials), rate, rng)",
            "_choose(np.ones(ids.shape, bool), rate, rng)",
        ),
        ("one token too many", "return ranks < counts", "return ranks <= counts"),
        (
            "specials are drawn",
            "np.setdiff1d(np.arange(vocab_size, dtype=np.int32), specials)",
            "np.arange(vocab_size, dtype=np.int32)",
        ),
        ("what was not chosen is corrupted", "np.where(chosen, corrupted, ids), ids", "corrupted, ids"),
    ),
    *in_file(
        "data/span_corruption.py",
        "data/test_span_corruption.py",
        ("no end of sentence", "[*found, eos_id]", "[*found, pad_id]"),
        (
            "the first sentinel again",
            "inputs += [*tokens[position:begin], sentinels[number]]",
            "inputs += [*tokens[position:begin], sentinels[0]]",
        ),
        ("a span may touch the one before", "position + (number > 0) <= begin", "position <= begin"),
        (
            "sentinels counted up",
            "range(vocab_size - 1, vocab_size - 1 - count, -1)",
            "range(vocab_size - count, vocab_size)",
        ),
        ("a text longer than the inputs", "return length <= inputs_length", "return length <= inputs_length + 1"),
        (
            "every text corrupted alike",
            "np.random.default_rng((*self._seed, index))",
            "np.random.default_rng(self._seed)",
        ),
    ),
    *in_file(
        "data/next_sentence.py",
        "data/test_next_sentence.py",
        ("a random segment of the same document", "texts[other + (other >= number)]", "texts[other]"),
        ("the displaced sentences are lost", "rng, wanted - len(first)), middle", "rng, wanted - len(first)), end"),
        ("the second separator is of the first text", "len(row) + len(second) + 1] = 1", "len(row) + len(second)] = 1"),
        ("cut at the front alone", "int(rng.binomial(count, 0.5))", "count"),
    ),
    *in_file(
        "data/folder_tokenizers.py",
        "data/test_marian_tokenizers.py",
        ("what is unknown is hidden", 'if config.option("shows_unknown", False) else None', "if False else None"),
        ("a text spells the end", 'special if config.option("split_special_tokens", False) else set()', "set()"),
        ("characters spell the end", "pipeline.encode_special_tokens = ", "_ = "),
    ),
    *in_file(
        "data/train_tokenizer.py",
        "data/test_marian_tokenizers.py",
        ("a word spells the end", "({spelt})(?!", "(never)(?!"),
        ("equally frequent words by code point", "word, _ in counts.most_common()", "word in _by_frequency([counts])"),
        ("a marked end stays", 'tokenizers.Regex(r"@@\\z")', 'tokenizers.Regex(r"@@$^")'),
        ("half a folder is a tokenizer", '("tokenizer_config.json", "source.spm", "target.spm")', '("target.spm",)'),
    ),
    *in_file(
        "data/pretraining.py",
        "data/test_pretraining.py",
        ("neighbours are others", "[not pair.is_next for pair in pairs]", "[pair.is_next for pair in pairs]"),
        ("two specials counted", "len(first) + len(second) + 3)", "len(first) + len(second) + 2)"),
    ),
    *in_file(
        "data/text_streams.py",
        "data/test_text_streams.py",
        ("rows keep their parts", "(np.arange(self._rows) + epoch) % self._rows", "np.arange(self._rows)"),
        ("all rows begin with an epoch", "(part == 0) & (segment == 0)", "0 * part == segment"),
        ("a resumed text begins anew", 'self._number = state["batch"]', "pass"),
    ),
    *in_file(
        "data/tables.py",
        "data/test_tables.py",
        (
            "rows are counted instead of lines",
            'line {reader.line_num}"\n        if',
            'line {len(values) + 2}"\n        if',
        ),
        ("infinity is a number", "if math.isinf(number):", "if False:"),
        ("any label will do", "if label not in (0.0, 1.0):", "if False:"),
        ("names have blanks", "[name.strip() for name in next(reader)]", "next(reader)"),
    ),
)

MUTANTS += in_file(
    "data/trees.py",
    "data/test_trees.py",
    ("text behind a tree is passed over", "if tree.symbols and not labels:", "if False:"),
    ("tags are written for the model", "symbol if with_tags or is_bracket(symbol) else WORD", "symbol"),
    ("the root may end before the last word", "self._labels[bool(self._missing) :]", "self._labels"),
    ("constituents without a word stay", 'if self._kept[-1].startswith("("):', "if False:"),
    ("words too many stay", "elif symbol and self._missing:", "elif symbol:"),
    ("words that are missing stand anywhere", "while self._missing and len(self._labels) > 1:", "while False:"),
    ("any end is an end", "if symbol[1:] in open_labels:", "if open_labels:"),
    ("round brackets stay in words", "return [word.translate(_ESCAPES)", "return [word"),
)

MUTANTS += (
    *in_file(
        "data/listops.py",
        "data/test_listops.py",
        ("the upper median", "values[(count - 1) // 2] + values[count // 2]) // 2", "2 * values[count // 2]) // 2"),
        ("sums have no modulus", "sum(values) % 10", "sum(values)"),
        ("a level more", "if depth == max_depth or", "if depth > max_depth or"),
        ("an argument less", "int((max_args - 1) * draw())", "int((max_args - 2) * draw())"),
        ("nested as often as not", "_NESTED = 0.25", "_NESTED = 0.5"),
        ("any expression in any split", "and _split_of(tokens) == split", ""),
        ("short ones are taken", "len(tokens) >= min_length and ", ""),
        ("lists need not be closed", "if len(open_lists) != 1 or len(open_lists[0]) != 1:", "if not open_lists[0]:"),
    ),
    *in_file(
        "data/passages.py",
        "data/test_passages.py",
        ("a byte is padding", "astype(np.uint16) + 1", "astype(np.uint16)"),
        ("short rests are kept", "if len(piece) >= min_length]", "if len(piece)]"),
        ("a passage goes with itself", "rng.choice(len(articles[first]), 2, replace=False)", "[0, 0]"),
        (
            "two articles may be one",
            "rng.choice(len(articles), 2, replace=False)",
            "rng.choice(len(articles), 2)",
        ),
    ),
)

MUTANTS += (
    *in_file(
        "data/lines.py",
        "data/test_lines.py",
        ("a line may be of any length", "(first if first >= 0 else len(data)) > MAX_LINE_BYTES:", "False:"),
        ("any archive is unpacked", "size > max(_MAX_SMALL, _MAX_RATIO * packed.tell())", "False"),
        ("blocks begin with line 1", 'number += data.count(b"\\n")', "number += 0"),
        (
            "the last line is lost",
            "    if rest:\n        yield _checked(Block(rest, number), path)\n    elif",
            "    if",
        ),
    ),
    *in_file(
        "data/text.py",
        "data/test_text.py",
        ("places are counted from each block", "column[0].append(begin + place)", "column[0].append(begin)"),
        ("a byte order mark is text", "self._size = len(BYTE_ORDER_MARK)", "pass"),
        ("a changed file is read on", "if self._current_version() != self._version:", "if False:"),
        ("the other side may be empty", "~(source.blank[part] | target.blank[part])", "~source.blank[part]"),
        ("sources begin anew", "begin = self._ends[source] - len(part)", "begin = 0"),
    ),
    *in_file(
        "data/documents.py",
        "data/test_documents.py, training/tasks/test_language_modeling.py -k several",
        ("cut between words of any tokenizer", "if pending and _is_cut(", "if pending or _is_cut("),
        ("cut behind the space", r"(?<=\S)(?= \w)", r"(?<=\S )(?=\w)"),
        ("every piece is a document", "yield pending, False", "yield pending, True"),
        ("characters are counted from each block", "place += len(part)", "place += 0"),
    ),
)
