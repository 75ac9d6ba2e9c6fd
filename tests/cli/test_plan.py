"""`tfx-jax plan` on simulated devices: what it prints, what it refuses, how it ends."""

import json
import re

import pytest

from tfx_jax.cli import main
from tfx_jax.cli import plan as verb
from tfx_jax.planning import plan as planning
from tfx_jax.planning.chips import CHIPS

DEMO = ["plan", "--config=transformer_demo:test", "--topology=cpu:8", "--config.model.vocab_size=100"]


def test_says_what_a_person_asks_first(capsys):
    assert main(DEMO) == 0
    captured = capsys.readouterr()
    assert captured.err == "compiling transformer_demo:test for cpu:8, seconds to minutes\n"
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines] == ["devices", "model", "memory", "exchanges"]
    assert lines[0].startswith("devices      8 x cpu, data 8; 1 host")
    assert "fits: " in lines[2]
    assert "all-reduce" in lines[3]


def test_a_bound_is_called_one(capsys, monkeypatch):
    """As for GPUs: nothing but published speeds."""
    monkeypatch.setitem(CHIPS, "cpu", CHIPS["NVIDIA H100 80GB HBM3"])
    assert main(DEMO) == 0
    *_, bound, prediction, duration = capsys.readouterr().out.splitlines()
    assert re.match(r"run          at least [\d,.]+ h for \d+ steps, [\d,.]+ device-hours$", duration)
    assert bound.startswith("bound        ")
    assert re.match(r"prediction   at least \d+\.\d\d ms a step, at most [\d,]+ tokens/s$", prediction)


def test_a_guess_is_called_one():
    seconds = {"memory": 1e-3, "network": 0.0, "compute": 1e-3, "cycles": 2e-3, "kernels": 3e-3}
    plan = planning.Plan({}, 1, "TPU v5 lite", 1, {"x": (1, 1)}, (1, 1), fits=True, tokens=1, seconds=seconds)
    *_, bound, prediction = verb.described(plan)
    assert bound.endswith("kernels 3.00 ms; custom kernels are estimated at half the peak)")
    assert prediction.startswith("prediction   5.00 ms a step")


def test_json_is_one_object(capsys):
    assert main([*DEMO, "--json", "--config.mesh.fsdp=2", "--price=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {
        "compiles",
        "fits",
        "memory_bytes",
        "peak_bytes",
        "collectives",
        "predicted_step_seconds",
        "predicted_mfu",
    }
    assert wanted <= found.keys()
    assert found["compiles"] is found["fits"] is True
    assert found["mesh"] == {"data": 4, "fsdp": 2}
    assert all(kind.keys() == {"count", "bytes"} for kind in found["collectives"].values())
    assert found["cost"] is None  # without a prediction
    assert found["is_bound"] is False


class TestFaster:
    """Settings that would be faster, on a TPU whose programs are known."""

    @pytest.fixture(autouse=True)
    def _predicted(self, monkeypatch):
        """A step takes 100 ms, in bfloat16 60, and 30 less if layers are unrolled."""

        def plan_training(config, devices, **options):
            cycles = (0.06 if config.model.dtype == "bfloat16" else 0.1) - 0.03 * config.model.unroll
            seconds = {"memory": 0.0, "network": 0.0, "compute": 0.0, "cycles": cycles}
            sizes = {"model_flops": self.flops, "tokens": 1, "memory_bytes": 2**30}
            return planning.Plan({}, 1, self.kind, 1, {"x": (1, 1)}, (1, 1), fits=True, seconds=seconds, **sizes)

        self.kind, self.flops = "TPU v5 lite", 1e12
        monkeypatch.setattr(verb, "plan_training", plan_training)

    def test_are_named_with_their_gain(self, capsys):
        assert main(DEMO) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        flags = "--config.model.dtype=bfloat16 --config.model.unroll=True"
        assert last == f"faster       3.33 times, 30.00 ms a step, with {flags}"
        assert main([*DEMO, "--config.model.dtype=bfloat16"]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "faster       2.00 times, 30.00 ms a step, with --config.model.unroll=True"

    @pytest.mark.parametrize(
        ("kind", "flops", "flags"),
        [
            ("TPU v5 lite", 1e13, []),  # 51 % of the peak
            ("NVIDIA H200", 1e12, ["--config.model.unroll=True", "--config.model.dtype=bfloat16"]),
            ("cpu", 1e12, []),  # no known peak
        ],
    )
    def test_are_not_looked_for_where_they_cannot_be_told(self, capsys, kind, flops, flags):
        self.kind, self.flops = kind, flops
        assert main([*DEMO, *flags]) == 0
        assert "faster " not in capsys.readouterr().out

    def test_a_model_without_these_options_has_none(self):
        config = verb.load_config_file("transformer_demo:test", [])
        config.model = type("Model", (), {})()
        assert planning.faster_settings(config) is None


@pytest.mark.slow
def test_a_search_ranks_what_fits(capsys, monkeypatch):
    few = dict(list(planning.variants(verb.load_config_file("transformer_demo:test", []), 8))[:2])
    monkeypatch.setattr(verb, "variants", lambda *_: few.items())
    assert main([*DEMO, "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranked"]
    assert {plan["flags"] for plan in (*found["ranked"], *found["refused"])} == few.keys()
    peaks = [plan["peak_bytes"] for plan in found["ranked"]]
    assert peaks == sorted(peaks)


class TestTooLarge:
    """A program that does not fit until its layers are computed again."""

    @pytest.fixture(autouse=True)
    def _too_large(self, monkeypatch):
        original = planning.plan_training

        def plan_training(config, devices, **options):
            plan = original(config, devices, **options)
            if config.model.remat == "none":
                plan.fits, plan.memory_bytes, plan.error = False, 1000, "needs more"
            return plan

        monkeypatch.setattr(verb, "plan_training", plan_training)

    @pytest.mark.slow
    def test_names_what_would_fit_and_ends_with_one(self, capsys):
        assert main(DEMO) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2] == "does not fit needs more"
        assert lines[-1] == "would fit    --config.model.remat=full"

    @pytest.mark.slow
    def test_json_says_the_same(self, capsys):
        assert main([*DEMO, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert (found["compiles"], found["fits"]) == (True, False)
        assert found["remedy"] == "--config.model.remat=full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v5e-8"], "unknown topology v5e-8: the shape of that TPU type is v5e:2x4"),
        (["--topology=v5p-16"], "unknown topology v5p-16: the shape of that TPU type is v5p:2x2x2"),
        (["--topology=v5e:3x5"], "unknown topology v5e:3x5: use one of v4:2x2x1"),
        (["--topology=h100:8"], "unknown topology h100:8: GPU topologies (h100, h200) are slices x nodes x GPUs"),
        (["--topology=cpu:none"], "--topology=cpu:none: simulated devices have the form cpu:N"),
        (["--topology=cpu:8", "--slices=2"], "--topology=cpu:8 has no slices: leave --slices=2 out"),
        (["--topology=cpu:8", "--price=much"], '"much" is not a price'),
        (["--topology=cpu:8", "--config.mesh.data=16"], "does not fit 8 devices"),
        (["--topology=cpu:9"], "already started in this process with 8 devices, but the plan simulates 9"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert main([*DEMO[:2], "--config.model.vocab_size=100", *arguments]) == 2
    written = capsys.readouterr().err
    assert message in written
    assert written.count("\n") == 1
