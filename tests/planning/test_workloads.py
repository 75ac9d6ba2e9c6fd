"""What `tfx-jax bench` measures is what it says: the trainer's step, a search of a forced length, every attention."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.attentions import KINDS
from tests.flops import encoder_decoder, search
from tests.nn.programs import started
from tests.tiers import slow_but
from tfx_jax.errors import UserError
from tfx_jax.functional import beam_search
from tfx_jax.generation.decoding import BeamSearch, decode
from tfx_jax.models.transformer import EOS_ID, PAD_ID, Transformer, TransformerConfig
from tfx_jax.planning import workloads
from tfx_jax.planning.attentions import ATTENTIONS
from tfx_jax.planning.workloads import (
    MODELS,
    ForcedLength,
    attention_program,
    attention_workload,
    decoding_workload,
    training_workload,
)

TOY = TransformerConfig(vocab_size=40, num_layers=1, d_model=16, num_heads=2, d_ff=24, dropout_rate=0.0)
TAKES_ANOTHER_DEVICE = {"cudnn", "splash", "flash"}


def test_models_are_the_published_ones():
    tiny, base, big = (make() for make in MODELS.values())
    assert (tiny.d_model, tiny.d_ff, tiny.num_heads, tiny.num_layers, tiny.dropout_rate) == (128, 256, 4, 4, 0.3)
    assert (base.d_model, base.d_ff, base.num_heads, base.num_layers, base.dropout_rate) == (512, 2048, 8, 6, 0.1)
    assert (big.d_model, big.d_ff, big.num_heads, big.num_layers, big.dropout_rate) == (1024, 4096, 16, 6, 0.3)
    assert [config.vocab_size for config in (tiny, base, big)] == [10_000, 37_000, 37_000]
    assert MODELS["tiny"](dtype="bfloat16").dtype == MODELS["big"](dtype="bfloat16").dtype == "bfloat16"


def test_training_steps_with_every_run_and_compiles_once(monkeypatch):
    programs, batches = [], []

    def remember(keep, function):
        def remembering(*arguments):
            keep.append(function(*arguments))
            return keep[-1]

        return remembering

    monkeypatch.setattr(workloads, "make_train_setup", remember(programs, workloads.make_train_setup))
    monkeypatch.setattr(workloads, "shard_batch", remember(batches, workloads.shard_batch))
    workload = training_workload(TOY, batch=8, length=5)
    workload.run()
    workload.run()
    ((program,), (batch,)) = programs, batches
    assert program.step_fn._cache_size() == 1
    assert {side: (rows.shape, rows.dtype.name) for side, rows in batch.items()} == {
        side: ((8, 5), "int32") for side in ("source", "target")
    }
    for rows in batch.values():
        assert np.min(rows) > EOS_ID
        assert np.max(rows) < TOY.vocab_size
        assert len(rows.addressable_shards) == workload.num_devices == jax.device_count()
    assert workload.target_tokens == 40
    assert workload.flops == encoder_decoder(TOY, 8, 5, 5)
    assert min(workload.trace_seconds, workload.compile_seconds, workload.first_seconds) > 0
    num_params = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.params))
    assert 3 * 4 * num_params < workload.program_bytes  # parameters and Adam's moments are in place, donated


def test_training_tells_what_devices_cannot_share():
    with pytest.raises(UserError, match=r"^batch=12 must be a multiple of the 8 devices$"):
        training_workload(TOY, batch=12, length=5)


@pytest.fixture(scope="module")
def eager_to_end(draw_model):
    """Parameters of a model that is nearly sure that a sentence ends at once."""
    params = nnx.to_pure_dict(nnx.state(draw_model(lambda: Transformer(TOY, rngs=nnx.Rngs(0)))))
    table = np.array(params["embedding"]["table"])
    table[EOS_ID] *= 50.0
    return params | {"embedding": {"table": table}}


@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)]
)
def test_every_hypothesis_has_the_forced_length(eager_to_end, length):
    """A model that would like to end some of its sentences at once; the best of each and the rest of the beam."""
    source = np.random.default_rng(0).integers(3, 40, (16, 6), np.int32)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(TOY, rngs=nnx.Rngs(0))))
    options = {"search": BeamSearch(4), "eos_ids": (EOS_ID,), "max_length": length}

    @jax.jit
    def search_thrice(params, source):
        plain = nnx.merge(graphdef, params).decoder()
        forced = ForcedLength(plain)
        step_fn, cache, start = started(forced, source, max_length=length, num_beams=4)
        beams = beam_search(step_fn, cache, start, max_length=length, eos_id=EOS_ID)
        best, free = (decode(decoder, source, source >= 0, **options) for decoder in (forced, plain))
        return beams, best, free

    found, best, free = search_thrice(eager_to_end, source)
    assert best.shape == (16, length)
    np.testing.assert_array_equal(found.tokens[:, 0], np.where(best < 0, PAD_ID, best))
    exists = np.isfinite(found.scores)
    assert exists.sum(axis=1).tolist() == [4 if length > 1 else 1] * 16
    tokens = np.asarray(found.tokens)[exists]
    assert (tokens[:, -1] == EOS_ID).all()
    assert not np.isin(tokens[:, :-1], (PAD_ID, EOS_ID)).any()
    if length > 1:
        assert ((np.asarray(free) >= 0).sum(axis=1) < length).any()


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_search_never_stops_early(monkeypatch, int8):
    """Counted in the program itself: the loop of the search takes as many steps as a hypothesis has tokens."""
    steps = []
    step = ForcedLength.step

    def counted(self, tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return step(self, tokens, cache)

    monkeypatch.setattr(ForcedLength, "step", counted)
    workload = decoding_workload(TOY, batch=2, beam_size=3, source_length=4, length=7, int8=int8)
    jax.effects_barrier()
    assert len(steps) == 7
    workload.run()
    jax.effects_barrier()
    assert len(steps) == 14
    assert workload.target_tokens == 14
    assert workload.flops == search(TOY, 2, 3, 4, 7)


@pytest.mark.compiles(24, "what an attention is bound to, such as random features, is drawn outside of the program")
@pytest.mark.parametrize("with_gradient", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(ATTENTIONS, *KINDS))
def test_every_attention_runs_or_says_why_not(name, with_gradient):
    if name in TAKES_ANOTHER_DEVICE:
        with pytest.raises(
            UserError, match=rf"^{name}: implementation='{name}' needs (a TPU, got platform 'cpu'|float16)"
        ):
            attention_workload(name, length=64, with_gradient=with_gradient)
        return
    workload = attention_workload(name, length=64, num_heads=2, head_size=16, batch=3, with_gradient=with_gradient)
    workload.run()
    assert workload.target_tokens == 3 * 64
    assert (workload.flops is None) == (name not in ("dense", "xla", "chunked"))


@pytest.mark.parametrize("name", [name for name, chosen in ATTENTIONS.items() if chosen.is_exact])
def test_exact_attentions_are(name):
    if name in TAKES_ANOTHER_DEVICE:
        pytest.skip("needs an accelerator")
    q, k, v, gradient = np.random.default_rng(0).normal(size=(4, 2, 48, 2, 8)).astype(np.float32)
    found, expected = (
        attention_program(ATTENTIONS[which].make(48, 2, 8), is_causal=True, with_gradient=True)(q, k, v, gradient)
        for which in (name, "dense")
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_flops_of_attention_are_its_products():
    def flops(**options):
        return attention_workload("dense", length=10, batch=2, num_heads=3, head_size=4, **options).flops

    forward = 2 * 2 * 3 * 2 * 4 * 10 * 10  # two FLOPs, two products, batch, heads, head size, pairs: any order
    assert flops(with_gradient=False) == forward
    assert flops() == 3 * forward
    assert flops(with_gradient=False, is_causal=True) == forward * 55 // 100


def test_attention_tells_what_cannot_be():
    with pytest.raises(UserError, match=r"^unknown function 'lstm'; use one of dense, chunked, splash, "):
        attention_workload("lstm", length=8)
    with pytest.raises(UserError, match=r"^bigbird: .*causal"):
        attention_workload("bigbird", length=256, is_causal=True)
    with pytest.raises(
        UserError, match=r"^dense: the program needs [\d,.]+ GiB, but a device has [\d,.]+: make batch, length or model"
    ):
        attention_workload("dense", length=2**20, with_gradient=False)
