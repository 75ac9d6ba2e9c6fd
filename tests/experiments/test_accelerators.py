"""What a lab note plans for an accelerator: it is a command that exists, and the training fits where it says."""

import ast
import dataclasses
import pathlib
import re

import jax
import pytest

from tfx_jax.cli.train import load_config_file
from tfx_jax.planning.plan import faster_settings, plan_training
from tfx_jax.planning.topologies import TOPOLOGIES
from tfx_jax.training.config import validate

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("*.py"))
ON_CPUS = {  # no variant of these needs more
    "captioning_shapes",
    "decomposable_sick",
    "elmo_wnut17",
    "esim_sick",
    "patch_pooling_shapes",
    "san_ctc_synthetic_speech",
    "seq2seq_demo",
    "seq2seq_enja",
    "seq2seq_multi30k",
    "seq2vec_cohort",
    "seq2vec_icu2012",
    "t5_text_to_text",
    "transformer_demo",
    "transformer_enja",
    "transformer_experts_multi30k",
    "transformer_tiny_multi30k",
}
OWN_SETTINGS = {  # float32, or a loop over the layers, on purpose
    "conformer_fsdd",  # 17 layers, with rematerialization
    "gpt_duplication",  # one layer, which is to be exact
    "llama_lora",  # 32 layers, which take long to compile one by one and gain little
    "lra_listops",  # compares attentions in float32, like the next four
    "lra_matching",
    "lra_text",
    "recall",
    "reformer_duplication",
}


def plans(path):
    """Each `tfx-jax plan` of a docstring: its configuration and its topology."""
    note = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").replace("\\\n", " ")
    for line in re.findall(r"^ +tfx-jax plan (.*)$", note, re.MULTILINE):
        name, topology, *overrides = line.split()
        assert name.startswith(f"--config={path.stem}:")
        yield load_config_file(f"{path}:{name.partition(':')[2]}", overrides), topology.removeprefix("--topology=")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_note_plans_what_it_has_for_an_accelerator(path):
    found = list(plans(path))
    assert len(found) == (0 if path.stem in ON_CPUS else 1)
    for config, topology in found:
        validate(config)
        assert topology in TOPOLOGIES
        assert config.model.vocab_size
        assert (faster_settings(config) is not None) == (path.stem in OWN_SETTINGS)


def test_larger_batches_of_a_pod_see_as_many_examples():
    big, pod = (load_config_file(f"{ROOT}/experiments/transformer_wmt14_ende.py:{name}") for name in ("big", "big-pod"))
    assert (pod.model.dtype, pod.model.unroll) == ("bfloat16", True)
    assert faster_settings(pod) is None
    for name in ("num_steps", "checkpoint_every"):
        assert 8 * getattr(pod, name) == getattr(big, name)
    assert pod.task.data.tokens_per_batch == 8 * big.task.data.tokens_per_batch
    assert dataclasses.replace(pod.model, dtype="float32", unroll=False) == big.model


@pytest.fixture
def least_effort():
    """Compiling takes a quarter of the time, and the program more memory: where that fits, the real one does."""
    names = ("jax_exec_time_optimization_effort", "jax_memory_fitting_effort")
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, -1.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in ON_CPUS], ids=lambda path: path.stem)
def test_it_fits_where_the_note_says(tpu_devices, least_effort, path):
    ((config, topology),) = plans(path)
    plan = plan_training(config, tpu_devices(topology))
    assert plan.fits, plan.error
    assert plan.predicted_step_seconds > 0
