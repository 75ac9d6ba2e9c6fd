"""Tasks on images: captioning and classification."""

from tfx_jax.tasks.vision.captioning import CaptionData, CaptioningConfig, CaptioningTask, captioning_loss
from tfx_jax.tasks.vision.image_classification import (
    ImageClassificationConfig,
    ImageClassificationTask,
    ImageData,
    image_classification_loss,
)

__all__ = [
    "CaptionData",
    "CaptioningConfig",
    "CaptioningTask",
    "ImageClassificationConfig",
    "ImageClassificationTask",
    "ImageData",
    "captioning_loss",
    "image_classification_loss",
]
