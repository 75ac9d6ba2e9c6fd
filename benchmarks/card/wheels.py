r"""The wheels that a machine without a network lacks beside JAX, PyTorch and transformers.

    python -m benchmarks.card.wheels --output=FOLDER

from the root of the repository, on a machine with pip and an index, downloads the dependencies of tfx_jax for Linux,
x86-64 and Python 3.12, in the versions of requirements.lock, and builds its own wheel, whose metadata have its version
(in the root of the repository, the code is that of the repository). What such a machine has anyway is left out
(`PRESENT`, and whatever `--without` names), and with `--mib` the folder is checked to be no larger. On the machine
without a network:

    pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE
    python -m benchmarks.card --minutes=10 --output=runs/card
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = pathlib.Path(__file__).parents[2]
_PYTHON = "3.12"
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)) + ("manylinux2014_x86_64",)

PRESENT = frozenset({"jax", "jaxlib", "ml-dtypes", "opt-einsum", "numpy", "scipy"})  # JAX
PRESENT |= {"huggingface-hub", "tokenizers", "safetensors", "hf-xet", "tqdm", "regex", "filelock"}  # transformers
PRESENT |= {"fsspec", "packaging", "pyyaml", "typing-extensions", "typer", "httpx", "httpcore", "anyio", "sniffio"}
PRESENT |= {"h11", "idna", "certifi", "click", "shellingham", "requests", "urllib3", "charset-normalizer"}
PRESENT |= {"pillow", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing", "python-dateutil"}
"""Packages that such a machine has, by their canonical names: what JAX and transformers need, Matplotlib and Pillow."""


def blocks(lock: str, python: str) -> Iterator[tuple[str, str, str]]:
    """Yields (canonical name, version, text) of each package of requirements.lock on Linux with a version of Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    environment |= {"os_name": "posix", "implementation_name": "cpython", "platform_python_implementation": "CPython"}
    for block in re.split(r"\n(?=\S)", lock):
        pinned = re.match(r"([\w.-]+)==(\S+)(?: ; (.*?))?(?: \\)?\n", block + "\n")
        if pinned is not None and (not pinned[3] or Marker(pinned[3]).evaluate(environment)):
            yield canonicalize_name(pinned[1]), pinned[2], block


def needed(lock: str, dependencies: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """Returns the version of every package to download.

    Args:
      lock: text of requirements.lock, which says after each package by which others it is needed ("# via").
      dependencies: requirements of tfx_jax.
      without: canonical names of packages to leave out, besides what only they need.
    """
    versions: dict[str, str] = {}
    needs: dict[str, set[str]] = {}  # what each package needs
    for name, version, block in blocks(lock, _PYTHON):
        versions[name] = version
        for parent in re.findall(r"^ +#(?: via)? +([\w.-]+)(?: .*)?$", block, re.MULTILINE):
            needs.setdefault(canonicalize_name(parent), set()).add(name)
    left_out, found = set(without), set[str]()
    requirements = map(Requirement, dependencies)
    waiting = [r.name for r in requirements if r.marker is None or r.marker.evaluate({"python_version": _PYTHON})]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found and name not in left_out:
            found.add(name)
            waiting += needs.get(name, ())
    return {name: versions[name] for name in sorted(found)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.card.wheels", allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for the wheels")
    parser.add_argument("--without", default="", help="more packages to leave out, separated by commas")
    parser.add_argument("--mib", type=float, help="largest size of the folder in MiB; any by default")
    arguments = parser.parse_args(argv)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    without = PRESENT | {canonicalize_name(name) for name in arguments.without.split(",")}
    versions = needed((_ROOT / "requirements.lock").read_text(), project["dependencies"], without)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={_PYTHON}", "--implementation=cp", f"--dest={arguments.output}"]
    command += [f"--platform={name}" for name in _PLATFORMS]
    status = subprocess.run([*command, *(f"{name}=={version}" for name, version in versions.items())]).returncode
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        f"--wheel-dir={arguments.output}",
        str(_ROOT),
    ]
    status = status or subprocess.run(build).returncode
    if status:
        return status
    sizes = {file.name: file.stat().st_size / 2**20 for file in arguments.output.glob("*.whl")}
    print(f"{len(sizes)} wheels, {sum(sizes.values()):.1f} MiB in {arguments.output}")
    if arguments.mib is not None and sum(sizes.values()) > arguments.mib:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        print(f"more than {arguments.mib:g} MiB; the largest: {', '.join(largest)}; see --without", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
