"""The command starts itself again to get large pages: once, and only where that helps."""

import os
import subprocess
import sys

import pytest

from tfx_jax.cli.support import large_pages

# With a verb of its own in place of one that would take seconds to import.
SHOWING = """
import os, sys, types
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], file=sys.stderr)
from tfx_jax.cli import main
from tfx_jax.errors import UserError
def run(argv):
    raise UserError(f"called with {argv}")
sys.modules["tfx_jax.cli.average"] = types.SimpleNamespace(run=run)
sys.exit(main())
"""


def run(tunables=None):
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    env |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-c", SHOWING, "average", "--workdir", "/no where"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not large_pages._would_help(), reason="the system gives large pages to all or to no one")
@pytest.mark.parametrize("before", [None, "glibc.malloc.perturb=0"])
def test_the_command_is_the_same_afterwards(before):
    found = run(before)
    *shown, error = found.stderr.splitlines()
    after = "glibc.malloc.hugetlb=1" if before is None else f"{before}:glibc.malloc.hugetlb=1"
    assert shown == [f"{tunables} ['average', '--workdir', '/no where']" for tunables in (before, after)]
    assert error == "tfx-jax average: called with ['--workdir', '/no where']"
    assert found.returncode == 2


def test_who_wants_none_gets_none():
    found = run("glibc.malloc.hugetlb=0")
    assert found.stderr.count("['average'") == 1
    assert found.returncode == 2


@pytest.mark.parametrize(
    ("setting", "library", "helps"),
    [
        ("always [madvise] never", "glibc 2.36", True),
        ("always [madvise] never", "glibc 2.35", True),
        ("always [madvise] never", "glibc 2.31", False),
        ("[always] madvise never", "glibc 2.36", False),
        ("always madvise [never]", "glibc 2.36", False),
        ("always [madvise] never", None, False),
        (None, "glibc 2.36", False),
    ],
)
def test_where_it_helps(tmp_path, monkeypatch, setting, library, helps):
    monkeypatch.setattr(large_pages, "_SETTING", str(tmp_path / "enabled"))
    monkeypatch.setattr(os, "confstr", lambda _: library)
    if setting is not None:
        (tmp_path / "enabled").write_text(setting + "\n")
    assert large_pages._would_help() is helps
