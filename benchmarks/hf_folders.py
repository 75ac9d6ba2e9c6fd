"""Compares folders of transformers with what loads here: `python -m benchmarks.hf_folders [ARCHITECTURE ...]`.

Each folder holds a small model with random weights, made by transformers (which must be installed, with torch), and no
tokenizer. Without names, all architectures of `hf.FAMILIES` are compared, and `OTHERS` are listed, which are refused.

The columns of the table:

- logits: largest difference of the first output, as a share of its largest value.
- left, right: the same with padding on this side. Each row is compared with the output for its text alone.
- greedy, beam: whether eight generated tokens are equal, with prompts or sources of different lengths.
- round trip: whether transformers finds all tensors in the folder that we write back, with the same bits.

A dash means that this is not compared: images and speech have no padding, CLIP and SigLIP are trained with that of
their texts, encoders do not generate.
"""

# pyright: reportMissingImports=false
import contextlib
import inspect
import io
import json
import logging
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tfx_jax.errors import UserError
from tfx_jax.functional import beam_search, greedy_search
from tfx_jax.models import BertMultipleChoice, hf

TOLERANCE = 1e-4
# Architectures that are used much and have no family.
OTHERS = """
BartForQuestionAnswering BartModel BertLMHeadModel BlenderbotForConditionalGeneration BloomForCausalLM
CohereForCausalLM ConvNextForImageClassification DebertaV2ForMaskedLM DebertaV2ForSequenceClassification
Dinov2Model ElectraForMultipleChoice FalconForCausalLM FNetForMaskedLM FunnelForMaskedLM
GPT2ForSequenceClassification GPT2Model GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM
LEDForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM
MBartForSequenceClassification MobileBertForMaskedLM Olmo3ForCausalLM OPTForCausalLM PhiForCausalLM
ProphetNetForConditionalGeneration Starcoder2ForCausalLM
SwinForImageClassification T5Model Wav2Vec2ForCTC
WhisperForAudioClassification XLNetLMHeadModel
"""
_B, _T, _NEW, _BEAMS = 3, 16, 8, 3
_LENGTHS = np.array([_T, 12, 7])  # tokens of each row where there is padding
_PAD, _START, _EOS = 1, 2, 2
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_HIDDEN = ("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "ffn_dim", "n_inner")
# Sizes by the names that configurations have for them; each sets those that its configuration has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "projection_size"), 24),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_HIDDEN, 40),
    **{"num_key_value_heads": 2, "d_kv": 6, "vocab_size": 60, "max_position_embeddings": 64, "n_positions": 64},
    **{"pad_token_id": _PAD, "bos_token_id": 0, "eos_token_id": _EOS, "sep_token_id": 2},
    **{"image_size": 16, "patch_size": 4, "attention_window": 8, "block_size": 4, "num_random_blocks": 1},
    **{"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "sliding_window": 4, "head_dim": 6},
    **{
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    **{"decoder_start_token_id": _START, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "local_attention": 8},
}
# What differs from _SIZES, by model_type.
_DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
_DEEPSEEK |= {
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "stablelm": {"partial_rotary_factor": 1 / 3},  # an even number of the six features of a head
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "qwen3_next": {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 6, "linear_value_head_dim": 10},
}
_CONFIGS = {
    "OpenAIGPTLMHeadModel": "OpenAIGPTConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
}
# Tensors that transformers lists and either never uses or computes, such as sinusoids.
_UNUSED = {
    **dict.fromkeys(
        ("BigBirdForMaskedLM", "BigBirdForTokenClassification"), ("bert.pooler.weight", "bert.pooler.bias")
    ),
    **dict.fromkeys(
        ("MarianMTModel", "PegasusForConditionalGeneration"),
        ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
    ),
}


class Comparison(NamedTuple):
    """A row of the table; see the docstring of this module."""

    architecture: str
    verdict: str  # "equal", "different", "refused", or "not made" where transformers fails
    logits: str = "-"
    left: str = "-"
    right: str = "-"
    greedy: str = "-"
    beam: str = "-"
    round_trip: str = "-"
    reason: str = ""


def make(architecture: str) -> Any:
    """Returns a small model of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, architecture)
    kind = getattr(transformers, _CONFIGS[architecture]) if architecture in _CONFIGS else cls.config_class

    def sized(kind: Any) -> Any:
        default = kind()
        return {
            name: value for name, value in _SIZES.items() if hasattr(default, name) and name not in kind.attribute_map
        } | _OWN_SIZES.get(kind.model_type, {})

    parts = {name: sized(part) for name, part in kind.sub_configs.items() if name in ("text_config", "vision_config")}
    net = cls(kind(**(parts or sized(kind)))).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:  # not a table of sinusoids
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in net.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    net.generation_config = transformers.GenerationConfig(
        pad_token_id=_PAD, decoder_start_token_id=_START, max_new_tokens=_NEW, do_sample=False
    )
    return net


def make_inputs(net: Any) -> dict[str, np.ndarray]:
    """Returns inputs of transformers by name: tokens, images or frames, and tokens of a decoder."""
    rng, names = np.random.default_rng(0), {net.main_input_name, *inspect.signature(net.forward).parameters}
    result = {}
    if "input_features" in names:
        result["input_features"] = rng.normal(size=(_B, 8, 16)).astype(np.float32)
    elif "input_ids" in names:
        result["input_ids"] = rng.integers(5, 50, (_B, _T))
        result["input_ids"][:, 5] = _EOS  # whose vector classifiers of BART read
    if type(net).__name__ == "LongformerForQuestionAnswering":  # which asks for three separators
        result["input_ids"][:, 5], result["input_ids"][:, 2:5] = 5, net.config.sep_token_id
    if "pixel_values" in names:
        result["pixel_values"] = rng.normal(size=(_B, 3, 16, 16)).astype(np.float32)
    if net.config.is_encoder_decoder and net.can_generate():
        result["decoder_input_ids"] = np.pad(rng.integers(5, 50, (_B, 6)), ((0, 0), (1, 0)), constant_values=_START)
    return result


def run_theirs(net: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the outputs of transformers."""
    import torch

    if "MultipleChoice" in type(net).__name__:  # of one text
        inputs = {name: x[:, None] for name, x in inputs.items()}
    with torch.no_grad():
        outputs = net(**{name: torch.tensor(array) for name, array in inputs.items()}, return_dict=True)
    return [value.numpy() for value in outputs.values() if isinstance(value, torch.Tensor)]


def ours_of(inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns our arguments for inputs of transformers; ours shift the tokens of a decoder themselves."""
    shifted = {"decoder_input_ids": lambda ids: np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=5)}
    axes = {"pixel_values": lambda x: x.transpose(0, 2, 3, 1), "input_features": lambda x: x.swapaxes(1, 2)}
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {**shifted, **axes, "input_ids": lambda ids: ids}
    order = ("pixel_values", "input_features", "input_ids", "decoder_input_ids")
    return tuple(changes[name](inputs[name]) for name in order if name in inputs)


def padded(inputs: dict[str, np.ndarray], side: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns inputs with the first tokens of each text and padding at one side, and which tokens exist, [B, T]."""
    columns, tokens = np.arange(_T)[None], inputs["input_ids"]
    start = _T - _LENGTHS[:, None] if side == "left" else 0
    mask = (columns >= start) & (columns < start + _LENGTHS[:, None])
    shifted = np.take_along_axis(tokens, np.maximum(columns - start, 0), axis=1)
    return {**inputs, "input_ids": np.where(mask, shifted, _PAD)}, mask


def alone(inputs: dict[str, np.ndarray], row: int, length: int) -> dict[str, np.ndarray]:
    """Returns the inputs of one row with the first tokens of its text."""
    by_token = ("input_ids", "global_attention_mask")
    return {name: x[row][None, :length] if name in by_token else x[row][None] for name, x in inputs.items()}


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the largest difference as a share of the largest value; infinite for other shapes and for NaN."""
    error = float(np.abs(got - want).max() / np.abs(want).max()) if got.shape == want.shape else np.inf
    return error if np.isfinite(error) else np.inf  # `max` would skip a NaN


def generate_theirs(net: Any, inputs: dict[str, np.ndarray], num_beams: int) -> np.ndarray:
    """Returns the tokens that transformers generates for one row, without the prompt; nothing ends a text."""
    import torch
    import transformers

    tensors = {name: torch.tensor(array) for name, array in inputs.items() if name != "decoder_input_ids"}
    options = {"num_beams": num_beams, "length_penalty": 0.0} if num_beams > 1 else {}
    mixin: Any = transformers.GenerationMixin  # not the class's own method: Whisper's cuts the sound into windows
    found = mixin.generate(net, **tensors, **options)
    return found.numpy()[0, -_NEW:]


def generate_ours(model: Any, inputs: tuple[Any, ...], num_beams: int) -> np.ndarray:
    """Returns the tokens that we generate, [B, 8]; the end of a text is one more token and comes at the limit only."""

    def run(model: Any, inputs: tuple[Any, ...]) -> Any:
        decoder = model.decoder()
        cache, start = decoder.init_cache(decoder.encode(*inputs), max_length=_NEW + 1, num_beams=num_beams)

        def step(tokens: Any, cache: Any) -> Any:
            logits, cache = decoder.step(tokens, cache)
            end = jax.nn.logsumexp(logits, axis=-1, keepdims=True) - 60  # all beams end at the same cost
            return jnp.concatenate([logits, end], axis=-1), cache

        options: dict[str, Any] = {"max_length": _NEW + 1, "eos_id": decoder.vocab_size, "pad_id": -1}
        if num_beams == 1:
            return greedy_search(step, cache, start, **options)[0]
        return beam_search(step, cache, start, beam_size=num_beams, length_penalty=0.0, **options).tokens[:, 0]

    return np.asarray(jax.jit(run)(model, inputs))[:, :_NEW]


def compare(architecture: str) -> Comparison:
    """Returns the comparison of one architecture."""
    import transformers

    try:
        net: Any = make(architecture) if architecture in hf.FAMILIES else getattr(transformers, architecture)
    except Exception as error:
        return Comparison(architecture, "not made", reason=f"{type(error).__name__}: {str(error).splitlines()[0]:.120}")
    with tempfile.TemporaryDirectory() as folder:
        if architecture in hf.FAMILIES:
            net.save_pretrained(folder)
        else:
            pathlib.Path(folder, "config.json").write_text(json.dumps({"architectures": [architecture]}))
        try:
            model = hf.load(folder)
        except UserError as error:
            reason = str(error).partition(": ")[2].partition("; there are")[0]
            return Comparison(architecture, "refused", reason=reason)
        hf.save(model, pathlib.Path(folder, "ours"), fields={"architectures": [architecture]})
        again, info = type(net).from_pretrained(pathlib.Path(folder, "ours"), output_loading_info=True)
    tensors, stored = again.state_dict(), net.state_dict()
    lost = {str(name) for names in info.values() for name in names}
    lost |= {name for name in stored if name not in tensors or not np.array_equal(tensors[name], stored[name])}
    lost -= {*_UNUSED.get(architecture, ())}
    inputs = make_inputs(net)
    want = run_theirs(net, inputs)[0]
    texts = "input_ids" in inputs and not architecture.startswith(("CLIP", "Siglip"))
    is_encoder_decoder = "decoder_input_ids" in inputs
    takes_mask = texts and not is_encoder_decoder

    @jax.jit
    def run(model: Any, inputs: tuple[Any, ...], mask: Any) -> Any:
        if isinstance(model, BertMultipleChoice):
            inputs, mask = (inputs[0][:, None],), mask[:, None]
        outputs = jax.tree.leaves(model(*inputs, **({"token_mask": mask} if takes_mask else {})))
        return next((x for x in outputs if x.shape == want.shape), outputs[0])

    errors = {"logits": largest_error(np.asarray(run(model, ours_of(inputs), np.ones((_B, _T), bool))), want)}
    for side in ("left", "right") if texts else ():
        filled, mask = padded(inputs, side)
        got = np.asarray(run(model, ours_of(filled), mask))
        rows = [x[own] if takes_mask and got.shape[:2] == mask.shape else x for x, own in zip(got, mask, strict=True)]
        errors[side] = max(
            largest_error(x, run_theirs(net, alone(inputs, row, _LENGTHS[row]))[0][0]) for row, x in enumerate(rows)
        )
    results = {"round_trip": not lost}
    if hasattr(model, "decoder"):
        filled, mask = padded(inputs, "right" if is_encoder_decoder else "left") if texts else (inputs, None)
        ours = (ours_of(filled)[0], mask) if takes_mask else (ours_of(filled)[0],)
        for name, num_beams in (("greedy", 1), ("beam", _BEAMS)):
            rows = [generate_theirs(net, alone(inputs, row, _LENGTHS[row]), num_beams) for row in range(_B)]
            results[name] = np.array_equal(generate_ours(model, ours, num_beams), np.stack(rows))
    is_equal = all(results.values()) and max(errors.values()) <= TOLERANCE
    cells = {name: f"{error:.0e}" for name, error in errors.items()}
    cells |= {name: "equal" if is_same else "different" for name, is_same in results.items()}
    return Comparison(architecture, "equal" if is_equal else "different", **cells, reason=" ".join(sorted(lost)))


def main(names: list[str]) -> None:
    """Prints the table and the counts."""
    former = "T5WithLMHeadModel"  # another name of T5ForConditionalGeneration, which transformers no longer has
    names = names or [*(name for name in hf.FAMILIES if name != former), *OTHERS.split()]
    print(f"| {' | '.join(Comparison._fields).replace('_', ' ')} |")
    print("|" + "---|" * len(Comparison._fields))
    verdicts = []
    for name in names:
        with contextlib.redirect_stderr(io.StringIO()):
            row = compare(name)
        verdicts.append(row.verdict)
        print(f"| {' | '.join(row)} |", flush=True)
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    print(f"\n{verdicts.count('equal')} of {len(verdicts)} load and agree: {counts}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of both libraries, about settings that random weights do not need
    main(sys.argv[1:])
