"""`tfx-jax transcribe`: transcribes WAV files, one line per file."""

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
"""Frames of silence, a tenth of a second, added on either side of a file: tightly cut speech is recognized better."""


def run(argv: Sequence[str]) -> int:
    """Writes one line per file; a file that cannot be read gets an empty line and an error on stderr.

    The exit status is 2 if any file could not be read.
    """
    parser = Parser("transcribe", "Transcribes WAV files of any sample rate, one line per file.")
    add_model_options(parser)
    parser.add_argument("files", nargs="+", metavar="FILE.wav", help="audio file to transcribe")
    parser.add_argument(
        "--beam", type=beam_width, help="beam width of the prefix search; by default that of the configuration"
    )
    arguments = parser.parse_args(argv)
    set_up_program()
    loaded_run, params = load_model(arguments, SpeechRecognitionTask)
    task, data = loaded_run.task, loaded_run.config.task.data
    if not isinstance(data, RecordedSpeech):
        raise UserError(
            f"{arguments.workdir} was trained on synthetic frames, not on audio: name a run of recorded speech"
        )
    task.config.beam_size = arguments.beam or task.config.beam_size
    utterances: dict[int, Utterance] = {}  # by the index of the file; without files that cannot be read
    for index, file in enumerate(arguments.files):
        try:
            utterances[index] = _read(file, data)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
    transcripts = task.predict(loaded_run.trained(params), list(utterances.values()))
    transcript_of = dict(zip(utterances, transcripts, strict=True))
    for index in range(len(arguments.files)):
        print(shown(transcript_of.get(index, "")))
    return 0 if len(utterances) == len(arguments.files) else 2


def _read(file: str, data: RecordedSpeech) -> Utterance:
    """Reads a WAV file, padded with silence, as an utterance without transcript.

    Raises:
      UserError: if it cannot be read, or is longer than training utterances may be.
    """
    try:
        content = epath.Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    frames = in_frames(read_wav(content, data.sample_rate, name=file), data.hop)
    if len(frames) > data.max_length:
        seconds, max_seconds = (count * data.hop / data.sample_rate for count in (len(frames), data.max_length))
        raise UserError(
            f"{file} lasts {seconds:.1f} seconds, but the model was trained on at most {max_seconds:.1f}: cut the file"
        )
    padding = min(_SILENT_FRAMES, (data.max_length - len(frames)) // 2)
    return Utterance(np.pad(frames, ((padding, padding), (0, 0))), "")
