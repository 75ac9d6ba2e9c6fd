"""`tfx-jax average`: averages the newest checkpoints, which often translates better than the last checkpoint."""

from collections.abc import Sequence

from tfx_jax.arguments import Parser, folder
from tfx_jax.cli.support.options import add_nonfinite_option, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.training.checkpoint.checkpoints import average_checkpoints
from tfx_jax.training.run import load_run


def run(argv: Sequence[str]) -> int:
    """Writes the averaged checkpoint and prints the steps it averages."""
    parser = Parser(
        "average",
        "Averages the parameters of the newest checkpoints of a run. Other verbs load the result with --step=average.",
    )
    parser.add_argument("--workdir", type=folder, required=True, help="folder of the training run, local or gs://")
    parser.add_argument(
        "--last",
        type=int,
        help="number of checkpoints to average; by default config.keep_last, or all if there are fewer",
    )
    add_nonfinite_option(parser)
    arguments = parser.parse_args(argv)
    set_up_program()
    run = load_run(arguments.workdir)
    last = run.config.keep_last if arguments.last is None else arguments.last
    progress = Progress("read {} checkpoints")
    steps = average_checkpoints(
        arguments.workdir,
        last,
        or_fewer=arguments.last is None,
        allow_nonfinite=arguments.allow_nonfinite,
        check=run.check_params,
        on_checkpoint=progress.update,
    )
    progress.clear()
    print(f"averaged the checkpoints of steps {', '.join(map(str, steps))}")
    return 0
