"""The comparisons: programs, sizes and target ratios."""

import functools
import pathlib
from typing import Any

from benchmarks.peers.measure import Row, Side

# A process that uses JAX besides another library must leave the accelerator to that library. If several processes share
# an accelerator, none may reserve its memory.
_NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu"}
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

RECURRENCES = ("retention", "state_space_duality", "delta_rule", "gated_delta_rule", "kimi_delta")
"""Attentions with a state of constant size that transformers has as functions of PyTorch."""


def all_rows(device: str, data_dir: str, output: pathlib.Path) -> list[Row]:
    """Returns all rows in the order of the table.

    Args:
      device: "cpu" (float32, base model) or "gpu" (bfloat16, big model).
      data_dir: folder of Multi30k.
      output: folder for models and workdirs that rows share.
    """
    is_gpu = device == "gpu"
    model, dtype = ("big", "bfloat16") if is_gpu else ("base", "float32")
    rows, length = (256, 64) if is_gpu else (16, 32)
    lengths = (2_048, 8_192, 32_768) if is_gpu else (512, 2_048, 8_192)
    return [
        training_row(f"train_{model}", model, rows, length, dtype, target=1.2 if is_gpu else 1.15),
        training_row("train_tiny", "tiny", 64, 32, dtype, target=1.3),
        *([gpt_training_row("gpt2", 8, 1_024, dtype, target=1.0)] if is_gpu else []),
        *(_recurrent(size, 64, 16, attends, dtype) for size in ("enja", "base") for attends in (False, True)),
        _padding(data_dir, dtype, 16_384 if is_gpu else 4_096),
        decoding_row(f"decode_{model}", model, 128 if is_gpu else 16, dtype, targets=(1.2, 2.0)),
        decoding_row(f"decode_{model}_1", model, 1, dtype, targets=(1.0, None)),
        _int8("decode_int8", model, 128 if is_gpu else 16, device),
        _int8("decode_int8_1", model, 1, device),
        *(attention_row(t, is_causal, dtype) for t in lengths for is_causal in (False, True)),
        *(_recurrence(name, dtype) for name in RECURRENCES),
        _utilization(model, rows, length, dtype, size=8_192 if is_gpu else 2_048, target=0.5 if is_gpu else 0.75),
        _compiling(model, rows, length),
        _startup("translate", model, output),
        _startup("train", model, output),
        _loading("seconds", "start", "import the library and load GPT-2 (124 M) from a folder", 2.0, output),
        _loading("memory", "GiB", "peak memory of a process that has loaded GPT-2", 1 / 0.7, output),
        *(generating_row(name, count, dtype, output) for name in ("gpt2", "llama") for count in (1, 8)),
    ]


def _ours(build: str, dtype: str, label: str = "ours", **options: Any) -> Side:
    return Side(label, build, options | {"dtype": dtype}, env=_SHARED)


def _torch(label: str, build: str, dtype: str, target: float | None = None, **options: Any) -> Side:
    options |= {"dtype": dtype, "device": _torch_device(dtype)}
    return Side(label, build, options, ("torch",), target)


def _torch_device(dtype: str) -> str:
    return "cpu" if dtype == "float32" else "cuda"


def training_row(name: str, model: str, rows: int, length: int, dtype: str, target: float) -> Row:
    """Training of an encoder-decoder, a key of `SIZES`."""
    shape = {"model": model, "rows": rows, "length": length}
    # On a GPU the compiled program is the one to beat.
    targets = (target, None) if dtype == "float32" else (None, target)
    sides = (
        _ours("ours:training", dtype, **shape),
        _torch("PyTorch eager", "torch_peers:training", dtype, targets[0], is_compiled=False, **shape),
        _torch("PyTorch compiled", "torch_peers:training", dtype, targets[1], is_compiled=True, **shape),
    )
    return Row(name, f"train {model}, batch {rows} x {length}, {dtype}", "target tokens", sides)


def gpt_training_row(model: str, rows: int, length: int, dtype: str, target: float) -> Row:
    """Training of a GPT-2 without dropout."""
    shape = {"model": model, "rows": rows, "length": length}
    sides = (
        _ours("ours:gpt_training", dtype, **shape),
        _torch("PyTorch compiled", "torch_gpt:training", dtype, target, is_compiled=True, **shape),
    )
    return Row(f"train_{model}", f"train {model}, batch {rows} x {length}, {dtype}", "tokens", sides)


def _recurrent(model: str, rows: int, length: int, is_attending: bool, dtype: str) -> Row:
    """Training of LSTMs. With a fixed context PyTorch runs a sequence in one call; input feeding needs a loop."""
    shape = {"model": model, "rows": rows, "length": length, "is_attending": is_attending}
    label, name = ("nn.LSTMCell in a loop", "luong") if is_attending else ("nn.LSTM", "fixed")
    sides = (
        _ours("ours:recurrent_training", dtype, **shape),
        _torch(f"PyTorch {label}", "torch_recurrent:training", dtype, 1.0, **shape),
    )
    title = f"train LSTMs of {model}, {name}, batch {rows} x {length}, {dtype}"
    return Row(f"train_lstm_{name}_{model}", title, "target tokens", sides)


def _padding(data_dir: str, dtype: str, tokens_per_batch: int) -> Row:
    make = functools.partial(
        _ours,
        "text:training",
        dtype,
        model="tiny",
        data_dir=data_dir,
        tokens_per_batch=tokens_per_batch,
        num_batches=12,
    )
    padded = make(label="ours, padded batches", is_padded=True)
    sides = (make(is_padded=False), Side(padded.label, padded.build, padded.options, target=1.6, env=_SHARED))
    obstacle = "" if (pathlib.Path(data_dir) / "train.en.gz").is_file() else "no train.en.gz in --data-dir"
    title = f"train tiny on Multi30k text, {dtype}, non-padding tokens"
    return Row("padding", title, "target tokens", sides, obstacle=obstacle)


def decoding_row(name: str, model: str, rows: int, dtype: str, targets: tuple[float | None, float | None]) -> Row:
    """Beam search by an encoder-decoder, a key of `SIZES`; `targets` are those for CTranslate2 and transformers."""
    shape = {"model": model, "rows": rows, "beam": 4, "source_length": 32, "length": 32}
    device = _torch_device(dtype)
    sides = (
        _ours("ours:decoding", dtype, **shape),
        Side(
            f"CTranslate2 {dtype}",
            "translators:ctranslate2",
            shape | {"compute_type": dtype, "device": device},
            ("ctranslate2",),
            targets[0],
            _NO_ACCELERATOR,
        ),
        Side(
            "Hugging Face generate",
            "translators:hugging_face",
            shape | {"dtype": dtype, "device": device},
            ("torch", "transformers"),
            targets[1],
        ),
    )
    return Row(name, f"decode {model}, batch {rows}, beam 4, 32 tokens, {dtype}", "target tokens", sides)


def _int8(name: str, model: str, rows: int, device: str) -> Row:
    shape = {"model": model, "rows": rows, "beam": 4, "source_length": 32, "length": 32}
    sides = (
        _ours("ours:decoding", "float32", int8=True, **shape),
        Side(
            "CTranslate2 int8",
            "translators:ctranslate2",
            shape | {"compute_type": "int8", "device": "cuda" if device == "gpu" else "cpu"},
            ("ctranslate2",),
            1.0,
            _NO_ACCELERATOR,
        ),
    )
    return Row(name, f"decode {model}, batch {rows}, beam 4, 32 tokens, int8 weights", "target tokens", sides)


def attention_row(length: int, is_causal: bool, dtype: str) -> Row:
    """Attention alone: on a CPU what is faster at this length, on a GPU the default and every implementation."""
    shape = {"rows": 1, "length": length, "heads": 8, "head_size": 64, "is_causal": is_causal}
    name = f"attention_{length}{'_causal' if is_causal else ''}"
    title = f"attention forward + backward, {length:,} tokens, 8 heads of 64, {dtype}{', causal' if is_causal else ''}"

    def torch(label: str, **options: Any) -> Side:
        return _torch(label, "torch_peers:attention", dtype, **shape, **options)

    if dtype == "float32":
        sides = (
            _ours("ours:attention", dtype, function="chunked" if length > 1_024 else "dense", **shape),
            torch("PyTorch SDPA"),
            _ours("ours:jax_nn_attention", dtype, "jax.nn xla", implementation="xla", **shape),
        )
    else:
        sides = (
            _ours("ours:attention", dtype, function="dense", **shape),
            torch("PyTorch SDPA cuDNN", target=0.9, backend="CUDNN_ATTENTION"),
            torch("PyTorch SDPA flash", backend="FLASH_ATTENTION"),
            _ours("ours:attention", dtype, "ours cudnn", function="cudnn", **shape),
            _ours("ours:attention", dtype, "ours chunked", function="chunked", **shape),
            _ours("ours:jax_nn_attention", dtype, "jax.nn cudnn", implementation="cudnn", **shape),
        )
    return Row(name, title, "pass", sides)


def _recurrence(function: str, dtype: str) -> Row:
    shape = {"function": function, "rows": 1, "length": 4_096, "heads": 4, "head_size": 64}
    sides = (
        _ours("ours:attention", dtype, is_causal=True, **shape),
        Side(
            "transformers, chunked",
            "torch_recurrences:attention",
            shape | {"dtype": dtype, "device": _torch_device(dtype)},
            ("torch", "transformers"),
            1.0,
        ),
    )
    return Row(f"recurrence_{function}", f"{function} forward + backward, 4,096 tokens, 4 heads of 64", "pass", sides)


def _utilization(model: str, rows: int, length: int, dtype: str, size: int, target: float) -> Row:
    """Utilization: the ratios are the model's FLOP/s divided by those of a matrix product of each library."""
    shape = {"model": model, "rows": rows, "length": length}
    xla = _ours("products:by_xla", dtype, "product by XLA", size=size)
    sides = [
        _ours("ours:training", dtype, count="flops", **shape),
        Side(xla.label, xla.build, xla.options, target=target, env=_SHARED),
        _torch("product by PyTorch", "products:by_torch", dtype, target, size=size),
    ]
    if dtype == "float32":
        sides.append(Side("product by NumPy", "products:by_numpy", {"size": size}, target=target))
    title = f"model FLOP/s of train {model}, batch {rows} x {length}, over a {size:,}-square {dtype} product"
    return Row("utilization", title, "FLOP", tuple(sides))


def _compiling(model: str, rows: int, length: int) -> Row:
    shape = {"model": model, "rows": rows, "length": length}
    sides = (
        Side("ours", "ours:compiling", shape, env=_SHARED),
        Side("Flax Linen, unrolled", "linen:compiling", shape, target=2.0, env=_SHARED),
    )
    title = f"trace, compile and first step of train {model}, batch {rows} x {length}, no cache"
    return Row("compile", title, "start", sides, is_fresh=True)


def _startup(verb: str, model: str, output: pathlib.Path) -> Row:
    shape = {"model": model, "workdir": str(output / f"startup_{model}")}
    sides = tuple(
        Side(f"ours, {label} cache", f"startup:{verb}", shape | {"is_cached": cached, "spawned_at": 0.0}, env=_SHARED)
        for label, cached in (("warm", True), ("cold", False))
    )
    until = {"translate": "translate to the first line", "train": "train to the first step"}[verb]
    preparation = Side("preparation", "startup:prepare", shape, env=_SHARED)
    return Row(f"startup_{verb}", f"tfx-jax {until}, {model}", "start", sides, is_fresh=True, preparation=preparation)


def _loading(measure: str, unit: str, title: str, target: float, output: pathlib.Path) -> Row:
    """Loading of GPT-2, measured in seconds or memory; the ratio is theirs divided by ours."""
    shape = {"folder": str(output / "gpt2")}
    sides = (
        Side("ours", "pretrained:load", shape | {"measure": measure}, env=_SHARED),
        Side(
            "transformers",
            "pretrained:load_by_transformers",
            shape | {"measure": measure},
            ("torch", "transformers"),
            target,
        ),
    )
    preparation = Side("preparation", "pretrained:prepare", shape | {"model": "gpt2"}, env=_SHARED)
    return Row(f"load_gpt2_{measure}", title, unit, sides, is_fresh=True, preparation=preparation)


def generating_row(
    model: str, rows: int, dtype: str, output: pathlib.Path, *, prompt_length: int = 32, length: int = 64
) -> Row:
    """Greedy generation by a decoder; `output` is the folder of its weights."""
    shape = {"folder": str(output / model), "model": model, "rows": rows}
    shape |= {"prompt_length": prompt_length, "length": length}
    sides = (
        _ours("pretrained:generate", dtype, **shape),
        Side(
            "Hugging Face generate",
            "pretrained:generate_by_transformers",
            shape | {"dtype": dtype, "device": _torch_device(dtype)},
            ("torch", "transformers"),
            2.0,
        ),
        _ours("pretrained:generate", dtype, "ours, int8 weights", int8=True, **shape),
    )
    title = f"{model}, batch {rows}, {length} tokens after a prompt of {prompt_length}, greedy, {dtype}"
    return Row(f"generate_{model}_{rows}", title, "tokens", sides)
