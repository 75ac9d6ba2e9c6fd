"""Programs that users decode with: CTranslate2, given our weights, and Hugging Face's `generate`."""

# pyright: reportMissingImports=false
import os
import tempfile
from typing import Any

import numpy as np

from benchmarks.peers.sizes import BOS_ID, EOS_ID, LAYER_NORM_EPSILON, PAD_ID, SIZES, pairs
from benchmarks.peers.worker import Workload, cores

_MAX_POSITIONS = 512


def ctranslate2(
    *, model: str, rows: int, beam: int, source_length: int, length: int, compute_type: str, device: str = "cpu"
) -> Workload:
    """Returns beam search to a forced length by CTranslate2, with the random weights of our side."""
    import ctranslate2

    names = vocabulary(SIZES[model].vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX only makes the weights
        save_for_ctranslate2(model, folder)
        translator = ctranslate2.Translator(
            folder, device=device, compute_type=compute_type, inter_threads=1, intra_threads=cores()
        )
    source = [[names[token] for token in row] for row in pairs(len(names), rows, source_length)[0]]

    def run(length: int = length, num_hypotheses: int = 1) -> list[list[list[str]]]:
        options: dict[str, Any] = {"min_decoding_length": length, "max_decoding_length": length, "beam_size": beam}
        translations = translator.translate_batch(source, num_hypotheses=num_hypotheses, **options)
        return [row.hypotheses for row in translations]

    assert all(len(tokens) == length for row in run() for tokens in row)
    ids = {name: index for index, name in enumerate(names)}
    # Ours ends in EOS, so the tokens to compare are one fewer.
    beams = [[[ids[name] for name in tokens] for tokens in row] for row in run(length - 1, beam)]
    about = {"beams": beams, "ctranslate2": ctranslate2.__version__, "compute_type": translator.compute_type}
    return Workload(run, rows * length, about)


def vocabulary(size: int) -> list[str]:
    """Returns a name for every id; special tokens have the names that CTranslate2 expects."""
    special = {PAD_ID: "<blank>", BOS_ID: "<s>", EOS_ID: "</s>", 3: "<unk>"}
    return [special.get(index, f"t{index}") for index in range(size)]


def save_for_ctranslate2(model: str, folder: str) -> None:
    """Writes our random model of this size in CTranslate2's format."""
    import jax
    import jax.numpy as jnp
    from ctranslate2 import specs

    from benchmarks.peers.ours import parameters
    from tfx_jax.functional.positions import sinusoidal_positions

    sizes = SIZES[model]
    params = jax.device_get(parameters(model))
    spec = specs.TransformerSpec.from_config(sizes.num_layers, sizes.num_heads, pre_norm=False)
    table = params["embedding"]["table"]
    positions = np.asarray(sinusoidal_positions(jnp.arange(_MAX_POSITIONS), sizes.d_model))
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = spec.decoder.projection.weight = table
    for side, layers in ((spec.encoder, params["encoder_layers"]), (spec.decoder, params["decoder_layers"])):
        side.position_encodings.encodings = positions
        for index, layer in enumerate(side.layer):
            _fill_layer(layer, jax.tree.map(lambda stacked, index=index: stacked[index], layers))
    names = vocabulary(sizes.vocab_size)
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    spec.validate()
    spec.save(folder)


def _fill_layer(spec: Any, ours: dict[str, Any]) -> None:
    """Copies the parameters of one of our layers into CTranslate2's."""
    query, key, value, out = _projections(ours["self_attention"])
    spec.self_attention.linear[0].weight = np.concatenate([query, key, value])
    spec.self_attention.linear[1].weight = out
    _fill_norm(spec.self_attention.layer_norm, ours["self_attention_residual"])
    if "cross_attention" in ours:
        query, key, value, out = _projections(ours["cross_attention"])
        spec.attention.linear[0].weight, spec.attention.linear[2].weight = query, out
        spec.attention.linear[1].weight = np.concatenate([key, value])
        _fill_norm(spec.attention.layer_norm, ours["cross_attention_residual"])
    spec.ffn.linear_0.weight, spec.ffn.linear_0.bias = (
        _rows(ours["feed_forward"]["up"]),
        ours["feed_forward"]["up_bias"],
    )
    spec.ffn.linear_1.weight = _rows(ours["feed_forward"]["down"])
    spec.ffn.linear_1.bias = ours["feed_forward"]["down_bias"]
    _fill_norm(spec.ffn.layer_norm, ours["feed_forward_residual"])


def _projections(ours: dict[str, Any]) -> list[np.ndarray]:
    """Returns the matrices [query, key, value, output] of an attention layer, each [outputs, inputs]."""
    inputs, out = (ours[name]["kernel"] for name in ("query", "key", "value")), ours["out"]["kernel"]
    return [*(_rows(kernel.reshape(len(kernel), -1)) for kernel in inputs), _rows(out.reshape(-1, out.shape[-1]))]


def _rows(kernel: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(kernel.T)


def _fill_norm(spec: Any, ours: dict[str, Any]) -> None:
    spec.gamma, spec.beta = ours["norm"]["scale"], ours["norm"]["bias"]


def hugging_face(
    *,
    model: str,
    rows: int,
    beam: int,
    source_length: int,
    length: int,
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Returns `generate` of a MarianMTModel of the same sizes, with a cache and other random weights."""
    import torch
    import transformers

    torch.set_num_threads(cores())
    torch.manual_seed(0)
    sizes = SIZES[model]
    both = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", sizes.num_layers), ("ffn_dim", sizes.d_ff), ("attention_heads", sizes.num_heads))
    }
    config = transformers.MarianConfig(
        vocab_size=sizes.vocab_size,
        d_model=sizes.d_model,
        activation_function="relu",
        max_position_embeddings=_MAX_POSITIONS,
        scale_embedding=True,
        decoder_start_token_id=BOS_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        forced_eos_token_id=EOS_ID,
        **both,
    )
    net = transformers.MarianMTModel(config).to(device, getattr(torch, dtype)).eval()
    source = torch.tensor(pairs(sizes.vocab_size, rows, source_length)[0], dtype=torch.int64, device=device)

    def run() -> Any:
        with torch.inference_mode():
            return net.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=beam,
                min_new_tokens=length,
                max_new_tokens=length,
                do_sample=False,
                use_cache=True,
            ).cpu()

    assert run().shape == (rows, length + 1)  # with the start token
    return Workload(run, rows * length, {"transformers": transformers.__version__})
