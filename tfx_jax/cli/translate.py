"""`tfx-jax translate`: translates standard input line by line; a parsing model writes trees instead."""

import sys
from collections.abc import Sequence

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.lines import LineReader, answered, count_lines, shown
from tfx_jax.cli.support.options import add_decoding_options, add_model_options, load_model, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.tasks.text.parsing import ParsingTask
from tfx_jax.tasks.text.translation import TranslationTask

_LINES_AT_A_TIME = 2_048  # sorted by length together; their translations are written before more lines are read


def run(argv: Sequence[str]) -> int:
    """Translates standard input to standard output."""
    parser = Parser(
        "translate",
        "Translates standard input, line by line, to standard output (both UTF-8). Lines that are typed or arrive "
        "slowly are translated at once; Ctrl-D ends the input. A parsing model writes the tree of each line. A line "
        "without visible characters becomes an empty line.",
    )
    add_model_options(parser)
    add_decoding_options(parser)
    arguments = parser.parse_args(argv)
    set_up_program()
    run, params = load_model(arguments, (TranslationTask, ParsingTask))
    reader = LineReader(sys.stdin.buffer)
    progress = Progress("translated {} lines", count_lines(sys.stdin.buffer))
    translator = run.task.translator(
        run.graphdef,
        beam_size=arguments.beam,
        length_penalty=arguments.length_penalty,
        int8=arguments.int8,
        on_batch=None if reader.is_terminal else progress.advance,
    )
    while lines := reader.take(_LINES_AT_A_TIME):
        for translations in answered(lines, lambda lines, _: translator(params, lines), 0):
            progress.clear()
            sys.stdout.buffer.write("".join(f"{shown(translation)}\n" for translation in translations).encode())
            sys.stdout.buffer.flush()
    return 0
