"""The comparison of folders of transformers: one of each kind of input, one that is refused, and a wrong model."""

import numpy as np
import pytest

from benchmarks import hf_folders
from benchmarks.hf_folders import compare
from tfx_jax.models import GPT

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
# Cells of the table that say that something was compared.
COMPARED = {
    "BertModel": {"logits", "left", "right", "round_trip"},
    "CLIPModel": {"logits", "round_trip"},
    "WhisperForConditionalGeneration": {"logits", "greedy", "beam", "round_trip"},
    "MBartForConditionalGeneration": {"logits", "left", "right", "greedy", "beam", "round_trip"},
    "GPT2LMHeadModel": {"logits", "left", "right", "greedy", "beam", "round_trip"},
}


@pytest.fixture(autouse=True)
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("architecture", COMPARED)
def test_what_is_compared(architecture):
    row = compare(architecture)
    assert row.verdict == "equal", row
    cells = {"logits", "left", "right", "greedy", "beam", "round_trip"}
    assert {name for name in cells if getattr(row, name) != "-"} == COMPARED[architecture]
    assert all(float(getattr(row, name)) <= 1e-4 for name in COMPARED[architecture] & {"logits", "left", "right"})


def test_not_a_number_is_no_small_error():
    assert max(hf_folders.largest_error(np.array([got]), np.ones(1)) for got in (1.0, np.nan)) == np.inf


def test_what_is_refused(capfd):
    hf_folders.main(["OPTForCausalLM", "NoSuchModel"])
    lines = capfd.readouterr().out.splitlines()
    assert "the architecture ['OPTForCausalLM'] is not supported |" in lines[2]
    assert lines[3].startswith("| NoSuchModel | not made |")
    assert lines[-1] == "0 of 2 load and agree: 1 refused, 1 not made"


def test_a_wrong_model_is_found(monkeypatch):
    embed = GPT.embed
    monkeypatch.setattr(GPT, "embed", lambda *args, **options: -embed(*args, **options))
    row = compare("GPT2LMHeadModel")
    assert (row.verdict, row.greedy, row.round_trip) == ("different", "different", "equal")
    assert min(float(row.logits), float(row.left), float(row.right)) > 1e-4
