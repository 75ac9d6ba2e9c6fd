"""What a command says of its progress: when, what, and nothing that is wrong."""

import io

import pytest

from tfx_jax.cli.support.progress import Progress


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_a_line_each_half_minute(clock):
    log = io.StringIO()
    progress = Progress("translated {} lines", 10_000, stream=log, clock=clock)
    for _ in range(61):
        clock.now += 1
        progress.advance(100)
    assert log.getvalue() == (
        "translated 3,000 of 10,000 lines, ETA 1:10\ntranslated 6,000 of 10,000 lines, ETA 0:40\n"
    )


def test_a_terminal_gets_one_line_that_can_be_wiped(clock):
    shown = Terminal()
    progress = Progress("read {} checkpoints", stream=shown, clock=clock)
    progress.update(1, 8)
    assert shown.getvalue() == ""  # too soon
    clock.now += 1
    progress.update(2, 8)
    assert shown.getvalue() == "\r\x1b[Kread 2 of 8 checkpoints, ETA 0:06"
    progress.clear()
    progress.clear()
    assert shown.getvalue() == "\r\x1b[Kread 2 of 8 checkpoints, ETA 0:06\r\x1b[K"


def test_a_stage_is_shown_to_a_person_only(clock):
    for stream, want in ((io.StringIO(), ""), (Terminal(), "\r\x1b[Kreading FOLDER\r\x1b[K")):
        progress = Progress(stream=stream, clock=clock)
        progress.stage("reading FOLDER")
        progress.clear()
        assert stream.getvalue() == want
    log = io.StringIO()
    Progress(stream=log, clock=clock).stage("compiling NAME", is_logged=True)
    assert log.getvalue() == "compiling NAME\n"


def test_time_left_does_not_count_compiling(clock):
    """The first batch took a minute, which says nothing of the next ones; these take a second each."""
    log = io.StringIO()
    progress = Progress("translated {} lines", 100, stream=log, clock=clock)
    clock.now += 60
    progress.advance(1)
    assert log.getvalue() == "translated 1 of 100 lines\n"
    for _ in range(30):
        clock.now += 1
        progress.advance(1)
    assert log.getvalue().splitlines()[1:] == ["translated 31 of 100 lines, ETA 1:09"]


def test_without_a_total_there_is_no_time_left(clock):
    log = io.StringIO()
    progress = Progress("translated {} lines", None, stream=log, clock=clock)
    for _ in range(2):
        clock.now += 30
        progress.advance(5_000)
    assert log.getvalue() == "translated 5,000 lines\ntranslated 10,000 lines\n"
