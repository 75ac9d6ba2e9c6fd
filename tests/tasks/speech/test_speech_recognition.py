"""CTC against every path that there is, in float64; edits against the recursive definition."""

import functools
import itertools

import jax
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from tfx_jax.generation.ctc import collapse, prefix_beam_search
from tfx_jax.metrics.edit_distance import edit_distance, recognition_scores
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech
from tfx_jax.tasks.speech.speech_recognition import (
    SpeechRecognitionConfig,
    SpeechRecognitionTask,
    ctc_nll,
    predict_path,
    recognition_loss,
)

V, STEPS, N = 3, 6, 4
# Steps, and what is said in them: an equal pair, an empty transcript, the only alignment, one step, none at all.
ROWS = [(6, (1, 1, 2)), (5, (2, 1)), (4, ()), (4, (2, 2, 1)), (1, (2,)), (0, ())]


def said(path):
    """What a path says, by the definition: of equal neighbors one, then no blanks."""
    return tuple(label for label, _ in itertools.groupby(path) if label)


def brute_force(logits, labels):
    """The negative log likelihood of labels: the sum over all V ** steps paths that say them."""
    log_probs = log_softmax(np.asarray(logits, np.float64), axis=-1)
    paths = [path for path in itertools.product(range(V), repeat=len(logits)) if said(path) == labels]
    return -logsumexp([sum(log_probs[step, label] for step, label in enumerate(path)) for path in paths])


def make_rows(rng):
    logits = rng.normal(scale=2.0, size=(len(ROWS), STEPS, V)).astype(np.float32)
    labels = rng.integers(V, size=(len(ROWS), N)).astype(np.int32)  # behind the last label, anything
    for row, (_, transcript) in enumerate(ROWS):
        labels[row, : len(transcript)] = transcript
    num_steps, num_labels = (np.array(counts, np.int32) for counts in zip(*((s, len(t)) for s, t in ROWS), strict=True))
    return logits, num_steps, labels, num_labels


def test_likelihood_is_the_sum_over_all_paths():
    logits, num_steps, labels, num_labels = make_rows(np.random.default_rng(0))
    found = jax.device_get(jax.jit(ctc_nll)(logits, num_steps, labels, num_labels))
    expected = [brute_force(logits[row, :steps], said) for row, (steps, said) in enumerate(ROWS)]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gradient_is_that_of_the_sum_and_none_of_padding():
    """Central differences of the brute force, of one row; padding has a gradient of zero, not a small one."""
    logits, num_steps, labels, num_labels = make_rows(np.random.default_rng(1))
    gradient = jax.jit(jax.grad(lambda *arguments: ctc_nll(*arguments).sum()))
    found = jax.device_get(gradient(logits, num_steps, labels, num_labels))
    steps, transcript = ROWS[1]
    for step, label in itertools.product(range(steps), range(V)):
        moved = np.zeros((steps, V))
        moved[step, label] = 1e-4
        values = (brute_force(logits[1, :steps] + sign * moved, transcript) for sign in (1, -1))
        assert found[1, step, label] == pytest.approx(np.subtract(*values) / 2e-4, abs=1e-4)
    for row, (steps, _) in enumerate(ROWS):
        assert not found[row, steps:].any()


class Scores:
    """A model that was told its logits, of two frames a step."""

    def __init__(self, logits):
        self.logits, self.config = logits, self

    def num_steps(self, num_frames):
        return -(-num_frames // 2)

    def __call__(self, frames, num_frames, *, rngs=None):
        return self.logits


def make_batch():
    logits, num_steps, labels, num_labels = make_rows(np.random.default_rng(2))
    num_frames = np.maximum(2 * num_steps - 1, 0).astype(np.int32)
    frames = np.zeros((len(ROWS), 2 * STEPS, 5), np.float32)
    return logits, {"frames": frames, "num_frames": num_frames, "labels": labels, "num_labels": num_labels}


def test_loss_sums_transcripts_and_counts_characters_and_frames():
    logits, batch = make_batch()
    found = jax.device_get(jax.jit(lambda logits, batch: recognition_loss(Scores(logits), batch, None))(logits, batch))
    expected = sum(brute_force(logits[row, :steps], said) for row, (steps, said) in enumerate(ROWS))
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.weight == 3 + 2 + 0 + 3 + 1
    assert found.num_tokens == 11 + 9 + 7 + 7 + 1
    assert found.metrics["utterance_nll"] == pytest.approx((expected, 5), rel=1e-5)


def test_paths_end_with_the_frames():
    logits, batch = make_batch()
    found = jax.device_get(jax.jit(lambda logits, batch: predict_path(Scores(logits), batch))(logits, batch))
    for row, (steps, _) in enumerate(ROWS):
        np.testing.assert_array_equal(found[row, :steps], logits[row, :steps].argmax(axis=-1))
        assert not found[row, steps:].any()
        assert tuple(collapse(found[row].tolist())) == said(found[row].tolist())


def test_every_short_path_collapses():
    for path in itertools.product(range(V), repeat=5):
        assert tuple(collapse(path)) == said(path)
    assert collapse([]) == []


@functools.cache
def recursive_distance(first, second):
    if not first or not second:
        return len(first) + len(second)
    return min(
        recursive_distance(first[1:], second) + 1,
        recursive_distance(first, second[1:]) + 1,
        recursive_distance(first[1:], second[1:]) + (first[0] != second[0]),
    )


def test_edits_are_those_of_the_definition():
    texts = ["".join(text) for length in range(5) for text in itertools.product("ab", repeat=length)] + ["acbcca", "cc"]
    for first, second in itertools.product(texts, repeat=2):
        assert edit_distance(first, second) == recursive_distance(first, second)
        words = [{"a": "one", "b": "two", "c": "three"}[letter] for letter in first]
        assert edit_distance(words, ["two"]) == recursive_distance(first, "b")


def test_scores_are_over_all_characters():
    scores = recognition_scores(["", "abc", "bb"], ["ab", "abc", "b"])
    assert scores == pytest.approx((100 * 3 / 6, 100 / 3, 100 * 2 / 3))
    assert recognition_scores(["one three", "two"], ["one two three", "ten"]).wer == pytest.approx(100 * 2 / 4)
    for predictions, references in ((["a"], []), ([], []), (["a"], [""])):
        with pytest.raises(ValueError, match="cannot be scored"):
            recognition_scores(predictions, references)


class TestPrefixBeamSearch:
    """Against the sums over all paths, which it need not look at."""

    def test_with_room_for_all_it_is_exact(self):
        """The likeliest labels of six steps, of which the likeliest path often has others."""
        rng, differs = np.random.default_rng(0), 0
        for _ in range(20):
            log_probs = log_softmax(rng.normal(scale=0.7, size=(5, V)), axis=-1)
            sums = {}
            for path in itertools.product(range(V), repeat=len(log_probs)):
                score = sum(log_probs[step, label] for step, label in enumerate(path))
                sums[said(path)] = np.logaddexp(sums.get(said(path), -np.inf), score)
            best = list(max(sums, key=sums.get))
            assert prefix_beam_search(log_probs, 400) == best
            differs += best != collapse(log_probs.argmax(axis=-1))
        assert differs > 5

    def test_a_label_that_is_said_twice_needs_a_blank_between(self):
        sure = np.log(np.array([[0.02, 0.96, 0.02], [0.96, 0.02, 0.02], [0.02, 0.96, 0.02]]))
        assert prefix_beam_search(sure, 4) == [1, 1]
        assert prefix_beam_search(sure[[0, 0, 2]], 4) == [1]
        assert prefix_beam_search(sure[:0], 4) == []

    def test_a_wider_beam_never_finds_less(self):
        rng = np.random.default_rng(1)
        for _ in range(5):
            logits = rng.normal(size=(5, V))
            found = [prefix_beam_search(log_softmax(logits, axis=-1), size) for size in (1, 3, 400)]
            scores = [-brute_force(logits, tuple(labels)) for labels in found]
            assert max(scores) == pytest.approx(scores[-1])


def test_own_sounds_are_padded_to_few_lengths():
    """Each length is compiled: four for 512 frames, where built-in data have eleven; the longest is always one."""

    def lengths(dataset, longest):
        data = RecordedSpeech(dataset=dataset, max_length=longest)
        task = SpeechRecognitionTask(SpeechRecognitionConfig(data), None, None, ("a",))
        return task.batch_spec.boundaries

    assert lengths("files", 512) == (64, 128, 256, 512)
    assert lengths("files", 300) == (64, 128, 256, 300)
    assert lengths("files", 50) == (50,)
    assert len(lengths("tones", 512)) == 11
