"""What a model keeps beside its parameters: centroids of routing attention, over an interrupted training and in use."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.training.configs import default_config
from tfx_jax.models.long_encoder import LongEncoderConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions
from tfx_jax.tasks.sequence.long_range import ListOpsData, LongRangeConfig
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import tiny_variant
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run


def config_of(num_steps):
    config = tiny_variant(default_config((LongEncoderConfig, LongRangeConfig, ListOpsData)))
    config.model.attention = AttentionConfig("routing", AttentionOptions(num_clusters=2, window=4, decay=0.9))
    config.mesh.data, config.num_steps, config.checkpoint_every = 1, num_steps, 2
    return config


def centroids_of(params):
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    (found,) = (leaf for name, leaf in named.items() if "centroids" in name)
    return np.asarray(found)


@pytest.mark.slow
def test_centroids_survive_an_interruption_bit_for_bit_and_rest_in_evaluation(tmp_path):
    config = config_of(4)
    train(config, tmp_path / "whole")
    train(dataclasses.replace(config, num_steps=2), tmp_path / "parts")
    train(config, tmp_path / "parts")
    whole, parts = (load_params(tmp_path / name, 4) for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    early, late = (centroids_of(load_params(tmp_path / "whole", step)) for step in (2, 4))
    assert np.abs(early - late).max() > 1e-3

    run = load_run(tmp_path / "whole")
    before = centroids_of(whole).copy()
    scores = [run.evaluate(whole).metrics for _ in range(2)]
    assert scores[0] == scores[1]
    np.testing.assert_array_equal(centroids_of(whole), before)
