"""`tfx-jax bench` as a user meets it: one JSON object or one table, nothing else, and mistakes as one line."""

import json
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.cli.test_cli import EXPERIMENT, fails_with
from tests.flops import encoder_decoder, search
from tfx_jax.cli import main
from tfx_jax.cli.bench import as_text
from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.planning import measure, workloads
from tfx_jax.synthetic import grammar as toy_grammar

TOY = TransformerConfig(vocab_size=40, num_layers=1, d_model=16, num_heads=2, d_ff=24)
MEASURED = {
    "trace_seconds",
    "compile_seconds",
    "first_step_seconds",
    "median_step_seconds",
    "target_tokens_per_second",
    "flops_per_second",
    "matmul_peak_flops_per_second",
    "utilization",
    "peak_memory_bytes",
    "peak_memory_source",
    "steps",
    "dtype",
}
MACHINE = {"benchmark", "device", "devices", "cpu_cores", "jax_version"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A toy instead of every model, and small products beside it."""
    toys = {name: lambda **fields: TransformerConfig(**vars(TOY) | fields) for name in workloads.MODELS}
    monkeypatch.setattr(workloads, "MODELS", toys)
    monkeypatch.setattr(measure, "_PRODUCT_SIZES", (32,))


def bench(capfd, *arguments):
    """The JSON object that a measurement prints, alone on its line."""
    assert main(["bench", *arguments, "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert found.keys() >= MACHINE
    assert found["devices"] == jax.device_count()
    assert found["benchmark"] == arguments[0]
    return found


def work_without_a_program(target_tokens, flops):
    """Stands for what would compile; tokens and operations tell what was asked for."""
    return measure.Workload(
        run=lambda: time.sleep(1e-3),
        trace_seconds=1.0,
        compile_seconds=2.0,
        first_seconds=3.0,
        target_tokens=target_tokens,
        flops=flops,
        program_bytes=0,
        num_devices=1,
    )


def no_training(model, *, batch, length):
    return work_without_a_program(batch * length, encoder_decoder(model, batch, length, length))


@pytest.mark.parametrize("work", [no_training, pytest.param(workloads.training_workload, marks=pytest.mark.slow)])
def test_train(capfd, monkeypatch, work):
    monkeypatch.setattr(workloads, "training_workload", work)
    found = bench(capfd, "train", "--model=base", "--batch=8", "--length=5", "--steps=2", "--dtype=bfloat16")
    assert found.keys() >= MEASURED | {"model", "batch", "length"}
    assert {name: found[name] for name in ("model", "batch", "length", "steps", "dtype")} == {
        "model": "base",
        "batch": 8,
        "length": 5,
        "steps": 2,
        "dtype": "bfloat16",
    }
    assert found["target_tokens_per_second"] == pytest.approx(40 / found["median_step_seconds"])
    assert found["flops_per_second"] == pytest.approx(encoder_decoder(TOY, 8, 5, 5) / found["median_step_seconds"])
    assert found["utilization"] == pytest.approx(found["flops_per_second"] / found["matmul_peak_flops_per_second"])


@pytest.mark.slow
def test_a_step_is_measured_beside_its_prediction(capfd):
    found = bench(capfd, "step", f"--config={EXPERIMENT}:test", "--steps=1", "--config.model.vocab_size=100")
    assert found.keys() >= MEASURED - {"dtype"} | {"config", "predicted_memory_bytes"}
    assert found["predicted_step_seconds"] is None  # of a CPU
    assert found["prediction_is_bound"] is False
    assert found["target_tokens_per_second"] == pytest.approx(512 / found["median_step_seconds"])
    assert found["predicted_memory_bytes"] == pytest.approx(found["peak_memory_bytes"], rel=0.05)
    lines = {line[:30].strip(): line[31:] for line in as_text(found).splitlines()}
    assert lines["predicted step"] == "unknown"
    assert lines["median step"].endswith(" s")


def no_search(model, *, batch, beam_size, source_length, length, int8):
    return work_without_a_program(batch * length, search(model, batch, beam_size, source_length, length))


@pytest.mark.parametrize("work", [no_search, pytest.param(workloads.decoding_workload, marks=pytest.mark.slow)])
def test_decode(capfd, monkeypatch, work):
    monkeypatch.setattr(workloads, "decoding_workload", work)
    found = bench(capfd, "decode", "--batch=2", "--beam=3", "--source-length=4", "--length=6", "--steps=1")
    assert found.keys() >= MEASURED | {"model", "batch", "beam", "source_length", "length"}
    assert found["target_tokens_per_second"] == pytest.approx(12 / found["median_step_seconds"])
    assert found["flops_per_step"] == search(TOY, 2, 3, 4, 6)


@pytest.mark.parametrize("function", ["dense", "window"])
def test_attention(capfd, function):
    sizes = ("--length=64", "--batch=2", "--heads=2", "--head-size=8", "--steps=1")
    found = bench(capfd, "attention", f"--function={function}", *sizes, "--causal", "--forward")
    assert found.keys() >= MEASURED | {"function", "length", "batch", "heads", "head_size", "causal", "backward"}
    assert (found["causal"], found["backward"]) == (True, False)
    assert (found["flops_per_second"] is None) == (found["utilization"] is None) == (function == "window")


def test_data(capfd, tmp_path):
    pairs = toy_grammar.GrammarPairs("train", size=500)
    (tmp_path / "train.tsv").write_text("".join(f"{pair['source']}\t{pair['target']}\n" for pair in pairs))
    text = {"dataset": "files", "data_dir": tmp_path, "train_source": "train.tsv", "tokenizer": "words"}
    text |= {"source_language": "en", "target_language": "ja"}
    arguments = (
        "data",
        f"--config={EXPERIMENT}:test",
        "--steps=20",
        "--config.task.data.tokens_per_batch=512",
    ) + tuple(f"--config.task.data.{name}={value}" for name, value in text.items())
    found = bench(capfd, *arguments, f"--workdir={tmp_path}")
    assert found["config"] == f"{EXPERIMENT}:test"
    assert found["steps"] == 20
    assert found["target_tokens_per_second"] == pytest.approx(found["target_tokens"] / found["total_seconds"])
    assert 0 <= found["padding_share"] < 1
    assert 1 <= found["shapes"] <= 20
    assert found["largest_batch_positions"] <= 512
    again = bench(capfd, *arguments)  # the same tokenizer, trained again
    assert (again["target_tokens"], again["shapes"]) == (found["target_tokens"], found["shapes"])


def test_text_has_the_same_values_aligned(capfd):
    assert main(["bench", "attention", "--function=linear", "--length=64", "--steps=1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    names = {line[:30].strip() for line in lines}
    assert {"function", "trace", "median step", "target tokens per second", "utilization", "peak memory"} <= names
    assert all(line[30] == " " and line[31] != " " for line in lines)


def test_compilation_cache_is_off_meanwhile(tmp_path, capfd):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        bench(capfd, "attention", "--function=dense", "--length=4", "--forward", "--steps=1")
        assert not list(tmp_path.iterdir())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # whatever compiles how quickly
        jax.jit(lambda x: 3 * x + 1)(np.ones(7))
        assert list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "name what to measure: one of train, step, decode, attention, data"),
        (["speed"], "cannot measure 'speed'; use one of train"),
        (["train", "--model=huge"], "--model: invalid choice: 'huge'"),
        (["train", "--batch=0"], 'must be a whole number from 1 to 2,147,483,647, got "0"'),
        (["train", "--batch=12"], "batch=12 must be a multiple of the 8 devices"),
        (["train", "--rows=8"], "unknown argument --rows=8; see tfx-jax bench train --help"),
        (["train", "--dtype=float16"], "--dtype: invalid choice: 'float16'"),
        (["decode", "--beam=-1"], 'must be a whole number from 1 to 2,147,483,647, got "-1"'),
        (["attention"], "the following arguments are required: --function"),
        (["attention", "--function=lstm"], "--function: invalid choice: 'lstm'"),
        (["attention", "--function=splash"], "splash: implementation='splash' needs a TPU"),
        (["attention", "--function=cudnn"], "cudnn: implementation='cudnn' needs float16"),
        (["attention", "--function=bigbird", "--causal"], "bigbird: "),
        (["attention", "--function=dense", "--length=1048576"], "make batch, length or model smaller"),
        (["data"], "the following arguments are required: --config"),
        (["data", "--config=none.py"], "none.py does not exist"),
        (
            ["data", f"--config={EXPERIMENT}:test", "--config.task.data.sort_buffers=1"],
            "config has no field task.data.sort_buffers; did you mean config.task.data.sort_buffer?",
        ),
        (
            ["data", f"--config={EXPERIMENT}:test", "--config.task.data.max_length=0"],
            "config.task.data.max_length must be at",
        ),
    ],
)
def test_mistakes_are_one_line(capfd, arguments, named):
    line = fails_with(capfd, ["bench", *arguments])
    assert line.startswith("tfx-jax bench: ")
    assert named in line


def test_help_lists_what_can_be_measured(capfd):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["bench", "--help"])
    printed = capfd.readouterr().out
    assert all(kind in printed for kind in ("train:", "decode:", "attention:", "data:"))
