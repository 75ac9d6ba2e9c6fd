"""Model FLOPs: the arithmetic that a training step or a search cannot do without.

Only matrix products are counted, two FLOPs for a multiplication and its addition, and nothing that an implementation
does besides: no rematerialization, no element-wise work, no optimizer. The backward pass costs two products for each
one of the forward pass. A weight of a projection thus costs 6 FLOPs for each position that it is applied to, and
attention, whose two products are as long as the keys, 6 (H + U) S N for each query of each layer: the 6 N + 12 L H Q T
of PaLM (Chowdhery et al., 2022, appendix B, https://arxiv.org/abs/2204.02311). As there, a causal mask saves nothing;
padding is computed, and so counted, like any token; and every attention is counted as the dense one.
"""

from typing import Any, NamedTuple


class EncoderDecoderSizes(NamedTuple):
    """The sizes of an encoder-decoder that decide its FLOPs; `num_matrices` are those of a feed-forward layer."""

    vocab_size: int
    num_layers: int
    num_decoder_layers: int
    d_model: int
    num_heads: int
    d_k: int
    d_v: int
    d_ff: int
    num_matrices: int = 2

    @property
    def weights(self) -> tuple[int, int, int]:
        """Multiplications: of a position by a query and its output (or key and value), by a feed-forward; of a pair."""
        per_head = self.d_k + self.d_v
        projection, pair = self.num_heads * self.d_model * per_head, self.num_heads * per_head
        return projection, self.num_matrices * self.d_model * self.d_ff, pair

    def training_flops(self, rows: int, source_length: int, target_length: int) -> int:
        """Counts the model FLOPs of a training step.

        The decoder projects the encoder's output, so that its cross attention costs source positions as well.

        Args:
          rows: pairs of texts, B.
          source_length: positions of each source, S.
          target_length: positions of each target, T.
        """
        c, s, t = self, source_length, target_length
        projection, feed_forward, pair = c.weights
        encoder_layer = s * (2 * projection + feed_forward)
        decoder_layer = t * (3 * projection + feed_forward) + s * projection
        weights = c.num_layers * encoder_layer + c.num_decoder_layers * decoder_layer + t * c.d_model * c.vocab_size
        attention = pair * (c.num_layers * s * s + c.num_decoder_layers * (t * t + t * s))
        return 6 * rows * (weights + attention)

    def decoding_flops(self, rows: int, beam_size: int, source_length: int, target_length: int) -> int:
        """Counts the model FLOPs of a beam search whose hypotheses all have `target_length` tokens.

        Two for each product that it cannot do without. The source is encoded, and projected to keys and values, once
        for all beams; each of `beam_size` hypotheses then costs, at every position, the decoder's other weights, the
        logits, and attention to the positions so far: t of them at the t-th, as a cache allows. Ranking costs nothing.
        """
        c, s, t = self, source_length, target_length
        projection, feed_forward, pair = c.weights
        once = s * (c.num_layers * (2 * projection + feed_forward + s * pair) + c.num_decoder_layers * projection)
        weights = c.num_decoder_layers * (3 * projection + feed_forward) + c.d_model * c.vocab_size
        attention = c.num_decoder_layers * pair * (t * (t + 1) // 2 + t * s)
        return 2 * rows * (once + beam_size * (t * weights + attention))


def encoder_decoder_sizes(config: Any, *, d_k: int, d_v: int, num_matrices: int = 2) -> EncoderDecoderSizes:
    """Collects the sizes of a Transformer or T5 configuration, of whose experts those that a token meets count."""
    return EncoderDecoderSizes(
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_decoder_layers=config.num_layers if config.num_decoder_layers is None else config.num_decoder_layers,
        d_model=config.d_model,
        num_heads=config.num_heads,
        d_k=d_k,
        d_v=d_v,
        d_ff=config.experts.active(config.d_ff),
        num_matrices=num_matrices,
    )


def stack_flops(
    *,
    rows: int,
    length: int,
    num_predicted: int,
    vocab_size: int,
    num_layers: int,
    d_model: int,
    num_heads: int,
    d_k: int | None,
    d_ff: int | None,
) -> int:
    """Counts the model FLOPs of a training step of a single stack of layers.

    What heads other than the vocabulary's cost is left out: a matrix or two for each row.

    Args:
      rows: B.
      length: positions of each row, T.
      num_predicted: positions of each row whose logits over the vocabulary are computed.
      vocab_size: of the model itself.
      num_layers: of the stack.
      d_model: of the model.
      num_heads: of each layer.
      d_k: the size of a head; None: d_model / num_heads.
      d_ff: None: 4 * d_model.
    """
    d_k, d_ff = d_k or d_model // num_heads, d_ff or 4 * d_model
    layer = length * (4 * d_model * num_heads * d_k + 2 * d_model * d_ff) + 2 * num_heads * d_k * length**2
    return 6 * rows * (num_layers * layer + num_predicted * d_model * vocab_size)
