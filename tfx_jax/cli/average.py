"""`tfx-jax average`: the mean of the newest checkpoints translates better than the last one."""

from collections.abc import Sequence

from etils import epath

from tfx_jax.cli.options import Parser, set_up_program
from tfx_jax.training.checkpoint import average_checkpoints
from tfx_jax.training.config import load_config


def run(argv: Sequence[str]) -> int:
    """Averages and says what."""
    parser = Parser(
        "average", "Averages the newest checkpoints; translate and evaluate take the mean as --step=average."
    )
    parser.add_argument("--workdir", required=True, help="folder of a training, local or gs://")
    parser.add_argument("--last", type=int, help="how many checkpoints; as many as the training keeps by default")
    arguments = parser.parse_args(argv)
    set_up_program()
    config = load_config(epath.Path(arguments.workdir))
    steps = average_checkpoints(arguments.workdir, config.keep_last if arguments.last is None else arguments.last)
    print(f"averaged the checkpoints of steps {', '.join(map(str, steps))}")
    return 0
