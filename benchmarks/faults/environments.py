"""Verbs in separate processes with other locales, variables of Python and JAX, limits and redirections.

A verb must answer as in an ordinary environment, or reject the environment in one line.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from benchmarks.faults.campaign import Trial, doing
from benchmarks.faults.command import Ended, fresh, judge
from benchmarks.faults.damage import LINES
from benchmarks.faults.subjects import EXPERIMENTS, TINY, training

SECONDS = 300.0
"""Time limit of a verb."""

VARIABLES: dict[str, tuple[str, ...]] = {
    "LC_ALL": ("C", "POSIX", "C.UTF-8", "ja_JP.eucJP", "de_DE.ISO-8859-1", "no_such"),
    "PYTHONUTF8": ("0", "1"),
    "PYTHONCOERCECLOCALE": ("0",),
    "PYTHONIOENCODING": ("latin-1", "cp1252", "ascii", "utf-16", "utf-8:surrogateescape", "ascii:replace"),
    "PYTHONWARNINGS": ("error", "ignore"),
    "JAX_PLATFORMS": ("bogus", "cpu", "", "tpu", "cuda,cpu"),
    "JAX_ENABLE_X64": ("1", "0", "perhaps", ""),
    "JAX_NUMPY_DTYPE_PROMOTION": ("strict", "x"),
    "JAX_NUMPY_RANK_PROMOTION": ("raise", "warn", "x"),
    "JAX_TRANSFER_GUARD": ("disallow", "disallow_explicit", "log", "x"),
    "JAX_DEFAULT_MATMUL_PRECISION": ("highest", "bfloat16", "x"),
    "JAX_DEFAULT_PRNG_IMPL": ("x",),
    "JAX_NUM_CPU_DEVICES": ("2", "0", "-1", "x"),
    "JAX_COMPILATION_CACHE_DIR": ("/dev/null/x", "/dev/full", ""),
    "JAX_LOGGING_LEVEL": ("x", "ERROR"),
    "JAX_CHECK_TRACER_LEAKS": ("1",),
    "HOME": ("/no/such", "", "/dev/null"),
    "XDG_CACHE_HOME": ("/no/such", "/dev/null", "relative"),
    "TMPDIR": ("/no/such", "/dev/null"),
    "MPLBACKEND": ("bogus", "qtagg"),
    "COLUMNS": ("0", "-1", "x", "1"),
    "TERM": ("dumb", "x", ""),
    "TZ": ("x", ":/dev/zero"),
}
SHELLS = (  # redirections after the command
    *("2>/dev/full", "2>&-", "<&-", "<&- 2>&-", ">/dev/full", ">&-", ">&- 2>&-", "2>/dev/full >/dev/full"),
    *("2> >(exec 0<&-)", "2>&1 >/dev/null"),
)
# Shell commands before the verb.
LIMITS = ("ulimit -n 32", "ulimit -n 64", "ulimit -n 300", "ulimit -Sn 20", "ulimit -c 0", "umask 777")
ARGUMENTS = ("\udcff", "cat \udcc3", "größe", "日本", "\x1b[2J", "e\u0301")
"""Values of `attend --source`, which takes a text."""

VERBS: dict[str, tuple[list[str], ...]] = {
    "translation": (["translate"], ["attend", "--html=map.html", "--source=the dog barks ."]),
    "labels": (["predict", "--json"],),
    "language": (["generate", "--max-new-tokens=2", "--temperature=0"],),
}


def prepare(folder: pathlib.Path) -> Callable[[np.random.Generator], Trial]:
    """Trains the models; returns the function that makes a trial.

    A trial compares the output of a verb with its output in an ordinary environment.
    """
    here = folder / "here"
    originals = {name: training(name, folder.parent) for name in VERBS}
    commands = [
        *([*verb, f"--workdir={originals[name]}"] for name, verbs in VERBS.items() for verb in verbs),
        ["experiments", "transformer_demo"],
        ["train", f"--config={EXPERIMENTS['translation']}", *TINY, "--workdir=workdir"],
    ]
    ordinary = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "xla"), "JAX_PLATFORMS": "cpu"}
    ordinary_outputs: dict[int, bytes] = {}  # by index of the command

    def attempt(random: np.random.Generator) -> Trial:
        number = int(random.integers(len(commands)))
        if number not in ordinary_outputs:
            fresh(here)
            ended = run(commands[number], ordinary)
            if ended.status != 0:
                raise RuntimeError(f"{commands[number]}: {ended}")
            ordinary_outputs[number] = ended.out
        command, variables = list(commands[number]), dict[str, str]()
        shell, limit = "", ":"  # ":" is the shell command that does nothing
        for name in random.choice(list(VARIABLES), int(random.choice([0, 1, 2])), replace=False):
            variables[str(name)] = VARIABLES[name][int(random.integers(len(VARIABLES[name])))]
        if random.random() < 0.3:
            shell = SHELLS[int(random.integers(len(SHELLS)))]
        elif random.random() < 0.2:
            limit = LIMITS[int(random.integers(len(LIMITS)))]
        if command[0] == "attend" and random.random() < 0.5:
            command[2] = f"--source={ARGUMENTS[int(random.integers(len(ARGUMENTS)))]}"
        fresh(here)
        assignments = shlex.join(f"{name}={value}" for name, value in variables.items())
        what = f"{limit}; {assignments} tfx-jax {shlex.join(command)} {shell}".encode("unicode_escape").decode()
        doing(what)
        ended = run(command, ordinary | variables, shell, limit)
        # Standard input is closed or standard output is redirected, so the output cannot be compared.
        is_incomparable = "<&-" in shell or ">" in shell.replace("2>", "")
        is_incomparable |= command[0] == "attend"
        trial = judge(ended, what, lambda: is_incomparable or ended.out == ordinary_outputs[number])
        # If standard error is redirected, the message is lost and only the status can be checked.
        is_mute = "2>" in shell and trial.outcome == "raw" and ended.status == 2 and not ended.err
        return Trial(what, "line", "not to be seen") if is_mute else trial

    return attempt


def run(command: list[str], variables: dict[str, str], shell: str = "", limit: str = ":") -> Ended:
    """Runs a verb in a separate process, started by a shell.

    Args:
      command: words after `tfx-jax`.
      variables: variables added to the environment.
      shell: redirections.
      limit: shell command before the verb.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHON", "JAX_"))}
    script = f'{limit}; exec "$@" {shell}'
    arguments = [shutil.which("bash") or "bash", "-c", script, "bash", sys.executable, "-m", "tfx_jax", *command]
    root = str(pathlib.Path(__file__).parents[2])
    try:
        ended = subprocess.run(
            [argument.encode(errors="surrogateescape") for argument in arguments],
            env={**environment, "PYTHONPATH": root, **variables},
            input=LINES,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(None, b"", "", f"no end after {SECONDS:.0f} s")
    lines = ended.stderr.decode(errors="replace").splitlines()
    # Leave out the shell's own warning about a locale that is not installed.
    err = "".join(f"{line}\n" for line in lines if not line.startswith("bash: warning: setlocale"))
    return Ended(ended.returncode, ended.stdout, err)
