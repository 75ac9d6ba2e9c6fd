"""The Vision Transformer against transformers, with random weights."""

import jax
import numpy as np
import pytest
import safetensors.numpy

from tests.models.hf.folders import (
    assert_gradients_near,
    assert_their_config_comes_back,
    gradients_by_name,
    loaded_by_them,
    random_sum,
    redrawn,
)
from tests.nn.programs import jitted
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
DEIT = {"DeiTModel": ("last_hidden_state", "pooler_output"), "DeiTForImageClassification": ("logits",)}
DEIT |= {"DeiTForImageClassificationWithTeacher": ("logits",)}
OUTPUTS = DEIT | {"ViTModel": ("last_hidden_state", "pooler_output"), "ViTForImageClassification": ("logits",)}


@pytest.fixture(scope="module", params=OUTPUTS)
def theirs(request):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param.partition('T')[0]}TConfig")
    return redrawn(getattr(transformers, request.param)(config(**SIZES)))


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
    got, maps = jitted(lambda model: model(images, interpolate=interpolate, return_attention=True))(ours)
    for ours_, theirs_ in zip(jax.tree.leaves(got), want, strict=True):
        assert ours_.std() > 0.1
        np.testing.assert_allclose(ours_, theirs_.detach(), atol=1e-4)
    assert len(maps) == len(attentions) == 3
    for index, weights in enumerate(attentions):
        np.testing.assert_allclose(maps[f"encoder/{index}/self"], weights.detach(), atol=1e-5)


def test_interpolation_is_torchs():
    rng, tables, cases, expected = np.random.default_rng(0), [], [], []
    for _ in range(40):
        old, new = (tuple(int(n) for n in rng.integers(1, 17, 2)) for _ in range(2))
        table = rng.normal(size=(1 + old[0] * old[1], 3)).astype(np.float32)
        grid = torch.tensor(table[1:]).reshape(1, *old, 3).permute(0, 3, 1, 2)
        for method in ("bicubic", "bilinear"):
            resized = torch.nn.functional.interpolate(grid, size=new, mode=method, align_corners=False)
            expected.append((resized[0].permute(1, 2, 0).reshape(-1, 3), table[0]))
            tables.append(table)
            cases.append((old, new, method))

    @jitted
    def run(tables):
        pairs = zip(tables, cases, strict=True)
        return [interpolate_positions(table, old, new, method=method) for table, (old, new, method) in pairs]

    for got, (want, class_token) in zip(run(tables), expected, strict=True):
        np.testing.assert_array_equal(got[0], class_token)
        np.testing.assert_allclose(got[1:], want, atol=1e-5)


def test_gradients(theirs, ours, tmp_path):
    """Of a random sum of all outputs, for every parameter, by the names of the folder."""
    images = images_of(15, 25)
    total, weights = random_sum(run_theirs(theirs, images, interpolate_pos_encoding=True)[0])
    theirs.zero_grad()
    total.backward()

    def loss(model):
        outputs = jax.tree.leaves(model(images, interpolate=True))
        return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))

    # transformers saves under other names than its modules have, so it saves the gradients too.
    with torch.no_grad():
        again = type(theirs)(theirs.config)
        for parameter, other in zip(again.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(other.grad)
    again.save_pretrained(tmp_path / "theirs")
    expected = safetensors.numpy.load_file(tmp_path / "theirs" / "model.safetensors")
    assert_gradients_near(gradients_by_name(ours, loss, tmp_path / "ours"), expected)


def test_what_we_save_they_load(theirs, ours, tmp_path):
    again, images = loaded_by_them(type(theirs), ours, tmp_path), images_of(20, 20)
    for got, want in zip(run_theirs(again, images)[0], run_theirs(theirs, images)[0], strict=True):
        np.testing.assert_array_equal(got.detach(), want.detach())


def test_their_config_comes_back(theirs, ours, tmp_path):
    has_classes = not type(theirs).__name__.endswith("Model")
    assert_their_config_comes_back(theirs, ours, tmp_path, has_classes=has_classes)
