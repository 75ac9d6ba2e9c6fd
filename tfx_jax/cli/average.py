"""`tfx-jax average`: the mean of the newest checkpoints translates better than the last one."""

from collections.abc import Sequence

from tfx_jax.arguments import Parser, folder
from tfx_jax.cli.support.options import add_nonfinite_option, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.training.checkpoint.checkpoints import average_checkpoints
from tfx_jax.training.run import load_run


def run(argv: Sequence[str]) -> int:
    """Averages and says what."""
    parser = Parser(
        "average", "Averages the newest checkpoints; translate and evaluate take the mean as --step=average."
    )
    parser.add_argument("--workdir", type=folder, required=True, help="folder of a training, local or gs://")
    parser.add_argument("--last", type=int, help="how many checkpoints; config.keep_last, or all there are, by default")
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
