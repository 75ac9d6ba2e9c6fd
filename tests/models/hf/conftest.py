"""Nets of transformers as folders, which each parity file makes of its fixture `theirs`."""

import pytest

from tfx_jax.models import hf


@pytest.fixture(scope="module")
def their_folder(theirs, tmp_path_factory):
    """Where `theirs`, a net of transformers, was saved."""
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(their_folder):
    """Our model of the same parameters."""
    return hf.load(their_folder)
