"""Fine-tuning with low-rank adapters and frozen parameters: what is trained, kept, resumed and exported."""

import dataclasses
import json
import shutil

import chex
import huggingface_hub
import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from tests.nn.programs import jitted
from tests.tiers import slow_but
from tfx_jax.cli import main
from tfx_jax.errors import UserError
from tfx_jax.models import BertConfig, GPTConfig, LlamaConfig, hf
from tfx_jax.nn import Frozen, LoraConfig, merged
from tfx_jax.nn.lora import merge_params
from tfx_jax.tasks import ClassificationConfig, LanguageModelConfig
from tfx_jax.training.checkpoint.checkpoints import average_checkpoints, load_params, saved_checksums
from tfx_jax.training.config import ExperimentConfig, load_config, tiny_variant, validate
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run, make_model, make_run

MODELS = {
    "GPT": (GPTConfig, LanguageModelConfig),
    "Llama": (LlamaConfig, LanguageModelConfig),
    "Bert": (BertConfig, ClassificationConfig),
}


def tiny_config(name):
    model, task = MODELS[name]
    config = tiny_variant(ExperimentConfig(model=model(), task=task()))
    config.mesh.data = 1
    config.optimizer.peak_learning_rate, config.optimizer.warmup_steps = 0.01, 1
    config.num_steps = config.checkpoint_every = 1
    return config


def made(config, workdir):
    """Makes the model of a configuration with the same new tokenizer, whatever model it starts from."""
    config = validate(config)
    task = make_run(dataclasses.replace(config, init_from=""), workdir).task
    return nnx.eval_shape(lambda: make_model(config, task))


def flat(params):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


@pytest.fixture(scope="module", params=slow_but(MODELS, "GPT"))
def base(request, tmp_path_factory):
    """A pretrained model: its configuration, and a Hugging Face folder of it, or for a classifier the workdir."""
    config, folder = tiny_config(request.param), tmp_path_factory.mktemp(request.param)
    train(config, folder / "work")
    if request.param == "Bert":
        return config, folder / "work"
    assert main(["convert", f"--workdir={folder}/work", f"--output={folder}/hf"]) == 0
    return config, folder / "hf"


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A fine-tuning of four steps, in one go and in two, with a moving average or that of its optimizer."""
    config, source = base
    is_llama, uses_dora = isinstance(config.model, LlamaConfig), isinstance(config.model, GPTConfig)
    changes = {"name": "schedule_free", "schedule": "constant"} if is_llama else {"ema_decay": 0.9}
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **changes))
    folder = tmp_path_factory.mktemp("tuned")
    lora = LoraConfig(3, 6.0, "query|value|up", uses_dora)
    config = dataclasses.replace(config, init_from=str(source), lora=lora)
    for name, stops in (("once", (4,)), ("twice", (2, 4))):
        for config.num_steps in stops:
            train(config, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.compiles(60, "trainings of two models")
def test_only_adapters_and_heads_are_trained_and_a_resumed_run_is_the_same(base, tuned):
    once, twice = (flat(load_params(tuned / name)) for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    for name, leaf in once.items():
        np.testing.assert_array_equal(leaf, twice[name])
    checksums = [saved_checksums(tuned / name, 4) for name in ("once", "twice")]
    for part in ("params", "ema", "rest"):  # the metadata of "twice" have an evaluation more
        assert checksums[0][part] == checksums[1][part]
    config, source = base
    before = load_params(source) if config.model.kind == "bert" else nnx.to_pure_dict(nnx.state(hf.load(source)))
    before = flat(before)
    assert before.keys() < once.keys()
    new = once.keys() - before.keys()
    assert all("_adapter" in name for name in new)
    assert any("self_attention" in name for name in new)
    assert any("feed_forward" in name for name in new)
    for name in new:
        assert np.abs(once[name]).max() > 0  # B too, which starts with zeros
    for name, leaf in before.items():
        is_head = config.model.kind == "bert" and not name.startswith("['bert']")
        assert (np.abs(once[name] - leaf).max() > 0) == is_head
    num_trained = sum(once[name].size for name in new)
    if config.model.kind != "bert":  # which has heads, and state that is no parameter
        num_params = sum(leaf.size for leaf in once.values())
        assert f"{num_params:,}, {num_trained:,} trained" in (tuned / "once" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.compiles(60, "two models, each alone and merged")
def test_exported_adapters_are_the_model_that_was_trained(base, tuned, tmp_path, capfd):
    config, source = base
    workdir = tuned / "once"
    if config.model.kind == "bert":
        for flags, message in (([], "starts from the workdir"), (["--dtype=bfloat16"], "--adapter writes float32")):
            assert main(["convert", f"--workdir={workdir}", f"--output={tmp_path}/a", "--adapter", *flags]) == 2
            assert message.removeprefix("starts from ") in capfd.readouterr().err
        return
    run = load_run(workdir)
    model = nnx.merge(run.graphdef, jax.device_put(load_params(workdir)))
    tokens = np.arange(20).reshape(2, 10) % run.task.tokenizer.vocab_size
    score = jitted(lambda model: model(tokens))
    want = score(model)
    assert np.abs(want - score(hf.load(source))).max() > 1e-3
    assert main(["convert", f"--workdir={workdir}", f"--output={tmp_path}/merged", "--step=latest"]) == 0

    @jitted
    def decoded(model):
        decoder = model.decoder()
        cache, last = decoder.init_cache(decoder.encode(tokens[:, :4]), max_length=1)
        return decoder.step(last, cache)[0]

    np.testing.assert_allclose(decoded(model), want[:, 3], atol=1e-5)
    arguments = ["convert", f"--workdir={workdir}", f"--output={tmp_path}/adapter", "--adapter", "--step=latest"]
    capfd.readouterr()
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["base"] == str(source)
    assert not (tmp_path / "adapter" / "config.json").exists()
    card = huggingface_hub.ModelCard.load(tmp_path / "adapter" / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", None)  # of a local folder
    assert "## Evaluations on the validation split" in card.text
    for other in (merged(model), hf.load(tmp_path / "merged"), hf.load(tmp_path / "adapter")):
        assert not jax.tree.leaves(nnx.state(other, Frozen))
        np.testing.assert_allclose(score(other), want, atol=1e-5 * np.abs(want).max())
    assert main(arguments) == 2
    assert "already contains" in capfd.readouterr().err
    assert main(["convert", f"--model={tmp_path}/adapter", f"--output={tmp_path}/again"]) == 0
    np.testing.assert_allclose(score(hf.load(tmp_path / "again")), want, atol=1e-5 * np.abs(want).max())
    over = ["convert", f"--workdir={workdir}", f"--output={tmp_path}/merged", "--step=latest", "--overwrite"]
    for flags in (["--adapter"], []):
        assert main([*over, *flags]) == 0
        assert hf.is_adapter(tmp_path / "merged") == bool(flags)
        assert (tmp_path / "merged" / "adapter_config.json").exists() == bool(flags)
        np.testing.assert_allclose(score(hf.load(tmp_path / "merged")), want, atol=1e-5 * np.abs(want).max())
    assert "Adapters, merged into their model" in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.compiles(20, "a training that learns nothing")
def test_dora_starts_as_the_model_that_it_adapts(base, tmp_path):
    config, source = base
    lora = LoraConfig(3, 6.0, "query|value|up", use_dora=True)
    config = dataclasses.replace(config, init_from=str(source), lora=lora)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=0.0))
    train(config, tmp_path)
    params = load_params(tmp_path)
    model_params = flat(merge_params(params, lora))
    before = load_params(source) if config.model.kind == "bert" else nnx.to_pure_dict(nnx.state(hf.load(source)))
    assert any(name.endswith("['magnitude']") for name in flat(params))
    for name, leaf in flat(before).items():
        np.testing.assert_allclose(model_params[name], leaf, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora": LoraConfig(2)}, r"^config\.lora\.rank needs config\.init_from: adapters modify"),
        (
            {"lora": LoraConfig(2, targets="x"), "init_from": "."},
            r"^config\.lora\.targets='x' matches none of the matrices, such as",
        ),
        ({"lora": LoraConfig(2, targets="("), "init_from": "."}, r"^config\.lora\.targets='\(' is not a regular"),
        ({"lora": LoraConfig(-1)}, r"^config\.lora\.rank must be at least 0, got -1"),
        ({"frozen": "nothing"}, r"^config\.frozen='nothing' matches none of the parameters, such as decoder_layers"),
        ({"frozen": "."}, r"^config\.frozen='\.' leaves no parameter to learn"),
    ],
)
def test_mistakes_are_one_line(values, message, tmp_path):
    config = dataclasses.replace(tiny_config("GPT"), **values)
    with pytest.raises(UserError, match=message) as raised:
        made(config, tmp_path)
    assert "\n" not in str(raised.value)


def test_frozen_parameters_are_no_parameters_of_the_optimizer(tmp_path):
    config = dataclasses.replace(tiny_config("GPT"), frozen="embedding|positions")
    model = made(config, tmp_path)
    frozen = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, Frozen))}
    assert frozen == {"embedding/table", "positions/table"}


@pytest.mark.slow
@pytest.mark.compiles(10, "merging adapters of a workdir")
def test_checkpoints_hold_adapters_alone_and_need_the_unchanged_model(base, tuned, tmp_path):
    config, source = base
    workdir, moved = tmp_path / "work", tmp_path / "moved"
    shutil.copytree(tuned / "once", workdir)
    shutil.copytree(source, moved)
    whole = load_params(workdir)
    paths = {path for path in flat(whole) if path.startswith("['bert']") or config.model.kind != "bert"}
    frozen = {path for path in paths if "_adapter" not in path}
    with ocp.training.Checkpointer(workdir / "checkpoints") as checkpointer:
        stored = checkpointer.checkpointables_metadata(4).metadata
    assert stored.keys() == {"params", "ema", "rest"}
    assert flat(stored["ema"]).keys() == flat(stored["params"]).keys()
    assert flat(stored["params"]).keys() == flat(whole).keys() - frozen
    average_checkpoints(workdir, 1)
    chex.assert_trees_all_equal(load_params(workdir, "average"), whole)

    values = json.loads((workdir / "config.json").read_text())
    del values["sha256"]
    (workdir / "config.json").write_text(json.dumps(values | {"init_from": str(moved)}))
    chex.assert_trees_all_equal(load_params(workdir), whole)
    if config.model.kind == "bert":
        return
    model = hf.load(moved)
    hf.save(jax.tree.map(lambda leaf: leaf * 2, model), moved)
    resumed = dataclasses.replace(load_config(workdir), num_steps=5)
    chex.assert_trees_all_equal(load_params(workdir), whole)  # of the model where it was
    hidden = source.rename(source.with_name("hidden"))
    try:
        for read in (
            load_params,
            lambda workdir: average_checkpoints(workdir, 1),
            lambda workdir: train(resumed, workdir),
        ):
            with pytest.raises(UserError, match=r"moved has changed since the run in .*work started from it, and"):
                read(workdir)
        (moved / "model.safetensors").unlink()
        with pytest.raises(
            UserError, match=r"do not contain the frozen parameters of .*moved, which cannot be read \(.*\); "
        ):
            load_params(workdir)
    finally:
        hidden.rename(source)
