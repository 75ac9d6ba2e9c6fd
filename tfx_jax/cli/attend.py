"""`tfx-jax attend`: a sentence pair as a picture of every head's attention."""

from collections.abc import Sequence

from tfx_jax.cli.attention_plot import save_attention
from tfx_jax.cli.options import Parser, add_model_options, load_model, set_up_program
from tfx_jax.errors import UserError


def run(argv: Sequence[str]) -> int:
    """Draws the attention of a pair; without a target, of the model's own translation."""
    parser = Parser("attend", "Draws what every head of a trained model looks at, for one sentence pair.")
    add_model_options(parser)
    parser.add_argument("--source", required=True, help="sentence to read")
    parser.add_argument("--target", help="its translation; the model's own by default")
    parser.add_argument("--output", required=True, help="file to write, .png, .pdf or .svg")
    arguments = parser.parse_args(argv)
    if not arguments.source.strip():
        raise UserError("--source is empty")
    set_up_program()
    experiment, params = load_model(arguments)
    maps, source, target = experiment.attention(params, arguments.source, arguments.target)
    save_attention(arguments.output, maps, source, target, target_inputs=["<s>", *target[:-1]])
    print(f"drew {len(maps)} attention maps in {arguments.output}")
    return 0
