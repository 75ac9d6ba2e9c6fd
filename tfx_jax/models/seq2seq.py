"""Recurrent encoder-decoders with attention (Bahdanau et al., 2015; Luong et al., 2015)."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tfx_jax.errors import UserError
from tfx_jax.fields import at_least, documented, fraction, one_of
from tfx_jax.functional.attention.additive import (
    additive_attention,
    attentional_vector,
    coverage_loss,
    general_attention,
)
from tfx_jax.functional.attention.aligned import aligned_attention, aligned_position
from tfx_jax.functional.attention.dot_product import dot_product_attention
from tfx_jax.functional.layers import add_bias, dropout
from tfx_jax.functional.recurrent import State, mixed_product
from tfx_jax.functional.search import BeamInvariant
from tfx_jax.models.config import DTYPES, checked
from tfx_jax.models.encoder_decoder import check_special_ids, shift_right, source_mask, with_padding
from tfx_jax.models.padding import check_tokens
from tfx_jax.nn.attention import AttentionFn
from tfx_jax.nn.auxiliary import AuxiliaryLoss, StepMetric, record_masked_mean
from tfx_jax.nn.basic import Embedding, drop, dropout_mask
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.recurrent import CELLS, BidirectionalLayer, RecurrentLayer, run_layers, step_layers
from tfx_jax.nn.stack import scan_layers, stack_layers, unstack_layers


class Memory(NamedTuple):
    """The encoded source, which every decoding step reads."""

    output: Float[Array, "B S D"]  # outputs of the last encoder layer
    keys: Float[Array, "B S 1 D"] | None  # projected keys of the score "concat", computed once for all steps
    mask: Bool[Array, "B 1 1 S"]  # True for source tokens
    last: Float[Array, "B D"]  # final outputs of both directions, concatenated, float32
    kept: Float[Array, "L B D"] | None  # training: recurrent dropout mask of each decoder layer, the same at all steps


class DecoderState(NamedTuple):
    """State between two decoding steps; R rows are the beams of all sources."""

    layers: tuple[State, ...]  # recurrent state of each layer
    fed: Float[Array, "R D"]  # input feeding: the vector that enters the next step beside the next word
    position: Int[Array, ""]  # number of tokens read so far
    coverage: Float[Array, "R S"] | None  # sum of past attention weights of each source token; None without coverage


class SourceAttention(nnx.Module):
    """Attention from a decoder state to the source, by one of `SCORES` or by a given attention function."""

    def __init__(
        self,
        size: int,
        *,
        score: str,
        scaled: bool,
        alignment: str,
        window: int,
        has_coverage: bool,
        attention_fn: AttentionFn | None = None,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters; `attention_fn` replaces the score, the rest are fields of `Seq2SeqConfig`."""

        def make_matrix() -> Any:
            return nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (size, size)))

        def make_vector() -> Any:
            return nnx.Param(nnx.initializers.normal(size**-0.5)(rngs.params(), (size,)))

        score = score if attention_fn is None else ""  # no parameters of a score
        self.w_query = make_matrix() if score in ("concat", "general") else None
        self.w_key = make_matrix() if score == "concat" else None
        self.v = make_vector() if score == "concat" else None
        # w_c and b_attn of See et al., equation 11. Zeros, so that adding coverage to a trained model first changes
        # nothing.
        self.w_coverage = nnx.Param(jnp.zeros(size)) if has_coverage else None
        self.b_score = nnx.Param(jnp.zeros(size)) if has_coverage else None
        self.w_position = make_matrix() if alignment == "local-p" else None
        self.v_position = make_vector() if alignment == "local-p" else None
        self.scale = size**-0.5 if scaled else 1.0
        self.window = None if alignment == "global" else window
        self.attention_fn = attention_fn

    def keys(self, output: Float[Array, "B S D"]) -> Float[Array, "B S 1 D"] | None:
        """Returns the projected keys of the score "concat"; None for scores that use the encoder's output itself."""
        if self.w_key is None:
            return None
        keys = mixed_product(output, self.w_key[...])[:, :, None]
        return keys if self.b_score is None else add_bias(keys, self.b_score[...])

    def __call__(
        self, query: Float[Array, "R D"], state: DecoderState, memory: Memory, *, return_weights: bool
    ) -> tuple[Float[Array, "R D"], Float[Array, "B 1 W S"] | None]:
        """Returns contexts and weights; the W = R / B beams of a source are W queries to the same keys."""
        b, s, d = memory.output.shape
        queries = query.astype(memory.output.dtype).reshape(b, -1, 1, d)
        values = memory.output[:, :, None]
        keys = values if memory.keys is None else memory.keys
        attention_fn = self._scored() if self.attention_fn is None else self.attention_fn
        if state.coverage is not None and self.w_coverage is not None:
            coverage = state.coverage.reshape(b, 1, -1, s)
            attention_fn = functools.partial(attention_fn, coverage=coverage, w_coverage=self.w_coverage[...])
        if self.window is not None:
            attention_fn = self._windowed(queries, state.position, memory.mask, self.window, attention_fn)
        # Pass `return_weights` only if needed: not every attention function supports it.
        options = {"return_weights": True} if return_weights else {}
        result: Any = attention_fn(queries, keys, values, mask=memory.mask, **options)
        context, weights = result if return_weights else (result, None)
        return context.reshape(query.shape).astype(jnp.float32), weights

    def _scored(self) -> AttentionFn:
        """Returns the attention function: "concat" has parameters w_query and v, "general" only w_query, "dot" none."""
        if self.w_query is None:
            return functools.partial(dot_product_attention, scale=self.scale)
        if self.v is None:
            return functools.partial(general_attention, w=self.w_query[...], scale=self.scale)
        return functools.partial(additive_attention, w_query=self.w_query[...], w_key=None, v=self.v[...])

    def _windowed(
        self,
        queries: Float[Array, "B W 1 D"],
        position: Int[Array, ""],
        mask: Bool[Array, "B 1 1 S"],
        window: int,
        attention_fn: AttentionFn,
    ) -> AttentionFn:
        """Restricts an attention function to a window of the source, equations 9 and 10 of Luong et al. (2015)."""
        key_position = jnp.cumsum(mask[:, 0, 0], axis=-1) - 1  # counted without padding
        center, sigma = position.astype(jnp.float32).reshape(1, 1, 1), None
        if self.w_position is not None and self.v_position is not None:
            w, v = self.w_position[...], self.v_position[...]
            length = mask.sum(axis=-1)
            center, sigma = aligned_position(queries.swapaxes(1, 2), length, w=w, v=v), window / 2
        return functools.partial(
            aligned_attention,
            position=center,
            window=window,
            sigma=sigma,
            key_position=key_position,
            attention_fn=attention_fn,
        )


# Values of `variant`, `score` and `alignment` of `Seq2SeqConfig`, which explains them.
VARIANTS = ("fixed", "bahdanau", "luong")
SCORES = ("general", "dot", "concat")
ALIGNMENTS = ("global", "local-m", "local-p")


@documented
@dataclasses.dataclass(unsafe_hash=True)  # hashable: a model keeps a copy as static metadata
class Seq2SeqConfig:
    """Configuration of a recurrent encoder-decoder.

    `variant` chooses how the decoder uses the source:
    - "fixed": the same vector at every step, section 2.2 of Cho et al. (2014).
    - "bahdanau": the previous state attends to the source additively, and the context enters the next state, appendix
      A.2 of Bahdanau et al. (2015, https://arxiv.org/abs/1409.0473).
    - "luong": the new state attends to the source; state and context form an attentional vector, which predicts the
      token and is fed to the next step, sections 3.1 and 3.3 of Luong et al. (2015, https://arxiv.org/abs/1508.04025).

    `alignment` chooses the part of the source that "luong" attends to (their section 3.2):
    - "global": all of it.
    - "local-m": a window of 2 `window` + 1 tokens around the source position equal to the target position. Beyond the
      end of the source there is nothing to attend to.
    - "local-p": such a window around a position predicted from the state. A Gaussian weights tokens by their distance
      from its center, so that weights sum to less than 1.
    Positions do not count padding.

    With `coverage`, the additive score sees the sum of past attention weights of each source token, and training adds a
    loss for attending to the same token again: equations 10 to 13 of See et al. (2017,
    https://arxiv.org/abs/1704.04368). They turn it on for the last training steps, as is possible with
    `config.init_from`.
    """

    # Size of the vocabulary that both languages share; 0: `train` chooses it by the amount of training text.
    vocab_size: int = at_least(0, 30_000)
    num_layers: int = at_least(1, 2)  # layers of the bidirectional encoder
    num_decoder_layers: int | None = at_least(1, None)  # None: num_layers
    d_model: int = at_least(2, 512)  # size of embeddings and decoder states; an encoder direction has half of it
    cell: str = one_of(CELLS, "lstm")
    variant: str = one_of(VARIANTS, "luong")
    # Score of variant "luong". "bahdanau" always uses "concat", here with a hidden layer of d_model units.
    score: str = one_of(SCORES, "general")
    scaled: bool = True  # scale "general" and "dot" by 1 / sqrt(d_model); unscaled as in Luong, they saturate a softmax
    alignment: str = one_of(ALIGNMENTS, "global")  # alignment of variant "luong"
    window: int = at_least(1, 10)  # for "local-m" and "local-p": D, tokens on each side; the Gaussian has sigma = D / 2
    # Weight of the coverage loss for an additive score ("bahdanau", "concat"); the paper's is 1. None: no coverage.
    coverage: float | None = at_least(0, None)
    dropout_rate: float = fraction(0.2)  # dropout between layers, not between steps (Zaremba et al., 2014)
    # Dropout of a layer's recurrent state, with one mask for all steps of a sequence (Gal and Ghahramani, 2016). Unlike
    # in that paper, the inputs of a layer are dropped by `dropout_rate`, with a new mask at each step.
    recurrent_dropout_rate: float = fraction(0.0)
    pad_id: int = at_least(0, 0)  # id of the padding token
    start_id: int = at_least(0, 1)  # id of the token that the decoder reads first
    eos_id: int = at_least(0, 2)  # id of the token that ends a sentence; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # dtype of matrix products; parameters, states, logits: float32

    kind: ClassVar[str] = "encoder_decoder"

    def validate(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.d_model % 2:
            raise ValueError(f"d_model must be even, half of it for each direction, got {self.d_model}")
        if self.alignment != "global" and self.variant != "luong":
            raise ValueError(f'alignment="{self.alignment}" needs variant="luong", got variant="{self.variant}"')
        if self.coverage is not None and self.scored_by != "concat":
            raise ValueError(
                f'coverage={self.coverage} needs an additive score, variant="bahdanau" or variant="luong" with '
                f'score="concat", got variant="{self.variant}" and score="{self.score}": set coverage to None'
            )

    def tiny(self, *, max_length: int) -> None:
        """Sets sizes that train in seconds on one CPU."""
        del max_length  # a recurrent network has no maximum length
        self.vocab_size, self.num_layers, self.d_model = 1_000, 1, 32

    def make(self, *, rngs: nnx.Rngs) -> "Seq2Seq":
        return Seq2Seq(self, rngs=rngs)

    @property
    def decoder_depth(self) -> int:
        """The number of decoder layers."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def scored_by(self) -> str:
        """The score of the variant's attention; "" for "fixed", which has no attention."""
        return {"fixed": "", "bahdanau": "concat", "luong": self.score}[self.variant]


class Seq2Seq(nnx.Module):
    """Bidirectional recurrent encoder and recurrent decoder; one embedding for source, target and output layer.

    The model itself implements `tfx_jax.nn.decoding.Decoder`.
    """

    continues_inputs = False

    def __init__(self, config: Seq2SeqConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: sizes and options; the model keeps a copy.
          attention_fn: attention to the source that replaces `config.score`, with the signature of
            `dot_product_attention`. It is called with one head, and its queries are the beams of a source, so that
            their order means nothing. With a local alignment it gets a mask that differs between queries, and for the
            Gaussian of "local-p" it must return weights.
          rngs: stream `params`.

        Raises:
          ValueError: if `d_model` is odd; `cell`, `variant`, `score` or `alignment` is unknown; `pad_id` or `start_id`
            is outside the vocabulary; a local alignment is used without variant "luong"; coverage is used without an
            additive score; or `attention_fn` is given for variant "fixed" or with coverage.
        """
        c = checked(config)
        check_special_ids(c)
        if c.variant == "fixed" and attention_fn is not None:
            raise ValueError('variant="fixed" has no attention: leave attention_fn out, or use another variant')
        if c.coverage is not None and attention_fn is not None:
            raise ValueError(f"coverage={c.coverage} cannot be combined with attention_fn: leave one of them out")
        cell, d, dtype = CELLS[c.cell], c.d_model, jnp.dtype(c.dtype)
        glorot = nnx.initializers.glorot_uniform()

        def matrix(rows: int, columns: int) -> Any:
            return nnx.Param(glorot(rngs.params(), (rows, columns)))

        self.embedding = Embedding(c.vocab_size, d, scale=math.sqrt(d), dtype=dtype, rngs=rngs)
        self.encoder_layers = stack_layers(
            lambda rngs: BidirectionalLayer(cell, d, dtype=dtype, rngs=rngs), c.num_layers, rngs
        )
        self.initial = matrix(d, c.decoder_depth * cell.num_states * d)
        self.initial_bias = nnx.Param(jnp.zeros(c.decoder_depth * cell.num_states * d))
        # The first layer has two inputs, the previous word and the fed vector; layers above have the output below.
        self.first_layer = RecurrentLayer(cell, d, d, dtype=dtype, rngs=rngs)
        self.feed = matrix(d, cell.num_gates * d)
        above = functools.partial(RecurrentLayer, cell, d, d, dtype=dtype)
        self.decoder_layers = (
            stack_layers(lambda rngs: above(rngs=rngs), c.decoder_depth - 1, rngs) if c.decoder_depth > 1 else None
        )
        self.attention = (
            SourceAttention(
                d,
                score=c.scored_by,
                scaled=c.scaled,
                alignment=c.alignment,
                window=c.window,
                has_coverage=c.coverage is not None,
                attention_fn=attention_fn,
                rngs=rngs,
            )
            if c.variant != "fixed"
            else None
        )
        # Luong's equation 5, or the maxout layer (Goodfellow et al., 2013) of Cho and Bahdanau.
        self.readout = matrix(2 * d, d) if c.variant == "luong" else matrix(3 * d, 2 * d)
        self.readout_bias = None if c.variant == "luong" else nnx.Param(jnp.zeros(2 * d))
        self.auxiliary_loss = None if c.coverage is None else AuxiliaryLoss(jnp.zeros(()))
        self.coverage_loss = None if c.coverage is None else StepMetric(jnp.zeros(()))
        self.config = copy.deepcopy(c)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        rngs: nnx.Rngs | None = None,
        return_attention: bool = False,
    ) -> Any:
        """Scores each target token given the source and the target tokens before it (teacher forcing).

        In training, the weighted coverage loss is stored in `auxiliary_loss`, which the train step adds to the loss.

        Args:
          source: source tokens, [B, S]; padding is `config.pad_id`.
          target: target tokens to predict, [B, T]; the decoder reads them shifted right by one, after
            `config.start_id`.
          rngs: stream `dropout`; None means evaluation.
          return_attention: whether to also return the attention map.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` the pair (logits, maps). Maps has one entry, [B, 1, T, S],
          for the last decoder layer: with two layers, "decoder/1/cross".

        Raises:
          UserError: if `return_attention` is True for variant "fixed".
        """
        if return_attention and self.config.variant == "fixed":
            raise UserError('a model with config.model.variant="fixed" has no attention: there is no map of it')
        check_tokens(source=source, target=target)
        memory = self._encode(source, rngs)
        words = drop(self.embedding(shift_right(target, self.config.start_id)), self.config.dropout_rate, rngs)
        first = self._first_state(memory)
        gates = self._first_gates(words, first.fed)
        if self.config.variant == "fixed":  # no input feeding, so each layer can process the whole sequence at once
            above = functools.partial(drop, rate=self.config.dropout_rate, rngs=rngs)
            output = run_layers(self._layers(), gates, first.layers, between=above, kept=memory.kept)
            return self._logits((output, jnp.broadcast_to(first.fed[:, None], output.shape)), words, rngs)
        inputs = gates.swapaxes(0, 1), self._step_keys(rngs, target.shape[1])
        advance = self._advance(memory, return_attention=return_attention)

        def step(before: DecoderState, gates_and_key: tuple[Array, Array | None]) -> tuple[DecoderState, Any]:
            """Returns the state after one target token, and the readout's inputs, weights and coverage loss."""
            state, outputs, weights = advance(before, *gates_and_key)
            loss = None
            if rngs is not None and before.coverage is not None and weights is not None:
                loss = coverage_loss(weights[:, 0, 0], before.coverage)
            return state, (outputs, weights if return_attention else None, loss)

        _, (outputs, maps, coverage_losses) = jax.lax.scan(step, first, inputs)
        self._record_coverage(coverage_losses, target)
        logits = self._logits(jax.tree.map(lambda x: x.swapaxes(0, 1), outputs), words, rngs)
        if not return_attention:
            return logits
        return logits, {f"decoder/{self.config.decoder_depth - 1}/cross": jnp.moveaxis(maps[:, :, :, 0], 0, 2)}

    def _record_coverage(self, losses: Float[Array, "T B"] | None, target: Int[Array, "B T"]) -> None:
        """Records the coverage loss, a mean over target tokens as in See et al., for the train step."""
        if losses is not None and self.auxiliary_loss is not None and self.coverage_loss is not None:
            exists = (target != self.config.pad_id).astype(jnp.float32)
            record_masked_mean(
                self.auxiliary_loss, self.coverage_loss, losses.T, exists, scale=self.config.coverage or 0.0
            )

    def _encode(self, source: Int[Array, "B S"], rngs: nnx.Rngs | None) -> Memory:
        """Runs the encoder, and samples the decoder's recurrent dropout masks."""
        c, token_mask = self.config, source != self.config.pad_id
        sample_masks = functools.partial(dropout_mask, rate=c.recurrent_dropout_rate, rngs=rngs)
        encoder_masks = sample_masks((c.num_layers, 2, source.shape[0], c.d_model // 2))

        def encode(
            layer: BidirectionalLayer, x: Array, rngs: nnx.Rngs | None, *layer_masks: Array
        ) -> tuple[Array, Array]:
            """Runs one layer; returns its outputs and the concatenated final outputs of both directions."""
            return layer(drop(x, c.dropout_rate, rngs), token_mask, *layer_masks)

        x = self.embedding(source)
        output, last = scan_layers(encode, self.encoder_layers, x, rngs, inputs=encoder_masks, unroll=True)
        keys = None if self.attention is None else self.attention.keys(output)
        decoder_masks = sample_masks((c.decoder_depth, source.shape[0], c.d_model))
        return Memory(output, keys, source_mask(source, c.pad_id), last[-1], decoder_masks)

    def _first_state(self, memory: Memory) -> DecoderState:
        """Returns the initial state: layer states computed from the encoder's final outputs, and no coverage yet."""
        c, num_states = self.config, CELLS[self.config.cell].num_states
        initial = jnp.tanh(add_bias(mixed_product(memory.last, self.initial[...]), self.initial_bias[...]))
        states = jnp.split(initial, c.decoder_depth * num_states, axis=-1)
        first_of_layer = range(0, len(states), num_states)  # indices: a layer has `num_states` consecutive states
        layers = tuple(tuple(states[first : first + num_states]) for first in first_of_layer)
        fed = memory.last if c.variant == "fixed" else jnp.zeros_like(memory.last)
        coverage = None if c.coverage is None else jnp.zeros(memory.output.shape[:2])
        return DecoderState(layers, fed, jnp.zeros((), jnp.int32), coverage)

    def _first_gates(self, words: Float[Array, "*batch D"], fed: Float[Array, "R D"]) -> Float[Array, "*batch GD"]:
        """Returns the gate inputs of the first layer from words and, for variant "fixed", from the fixed context."""
        gates = self.first_layer.gates(words)
        if self.config.variant != "fixed":
            return gates
        context_gates = mixed_product(fed, self.feed[...].astype(self.embedding.dtype))
        return gates + (context_gates if words.ndim == 2 else context_gates[:, None])

    def _advance(
        self, memory: Memory, *, return_attention: bool = False
    ) -> Callable[..., tuple[DecoderState, tuple[Array, Array], Any]]:
        """Returns the step function `advance(state, gates, key) -> (state, (output, context), weights)`.

        `gates` are the word's gate inputs of the first layer, and `key` samples dropout. (output, context) are the
        inputs of the readout: the last layer's output and its context, or for "luong" the attentional vector twice.
        `weights` are [B, 1, R / B, S] with `return_attention` or coverage, otherwise None. The stack of layers is split
        here, outside of the loop over steps.
        """
        layers = self._layers()
        feed, readout = (param[...].astype(self.embedding.dtype) for param in (self.feed, self.readout))
        variant, rate = self.config.variant, self.config.dropout_rate
        has_weights = return_attention or self.config.coverage is not None
        attend = cast(SourceAttention, self.attention)  # None for "fixed", which never calls it

        def advance(state: DecoderState, gates: Array, key: Array | None = None) -> Any:
            """Takes one step of the decoder."""
            context, weights = state.fed, None
            if variant == "bahdanau":
                context, weights = attend(state.layers[-1][0], state, memory, return_weights=has_weights)
            if variant != "fixed":
                gates = gates + mixed_product(context, feed)

            def between(x: Array, layer_index: int) -> Array:
                return dropout(x, rate, None if key is None else jax.random.fold_in(key, layer_index))

            states = step_layers(layers, gates, state.layers, between=between, kept=memory.kept)
            output = states[-1][0]
            if variant == "luong":
                context, weights = attend(output, state, memory, return_weights=has_weights)
                context, output = context.astype(readout.dtype), output.astype(readout.dtype)
                output = context = attentional_vector(context, output, readout).astype(jnp.float32)
            coverage = state.coverage
            if coverage is not None and weights is not None:
                coverage = coverage + weights.reshape(coverage.shape)
            return DecoderState(states, context, state.position + 1, coverage), (output, context), weights

        return advance

    def _layers(self) -> list[RecurrentLayer]:
        """Returns the decoder layers, from input to output."""
        return [self.first_layer, *([] if self.decoder_layers is None else unstack_layers(self.decoder_layers))]

    def _logits(
        self, outputs: tuple[Array, Array], words: Float[Array, "*batch D"], rngs: nnx.Rngs | None = None
    ) -> Float[Array, "*batch V"]:
        """Returns logits: from the attentional vector for "luong", otherwise from a maxout layer.

        Args:
          outputs: (output, context) from `_advance`; for "luong" the attentional vector twice.
          words: embeddings of the previous target words, for the maxout layer.
          rngs: stream `dropout`; None means evaluation.
        """
        x, context = outputs
        if self.readout_bias is not None:  # variants "fixed" and "bahdanau"; "luong" has no bias here
            inputs = jnp.concatenate([x, words.astype(x.dtype), context], axis=-1).astype(self.embedding.dtype)
            hidden = add_bias(mixed_product(inputs, self.readout[...]), self.readout_bias[...])
            x = hidden.reshape(*hidden.shape[:-1], -1, 2).max(axis=-1)  # maxout: of each pair of units the larger one
        return self.embedding.attend(drop(x, self.config.dropout_rate, rngs))

    def _step_keys(self, rngs: nnx.Rngs | None, num_steps: int) -> Array | None:
        """Returns a key for each step if there is dropout between the decoder's layers, otherwise None."""
        if rngs is None or not self.config.dropout_rate or self.decoder_layers is None:
            return None
        return jax.random.split(rngs.dropout(), num_steps)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model itself, see `tfx_jax.nn.decoding.DecodingModel`."""
        if int8:
            raise UserError("a Seq2Seq does not support int8: leave int8 out")
        return self

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that `step` scores."""
        return self.config.vocab_size

    @property
    def pad_id(self) -> int:
        """The padding token, which is never generated."""
        return self.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """Returns None: inputs may have any length."""
        del max_new_tokens
        return None

    def encode(self, inputs: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None) -> Memory:
        """Encodes sources, [B, S]; where `token_mask` is False, tokens count as padding."""
        return self._encode(with_padding(inputs, token_mask, self.pad_id), rngs=None)

    def init_cache(
        self, memory: Memory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Returns the first step's cache, states (reordered with the beams) and memory (not reordered), and tokens."""
        del max_length, num_beams  # the state has a constant size, and the search repeats it for each beam
        cache = {"state": self._first_state(memory), "memory": BeamInvariant(memory)}
        return cache, jnp.full(memory.last.shape[:1], self.config.start_id)

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Reads one token of each row (beam); returns logits of the next token and the new cache."""
        words = self.embedding(tokens)
        state, advance = cache["state"], self._advance(cache["memory"].value)
        state, outputs, _ = advance(state, self._first_gates(words, state.fed))
        return self._logits(outputs, words), cache | {"state": state}
