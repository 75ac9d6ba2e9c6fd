"""`tfx-jax transcribe`: WAV files in, what is said in them out, one line each."""

import sys
from collections.abc import Sequence

import numpy as np
from etils import epath

from tfx_jax.arguments import Parser, beam_width
from tfx_jax.cli.support.lines import shown
from tfx_jax.cli.support.options import add_model_options, load_model, set_up_program
from tfx_jax.data.sources.audio import read_wav
from tfx_jax.errors import UserError
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech, in_frames
from tfx_jax.tasks.speech.speech_data import Utterance
from tfx_jax.tasks.speech.speech_recognition import SpeechRecognitionTask

_SILENT_FRAMES = 10
"""Silence that a file gets on either side, a tenth of a second: what is cut tightly is heard better with it."""


def run(argv: Sequence[str]) -> int:
    """Writes a line for each file; one that cannot be read is an empty line, told of on standard error."""
    parser = Parser("transcribe", "Writes down what is said in WAV files, of any sample rate, a line for each.")
    add_model_options(parser)
    parser.add_argument("files", nargs="+", metavar="FILE.wav")
    parser.add_argument("--beam", type=beam_width, help="prefixes that the search keeps; the training's by default")
    arguments = parser.parse_args(argv)
    set_up_program()
    trained, params = load_model(arguments, SpeechRecognitionTask)
    task, data = trained.task, trained.config.task.data
    if not isinstance(data, RecordedSpeech):
        raise UserError(f"{arguments.workdir} learned from synthetic frames: it hears no sounds")
    task.config.beam_size = arguments.beam or task.config.beam_size
    utterances, mistakes = dict[int, Utterance](), 0
    for number, file in enumerate(arguments.files):
        try:
            utterances[number] = _read(file, data)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            mistakes += 1
    found = dict(zip(utterances, task.predict(trained.trained(params), list(utterances.values())), strict=True))
    for number in range(len(arguments.files)):
        print(shown(found.get(number, "")))
    return 2 if mistakes else 0


def _read(file: str, data: RecordedSpeech) -> Utterance:
    try:
        content = epath.Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    frames = in_frames(read_wav(content, data.sample_rate, name=file), data.hop)
    if len(frames) > data.max_length:
        seconds, longest = (count * data.hop / data.sample_rate for count in (len(frames), data.max_length))
        raise UserError(f"{file} takes {seconds:.1f} seconds, and the model was trained on up to {longest:.1f}: cut it")
    room = min(_SILENT_FRAMES, (data.max_length - len(frames)) // 2)
    return Utterance(np.pad(frames, ((room, room), (0, 0))), "")
