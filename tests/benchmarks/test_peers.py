"""The harness on programs whose speeds are known, and the peer whose output tells whether it does the same work."""

import dataclasses
import functools
import io
import json
import time

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.peers import machine, measure, report, startup, worker
from benchmarks.peers.__main__ import main
from benchmarks.peers.measure import Result, Row, Side
from benchmarks.peers.rows import RECURRENCES, all_rows
from benchmarks.peers.sizes import DECODER_SIZES, RECURRENT_SIZES, SIZES, pairs
from tfx_jax.functional.attention import SPECS
from tfx_jax.models import GPTConfig
from tfx_jax.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tfx_jax.models.transformer import TransformerConfig
from tfx_jax.planning.workloads import MODELS, _sentences

ROW = Row("name", "title", "token", (Side("ours", "products:by_numpy"), Side("peer", "products:by_numpy", target=1.5)))


def _result(**changes):
    samples = {"ours": [[1.0, 2.0, 3.0], [4.0], [1.0]], "peer": [[2.0], [8.0], [6.0]]}
    result = Result(ROW, samples, {"ours": 10.0, "peer": 5.0}, {}, {}, {"ours": [0.1, 0.2], "peer": [0.3, 0.2]})
    return result._replace(**changes)


def test_a_ratio_is_taken_in_each_round_of_work_not_of_time():
    assert _result().ratios("peer") == [2.0, 4.0, 12.0]
    assert _result().fastest_ratio("peer") == 4.0


def test_the_table_says_what_was_met_and_what_was_skipped():
    text = report.table([_result(skipped={"other": "torch not installed"})])
    assert "| **4.00** | 2.00 to 12.00 | 4.00 | 20% | >= 1.5 met |" in text
    assert "- name, other: torch not installed" in text
    slower = _result(samples={"ours": [[4.0]], "peer": [[2.0]]})
    assert "| **1.00** | 1.00 to 1.00 | 1.00 | 20% | >= 1.5 **missed** |" in report.table([slower])


def test_a_page_has_one_section_for_each_machine():
    page = "# Speed\n\n## Measured\n\nBoth in turn.\n\n### Intel CPU, AVX-512\n\nold\n\n### Rows\n\nwords\n\n## End\n"
    both = report.with_section(page, "AMD CPU, AVX2", "first\n")
    assert both == page.replace("turn.\n\n", "turn.\n\n### AMD CPU, AVX2\n\nfirst\n\n")
    assert report.with_section(both, "AMD CPU, AVX2", "second") == both.replace("first", "second")
    assert report.with_section(page, "Intel CPU, AVX-512", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no section '## Measured'"):
        report.with_section("# Speed\n", "AMD CPU, AVX2", "first")


@pytest.mark.parametrize(("text", "message"), [(None, "is not a file"), ("# Speed\n", "has no section '## Measured'")])
def test_a_page_that_cannot_be_written_is_refused_before_the_measurement(tmp_path, capsys, text, message):
    page = tmp_path / "speed.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "peers"), "--page", str(page)])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()


def test_a_page_does_not_lose_rows_to_a_run_of_some(tmp_path, capsys):
    page = tmp_path / "speed.md"
    page.write_text("## Measured\n\n## End\n")
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "peers"), "--only=decode_base", "--page", str(page)])
    assert "leave --only out" in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor @ 2.60GHz
flags\t\t: fpu avx avx2 avx512f avx512_vnni amx_int8

processor\t: 1
"""


@pytest.mark.parametrize(
    ("cpuinfo", "make", "start"),
    [
        (CPUINFO, "Intel CPU, AVX-512", "Intel(R) Xeon(R) Processor @ 2.60GHz, AVX2, AVX-512, VNNI, AMX, "),
        ("vendor_id : AuthenticAMD\nmodel name : AMD EPYC\nflags : avx2\n", "AMD CPU, AVX2", "AMD EPYC, AVX2, "),
    ],
)
def test_the_machine_is_named(tmp_path, monkeypatch, cpuinfo, make, start):
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine.processor("cpu") == make
    assert machine.description().startswith(start)
    assert f"jax {jax.__version__}, flax " in machine.description()


def test_a_machine_without_linux_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert machine.processor("cpu").endswith(" CPU")
    assert "core" in machine.description()


def test_a_row_without_our_side_has_no_ratio(tmp_path):
    broken = _result(samples={"peer": []}, skipped={"ours": "out of memory"})
    assert "- name, ours: out of memory" in report.table([broken])
    assert report.as_json([broken])[0]["sides"][1]["ratios"] is None
    report.draw([broken, _result()], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size


def test_a_worker_runs_as_many_units_as_it_is_told_to():
    runs = []
    answers = io.StringIO()
    orders = io.StringIO('{"units": 1}\n{"units": 3}\n')
    worker.serve(worker.Workload(lambda: runs.append(1), 7, {"best": [1]}), orders, answers)
    ready, first, second = map(json.loads, answers.getvalue().splitlines())
    assert (ready["work"], ready["about"]) == (7, {"best": [1]})
    assert [len(answer["seconds"]) for answer in (first, second)] == [1, 3]
    assert len(runs) == 2 + (1 + 1) + (1 + 3)  # two to warm up, and one at the start of each turn


def test_from_processes_to_files(tmp_path, monkeypatch):
    small = {"options": {"size": 64}}
    sides = (
        dataclasses.replace(ROW.sides[0], **small),
        dataclasses.replace(ROW.sides[1], **small),
        Side("broken", "products:by_numpy", {"size": -1}),
        Side("absent", "products:by_numpy", needs=("no_such_package",)),
    )
    rows = [dataclasses.replace(ROW, sides=sides), dataclasses.replace(ROW, name="elsewhere", obstacle="no data")]
    monkeypatch.setattr("benchmarks.peers.__main__.all_rows", lambda *_: rows)
    monkeypatch.setattr(measure, "_PAUSE", 0)
    page = tmp_path / "speed.md"
    page.write_text("## Measured\n\n## End\n")
    main(["--output", str(tmp_path), "--rounds=3", "--turn-seconds=0", "--page", str(page)])
    found, other = json.loads((tmp_path / "peers.json").read_text())
    ours, peer, broken, absent = found["sides"]
    assert [len(side["seconds"]) for side in (ours, peer)] == [3, 3]
    assert ours["work"] == 2 * 64**3
    assert "negative dimensions" in broken["skipped"]
    assert absent["skipped"] == "no_such_package not installed"
    assert {side["skipped"] for side in other["sides"]} == {"no data"}
    text = (tmp_path / "peers.md").read_text()
    assert text.startswith(f"{machine.description()} 3 rounds.\n")
    assert text.count("\n| name ") == 1
    assert page.read_text() == f"## Measured\n\n### {machine.processor('cpu')}\n\n{text}\n## End\n"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_row_has_builders_that_exist(device, tmp_path):
    for row in all_rows(device, "", tmp_path):
        assert len(row.sides) > 1
        for side in row.sides:
            module, function = side.build.split(":")
            source = (tmp_path.__class__(measure.__file__).parent / f"{module}.py").read_text()
            assert f"def {function}(" in source or row.obstacle


def test_sides_are_given_what_ours_measures():
    for name in ("tiny", "base", "big"):
        assert TransformerConfig(**SIZES[name]._asdict()) == MODELS[name]()
    for seed, side in enumerate(pairs(97, 3, 5)):
        np.testing.assert_array_equal(side, _sentences(TransformerConfig(vocab_size=97), 3, 5, seed))


def test_phases_do_not_count_what_lies_in_another_twice():
    assert startup._union([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    clock = startup._Clock(time.monotonic())
    with clock.phase("checkpoint"):
        time.sleep(0.02)
        clock._spans["trace"].append((clock.now() - 0.02, clock.now()))
    phases = clock.finish()
    assert phases["trace"] >= 0.02 > phases["checkpoint"]


@pytest.mark.parity
@pytest.mark.compiles(40, "makes a model and decodes once")
def test_ctranslate2_finds_our_best_hypotheses():
    pytest.importorskip("ctranslate2")
    from benchmarks.peers import ours, translators

    sizes = {"model": "small", "rows": 5, "beam": 4, "source_length": 9, "length": 8}
    best = (ours.decoding(**sizes, dtype="float32").about or {})["best"]
    beams = (translators.ctranslate2(**sizes, compute_type="float32").about or {})["beams"]
    assert all(one in several for one, several in zip(best, beams, strict=True))


@pytest.mark.parity
@pytest.mark.parametrize("is_attending", [False, True])
def test_pytorchs_lstms_are_as_large_as_ours(is_attending):
    """But for the second offset of every cell."""
    pytest.importorskip("torch")
    from benchmarks.peers.torch_recurrent import RecurrentTranslator

    sizes = RECURRENT_SIZES["small"]
    theirs = RecurrentTranslator(sizes, is_attending=is_attending)
    found = sum(leaf.numel() for name, leaf in theirs.named_parameters() if "bias_hh" not in name)
    config = Seq2SeqConfig(**sizes._asdict(), variant="luong" if is_attending else "fixed")
    ours = jax.tree.leaves(nnx.eval_shape(lambda: Seq2Seq(config, rngs=nnx.Rngs(0))))
    assert found == sum(leaf.size for leaf in ours)


GATES = {"retention": (), "state_space_duality": ("dt",), "delta_rule": ("beta",)}
GATES |= dict.fromkeys(("gated_delta_rule", "kimi_delta"), ("beta", "dt"))


@pytest.mark.parity
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_of_pytorch_are_ours(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch

    from benchmarks.peers import torch_recurrences

    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 100, 2, 16)).astype(np.float32)
    want = torch_recurrences.FUNCTIONS[name](*map(torch.tensor, (query, key, value))).reshape(value.shape)
    spec, zeros = SPECS[name], np.zeros(2, np.float32)
    gates = {"beta": key[..., 1], "dt": key if name == "kimi_delta" else key[..., 0]}
    options = {gate: gates[gate] for gate in GATES[name]}
    if spec.parameters is not None:
        options |= {
            "log_rate_scale": zeros,
            "dt_bias": np.zeros((2, 16), np.float32) if options["dt"] is key else zeros,
        }
    if name == "retention":
        slopes = np.ravel(torch_recurrences._lightning(2, 16)["slope_rate"])
        options |= {"decay": np.exp(-slopes), "scale": 1.0}
    got = jax.jit(functools.partial(spec.function, **options))(query, key, value)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parity
def test_pytorchs_gpt_is_as_large_as_ours():
    pytest.importorskip("torch")
    from benchmarks.peers.torch_gpt import GPT

    sizes = DECODER_SIZES["gpt2_small"]
    config = GPTConfig(**sizes._asdict())
    ours = jax.tree.leaves(nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0))))
    assert sum(leaf.numel() for leaf in GPT(sizes).parameters()) == sum(leaf.size for leaf in ours)


@pytest.mark.parity
@pytest.mark.parametrize("model", ["gpt2_small", "llama_small"])
def test_transformers_generate_the_same_tokens(tmp_path, model):
    pytest.importorskip("transformers")
    from benchmarks.peers import pretrained

    sizes = {"folder": str(tmp_path / model), "model": model, "rows": 3, "prompt_length": 5, "length": 7}
    ours = (pretrained.generate(**sizes, dtype="float32").about or {})["best"]
    theirs = (pretrained.generate_by_transformers(**sizes, dtype="float32", device="cpu").about or {})["beams"]
    assert [[tokens] for tokens in ours] == theirs
