"""`tfx-jax evaluate`: how good the translations of a trained model are."""

import json
from collections.abc import Sequence

from tfx_jax.cli.options import Parser, add_decoding_options, add_model_options, load_model, set_up_program
from tfx_jax.data.text import read_pairs
from tfx_jax.errors import UserError
from tfx_jax.training.experiment import open_pairs


def run(argv: Sequence[str]) -> int:
    """Translates an evaluation part and prints its scores; the last line is the exact match."""
    parser = Parser("evaluate", "Translates held-out text and scores it against the reference.")
    add_model_options(parser)
    add_decoding_options(parser)
    parser.add_argument("--split", choices=("validation", "test"), default="validation", help="part of the data set")
    parser.add_argument("--source", help="file to translate instead, one sentence a line")
    parser.add_argument("--reference", help="its translation, line by line")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead")
    arguments = parser.parse_args(argv)
    if (arguments.source is None) != (arguments.reference is None):
        raise UserError("--source and --reference go together")
    set_up_program()
    experiment, params = load_model(arguments)
    if arguments.source is None:
        pairs = open_pairs(experiment.config.data, arguments.split)
    else:
        pairs = read_pairs(arguments.source, arguments.reference, keep_empty=True)
    translator = experiment.translator(beam_size=arguments.beam, alpha=arguments.alpha, int8=arguments.int8)
    scores, _, _ = experiment.evaluate(translator, params, pairs)
    if arguments.json:
        print(json.dumps(scores._asdict() | {"sentences": len(pairs)}))
        return 0
    print(f"sentences: {len(pairs)}")
    print(f"sacreBLEU: {scores.sacrebleu:.2f}  ({scores.signature})")
    print(f"tokenised BLEU: {scores.tokenised:.2f}")
    print(f"tokenised BLEU, compounds split: {scores.compound_split:.2f}")
    print(f"exact match: {scores.exact_match:.1f} %")
    return 0
