"""Tasks on synthetic and byte-level sequences: Long Range Arena and duplication."""

from tfx_jax.tasks.sequence.duplication import DuplicationConfig, DuplicationData, DuplicationTask, duplication_loss
from tfx_jax.tasks.sequence.long_range import (
    ListOpsData,
    LongRangeConfig,
    LongRangeTask,
    PassagePairData,
    SectionData,
    long_range_loss,
)

__all__ = [
    "DuplicationConfig",
    "DuplicationData",
    "DuplicationTask",
    "ListOpsData",
    "LongRangeConfig",
    "LongRangeTask",
    "PassagePairData",
    "SectionData",
    "duplication_loss",
    "long_range_loss",
]
