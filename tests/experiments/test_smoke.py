"""`make smoke` itself: it goes on after a failure, says whose it was, and fails."""

import pytest

from tests.experiments import smoke
from tfx_jax import cli


@pytest.fixture
def trained(monkeypatch):
    """The command lines that were run; the experiment called "broken" raises and "refused" is a user's mistake."""
    found = []

    def main(argv):
        found.append(argv)
        if "broken" in argv[1]:
            raise ZeroDivisionError("in the middle of a step")
        return 2 if "refused" in argv[1] else 0

    monkeypatch.setattr(cli, "main", main)
    return found


def test_every_experiment_is_trained_in_a_folder_of_its_own(trained, tmp_path, capsys):
    assert smoke.main([str(tmp_path)]) == 0
    experiments = sorted(path for path in smoke.EXPERIMENTS.iterdir() if path.suffix == ".py")
    assert len(experiments) >= 14
    assert trained == [["train", f"--config={path}:test", f"--workdir={tmp_path / path.stem}"] for path in experiments]
    assert capsys.readouterr().out.endswith("\nall trained\n")


@pytest.mark.usefixtures("trained")
def test_failures_are_named_and_do_not_end_the_others(tmp_path, capsys):
    names = ["broken", "fine", "refused", "good"]
    assert smoke.main([str(tmp_path), *(f"{name}.py" for name in names)]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(",")[0] for line in out.splitlines() if "," in line and line.startswith("==")] == [
        "== broken: FAILED",
        "== fine: trained",
        "== refused: FAILED",
        "== good: trained",
    ]
    assert out.endswith("\nfailed: broken, refused\n")
    assert err.endswith("ZeroDivisionError: in the middle of a step\n")
