"""What is shown while a model trains, and what TensorBoard finds afterwards."""

import errno
import io
import re
import struct

import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from tensorboardX.record_writer import RecordWriter

from tfx_jax.training.reporting import progress
from tfx_jax.training.reporting.progress import Progress, read_history


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Seconds that pass only when a test says so; nothing in the environment overrides what a terminal is."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def read_events(workdir):
    """Events of the one file, by TensorFlow's record format: length, its checksum, the event, its checksum."""
    (path,) = (workdir / "tensorboard").iterdir()
    data = path.read_bytes()
    events = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        record, rest = data[12 : 12 + length], data[12 + length :]
        for part, stored in ((data[:8], data[8:12]), (record, rest[:4])):
            checksum = crc32c(part)
            masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.pack("<I", masked) == stored
        events.append(Event.FromString(record))
        data = rest[4:]
    return events


def points(workdir):
    return [
        (event.step, value.tag, pytest.approx(value.simple_value, rel=1e-6))
        for event in read_events(workdir)
        for value in event.summary.value
    ]


def test_one_line_for_each_report_away_from_a_terminal(tmp_path, clock):
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=0, num_steps=10, stream=stream)
    clock[0] += 5.0
    shown.log(5, {"train/loss": 1.23451}, loss=1.23451, tokens_per_second=1234.4)
    clock[0] += 10.0
    shown.log(10, {"train/loss": 0.5}, loss=0.5, tokens_per_second=1_234_567.0)
    shown.close()
    assert stream.getvalue().splitlines() == [
        "step 5/10  loss 1.2345  1,234 tokens/s  ETA 0:05",
        "step 10/10  loss 0.5000  1,234,567 tokens/s  ETA 0:00",
    ]


def test_time_left_counts_from_where_the_run_resumed(tmp_path, clock):
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=1_000, num_steps=100_000, stream=stream)
    clock[0] += 20.0
    shown.log(1_010, {}, loss=2.0, tokens_per_second=10.0)
    shown.close()
    assert stream.getvalue().endswith("ETA 54:59:40\n")  # 98,990 steps of two seconds


def test_time_left_leaves_out_what_compiling_took(tmp_path, clock):
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=0, num_steps=20, stream=stream)
    clock[0] += 65.0
    shown.log(5, {"time/compile": 60.0}, loss=2.0, tokens_per_second=10.0)
    clock[0] += 35.0  # of them 30 for a batch of another shape
    shown.log(10, {"time/compile": 30.0}, loss=2.0, tokens_per_second=10.0)
    shown.close()
    assert [line.split("ETA ")[1] for line in stream.getvalue().splitlines()] == ["0:15", "0:10"]


def test_scalars_can_be_read_back(tmp_path):
    shown = Progress(tmp_path, last_done_step=0, num_steps=10, stream=io.StringIO())
    shown.log(5, {"train/loss": 1.25, "train/learning_rate": 7e-4}, loss=1.25, tokens_per_second=1.0)
    shown.scalars(7, {"validation/bleu": 33.3})
    expected = [(5, "train/loss", 1.25), (5, "train/learning_rate", 7e-4), (7, "validation/bleu", 33.3)]
    assert points(tmp_path) == expected  # at once: a killed run loses nothing
    shown.close()
    assert points(tmp_path) == expected
    assert read_events(tmp_path)[0].file_version == "brain.Event:2"


def test_fields_are_in_the_tab_of_hyperparameters_and_no_points(tmp_path):
    shown = Progress(tmp_path, last_done_step=3, num_steps=10, stream=io.StringIO())
    fields = {"seed": 7, "model.dtype": "float32", "is_packed": True, "rates": (1, 2), "peak": None}
    shown.hparams(fields, ["validation/bleu"])
    shown.close()
    assert read_history(tmp_path).points == []
    values = [value for event in read_events(tmp_path) for value in event.summary.value]
    assert {value.metadata.plugin_data.plugin_name for value in values} == {"hparams"}
    plugin = HParamsPluginData()
    plugin.ParseFromString(next(v for v in values if v.tag.endswith("start_info")).metadata.plugin_data.content)
    found = plugin.session_start_info.hparams
    assert (found["seed"].number_value, found["model.dtype"].string_value) == (7, "float32")
    assert found["is_packed"].bool_value
    assert (found["rates"].string_value, found["peak"].string_value) == ("(1, 2)", "None")


def test_a_text_is_no_point_of_a_curve(tmp_path):
    shown = Progress(tmp_path, last_done_step=3, num_steps=10, stream=io.StringIO())
    shown.text("config", "| field | value |")
    shown.scalars(7, {"train/loss": 1.0})
    shown.close()
    (value,) = read_events(tmp_path)[2].summary.value
    assert (value.tag, value.metadata.plugin_data.plugin_name) == ("config/text_summary", "text")
    assert value.tensor.string_val == [b"| field | value |"]
    assert read_history(tmp_path).points == [(7, {"train/loss": 1.0})]


def test_messages_stay_as_they_are(tmp_path):
    """One line however long, and nothing in it means markup or a picture."""
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=0, num_steps=1, stream=stream)
    text = "[red]saved[/red] in /data/:key:/" + "very/" * 60
    shown.message(text)
    shown.close()
    assert stream.getvalue() == text + "\n"


def test_terminal_shows_one_live_line_and_messages_that_stay(tmp_path):
    stream = Terminal()
    shown = Progress(tmp_path, last_done_step=2, num_steps=10, stream=stream)
    shown.log(5, {}, loss=1.5, tokens_per_second=99.0)
    shown.message("step 5: validation BLEU 12.34")
    shown.log(10, {}, loss=1.5, tokens_per_second=99.0)
    shown.close()
    assert "validation BLEU 12.34" in stream.getvalue()
    assert "step 10/10" in stream.getvalue()


def test_terminal_keeps_twenty_losses_and_says_what_it_does_between_steps(tmp_path):
    stream = Terminal()
    shown = Progress(tmp_path, last_done_step=0, num_steps=1_000, stream=stream)
    for step in range(10, 1_001, 10):
        shown.log(step, {}, loss=1.5, tokens_per_second=99.0)
        if step == 500:
            shown.stage("step 500/1000  evaluating on the validation split")
            shown._bar.refresh()
    shown.close()
    kept = [
        int(line) for line in re.findall(r"step (\d+)/1000  loss 1.5000  99 tokens/s  ETA 0:00\n", stream.getvalue())
    ]
    assert kept == list(range(50, 1_001, 50))
    assert "evaluating on the validation split" in stream.getvalue()


def test_terminal_shows_a_clock_while_it_compiles_and_a_rate_from_the_second_step(tmp_path, clock):
    stream = Terminal()
    shown = Progress(tmp_path, last_done_step=0, num_steps=1_000, stream=stream)

    def live():
        stream.truncate(0)
        shown._bar.refresh()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())

    clock[0] += 12.0
    assert re.search(r"compiling .*0:00:12", live())
    shown.step(1)
    assert "step 1/1000 " in live()
    clock[0] += 4.0
    shown.step(3)
    assert "step 3/1000  0.5 steps/s  ETA 33:14 " in live()
    shown.log(5, {}, loss=1.5, tokens_per_second=99.0)
    shown.step(6)
    assert re.search(r"step 6/1000  loss 1\.5000  99 tokens/s  ETA ", live())
    shown.close()
    silent = Progress(tmp_path, last_done_step=0, num_steps=10, stream=io.StringIO())
    silent.step(1)
    silent.close()


@pytest.mark.parametrize("method", ["write", "flush"])
def test_full_disk_is_reported_once_and_stops_nothing(tmp_path, monkeypatch, method):
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=0, num_steps=100, stream=stream)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, method, full)
    for step in range(1, 31):  # more than any queue would hold
        shown.log(step, {"train/loss": 1.0}, loss=1.0, tokens_per_second=1.0)
    shown.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "no more scalars for TensorBoard: [Errno 28] No space left on device"
    assert len(lines) == 31


def test_folder_that_cannot_be_made_stops_nothing(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=0, num_steps=1, stream=stream)
    shown.log(1, {"train/loss": 1.0}, loss=1.0, tokens_per_second=1.0)
    shown.close()
    assert [line.partition(":")[0] for line in stream.getvalue().splitlines()] == [
        "no scalars for TensorBoard",
        "step 1/1  loss 1.0000  1 tokens/s  ETA 0",
    ]


def test_utilization_stands_behind_everything_else(tmp_path):
    stream = io.StringIO()
    shown = Progress(tmp_path, last_done_step=0, num_steps=5, stream=stream)
    shown.log(5, {}, loss=1.0, tokens_per_second=10.0, mfu=0.4125)
    shown.close()
    assert stream.getvalue() == "step 5/5  loss 1.0000  10 tokens/s  ETA 0:00  MFU 41.2% of 16-bit peak\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_without_a_workdir_nothing_is_shown_and_nothing_written(tmp_path, monkeypatch, stream):
    monkeypatch.chdir(tmp_path)
    shown = Progress(None, last_done_step=0, num_steps=5, stream=stream)
    shown.log(5, {"train/loss": 1.0}, loss=1.0, tokens_per_second=10.0)
    shown.message("hello")
    shown.close()
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def write_run(workdir, first_step, losses):
    shown = Progress(workdir, last_done_step=first_step, num_steps=100, stream=io.StringIO())
    for step, loss in losses.items():
        shown.scalars(step, {"train/loss": loss})
    shown.close()


def test_history_of_a_killed_run_gives_way_to_that_of_the_next(tmp_path):
    write_run(tmp_path, 0, {10: 5.0, 20: 4.0, 25: 3.5})
    write_run(tmp_path, 15, {20: 4.25, 30: 3.0})  # it was saved at step 15, and logs at other steps
    history = read_history(tmp_path)
    steps, losses = history.curve("train/loss")
    assert (steps.tolist(), losses.tolist()) == ([10, 20, 30], [5.0, 4.25, 3.0])
    assert history.superseded == [(20, {"train/loss": 4.0}), (25, {"train/loss": 3.5})]
    assert history.starts == [0, 15]


def test_curves_hold_what_is_finite_and_of_two_points_the_later(tmp_path):
    write_run(tmp_path, 0, {10: 5.0, 20: float("nan"), 30: float("inf")})
    write_run(tmp_path, 30, {40: 2.0})
    write_run(tmp_path, 40, {40: 1.0})
    steps, losses = read_history(tmp_path).curve("train/loss")
    assert (steps.tolist(), losses.tolist()) == ([10, 40], [5.0, 1.0])


def test_history_ends_where_a_file_is_cut_off(tmp_path):
    """At every byte: a full disk or a kill may stop a write anywhere."""
    write_run(tmp_path, 0, {10: 5.0, 20: 4.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    whole = path.read_bytes()
    lengths = []
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        lengths.append(len(read_history(tmp_path).points))
    assert lengths == sorted(lengths)
    assert set(lengths) == {0, 1}
    path.write_bytes(whole)
    assert [point.step for point in read_history(tmp_path).points] == [10, 20]


def test_history_ends_at_flipped_bits(tmp_path):
    write_run(tmp_path, 0, {10: 5.0, 20: 4.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    whole = path.read_bytes()
    for at in range(len(whole) - 20, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert [point.step for point in read_history(tmp_path).points] == [10]


def test_no_history_is_empty(tmp_path):
    assert read_history(tmp_path) == ([], [], [])
