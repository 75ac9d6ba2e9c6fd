"""Padding independence: every attention in every model gives a text the output that the text has alone.

The cross is `CASES` (a model and an attention of its configuration) times the situations of a case. In each of them the
outputs at the tokens of a text equal those of the text alone, or `validate` and the constructor refuse the
configuration in one line. `python -m tests.models.test_padding_independence [substring ...]` prints the figures.
"""

import collections
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tfx_jax.models
from tests.attentions import ON_CPU
from tests.nn.programs import draw, started
from tfx_jax.functional.attention import SPECS
from tfx_jax.generation.decoding import BeamSearch, Greedy, decode
from tfx_jax.models import (
    GPT,
    T5,
    Bert,
    BertConfig,
    Captioner,
    CaptionerConfig,
    Conformer,
    ConformerConfig,
    DecomposableAttention,
    DecomposableConfig,
    Elmo,
    ElmoConfig,
    ElmoTagger,
    Esim,
    EsimConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    LongEncoder,
    LongEncoderConfig,
    PatchPooling,
    PatchPoolingConfig,
    Reformer,
    ReformerConfig,
    SanCTC,
    SanCTCConfig,
    Seq2Seq,
    Seq2SeqConfig,
    Seq2Vec,
    Seq2VecConfig,
    T5Config,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
    ViTClassifier,
    ViTConfig,
)
from tfx_jax.models.config import SelfAttentionConfig, check_pattern
from tfx_jax.models.elmo import CharacterConfig, ElmoTaggerConfig
from tfx_jax.nn import AttentionConfig, AttentionOptions, ExpertsConfig

# Attentions by a label, which is their name and what is not the example of their spec.
ATTENTIONS = {name: SPECS[name].example(16) for name in ON_CPU} | {
    "favor": {},
    "linear": {},
    "window": {"window": 2},
    "window block_size": {"window": 3, "block_size": 4},
    "lsh": {"chunk_size": 4},
    "lsh num_buckets": {"num_hashes": 2, "num_buckets": 4, "chunk_size": 4},
    "entmax alpha": {"alpha": 2.0},
    "synthesizer": {"max_length": 40},
    "dense_synthesizer": {"max_length": 40},
    "linformer": {"max_length": 40, "num_projected": 5},
    "routing": {"num_clusters": 3},
    "routing window": {"num_clusters": 3, "window": 4},
    "window,dense": {"window": 2},
    "local,window": {"block_size": 4, "window": 2},
}


def attention_of(label):
    return AttentionConfig(label.split()[0], AttentionOptions(**ATTENTIONS[label]))


# Three texts, of which the longest fills a row of the padded batch: prompts of 8, 2 and 16 tokens and three more.
V, WIDTH, AFTER = 13, 19, 3
_RANDOM = np.random.default_rng(7)
LENGTHS = (11, 5, WIDTH)
TEXTS = [_RANDOM.integers(3, V, length).astype(np.int32) for length in LENGTHS]
TARGETS = [_RANDOM.integers(3, V, length).astype(np.int32) for length in (4, 7, 6)]
TARGET_WIDTH = 9
SIZES = {"num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 8}


@dataclasses.dataclass
class Layout:
    """Texts in a batch: `places[i]` is the row and the columns of text i, `segments` numbers the texts of a row."""

    mask: np.ndarray
    segments: np.ndarray
    places: list[tuple[int, np.ndarray]]

    def fill(self, items, fill):
        """Puts an item at each place of a text, and `fill` elsewhere."""
        first = np.asarray(items[0])
        array = np.full((*self.mask.shape, *first.shape[1:]), fill, first.dtype)
        for item, (row, columns) in zip(items, self.places, strict=True):
            array[row, columns] = item
        return array

    def positions(self):
        return self.fill([np.arange(len(columns), dtype=np.int32) for _, columns in self.places], 0)

    def take(self, output):
        """The outputs of each text."""
        return [np.asarray(output)[row, columns] for row, columns in self.places]


def layout(lengths, columns, width, rows=None):
    rows = range(len(lengths)) if rows is None else rows
    places = [(row, np.asarray(where, int)) for row, where in zip(rows, columns, strict=True)]
    mask, segments = np.zeros((len(lengths), width), bool), np.zeros((len(lengths), width), np.int32)
    for row, where in places:
        mask[row, where], segments[row, where] = True, segments[row].max() + 1
    return Layout(mask, segments, places)


def layouts(lengths, width):
    """The ways to pad, all of one shape: a row for each text."""
    between = np.random.default_rng(3)
    return {
        "right": layout(lengths, [np.arange(n) for n in lengths], width),
        "left": layout(lengths, [np.arange(width - n, width) for n in lengths], width),
        "between": layout(lengths, [np.sort(between.permutation(width)[:n]) for n in lengths], width),
    }


PADDED = layouts(LENGTHS, WIDTH)
# Two texts in one row, with padding in front, between and behind; the longest has a row to itself.
PACKED = layout(LENGTHS, [np.arange(6, 17), np.arange(5), np.arange(WIDTH)], WIDTH, rows=(0, 0, 1))
PROMPTS = layouts([n - AFTER for n in LENGTHS], WIDTH - AFTER)
REFUSED = -1.0  # in place of a difference: one line says that there is no such thing
GARBAGE = -1  # the token where there is none, and a mask says so


def alone(run, *items):
    """Runs each text by itself: `run` takes arrays of one row."""
    return [np.asarray(run(*(item[None] for item in each)))[0] for each in zip(*items, strict=True)]


def difference(got, want):
    """The largest difference, of what is as large as the numbers themselves."""
    scale = max(1.0, *(float(np.abs(x).max()) for x in want))
    pairs = zip(got, want, strict=True)
    return max(float(np.abs(a - b).max(initial=0)) if np.isfinite(a).all() else np.inf for a, b in pairs) / scale


# Each reader yields situations and how far the outputs are from those of texts alone.


def tokens_with_mask(model, *, packs=False):
    """Models that are called as `model(tokens, token_mask=...)`, and perhaps with segments."""
    output = lambda result: getattr(result, "sequence", result)  # noqa: E731
    run = jax.jit(lambda tokens: output(model(tokens)))
    want = alone(run, TEXTS)
    assert np.concatenate(want).std(axis=0).mean() > 0.1  # the texts are not all alike
    padded = jax.jit(lambda tokens, mask: output(model(tokens, token_mask=mask)))
    for name, where in PADDED.items():
        yield name, difference(where.take(padded(where.fill(TEXTS, GARBAGE), where.mask)), want)
    if not packs:
        return
    attention = getattr(model.config, "attention", AttentionConfig())  # a Reformer has its own
    if not all(SPECS[name].segments for name in attention.names):
        with pytest.raises(ValueError, match=f"{attention.names[0]} attention does not support packed sequences"):
            jax.eval_shape(lambda tokens: model(tokens, segment_ids=tokens), PACKED.segments)
        yield "packed", REFUSED
        return
    packed = jax.jit(lambda tokens, at, segments: output(model(tokens, positions=at, segment_ids=segments)))
    found = packed(PACKED.fill(TEXTS, GARBAGE), PACKED.positions(), PACKED.segments)
    yield "packed", difference(PACKED.take(found), want)


def language_model(model):
    """A decoder-only model: padding, packing, a prefix, and decoding."""
    yield from tokens_with_mask(model, packs=True)
    run = jax.jit(lambda tokens: model(tokens))
    want = alone(run, TEXTS)
    (prefix,) = alone(run, [TEXTS[0][: LENGTHS[1]]])
    yield "prefix", difference([prefix], [want[0][: LENGTHS[1]]])
    yield from decoding(model, want)


def decoding(model, want):
    """A prompt, then its text token by token, and searches: `want` are the logits of the texts alone."""
    after = np.stack([text[-AFTER:] for text in TEXTS])
    prompts = [text[:-AFTER] for text in TEXTS]

    @jax.jit
    def forced(tokens, mask, after):
        """Reads what the text alone was, with a cache for more tokens than there are."""
        step_fn, cache, first = started(model.decoder(), tokens, mask, max_length=9)

        def take(cache, newest):
            logits, cache = step_fn(newest, cache)
            return cache, logits

        return jax.lax.scan(take, cache, jnp.concatenate([first[None], after.T]))[1].swapaxes(0, 1)

    last = [logits[-AFTER - 1 :] for logits in want]
    for name, where in PROMPTS.items():
        logits = forced(where.fill(prompts, GARBAGE), where.mask, after)
        yield f"decoding {name}", difference(list(np.asarray(logits)), last)
    yield from searches(model, [(where.fill(prompts, GARBAGE), where.mask) for where in PROMPTS.values()], prompts)


# One attention of each way to decode: from cached keys and values, a window of them, all tokens or a state. What caches
# hold moves with the beams, whatever it is; `test_attention_cores` searches with every attention.
SEARCHED = {"dense", "window", "local", "lsh", "gated_delta_rule"}


def searches(model, batches, inputs):
    """Beam search, whose caches move: of a batch, which has room for more tokens, and of one text alone."""
    attention = getattr(model.config, "attention", None)
    if isinstance(attention, AttentionConfig) and attention.name not in SEARCHED:
        return
    limit = 6

    @functools.partial(jax.jit, static_argnames="max_length")
    def search(tokens, mask, limits, max_length):
        options = {"length_limits": limits, "eos_ids": [2], "max_length": max_length}
        return decode(model.decoder(), tokens, mask, search=BeamSearch(beam_size=3), **options)[0, :limit]

    one = inputs[0]
    want = np.asarray(search(one[None], np.ones((1, len(one)), bool), np.array([limit]), limit))
    for name, (tokens, mask) in zip(PROMPTS, batches, strict=True):
        limits = np.array([limit, 1, 2])  # the others end early
        yield f"search {name}", float((np.asarray(search(tokens, mask, limits, 10)) != want).any())


def segment_recurrence(model):
    """A Transformer-XL, which has no padding but in a prompt: a text is a prefix of what it is read with."""
    run = jax.jit(lambda tokens: model(tokens)[0])
    want = alone(run, TEXTS)
    padded = run(PADDED["right"].fill(TEXTS, 1))
    yield "right", difference(PADDED["right"].take(padded), want)
    yield from decoding(model, want)


def encoder_decoder(model):
    """A source, padded as you like, and a target with padding behind it."""
    run = jax.jit(lambda source, target: model(source, target))
    want = alone(run, TEXTS, TARGETS)
    behind = layout([len(t) for t in TARGETS], [np.arange(len(t)) for t in TARGETS], TARGET_WIDTH)
    for name, where in PADDED.items():
        yield name, difference(behind.take(run(where.fill(TEXTS, 0), behind.fill(TARGETS, 0))), want)
    yield "prefix", difference(alone(run, TEXTS[:1], [TARGETS[0][:3]]), [want[0][:3]])

    @jax.jit
    def forced(source, mask, target):
        """Reads the targets, with a cache for more tokens than there are."""
        step_fn, cache, first = started(model.decoder(), source, mask, max_length=TARGET_WIDTH + 6)

        def take(cache, newest):
            logits, cache = step_fn(newest, cache)
            return cache, logits

        return jax.lax.scan(take, cache, jnp.concatenate([first[None], target.T[:-1]]))[1].swapaxes(0, 1)

    for name, where in PADDED.items():
        logits = forced(where.fill(TEXTS, GARBAGE), where.mask, behind.fill(TARGETS, 0))
        yield f"decoding {name}", difference(behind.take(logits), want)
    yield from searches(model, [(where.fill(TEXTS, GARBAGE), where.mask) for where in PADDED.values()], TEXTS)


def frames(model):
    """Frames, of which a number says how many there are: padding is behind them."""
    lengths = [model.config.subsampling * n - 1 for n in LENGTHS]
    random = np.random.default_rng(5)
    items = [random.normal(size=(n, 4)).astype(np.float32) for n in lengths]
    run = jax.jit(lambda frames, counts: model(frames, counts))
    want = alone(run, items, [np.int32(n) for n in lengths])
    where = layout(lengths, [np.arange(n) for n in lengths], max(lengths) + 1)
    found = np.asarray(run(where.fill(items, 9.0), np.array(lengths, np.int32)))
    yield "right", difference([found[i, : len(x)] for i, x in enumerate(want)], want)


def pooled_tokens(model):
    """One vector of logits for each text, whose padding is the token 0."""
    run = jax.jit(lambda tokens: model(tokens))
    want = alone(run, TEXTS)
    for name, where in PADDED.items():
        yield name, difference(list(np.asarray(run(where.fill(TEXTS, 0)))), want)


def pooled_pairs(model):
    """Likewise of pairs, each side padded by itself."""
    run = jax.jit(lambda first, second: model(first, second))
    others = [*TEXTS[1:], TEXTS[0]]
    want = alone(run, TEXTS, others)
    sides = layouts([len(text) for text in others], WIDTH)
    for name, where in PADDED.items():
        yield name, difference(list(np.asarray(run(where.fill(TEXTS, 0), sides[name].fill(others, 0)))), want)


def pairs_of_one_length(model):
    """Pairs whose sides are as long as each other alone, as a LongEncoder takes them."""
    run = jax.jit(lambda first, second: model(first, second))
    others = [np.roll(text, 1) for text in TEXTS]
    want = alone(run, TEXTS, others)
    for name, where in PADDED.items():
        yield name, difference(list(np.asarray(run(where.fill(TEXTS, 0), where.fill(others, 0)))), want)


def words(model):
    """Words of characters."""
    random = np.random.default_rng(6)
    items = [random.integers(1, 250, (n, 6)).astype(np.int32) for n in LENGTHS]
    last = lambda x: jnp.moveaxis(x, 0, 2) if x.ndim == 5 else x  # noqa: E731  # of an ELMo, layers are the first axis
    run = jax.jit(lambda characters: last(model(characters)))
    want = alone(run, items)
    padded = jax.jit(lambda characters, mask: last(model(characters, token_mask=mask)))
    for name, where in PADDED.items():
        yield name, difference(where.take(padded(where.fill(items, 7), where.mask)), want)


def events(model):
    """Events of variables, values and times."""
    random = np.random.default_rng(8)
    items = [[random.random(n).astype(np.float32) for n in LENGTHS] for _ in range(2)]
    variables = [text % 5 for text in TEXTS]
    run = jax.jit(lambda *arrays: model(*arrays))
    want = alone(run, variables, *items, [np.ones(n, bool) for n in LENGTHS])
    for name, where in PADDED.items():
        arrays = [where.fill(item, 4) for item in (variables, *items)]
        yield name, difference(list(np.asarray(run(*arrays, where.mask))), want)


def images(model):
    """Images, which have no padding: a batch, and each alone."""
    inputs = np.random.default_rng(2).normal(size=(3, 12, 12, 3)).astype(np.float32)
    run = jax.jit(lambda x: model(x))
    yield "batch", difference(list(np.asarray(run(inputs))), alone(run, list(inputs)))


def captions(model):
    """Captions with padding behind them, of images."""
    inputs = np.random.default_rng(2).integers(0, 256, (3, 12, 12, 3)).astype(np.int32)
    run = jax.jit(lambda x, target: model(x, target))
    want = alone(run, list(inputs), TARGETS)
    behind = layout([len(t) for t in TARGETS], [np.arange(len(t)) for t in TARGETS], TARGET_WIDTH)
    yield "right", difference(behind.take(run(inputs, behind.fill(TARGETS, 0))), want)

    @functools.partial(jax.jit, static_argnames="max_length")
    def search(inputs, max_length):
        ways = Greedy(), BeamSearch(beam_size=3)
        limits = np.full(len(inputs), 6)
        return [
            decode(model.decoder(), inputs, None, limits, search=w, eos_ids=[2], max_length=max_length) for w in ways
        ]

    single = [np.asarray(x)[0] for x in search(inputs[:1], 6)]
    for title, length in (("search batch", 6), ("search max_new_tokens", 9)):
        found = [np.asarray(x)[0, :6] for x in search(inputs, length)]
        yield title, float(any((a != b).any() for a, b in zip(found, single, strict=True)))


@dataclasses.dataclass(frozen=True)
class Family:
    """A model, its configuration, and who reads with it."""

    config: object
    model: type
    reader: object


LABELS = ("a", "b", "c")
MOE = ExpertsConfig(num_experts=3)
FAMILIES = {
    "gpt": Family(GPTConfig(V, max_length=64, **SIZES), GPT, language_model),
    "gpt with experts": Family(GPTConfig(V, max_length=64, experts=MOE, **SIZES), GPT, language_model),
    "llama": Family(LlamaConfig(V, max_length=64, num_kv_heads=1, qk_norm="head", **SIZES), Llama, language_model),
    "transformer": Family(TransformerConfig(V, **SIZES), Transformer, encoder_decoder),
    "transformer with learned positions": Family(
        TransformerConfig(V, learned_positions=32, **SIZES), Transformer, encoder_decoder
    ),
    "transformer with experts": Family(TransformerConfig(V, experts=MOE, **SIZES), Transformer, encoder_decoder),
    "t5": Family(T5Config(V, d_k=4, **SIZES), T5, encoder_decoder),
    "bert": Family(BertConfig(V, max_length=32, **SIZES), Bert, tokens_with_mask),
    "longformer": Family(BertConfig(V, max_length=32, max_global_tokens=2, **SIZES), Bert, tokens_with_mask),
    "long_encoder": Family(LongEncoderConfig(V, labels=LABELS, **SIZES), LongEncoder, pooled_tokens),
    "long_encoder of pairs": Family(
        LongEncoderConfig(V, labels=LABELS, num_sequences=2, **SIZES), LongEncoder, pairs_of_one_length
    ),
    "san_ctc": Family(SanCTCConfig(V, num_features=4, subsampling=2, **SIZES), SanCTC, frames),
    "conformer": Family(ConformerConfig(V, num_features=4, kernel_size=3, **SIZES), Conformer, frames),
    "vit": Family(ViTConfig(image_size=12, patch_size=3, labels=LABELS, **SIZES), ViTClassifier, images),
    "transformer_xl": Family(
        TransformerXLConfig(V, memory_length=32, eval_memory_length=64, **SIZES), TransformerXL, segment_recurrence
    ),
}
SAME_SIZE = {"num_layers": 2, "d_model": 8}
OTHERS = {
    "reformer": Family(ReformerConfig(V, max_length=64, chunk_size=4, **SIZES), Reformer, language_model),
    "reformer num_buckets": Family(
        ReformerConfig(V, max_length=64, chunk_size=4, num_buckets=4, num_hashes=2, **SIZES), Reformer, language_model
    ),
    "reformer full_attention": Family(
        ReformerConfig(V, max_length=64, full_attention=True, **SIZES), Reformer, language_model
    ),
    **{
        f"seq2seq {' '.join(map(str, options.values()))}": Family(
            Seq2SeqConfig(V, **SAME_SIZE, **options), Seq2Seq, encoder_decoder
        )
        for options in (
            {"variant": "fixed"},
            {"variant": "bahdanau"},
            {"variant": "bahdanau", "coverage": 1.0},
            {"score": "general"},
            {"score": "dot", "cell": "gru"},
            {"score": "concat"},
            {"alignment": "local-m", "window": 2},
            {"alignment": "local-p", "window": 2},
        )
    },
    "elmo": Family(
        ElmoConfig(V, 6, CharacterConfig(4, (1, 3), (4, 4), 1), d_hidden=8, d_model=6, labels=LABELS), Elmo, words
    ),
    "elmo_tagger": Family(
        ElmoConfig(
            V,
            6,
            CharacterConfig(4, (1, 3), (4, 4), 1),
            d_hidden=8,
            d_model=6,
            labels=LABELS,
            tagger=ElmoTaggerConfig(True, CharacterConfig(4, (1, 2), (4, 4), 1), 8, 8),
        ),
        ElmoTagger,
        words,
    ),
    "esim": Family(EsimConfig(V, d_embedding=6, d_model=8, labels=LABELS), Esim, pooled_pairs),
    "decomposable": Family(
        DecomposableConfig(V, d_embedding=6, d_model=8, d_ff=8, labels=LABELS), DecomposableAttention, pooled_pairs
    ),
    "decomposable intra_attention": Family(
        DecomposableConfig(V, d_embedding=6, d_model=8, d_ff=8, intra_attention=True, max_distance=3, labels=LABELS),
        DecomposableAttention,
        pooled_pairs,
    ),
    **{
        f"seq2vec {pooling}": Family(Seq2VecConfig(5, d_model=8, d_ff=8, pooling=pooling), Seq2Vec, events)
        for pooling in ("additive", "dot", "mean", "structured")
    },
    "patch_pooling": Family(PatchPoolingConfig(12, 3, d_model=8, d_ff=8, labels=LABELS), PatchPooling, images),
    **{
        f"captioner {variant}": Family(
            CaptionerConfig(V, image_size=12, channels=(4, 8), d_model=8, variant=variant), Captioner, captions
        )
        for variant in ("soft", "hard")
    },
}
SAME_FOR_ALL = {"gpt with experts", "transformer with experts", "transformer with learned positions"}
CASES = [
    (family, label)
    for family in FAMILIES
    for label in (("dense", "window,dense") if family in SAME_FOR_ALL else ATTENTIONS)
] + [(family, "") for family in OTHERS]


def configured(family, label):
    config = (FAMILIES | OTHERS)[family].config
    return dataclasses.replace(config, attention=attention_of(label)) if label else config


def spread(name):
    """Deviation of a parameter: kernels are large, those that add to a residual small, or all tokens become alike."""
    if name.endswith("variance"):
        return 0.0
    return 0.2 if "bias" in name or "out/" in name or "down" in name else 0.8


def make(family, label):
    """A model far from its start, or the line that refuses its configuration."""
    config = configured(family, label)
    try:
        config.validate()
        if label:
            check_pattern(config)
        nnx.eval_shape(lambda: (FAMILIES | OTHERS)[family].model(config, rngs=nnx.Rngs(0)))
    except ValueError as error:
        return str(error)
    return draw(
        lambda: (FAMILIES | OTHERS)[family].model(config, rngs=nnx.Rngs(0)),
        stddev=spread,
        mean=lambda name: float(name.endswith(("scale", "variance"))),
    )


def situations(family, label):
    """How far each situation of a case is from the text alone; a line where the configuration is refused."""
    model = make(family, label)
    return model if isinstance(model, str) else dict((FAMILIES | OTHERS)[family].reader(model))


TOLERANCE = 1e-4
QUICK = {
    ("gpt", "local"),
    ("bert", "window"),
    ("long_encoder", "lsh num_buckets"),
    ("transformer", "dense"),
    ("decomposable intra_attention", ""),
}


def is_refused(family, label):
    """Whether there is no such model, by what specs and families say of themselves."""
    if not label:
        return False
    config, attention = FAMILIES[family].config, attention_of(label)
    specs = [SPECS[name] for name in attention.names]
    return (
        any(
            option.required and key not in attention.options.given
            for spec in specs
            for key, option in spec.options.items()
        )
        or (not config.is_causal and any(spec.causal_only for spec in specs))
        or (config.is_causal and not all(spec.causal for spec in specs))
        or (config.has_position_bias and not all(spec.bias for spec in specs))
        or (
            getattr(config, "num_kv_heads", None) == 1
            and (label == "differential" or not all(spec.grouped_queries for spec in specs))  # which pairs heads
        )
        or (family == "transformer_xl" and attention.name != "relative")
        or (family == "longformer" and attention.name != "window")
    )


@pytest.mark.compiles(40, "texts of every length are read alone")
@pytest.mark.parametrize(
    ("family", "label"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_text_has_the_output_that_it_has_alone(family, label):
    found = situations(family, label)
    assert isinstance(found, str) == is_refused(family, label)
    if isinstance(found, str):
        assert found.isprintable()  # one line
        assert len(found) > 20
        return
    assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}


def test_every_attention_and_every_model_is_in_the_cross():
    named = {name for label in ATTENTIONS for name in label.split()[0].split(",")}
    assert named == set(ON_CPU)
    exported = {name for name in tfx_jax.models.__all__ if name.endswith("Config")} - {"ClipConfig", "WhisperConfig"}
    assert {type(family.config).__name__ for family in (FAMILIES | OTHERS).values()} == exported
    with_attention = {name for name in exported if isinstance(getattr(tfx_jax.models, name)(), SelfAttentionConfig)}
    assert {type(family.config).__name__ for family in FAMILIES.values()} == with_attention


def main(wanted):
    counts = collections.Counter()
    for family, label in CASES:
        if wanted and not any(word in f"{family}/{label}" for word in wanted):
            continue
        try:
            found = situations(family, label)
        except Exception as error:  # figures of all, whatever one of them does
            found = {f"{type(error).__name__}: {str(error)[:150]}": np.inf}
        if isinstance(found, str):
            counts["refused"] += 1
            print(f"{family} / {label}: refused: {found}")
            continue
        wrong = {name: round(value, 4) for name, value in found.items() if not value < TOLERANCE}
        refused = sum(value == REFUSED for value in found.values())
        counts += collections.Counter(
            runs=len(found), equal=len(found) - len(wrong) - refused, wrong=len(wrong), refused=refused
        )
        print(f"{family} / {label}: {len(found)} runs" + (f", WRONG {wrong}" if wrong else ""), flush=True)
        jax.clear_caches()
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
