"""Model FLOPs: the arithmetic that a training step cannot do without, and what the devices could do at most.

Their ratio is the model FLOP utilisation (MFU) of PaLM (Chowdhery et al., 2022, appendix B,
https://arxiv.org/abs/2204.02311). Only matrix products are counted, two FLOPs for a multiplication and its addition,
and nothing that an implementation does besides: no rematerialisation, no element-wise work, no optimizer.
"""

from collections.abc import Sequence

from tfx_jax.models.bert import BertConfig
from tfx_jax.models.gpt import GPTConfig
from tfx_jax.models.t5 import T5Config
from tfx_jax.models.transformer import TransformerConfig

# Peak dense bfloat16 FLOP/s of one JAX device, by `device_kind`. Sparsity, which doubles what datasheets print, is left
# out. A kind that is not listed has no known peak: better no utilisation than a wrong one.
# TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and its pages on each version, per chip. The chips
# of v2, v3 and 7x are two JAX devices each.
# GPUs: NVIDIA's datasheets of the A100, H100, H200, L4, L40S, A10, T4 and V100 products.
_PEAK_FLOPS = {
    "TPU v2": 45e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12,
    # These two know no bfloat16: their float16 peak.
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
}


def peak_flops(device_kinds: Sequence[str]) -> float | None:
    """Sums the published peak dense bfloat16 FLOP/s of devices; None if that of one is not known, as of a CPU.

    >>> peak_flops(["TPU v4", "TPU v4"]), peak_flops(["cpu"])
    (550000000000000.0, None)
    """
    peaks = [_PEAK_FLOPS.get(kind) for kind in device_kinds]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


def training_flops(config: TransformerConfig | T5Config, rows: int, source_length: int, target_length: int) -> int:
    """Counts the model FLOPs of a training step of an encoder-decoder: the Transformer or T5.

    The backward pass costs two products for each one of the forward pass. A weight of a projection thus costs 6 FLOPs
    for each position that it is applied to, and attention, whose two products are as long as the keys, 6 (H + U) S N
    for each query of each layer: PaLM's 6 N + 12 L H Q T, split between two sequences. As there, a causal mask saves
    nothing. The decoder projects the encoder's output, so that its cross attention costs source positions as well.

    Args:
      config: the sizes; `vocab_size` is that of the model itself.
      rows: sentence pairs, B.
      source_length: positions of each source, S; padding is computed, and so counted, like any token.
      target_length: positions of each target, T.

    >>> base = TransformerConfig()
    >>> round(training_flops(base, 1, 100, 100) / 1e9, 1)  # 37.8 of it for weights
    38.9
    """
    c, s, t = config, source_length, target_length
    projection, feed_forward, pair = _weights(c)
    encoder_layer = s * (2 * projection + feed_forward)
    decoder_layer = t * (3 * projection + feed_forward) + s * projection
    num_decoder_layers = _num_decoder_layers(c)
    weights = c.num_layers * encoder_layer + num_decoder_layers * decoder_layer + t * c.d_model * c.vocab_size
    attention = pair * (c.num_layers * s * s + num_decoder_layers * (t * t + t * s))
    return 6 * rows * (weights + attention)


def stack_flops(config: GPTConfig | BertConfig, rows: int, length: int, *, num_predicted: int) -> int:
    """Counts the model FLOPs of a training step of a single stack of layers, as `training_flops` does.

    What heads other than the vocabulary's cost is left out: a matrix or two for each row.

    Args:
      config: the sizes; `vocab_size` is that of the model itself.
      rows: B.
      length: positions of each row, T.
      num_predicted: positions of each row whose logits over the vocabulary are computed.

    >>> round(stack_flops(GPTConfig(), 1, 1024, num_predicted=1024) / 1e9)  # PaLM's 6 N + 12 L H Q T, for a token
    875
    """
    c = config
    d_k, d_ff = getattr(c, "d_k", None) or c.d_model // c.num_heads, c.d_ff or 4 * c.d_model
    layer = length * (4 * c.d_model * c.num_heads * d_k + 2 * c.d_model * d_ff) + 2 * c.num_heads * d_k * length**2
    return 6 * rows * (c.num_layers * layer + num_predicted * c.d_model * c.vocab_size)


def decoding_flops(config: TransformerConfig, rows: int, beam_size: int, source_length: int, target_length: int) -> int:
    """Counts the model FLOPs of a beam search whose hypotheses all have `target_length` tokens.

    Two for each product that it cannot do without. The source is encoded, and projected to keys and values, once for
    all beams; each of `beam_size` hypotheses then costs, at every position, the decoder's other weights, the logits,
    and attention to the positions so far: t of them at the t-th, as a cache allows. Ranking costs nothing.

    >>> base = TransformerConfig()
    >>> round(decoding_flops(base, 1, 4, 30, 30) / 1e9, 1)
    11.2
    """
    c, s, t = config, source_length, target_length
    projection, feed_forward, pair = _weights(c)
    num_decoder_layers = _num_decoder_layers(c)
    once = s * (c.num_layers * (2 * projection + feed_forward + s * pair) + num_decoder_layers * projection)
    weights = num_decoder_layers * (3 * projection + feed_forward) + c.d_model * c.vocab_size
    attention = num_decoder_layers * pair * (t * (t + 1) // 2 + t * s)
    return 2 * rows * (once + beam_size * (t * weights + attention))


def _num_decoder_layers(config: TransformerConfig | T5Config) -> int:
    return config.num_layers if config.num_decoder_layers is None else config.num_decoder_layers


def _weights(config: TransformerConfig | T5Config) -> tuple[int, int, int]:
    """Multiplications: of a position by a query and its output (or key and value), by a feed-forward; of a pair."""
    c = config
    d_k = c.d_model // c.num_heads if c.d_k is None else c.d_k
    d_v = d_k if isinstance(c, T5Config) else c.d_model // c.num_heads if c.d_v is None else c.d_v
    matrices = 3 if isinstance(c, T5Config) and c.is_gated else 2
    return c.num_heads * c.d_model * (d_k + d_v), matrices * c.d_model * c.d_ff, c.num_heads * (d_k + d_v)
