"""`tfx-jax launch TARGET [options] -- VERB ARGS...`: one command line, from a laptop to a pod."""

import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfx_jax.arguments import Parser
from tfx_jax.cli import VERBS
from tfx_jax.errors import UserError
from tfx_jax.launch import TARGETS, Plan
from tfx_jax.planning.topologies import has_libtpu

_EXAMPLE = "tfx-jax launch local -n 2 -- train --config=transformer_demo --workdir=runs/demo"


def run(argv: Sequence[str]) -> int:
    """Says on stderr what it begins, and returns its exit status; `--dry-run` writes it down instead."""
    cut = argv.index("--") if "--" in argv else len(argv)
    own, command = list(argv[:cut]), list(argv[cut + 1 :])
    if not own or own[0].startswith("-"):
        _general_help(own)
    name = own.pop(0)
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}; there are {', '.join(TARGETS)}")
    target = TARGETS[name]
    parser = Parser(f"launch {name}", target.SUMMARY)
    parser.usage = f"tfx-jax launch {name} [options] -- VERB ARGS..."
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="write what would be run to standard output, run nothing; of TPU slices, say what tfx-jax plan foresees",
    )
    parser.add_argument("--output", metavar="FILE", help="with --dry-run: write it to a file instead")
    target.add_options(parser)
    options = parser.parse_args(own)
    _check_command(command)
    if options.output is not None and not options.dry_run:
        raise UserError("--output goes with --dry-run")
    plan = target.plan(options, command)
    if options.dry_run:
        status = _write(plan.text, options.output)
        if plan.topology is not None and command[0] == "train":
            _foresee(command[1:], plan.topology, plan.num_slices)
        return status
    return _begin(plan)


def _general_help(own: list[str]) -> NoReturn:
    if own[:1] not in (["-h"], ["--help"]):
        raise UserError(f"no target; there are {', '.join(TARGETS)}")
    parser = Parser("launch", "Starts a verb on several processes or machines.")
    parser.usage = "tfx-jax launch TARGET [options] -- VERB ARGS..."
    summaries = "; ".join(f"{name}: {target.SUMMARY}" for name, target in TARGETS.items())
    parser.add_argument("TARGET", help=f"{summaries} (tfx-jax launch TARGET --help says more)")
    parser.epilog = f"for example: {_EXAMPLE}"
    parser.print_help()
    parser.exit()


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise UserError(f"nothing to launch: put a verb and its arguments behind --, as in {_EXAMPLE}")
    verbs = [verb for verb in VERBS if verb not in ("launch", "experiments")]
    if command[0] not in verbs:
        raise UserError(f"unknown verb {command[0]!r} behind --; there are {', '.join(verbs)}")


def _write(text: str, output: str | None) -> int:
    if output is None:
        print(text, end="")
        return 0
    try:
        pathlib.Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --output={output}: {error.strerror}") from None
    return 0


def _foresee(arguments: Sequence[str], topology: str, num_slices: int) -> None:
    """Says on stderr what `tfx-jax plan` says of the training on the slices that would be rented, or why it cannot."""
    if not has_libtpu():
        lines = [f'does it fit {topology}, how fast is it? pip install "tfx-jax[plan]", and --dry-run says that too']
    else:
        from tfx_jax.cli.plan import described, plan_topology  # seconds to import

        parser = Parser("train", "")
        parser.add_argument("--config", required=True)
        try:
            found, others = parser.parse_known_args(arguments)
            overrides = [argument for argument in others if argument.startswith("--config.")]
            lines = described(plan_topology(found.config, overrides, topology, num_slices))
        except UserError as error:
            lines = [f"no plan: {error}"]
    print("\n".join(lines), file=sys.stderr)


def _begin(plan: Plan) -> int:
    if shutil.which(plan.program) is None:
        raise UserError(
            f"{plan.program} is not installed here: install it, or write the launch down with "
            "--dry-run --output=FILE and begin it where it is"
        )
    print(plan.text, end="", file=sys.stderr, flush=True)
    return plan.start()
