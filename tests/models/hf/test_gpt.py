"""GPT and GPT-2 against transformers, with random weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.hf.folders import loaded_by_them, padded_on, redrawn
from tests.nn.programs import initial, jitted, started
from tfx_jax.functional import beam_search, greedy_search
from tfx_jax.models import GPT, GPTConfig, hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, T, V = 3, 11, 97
TOKENS = np.random.default_rng(0).integers(1, V, (B, T))
SIZES = {"vocab_size": V, "n_positions": 40, "n_embd": 32, "n_layer": 3, "n_head": 4, "attn_implementation": "eager"}
SPECIALS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["gpt2", "gpt2-wide", "gpt"])
def theirs(request):
    torch.manual_seed(0)
    if request.param == "gpt":
        model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**SIZES, **SPECIALS))
    else:
        options = {"n_inner": 50, "activation_function": "relu"} if request.param == "gpt2-wide" else {}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **SPECIALS, **options))
    return redrawn(model)


def logits_of(model, tokens=TOKENS, **options):
    with torch.no_grad():
        return model(
            torch.tensor(tokens), **{name: torch.tensor(value) for name, value in options.items()}
        ).logits.numpy()


def test_logits_and_maps(theirs, ours):
    logits, maps = jitted(lambda model: model(TOKENS, return_attention=True))(ours)
    want = logits_of(theirs)
    assert np.abs(want).max() > 2
    np.testing.assert_allclose(logits, want, atol=1e-4)
    with torch.no_grad():
        attentions = theirs(torch.tensor(TOKENS), output_attentions=True).attentions
    for index, weights in enumerate(attentions):
        np.testing.assert_allclose(maps[f"decoder/{index}/self"], weights.numpy(), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(theirs, ours, side):
    token_mask, positions = padded_on(side, (B, T))
    want = logits_of(theirs, attention_mask=token_mask.astype(int), position_ids=positions)
    np.testing.assert_allclose(_padded(ours, token_mask)[token_mask], want[token_mask], atol=1e-4)


_padded = jitted(lambda model, token_mask: model(TOKENS, token_mask=token_mask))


def test_what_we_save_they_load(theirs, ours, tmp_path):
    again = loaded_by_them(type(theirs), ours, tmp_path)
    np.testing.assert_array_equal(logits_of(again), logits_of(theirs))


def test_without_offsets_they_load_it_too(tmp_path):
    config = GPTConfig(V, 40, num_layers=3, d_model=32, num_heads=4, use_bias=False)
    model = initial(lambda: GPT(config, rngs=nnx.Rngs(0)))
    hf.save(model, tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    np.testing.assert_allclose(jitted(lambda model: model(TOKENS))(model), logits_of(again.eval()), atol=1e-4)


@pytest.mark.parametrize("is_left", [True, False])
def test_greedy_generation(theirs, ours, is_left):
    """Of prompts of three lengths; transformers wants them padded on the left, we take either."""
    if type(theirs).__name__.startswith("OpenAI"):
        pytest.skip("transformers' GPT has no cache and no position_ids in its generation: padding would shift it")
    lengths = np.array([6, 1, 3])
    left = np.arange(6)[None] >= 6 - lengths[:, None]
    prompts = np.where(left, TOKENS[:, :6], 0)
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor(prompts), attention_mask=torch.tensor(left).long(), max_new_tokens=20, do_sample=False
        )[:, 6:].numpy()
    token_mask = left if is_left else np.arange(6)[None] < lengths[:, None]
    if not is_left:
        prompts = np.stack([np.roll(row, length - 6) for row, length in zip(prompts, lengths, strict=True)])

    @jitted
    def search(model):
        step_fn, cache, start = started(model.decoder(), prompts, token_mask, max_length=21)
        # One token more, as the last that is allowed is always the end. transformers may choose its padding.
        return greedy_search(step_fn, cache, start, max_length=21, eos_id=1, pad_id=-1)[0]

    found_here = search(ours)
    got = np.where(found_here < 0, 0, found_here)
    np.testing.assert_array_equal(got[:, : found.shape[1]], found)
    assert len(np.unique(got)) > 5


def test_beam_generation(theirs, ours):
    if type(theirs).__name__.startswith("OpenAI"):
        pytest.skip("as above")
    prompts = TOKENS[:, :4]
    with torch.no_grad():
        found = theirs.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(B, 4, dtype=torch.long),
            max_new_tokens=8,
            num_beams=3,
            do_sample=False,
            length_penalty=0.0,
            eos_token_id=None,
        )[:, 4:].numpy()

    @jitted
    def search(model):
        step_fn, cache, start = started(model.decoder(), prompts, max_length=9, num_beams=3)

        def endless(tokens, cache):
            """A token more, V, is the end, which comes at the ninth step: all beams are eight tokens long."""
            logits, cache = step_fn(tokens, cache)
            is_last = cache["position"] == 4 + 9
            logits = jnp.where(is_last, -jnp.inf, logits)
            end = jnp.where(is_last, 0.0, -jnp.inf)
            return jnp.pad(logits, ((0, 0), (0, 1)), constant_values=end), cache

        return beam_search(endless, cache, start, beam_size=3, max_length=9, eos_id=V, pad_id=-1, length_penalty=0.0)

    tokens = search(ours).tokens[:, 0]
    np.testing.assert_array_equal(tokens[:, :8], found)
