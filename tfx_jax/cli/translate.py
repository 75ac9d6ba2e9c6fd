"""`tfx-jax translate`: lines in, as many lines out."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from tfx_jax.cli.options import Parser, add_decoding_options, add_model_options, load_model, set_up_program
from tfx_jax.errors import UserError
from tfx_jax.training.experiments.translation import TranslationExperiment

_LINES_AT_A_TIME = 2_048  # sorted by length together; what was translated is written before more is read


def run(argv: Sequence[str]) -> int:
    """Translates standard input to standard output."""
    parser = Parser("translate", "Translates standard input, line by line, to standard output; UTF-8 both.")
    add_model_options(parser)
    add_decoding_options(parser)
    arguments = parser.parse_args(argv)
    set_up_program()
    experiment, params = load_model(arguments, TranslationExperiment)
    translator = experiment.translator(beam_size=arguments.beam, alpha=arguments.alpha, int8=arguments.int8)
    lines = read_lines(sys.stdin.buffer)
    while chunk := list(itertools.islice(lines, _LINES_AT_A_TIME)):
        for translation in translator(params, chunk):
            sys.stdout.buffer.write(translation.encode() + b"\n")
        sys.stdout.buffer.flush()
    return 0


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """Decodes the lines of a stream.

    Raises:
      UserError: at a line that is not UTF-8.
    """
    for number, line in enumerate(stream, start=1):
        try:
            yield line.rstrip(b"\r\n").decode()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input, line {number}: not UTF-8 ({error.reason})") from None
