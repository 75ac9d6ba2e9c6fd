"""`tfx-jax predict`: predicts one output per input line, with any model that takes text."""

import json
import sys
from collections.abc import Sequence

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.lines import LineReader, answered, count_lines, shown
from tfx_jax.cli.support.options import add_model_options, load_model, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.errors import UserError
from tfx_jax.tasks.text.answers import Prediction
from tfx_jax.training.predictor import Predictor

_LINES_AT_A_TIME = 2_048  # sorted by length together; their answers are written before more lines are read


def run(argv: Sequence[str]) -> int:
    """Writes one prediction to standard output for each line of standard input."""
    parser = Parser(
        "predict",
        "Predicts one output per line of standard input: the label of a text and its probability, the tags of its "
        "words, the answer to a question, or a translation. An input of several parts (two texts; a question and its "
        "context) is one line with a TAB between the parts. A line with a part without visible characters gets an "
        "empty output.",
    )
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with all probabilities")
    arguments = parser.parse_args(argv)
    set_up_program()
    reader, number, num_lines = LineReader(sys.stdin.buffer), 0, count_lines(sys.stdin.buffer)
    progress = Progress("answered {} lines", num_lines)

    def show(done: int, _: int) -> None:
        if not reader.is_terminal:
            progress.update(number + done, num_lines)

    predictor = Predictor(*load_model(arguments), on_batch=show)

    def answer(lines: list[str], number: int) -> list[str]:
        inputs = [_parts(line, i, predictor.inputs) for i, line in enumerate(lines, number + 1)]
        answers = predictor.predict(inputs)
        return [json.dumps(one, ensure_ascii=False) if arguments.json else _as_line(one) for one in answers]

    while lines := reader.take(_LINES_AT_A_TIME):
        for answers in answered(lines, answer, number):
            show(len(answers), 0)
            number += len(answers)
            progress.clear()
            sys.stdout.buffer.write("".join(f"{shown(line)}\n" for line in answers).encode())
            sys.stdout.buffer.flush()
    return 0


def _parts(line: str, number: int, inputs: tuple[str, ...]) -> list[str]:
    """Splits line `number` at TABs into the parts that `inputs` names; raises UserError for another number of parts."""
    parts = line.split("\t") if len(inputs) > 1 else [line]
    if len(parts) != len(inputs):
        expected = ", TAB, ".join(inputs)
        raise UserError(f"standard input, line {number}: expected {expected}, but the line has {len(parts) - 1} TABs")
    return parts


def _as_line(answer: Prediction) -> str:
    """Returns the first value of a prediction on one line; a label is followed by TAB and its probability."""
    first = next(iter(answer.values()))
    if not first:
        return ""
    text = " ".join(first) if isinstance(first, list) else " ".join(first.split())
    return f"{text}\t{answer['probability']:.4f}" if "probability" in answer else text
