"""`tfx-jax attend`: every head's attention to a pair of sentences as a picture or a page, or to a record as a list."""

import argparse
from collections.abc import Sequence

from tfx_jax.cli.attention_plot import save_attention
from tfx_jax.cli.attention_view import AttentionView
from tfx_jax.cli.options import add_model_options, load_model, set_up_program
from tfx_jax.cli.parser import Parser, at_least_one
from tfx_jax.data.splits import SPLITS
from tfx_jax.errors import UserError
from tfx_jax.tasks.event_classification import EventClassificationTask
from tfx_jax.tasks.sentence_pairs import SentencePairTask
from tfx_jax.tasks.translation import TranslationTask


def run(argv: Sequence[str]) -> int:
    """Draws the attention of a pair, without a target of the model's own translation; or lists that of a record."""
    parser = Parser(
        "attend", "Draws what every head of a trained model looks at, for one sentence pair, or lists it for a record."
    )
    add_model_options(parser)
    parser.add_argument("--source", help="sentence to read: of a pair, the first, and the premise of a second one")
    parser.add_argument("--target", help="its translation, the model's own by default; or the second sentence")
    parser.add_argument("--output", help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--html", help="page to write, for a browser: choose heads, point at words")
    parser.add_argument("--row", type=at_least_one, help="of a model of events: list those of this record, from 1")
    parser.add_argument("--split", default="validation", choices=SPLITS, help="of --row; validation by default")
    arguments = parser.parse_args(argv)
    if (arguments.row is None) == (arguments.source is None):
        raise UserError("attend needs --source=SENTENCE, or --row=NUMBER of a model of events")
    if arguments.row is not None:
        return _list_events(arguments)
    if arguments.output is None and arguments.html is None:
        raise UserError("attend needs --output=PICTURE or --html=PAGE, or both")
    if not arguments.source.strip():
        raise UserError("--source is empty")
    set_up_program()
    run, params = load_model(arguments)
    if not isinstance(run.task, TranslationTask | SentencePairTask):
        raise UserError(f"{arguments.workdir} holds no model of sentence pairs: attend draws translations and pairs")
    maps, source, target = run.task.attention(run.trained(params), arguments.source, arguments.target)
    target_inputs = ["<s>", *target[:-1]]
    if arguments.output is not None:
        save_attention(arguments.output, maps, source, target, target_inputs=target_inputs)
        print(f"drew {len(maps)} attention maps in {arguments.output}")
    if arguments.html is not None:
        AttentionView(maps, source, target, target_inputs=target_inputs).save(arguments.html)
        print(f"wrote {len(maps)} attention maps to {arguments.html}")
    return 0


def _list_events(arguments: argparse.Namespace) -> int:
    """Prints the events of a record by falling weight, one a line: weight, name, value and, of what has any, time."""
    set_up_program()
    run, params = load_model(arguments, EventClassificationTask)
    probability, label, shares = run.task.attention(run.trained(params), arguments.split, arguments.row - 1)
    print(f"record {arguments.row} of {arguments.split}: label {label}, probability of label 1 {probability:.3f}")
    has_times = any(share.time for share in shares)
    for name, value, time, weight in shares:
        print(f"{weight:.4f}\t{name}\t{value:g}" + (f"\t{time:.2f}" if has_times else ""))
    return 0
