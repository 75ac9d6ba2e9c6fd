"""How many heads the published models have: no count of parameters tells, and other heads compute something else."""

import pytest

from tfx_jax.models.bert import BertConfig
from tfx_jax.models.vit import ViTConfig


# Devlin et al. (2019), section 3, and Turc et al. (2019), section 3: heads of 64 numbers.
@pytest.mark.parametrize(
    ("name", "num_heads"),
    [("tiny", 2), ("mini", 4), ("small", 8), ("medium", 8)]
    + [("base-uncased", 12), ("base-cased", 12), ("large-uncased", 16), ("large-cased", 16)]
    + [("base-multilingual-uncased", 12), ("base-multilingual-cased", 12)],
)
def test_bert_has_the_heads_of_its_papers(name, num_heads):
    config = BertConfig.published(f"bert-{name}")
    assert (config.num_heads, config.d_model) == (num_heads, 64 * num_heads)


# Dosovitskiy et al. (2021), table 1.
@pytest.mark.parametrize(
    ("name", "num_heads"), [("ViT-B/16", 12), ("ViT-B/32", 12), ("ViT-L/16", 16), ("ViT-L/32", 16), ("ViT-H/14", 16)]
)
def test_vit_has_the_heads_of_its_table_1(name, num_heads):
    assert ViTConfig.published(name).num_heads == num_heads
