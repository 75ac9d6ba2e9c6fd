"""Mistakes in tasks."""

from tests.mutants.mutant import in_file

MUTANTS = (
    *in_file(
        "tasks/decoding.py",
        "tasks/test_decoding.py",
        (
            "rows that are added go on",
            "[1] * (num_rows - len(members))",
            "[99] * (num_rows - len(members))",
            "tasks/test_translation.py -k padding",
        ),
        ("draws follow the place in a batch", "first + row_ids,", "first + np.arange(num_rows),"),
        (
            "outputs come in the order of batches",
            "for member, row in zip(members,",
            "for member, row in zip(range(99),",
        ),
        (
            "an end may be passed over",
            "jnp.where(is_over, -jnp.inf, logits)",
            "logits",
            "tasks/test_generation.py -k ends",
        ),
        ("a prompt's end is an end", "(is_over & ~cache.is_first)", "is_over", "tasks/test_generation.py -k consist"),
        ("padding is kept", "jnp.where(tokens == decoder.pad_id, _NO_TOKEN, tokens)", "tokens"),
        (
            "longer than the model has room for",
            "if room is not None and length > room:",
            "if False:",
            "tasks/test_generation.py -k refusals",
        ),
    ),
    *in_file(
        "tasks/recurrent_language_modeling.py",
        "tasks/test_recurrent_language_modeling.py",
        ("memories of another text", 'carry is not None and "begins" in batch', "False"),
        ("memories are not handed on", "output._replace(carry=memories)", "output._replace(carry=carry)"),
        (
            "evaluation remembers as training does",
            "self.model_config.memory_length_of_evaluation\n",
            "None\n",
            "training/tasks/test_recurrent_language_modeling.py -k long_rows",
        ),
    ),
) + in_file(
    "tasks/speech_recognition.py",
    "tasks/test_speech_recognition.py",
    ("steps of padding are aligned", "[None] >= num_steps[:, None]", "[None] >= logits.shape[1]"),
    ("a label more", "[None] >= num_labels[:, None]", "[None] > num_labels[:, None]"),
    ("padding speaks", "return jnp.where(exists, labels, BLANK)", "return labels"),
    ("doubled letters stay", "& (np.diff(labels, prepend=BLANK) != 0)", ""),
    ("blanks are looked through", "(labels != BLANK) &", ""),
    ("an insertion is free", "- places) + places", "- 0 * places)"),
)

MUTANTS += in_file(
    "tasks/duplication.py",
    "tasks/test_duplication.py",
    ("the second 0 counts", "weights[len(half) : -1] = 1", "weights[len(half) - 1 : -1] = 1"),
    ("no symbol is the last", "self._length // 2 - 1, endpoint=True", "self._length // 2 - 1, endpoint=False"),
    ("splits draw alike", "SPLITS.index(split), epoch)", "0, epoch)"),
    ("epochs draw alike", "SPLITS.index(split), epoch)", "SPLITS.index(split), 0)"),
    ("the first half has to be right", "| (weights == 0)).all", "& (weights >= 0)).all"),
    ("padding is right", "(is_right & is_row).sum", "is_right.sum"),
)

MUTANTS += (
    *in_file(
        "tasks/ranking_scores.py",
        "tasks/test_ranking_scores.py",
        (
            "ties are lost",
            'np.searchsorted(below, positives, "left") + np.searchsorted(below, positives, "right")',
            'np.searchsorted(below, positives, "left") * 2',
        ),
        (
            "ties are ranked apart",
            "_, group = np.unique(-scores, return_inverse=True)",
            "group = np.argsort(np.argsort(-scores))",
        ),
        ("the worst first", "np.unique(-scores,", "np.unique(scores,"),
        ("the bootstrap draws each row once", "rng.choice(rows, len(rows))", "rng.permutation(rows)"),
    ),
    *in_file(
        "tasks/event_data.py",
        "tasks/test_event_classification.py",
        ("the window has no end", "& (times < data.window_end)", ""),
        ("cells without a number are events", "~np.isnan(table.values)", "np.ones_like(table.values, bool)"),
        (
            "equal values rank low",
            "np.bincount(group, weights=shares) / np.bincount(group)",
            "shares[np.unique(quantiles, return_index=True)[1]]",
        ),
    ),
    *in_file(
        "tasks/event_classification.py",
        "training/tasks/test_event_classification.py",
        (
            "columns are taken in their order",
            "variables = number[np.concatenate([record.variables for record in everything])]",
            "variables = np.concatenate([record.variables for record in everything]).astype(np.int32)",
        ),
        ("the least first", "key=lambda event: -event.weight", "key=lambda event: event.weight"),
        ("columns may be missing", "if name not in records.names:", "if False:"),
    ),
    *in_file(
        "tasks/sentence_pairs.py",
        "training/tasks/test_sentence_pairs.py",
        ("swapped pairs are not swapped", "LabelledPair(pair.second, pair.first, pair.label)", "pair"),
        (
            "alignments of what was not lower-cased",
            "self.tokenizer.encode(self.config.plain(text))",
            "self.tokenizer.encode(text)",
        ),
    ),
)
