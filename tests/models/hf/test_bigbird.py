"""BigBird of Hugging Face: what transformers computes in evaluation, for short texts and long, and its folders."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.models.hf.folders import (
    LEFT_OUT,
    assert_gradients_near,
    assert_refused,
    assert_their_config_comes_back,
    change_config,
    gradients_by_name,
    random_sum,
    redrawn,
)
from tests.nn.programs import jitted
from tfx_jax.models import Bert, hf
from tfx_jax.nn import AttentionConfig, AttentionOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

B, V = 3, 97
SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "max_position_embeddings": 64,
    "type_vocab_size": 3,
    "block_size": 2,
    "num_random_blocks": 2,  # so that 18 tokens are dense
}
OUTPUTS = {
    "BigBirdModel": ("last_hidden_state", "pooler_output"),
    "BigBirdForMaskedLM": ("logits",),
    "BigBirdForPreTraining": ("prediction_logits", "seq_relationship_logits"),
    "BigBirdForTokenClassification": ("logits",),
}
LENGTHS = (11, 18, 19, 40)  # dense, dense, sparse with a last block of one token, sparse
RNG = np.random.default_rng(0)
TOKENS = {length: RNG.integers(1, V, (B, length)) for length in LENGTHS}
SEGMENTS = {length: RNG.integers(0, 3, (B, length)) for length in LENGTHS}


@pytest.fixture(scope="module", params=OUTPUTS)
def theirs(request):
    torch.manual_seed(0)
    options = {"num_labels": 5} if "Classification" in request.param else {}
    return redrawn(getattr(transformers, request.param)(transformers.BigBirdConfig(**SIZES, **options)))


def run_theirs(model, length, part=np.s_[:]):
    body = getattr(model, "bert", model)
    body.set_attention_type("block_sparse")  # a short text turned it off for good
    inputs = {"input_ids": TOKENS[length][part], "token_type_ids": SEGMENTS[length][part]}
    output = model(**{name: torch.tensor(array) for name, array in inputs.items()})
    return [output[name] for name in OUTPUTS[type(model).__name__]]


run = jitted(lambda model, *inputs, **options: model(*inputs, **options))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits(theirs, ours, length):
    want = run_theirs(theirs, length)
    for got, expected in zip(jax.tree.leaves(run(ours, TOKENS[length], SEGMENTS[length])), want, strict=True):
        assert got.std() > 0.1
        np.testing.assert_allclose(got, expected.detach(), atol=1e-4)


def test_the_first_block_counts_as_the_random_ones(theirs, ours):
    """Were it seen once only, nothing would be as in transformers: so the test above is not without success."""
    options = AttentionOptions(**ours.config.attention.options.given | {"first_block_times": 1})
    other = dataclasses.replace(ours.config, attention=AttentionConfig("bigbird", options))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: type(ours)(other, rngs=nnx.Rngs(0))))
    once = nnx.merge(graphdef, nnx.to_pure_dict(nnx.state(ours)))
    found, expected = (jax.tree.leaves(run(m, TOKENS[40], SEGMENTS[40]))[0] for m in (once, ours))
    assert np.abs(found - expected).max() > 1e-3


@pytest.mark.parametrize("length", [11, 40])
def test_padding_on_the_right(theirs, ours, length):
    """Each text is what transformers has for it alone; theirs changes with padding, which shifts the last block."""
    lengths = [length, length - 3, length // 2 + 1]
    got = run(ours, TOKENS[length], SEGMENTS[length], token_mask=np.arange(length) < np.array(lengths)[:, None])
    for row, size in enumerate(lengths):
        want = run_theirs(theirs, length, np.s_[row : row + 1, :size])
        for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
            found = ours_[row, :size] if ours_.shape[:2] == (B, length) else ours_[row]
            np.testing.assert_allclose(found, theirs_[0].detach(), atol=1e-4)


def test_gradients(theirs, ours, tmp_path):
    """Of a random sum of all outputs, for every parameter, by the names of the folder."""
    total, weights = random_sum(run_theirs(theirs, 40))
    theirs.zero_grad()
    total.backward()

    def loss(model):
        outputs = jax.tree.leaves(model(TOKENS[40], SEGMENTS[40]))
        return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))

    got, expected = gradients_by_name(ours, loss, tmp_path), dict(theirs.named_parameters())
    assert_gradients_near(got, {name: expected[name].grad.numpy() for name in got})


def test_what_we_save_they_load(theirs, ours, tmp_path):
    """But for a pooler that some of their models have and do not use."""
    hf.save(ours, tmp_path)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] <= {"bert.pooler.weight", "bert.pooler.bias"}
    assert not any(found for name, found in info.items() if name != "missing_keys")
    for got, want in zip(run_theirs(again.eval(), 40), run_theirs(theirs, 40), strict=True):
        np.testing.assert_array_equal(got.detach(), want.detach())
    names = set(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
    assert names <= {name for name, _ in theirs.named_parameters()}


def test_their_config_comes_back(theirs, ours, tmp_path):
    assert_their_config_comes_back(theirs, ours, tmp_path, has_classes="Classification" in type(theirs).__name__)


def test_a_body_is_taken_out_of_any_folder(theirs, their_folder):
    if type(theirs).__name__ != "BigBirdForPreTraining":
        pytest.skip("once is enough")
    body = hf.load(their_folder, architecture="BigBirdModel")
    assert type(body) is Bert
    want = theirs.bert(torch.tensor(TOKENS[40])).last_hidden_state.detach()
    np.testing.assert_allclose(run(body, TOKENS[40]).sequence, want, atol=1e-4)


def test_what_cannot_be_is_refused(tmp_path):
    transformers.BigBirdModel(transformers.BigBirdConfig(**SIZES)).save_pretrained(tmp_path)
    for values, message in (
        ({"rescale_embeddings": True}, "rescale_embeddings is True, but only False is supported"),
        ({"use_bias": False}, "use_bias is False, but only True is supported"),
        ({"attention_type": "flash"}, "attention_type is 'flash'"),
        ({"block_size": "2"}, "block_size is '2', not of type int"),
        ({"architectures": ["BigBirdForMultipleChoice"]}, r"\['BigBirdForMultipleChoice'\] is not supported"),
    ):
        change_config(tmp_path, **values)
        assert_refused(tmp_path, message)
        change_config(
            tmp_path, **dict.fromkeys(values, LEFT_OUT) | {"architectures": ["BigBirdModel"], "block_size": 2}
        )
    change_config(tmp_path, attention_type="original_full")
    model = hf.load(tmp_path)
    assert model.config.attention == AttentionConfig()
    hf.save(model, tmp_path / "again", fields=json.loads((tmp_path / "config.json").read_text()))
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (fields["architectures"], fields["attention_type"]) == (["BigBirdModel"], "original_full")
    again = transformers.BigBirdModel.from_pretrained(tmp_path / "again").eval()
    for got, want in zip(jax.tree.leaves(run(model, TOKENS[11], SEGMENTS[11])), run_theirs(again, 11), strict=True):
        np.testing.assert_allclose(got, want.detach(), atol=1e-4)


def test_another_pattern_is_not_written(their_folder, tmp_path):
    changed = hf.load(their_folder)
    changed.config.attention.options.num_random_blocks = 1
    with pytest.raises(
        ValueError, match="no Hugging Face architecture supports bigbird attention with block_size=2, num_glob"
    ):
        hf.save(changed, tmp_path)
