"""`LanguageModel`, the base class of GPT and Llama, and its decoder."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.functional.attention.signature import SegmentIds
from tfx_jax.models.padding import check_tokens, hide_padding, last_index, left_aligned, positions_from_mask
from tfx_jax.nn.attention import KVCache
from tfx_jax.nn.basic import Embedding
from tfx_jax.nn.decoding import (
    Decoder,
    at_last,
    fuse_for_decoding,
    fused_step,
    init_fused_cache,
    init_replay,
    replay_step,
    with_int8_stacks,
)
from tfx_jax.nn.layers import EncoderLayer
from tfx_jax.nn.stack import per_layer, scan_stacks


class LanguageModel(nnx.Module):
    """A stack of causal layers between an embedding and an output layer.

    Subclasses set `config` and `decoder_layers`, and `first_layers` if other layers come before these. They define
    `embed`, `last_norm` and `output`; they override `logits_of` if the logits are not just products with the output
    vectors.
    """

    config: Any
    decoder_layers: EncoderLayer
    first_layers: EncoderLayer | None = None

    @property
    def stacks(self) -> list[EncoderLayer]:
        """The stacks of layers, from input to output."""
        return [self.decoder_layers] if self.first_layers is None else [self.first_layers, self.decoder_layers]

    def embed(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "#B T"], rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T D"]:
        """Returns the input of the first layer: embeddings, with positions where the model adds them."""
        raise NotImplementedError

    def last_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalizes the output of the last layer."""
        raise NotImplementedError

    def output(self) -> Embedding:
        """Returns the output layer as an embedding: one vector per token."""
        raise NotImplementedError

    def logits_of(self, products: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Computes logits from the products of hidden states and output vectors; the default returns these."""
        return products

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        token_mask: Bool[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: SegmentIds | None = None,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Returns the logits of each next token, given the tokens so far.

        Args:
          tokens: ids, [B, T].
          token_mask: True for tokens, False for padding (anywhere), [B, T]; None means no padding.
          positions: position of each token, [B, T]; None counts tokens from 0, without padding.
          segment_ids: number of the packed text that each token belongs to, 0 for padding, [B, T]. Texts do not attend
            to each other. Pass `positions` too; otherwise they continue from text to text.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` the pair (logits, {"decoder/0/self": [B, N, T, T], ...}).

        Raises:
          ValueError: if T exceeds `config.max_length`, or the attention does not support `segment_ids`.
        """
        check_tokens(self.config.max_length, tokens=tokens)
        x, extras = self.read(tokens, token_mask, positions, segment_ids, rngs, return_weights=return_attention)
        logits = self.logits_of(self.output().attend(self.last_norm(x)))
        if not return_attention:
            return logits
        return logits, {f"decoder/{index}/self": weights for index, weights in enumerate(extras["self"])}

    def read(
        self,
        tokens: Int[Array, "B T"],
        token_mask: Bool[Array, "B T"] | None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: SegmentIds | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        return_cache: bool = False,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs the layers over tokens; arguments are those of `__call__`, and of `EncoderLayer`.

        Returns:
          The output of the last layer and the extra outputs of `EncoderLayer` ("self" weights, "cache"), stacked over
          layers; see `per_layer`.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if token_mask is None else positions_from_mask(token_mask)
        mask = None if token_mask is None else token_mask[:, None, None, :]
        if segment_ids is not None:
            self.config.attention.check(is_causal=True, is_packed=True)
            in_segment = (segment_ids[0] if isinstance(segment_ids, tuple) else segment_ids) != 0
            token_mask = in_segment if token_mask is None else token_mask & in_segment
        tokens, positions = hide_padding(tokens, token_mask), hide_padding(positions, token_mask)
        x = self.embed(tokens, positions, rngs)

        def layer_fn(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None) -> tuple[Array, Any]:
            """Runs one layer; returns its output and its extra outputs."""
            options: dict[str, Any] = {"mask": mask, "is_causal": True, "segment_ids": segment_ids, "rngs": rngs}
            options |= {"return_weights": return_weights, "return_cache": return_cache}
            return layer(x, token_mask=token_mask, positions=positions, **options)

        return scan_stacks(layer_fn, self.stacks, x, rngs, remat=self.config.remat, unroll=self.config.unroll)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns a decoder with fused weights, see `tfx_jax.nn.decoding.DecodingModel`."""
        return LanguageModelDecoder(self, int8=int8)


class Prompt(NamedTuple):
    """A prompt after prefill.

    Attributes:
      tokens: the prompt.
      is_past: True for the tokens in `past`: all tokens but the last of each row, without padding.
      past: KV cache of each layer; empty if the attention has no KV cache and every step reads all tokens.
      last: the last token of each row, which the first step reads.
    """

    tokens: Int[Array, "B P"]
    is_past: Bool[Array, "B P"]
    past: list[KVCache]
    last: Int[Array, " B"]


class LanguageModelDecoder(nnx.Module):
    """Decodes a `LanguageModel` one token at a time; implements `tfx_jax.nn.decoding.Decoder`.

    The prompt without its last token is read at once (prefill); each step then processes one token with a KV cache. If
    the attention has no KV cache, each step runs the model over all tokens so far (`replay_step`).
    """

    continues_inputs = True
    pad_id = -1

    def __init__(self, model: LanguageModel, *, int8: bool = False):
        """Fuses the layers' weights for decoding; `model` is not changed and, without `int8`, reads the prompts."""
        output = model.output()
        self.fused = fuse_for_decoding(model.stacks, output.table[...], dtype=output.dtype, int8=int8)
        self.model = with_int8_stacks(model, "first_layers", "decoder_layers") if int8 else model

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.model.config.vocab_size

    def max_input_length(self, max_new_tokens: int) -> int:
        """Returns the number of positions that remain for the prompt."""
        return self.model.config.max_length - max_new_tokens

    def encode(self, inputs: Int[Array, "B P"], token_mask: Bool[Array, "B P"] | None = None) -> Prompt:
        """Reads the prompts without their last tokens (prefill); `token_mask` is False for padding."""
        token_mask = jnp.ones(inputs.shape, bool) if token_mask is None else token_mask
        if self.fused is None:  # a replay appends tokens directly after the prompt
            inputs, token_mask = left_aligned(inputs, token_mask)
        indices = jnp.arange(inputs.shape[1])[None]
        last = last_index(token_mask)[:, None]
        is_past = token_mask & (indices != last)
        past = []
        if self.fused is not None:
            _, extras = self.model.read(inputs, is_past, return_cache=True)
            past = per_layer(extras["cache"], self.model.config.num_layers)
        return Prompt(inputs, is_past, past, jnp.take_along_axis(inputs, last, axis=1)[:, 0])

    def init_cache(
        self, memory: Prompt, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Returns a cache that holds the prompts and has space for `max_length` new tokens, and the first tokens."""
        num_past = memory.tokens.shape[1]
        if num_past + max_length > self.model.config.max_length:
            raise ValueError(
                f"{num_past} tokens of prompt and {max_length} more, but the model has "
                f"max_length={self.model.config.max_length}"
            )
        if self.fused is None:
            tokens = jnp.pad(memory.tokens, ((0, 0), (0, max_length)))
            return init_replay(tokens, memory.is_past.sum(axis=1)), memory.last
        cache = init_fused_cache(
            self.fused.layers, memory.past, max_new_tokens=max_length, num_beams=num_beams, is_past=memory.is_past
        )
        return cache, memory.last

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Feeds one token per row, R = batch * beams; returns the logits of the next token and the new cache."""
        if self.fused is None:  # without a KV cache: the model reads all tokens so far again
            return replay_step(self._score_last, tokens, cache)
        model, project_to_vocabulary = self.model, self.fused.output

        def embed(tokens: Array, positions: Array) -> Array:
            return model.embed(tokens[:, None], positions[:, None])

        def score(x: Array) -> Array:
            return model.logits_of(project_to_vocabulary(model.last_norm(x), jnp.float32))[:, 0]

        return fused_step(self.fused.layers, embed, score, tokens, cache)

    def _score_last(self, tokens: Int[Array, "R C"], lengths: Int[Array, " R"], _: None) -> Float[Array, "R V"]:
        """Returns the logits after the last of the first `lengths` tokens of each row."""
        exists = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        model = self.model
        x = at_last(model.read(tokens, exists)[0], lengths)
        return model.logits_of(model.output().attend(model.last_norm(x)))[:, 0]
