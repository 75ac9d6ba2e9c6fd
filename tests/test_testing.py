"""The conformance kit: right functions pass, and a function with one known defect fails just the cases about it."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tfx_jax.cli import VERBS, main
from tfx_jax.functional import chunked_attention, dot_product_attention
from tfx_jax.testing import CASES, check_attention, summarize

QUICK = ["shape: grouped queries", "mask: padding on the left", "gradients: causal", "numbers: bfloat16 within 2^-7"]


def outcomes(function, cases=None):
    return {check.case: check.outcome for check in check_attention(function, cases=cases)}


def test_our_attention_passes_a_few_cases():
    assert set(outcomes(dot_product_attention, QUICK).values()) == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("function", [dot_product_attention, chunked_attention])
@pytest.mark.compiles(200, "each of the 94 cases has its own program")
def test_our_attention_passes_all_cases(function):
    found = outcomes(function)
    assert list(found) == list(CASES)
    assert len(CASES) >= 60
    missing = {name for name, outcome in found.items() if outcome != "passed"}
    # `chunked_attention` defines its derivative, for reverse mode.
    assert missing == ({"gradients: forward mode equals reverse mode"} if function is chunked_attention else set())


def _without_scale(query, key, value, **options):
    return dot_product_attention(query, key, value, scale=1.0, **options)


def _mask_upside_down(query, key, value, mask=None):
    return dot_product_attention(query, key, value, mask=None if mask is None else ~mask)


def _no_zero_division(query, key, value, mask=None):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.sqrt(query.shape[-1])
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    return jnp.einsum("bnts,bsnu->btnu", jax.nn.softmax(logits), value)


def _unstable(query, key, value):
    weights = jnp.exp(jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.sqrt(query.shape[-1]))
    return jnp.einsum("bnts,bsnu->btnu", weights / weights.sum(axis=-1, keepdims=True), value)


def _wrong_gradient(query, key, value):
    return dot_product_attention(query, jax.lax.stop_gradient(key), value)


def _mixed_heads(query, key, value):
    groups = query.shape[2] // key.shape[2]
    return dot_product_attention(query, jnp.tile(key, (1, 1, groups, 1)), jnp.tile(value, (1, 1, groups, 1)))


def _low_precision(query, key, value):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    total, _ = jax.lax.scan(
        lambda total, weight: (total + weight, None), 0 * weights[..., 0], jnp.moveaxis(weights, -1, 0)
    )
    return jnp.einsum("bnts,bsnu->btnu", weights / total[..., None], value)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (_without_scale, ["shape: self-attention"]),
        (_mask_upside_down, ["mask: padding on the right", "mask: of all pairs and heads"]),
        (_no_zero_division, ["mask: a query that sees nothing is finite"]),
        (_unstable, ["numbers: logits of 1e4 do not overflow"]),
        (_wrong_gradient, ["gradients: by the key"]),
        (_mixed_heads, ["shape: grouped queries"]),
        (_low_precision, ["numbers: the softmax of bfloat16 is in float32"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_defect_is_found(function, wrong):
    found = outcomes(function, [*wrong, "shape: one key"])
    assert {name for name, outcome in found.items() if outcome == "wrong"} == set(wrong)


def test_a_function_without_an_option_is_not_blamed():
    checks = check_attention(_unstable, cases=["bias: gradient", "options: sinks"])
    assert [check.outcome for check in checks] == ["unsupported", "unsupported"]
    assert summarize(checks).splitlines()[-1] == "2 cases: 0 passed, 0 refused, 2 unsupported, 0 wrong"


def test_the_summary_says_which_convention_a_function_has():
    def aligned_at_the_first_key(query, key, value, is_causal=False):
        mask = jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None] if is_causal else None
        return dot_product_attention(query, key, value, mask=mask)

    cases = ["causal: fewer queries than keys"]
    for function, where in (
        (dot_product_attention, "the last query is at the last key"),
        (aligned_at_the_first_key, "the first query is at the first key"),
    ):
        line, counts = summarize(check_attention(function, cases=cases)).splitlines()
        assert line.startswith(f"passed       {cases[0]}: {where}")
        assert counts.startswith("1 case: 1 passed")


def test_progress_is_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["check-attention", "tfx_jax.functional.dot_product_attention", "--case=shape: one key"]) == 0
    assert capsys.readouterr().err == "\r\x1b[K1/1 shape: one key\r\x1b[K"


FUNCTIONS_ONLY = """
import importlib.abc, sys

class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

PACKAGES = set(sys.argv[1].split(","))
sys.meta_path.insert(0, NotInstalled())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in PACKAGES else find_spec(name, package)
from tfx_jax import cli
for verb in cli.VERBS:
    print(cli.main([verb, "x"] if verb != "check-attention" else ["--version"]), file=sys.stderr)
print(cli.main(["check-attention", "jax.nn.dot_product_attention", "--case=shape: one key"]))
"""


@pytest.mark.slow
def test_with_jax_and_jaxtyping_only_each_verb_is_one_line():
    """But this one works, as does what says the version."""
    packages = (
        "absl,etils,flax,fsspec,grain,huggingface_hub,matplotlib,ml_collections,optax,orbax,PIL,yaml,rich,sacrebleu,"
        "sacremoses,safetensors,sentencepiece,shtab,tensorboardX,tokenizers"
    )
    done = subprocess.run([sys.executable, "-c", FUNCTIONS_ONLY, packages], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version, *rest = done.stdout.splitlines()
    assert version.startswith("tfx-jax ")
    assert rest == ["1 case: 1 passed, 0 refused, 0 unsupported, 0 wrong", "0"]
    lines = done.stderr.splitlines()
    assert lines.pop(2 * list(VERBS).index("check-attention")) == "0"
    for verb, line, status in zip([v for v in VERBS if v != "check-attention"], lines[::2], lines[1::2], strict=True):
        assert status == "2"
        if verb != "experiments":  # which lists them without an import
            assert line.startswith(f"tfx-jax {verb}: needs the package ")
            assert line.endswith('pip install "tfx-jax @ git+https://github.com/tfx-jax/tfx-jax"')


def test_cases_have_to_exist():
    with pytest.raises(ValueError, match="there is no case 'shape'"):
        check_attention(dot_product_attention, cases=["shape"])


def test_the_command_checks_a_function_of_the_current_folder(tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.py").write_text(
        "import tfx_jax.functional as F\n"
        "def attend(query, key, value):\n    return 2 * F.dot_product_attention(query, key, value)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-attention", "mine.attend", "--case=shape: one key", "--json"]) == 1
    (check,) = json.loads(capfd.readouterr().out)
    assert (check["case"], check["outcome"]) == ("shape: one key", "wrong")
    assert main(["check-attention", "tfx_jax.functional.dot_product_attention", "--case=shape: one key"]) == 0
    assert capfd.readouterr().out == "1 case: 1 passed, 0 refused, 0 unsupported, 0 wrong\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attend"], "write MODULE.FUNCTION, such as jax.nn.dot_product_attention, instead of 'attend'"),
        (["no.such"], "cannot import no: No module named 'no'"),
        (["jax.nn.no_such"], "jax.nn has no function 'no_such'"),
        (["jax.nn.relu", "--case=x"], "unknown case 'x'; names begin with shape, scale, mask, bias, "),
        (
            ["jax.nn.relu", "--case=grouped"],
            "unknown case 'grouped'; did you mean 'shape: grouped queries' or 'causal: ",
        ),
        (
            ["jax.nn.relu", "--case=mask: one visibel key"],
            "unknown case 'mask: one visibel key'; did you mean 'mask: one ",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_line(arguments, message, capfd):
    assert main(["check-attention", *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"tfx-jax check-attention: {message}")
