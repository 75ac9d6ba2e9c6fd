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
        ("cut without an end", "del ids[max_length - 1 :]", "del ids[max_length:]"),
        ("longer pairs are kept", "(lengths <= self._max_length) & (shorter > 1)", "(shorter > 1)"),
        ("empty sides are kept", "(lengths <= self._max_length) & (shorter > 1)", "lengths <= self._max_length"),
        ("every epoch alike", "np.random.SeedSequence((seed, epoch))", "np.random.SeedSequence((seed, 0))"),
        ("short batches first", "[plan[place] for place in order]", "plan"),
        (
            "every other buffer is skipped",
            "self._buffer, self._batch, self._skipped = self._buffer + 1, 0,",
            "self._buffer, self._batch, self._skipped = self._buffer + 2, 0,",
        ),
        ("the loaded buffer survives a restart", 'state["skipped"]\n        self._loaded = None', 'state["skipped"]'),
        ("other data goes on", 'if state["num_pairs"] != self._dataset.num_pairs:', "if False:"),
        ("processes share rows unequally", "if batch_multiple % shard.count:", "if False:"),
        ("a side begins in the one before", "np.append(0, np.cumsum(lengths))", "np.append(0, np.cumsum(lengths) - 1)"),
        (
            "rows begin where others do",
            "starts = np.cumsum(self.lengths) - self.lengths",
            "starts = np.cumsum(self.lengths) - self.lengths[0]",
        ),
        (
            "a last buffer that is tiny",
            "self.num_pairs * edge // self._buffers_per_epoch for edge in (part, part + 1)",
            "min(edge * -(-self.num_pairs // self._buffers_per_epoch), self.num_pairs) for edge in (part, part + 1)",
        ),
    ),
    *in_file(
        "data/batching.py",
        "data/test_batching.py",
        ("padding is 0", "pad_value = self.pad_values.get(name, 0)", "pad_value = 0"),
        ("every epoch alike", "np.random.default_rng((self._seed, number))", "np.random.default_rng((self._seed, 0))"),
        (
            "the batch is not restored",
            'self._epoch, self._batch = state["epoch"], state["batch"]',
            'self._epoch, self._batch = state["epoch"], 0',
        ),
        ("other data goes on", "if self._expected_examples not in (None, num_examples):", "if False:"),
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
        "data/test_bucketing.py",
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
            "documents[number][start + 1 : start + size + 1]",
            "documents[number][start + 1 : start + size]",
        ),
        (
            "positions count on",
            "positions[row, place] = np.arange(size)",
            "positions[row, place] = np.arange(column, column + size)",
        ),
        ("segments from 0", "enumerate(contents, start=1)", "enumerate(contents)"),
        ("no end behind a document", "np.array([eos_id], np.int32))]", "np.array([], np.int32))]"),
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
        "data/tokenizer.py",
        "data/test_tokenizer.py",
        (
            "goes on behind the end",
            "if index == EOS_ID:\n            return",
            "if index == EOS_ID:\n            continue",
        ),
        ("a text spells the end", "self._ids.update(dict.fromkeys(_SPECIALS, UNK_ID))", "pass"),
        ("rarer than asked", "count >= min_count", "count > min_count"),
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
)
