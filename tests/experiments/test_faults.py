"""The fault campaign, one fault of each kind; the long version is `experiments/benchmarks/faults.py` itself."""

import numpy as np
import pytest

from experiments.benchmarks import faults


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return faults.Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
def test_training_survives(bench, fault):
    outcomes = []
    while not outcomes or outcomes[-1].outcome == "missed":
        assert len(outcomes) < 5, "the moment for the fault never came"
        outcomes.append(faults.suffer(bench, fault, (0, len(outcomes))))
    assert outcomes[-1].outcome in ("identical", "one line, then identical"), outcomes[-1]


@pytest.mark.slow
def test_a_difference_is_noticed(bench, tmp_path):
    """The instrument itself: another seed, and a checkpoint that is gone, are failures."""
    reference = bench.reference()
    with pytest.raises(faults.Failed, match=r"checkpoints \[5, .*40\] are gone"):
        bench.check(tmp_path, set(), 1)
    other = tmp_path / "other"
    training = faults.Training(faults.Bench(bench.output, {"seed": 1}), other)
    assert training.statuses() == [0]
    with pytest.raises(faults.Failed, match="step 5 differs from that of the uninterrupted run"):
        bench.check(other, set(), 1)
    bench.check(reference, set(), 1)


def test_table_counts_by_fault_and_outcome():
    outcomes = [
        faults.Outcome("SIGTERM", "identical", "", 2.0, 1.0),
        faults.Outcome("SIGTERM", "identical", "", 4.0, 1.0),
        faults.Outcome("SIGTERM", "FAILED", "", 5.0, 2.0),
    ]
    assert faults.table(outcomes).splitlines()[2:] == [
        "| SIGTERM | identical | 2 | 3.0 | 1.0 |",
        "| SIGTERM | FAILED | 1 | 5.0 | 2.0 |",
    ]


@pytest.mark.parametrize("fault", [faults.truncate, faults.flip_bit])
def test_damage_is_to_the_newest_checkpoint_and_to_nothing_else(fault, tmp_path):
    class Bench(faults.Bench):
        def __init__(self):
            pass

        def reference(self, processes=1):
            for step in (10, faults.RESUMED, faults.STEPS):
                (tmp_path / "reference/checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
                (tmp_path / "reference/checkpoints" / str(step) / "values").write_bytes(b"0123456789")
            return tmp_path / "reference"

    fault(Bench(), tmp_path / "damaged", np.random.default_rng(0))
    folder = tmp_path / "damaged/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["10", str(faults.RESUMED)]
    assert (folder / "10/values").read_bytes() == b"0123456789"
    assert (folder / str(faults.RESUMED) / "values").read_bytes() != b"0123456789"
