"""Greedy and beam search of encoder-decoders against `generate` of transformers, on random weights in float32."""

import functools

import numpy as np
import pytest
from flax import nnx

from tests.nn.programs import jitted, started
from tfx_jax.functional import beam_search, greedy_search
from tfx_jax.generation.decoding import BeamSearch, DecodeDriver, Greedy
from tfx_jax.models import hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, S, V, L = 12, 9, 29, 24


def make_t5(name="T5", **overrides):
    sizes = {"num_layers": 2, "num_decoder_layers": 1, "d_model": 16, "d_kv": 5, "d_ff": 24, "num_heads": 3}
    config = getattr(transformers, f"{name}Config")(vocab_size=V, **sizes, decoder_start_token_id=0, **overrides)
    net = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    if name == "T5" and not net.config.scale_decoder_outputs:
        net.lm_head.weight = torch.nn.Parameter(torch.randn(V, 16))
    return net


def make_marian():
    both = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    config = transformers.MarianConfig(
        vocab_size=V,
        d_model=16,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()},
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=V - 1,
        decoder_start_token_id=V - 1,
        eos_token_id=0,
        forced_eos_token_id=None,
        max_position_embeddings=40,
    )
    return transformers.MarianMTModel(config)


def make_bart(name, pad_id=V - 1, start_id=V - 1, **options):
    """A relative of Marian."""
    both = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V,
        d_model=16,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()},
        pad_token_id=pad_id,
        decoder_start_token_id=start_id,
        eos_token_id=0,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
        max_position_embeddings=40,
        **options,
    )
    cls = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    return getattr(transformers, cls)(config)


_TWO = {"decoder_vocab_size": V, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
MAKERS = {
    "t5": make_t5,
    "t5-v1_1": functools.partial(make_t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": functools.partial(make_t5, "MT5"),
    "umt5": functools.partial(make_t5, "UMT5"),
    "longt5": functools.partial(
        make_t5, "LongT5", encoder_attention_type="transient-global", local_radius=3, global_block_size=4
    ),
    "marian": make_marian,
    "marian with two vocabularies": functools.partial(make_bart, "Marian", **_TWO),
    "bart": functools.partial(make_bart, "Bart"),
    "mbart": functools.partial(make_bart, "MBart", scale_embedding=True),
    "pegasus": functools.partial(make_bart, "Pegasus"),
    "m2m_100": functools.partial(make_bart, "M2M100", pad_id=1, start_id=2, encoder_layerdrop=0, decoder_layerdrop=0),
}


def train_a_little(net, source, pad_id, start_id, eos_id, num_steps):
    """Until some sentences end early and some late: untrained, a net says one thing for ever."""
    rng = np.random.default_rng(1)
    target = rng.integers(2, V - 1, (B, 12))
    ends = rng.integers(1, 12, (B, 1))
    target = np.where(np.arange(12) == ends, eos_id, np.where(np.arange(12) > ends, pad_id, target))
    inputs = np.concatenate([np.full((B, 1), start_id), target[:, :-1]], axis=1)
    source, target, inputs = (torch.tensor(array) for array in (source, target, inputs))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(num_steps):
        mask = (source != pad_id).long()
        logits = net(input_ids=source, attention_mask=mask, decoder_input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=pad_id)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module", params=list(MAKERS))
def net_model_source(request, tmp_path_factory):
    """A net of theirs, ours of the same weights, and sources of several lengths."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    net, rng = MAKERS[request.param]().eval(), np.random.default_rng(0)
    ids = [getattr(net.config, f"{name}_token_id") for name in ("pad", "decoder_start", "eos")]
    source = rng.integers(2, V - 1, (B, S))
    source[np.arange(S) >= rng.integers(3, S + 1, (B, 1))] = ids[0]
    train_a_little(net, source, *ids, num_steps=60)
    folder = tmp_path_factory.mktemp(request.param)
    net.save_pretrained(folder)
    return net, hf.load(folder), source


def generate(net, model, source, **options):
    """What transformers finds, PAD where it stopped, and the scores if there are any."""
    found = net.generate(
        torch.tensor(source),
        attention_mask=torch.tensor(source != model.config.pad_id).long(),
        max_new_tokens=L,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        suppress_tokens=[model.config.pad_id],
        renormalize_logits=True,
        **options,
    )
    tokens = found.sequences.numpy()[:, 1:]
    tokens = np.pad(tokens, ((0, 0), (0, L - tokens.shape[1])), constant_values=model.config.pad_id)
    # Where PAD is 0, their beam search fills rows with EOS.
    has_ended = np.cumsum(tokens == model.config.eos_id, axis=1) - (tokens == model.config.eos_id) > 0
    tokens[has_ended] = model.config.pad_id
    return tokens, found.get("sequences_scores")


def search(model, source, search_fn, num_beams=1, **options):
    c = model.config

    @jitted
    def run(model, source):
        step_fn, cache, start = started(model.decoder(), source, max_length=L, num_beams=num_beams)
        return search_fn(step_fn, cache, start, max_length=L, eos_id=c.eos_id, pad_id=c.pad_id, **options)

    return run(model, source)


def lengths(tokens, model):
    return (tokens != model.config.pad_id).sum(axis=-1)


def test_greedy_search_is_theirs(net_model_source):
    net, model, source = net_model_source
    want, _ = generate(net, model, source)
    got, _ = search(model, source, greedy_search)
    np.testing.assert_array_equal(got[:, :-1], want[:, :-1])
    has_ended = (want == model.config.eos_id).any(axis=1)  # at the limit theirs ends anyhow, ours with EOS
    np.testing.assert_array_equal(got[has_ended, -1], want[has_ended, -1])
    assert len(set(lengths(want, model)[has_ended])) > 3


@pytest.mark.parametrize(("num_beams", "power"), [(4, 0.0), (2, 0.7), (4, 1.0)])
def test_beam_search_is_theirs_that_never_stops_early(net_model_source, num_beams, power):
    net, model, source = net_model_source
    options = {"num_beams": num_beams, "num_return_sequences": num_beams}
    want, scores = generate(net, model, source, **options, length_penalty=power, early_stopping="never")
    penalty = {"length_penalty_fn": lambda length: length**power} if power else {"length_penalty": 0.0}
    found = search(model, source, beam_search, num_beams, beam_size=num_beams, **penalty)
    want, scores = want.reshape(found.tokens.shape), scores.numpy().reshape(found.scores.shape)
    # At the limit theirs ends anyhow, which makes another search of it.
    have_ended = (want == model.config.eos_id).any(axis=2).all(axis=1)
    np.testing.assert_array_equal(found.tokens[have_ended], want[have_ended])
    # Near 0, a sum of differences of float32 logits is rounded by an epsilon each, and not in proportion to itself.
    rounding = L * np.finfo(np.float32).eps
    np.testing.assert_allclose(found.scores[have_ended], scores[have_ended], rtol=1e-4, atol=rounding)
    assert have_ended.sum() >= B / 2
    assert len(set(lengths(want, model)[have_ended].ravel())) > 3


FIRST = 5


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_first_token_is_forced_as_theirs(net_model_source, tmp_path, num_beams):
    """The target language of mBART, NLLB and M2M-100; our searches read it from generation_config.json."""
    net, model, source = net_model_source
    options = {"num_beams": num_beams, "length_penalty": 0.0, "early_stopping": "never"} if num_beams > 1 else {}
    want, _ = generate(net, model, source, forced_bos_token_id=FIRST, **options)
    (tmp_path / "config.json").write_text('{"forced_bos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text(f'{{"forced_bos_token_id": {FIRST}}}')
    search = BeamSearch(num_beams, 0.0) if num_beams > 1 else Greedy()
    driver = DecodeDriver(nnx.split(model)[0], search, eos_ids=[model.config.eos_id], first_ids=hf.first_ids(tmp_path))
    rows = [row[row != model.config.pad_id].tolist() for row in source]
    found = driver(driver.decoder(nnx.split(model)[1]), rows, max_new_tokens=lambda _: L)
    have_ended = (want == model.config.eos_id).any(axis=1)
    for row in np.flatnonzero(have_ended):
        assert found[row] == want[row, : lengths(want, model)[row]].tolist()
    assert (want[:, 0] == FIRST).all()
    assert have_ended.sum() >= B / 2
