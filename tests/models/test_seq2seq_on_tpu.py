"""The training step of recurrent translation compiles for a TPU, on a machine without one."""

import jax
import pytest

from tests.tiers import slow_but
from tfx_jax.models.seq2seq import ALIGNMENTS, VARIANTS, Seq2SeqConfig
from tfx_jax.planning.plan import plan_training
from tfx_jax.tasks.text.translation import PairData, TranslationConfig
from tfx_jax.training.config import ExperimentConfig


@pytest.mark.aot
@pytest.mark.parametrize("name", slow_but((*VARIANTS, *ALIGNMENTS[1:], "coverage"), "luong"))
def test_the_step_compiles(tpu_devices, name):
    kind = {"variant" if name in VARIANTS else "alignment": name}
    kind = {"variant": "bahdanau", "coverage": 1.0} if name == "coverage" else kind
    model = Seq2SeqConfig(vocab_size=128, num_layers=2, d_model=128, dtype="bfloat16", **kind)
    data = PairData(max_length=16, tokens_per_batch=256)
    with jax.default_matmul_precision("default"), jax.numpy_dtype_promotion("standard"):  # as users have them
        plan = plan_training(ExperimentConfig(model, TranslationConfig(data)), tpu_devices("v5e:1x1"))
    assert plan.fits, plan.error
    assert plan.batch == {"source": (16, 16), "target": (16, 16)}
    assert plan.predicted_step_seconds > 0
