"""`tfx-jax launch TARGET [options] -- VERB ARGS...`: runs one verb on several processes, from a laptop to a TPU pod."""

import pathlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from tfx_jax.arguments import Parser
from tfx_jax.cli import VERBS
from tfx_jax.errors import UserError, install_command, printable
from tfx_jax.launch import TARGETS, Plan
from tfx_jax.planning.topologies import has_libtpu

if TYPE_CHECKING:
    from tfx_jax.training.config import ExperimentConfig  # takes seconds to import

_MUCH_FASTER = 1.25  # ratio of speeds above which the slower one is more than a fifth slower
_EXAMPLE = "tfx-jax launch local -n 2 -- train --config=transformer_demo --workdir=runs/demo"


def run(argv: Sequence[str]) -> int:
    """Launches the command and returns its exit status; with `--dry-run`, only prints the launch commands."""
    separator = argv.index("--") if "--" in argv else len(argv)
    launch_arguments, command = list(argv[:separator]), list(argv[separator + 1 :])
    if not launch_arguments or launch_arguments[0].startswith("-"):
        _general_help(launch_arguments)
    name = launch_arguments.pop(0)
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}; use one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    parser = Parser(f"launch {name}", target.SUMMARY)
    parser.usage = f"tfx-jax launch {name} [options] -- VERB ARGS..."
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the launch commands to standard output without running them; xpk and jobset, which name the TPU "
        "slices, also print the plan of tfx-jax plan",
    )
    parser.add_argument("--output", metavar="FILE", help="with --dry-run: write the commands to FILE instead")
    target.add_options(parser)
    options = parser.parse_args(launch_arguments)
    _check_command(command)
    if options.output is not None and not options.dry_run:
        raise UserError("--output needs --dry-run")
    plan = target.plan(options, command)
    config = None
    if command[0] == "train" and name != "local":  # whose processes say at once what is wrong
        config = _load_config(command[1:])
    if options.dry_run:
        status = _write(plan.text, options.output)
        if command[0] == "train" and plan.topology is not None:
            _print_plan(command[1:], plan.topology, plan.num_slices)
        elif command[0] == "train" and plan.unknown:
            print(f"no plan: {printable(plan.unknown)}", file=sys.stderr)
        return status
    return _start(plan, command, config)


def _general_help(arguments: list[str]) -> NoReturn:
    """Prints the help of `launch` without a target and exits; raises UserError unless -h or --help asked for it."""
    if arguments[:1] not in (["-h"], ["--help"]):
        raise UserError(f"launch needs a target; use one of {', '.join(TARGETS)}")
    parser = Parser("launch", "Runs a verb on several processes or machines.")
    parser.usage = "tfx-jax launch TARGET [options] -- VERB ARGS..."
    summaries = "; ".join(f"{name}: {target.SUMMARY}" for name, target in TARGETS.items())
    parser.add_argument("TARGET", help=f"{summaries} (tfx-jax launch TARGET --help lists the options)")
    parser.epilog = f"for example: {_EXAMPLE}"
    parser.print_help()
    parser.exit()


def _check_command(command: Sequence[str]) -> None:
    """Raises UserError unless the command begins with a verb that can be launched."""
    if not command:
        raise UserError(f"nothing to launch: put a verb and its arguments after --, as in {_EXAMPLE}")
    verbs = [verb for verb in VERBS if verb not in ("launch", "experiments")]
    if command[0] not in verbs:
        raise UserError(f"unknown verb {command[0]!r} after --; use one of {', '.join(verbs)}")


def _write(text: str, output: str | None) -> int:
    """Writes the text to the file `output` (None: standard output), and returns the exit status 0."""
    if output is None:
        print(text, end="")
        return 0
    try:
        pathlib.Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --output={output}: {error.strerror}") from None
    return 0


def _print_plan(arguments: Sequence[str], topology: str, num_slices: int) -> None:
    """Prints to stderr the plan of `tfx-jax plan` for the TPU slices of the launch, or why there is none."""
    if not has_libtpu():
        lines = [f"no prediction for {topology}: {install_command('plan')} to see whether the run fits and its speed"]
    else:
        from tfx_jax.cli.plan import described, plan_topology  # takes seconds to import

        try:
            plan, faster = plan_topology(*_config_flags(arguments), topology, num_slices)
            lines = described(plan)
            if faster is not None and faster.speedup > _MUCH_FASTER:
                lines.append(
                    f"warning      more than a fifth slower than with {faster.flags}, which would take "
                    f"{1e3 * faster.predicted_step_seconds:.2f} ms a step"
                )
        except UserError as error:
            lines = [f"no plan: {error}"]
    print("\n".join(lines), file=sys.stderr)


def _config_flags(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the value of --config among the arguments of `train`, and its overrides, --config.field=value."""
    parser = Parser("train", "")
    parser.add_argument("--config", required=True)
    known, others = parser.parse_known_args(arguments)  # `others` also has flags of train such as --workdir
    return known.config, [argument for argument in others if argument.startswith("--config.")]


def _load_config(arguments: Sequence[str]) -> "ExperimentConfig | None":
    """Returns the configuration that `train` would have, or None if its file is elsewhere, such as in the image.

    Raises:
      UserError: for a missing --config, an unknown experiment, variant or field, or fields that contradict each other:
        better here than on machines that are rented.
    """
    name, overrides = _config_flags(arguments)
    path = pathlib.Path(name.partition(":")[0])  # without the variant
    if "://" in name or (path.suffix and not path.exists()):
        return None
    from tfx_jax.cli.train import load_config_file  # takes seconds to import
    from tfx_jax.training.config import validate

    return validate(load_config_file(name, overrides))


def _warn_of_slow_settings(
    experiment: "ExperimentConfig", arguments: Sequence[str], topology: str, num_slices: int
) -> None:
    """Warns on stderr of settings that make a run on TPUs more than a fifth slower; compiles nothing.

    Only a plan, for which the step is compiled for minutes, knows by how much. By the plans of docs/pod_on_paper.md,
    layers in a loop take a third or more of a step, unless they are computed again in the backward pass: then they
    leave little in memory.
    """
    from tfx_jax.planning.plan import faster_settings  # takes seconds to import

    config, overrides = _config_flags(arguments)
    faster, remat = faster_settings(experiment), getattr(experiment.model, "remat", "none")
    if faster is None or (remat != "none" and faster[0] == "--config.model.unroll=True"):
        return
    slices = [f"--slices={num_slices}"] if num_slices > 1 else []
    plan = shlex.join(["tfx-jax", "plan", f"--config={config}", f"--topology={topology}", *slices, *overrides])
    message = f"probably more than a fifth slower than with {faster[0]}: {plan} predicts by how much"
    print(f"warning      {printable(message)}", file=sys.stderr, flush=True)


def _start(plan: Plan, command: Sequence[str], config: "ExperimentConfig | None") -> int:
    """Prints the plan of the command to stderr, starts it, and returns its exit status.

    Args:
      plan: what is started.
      command: verb and arguments.
      config: the configuration of a training; None if it is not known here.
    """
    if shutil.which(plan.program) is None:
        raise UserError(
            f"{plan.program} is not installed here: install it, or write the commands to a file with "
            f"--dry-run --output=FILE and run that where {plan.program} is installed"
        )
    print(plan.text, end="", file=sys.stderr, flush=True)
    if config is not None and plan.topology is not None:
        _warn_of_slow_settings(config, command[1:], plan.topology, plan.num_slices)
    return plan.start()
