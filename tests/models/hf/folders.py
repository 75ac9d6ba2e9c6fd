"""What tests of Hugging Face folders share: changing, comparing and refusing folders, and the nets of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.nn.programs import jitted, params_of
from tfx_jax.errors import UserError
from tfx_jax.models import hf

LEFT_OUT = "left out"
"""The value of a field that `change_config` removes."""


def change_config(folder: Path, **fields: Any) -> None:
    """Sets fields of config.json."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value != LEFT_OUT}))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Lets `change` edit the tensors, by name, in place."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def rename_norms_as_of_old(tensors: dict[str, np.ndarray]) -> None:
    """Gives normalizations the names that they had when BERT was published."""
    for name in list(tensors):
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensors.pop(name)


def assert_same(model: Any, other: Any) -> None:
    """Both models have the same parameters, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(other))


def assert_refused(folder: Path, match: str) -> None:
    """The folder is refused with one line."""
    with pytest.raises(UserError, match=match) as caught:
        hf.load(folder)
    assert "\n" not in str(caught.value)


def assert_comes_back(model: Any, folder: Path) -> None:
    """What is saved in `folder` is loaded bit for bit, and saved again as the same files."""
    hf.save(model, folder)
    again = hf.load(folder)
    assert type(again) is type(model)
    assert again.config == model.config
    assert_same(again, model)
    hf.save(again, folder / "second")
    for name in ("config.json", "model.safetensors"):
        assert (folder / "second" / name).read_bytes() == (folder / name).read_bytes()
    assert not list(folder.glob("*.partial"))


def redrawn(net: Any) -> Any:
    """A net of transformers no parameter of which, and no buffer that is saved, is at its start."""
    torch = pytest.importorskip("torch")
    saved = net.state_dict()
    buffers = [buffer for name, buffer in net.named_buffers() if name in saved and buffer.is_floating_point()]
    with torch.no_grad():
        for array in (*net.parameters(), *buffers):
            array.add_(0.2 * torch.randn_like(array))
    return net.eval()


def loaded_by_them(cls: Any, model: Any, folder: Path) -> Any:
    """The net that transformers makes of the folder of our model, of which it uses all and misses nothing."""
    hf.save(model, folder)
    net, info = cls.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    # Of PEGASUS it computes the sinusoids, but names them.
    info["missing_keys"] = {name for name in info["missing_keys"] if "embed_positions" not in name}
    assert not any(info.values())
    return net.eval()


def assert_their_config_comes_back(net: Any, model: Any, folder: Path, *, has_classes: bool) -> None:
    """All fields that say something of the model, and the labels where there are classes."""
    hf.save(model, folder)
    want, got = net.config.to_dict(), type(net.config).from_pretrained(folder).to_dict()
    silent = {"_name_or_path", "transformers_version", "dtype", "architectures"}
    silent |= set() if has_classes else {"id2label", "label2id"}
    assert {k: v for k, v in got.items() if k not in silent} == {k: v for k, v in want.items() if k not in silent}


def padded_on(side: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Which of the tokens exist, with padding on the left, on the right or on both, and their positions."""
    token_mask = np.ones(shape, bool)
    if side != "right":
        token_mask[1, :4] = False
    if side != "left":
        token_mask[2, 8:] = False
    return token_mask, np.maximum(token_mask.cumsum(axis=1) - 1, 0)


def random_sum(outputs: list[Any]) -> tuple[Any, list[np.ndarray]]:
    """Sums outputs of a net with random weights, which are returned too."""
    torch, rng = pytest.importorskip("torch"), np.random.default_rng(1)
    weights = [rng.normal(size=tuple(x.shape)).astype(np.float32) for x in outputs]
    return sum((x * torch.tensor(w)).sum() for x, w in zip(outputs, weights, strict=True)), weights


def gradients_by_name(model: Any, loss: Callable[[Any], Any], folder: Path) -> dict[str, np.ndarray]:
    """Our gradients, written as a folder, where they have the names and shapes of its tensors."""
    hf.save(jitted(jax.grad(loss))(model), folder)
    return safetensors.numpy.load_file(folder / "model.safetensors")


def assert_gradients_near(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same names, and values that differ by little of the largest of the tensor or of 1."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        scale = 1 + np.abs(want[name]).max()
        np.testing.assert_allclose(value / scale, want[name] / scale, atol=1e-4, err_msg=name)


def assert_encoder_decoder_says_the_same(cls: Any, model: Any, texts: tuple[np.ndarray, np.ndarray], folder: Path):
    """Logits and attention maps of our folder in transformers, and of their folder here; there and back."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    (source, target), c = texts, model.config
    inputs = np.concatenate([np.full((len(target), 1), c.start_id), target[:, :-1]], axis=1)

    def their_answer(net):
        with torch.no_grad():
            return net.eval()(
                input_ids=torch.tensor(source),
                attention_mask=torch.tensor(source != c.pad_id).long(),
                decoder_input_ids=torch.tensor(inputs),
                output_attentions=True,
            )

    net = loaded_by_them(cls, model, folder)
    answer, (logits, maps) = (
        their_answer(net),
        jitted(lambda model: model(source, target, return_attention=True))(model),
    )
    np.testing.assert_allclose(logits, answer.logits, atol=1e-5)
    assert abs(answer.logits).max() > 0.3
    theirs = {f"encoder/{index}/self": weights for index, weights in enumerate(answer.encoder_attentions)}
    theirs |= {f"decoder/{index}/self": weights for index, weights in enumerate(answer.decoder_attentions)}
    theirs |= {f"decoder/{index}/cross": weights for index, weights in enumerate(answer.cross_attentions)}
    assert theirs.keys() == maps.keys()
    exists = {"encoder": source != c.pad_id, "decoder": np.ones(target.shape, bool)}
    for name, weights in theirs.items():
        rows = exists[name.partition("/")[0]]  # what padding attends to is of no use to anyone
        got, want = (np.moveaxis(np.asarray(x), 1, 2)[rows] for x in (maps[name], weights))
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)

    net.save_pretrained(folder / "theirs")
    again = hf.load(folder / "theirs")
    assert_same(again, model)
    hf.save(again, folder / "ours")
    reloaded = cls.from_pretrained(folder / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(their_answer(reloaded).logits, answer.logits)


def encoder_decoder_gradients(
    cls: Any, model: Any, texts: tuple[np.ndarray, np.ndarray], folder: Path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The gradients of the mean cross-entropy by name, ours and theirs."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    source, target = texts
    hf.save(model, folder)
    net = cls.from_pretrained(folder).eval()
    mask = torch.tensor(source != model.config.pad_id).long()
    net(input_ids=torch.tensor(source), attention_mask=mask, labels=torch.tensor(target)).loss.backward()
    theirs = {name: weight.grad.numpy() for name, weight in net.named_parameters() if weight.grad is not None}

    def loss(model):
        log_probs = jax.nn.log_softmax(model(source, target))
        return -jnp.take_along_axis(log_probs, target[..., None], axis=-1).mean()

    return gradients_by_name(model, loss, folder / "gradients"), theirs
