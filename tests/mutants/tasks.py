"""Mistakes in tasks."""

from tests.mutants.mutant import in_file

_RECORDED = "training/tasks/test_recorded_speech.py"

MUTANTS = (
    (
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
            (
                "a prompt's end is an end",
                "(is_over & ~cache.is_first)",
                "is_over",
                "tasks/test_generation.py -k consist",
            ),
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
    )
    + in_file(
        "tasks/speech_recognition.py",
        "tasks/test_speech_recognition.py",
        ("steps of padding are aligned", "[None] >= num_steps[:, None]", "[None] >= logits.shape[1]"),
        ("a label more", "[None] >= num_labels[:, None]", "[None] > num_labels[:, None]"),
        ("padding speaks", "jnp.where(exists, logits.argmax(axis=-1), BLANK)", "logits.argmax(axis=-1)"),
        ("masks in evaluation", "if rngs is not None and masks.num_time", "if masks.num_time", _RECORDED),
        (
            "samples are features",
            "logits = model(frames if sound is None else",
            "logits = model(frames if True else",
            _RECORDED,
        ),
    )
    + in_file(
        "tasks/ctc_decoding.py",
        "tasks/test_speech_recognition.py",
        ("doubled letters stay", "& (np.diff(labels, prepend=BLANK) != 0)", ""),
        ("blanks are looked through", "(labels != BLANK) &", ""),
        ("twice without a blank", "before = blank if labels and", "before = either if labels and"),
        ("a label does not last", "again = spoken + row[labels[-1]] if labels else never", "again = never"),
    )
    + in_file(
        "tasks/recognition_scores.py",
        "tasks/test_speech_recognition.py",
        ("an insertion is free", "- places) + places", "- 0 * places)"),
        ("words are characters", "text.split() for text", "text for text"),
    )
    + in_file(
        "tasks/recorded_speech.py",
        _RECORDED,
        (
            "padding is heard",
            "jnp.where(exists, 1 + jnp.maximum(decades, -8) / 4, -1)",
            "1 + jnp.maximum(decades, -8) / 4",
        ),
        ("loud is louder", "(energies - greatest) / math.log(10)", "energies / math.log(10)"),
        ("speeds are turned round", "speed.denominator, speed.numerator)", "speed.numerator, speed.denominator)"),
        ("all is heard faster", 'if split != "train" or not', "if not"),
        ("the last frame is cut", "np.pad(samples, (0, -len(samples) % hop))", "samples[: len(samples) // hop * hop]"),
    )
    + in_file(
        "data/audio.py",
        "data/test_audio.py",
        ("bytes have a sign", "samples.astype(np.float64) - 128) / 128", "samples.astype(np.float64)) / 128"),
        ("the first channel", ".mean(axis=1)", "[:, 0]"),
        ("any rate will do", "if rate != sample_rate:", "if False:"),
        ("too loud turns over", "np.clip(np.rint(sound * 32_768), -32_768, 32_767)", "np.rint(sound * 32_768)"),
    )
)

MUTANTS += (
    in_file(
        "tasks/bidirectional_language_modeling.py",
        "training/tasks/test_bidirectional_language_modeling.py",
        ("targets exchanged", "np.stack([places + 1, places - 1]", "np.stack([places - 1, places + 1]"),
        ("sentences have no end", "stream.append([0, *(types", "stream.append([*(types"),
        ("empty lines are sentences", "if words := line.split():", "if (words := line.split()) is not None:"),
        ("a word is counted twice", "Metric(nll.sum / 2, nll.weight / 2)", "nll"),
        ("every epoch is cut alike", "if epoch else 0)", "if False else 0)"),
        (
            "padding is predicted",
            'jnp.broadcast_to(batch["token_mask"]',
            'jnp.broadcast_to(True | batch["token_mask"]',
            "tasks/test_loss_contract.py -k bidirectional",
        ),
    )
    + in_file(
        "tasks/tagging.py",
        "training/tasks/test_tagging.py -k elmo",
        (
            "a sentence of characters has no end",
            "np.concatenate([mark, read, mark])",
            "np.concatenate([mark, read, 0 * mark])",
        ),
        (
            "marks have a tag",
            '"targets": np.pad(targets, 1, constant_values=IGNORED),',
            '"targets": np.pad(targets, 1),',
        ),
        ("no room for the marks", "for tag in tags[: max_length - 2]", "for tag in tags[: max_length - 1]"),
    )
    + in_file(
        "tasks/word_characters.py",
        "training/tasks/test_bidirectional_language_modeling.py",
        ("bytes are not moved from padding", "(codes.astype(np.int32) + 1)", "codes.astype(np.int32)"),
        ("the end is cut off", "[: word_length - 2]", "[: word_length - 1]"),
    )
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
    "tasks/bracket_scores.py",
    "tasks/test_bracket_scores.py",
    ("a bracket counts once", "num_right += (found & wanted).total()", "num_right += len(found & wanted)"),
    ("punctuation counts", "place += next(counted)", "place += 1"),
    ("tags are those of the prediction", "for tag in reference.tags]", "for tag in prediction.tags]"),
    ("constituents of punctuation count", "and start < place:", "and start <= place:"),
    ("the root counts", 'frozenset({"TOP", ', "frozenset({"),
    ("particles are no adverbs", "_EQUAL.get(label, label)", "label"),
    ("function tags count", 're.split("[-=]", symbol[1:])[0]', "symbol[1:]"),
    ("errors are misses", "num_errors += 1\n            continue", "num_errors += 1"),
)

MUTANTS += in_file(
    "tasks/parsing.py",
    "tasks/test_parsing.py",
    ("long trees are trained on", "np.where(lengths <= limit, lengths, -1)", "lengths"),
    ("long sentences are cut", 'text if length < self._max_length else ""', "text"),
    ("symbols are words", "enumerate(self.symbols, start=self.tokenizer.vocab_size)", "enumerate(self.symbols)"),
    ("the end is a mistake", "for token in ids if token != eos_id]", "for token in ids]"),
)

MUTANTS += in_file(
    "tasks/image_classification.py",
    "training/tasks/test_image_classification.py",
    ("images move one way only", "(2, b), 0, 2 * max_shift + 1)", "(2, b), 0, max_shift + 1)"),
    ("images are moved beyond", "(2, b), 0, 2 * max_shift + 1)", "(2, b), 0, 2 * max_shift + 3)"),
    ("both axes move alike", "zip(sides, starts, strict=True)", "zip(sides, starts[[0, 0]], strict=True)"),
    ("all images are mirrored", "jax.random.bernoulli(for_mirrors, 0.5, (b,))", "jnp.ones(b, bool)"),
    ("upside down", "image[:, :, ::-1]", "image[:, ::-1]"),
    ("images are changed in evaluation", "if rngs is not None and (max_shift or is_mirrored):", "if max_shift:"),
    ("black is zero", "/ 127.5 - 1.0", "/ 255"),
    ("the class token is a patch", "attention_rollout(layers)[:, 0, 1:]", "attention_rollout(layers)[:, 0, :-1]"),
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
        ("one row of attention is all", "sum(self.hops) / len(self.hops)", "self.hops[0]"),
        ("the least first", "key=lambda event: -event.weight", "key=lambda event: event.weight"),
        ("columns may be missing", "if name not in records.names:", "if False:"),
    ),
    *in_file(
        "tasks/sentence_pairs.py",
        "training/tasks/test_sentence_pairs.py",
        ("swapped pairs are not swapped", "LabelledPair(pair.second, pair.first, pair.label)", "pair"),
        (
            "alignments of what was not lower-cased",
            "self.tokenizer.encode(self.config.plain(text))[:",
            "self.tokenizer.encode(text)[:",
        ),
    ),
)

MUTANTS += (
    *in_file(
        "tasks/long_range.py",
        "training/tasks/test_long_range.py -k labels",
        ("tokens of one side are counted", "(jnp.stack(sides) != 0)", "(sides[0] != 0)"),
        ("the second text is not read", "for name in _ARRAYS if name in batch]", "for name in _ARRAYS[:1]]"),
    ),
    *in_file(
        "tasks/long_range_data.py",
        "training/tasks/test_long_range.py -k articles",
        ("same is different", "self.labels[index % 2])", "self.labels[(index + 1) % 2])"),
    ),
)
