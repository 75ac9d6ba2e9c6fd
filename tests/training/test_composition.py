"""Any task trains any model of its kind: what no paper has combined is trained for two steps and evaluated."""

import copy

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from tests.tiers import slow_but
from tfx_jax.models import T5, Seq2Seq, Seq2SeqConfig, T5Config, Transformer, TransformerConfig
from tfx_jax.tasks.text.parsing import ParsingConfig
from tfx_jax.tasks.text.question_answering import QuestionData
from tfx_jax.tasks.text.span_corruption import SpanCorruptionConfig
from tfx_jax.tasks.text.tagging import TaggedData
from tfx_jax.tasks.text.text_data import TextData
from tfx_jax.tasks.text.text_to_text import TextToTextConfig
from tfx_jax.tasks.text.translation import TranslationConfig
from tfx_jax.training.checkpoint.checkpoints import load_params
from tfx_jax.training.config import ExperimentConfig, load_config, tiny_variant
from tfx_jax.training.loop import train
from tfx_jax.training.run import load_run

# The special tokens of T5's tokenizers, and those of translation.
T5_TOKENS = {"pad_id": 0, "start_id": 0, "eos_id": 1}
TRANSLATION_TOKENS = {"pad_id": 0, "start_id": 1, "eos_id": 2}

CASES = {
    "transformer-span-corruption": (TransformerConfig(**T5_TOKENS), SpanCorruptionConfig(TextData(documents="lines"))),
    "transformer-labels": (TransformerConfig(**T5_TOKENS), TextToTextConfig()),
    "transformer-tags": (TransformerConfig(**T5_TOKENS), TextToTextConfig(TaggedData())),
    "transformer-answers": (TransformerConfig(**T5_TOKENS), TextToTextConfig(QuestionData())),
    "t5-parsing": (T5Config(**TRANSLATION_TOKENS), ParsingConfig()),
    "seq2seq-parsing": (Seq2SeqConfig(**TRANSLATION_TOKENS), ParsingConfig()),
    "t5-translation": (T5Config(**TRANSLATION_TOKENS), TranslationConfig()),
    "seq2seq-span-corruption": (Seq2SeqConfig(**T5_TOKENS), SpanCorruptionConfig(TextData(documents="lines"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(CASES, "transformer-span-corruption"))
def test_a_task_trains_a_model_of_another_paper(name, tmp_path):
    model, task = copy.deepcopy(CASES[name])
    config = tiny_variant(ExperimentConfig(model, task))
    config.num_steps, config.mesh.data, config.optimizer.warmup_steps = 2, 1, 1
    config.model.dropout_rate = 0.0  # compiles sooner, as short texts and a beam of one do
    config.task.data.max_length = 16
    if hasattr(config.task, "decoding"):
        config.task.decoding.beam_size, config.task.decoding.extra_length = 1, 0
    result = train(config, tmp_path)
    assert result.step == 2
    assert load_config(tmp_path) == config
    run = load_run(tmp_path)
    (evaluation,) = result.evaluations
    assert evaluation.keys() == {"step", *(metric.name for metric in run.task.metrics)}
    assert all(np.isfinite(value) for value in evaluation.values())
    params = load_params(tmp_path)
    assert {"step": 2} | run.evaluate(params).metrics == pytest.approx(evaluation)
    drawn = nnx.eval_shape(run.make_model)
    assert type(drawn) is {"t5": T5, "seq2seq": Seq2Seq, "transformer": Transformer}[name.partition("-")[0]]
    assert drawn.config.vocab_size == run.task.tokenizer.vocab_size + len(getattr(run.task, "symbols", ()))
    chex.assert_trees_all_equal_shapes_and_dtypes(params, nnx.to_pure_dict(nnx.state(drawn)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
