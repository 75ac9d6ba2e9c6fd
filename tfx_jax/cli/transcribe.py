"""`tfx-jax transcribe`: transcribes WAV files, one line per file."""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from tfx_jax.arguments import Parser, beam_width
from tfx_jax.cli.support.lines import shown
from tfx_jax.cli.support.options import add_folder_options, check_one_source, load_model, set_up_program
from tfx_jax.data.sources.audio import read_wav_file
from tfx_jax.errors import UserError
from tfx_jax.functional.audio import WHISPER_SAMPLE_RATE
from tfx_jax.generation.speech import TASKS, Transcriber
from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech, utterance_of
from tfx_jax.tasks.speech.speech_data import Utterance
from tfx_jax.tasks.speech.speech_recognition import SpeechRecognitionTask
from tfx_jax.training.predictor import files_of


def run(argv: Sequence[str]) -> int:
    """Writes one line per file; a file that cannot be read gets an empty line and an error on stderr.

    The exit status is 2 if any file could not be read.
    """
    parser = Parser(
        "transcribe", "Transcribes WAV files of any sample rate, one line per file, with a Whisper or a trained model."
    )
    add_folder_options(parser, "of a Whisper, with its tokenizer")
    parser.add_argument("files", nargs="+", metavar="FILE.wav", help="audio file, or a folder of them, to transcribe")
    parser.add_argument(
        "--beam",
        type=beam_width,
        help="beam width; by default 1 for --model, and for --workdir that of the configuration",
    )
    parser.add_argument("--language", help="of --model, the language spoken, such as de; by default it is detected")
    parser.add_argument("--task", choices=TASKS, help="of --model, whether to transcribe or to translate into English")
    arguments = parser.parse_args(argv)
    arguments.files = files_of(arguments.files, (".wav",))
    check_one_source(arguments)
    if arguments.model is None and (arguments.language, arguments.task) != (None, None):
        raise UserError("--language and --task are for --model: a trained model has one language and one task")
    set_up_program()
    return _with_whisper(arguments) if arguments.workdir is None else _with_run(arguments)


def _with_whisper(arguments: argparse.Namespace) -> int:
    """Transcribes each file by itself with a Whisper."""
    options = {"beam_size": arguments.beam or 1, "allow_nonfinite": arguments.allow_nonfinite}
    transcriber, status = Transcriber.load(arguments.model, **options), 0
    for file in arguments.files:
        text = ""
        try:
            samples = read_wav_file(file, WHISPER_SAMPLE_RATE) / np.float32(32_768)
            if len(samples) > transcriber.max_samples:
                seconds = len(samples) / WHISPER_SAMPLE_RATE
                max_seconds = transcriber.max_samples / WHISPER_SAMPLE_RATE
                raise UserError(
                    f"{file} lasts {seconds:.1f} seconds, but the model reads at most {max_seconds:.1f}: cut the file"
                )
            text = transcriber(samples, language=arguments.language, task=arguments.task or "transcribe")
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        print(shown(text), flush=True)
    return status


def _with_run(arguments: argparse.Namespace) -> int:
    """Transcribes all files together with a model trained here."""
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
            utterances[index] = utterance_of(file, data)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
    transcripts = task.predict(loaded_run.trained(params), list(utterances.values()))
    transcript_of = dict(zip(utterances, transcripts, strict=True))
    for index in range(len(arguments.files)):
        print(shown(transcript_of.get(index, "")))
    return 0 if len(utterances) == len(arguments.files) else 2
