"""`tfx-jax predict`: predicts one output per line of text, image or recording, with any trained model."""

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.lines import answered, count_lines, open_readers, shown
from tfx_jax.cli.support.options import add_model_options, load_model, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.errors import UserError
from tfx_jax.tasks.text.answers import Prediction
from tfx_jax.training.predictor import files_of, load_from_run, read_inputs

_LINES_AT_A_TIME = 2_048  # sorted by length together; their answers are written before more lines are read
_FILES_AT_A_TIME = 256


def run(argv: Sequence[str]) -> int:
    """Writes one prediction to standard output for each line of text, or for each image or recording."""
    parser = Parser(
        "predict",
        "Predicts one output per line of standard input or of text files: the label of a text and its probability, the "
        "tags of its words, the answer to a question, a translation, or a continuation. An input of several parts (two "
        "texts; a question and its context) is one line with a TAB between the parts. A line with a part without "
        "visible characters gets an empty output. Of a file in the format of the training files, such as a CSV with "
        "the same columns, only the inputs are read; labels may be missing. A model of images or sound takes their "
        "files, or folders of them, and prints the name of each file before its output.",
    )
    add_model_options(parser)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="text files, by default standard input; or images, WAV"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with all probabilities")
    parser.add_argument(
        "--conll", action="store_true", help="of a tagger: print WORD, TAB, TAG on a line, and an empty line after each"
    )
    arguments = parser.parse_args(argv)
    if arguments.json and arguments.conll:
        raise UserError("--json and --conll are two formats: give one of them")
    set_up_program()
    progress = Progress("answered {} inputs")
    num_done, num_lines, is_typed = 0, None, False

    def show(done: int, _: int) -> None:
        """Shows the progress after `done` of the current inputs; the arguments are those of `OnBatch`."""
        if not is_typed:
            progress.update(num_done + done, num_lines)

    if not arguments.files:  # counted before the model is loaded, in case nothing can be read
        num_lines = count_lines(sys.stdin.buffer)
    run, params = load_model(arguments)
    if arguments.conll and "tags" not in getattr(run.task, "empty_answer", {}):
        raise UserError("--conll is for models that tag words: leave it out")
    model = load_from_run(run, params, on_batch=show)
    model.predict([])  # raises before anything is read if it cannot predict
    if model.suffixes and not arguments.files:
        raise UserError(f"the model reads files: name some that end with {' or '.join(model.suffixes)}, or folders")

    def answer(inputs: list[Any], first: int, name: str) -> list[str]:
        """Returns the output line of each input; `first` is the index of the first one in the stream `name`."""
        rows = inputs
        if not model.suffixes:
            rows = [
                _parts(line, f"{name}, line {number}", model.inputs or ("text",)) if isinstance(line, str) else line
                for number, line in enumerate(inputs, first + 1)
            ]
        predictions = model.predict(rows)
        if arguments.json:
            return [json.dumps(prediction, ensure_ascii=False) for prediction in predictions]
        as_text = _as_conll if arguments.conll else _as_line
        return [as_text(prediction) for prediction in predictions]

    def write(inputs: list[Any], name: str) -> None:
        """Writes the outputs of inputs; those before a bad one first."""
        nonlocal num_done
        for answers in answered(inputs, functools.partial(answer, name=name), num_done):
            show(len(answers), 0)
            num_done += len(answers)
            progress.clear()
            sys.stdout.buffer.write("".join(f"{shown(line)}\n" for line in answers).encode())
            sys.stdout.buffer.flush()

    if model.suffixes:
        files = files_of(arguments.files, model.suffixes)
        num_lines = len(files)
        for start in range(0, num_lines, _FILES_AT_A_TIME):
            write(files[start : start + _FILES_AT_A_TIME], "")
        return 0
    for reader in open_readers(arguments.files, functools.partial(read_inputs, run.task)):
        num_done, is_typed = 0, reader.is_terminal
        while lines := reader.take(_LINES_AT_A_TIME):
            write(lines, reader.name)
    return 0


def _parts(line: str, where: str, inputs: tuple[str, ...]) -> list[str]:
    """Splits a line at TABs into the parts that `inputs` names; a blank line has blank parts.

    Raises:
      UserError: for another number of parts.
    """
    if is_blank(line):
        return [""] * len(inputs)
    parts = line.split("\t") if len(inputs) > 1 else [line]
    if len(parts) != len(inputs):
        expected = ", TAB, ".join(inputs)
        raise UserError(f"{where}: expected {expected}, but the line has {len(parts) - 1} TABs")
    return parts


def _as_line(answer: Prediction) -> str:
    """Returns the first value of a prediction on one line.

    A label is followed by TAB and its probability; the name of a file and a TAB are before it.
    """
    first = next(iter(answer.values()))
    text = " ".join(first) if isinstance(first, list) else " ".join(first.split())
    if first and "probability" in answer:
        text += f"\t{answer['probability']:.4f}"
    return f"{answer['file']}\t{text}" if "file" in answer else text


def _as_conll(answer: Prediction) -> str:
    """Returns the words of a sentence with their tags, a line each, and an empty line."""
    return "".join(f"{word}\t{tag}\n" for word, tag in zip(answer["words"], answer["tags"], strict=True))
