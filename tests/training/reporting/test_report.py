"""The report of a training, over all of its runs, and its picture."""

import importlib.metadata
import io
import re
import signal
import sys

import jax
import numpy as np
import pytest
from etils import epath
from matplotlib.image import imread

from tfx_jax.cli import compare, main
from tfx_jax.errors import UserError
from tfx_jax.models import GPTConfig
from tfx_jax.tasks import LanguageModelConfig
from tfx_jax.tasks.task import ReportTable
from tfx_jax.tasks.text.translation import TranslationTask
from tfx_jax.training.checkpoint.artifacts import write_sealed
from tfx_jax.training.config import ExperimentConfig, save_config
from tfx_jax.training.reporting.learning_curves import draw_comparison, draw_learning_curves
from tfx_jax.training.reporting.progress import History, Point, Progress
from tfx_jax.training.reporting.report import write_report
from tfx_jax.training.run import Run

TPUS = ["TPU v4"] * 4
EVALUATIONS = [
    {"step": 10, "bleu": 3.0, "exact_match": 0.0},
    {"step": 20, "bleu": 27.341, "exact_match": 1.25},
    {"step": 30, "bleu": 26.0, "exact_match": 1.0},
]


def point(loss, tokens_per_step, step_seconds, **more):
    seconds = {"data": 1.0, "compile": 0.0, "step": step_seconds, "save": 0.0, "evaluate": 0.0}
    return {
        "train/loss": loss,
        "train/nll": loss - 0.5,
        "train/tokens_per_step": tokens_per_step,
        "train/tokens_per_second": 10 * tokens_per_step / (1.0 + step_seconds),
        **{f"time/{part}": value for part, value in seconds.items()},
        **{f"train/{name}": value for name, value in more.items()},
    }


@pytest.fixture
def workdir(tmp_path):
    """A run that was killed behind step 20, when 10 was saved, and another that went on to step 30."""
    first = Progress(tmp_path, last_done_step=0, num_steps=30, stream=io.StringIO())
    first.scalars(10, point(9.0, 100.0, 99.0, mfu=0.5))
    first.scalars(20, point(8.0, 100.0, 119.0, mfu=0.5, bad_steps=1.0))
    first.close()
    second = Progress(tmp_path, last_done_step=10, num_steps=30, stream=io.StringIO())
    second.scalars(20, point(4.0, 100.0, 99.0, mfu=0.5, bad_steps=2.0))
    second.scalars(30, point(2.0, 400.0, 49.0, mfu=0.2))
    second.scalars(30, {"time/save": 10.0, "time/evaluate": 3_600.0})
    second.close()
    return tmp_path


def report(workdir, *, config=None, **changes):
    lines = []
    arguments = {
        "step": 30,
        "signum": None,
        "num_params": 65_000_000,
        "num_trained": 65_000_000,
        "device_kinds": TPUS,
        "evaluations": EVALUATIONS,
        "message": lines.append,
    }
    config = config or ExperimentConfig(num_steps=30)
    task = TranslationTask(config.task, config.model, config.task.splits(), tokenizer=None)
    write_report(workdir, Run(config, task), **(arguments | changes))
    return lines


def rows(workdir):
    """Every row of every table: its first cell, and the others."""
    lines = (workdir / "report.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {first: rest for first, *rest in cells}


def test_report_is_over_all_runs(workdir):
    assert report(workdir) == [f"report in {workdir}/report.md"]
    found = rows(workdir)
    assert found["Parameters"] == ["65,000,000"]
    report(workdir, num_trained=1_000)
    assert rows(workdir)["Parameters"] == ["65,000,000, 1,000 trained"]
    assert found["Devices"] == ["4 x TPU v4"]
    assert found["Runs"] == ["2, the last from step 10"]
    # 20 steps of 100 tokens and 10 of 400; the lost ones do not count.
    assert found["Target tokens seen"] == ["6,000, 200 a step"]
    assert found["Target tokens a second"] == [f"{(1000 + 1000 + 4000) / 250:,.0f} while training"]
    assert found["Skipped steps"] == ["2"]
    # Time was spent on the lost steps as well: 100 + 120 + 100 + 50 seconds and what came last.
    assert found["waiting for data"] == ["0:04", "0.1%"]
    assert found["computing"] == ["6:06", "9.2%"]
    assert found["evaluating"] == ["1:00:00", "90.5%"]
    assert found["**total**"] == ["**1:06:20**", ""]
    assert found["of which repeated after a restart"] == ["2:00", "3.0%"]
    assert found["20"] == ["**27.34**", "1.2 %"]
    assert found["30"] == ["26.00", "1.0 %"]


def test_configuration_is_what_differs_from_the_defaults(workdir):
    config = ExperimentConfig(num_steps=30)
    config.task.label_smoothing = 0.0
    config.task.data.train_source = "a|b.txt"
    report(workdir, config=config)
    table = (workdir / "report.md").read_text().partition("## Configuration")[2].splitlines()
    assert table[4:] == [
        "| field | value | default |",
        "| --- | --- | --- |",
        "| `task.data.train_source` | `'a\\|b.txt'` | `''` |",
        "| `task.label_smoothing` | `0.0` | `0.1` |",
        "| `num_steps` | `30` | `100000` |",
    ]


def test_utilization_says_what_it_is_of(workdir):
    config = ExperimentConfig(num_steps=30)
    config.model.dtype = "bfloat16"
    report(workdir, config=config)
    # 0.5 for 200 of 250 seconds, 0.2 for 50.
    text = "44.0% of the devices' peak at 16 bits, 1,100 TFLOP/s; padding is counted as work"
    assert rows(workdir)["Model FLOP utilization"] == [text]
    report(workdir)
    (said,) = rows(workdir)["Model FLOP utilization"]
    assert said == text + "; **the computation is float32, the peak that of bfloat16**"
    report(workdir, device_kinds=["cpu"])
    assert "Model FLOP utilization" not in rows(workdir)


@pytest.mark.parametrize(
    ("step", "signum", "said"),
    [
        (30, None, "Step 30 of 30: finished."),
        (20, None, "Step 20 of 30: stopped early, without a better BLEU in the last 2 evaluations."),
        (20, signal.SIGTERM, "Step 20 of 30: interrupted by SIGTERM, rerun the same command to resume."),
    ],
)
def test_ending(workdir, step, signum, said):
    report(workdir, config=ExperimentConfig(num_steps=30, patience=2), step=step, signum=signum)
    assert said in (workdir / "report.md").read_text().splitlines()


def test_picture_is_one_and_has_both_panels(workdir):
    report(workdir)
    picture = imread(workdir / "learning_curves.png")
    assert picture.shape == (1020, 1200, 4)
    assert "![Learning curves](learning_curves.png)" in (workdir / "report.md").read_text()


def test_nothing_to_draw_is_no_picture(tmp_path):
    assert report(tmp_path, evaluations=[]) == [f"report in {tmp_path}/report.md"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert "png" not in (tmp_path / "report.md").read_text()


def test_full_disk_costs_one_line_and_leaves_the_report_of_before(workdir, monkeypatch):
    report(workdir)
    before = (workdir / "report.md").read_bytes()

    def full(path, content):
        path.write_text("half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(epath.Path("a").__class__, "write_bytes", full)
    assert report(workdir, step=29) == ["no report: [Errno 28] No space left on device"]
    assert (workdir / "report.md").read_bytes() == before
    assert imread(workdir / "learning_curves.png").shape == (1020, 1200, 4)


def history(losses, nlls):
    points = [
        Point(10 * i, {"train/loss": a, "train/nll": b}) for i, (a, b) in enumerate(zip(losses, nlls, strict=True), 1)
    ]
    return History(points, [], [0])


def panels(*arguments):
    figure = draw_learning_curves(*arguments, TranslationTask.metrics[0])
    assert figure is not None
    return figure.axes


def test_curves_are_the_points():
    loss, bleu = panels(history([9.0, 4.0, 3.5], [8.5, 3.5, 3.0]), EVALUATIONS)
    trained, cross_entropy = loss.lines
    np.testing.assert_array_equal(trained.get_xydata(), [[10, 9.0], [20, 4.0], [30, 3.5]])
    np.testing.assert_array_equal(cross_entropy.get_ydata(), [8.5, 3.5, 3.0])
    np.testing.assert_array_equal(bleu.lines[0].get_xydata(), [[10, 3.0], [20, 27.341], [30, 26.0]])
    assert loss.get_xlim() == bleu.get_xlim()


def test_no_word_stands_where_a_curve_may_run():
    figure = draw_learning_curves(history([9.0, 4.0], [8.5, 3.5]), EVALUATIONS, TranslationTask.metrics[0])
    figure.draw_without_rendering()
    loss, bleu = figure.axes
    assert bleu.get_title(loc="right") == "best 27.34 at step 20"
    for panel, written in ((loss, loss.get_legend()), (bleu, bleu.title), (bleu, bleu._right_title)):
        assert written.get_window_extent().y0 >= panel.get_window_extent().y1
    left, legend = loss._left_title.get_window_extent(), loss.get_legend().get_window_extent()
    assert left.x1 < legend.x0
    assert not bleu.texts


def test_axis_is_logarithmic_only_where_the_loss_falls_far():
    far, near = [9.0, 4.0, 2.0], [4.0, 3.0, 2.0]
    assert panels(history(far, far), [])[0].get_yscale() == "log"
    assert panels(history(near, near), [])[0].get_yscale() == "linear"
    assert panels(history([9.0, 0.0], [9.0, 0.0]), [])[0].get_yscale() == "linear"


def test_without_label_smoothing_there_is_one_curve():
    (loss,) = panels(history([9.0, 4.0], [9.0, 4.0]), [])
    assert len(loss.lines) == 1
    assert loss.get_legend() is None


def test_losses_of_evaluations_and_the_learning_rate_are_drawn():
    past = history([9.0, 4.0], [9.0, 4.0])
    past.points[1].scalars["train/learning_rate"] = 0.5
    evaluations = [{"step": 10, "loss": 8.0, "bleu": 90.0}, {"step": 20, "loss": 5.0, "bleu": 92.0}]
    loss, bleu, rate = panels(past, evaluations)
    assert [line.get_label() for line in loss.lines] == ["training", "validation"]
    np.testing.assert_array_equal(loss.lines[1].get_xydata(), [[10, 8.0], [20, 5.0]])
    assert loss.get_title(loc="left") == "loss, nats for each token"
    assert panels(past, [])[0].get_title(loc="left") == "training loss, nats for each token"
    np.testing.assert_array_equal(rate.lines[0].get_xydata(), [[20, 0.5]])
    assert bleu.get_ylim() == pytest.approx((89.8, 92.2))  # the range, not from 0


def test_report_says_how_to_repeat_the_run(workdir, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/tfx-jax", "train", "--workdir=my run"])
    write_sealed(
        workdir / "data.json", {"files": {"train_file: a.txt": {"size": 1_234, "checksum": "ab", "stamp": "c"}}}
    )
    tables = [ReportTable("Samples", ("source", "target"), [("a|b\nc", "d")]), ReportTable("None", ("a",), [])]
    report(workdir, config=ExperimentConfig(num_steps=30, seed=77), tables=tables)
    found = rows(workdir)
    assert found["Command"] == ["`tfx-jax train '--workdir=my run'`"]
    assert found["Seed"] == ["77"]
    assert f"jax {jax.__version__}, " in found["Versions"][0]
    assert found["`train_file: a.txt`"] == ["1,234 bytes, BLAKE2b ab"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found["Date"][0])
    text = (workdir / "report.md").read_text()
    assert "## Samples\n\n| source | target |\n| --- | --- |\n| a\\|b c | d |\n" in text
    assert "## None" not in text


def test_what_the_run_was_made_from_is_left_out_where_it_is_unknown(workdir, monkeypatch):
    version = importlib.metadata.version

    def found(name):
        if name == "tfx-jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    for damaged in ('{"files": {"a": 3}}', '{"files": 3}', "[", '{"sha256": "0", "files": {}}'):
        (workdir / "data.json").write_text(damaged)
        for program in ("/usr/lib/python3/ipykernel_launcher.py", "train.py"):
            monkeypatch.setattr(sys, "argv", [program, "--secret"])
            assert report(workdir) == [f"report in {workdir}/report.md"]
            names = rows(workdir)
            assert "Command" not in names
            assert names["Versions"][0].startswith(f"jax {jax.__version__}, ")
    monkeypatch.setattr(sys, "argv", ["/opt/tfx_jax/__main__.py", "train"])
    report(workdir)
    assert rows(workdir)["Command"] == ["`python -m tfx_jax train`"]


def test_runs_are_compared(workdir, tmp_path_factory, capsys, monkeypatch):
    monkeypatch.setattr(compare, "save_figure", lambda path, draw: drawn.append((path, draw())))
    drawn, other = [], tmp_path_factory.mktemp("other")
    save_config(ExperimentConfig(num_steps=30), workdir)
    save_config(ExperimentConfig(num_steps=30, seed=5, init_from="x"), other)
    shown = Progress(other, last_done_step=0, num_steps=30, stream=io.StringIO())
    for step, loss in ((10, 7.0), (20, 5.0)):
        shown.scalars(step, {"train/loss": loss, "validation/bleu": 10 * step})
    shown.close()
    assert main(["compare", str(workdir), str(other), "--output=a.png"]) == 0
    table = {cells[0]: cells[1:] for cells in (re.split("  +", line) for line in capsys.readouterr().out.splitlines())}
    assert table["seed"] == ["0", "5"]
    assert table["init_from"] == ['""', "x"]
    assert "num_steps" not in table
    assert table["last step"] == ["30", "20"]
    assert table["train/loss, last"] == ["2", "5"]
    assert table["train/loss, range"] == ["2 to 9", "5 to 7"]
    third = tmp_path_factory.mktemp("third")
    save_config(ExperimentConfig(GPTConfig(), LanguageModelConfig(), num_steps=30), third)
    assert main(["compare", str(workdir), str(third)]) == 0
    table = {cells[0]: cells[1:] for cells in (re.split("  +", line) for line in capsys.readouterr().out.splitlines())}
    assert table["task.data.test_source"] == ['""', "-"]  # empty, and a field that language models do not have
    ((path, figure),) = drawn
    loss, bleu = figure.axes
    assert path == "a.png"
    assert [line.get_label() for line in loss.lines] == [str(workdir), str(other)]
    np.testing.assert_array_equal(bleu.lines[1].get_xydata(), [[10, 100], [20, 200]])
    assert main(["compare", str(workdir), str(workdir)]) == 2
    assert "compare needs two or more workdirs" in capsys.readouterr().err
    with pytest.raises(UserError, match="none of the runs has logged a loss or a metric"):
        draw_comparison({"a": History([], [], [])})


def test_many_points_are_smoothed_over_themselves():
    noisy = (3.0 + np.random.default_rng(0).normal(size=1_000) * 0.1).tolist()
    (loss,) = panels(history(noisy, noisy), [])
    raw, smooth = (np.asarray(line.get_ydata()) for line in loss.lines)
    np.testing.assert_array_equal(raw, noisy)
    assert smooth.std() < raw.std() / 3
    assert smooth.mean() == pytest.approx(raw.mean(), rel=1e-2)


def test_evaluations_alone_are_drawn_too():
    (bleu,) = panels(History([], [], []), EVALUATIONS[:1])
    assert bleu.get_title(loc="left") == "validation BLEU"
