"""Invalid ids: an id outside its table gives NaN in its own row, in every model, and never a silent answer."""

import jax
import numpy as np
import pytest

from tests.models import test_padding_independence as padding
from tests.nn.programs import started
from tfx_jax.errors import UserError
from tfx_jax.generation.text import Generator
from tfx_jax.models.elmo import NUM_CHARACTERS
from tfx_jax.tasks.loss import is_first_choice

V = padding.V
VALID = np.random.default_rng(0).integers(3, V, (3, 6)).astype(np.int32)
PLACE = 2
ATTENTION = {"longformer": "window", "transformer_xl": "relative"}
WITHOUT_IDS = ("san_ctc", "conformer", "vit", "patch_pooling")
FAMILIES = [family for family in (padding.FAMILIES | padding.OTHERS) if family not in WITHOUT_IDS]
GENERATING = [
    family
    for family in FAMILIES
    if (padding.FAMILIES | padding.OTHERS)[family].reader
    in (padding.language_model, padding.segment_recurrence, padding.encoder_decoder)
]
QUICK = {"gpt", "bert", "transformer", "elmo", "seq2vec additive", "decomposable", "reformer", "transformer_xl"}
CASES = [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]


def made(family):
    return padding.make(family, ATTENTION.get(family, "dense") if family in padding.FAMILIES else "")


def spoil(ids, size):
    """The second row gets an id before the table, the third one behind it."""
    ids = ids.copy()
    ids[1, PLACE], ids[2, PLACE] = -1, size
    return ids


def check(run, valid, invalid, *, at=None):
    """`run(*valid)` is finite everywhere, `run(*invalid)` in the first row alone; `at` are the places of NaN."""
    want, found = (np.asarray(run(*arrays)) for arrays in (valid, invalid))
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(found[0], want[0])
    spoiled = found[1:] if at is None else found[1:, at]
    assert np.isnan(spoiled).all(axis=-1).all()


def inputs_of(reader, model):
    """Valid inputs, and for each of them that are ids, how many there are and where NaN has to be."""
    both = (VALID, VALID[:, ::-1].copy())
    if reader in (padding.language_model, padding.tokens_with_mask, padding.segment_recurrence):
        return (VALID,), [(V, PLACE)]
    if reader is padding.encoder_decoder:
        return both, [(V, None), (V, PLACE + 1)]
    if reader is padding.pooled_tokens:
        return (VALID,), [(V, None)]
    if reader in (padding.pooled_pairs, padding.pairs_of_one_length):
        return both, [(V, None), (V, None)]
    if reader is padding.words:
        characters = np.random.default_rng(1).integers(1, 250, (3, 6, 6)).astype(np.int32)
        return (characters,), [(NUM_CHARACTERS + 1, PLACE)]
    if reader is padding.captions:
        images = np.random.default_rng(2).integers(0, 256, (3, 12, 12, 3)).astype(np.int32)
        return (images, VALID), [None, (V, PLACE + 1)]
    assert reader is padding.events
    numbers = np.random.default_rng(3).random((2, 3, 6)).astype(np.float32)
    return (VALID % 5, *numbers, np.ones((3, 6), bool)), [(5, None)]


@pytest.mark.parametrize("family", CASES)
def test_ids_outside_the_table_are_nan(family):
    model, reader = made(family), (padding.FAMILIES | padding.OTHERS)[family].reader

    def output(result):
        result = result[0] if reader is padding.segment_recurrence else getattr(result, "sequence", result)
        return result.swapaxes(0, 1).swapaxes(1, 2) if result.ndim == 5 else result  # an ELMo has layers first

    run = jax.jit(lambda *arrays: output(model(*arrays)))
    valid, ids = inputs_of(reader, model)
    for index, size_and_place in enumerate(ids):
        if size_and_place is not None:
            size, at = size_and_place
            invalid = [*valid[:index], spoil(valid[index], size), *valid[index + 1 :]]
            check(run, valid, invalid, at=at)


@pytest.mark.parametrize("family", CASES)
def test_tokens_that_are_not_integers_are_refused_with_a_line(family):
    model, reader = made(family), (padding.FAMILIES | padding.OTHERS)[family].reader
    if reader in (padding.words, padding.captions, padding.events):
        pytest.skip("reads no tokens alone")
    inputs, _ = inputs_of(reader, model)
    with pytest.raises(ValueError, match=r"must be an array of token ids \[B, T\], got dtype float32$"):
        model(*(ids.astype(np.float32) for ids in inputs))


@pytest.mark.parametrize("family", CASES)
def test_a_sequence_without_a_batch_is_refused_with_a_line(family):
    """Users forget the axis; a list is what a tokenizer returns."""
    model, reader = made(family), (padding.FAMILIES | padding.OTHERS)[family].reader
    if reader in (padding.words, padding.captions, padding.events):
        pytest.skip("reads no tokens alone")
    inputs, _ = inputs_of(reader, model)
    with pytest.raises(
        ValueError, match=r"must be an array of token ids \[B, T\], got shape \(6,\): for a single sequence pass"
    ):
        jax.eval_shape(model, *(ids[0] for ids in inputs))
    with pytest.raises(ValueError, match=r"must be an array of token ids \[B, T\], got a list$"):
        model(*(ids.tolist() for ids in inputs))


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("gpt", "transformer") else pytest.mark.slow) for f in GENERATING]
)
def test_a_step_and_a_prompt_of_an_invalid_id_are_nan_in_their_row(family):
    model = made(family)

    @jax.jit
    def step(inputs, tokens):
        step_fn, cache, _ = started(model.decoder(), inputs, max_length=3)
        return step_fn(tokens, cache)[0]

    tokens = np.array([4, -1, V], np.int32)
    check(step, (VALID, np.array([4, 4, 4], np.int32)), (VALID, tokens))
    check(step, (VALID, np.array([4, 4, 4], np.int32)), (spoil(VALID, V), np.array([4, 4, 4], np.int32)))


@pytest.mark.parametrize("family", ["gpt", pytest.param("reformer", marks=pytest.mark.slow), "bert"])
def test_positions_and_token_types_outside_their_tables_are_nan(family):
    model = made(family)
    name = "token_type_ids" if family == "bert" else "positions"
    run = jax.jit(lambda tokens, positions: getattr(result := model(tokens, positions=positions), "sequence", result))
    positions = np.tile(np.arange(6, dtype=np.int32), (3, 1))
    check(run, (VALID, positions), (VALID, spoil(positions, model.config.max_length)), at=PLACE)
    if name == "token_type_ids":
        types = jax.jit(lambda tokens, types: model(tokens, types).sequence)
        check(types, (VALID, VALID % 2), (VALID, spoil(VALID % 2, 2)), at=PLACE)


@pytest.mark.parametrize("family", ["gpt", "bert", pytest.param("reformer", marks=pytest.mark.slow)])
def test_any_id_may_stand_where_a_mask_says_that_there_is_no_token(family):
    model = made(family)

    @jax.jit
    def run(tokens, positions, mask):
        result = model(tokens, positions=positions, token_mask=mask)
        return getattr(result, "sequence", result)

    mask, positions = np.ones((3, 6), bool), np.tile(np.arange(6, dtype=np.int32), (3, 1))
    mask[1:, PLACE] = False
    want = np.asarray(run(VALID, positions, mask))
    found = np.asarray(run(spoil(VALID, V), spoil(positions, model.config.max_length), mask))
    np.testing.assert_array_equal(found[mask], want[mask])


def test_a_prompt_of_an_invalid_id_is_refused_with_a_line():
    generate = Generator(made("gpt"), max_new_tokens=2)
    for token in (-1, V):
        with pytest.raises(UserError, match=rf"^prompt 2 has the token id {token}; use ids in 0 \.\. {V - 1}$"):
            generate([[3, 4], [5, token]])


@pytest.mark.parametrize(
    ("family", "name"), [("t5", "pad_id"), ("seq2seq bahdanau", "start_id"), ("transformer", "pad_id")]
)
def test_special_tokens_outside_the_vocabulary_are_refused_with_a_line(family, name):
    for value in (-1, V):
        entry = (padding.FAMILIES | padding.OTHERS)[family]
        changed = padding.dataclasses.replace(entry.config, **{name: value})
        with pytest.raises(ValueError, match=rf"{name}={value} must be|{name} must be at least 0, got {value}$"):
            entry.model(changed, rngs=padding.nnx.Rngs(0))


def test_a_target_outside_the_classes_is_no_first_choice():
    logits = np.zeros((2, 4), np.float32)
    assert jax.jit(is_first_choice)(logits, np.array([-1, 4])).tolist() == [False, False]
