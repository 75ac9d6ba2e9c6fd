"""CLIP and SigLIP as Hugging Face folders, and against transformers with random weights."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.hf.folders import (
    LEFT_OUT,
    assert_comes_back,
    assert_refused,
    assert_same,
    change_config,
    loaded_by_them,
    redrawn,
)
from tests.nn.programs import draw, jitted, normal
from tfx_jax.models import Clip, ClipConfig, hf
from tfx_jax.models.clip import TextTower, TowerConfig

V, T, EOS = 50, 12, 49
TEXT = {"num_layers": 2, "d_model": 20, "num_heads": 2, "d_ff": 28}
IMAGE = {"num_layers": 3, "d_model": 24, "num_heads": 3, "d_ff": 40}
SIZES = {"vocab_size": V, "max_length": T, "eos_id": EOS, "image_size": 12, "patch_size": 4, "num_channels": 2}
OF_SIGLIP = {"activation": "gelu_tanh", "layer_norm_epsilon": 1e-6}
# Which class of theirs, and what differs.
KINDS = {
    "CLIPModel": {"d_output": 18, "text": TowerConfig(**TEXT), "image": TowerConfig(**IMAGE)},
    "CLIPModel of the highest id": {"d_output": 18, "eos_id": 2}
    | {"text": TowerConfig(**TEXT, activation="gelu"), "image": TowerConfig(**IMAGE)},
    "SiglipModel": {"is_siglip": True, "d_output": 24}
    | {"text": TowerConfig(**TEXT, **OF_SIGLIP), "image": TowerConfig(**IMAGE, **OF_SIGLIP)},
}

# Towers alone: the outputs of transformers that are the sequence and the pooled vectors, and what differs.
_TOWERS = {
    "CLIPTextModel": ("last_hidden_state", "pooler_output", {"d_output": None}),
    "CLIPTextModelWithProjection": ("last_hidden_state", "text_embeds", {"d_output": 18}),
    "CLIPVisionModel": ("last_hidden_state", "pooler_output", {"d_output": None}),
    "CLIPVisionModelWithProjection": ("last_hidden_state", "image_embeds", {"d_output": 18}),
    "SiglipTextModel": ("last_hidden_state", "pooler_output", {"is_siglip": True, "d_output": 18}),
    "SiglipVisionModel": ("last_hidden_state", "pooler_output", {"is_siglip": True, "d_output": None}),
}


def make_tower(kind):
    """A tower with the sizes of its half, and default values for the other half."""
    cls, options = hf.FAMILIES[kind].model, _TOWERS[kind][2]
    different = OF_SIGLIP if kind.startswith("Siglip") else {}
    names = ("vocab_size", "max_length", "eos_id") if cls is TextTower else ("image_size", "patch_size", "num_channels")
    sizes = {name: SIZES[name] for name in names}
    half = (
        {"text": TowerConfig(**TEXT, **different)} if cls is TextTower else {"image": TowerConfig(**IMAGE, **different)}
    )
    return draw(lambda: cls(ClipConfig(**sizes, **half, **options), rngs=nnx.Rngs(0)), stddev=0.3)


def make_model(kind):
    return draw(lambda: Clip(ClipConfig(**SIZES | KINDS[kind]), rngs=nnx.Rngs(0)), stddev=0.3)


def inputs():
    """Images, and texts that end early, late and with padding behind."""
    tokens = np.random.default_rng(0).integers(3, EOS, (4, T))
    for row, end in enumerate((5, T - 1, 3, 8)):
        tokens[row, end] = EOS
        tokens[row, end + 1 :] = 1
    return normal(1, 3, 12, 12, 2), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(tmp_path, kind):
    assert_comes_back(make_model(kind), tmp_path)


@pytest.mark.parametrize("kind", _TOWERS)
def test_a_tower_that_is_saved_is_loaded(tmp_path, kind):
    assert_comes_back(make_tower(kind), tmp_path)


@pytest.mark.parametrize(
    ("kind", "side", "whole"),
    [("CLIPTextModelWithProjection", "text", "CLIPModel"), ("CLIPVisionModelWithProjection", "image", "CLIPModel"),
     ("SiglipTextModel", "text", "SiglipModel"), ("SiglipVisionModel", "image", "SiglipModel")],
)  # fmt: skip
def test_a_tower_is_read_from_the_folder_of_both(tmp_path, kind, side, whole):
    hf.save(make_model(whole), tmp_path)
    assert_same(hf.load(tmp_path, architecture=kind), getattr(make_model(whole), side))


def test_older_folders(tmp_path):
    """Fields of the towers in a second object, and defaults for what is left out."""
    hf.save(make_model("CLIPModel"), tmp_path)
    fields = hf.FAMILIES["CLIPModel"].write_config(ClipConfig(**SIZES | KINDS["CLIPModel"]))
    change_config(
        tmp_path, architectures=LEFT_OUT, text_config={"hidden_size": 7}, text_config_dict=fields["text_config"]
    )
    assert_same(hf.load(tmp_path), make_model("CLIPModel"))
    change_config(tmp_path, vision_config={**fields["vision_config"], "vision_use_head": False})
    assert_refused(tmp_path, "vision_use_head is False, but only True is supported")


def test_what_contradicts_itself():
    for values, message in (
        ({"image_size": 13}, "image_size=13 is not divisible by patch_size=4"),
        ({"is_siglip": True, "d_output": 5}, "d_output=5 must be image.d_model=24 in a SigLIP"),
        ({"d_output": None}, "d_output=None must be the size of the compared vectors"),
        ({"text": TowerConfig(**TEXT | {"num_heads": 3})}, "text.d_model=20 is not divisible by num_heads=3"),
        ({"text": TowerConfig(**TEXT, activation="no")}, "activation must be "),
    ):
        with pytest.raises(ValueError, match=message):
            Clip(ClipConfig(**SIZES | KINDS["CLIPModel"] | values), rngs=nnx.Rngs(0))
    model, (images, tokens) = make_model("CLIPModel"), inputs()
    with pytest.raises(ValueError, match=r"images of shape \(12, 8, 2\), but the model reads \(12, 12, 2\)"):
        jax.eval_shape(model, images[:, :, :8], tokens)
    with pytest.raises(ValueError, match="texts of 13 tokens, but the model has max_length=12"):
        jax.eval_shape(model, images, np.pad(tokens, ((0, 0), (0, 1))))


@pytest.mark.parametrize("kind", ["CLIPModel", pytest.param("SiglipModel", marks=pytest.mark.slow)])
def test_padding_behind_a_text(kind):
    """CLIP does not see it; of a SigLIP, a mask hides it from all but the last position, which is what is compared."""
    model, (images, tokens) = make_model(kind), inputs()
    other = np.where(tokens == 1, 7, tokens)
    compare = jitted(lambda tokens, mask: model(images, tokens, token_mask=mask))
    output, masked = compare(tokens, None), compare(tokens, tokens != 1)
    if kind == "CLIPModel":
        np.testing.assert_allclose(compare(other, None).logits, output.logits, atol=1e-5)
        np.testing.assert_allclose(masked.logits, output.logits, atol=1e-5)
        assert np.abs(compare(np.where(tokens == tokens[0, 1], 8, tokens), None).texts - output.texts).max() > 1e-3
    else:
        assert np.abs(masked.texts - output.texts).max() > 1e-3
    np.testing.assert_allclose(np.linalg.norm(output.images, axis=1), 1, rtol=1e-5)
    scale, bias = np.exp(np.asarray(model.log_scale[...])), 0 if model.bias is None else np.asarray(model.bias[...])
    np.testing.assert_allclose(output.logits, scale * (output.images @ output.texts.T) + bias, rtol=1e-5)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers(tmp_path, kind):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cls, model = getattr(pytest.importorskip("transformers"), kind.split()[0]), make_model(kind)
    net = redrawn(loaded_by_them(cls, model, tmp_path))
    net.save_pretrained(tmp_path / "theirs")
    ours, (images, tokens) = hf.load(tmp_path / "theirs"), inputs()
    for mask in (None, tokens != 1):
        output = jitted(lambda model, mask: model(images, tokens, token_mask=mask))(ours, mask)
        with torch.no_grad():
            want = net(
                input_ids=torch.tensor(tokens),
                pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)),
                attention_mask=None if mask is None else torch.tensor(mask).long(),
            )
        for got, expected in (
            (output.logits, want.logits_per_image),
            (output.images, want.image_embeds),
            (output.texts, want.text_embeds),
        ):
            np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
    again = loaded_by_them(cls, ours, tmp_path / "ours")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", _TOWERS)
def test_towers_of_transformers(tmp_path, kind):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cls, model = getattr(pytest.importorskip("transformers"), kind), make_tower(kind)
    net = redrawn(loaded_by_them(cls, model, tmp_path))
    net.save_pretrained(tmp_path / "theirs")
    ours, (images, tokens) = hf.load(tmp_path / "theirs"), inputs()
    assert ours.config == model.config
    is_text = isinstance(ours, TextTower)
    output = jitted(lambda model: model(tokens if is_text else images))(ours)
    with torch.no_grad():
        want = net(torch.tensor(tokens) if is_text else torch.tensor(images.transpose(0, 3, 1, 2)))
    for got, name in zip(output, _TOWERS[kind][:2], strict=True):
        np.testing.assert_allclose(got, want[name], atol=1e-4 * np.abs(want[name]).max())
    again = loaded_by_them(cls, ours, tmp_path / "ours")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())


def test_a_tower_that_no_folder_expresses_is_named(tmp_path):
    tower = make_tower("SiglipTextModel")
    tower.config.d_output = None
    with pytest.raises(ValueError, match=r"^no Hugging Face architecture supports a TextTower with these options"):
        hf.save(tower, tmp_path)
