"""`tfx-jax translate`: translates standard input line by line; a parsing model writes trees instead."""

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.lines import answered, count_lines, open_readers, shown
from tfx_jax.cli.support.options import add_decoding_options, add_model_options, load_model, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.errors import UserError
from tfx_jax.tasks.text.parsing import ParsingTask
from tfx_jax.tasks.text.translation import TranslationTask, unknown_parts
from tfx_jax.training.predictor import read_inputs

_LINES_AT_A_TIME = 2_048  # sorted by length together; their translations are written before more lines are read
_MAX_REPORTS = 20  # lines with unknown parts that are reported each


def run(argv: Sequence[str]) -> int:
    """Translates standard input to standard output."""
    parser = Parser(
        "translate",
        "Translates standard input or files, line by line, to standard output (both UTF-8). Lines that are typed or "
        "arrive slowly are translated at once; Ctrl-D ends the input. A parsing model writes the tree of each line. "
        "A line without visible characters becomes an empty line. Parts of a line that the tokenizer does not know are "
        "reported on stderr: the model cannot read them.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per line: translation, score (log-probability), unknown parts, tokens, attention",
    )
    add_decoding_options(parser)
    parser.add_argument("files", nargs="*", metavar="FILE", help="text files, by default standard input")
    arguments = parser.parse_args(argv)
    set_up_program()
    run, params = load_model(arguments, (TranslationTask, ParsingTask))
    if arguments.json and not isinstance(run.task, TranslationTask):
        raise UserError("--json is for translations: leave it out, or use tfx-jax predict --json")
    is_typed = not arguments.files and sys.stdin.buffer.isatty()
    progress = Progress("translated {} lines", None if arguments.files else count_lines(sys.stdin.buffer))
    translator = run.task.translator(
        run.graphdef,
        beam_size=arguments.beam,
        length_penalty=arguments.length_penalty,
        int8=arguments.int8,
        on_batch=None if is_typed else progress.advance,
    )
    decoder = translator.decoder(params)
    num_reported = 0

    def translate(lines: list[str], _: int) -> list[str]:
        """Returns the output line of each line."""
        if not arguments.json:
            return translator(decoder, lines)
        translations = cast(Any, translator).translate_ids(decoder, lines)
        not_blank = [index for index, ids in enumerate(translations) if ids]
        descriptions = cast(TranslationTask, run.task).explain(
            run.trained(params), [lines[index] for index in not_blank], [translations[index] for index in not_blank]
        )
        blank = {"translation": "", "score": None, "unknown": [], "source": [], "target": [], "attention": []}
        outputs = [blank] * len(lines)
        for index, description in zip(not_blank, descriptions, strict=True):
            outputs[index] = description
        return [json.dumps(output, ensure_ascii=False) for output in outputs]

    for reader in open_readers(arguments.files, functools.partial(read_inputs, run.task)):
        num_done, where = 0, f"{reader.name}, " if arguments.files else ""
        while rows := reader.take(_LINES_AT_A_TIME):
            lines = [row if isinstance(row, str) else row[0] for row in rows]
            for number, line in enumerate(lines, num_done + 1):
                if unknown := unknown_parts(run.task.tokenizer, line):
                    num_reported += 1
                    if num_reported <= _MAX_REPORTS:
                        progress.clear()
                        parts = ", ".join(repr(part) for part in dict.fromkeys(unknown))
                        print(f"{where}line {number}: the model does not know, and guesses, {parts}", file=sys.stderr)
            for translations in answered(lines, translate, 0):
                progress.clear()
                sys.stdout.buffer.write("".join(f"{shown(translation)}\n" for translation in translations).encode())
                sys.stdout.buffer.flush()
            num_done += len(lines)
    if num_reported > _MAX_REPORTS:
        print(f"{num_reported - _MAX_REPORTS:,} more lines have unknown parts", file=sys.stderr)
    return 0
