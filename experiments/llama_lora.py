r"""Llama 3 8B fine-tuned on texts of your own, with low-rank adapters or as a whole.

Result: not yet run; planned on 16 v5e, 64 v6e and 8 H100

LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) on the projections of queries and values, of rank 16: 6.8 of
8,037 million parameters are trained. What decides the memory of a device is the frozen base, 4 bytes a parameter, where
full fine-tuning needs 16. Checkpoints hold the adapters alone: 27 MB, and 82 MB with the optimizer.

    tfx-jax train --config=llama_lora --workdir=runs/llama_lora --config.task.data.data_dir=DIR --config.mesh.fsdp=16
    tfx-jax convert --workdir=runs/llama_lora --output=adapter --adapter
    tfx-jax plan --config=llama_lora:lora --topology=v5e:4x4 --config.mesh.fsdp=16

DIR holds `train.txt` and `valid.txt`, a text on each line, which are packed into rows of 2,048 tokens and do not attend
to each other. For conversations, set `--config.task.data.documents=messages` and name files of JSON lines or Parquet.
`config.init_from` is a folder, or a name on the hub of a model whose license you have accepted. Variants: `lora`;
`full`, which trains all parameters; `test`.

Measured: nothing, no such device was there. What `tfx-jax plan` predicts is in docs/from_laptop_to_pod.md: with
adapters a step of 65,536 tokens takes 1.28 s on 16 v5e (MFU 54 %) and 7.8 GiB of each; full fine-tuning does not fit
there with two rows on a device (18.7 of 15.75 GiB), but on 8 H100 (27.9 GiB of each) and on 64 v6e (17.6 GiB of each).
"""

from tfx_jax.models import LlamaConfig
from tfx_jax.nn import RotaryConfig
from tfx_jax.tasks import LanguageModelConfig, TextData
from tfx_jax.training import ExperimentConfig, tiny_variant


def get_config(variant: str = "lora") -> ExperimentConfig:
    model = LlamaConfig(
        vocab_size=128_256,
        max_length=8_192,
        num_kv_heads=8,
        d_ff=14_336,
        rotary=RotaryConfig(base=500_000.0),
        dtype="bfloat16",
        remat="full",
    )
    data = TextData(
        dataset="files",
        train_file="train.txt",
        validation_file="valid.txt",
        documents="lines",
        max_length=2_048,
        tokens_per_batch=32 * 2_048,
    )
    config = ExperimentConfig(model, LanguageModelConfig(data, is_packed=True), init_from="meta-llama/Meta-Llama-3-8B")
    optimizer = config.optimizer
    optimizer.name, optimizer.schedule, optimizer.clip_norm = "adamw", "cosine", 1.0
    optimizer.b2, optimizer.epsilon = 0.95, 1e-8
    optimizer.peak_learning_rate, optimizer.warmup_steps = 2e-4, 50
    config.num_steps, config.eval_every, config.checkpoint_every, config.log_every = 1_000, 250, 250, 10
    if variant == "full":
        optimizer.peak_learning_rate = 1e-5
        return config
    config.lora.rank, config.lora.alpha = 16, 32.0
    if variant == "test":
        return tiny_variant(config)
    if variant != "lora":
        raise ValueError(f"unknown variant {variant!r}; there are lora, full, test")
    return config
