"""What BERT's parameters are before training."""

import math

import jax
import numpy as np
from flax import nnx

from tests.nn.programs import initial, jitted, params_of
from tfx_jax.models import BertConfig, BertPretraining

SIZES = {"vocab_size": 500, "num_segments": 3, "d_model": 96}


def test_starts_as_the_authors_program():
    """Normal with deviation 0.02, matrices cut off at two deviations, offsets 0, gains 1."""
    config = BertConfig(**SIZES, num_layers=3, num_heads=2, max_length=9)
    params = params_of(initial(lambda: BertPretraining(config, rngs=nnx.Rngs(0))))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "bias" in name or "scale" in name:
            np.testing.assert_array_equal(leaf, 1.0 if "scale" in name else 0.0)
            continue
        deviation = 0.02 if "table" in name else 0.02 * 0.8796  # of a normal distribution cut off at two
        assert abs(np.std(leaf) / deviation - 1) < 3 / math.sqrt(2 * leaf.size) + 1e-3, name
        assert abs(np.mean(leaf)) < 3 * deviation / math.sqrt(leaf.size), name
        if "table" not in name:
            assert np.abs(leaf).max() <= 0.04 + 1e-6, name
    stack = params["bert"]["encoder_layers"]["feed_forward"]["up"]
    assert np.abs(stack[0] - stack[1]).max() > 0.01


def test_starts_by_matching_tokens():
    """The first layer sees, of two texts without a token in common but one, the other place of that one."""
    config = BertConfig(**SIZES, num_layers=2, num_heads=3, max_length=32, init="matching")
    tokens, segments = np.arange(3, 27)[None], (np.arange(24) >= 12).astype(int)[None]
    tokens[0, 20] = 6  # at place 3, too

    @jitted
    def start():
        model = BertPretraining(config, rngs=nnx.Rngs(0))
        return model, model.bert(tokens, segments, return_attention=True)[1]

    model, maps = start()
    layers = model.bert.encoder_layers
    np.testing.assert_array_equal(layers.self_attention.key.kernel, layers.self_attention.query.kernel)
    for param, deviation in (
        (layers.self_attention.query.kernel, 96**-0.5 * 0.8796),
        (layers.feed_forward.up, 96**-0.5 * 0.8796),
        (model.bert.embedding.table, 96**-0.5),
        (model.bert.positions.table, 96**-0.5 / 5),
        (model.next_sentence.kernel, 96**-0.5 * 0.8796),
    ):
        leaf = np.asarray(param)
        assert abs(np.std(leaf) / deviation - 1) < 3 / math.sqrt(2 * leaf.size) + 1e-3
    weights = np.asarray(maps["encoder/0/self"])[0].mean(axis=0)
    np.testing.assert_array_equal(np.sort(np.argsort(weights[3])[-2:]), [3, 20])
    np.testing.assert_array_equal(weights.argmax(axis=1)[:3], [0, 1, 2])
    assert weights[3, 20] > 5 * np.delete(weights[3], [3, 20]).max()
