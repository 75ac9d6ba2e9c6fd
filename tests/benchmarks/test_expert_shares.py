"""Which experts get what, of a model that is trained here for a step: its groups are the first words of sentences."""

import jax
import numpy as np
import pytest

from benchmarks import expert_shares
from tfx_jax.models import TransformerConfig
from tfx_jax.nn import ExpertsConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.checkpoint.checkpoints import load_best_params
from tfx_jax.training.config import ExperimentConfig, tiny_variant
from tfx_jax.training.loop import train


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """A training with experts and one without."""
    root = tmp_path_factory.mktemp("trained")
    words = {"x": ("four", "five", "six"), "y": ("seven", "eight", "nine")}
    pairs = [f"{group} {word} {word}\tone {word}" for group in words for word in words[group]]
    (root / "pairs.tsv").write_text("\n".join(pairs * 10))
    for name, num_experts in (("sparse", 3), ("dense", 0)):
        config = tiny_variant(ExperimentConfig(TransformerConfig(), TranslationConfig()))
        data = config.task.data
        data.dataset, data.data_dir, data.tokenizer = "files", str(root), "words"
        data.train_source = data.validation_source = "pairs.tsv"
        data.source_language, data.target_language, data.max_length = "en", "de", 8
        config.model.num_layers, config.model.experts = 4, ExpertsConfig(num_experts=num_experts)
        config.num_steps = config.checkpoint_every = config.eval_every = config.mesh.data = 1
        train(config, root / name)
    return root


@pytest.mark.nightly
def test_every_mixture_and_group_has_shares_of_its_own(workdirs, monkeypatch):
    """A router without weights sends all tokens to the first expert: the mixture whose router that is, and no other."""
    shares = expert_shares.expert_shares(str(workdirs / "sparse"))
    assert sorted(shares) == [f"{side} layer {number}" for side in ("decoder", "encoder") for number in (2, 4)]
    params = jax.tree.map(np.array, load_best_params(workdirs / "sparse"))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    (router,) = (leaf for name, leaf in leaves.items() if "encoder_layers" in name and "router" in name)
    router[1] = 0
    monkeypatch.setattr(expert_shares, "load_best_params", lambda workdir: params)
    changed = expert_shares.expert_shares(str(workdirs / "sparse"))
    for group in ("x", "y"):
        for groups in shares.values():
            assert list(groups) == ["x", "y"]
            np.testing.assert_allclose(groups[group].sum(), 1)
        np.testing.assert_array_equal(changed["encoder layer 4"][group], [1, 0, 0])
        np.testing.assert_array_equal(changed["encoder layer 2"][group], shares["encoder layer 2"][group])


@pytest.mark.nightly
def test_refuses_a_model_without_experts(workdirs, capsys):
    with pytest.raises(SystemExit) as caught:
        expert_shares.main([f"--workdir={workdirs / 'dense'}"])
    assert caught.value.code == 2
    assert "holds no model with experts: config.model.experts.num_experts is 0" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_group_and_their_distance():
    shares = {"decoder layer 2": {"x": np.array([0.5, 0.5]), "y": np.array([0.1, 0.9]), "z": np.array([0.5, 0.5])}}
    assert expert_shares.table(shares).splitlines() == [
        "| mixture | group | 1 | 2 | distance |",
        "|---|---|---|---|---|",
        "| decoder layer 2 | x | 50 | 50 | 27 |",
        "| decoder layer 2 | y | 10 | 90 | 27 |",
        "| decoder layer 2 | z | 50 | 50 | 27 |",
    ]
