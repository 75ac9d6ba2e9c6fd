r"""Soft and hard attention describe built-in images of coloured shapes, and look at what they name.

Result: not yet run

    tfx-jax train --config=captioning_shapes --workdir=runs/captions            # soft; captioning_shapes:hard
    tfx-jax attend --workdir=runs/captions --image=0 --output=attention.png      # of the test split, or --image=FILE

Images of your own, all of one size, with a table of lines FILE, TAB, caption:

    tfx-jax train --config=captioning_shapes --workdir=runs/mine --config.task.data.dataset=files \
      --config.task.data.train_file=my.tsv --config.task.data.validation_file=other.tsv \
      --config.task.data.image_size=96 --config.model.image_size=96 \
      --config.task.data.max_length=32 --config.model.vocab_size=8000

No download, and no published figure: Xu et al. (2015, https://arxiv.org/abs/1502.03044) train on photographs, with a
VGG network that was trained before; here the convolutions are small and learn with the decoder. An image of 48 pixels
has one to three shapes, and one caption that is right (`tfx_jax.toy_shapes`). Every image of validation and test has
a shape that no training image has in that colour and place, so that exact match asks for more than to remember.
"Attention on the object" is the weight on the places of the grid that the object of a colour or a shape word touches;
attention that is the same everywhere has 17.6 %.

The weight of equation 14 is 0.01, not 1: a caption of a dozen words cannot look once at each of 36 places, and so much
of the penalty would blur all it looks at.

Variants: `soft`, `hard`, `test`.

Measured here: not yet run.
"""

from tfx_jax.models.captioning import CaptionerConfig
from tfx_jax.tasks.captioning import CaptioningConfig
from tfx_jax.training.config import ExperimentConfig, tiny_variant


def get_config(variant: str = "soft") -> ExperimentConfig:
    model = CaptionerConfig(vocab_size=100, channels=(16, 32, 64), d_model=64)
    config = ExperimentConfig(model, CaptioningConfig(attention_penalty=0.01))
    optimizer = config.optimizer
    optimizer.peak_learning_rate, optimizer.warmup_steps, optimizer.clip_norm = 3e-3, 200, 1.0
    optimizer.schedule, optimizer.final_fraction = "cosine", 0.02
    config.num_steps, config.eval_every, config.checkpoint_every, config.keep_last = 2_000, 500, 500, 2
    if variant == "test":
        return tiny_variant(config)
    if variant not in ("soft", "hard"):
        raise ValueError(f"unknown variant {variant!r}; there are soft, hard, test")
    model.variant = variant
    return config
