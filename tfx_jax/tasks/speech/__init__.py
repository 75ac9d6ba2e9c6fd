"""Speech recognition with CTC, on recorded or synthetic speech."""

from tfx_jax.tasks.speech.recorded_speech import RecordedSpeech
from tfx_jax.tasks.speech.speech_data import SpeechData, SyntheticSpeech
from tfx_jax.tasks.speech.speech_recognition import (
    MaskConfig,
    SpeechRecognitionConfig,
    SpeechRecognitionTask,
    recognition_loss,
)

__all__ = [
    "MaskConfig",
    "RecordedSpeech",
    "SpeechData",
    "SpeechRecognitionConfig",
    "SpeechRecognitionTask",
    "SyntheticSpeech",
    "recognition_loss",
]
