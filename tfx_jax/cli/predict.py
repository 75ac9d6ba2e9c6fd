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
    reader = LineReader(sys.stdin.buffer)
    num_done, num_lines = 0, count_lines(sys.stdin.buffer)
    progress = Progress("answered {} lines", num_lines)

    def show(done: int, _: int) -> None:
        """Shows the progress after `done` lines of the current ones; the arguments are those of `OnBatch`."""
        if not reader.is_terminal:
            progress.update(num_done + done, num_lines)

    predictor = Predictor(*load_model(arguments), on_batch=show)

    def answer(lines: list[str], first: int) -> list[str]:
        """Returns the output line of each input line; `first` is the index of the first one in standard input."""
        inputs = [_parts(line, number, predictor.inputs) for number, line in enumerate(lines, first + 1)]
        predictions = predictor.predict(inputs)
        if arguments.json:
            return [json.dumps(prediction, ensure_ascii=False) for prediction in predictions]
        return [_as_line(prediction) for prediction in predictions]

    while lines := reader.take(_LINES_AT_A_TIME):
        for answers in answered(lines, answer, num_done):
            show(len(answers), 0)
            num_done += len(answers)
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
