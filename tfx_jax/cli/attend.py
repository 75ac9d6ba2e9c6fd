"""`tfx-jax attend`: every head's attention to a sentence pair, as a picture or as a page to explore."""

from collections.abc import Sequence

from tfx_jax.cli.attention_plot import save_attention
from tfx_jax.cli.attention_view import AttentionView
from tfx_jax.cli.options import add_model_options, load_model, set_up_program
from tfx_jax.cli.parser import Parser
from tfx_jax.errors import UserError
from tfx_jax.tasks.translation import TranslationTask


def run(argv: Sequence[str]) -> int:
    """Draws the attention of a pair; without a target, of the model's own translation."""
    parser = Parser("attend", "Draws what every head of a trained model looks at, for one sentence pair.")
    add_model_options(parser)
    parser.add_argument("--source", required=True, help="sentence to read")
    parser.add_argument("--target", help="its translation; the model's own by default")
    parser.add_argument("--output", help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--html", help="page to write, for a browser: choose heads, point at words")
    arguments = parser.parse_args(argv)
    if arguments.output is None and arguments.html is None:
        raise UserError("attend needs --output=PICTURE or --html=PAGE, or both")
    if not arguments.source.strip():
        raise UserError("--source is empty")
    set_up_program()
    run, params = load_model(arguments, TranslationTask)
    maps, source, target = run.task.attention(run.trained(params), arguments.source, arguments.target)
    target_inputs = ["<s>", *target[:-1]]
    if arguments.output is not None:
        save_attention(arguments.output, maps, source, target, target_inputs=target_inputs)
        print(f"drew {len(maps)} attention maps in {arguments.output}")
    if arguments.html is not None:
        AttentionView(maps, source, target, target_inputs=target_inputs).save(arguments.html)
        print(f"wrote {len(maps)} attention maps to {arguments.html}")
    return 0
