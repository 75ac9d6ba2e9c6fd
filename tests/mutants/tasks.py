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

MUTANTS += in_file(
    "tasks/captioning.py",
    "tasks/test_captioning.py, tasks/test_loss_contract.py -k captioning",
    ("padding is looked at", "(found.weights * weights[..., None]).sum(axis=1)", "found.weights.sum(axis=1)"),
    ("an absent caption is to see everything", "jnp.where(is_row, jnp.square", "jnp.where(True, jnp.square"),
    ("expectations are paid", "jnp.where(is_drawn, score, 0.0)", "score"),
    ("padding chooses", "(found.log_prob * weights).sum(axis=1)", "found.log_prob.sum(axis=1)"),
    ("a pixel more", "(start < bottom)", "(start <= bottom)"),
    ("rows are columns", "rows[..., :, None] & columns[..., None, :]", "rows[..., None, :] & columns[..., :, None]"),
    ("padding is on an object", 'jnp.where(weights[..., None] > 0, batch["boxes"], 0)', 'batch["boxes"]'),
    (
        "nothing is an average",
        "jnp.where(number > 0, BASELINE_DECAY * average",
        "jnp.where(True, BASELINE_DECAY * average",
    ),
)
