"""Tasks on synthetic and byte-level sequences: Long Range Arena, duplication and recall."""

from tfx_jax.tasks.sequence.duplication import DuplicationConfig, DuplicationData, DuplicationTask, duplication_loss
from tfx_jax.tasks.sequence.long_range import (
    ListOpsData,
    LongRangeConfig,
    LongRangeTask,
    PassagePairData,
    SectionData,
    long_range_loss,
)
from tfx_jax.tasks.sequence.recall import RecallConfig, RecallData, RecallTask

__all__ = [
    "DuplicationConfig",
    "DuplicationData",
    "DuplicationTask",
    "ListOpsData",
    "LongRangeConfig",
    "LongRangeTask",
    "PassagePairData",
    "RecallConfig",
    "RecallData",
    "RecallTask",
    "SectionData",
    "duplication_loss",
    "long_range_loss",
]
