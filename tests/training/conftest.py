"""What whole trainings start from, and what they log."""

import pytest

from tests.training.tiny import write_text
from tfx_jax.training import loop


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with a text to reverse, word by word."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


@pytest.fixture
def scalars(monkeypatch):
    """What is logged, a dictionary for each step."""
    logged = []
    log = loop.Progress.log

    def remember(self, step, scalars, **rest):
        logged.append(scalars)
        log(self, step, scalars, **rest)

    monkeypatch.setattr(loop.Progress, "log", remember)
    return logged
