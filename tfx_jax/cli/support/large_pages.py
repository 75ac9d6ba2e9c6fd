"""Restarts the command with large memory pages, which make CPU training faster.

XLA's CPU backend allocates the buffers of a step again at every step, and Linux hands them out, zeroed, in pages of
4 KiB: 170,000 page faults in each training step of the base model at 16 x 32 tokens. With pages of 2 MiB there are 500,
and the step takes four fifths of the time; docs/speed.md has the figures.
"""

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb"
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def restart_with_large_pages() -> None:
    """Restarts the running command, in this process, if a restart gives it large pages.

    glibc reads this setting only from the environment at process start. Nothing happens if the variable is already set
    (a user may set it to 0), if the system gives large pages always or never, or if glibc is older than 2.35.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables or not _would_help():
        return
    os.environ["GLIBC_TUNABLES"] = f"{tunables}:{_TUNABLE}=1".removeprefix(":")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _would_help() -> bool:
    """Returns whether Linux gives large pages only on request ("madvise") and glibc, from 2.35 on, can request them."""
    try:
        with open(_SETTING) as file:
            if "[madvise]" not in file.read():
                return False
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    except (OSError, ValueError):  # not Linux, or another C library
        return False
