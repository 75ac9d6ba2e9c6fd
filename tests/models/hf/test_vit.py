"""The Vision Transformer against transformers, with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tfx_jax.models import hf
from tfx_jax.models.hf.names import write_params
from tfx_jax.models.vit import interpolate_positions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 50,
    "image_size": 20,
    "patch_size": 5,
    "num_channels": 2,
    "num_labels": 7,
    "attn_implementation": "eager",
}
OUTPUTS = {"ViTModel": ("last_hidden_state", "pooler_output"), "ViTForImageClassification": ("logits",)}


@pytest.fixture(scope="module", params=OUTPUTS)
def theirs(request):
    torch.manual_seed(0)
    model = getattr(transformers, request.param)(transformers.ViTConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return hf.load(folder)


def images_of(height, width):
    return np.random.default_rng(0).normal(size=(3, height, width, 2)).astype(np.float32)


def run_theirs(model, images, **options):
    output = model(torch.tensor(images).permute(0, 3, 1, 2), **options)
    return [output[name] for name in OUTPUTS[type(model).__name__]], output.get("attentions")


@pytest.mark.parametrize("size", [(20, 20), (35, 35), (10, 10), (35, 10), (80, 5), (10, 40)])
def test_outputs_and_maps(theirs, ours, size):
    """Also of images of other sizes, (10, 40) and (80, 5) among them with as many patches as the model has."""
    images, interpolate = images_of(*size), size != (20, 20)
    want, attentions = run_theirs(theirs, images, interpolate_pos_encoding=interpolate, output_attentions=True)
    got, maps = jax.jit(lambda model: model(jnp.asarray(images), interpolate=interpolate, return_attention=True))(ours)
    for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
        assert ours_.std() > 0.1
        np.testing.assert_allclose(ours_, theirs_.detach(), atol=1e-4)
    assert len(maps) == len(attentions) == 3
    for index, weights in enumerate(attentions):
        np.testing.assert_allclose(maps[f"encoder/{index}/self"], weights.detach(), atol=1e-5)


def test_interpolation_is_torchs():
    rng = np.random.default_rng(0)
    for _ in range(40):
        old, new = (tuple(int(n) for n in rng.integers(1, 17, 2)) for _ in range(2))
        table = rng.normal(size=(1 + old[0] * old[1], 3)).astype(np.float32)
        grid = torch.tensor(table[1:]).reshape(1, *old, 3).permute(0, 3, 1, 2)
        for method in ("bicubic", "bilinear"):
            want = torch.nn.functional.interpolate(grid, size=new, mode=method, align_corners=False)
            got = interpolate_positions(jnp.asarray(table), old, new, method=method)
            np.testing.assert_array_equal(got[0], table[0])
            np.testing.assert_allclose(got[1:].reshape(*new, 3), want[0].permute(1, 2, 0), atol=1e-5)


def test_gradients(theirs, ours, folder):
    """Of a random sum of all outputs, for every parameter, by the names of the folder."""
    images = images_of(15, 25)
    want, _ = run_theirs(theirs, images, interpolate_pos_encoding=True)
    weights = [np.random.default_rng(1).normal(size=tuple(x.shape)).astype(np.float32) for x in want]
    theirs.zero_grad()
    sum((x * torch.tensor(w)).sum() for x, w in zip(want, weights, strict=True)).backward()
    graphdef, params = nnx.split(ours)

    @jax.jit
    @jax.grad
    def grad(params):
        output = nnx.merge(graphdef, params)(jnp.asarray(images), interpolate=True)
        return sum((x * w).sum() for x, w in zip(jax.tree.leaves(output), weights, strict=True))

    flat = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(grad(params))}
    got = write_params(hf.FAMILIES[type(theirs).__name__].rows(ours.config), flat)
    # transformers saves under other names than its modules have, so it saves the gradients too.
    with torch.no_grad():
        again = type(theirs)(theirs.config)
        for parameter, other in zip(again.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(other.grad)
    again.save_pretrained(folder / "gradients")
    expected = safetensors.numpy.load_file(folder / "gradients" / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, value in got.items():
        scale = 1 + np.abs(expected[name]).max()
        np.testing.assert_allclose(value / scale, expected[name] / scale, atol=1e-4, err_msg=name)


def test_what_we_save_they_load(theirs, ours, tmp_path):
    hf.save(ours, tmp_path)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    images = images_of(20, 20)
    for got, want in zip(run_theirs(again.eval(), images)[0], run_theirs(theirs, images)[0], strict=True):
        np.testing.assert_array_equal(got.detach(), want.detach())


def test_their_config_comes_back(theirs, ours, tmp_path):
    hf.save(ours, tmp_path)
    want, got = theirs.config.to_dict(), transformers.ViTConfig.from_pretrained(tmp_path).to_dict()
    silent = {"_name_or_path", "transformers_version", "dtype", "architectures"}
    if type(theirs).__name__ == "ViTModel":
        silent |= {"id2label", "label2id"}
    assert {k: v for k, v in got.items() if k not in silent} == {k: v for k, v in want.items() if k not in silent}
