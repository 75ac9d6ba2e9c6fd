"""`tfx-jax evaluate`: scores a trained model on held-out data."""

import argparse
import json
from collections.abc import Sequence

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.options import add_decoding_options, add_model_options, load_model, set_up_program
from tfx_jax.cli.support.overrides import OVERRIDES_HELP
from tfx_jax.cli.support.progress import Progress
from tfx_jax.data.sources.text import PairSource, read_pairs
from tfx_jax.errors import UserError
from tfx_jax.tasks.text.translation import TranslationTask
from tfx_jax.training.run import Run
from tfx_jax.training.step import Params


def run(argv: Sequence[str]) -> int:
    """Prints the metrics of a split, one per line; for translation the last line is the exact match."""
    parser = Parser(
        "evaluate",
        "Scores a trained model on held-out data. Translations are compared with their references (BLEU). To score "
        "another labeled file, name it: --split=test --config.task.data.test_file=FILE.",
    )
    add_model_options(parser)
    add_decoding_options(parser)
    parser.add_argument(
        "--split",
        choices=("validation", "test"),
        default="validation",
        help="split to evaluate; %(default)s by default",
    )
    parser.add_argument(
        "--source", help="translation models: file to translate instead of --split, one sentence per line"
    )
    parser.add_argument(
        "--reference", help="translation models: reference translations of --source, one sentence per line"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.epilog = OVERRIDES_HELP.replace("model.num_layers=2", "task.data.max_length=64")
    arguments, overrides = parser.parse_known_args(argv)
    if (arguments.source is None) != (arguments.reference is None):
        raise UserError("--source and --reference must be given together")
    other = {"validation": "test", "test": "validation"}[arguments.split]
    for override in overrides:
        if override.startswith(f"--config.task.data.{other}_"):
            flag = override.partition("=")[0]
            raise UserError(f"{flag} is read with --split={other} alone, and this is --split={arguments.split}")
    set_up_program()
    run, params = load_model(arguments, overrides=overrides)
    if isinstance(run.task, TranslationTask):
        return _evaluate_translation(run, params, arguments)
    flags = {name: getattr(arguments, name) for name in ("source", "beam", "length_penalty", "int8")}
    translation_flags = [name for name, value in flags.items() if value is not None and value is not False]
    if translation_flags:
        flag = translation_flags[0].replace("_", "-")
        raise UserError(
            f"--{flag} needs a translation model, but {arguments.workdir} holds another: leave --{flag} out"
        )
    progress = Progress("evaluated {} examples")
    values, _ = run.evaluate(params, arguments.split, on_batch=progress.update)
    progress.clear()
    if arguments.json:
        print(json.dumps(values))
        return 0
    for metric in run.task.metrics:
        print(f"{metric.title}: {metric.format(values[metric.name])}")
    return 0


def _evaluate_translation(run: Run[TranslationTask], params: Params, arguments: argparse.Namespace) -> int:
    """Translates a split, or the file of --source, prints the scores, and returns the exit status."""
    if arguments.source is None:
        pairs: PairSource = run.config.task.splits()[arguments.split]
    else:
        pairs = read_pairs(arguments.source, arguments.reference, keep_empty=True)
    progress = Progress("translated {} sentences", len(pairs))
    translator = run.task.translator(
        run.graphdef,
        beam_size=arguments.beam,
        length_penalty=arguments.length_penalty,
        int8=arguments.int8,
        on_batch=progress.advance,
    )
    scores, _, _ = run.task.score(translator, run.trained(params), pairs)
    progress.clear()
    if arguments.json:
        print(json.dumps(scores._asdict() | {"sentences": len(pairs)}))
        return 0
    print(f"sentences: {len(pairs)}")
    print(f"sacreBLEU: {scores.sacrebleu:.2f}  ({scores.signature})")
    print(f"tokenized BLEU: {scores.tokenized:.2f}")
    print(f"tokenized BLEU, compounds split: {scores.compound_split:.2f}")
    print(f"exact match: {scores.exact_match:.1f} %")
    return 0
