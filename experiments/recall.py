r"""Associative recall: what attention with a state of constant size forgets of pairs of keys and values.

Result: small dense 100 % of values, every recurrent attention 29 %; full not yet run

Multi-query associative recall (Arora et al., 2023, https://arxiv.org/abs/2312.04927): 64 pairs of a key and a value,
then all keys again, 512 tokens; two layers.

    tfx-jax train --config=recall:small --workdir=runs/recall
    tfx-jax train --config=recall:small --workdir=runs/linear --config.model.attention.name=linear
    tfx-jax train --config=recall:small --workdir=runs/delta --config.model.attention.name=gated_delta_rule
    tfx-jax plan --config=recall:full --topology=v5e:1x1

Variants: `full`, for an accelerator; `small`, 6 pairs of 16 keys in 24 tokens, 1,000 steps of 128 rows, for two
cores; `test`.

Measured here on two AMD cores that other jobs shared, seed 0, 512 sequences for validation, after 1,000 steps:

| attention | values right |
|---|--:|
| dense | 100.00 % |
| linear | 28.87 % |
| retention | 29.17 % |
| gated_linear | 28.65 % |
| delta_rule | 28.74 % |
| gated_delta_rule, 500 steps | 28.16 % |

With 64 keys, 8 pairs and 48 tokens, dense attention has 16.5 % after 3,000 steps: it has not found the pairs yet. The
delta rules of the literature see the token before by a short convolution, which these runs do not have; with
`--config.model.convolution_width=4`: not yet run.
"""

from tfx_jax.models import LlamaConfig
from tfx_jax.tasks import RecallConfig, RecallData
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "full") -> ExperimentConfig:
    model = LlamaConfig(max_length=512, num_layers=2, d_model=128, num_heads=2, d_ff=256, is_tied=True)
    data = RecallData()
    config = ExperimentConfig(model, RecallConfig(data))
    optimizer = config.optimizer
    optimizer.peak_learning_rate, optimizer.warmup_steps = 1e-3, 1_000
    config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 40_000, 2_000, 2_000, 100
    if variant == "small":
        model.d_model, model.num_heads, model.d_ff, model.max_length = 64, 1, 128, 24
        data.num_keys, data.num_pairs, data.max_length = 16, 6, 24
        data.tokens_per_batch, data.eval_sequences = 128 * 24, 512
        optimizer.peak_learning_rate, optimizer.warmup_steps = 3e-3, 200
        config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 1_000, 250, 500, 250
    elif variant == "test":
        return tiny_variant(config)
    elif variant != "full":
        raise ValueError(f"unknown variant {variant!r}; there are full, small, test")
    return config
