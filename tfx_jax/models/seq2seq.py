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
from tfx_jax.functional.recurrent import State, narrow_product
from tfx_jax.functional.search import BeamInvariant
from tfx_jax.models.config import DTYPES
from tfx_jax.models.encoder_decoder import check_token_ids, shift_right, source_mask, with_padding
from tfx_jax.nn.attention import AttentionFn
from tfx_jax.nn.auxiliary import AuxiliaryLoss, StepMetric, record_masked_mean
from tfx_jax.nn.basic import Embedding, drop, dropout_mask
from tfx_jax.nn.decoding import Decoder
from tfx_jax.nn.recurrent import CELLS, BidirectionalLayer, RecurrentLayer, run_layers, step_layers
from tfx_jax.nn.stack import scan_layers, stack_layers, unstack_layers


class Memory(NamedTuple):
    """What a decoder has of a source."""

    output: Float[Array, "B S D"]
    keys: Float[Array, "B S 1 D"] | None  # of the score "concat": multiplied once, not at every step
    mask: Bool[Array, "B 1 1 S"]
    last: Float[Array, "B D"]  # the last output of either direction, float32
    kept: Float[Array, "L B D"] | None  # of training: what is dropped of the states of each layer, at all steps alike


class DecoderState(NamedTuple):
    """What a decoder hands on: the state of each layer, what it is told beside the next word, and how many it wrote."""

    layers: tuple[State, ...]
    fed: Float[Array, "R D"]
    position: Int[Array, ""]
    coverage: Float[Array, "R S"] | None  # the sum of the weights so far, of each token of the source; None: not kept


class SourceAttention(nnx.Module):
    """How a state of the decoder looks at the source: by a score, or as another attention does it."""

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
        """Initializes the parameters. `attention_fn` replaces the score; the rest are options of `Seq2Seq`."""
        matrix = lambda: nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (size, size)))  # noqa: E731
        vector = lambda: nnx.Param(nnx.initializers.normal(size**-0.5)(rngs.params(), (size,)))  # noqa: E731
        # w_c and b_attn of See's equation 11, zeros: a trained model to which coverage is added begins as what it was.
        zeros = lambda: nnx.Param(jnp.zeros(size)) if has_coverage else None  # noqa: E731
        score = score if attention_fn is None else ""
        self.w_query = matrix() if score in ("concat", "general") else None
        self.w_key = matrix() if score == "concat" else None
        self.v = vector() if score == "concat" else None
        self.w_coverage, self.b_score = zeros(), zeros()
        self.w_position = matrix() if alignment == "local-p" else None
        self.v_position = vector() if alignment == "local-p" else None
        self.scale = size**-0.5 if scaled else 1.0
        self.window = None if alignment == "global" else window
        self.attention_fn = attention_fn

    def keys(self, output: Float[Array, "B S D"]) -> Float[Array, "B S 1 D"] | None:
        """What a score makes of the encoder's output alone; None where it takes that as it is."""
        if self.w_key is None:
            return None
        keys = narrow_product(output, self.w_key[...])[:, :, None]
        return keys if self.b_score is None else add_bias(keys, self.b_score[...])

    def __call__(
        self, query: Float[Array, "R D"], state: DecoderState, memory: Memory, *, return_weights: bool
    ) -> tuple[Float[Array, "R D"], Float[Array, "B 1 W S"] | None]:
        """Returns contexts and weights; the W beams of a source are so many queries, which share its keys."""
        b, s, d = memory.output.shape
        queries = query.astype(memory.output.dtype).reshape(b, -1, 1, d)
        values = memory.output[:, :, None]
        keys = values if memory.keys is None else memory.keys
        attention_fn = self._scored() if self.attention_fn is None else self.attention_fn
        if state.coverage is not None and self.w_coverage is not None:
            of_beams = {"coverage": state.coverage.reshape(b, 1, -1, s), "w_coverage": self.w_coverage[...]}
            attention_fn = functools.partial(attention_fn, **of_beams)
        if self.window is not None:
            attention_fn = self._around(queries, state.position, memory.mask, self.window, attention_fn)
        # What is not asked for is not passed on: not every attention has weights to return.
        options = {"return_weights": True} if return_weights else {}
        result: Any = attention_fn(queries, keys, values, mask=memory.mask, **options)
        context, weights = result if return_weights else (result, None)
        return context.reshape(query.shape).astype(jnp.float32), weights

    def _scored(self) -> AttentionFn:
        """The attention by its parameters: "concat" has w_query and v, "general" w_query alone, "dot" neither."""
        if self.w_query is None:
            return functools.partial(dot_product_attention, scale=self.scale)
        if self.v is None:
            return functools.partial(general_attention, w=self.w_query[...], scale=self.scale)
        return functools.partial(additive_attention, w_query=self.w_query[...], w_key=None, v=self.v[...])

    def _around(
        self,
        queries: Float[Array, "B W 1 D"],
        position: Int[Array, ""],
        mask: Bool[Array, "B 1 1 S"],
        window: int,
        attention_fn: AttentionFn,
    ) -> AttentionFn:
        """Has an attention look at the window of each query alone, equations 9 and 10 of Luong et al. (2015)."""
        key_position = jnp.cumsum(mask[:, 0, 0], axis=-1) - 1  # of tokens among those of their row
        place, sigma = position.astype(jnp.float32).reshape(1, 1, 1), None
        if self.w_position is not None and self.v_position is not None:
            w, v, length = self.w_position[...], self.v_position[...], mask.sum(axis=-1)
            place, sigma = aligned_position(queries.swapaxes(1, 2), length, w=w, v=v), window / 2
        return functools.partial(
            aligned_attention,
            position=place,
            window=window,
            sigma=sigma,
            key_position=key_position,
            attention_fn=attention_fn,
        )


VARIANTS = ("fixed", "bahdanau", "luong")
SCORES = ("general", "dot", "concat")
ALIGNMENTS = ("global", "local-m", "local-p")


@documented
@dataclasses.dataclass(unsafe_hash=True)  # a model keeps its own copy, as a static part
class Seq2SeqConfig:
    """Sizes of a recurrent encoder-decoder.

    `variant` says what the decoder sees of the source. "fixed": the same vector at every step, section 2.2 of Cho et
    al. (2014). "bahdanau": what its last state attends to, additively, enters the next one, appendix A.2 of Bahdanau et
    al. (2015, https://arxiv.org/abs/1409.0473). "luong": what its new state attends to joins it in an attentional
    vector, which is fed to the next step, sections 3.1 and 3.3 of Luong et al. (2015,
    https://arxiv.org/abs/1508.04025).

    `alignment` says how much of the source "luong" attends to at a step. "global": all of it. Their section 3.2 has two
    windows of 2 `window` + 1 tokens: "local-m", around the position of the target token, counted from 0 on either side,
    behind whose end there is nothing to attend to; and "local-p", around a position that the state predicts, with a
    Gaussian that prefers what is near it, so that weights add up to less than 1. Padding has no position.

    With `coverage` the decoder adds up what attention each token of the source had, the additive score sees this sum,
    and training adds to the loss what is looked at again: equations 10 to 13 of See et al. (2017,
    https://arxiv.org/abs/1704.04368), who turn it on for the last steps of a training, as `config.init_from` can.
    """

    # One vocabulary for both languages; of a training, 0: by the size of its text.
    vocab_size: int = at_least(0, 30_000)
    num_layers: int = at_least(1, 2)  # of the encoder, each in both directions
    num_decoder_layers: int | None = at_least(1, None)  # None: num_layers
    d_model: int = at_least(2, 512)  # of embeddings and decoder states; a direction of the encoder has half of it
    cell: str = one_of(CELLS, "lstm")
    variant: str = one_of(VARIANTS, "luong")
    # Of "luong". "bahdanau" has what Luong calls "concat", here with a hidden layer of d_model units.
    score: str = one_of(SCORES, "general")
    scaled: bool = True  # "general" and "dot" by 1 / sqrt(d_model), as a Transformer's; Luong's saturate a softmax
    alignment: str = one_of(ALIGNMENTS, "global")  # of "luong"
    window: int = at_least(1, 10)  # of "local-m" and "local-p": D, tokens on each side; the Gaussian has sigma = D / 2
    # Of an additive score ("bahdanau", "concat"): weight of the coverage loss, the paper's is 1. None: no coverage.
    coverage: float | None = at_least(0, None)
    dropout_rate: float = fraction(0.2)  # between layers, not between steps (Zaremba et al., 2014)
    # Of what a layer's state tells its next one: the same units at all steps of a sequence (Gal and Ghahramani, 2016).
    # They drop a layer's inputs alike; here `dropout_rate` drops these, again at each step.
    recurrent_dropout_rate: float = fraction(0.0)
    pad_id: int = at_least(0, 0)  # the token that fills a row
    start_id: int = at_least(0, 1)  # the one that the decoder reads first
    eos_id: int = at_least(0, 2)  # the one that ends a sentence; used by decoding only
    dtype: str = one_of(DTYPES, "float32")  # of products; parameters, states and logits stay float32

    kind: ClassVar[str] = "encoder_decoder"

    def validate(self) -> None:
        if self.d_model % 2:
            raise ValueError(f"d_model must be even, half of it for each direction, got {self.d_model}")
        if self.alignment != "global" and self.variant != "luong":
            raise ValueError(f'alignment="{self.alignment}" is of variant="luong" alone, got variant="{self.variant}"')
        if self.coverage is not None and self.scored_by != "concat":
            raise ValueError(
                f'coverage={self.coverage} is of an additive score alone, variant="bahdanau" or "luong" with '
                f'score="concat", got variant="{self.variant}" and score="{self.score}": leave it None'
            )

    def tiny(self, *, max_length: int) -> None:
        del max_length  # a recurrence has no end
        self.vocab_size, self.num_layers, self.d_model = 1_000, 1, 32

    def make(self, *, rngs: nnx.Rngs) -> "Seq2Seq":
        return Seq2Seq(self, rngs=rngs)

    @property
    def decoder_depth(self) -> int:
        """How many layers the decoder has."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def scored_by(self) -> str:
        """The score of the attention, "" where there is none."""
        return {"fixed": "", "bahdanau": "concat", "luong": self.score}[self.variant]


class Seq2Seq(nnx.Module):
    """A bidirectional encoder and a decoder over one embedding, which is the output layer as well.

    It is its own `tfx_jax.nn.decoding.Decoder`.
    """

    continues_inputs = False

    def __init__(self, config: Seq2SeqConfig, *, attention_fn: AttentionFn | None = None, rngs: nnx.Rngs):
        """Initializes the parameters.

        Args:
          config: the sizes.
          attention_fn: how a state of the decoder looks at the source, instead of by `config.score`: a function with
            the signature of `dot_product_attention` that takes queries one at a time. There is one head; queries are
            beams, of which none has a position. A window hides other keys from each of them, by a mask of all pairs,
            and its Gaussian needs weights.
          rngs: stream `params`.

        Raises:
          ValueError: if `d_model` is odd, there is no such cell, variant, score, alignment or start token, a window is
            not "luong"'s, coverage is not of an additive score, or a fixed context is given an attention.
        """
        c = config
        c.validate()
        allowed = {"cell": tuple(CELLS), "variant": VARIANTS, "score": SCORES, "alignment": ALIGNMENTS}
        for name, choices in allowed.items():
            if (value := getattr(c, name)) not in choices:
                raise ValueError(f"{name}={value!r} is none of {', '.join(choices)}")
        check_token_ids(c)
        if c.variant == "fixed" and attention_fn is not None:
            raise ValueError('variant="fixed" has no attention: leave attention_fn out, or take another variant')
        if c.coverage is not None and attention_fn is not None:
            raise ValueError(f"coverage={c.coverage} is seen by the model's own score: leave attention_fn out")
        cell, d, dtype = CELLS[c.cell], c.d_model, jnp.dtype(c.dtype)
        glorot = nnx.initializers.glorot_uniform()
        matrix = lambda rows, columns: nnx.Param(glorot(rngs.params(), (rows, columns)))  # noqa: E731
        self.embedding = Embedding(c.vocab_size, d, scale=math.sqrt(d), dtype=dtype, rngs=rngs)
        self.encoder_layers = stack_layers(
            lambda rngs: BidirectionalLayer(cell, d, dtype=dtype, rngs=rngs), c.num_layers, rngs
        )
        self.initial = matrix(d, c.decoder_depth * cell.num_states * d)
        self.initial_bias = nnx.Param(jnp.zeros(c.decoder_depth * cell.num_states * d))
        # The first layer is told two things, the word before and what is fed; layers above, the output below.
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
        # Luong's equation 5, or the maxout layer that Cho and Bahdanau have (Goodfellow et al., 2013).
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
        """Scores every next target token, given the source and the target tokens before it (teacher forcing).

        In training, the loss of coverage is left in `auxiliary_loss`, weighted, for the train step to add.

        Args:
          source: source tokens, `config.pad_id` where there is none.
          target: target tokens to be predicted; the decoder reads them shifted right behind the start token.
          rngs: stream `dropout`; None means evaluation.
          return_attention: also return the alignment.

        Returns:
          float32 logits, [B, T, V]; with `return_attention` a pair of these and a dictionary of one map, [B, 1, T, S],
          named by the layer that attends, the last: "decoder/1/cross" of two.

        Raises:
          UserError: if an alignment is asked of a model with a fixed context.
        """
        if return_attention and self.config.variant == "fixed":
            raise UserError('a model with config.model.variant="fixed" has no attention: there is no map of it')
        memory = self._read(source, rngs)
        words = drop(self.embedding(shift_right(target, self.config.start_id)), self.config.dropout_rate, rngs)
        first = self._first_state(memory)
        gates = self._first_gates(words, first.fed)
        if self.config.variant == "fixed":  # nothing is fed: a layer reads all that the one below has written
            above = functools.partial(drop, rate=self.config.dropout_rate, rngs=rngs)
            output = run_layers(self._layers(), gates, first.layers, between=above, kept=memory.kept)
            return self._logits((output, jnp.broadcast_to(first.fed[:, None], output.shape)), words, rngs)
        inputs = gates.swapaxes(0, 1), self._step_keys(rngs, target.shape[1])
        advance = self._advance(memory, return_attention=return_attention)

        def write(before: DecoderState, given: tuple[Array, Array | None]) -> tuple[DecoderState, Any]:
            state, outputs, weights = advance(before, *given)
            again = None
            if rngs is not None and before.coverage is not None and weights is not None:
                again = coverage_loss(weights[:, 0, 0], before.coverage)
            return state, (outputs, weights if return_attention else None, again)

        _, (outputs, maps, again) = jax.lax.scan(write, first, inputs)
        self._learn_coverage(again, target)
        logits = self._logits(jax.tree.map(lambda x: x.swapaxes(0, 1), outputs), words, rngs)
        if not return_attention:
            return logits
        return logits, {f"decoder/{self.config.decoder_depth - 1}/cross": jnp.moveaxis(maps[:, :, :, 0], 0, 2)}

    def _learn_coverage(self, losses: Float[Array, "T B"] | None, target: Int[Array, "B T"]) -> None:
        """Leaves the coverage loss, a mean over target tokens as theirs is, where the train step finds it."""
        if losses is not None and self.auxiliary_loss is not None and self.coverage_loss is not None:
            exists = (target != self.config.pad_id).astype(jnp.float32)
            record_masked_mean(
                self.auxiliary_loss, self.coverage_loss, losses.T, exists, scale=self.config.coverage or 0.0
            )

    def _read(self, source: Int[Array, "B S"], rngs: nnx.Rngs | None) -> Memory:
        """Runs the encoder."""
        c, token_mask = self.config, source != self.config.pad_id
        masks = functools.partial(dropout_mask, rate=c.recurrent_dropout_rate, rngs=rngs)
        kept = masks((c.num_layers, 2, source.shape[0], c.d_model // 2))

        def encode(layer: BidirectionalLayer, x: Array, rngs: nnx.Rngs | None, *kept: Array) -> tuple[Array, Array]:
            return layer(drop(x, c.dropout_rate, rngs), token_mask, *kept)

        output, last = scan_layers(encode, self.encoder_layers, self.embedding(source), rngs, inputs=kept, unroll=True)
        keys = None if self.attention is None else self.attention.keys(output)
        kept = masks((c.decoder_depth, source.shape[0], c.d_model))
        return Memory(output, keys, source_mask(source, c.pad_id), last[-1], kept)

    def _first_state(self, memory: Memory) -> DecoderState:
        """What the decoder begins with: states made of the encoder's last, and nothing attended to yet."""
        c = self.config
        drawn = jnp.tanh(add_bias(narrow_product(memory.last, self.initial[...]), self.initial_bias[...]))
        parts = jnp.split(drawn, c.decoder_depth * CELLS[c.cell].num_states, axis=-1)
        size = CELLS[c.cell].num_states
        layers = tuple(tuple(parts[start : start + size]) for start in range(0, len(parts), size))
        fed = memory.last if c.variant == "fixed" else jnp.zeros_like(memory.last)
        coverage = None if c.coverage is None else jnp.zeros(memory.output.shape[:2])
        return DecoderState(layers, fed, jnp.zeros((), jnp.int32), coverage)

    def _first_gates(self, words: Float[Array, "*batch D"], fed: Float[Array, "R D"]) -> Float[Array, "*batch GD"]:
        """What words add to the first gates, and a fixed context, which is multiplied once."""
        gates = self.first_layer.gates(words)
        if self.config.variant != "fixed":
            return gates
        told = narrow_product(fed, self.feed[...].astype(self.embedding.dtype))
        return gates + (told if words.ndim == 2 else told[:, None])

    def _advance(
        self, memory: Memory, *, return_attention: bool = False
    ) -> Callable[..., tuple[DecoderState, tuple[Array, Array], Any]]:
        """Makes the step: from a state and a word's share of the first gates to the next state.

        It also returns what the readout is made of, the last layer's output and its context (of "luong" the attentional
        vector itself, twice), and, with `return_attention` or coverage, the weights, [B, 1, R / B, S]. A stack is taken
        apart here, outside of the loop over steps.
        """
        stack = self._layers()
        feed, readout = (param[...].astype(self.embedding.dtype) for param in (self.feed, self.readout))
        variant, rate = self.config.variant, self.config.dropout_rate
        has_weights = return_attention or self.config.coverage is not None
        attend = cast(SourceAttention, self.attention)  # a fixed context has none, and asks for none

        def advance(state: DecoderState, gates: Array, key: Array | None = None) -> Any:
            context, weights = state.fed, None
            if variant == "bahdanau":
                context, weights = attend(state.layers[-1][0], state, memory, return_weights=has_weights)
            if variant != "fixed":
                gates = gates + narrow_product(context, feed)

            def between(x: Array, number: int) -> Array:
                return dropout(x, rate, None if key is None else jax.random.fold_in(key, number))

            layers = step_layers(stack, gates, state.layers, between=between, kept=memory.kept)
            output = layers[-1][0]
            if variant == "luong":
                context, weights = attend(output, state, memory, return_weights=has_weights)
                context, output = context.astype(readout.dtype), output.astype(readout.dtype)
                output = context = attentional_vector(context, output, readout).astype(jnp.float32)
            coverage = state.coverage
            if coverage is not None and weights is not None:
                coverage = coverage + weights.reshape(coverage.shape)
            return DecoderState(layers, context, state.position + 1, coverage), (output, context), weights

        return advance

    def _layers(self) -> list[RecurrentLayer]:
        """The decoder's, from below."""
        return [self.first_layer, *([] if self.decoder_layers is None else unstack_layers(self.decoder_layers))]

    def _logits(
        self, outputs: tuple[Array, Array], words: Float[Array, "*batch D"], rngs: nnx.Rngs | None = None
    ) -> Float[Array, "*batch V"]:
        """Scores the vocabulary; of "luong" from the attentional vector, else from a maxout layer."""
        x, context = outputs
        if self.readout_bias is not None:
            told = jnp.concatenate([x, words.astype(x.dtype), context], axis=-1).astype(self.embedding.dtype)
            hidden = add_bias(narrow_product(told, self.readout[...]), self.readout_bias[...])
            x = hidden.reshape(*hidden.shape[:-1], -1, 2).max(axis=-1)
        return self.embedding.attend(drop(x, self.config.dropout_rate, rngs))

    def _step_keys(self, rngs: nnx.Rngs | None, num_steps: int) -> Array | None:
        """A key for each step, if there is dropout between the decoder's layers."""
        if rngs is None or not self.config.dropout_rate or self.decoder_layers is None:
            return None
        return jax.random.split(rngs.dropout(), num_steps)

    def decoder(self, *, int8: bool = False) -> Decoder:
        """Returns the model itself, see `tfx_jax.nn.decoding.DecodingModel`."""
        if int8:
            raise UserError("a Seq2Seq has no products of integers: leave int8 out")
        return self

    @property
    def vocab_size(self) -> int:
        """As in the configuration."""
        return self.config.vocab_size

    @property
    def pad_id(self) -> int:
        """As in the configuration."""
        return self.config.pad_id

    def max_input_length(self, max_new_tokens: int) -> int | None:
        """No limit."""
        del max_new_tokens
        return None

    def encode(self, inputs: Int[Array, "B S"], token_mask: Bool[Array, "B S"] | None = None) -> Memory:
        """Reads sources."""
        return self._read(with_padding(inputs, token_mask, self.pad_id), None)

    def init_cache(
        self, memory: Memory, *, max_length: int, num_beams: int = 1
    ) -> tuple[dict[str, Any], Int[Array, " B"]]:
        """Begins; states follow their beams, and the memory stays where it is."""
        del max_length, num_beams  # a state takes no more room for more steps, and the search repeats it
        cache = {"state": self._first_state(memory), "memory": BeamInvariant(memory)}
        return cache, jnp.full(memory.last.shape[:1], self.config.start_id)

    def step(self, tokens: Int[Array, " R"], cache: dict[str, Any]) -> tuple[Float[Array, "R V"], dict[str, Any]]:
        """Takes one token of each row."""
        words = self.embedding(tokens)
        state, advance = cache["state"], self._advance(cache["memory"].value)
        state, outputs, _ = advance(state, self._first_gates(words, state.fed))
        return self._logits(outputs, words), cache | {"state": state}
