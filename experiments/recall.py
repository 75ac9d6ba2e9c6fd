r"""Associative recall: what attention with a state of constant size forgets of pairs of keys and values.

Result: small: with a head of 8 channels dense 100 % of values, delta rule 94, linear 27; full not yet run

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

With 64 keys, 8 pairs and 48 tokens, dense attention has 16.5 % after 3,000 steps: it has not found the pairs yet.

These runs see no token before the present one but by attention. With a short convolution before attention, as the
literature has it, one layer is enough. With one head of 8 channels the state, 8 x 8 numbers, has to hold 6 of 16 keys:

    tfx-jax train --config=recall:small --workdir=runs/delta --config.model.attention.name=delta_rule \
        --config.model.convolution_width=4 --config.model.num_layers=1 --config.model.num_heads=1 \
        --config.model.d_k=8 --config.num_steps=2000 --config.eval_every=500

Values right after so many steps, seed 0, 42 to 56 seconds each on two AMD cores that other jobs shared:

| attention | 500 | 1,000 | 1,500 | 2,000 |
|---|--:|--:|--:|--:|
| dense | 97.4 % | 100.0 % | 100.0 % | 100.0 % |
| delta_rule | 83.7 % | 91.9 % | 93.0 % | 93.6 % |
| kimi_delta | 38.5 % | 56.5 % | 81.5 % | 87.9 % |
| favor | 39.7 % | 43.8 % | 77.2 % | 87.0 % |
| retention | 25.8 % | 26.3 % | 38.0 % | 39.7 % |
| gated_linear | 29.7 % | 39.3 % | 39.9 % | 39.1 % |
| linear | 26.9 % | 26.9 % | 28.0 % | 27.3 % |
| state_space_duality | 23.9 % | 26.5 % | 27.4 % | 27.3 % |
| gated_delta_rule | 17.1 % | 25.9 % | 25.2 % | 25.6 % |

So a state of constant size can recall most of what was written into it. The delta rule writes only the difference
between a value and what the state already returns for its key, which lessens the interference of keys that are not
orthogonal; linear attention adds all values up. FAVOR+ has a state of more rows, one for each random
feature. The gated delta rule depends on the decay that its only head starts with: 25.6 % with seed 0, 85.9 % with seed
1, 21.6 % with seed 2.
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
