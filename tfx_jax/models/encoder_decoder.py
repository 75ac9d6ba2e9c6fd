"""`EncoderDecoder`, the base class of the Transformer and T5, and its decoder."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from tfx_jax.models.padding import check_tokens, last_index, padding_last
from tfx_jax.nn.basic import Embedding, Linear, drop
from tfx_jax.nn.decoding import (
    Decoder,
    at_last,
    fuse_for_decoding,
    fused_step,
    init_fused_cache,
    init_replay,
    project_memories,
    replay_step,
    with_int8_stacks,
)
from tfx_jax.nn.layers import DecoderLayer, EncoderLayer
from tfx_jax.nn.stack import scan_layers


class EncoderDecoder(nnx.Module):
    """An encoder of source sequences, and a causal decoder of target sequences that attends to the encoder's output.

    A subclass sets `config`, `encoder_layers` and `decoder_layers` and defines `embed`, `encoder_output`, `last_norm`
    and `output`. It overrides `logits_bias`, `max_positions`, or `layer_biases` together with `step_bias`, if the model
    has these.
    """

    config: Any
    encoder_layers: EncoderLayer
    decoder_layers: DecoderLayer
    logits_bias: nnx.Param[Array] | None = None

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " T"],
        rngs: nnx.Rngs | None = None,
        *,
        is_source: bool = False,
    ) -> Float[Array, "B T D"]:
        """Returns the input of the encoder's first layer (`is_source`) or the decoder's."""
        raise NotImplementedError

    def encoder_output(self, x: Float[Array, "B S D"], rngs: nnx.Rngs | None) -> Float[Array, "B S D"]:
        """Returns the memory that the decoder attends to, given the output of the encoder's last layer."""
        raise NotImplementedError

    def last_norm(self, x: Float[Array, "B T D"], rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        """Returns the input of the output layer, from the output of the decoder's last layer."""
        raise NotImplementedError

    def output(self) -> Embedding:
        """Returns the output layer as an embedding: one vector per token."""
        raise NotImplementedError

    def layer_biases(
        self, length: int, *, is_source: bool
    ) -> tuple[Any, Callable[[Any], Float[Array, "1 N T T"] | None]]:
        """Returns the bias of the self-attention's logits, for sequences of a length.

        Returns:
          A pair (layer_inputs, compute_bias). `layer_inputs` is a pytree stacked over layers, or None, and
          `compute_bias` maps the entry of one layer, or None, to the layer's bias; its result None means no bias. An
          encoder's attention may have other biases instead: a dictionary of options of the attention.
        """
        del length, is_source
        return None, lambda _: None

    def step_bias(self, position: Int[Array, ""], num_keys: int) -> Float[Array, "L N 1 S"]:
        """Returns the bias of the decoder's self-attention for the query at `position`: L = 1, or one for each layer.

        It is called only if `config.has_position_bias`.
        """
        raise NotImplementedError

    @property
    def max_positions(self) -> int | None:
        """Maximum length of sources and of targets, in tokens; None means no limit."""
        return None

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores each target token given the source and the target tokens before it (teacher forcing).

        Args:
          source: source tokens, [B, S]; padding, `config.pad_id`, may be anywhere.
          target: target tokens to predict, [B, T]; padding only at the end. The decoder reads them shifted right by
            one, after `config.start_id`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention maps.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` the pair (logits, maps), where maps has the keys
          "encoder/0/self" [B, N, S, S], "decoder/0/self" [B, N, T, T], "decoder/0/cross" [B, N, T, S] and so on. In
          the maps, the source's padding comes after its tokens.
        """
        check_tokens(target=target)
        memory, encoder_maps = self.encode(source, rngs, return_attention)
        inputs = shift_right(target, self.config.start_id)
        x, decoder_maps = self.decode(inputs, memory, rngs, return_weights=return_attention)
        logits = self.logits(x, rngs)
        if not return_attention:
            return logits
        return logits, encoder_maps | named_maps("decoder", decoder_maps)

    def encode(
        self, source: Int[Array, "B S"], rngs: nnx.Rngs | None = None, return_attention: bool = False
    ) -> "tuple[EncoderMemory, dict[str, Array]]":
        """Returns the encoder's output with its padding mask, for `decode`, and its attention maps.

        Padding is moved to the end of each sequence before encoding; outputs and maps are in that order. There are no
        maps unless `return_attention`.
        """
        check_tokens(source=source)
        source = padding_last(source, self.config.pad_id)
        mask = source_mask(source, self.config.pad_id)
        output, maps = run_encoder(self, source, mask, rngs, return_attention)
        return EncoderMemory(output, mask), maps

    def decode(
        self,
        inputs: Int[Array, "B T"],
        memory: "EncoderMemory",
        rngs: nnx.Rngs | None = None,
        *,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs the decoder over tokens shifted right, [B, T], and the encoder's output.

        Returns:
          The output of the last layer and the attention maps, stacked over layers; None without `return_weights`.
        """
        c, length = self.config, inputs.shape[1]
        token_mask = input_mask(inputs, c.pad_id)
        layer_inputs, compute_bias = self.layer_biases(length, is_source=False)
        x = self.embed(inputs, jnp.arange(length), rngs)

        def layer_fn(
            layer: DecoderLayer, x: Array, rngs: nnx.Rngs | None, layer_input: Any = None
        ) -> tuple[Array, Any]:
            """Runs one layer with its entry of `layer_inputs`."""
            bias = compute_bias(layer_input)
            options: dict[str, Any] = {"memory_mask": memory.mask, "bias": bias, "token_mask": token_mask}
            return layer(x, memory.output, rngs=rngs, return_weights=return_weights, **options)

        return scan_layers(layer_fn, self.decoder_layers, x, rngs, inputs=layer_inputs, remat=c.remat, unroll=c.unroll)

    def logits(self, x: Float[Array, "B T D"], rngs: nnx.Rngs | None = None) -> Float[Array, "B T V"]:
        """Returns float32 logits, from the output of the decoder's last layer."""
        logits = self.output().attend(self.last_norm(x, rngs))
        return logits if self.logits_bias is None else logits + self.logits_bias[...][None, None]

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns a decoder with fused weights, see `tfx_jax.nn.decoding.DecodingModel`."""
        return EncoderDecoderDecoder(self, int8=int8)


def run_encoder(
    model: Any,
    source: Shaped[Array, "B S ..."],
    mask: Bool[Array, "B 1 1 S"] | None,
    rngs: nnx.Rngs | None,
    return_attention: bool,
) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
    """Runs the encoder of an `EncoderDecoder`, or of a model with the same methods for its encoder.

    Args:
      model: the model.
      source: tokens, with padding at the end, or other inputs of `model.embed`.
      mask: True for tokens, False for padding; None means no padding.
      rngs: stream `dropout`; None means evaluation.
      return_attention: whether to return the attention maps.

    Returns:
      The encoder's output and its attention maps (empty unless `return_attention`).
    """
    c, length = model.config, source.shape[1]
    layer_inputs, compute_bias = model.layer_biases(length, is_source=True)
    x = model.embed(source, jnp.arange(length), rngs, is_source=True)

    def layer_fn(layer: EncoderLayer, x: Array, rngs: nnx.Rngs | None, layer_input: Any = None) -> tuple[Array, Any]:
        """Runs one layer with its entry of `layer_inputs`."""
        token_mask = None if mask is None else mask[:, 0, 0]
        bias = compute_bias(layer_input)
        options: dict[str, Any] = dict(bias) if isinstance(bias, dict) else {"bias": bias}
        options |= {"mask": mask, "token_mask": token_mask}
        return layer(x, rngs=rngs, return_weights=return_attention, **options)

    x, maps = scan_layers(layer_fn, model.encoder_layers, x, rngs, inputs=layer_inputs, remat=c.remat, unroll=c.unroll)
    return model.encoder_output(x, rngs), named_maps("encoder", maps)


class EncoderDecoderClassifier(nnx.Module):
    """Classifies a text that encoder and decoder both read, by the decoder's vector at EOS (Lewis et al., 2020)."""

    heads: ClassVar[tuple[str, ...]] = ("dense", "classifier")

    def __init__(self, config: Any, make_transformer: Callable[[], EncoderDecoder], *, rngs: nnx.Rngs):
        """Initializes a model and a head of two linear layers; raises ValueError if there are no labels."""
        if not config.labels:
            raise ValueError("a classifier needs labels, got none: set labels to the names of the classes")
        self.transformer = make_transformer()
        self.dense = Linear(config.d_model, config.d_model, rngs=rngs)
        self.classifier = Linear(config.d_model, len(config.labels), rngs=rngs)
        self.config = copy.deepcopy(config)

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        token_mask: Bool[Array, "B S"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B C"]:
        """Returns float32 logits, C = number of labels.

        Args:
          tokens: texts that end in `config.eos_id`, [B, S]; the vector at its last occurrence is classified.
          token_mask: True for tokens, False for padding (on either side), [B, S]; None means all but `config.pad_id`.
          rngs: stream `dropout`; None means evaluation.
        """
        check_tokens(tokens=tokens)
        c, body = self.config, self.transformer
        tokens = padding_last(with_padding(tokens, token_mask, c.pad_id), c.pad_id)
        memory, _ = body.encode(tokens, rngs)
        x, _ = body.decode(shift_right(tokens, c.start_id), memory, rngs)
        last = last_index(tokens == c.eos_id)
        x = body.last_norm(jnp.take_along_axis(x, last[:, None, None], axis=1), rngs)[:, 0].astype(jnp.float32)
        x = jnp.tanh(self.dense(drop(x, c.head_dropout_rate, rngs)))
        return self.classifier(drop(x, c.head_dropout_rate, rngs))


class EncoderMemory(NamedTuple):
    """An encoder's output and its padding mask (True for tokens; None means no padding)."""

    output: Float[Array, "B S D"]
    mask: Bool[Array, "B 1 1 S"] | None


class EncoderDecoderDecoder(nnx.Module):
    """Decodes an `EncoderDecoder` one token at a time; implements `tfx_jax.nn.decoding.Decoder`.

    The source is encoded and projected to keys and values once; each step then processes one token with a KV cache. If
    the self-attention has no KV cache, each step runs the decoder over all tokens so far (`replay_step`).
    """

    continues_inputs = False

    def __init__(self, model: EncoderDecoder, *, int8: bool = False):
        """Fuses the decoder's weights for decoding; `model` is not changed and, without `int8`, its encoder is used."""
        output = model.output()
        bias = None if model.logits_bias is None else model.logits_bias[...]
        self.fused = fuse_for_decoding([model.decoder_layers], output.table[...], bias, dtype=output.dtype, int8=int8)
        self.model = with_int8_stacks(model, "encoder_layers") if int8 else model

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.model.config.vocab_size

    @property
    def pad_id(self) -> int:
        """The padding token, which is never generated."""
        return self.model.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns the number of learned positions, None without them, 0 if `max_new_tokens` exceeds them."""
        limit = self.model.max_positions
        return limit if limit is None or max_new_tokens <= limit else 0

    def encode(self, inputs: Shaped[Array, "B S ..."], token_mask: Bool[Array, "B S"] | None = None) -> EncoderMemory:
        """Encodes sources, tokens [B, S] or frames [B, T, F]; tokens where `token_mask` is False count as padding."""
        return self.model.encode(with_padding(inputs, token_mask, self.pad_id))[0]

    def init_cache(
        self, memory: EncoderMemory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Returns the cache for up to `max_length` new tokens, and the start token of each source.

        The cache has the memory projected to keys and values of each layer; without a KV cache, the memory itself.
        """
        limit, batch_size = self.model.max_positions, memory.output.shape[0]
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length={max_length} must be at most {limit}, the number of learned positions")
        start = jnp.full(batch_size, self.model.config.start_id)
        if self.fused is None:
            tokens = jnp.full((batch_size, max_length), self.pad_id, jnp.int32)
            return init_replay(tokens, jnp.zeros(batch_size, jnp.int32), memory), start
        layers, memories = self.fused.layers, project_memories(self.model.decoder_layers, memory.output)
        cache = init_fused_cache(
            layers,
            [layer.self_attention.empty_cache(batch_size, memories[0].key.dtype) for layer in layers],
            max_new_tokens=max_length,
            num_beams=num_beams,
            memories=memories,
            memory_mask=memory.mask,
        )
        return cache, start

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Reads one token of each row (beam); returns logits of the next token and the new cache."""
        if self.fused is None:
            return replay_step(self._score_last, tokens, cache)
        model, output = self.model, self.fused.output

        def embed(tokens: Array, position: Array) -> Array:
            return model.embed(tokens[:, None], position[None])

        def score(x: Array) -> Array:
            return output(model.last_norm(x), jnp.float32)[:, 0]

        bias = model.step_bias if model.config.has_position_bias else None
        return fused_step(self.fused.layers, embed, score, tokens, cache, bias=bias)

    def _score_last(
        self, tokens: Int[Array, "R C"], lengths: Int[Array, " R"], memory: EncoderMemory
    ) -> Float[Array, "R V"]:
        """Returns the logits after the first `lengths` tokens of each row; the beams of a source share its memory."""
        num_beams = tokens.shape[0] // memory.output.shape[0]
        memory = jax.tree.map(lambda array: jnp.repeat(array, num_beams, axis=0), memory)
        x, _ = self.model.decode(tokens, memory)
        return self.model.logits(at_last(x, lengths))[:, 0]


class TokenIds(Protocol):
    """Configuration with special token ids."""

    vocab_size: int
    pad_id: int
    start_id: int


def check_special_ids(config: TokenIds) -> None:
    """Checks that `pad_id` and `start_id` are in the vocabulary.

    Raises:
      ValueError: if one of them is not.
    """
    for name in ("pad_id", "start_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            raise ValueError(f"{name}={getattr(config, name)} must be in 0 .. {config.vocab_size - 1} (vocab_size - 1)")


def with_padding(tokens: Array, token_mask: Bool[Array, "B S"] | None, pad_id: int) -> Array:
    """Replaces tokens by `pad_id` where `token_mask` is False."""
    return tokens if token_mask is None else jnp.where(token_mask, tokens, pad_id)


def source_mask(source: Int[Array, "B S"], pad_id: int) -> Bool[Array, "B 1 1 S"]:
    """Returns the mask that hides padding from every query."""
    return (source != pad_id)[:, None, None, :]


def input_mask(inputs: Int[Array, "B T"], pad_id: int) -> Bool[Array, "B T"]:
    """Returns True for tokens of a decoder's input; always for the first, because `start_id` may equal `pad_id`."""
    return (inputs != pad_id).at[:, 0].set(True)


def shift_right(target: Int[Array, "B T"], start_id: int) -> Int[Array, "B T"]:
    """Returns the decoder's input for predicting `target`: shifted right by one, after `start_id`.

    >>> shift_right(jnp.array([[5, 6, 2]]), 1).tolist()
    [[1, 5, 6]]
    """
    return jnp.concatenate([jnp.full_like(target[:, :1], start_id), target[:, :-1]], axis=1)


def named_maps(prefix: str, maps: dict[str, Array] | None) -> dict[str, Array]:
    """Splits attention maps stacked over layers into entries such as "encoder/0/self"."""
    return {
        f"{prefix}/{index}/{kind}": weights
        for kind, stacked in (maps or {}).items()
        for index, weights in enumerate(stacked)
    }
