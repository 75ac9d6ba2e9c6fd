"""Exports models as programs that run without tfx_jax at any batch size: of `jax.export`, or in ONNX.

Programs of `jax.export` run on CPUs, GPUs and TPUs. ONNX is for models that do not generate, such as encoders and
classifiers.
"""

import importlib
import inspect
import json
import logging
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from tfx_jax.errors import UserError, install_command, one_line
from tfx_jax.files import is_local
from tfx_jax.models import exported_run
from tfx_jax.nn.decoding import DecodingModel
from tfx_jax.nn.lora import merged

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms that one exported program runs on."""

_README = """# {name}, exported by tfx_jax

`model.npz` holds {kind} as programs of `jax.export` for {platforms}, and the weights.
Batch and length may be any{limit}. It needs `pip install jax flatbuffers` and no tfx_jax:

```python
from run import ExportedModel

{usage}
```
"""

_ONNX_README = """# {name}, exported by tfx_jax

`model.onnx` holds {name} and its weights in float32, for `pip install onnxruntime`.
Batch and length may be any{limit}. Inputs: {inputs}. Outputs: {outputs}.

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
print(session.run(None, {{{usage}}}))
```
"""


def export(
    model: Any,
    path: epath.PathLike,
    *,
    eos_ids: Sequence[int] = (),
    first_ids: Sequence[int] = (),
    int8: bool = False,
) -> None:
    """Writes a folder with a model that JAX runs without this library.

    model.npz has the weights and, of a model that generates, three programs: "prepare" arranges the weights for
    decoding, "prefill" reads prompts into a KV cache, and "step" reads one token of each row. Of any other model it has
    one program, "call". run.py calls them, and README.md says how. An argument `token_type_ids` is not exported: every
    token has the model's default type.

    Args:
      model: a model of tokens or images.
      path: the local folder to write.
      eos_ids: tokens that end a text, which run.py stops at.
      first_ids: tokens that every output of run.py begins with.
      int8: whether the decoder's weights become int8, see `tfx_jax.functional.int8_product`.

    Raises:
      UserError: if the folder is not local or cannot be written, flatbuffers is missing, the model reads images and
        tokens, int8 is asked of a model that does not generate, or a part of it depends on sizes that an exported
        program does not know, such as the attention "lsh".
    """
    if not is_local(path):
        raise UserError(f"{path} is not a local folder: export to one, and copy it")
    model = merged(model)
    name = type(model).__name__
    weights, programs, settings = _traced(model, int8=int8)
    settings |= {"eos_ids": list(eos_ids), "first_ids": list(first_ids), "programs": list(programs), "model": name}
    arrays: dict[str, np.ndarray] = {}
    settings["dtypes"] = [weight.dtype.name for weight in weights]
    for index, weight in enumerate(weights):
        array = np.asarray(weight)
        is_of_numpy = array.dtype.isbuiltin == 1  # not bfloat16
        arrays[f"weight_{index}"] = array if is_of_numpy else array.view(f"u{array.itemsize}")
    try:
        serialized = {name: bytes(program.serialize()) for name, program in programs.items()}
    except ImportError as error:
        raise UserError(f"export needs flatbuffers ({one_line(error)}): {install_command('export')}") from None
    serialized["settings"] = json.dumps(settings).encode()
    arrays |= {name: np.frombuffer(data, np.uint8) for name, data in serialized.items()}
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "model.npz", **arrays)  # type: ignore[arg-type]
        (folder / "run.py").write_text(inspect.getsource(exported_run), encoding="utf-8")
        (folder / "README.md").write_text(_readme(name, settings), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from None


def export_onnx(model: Any, path: epath.PathLike) -> None:
    """Writes a folder with model.onnx, a model that ONNX Runtime reads, and README.md, which says how.

    Inputs are "tokens", int32 [B, T], and "token_mask", bool [B, T], or "images", float32 [B, H, W, C]. Outputs have
    the names of the model's; a single one is "outputs". An argument `token_type_ids` is not exported. jax2onnx
    (https://github.com/enpasos/jax2onnx) converts the program that JAX traces.

    Args:
      model: a model of tokens or images that does not generate and computes in float32.
      path: the local folder to write.

    Raises:
      UserError: if jax2onnx is missing, the model generates or reads something else or computes in another dtype, it
        has an operation that ONNX or jax2onnx lacks, or the folder is not local or cannot be written.
    """
    if not is_local(path):
        raise UserError(f"{path} is not a local folder: export to one, and copy it")
    name, folder = type(model).__name__, pathlib.Path(path)
    if isinstance(model, DecodingModel):
        raise UserError(f"{name} generates, but only encoders and classifiers can be exported to ONNX")
    if model.config.dtype != "float32":
        raise UserError(f"{name} computes in {model.config.dtype}, but only float32 can be exported to ONNX")
    try:
        to_onnx = importlib.import_module("jax2onnx").to_onnx
    except ImportError as error:
        raise UserError(f"ONNX needs jax2onnx ({one_line(error)}): {install_command('onnx')}") from None
    graphdef, state = nnx.split(merged(model))
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # warns of each intermediate value without a known dtype
    call, inputs, settings = _call_function(lambda state: nnx.merge(graphdef, state), model)
    try:
        outputs = jax.eval_shape(call, state, *inputs.values())
        folder.mkdir(parents=True, exist_ok=True)
        to_onnx(
            lambda *arrays: tuple(call(state, *arrays)[output] for output in outputs),
            list(inputs.values()),
            model_name=name,
            return_mode="file",
            output_path=folder / "model.onnx",
            input_names=list(inputs),
            output_names=list(outputs),
        )
        (folder / "README.md").write_text(_onnx_readme(name, inputs, outputs, settings), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from None
    except UserError:
        raise
    except Exception as error:  # of JAX and of jax2onnx, of many classes
        raise UserError(f"{name} cannot be exported to ONNX for any batch and length: {one_line(error)}") from None


def _traced(model: Any, *, int8: bool) -> tuple[list[jax.Array], dict[str, jax.export.Exported], dict[str, Any]]:
    """Returns the weights, the exported programs by name, and the settings that run.py reads."""
    graphdef, state = nnx.split(model)
    weights, structure = jax.tree.flatten(state)

    def rebuilt(weights: list[jax.Array]) -> Any:
        """Returns the model with these weights, so that they are arguments of the programs."""
        return nnx.merge(graphdef, jax.tree.unflatten(structure, weights))

    try:
        if isinstance(model, DecodingModel):
            programs, settings = _decoding_programs(rebuilt, weights, int8=int8)
        else:
            if int8:
                raise UserError(f"{type(model).__name__} does not generate, but only decoders get int8 weights")
            programs, settings = _call_program(rebuilt, weights, model)
    except UserError:
        raise
    except Exception as error:  # of JAX, of many classes: some operation needs the size of an axis
        raise UserError(
            f"{type(model).__name__} cannot be exported for any batch and length: {one_line(error)}"
        ) from None
    return weights, programs, settings


def _decoding_programs(
    rebuilt: Callable[[list[jax.Array]], Any], weights: list[jax.Array], *, int8: bool
) -> tuple[dict[str, jax.export.Exported], dict[str, Any]]:
    """Exports "prepare", "prefill" and "step" of a model that generates.

    Args:
      rebuilt: returns the model with the given weights.
      weights: the model's weights; only shapes and dtypes are used.
      int8: whether the decoder's weights become int8.

    Returns:
      The programs by name, and the settings that run.py reads.
    """
    abstract = nnx.eval_shape(lambda weights: rebuilt(weights).decoder(int8=int8), weights)
    graphdef, state = nnx.split(abstract)
    leaves, structure = jax.tree.flatten(state)
    cache_structure: Any = None

    def decoder(leaves: list[jax.Array]) -> Any:
        """Returns the decoder with these arrays, which `prepare` returned."""
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    def prepare(weights: list[jax.Array]) -> list[jax.Array]:
        """Returns the arrays of the decoder: the weights, rearranged for decoding."""
        return jax.tree.leaves(nnx.split(rebuilt(weights).decoder(int8=int8))[1])

    def prefill(leaves: list[jax.Array], tokens: Any, token_mask: Any, room: Any) -> tuple[list[jax.Array], Any]:
        """Returns the arrays of the cache, and the tokens of the first step; only the size of `room` is read."""
        nonlocal cache_structure
        model = decoder(leaves)
        cache, start = model.init_cache(model.encode(tokens, token_mask), max_length=room.shape[0])
        cache_leaves, cache_structure = jax.tree.flatten(cache)
        return cache_leaves, start

    def step(leaves: list[jax.Array], tokens: Any, cache: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Returns the logits of the next token, and the arrays of the new cache."""
        logits, cache = decoder(leaves).step(tokens, jax.tree.unflatten(cache_structure, cache))
        return logits.astype(jnp.float32), jax.tree.leaves(cache)

    limit = abstract.max_input_length(0)
    constraints: tuple[str, ...] = ()
    if limit is not None:
        constraints = (f"p + n <= {limit}",) if abstract.continues_inputs else (f"p <= {limit}", f"n <= {limit}")
    if not abstract.continues_inputs:
        constraints += "p >= 2", "p * p >= p"  # which decide the shapes of relative positions
    scope = jax.export.SymbolicScope(constraints)
    batch, length, room = jax.export.symbolic_shape("b, p, n", scope=scope)
    specs = _specs(leaves)
    inputs = _spec((batch, length), jnp.int32), _spec((batch, length), bool), _spec((room,), bool)
    exported_prefill = _exported(prefill, specs, *inputs)
    *cache, _ = exported_prefill.out_avals
    # A program must read each symbol from some axis. Sizes such as p + n with a symbol that is nowhere alone get their
    # own symbol.
    sizes = dict.fromkeys(str(size) for array in cache for size in array.shape if not isinstance(size, int))
    own = [size for size in sizes if not {"b"}.union(sizes).issuperset(re.findall(r"\b[bpn]\b", size))]
    symbols = {size: jax.export.symbolic_shape(f"s{index}", scope=scope)[0] for index, size in enumerate(own)}
    cache_specs = [_spec(tuple(symbols.get(str(size), size) for size in array.shape), array.dtype) for array in cache]
    programs = {
        "prepare": _exported(prepare, _specs(weights)),
        "prefill": exported_prefill,
        "step": _exported(step, specs, _spec((batch,), jnp.int32), cache_specs),
    }
    settings = {"inputs": "tokens", "max_length": limit, "pad_id": abstract.pad_id, "vocab_size": abstract.vocab_size}
    return programs, settings | {"continues_inputs": abstract.continues_inputs}


def _call_program(
    rebuilt: Callable[[list[jax.Array]], Any], weights: list[jax.Array], model: Any
) -> tuple[dict[str, jax.export.Exported], dict[str, Any]]:
    """Exports "call" of an encoder or classifier, with outputs by name; arguments are those of `_decoding_programs`."""
    call, inputs, settings = _call_function(rebuilt, model)
    return {"call": _exported(call, _specs(weights), *inputs.values())}, settings


def _call_function(
    rebuilt: Callable[[Any], Any], model: Any
) -> tuple[Callable[..., dict[str, Any]], dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """Returns the call of an encoder or classifier as a function of weights and inputs.

    Args:
      rebuilt: returns the model with the given weights.
      model: the model.

    Returns:
      The function, which returns outputs by name; shapes and dtypes of its inputs by name; the settings of run.py.
    """
    parameters = inspect.signature(type(model).__call__).parameters
    if {"tokens", "images"} <= parameters.keys():
        raise UserError(
            f"{type(model).__name__} reads images and tokens, but only models that read one of them can be exported"
        )
    kind = next((name for name in ("tokens", "images") if name in parameters), None)
    if kind is None:
        raise UserError(f"{type(model).__name__} reads neither tokens nor images, so it cannot be exported")
    limit = getattr(model.config, "max_length", None) if kind == "tokens" else None

    def call(weights: Any, *inputs: Any) -> dict[str, Any]:
        """Returns the outputs of the model by name."""
        options = {"token_mask": inputs[1]} if kind == "tokens" else {}
        outputs = rebuilt(weights)(inputs[0], **options)
        named = outputs._asdict() if hasattr(outputs, "_asdict") else {"outputs": outputs}
        return {name: array for name, array in named.items() if array is not None}

    if kind == "tokens":
        batch, length = jax.export.symbolic_shape("b, t", constraints=() if limit is None else (f"t <= {limit}",))
        inputs = {"tokens": _spec((batch, length), jnp.int32), "token_mask": _spec((batch, length), bool)}
    else:
        (batch,) = jax.export.symbolic_shape("b")
        size, channels = model.config.image_size, model.config.num_channels
        inputs = {"images": _spec((batch, size, size, channels), jnp.float32)}
    vocab_size = model.config.vocab_size if kind == "tokens" else None
    return call, inputs, {"inputs": kind, "max_length": limit, "pad_id": -1, "vocab_size": vocab_size}


def _exported(function: Callable[..., Any], *specs: Any) -> jax.export.Exported:
    """Exports a function for all `PLATFORMS`; `specs` are the shapes and dtypes of its arguments."""
    return jax.export.export(jax.jit(function), platforms=PLATFORMS)(*specs)


def _spec(shape: tuple[Any, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an argument; sizes may be symbols."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _specs(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of arrays."""
    return [_spec(array.shape, array.dtype) for array in arrays]


def _readme(name: str, settings: dict[str, Any]) -> str:
    """Returns the text of README.md."""
    if "prepare" in settings["programs"]:
        kind, usage = "prefill and cached decoding", "print(model.generate([[5, 7, 11], [3]], max_new_tokens=20))"
    else:
        example = "images" if settings["inputs"] == "images" else "[[5, 7, 11], [3]]"
        kind, usage = "one call", f"print(model({example}))"
    return _README.format(
        name=name,
        kind=kind,
        platforms=", ".join(PLATFORMS),
        limit=_limit(settings),
        usage=f'model = ExportedModel("model.npz")\n{usage}  # token ids, or see run.py',
    )


def _onnx_readme(
    name: str, inputs: dict[str, jax.ShapeDtypeStruct], outputs: dict[str, Any], settings: dict[str, Any]
) -> str:
    """Returns the text of README.md beside model.onnx."""
    if settings["inputs"] == "tokens":
        usage = '"tokens": np.array([[5, 7, 11]], np.int32), "token_mask": np.ones((1, 3), bool)'
    else:
        usage = f'"images": np.zeros({(1, *inputs["images"].shape[1:])}, np.float32)'
    described = [
        ", ".join(
            f"`{key}` {array.dtype} {list(map(str, array.shape))}".replace("'", "") for key, array in group.items()
        )
        for group in (inputs, outputs)
    ]
    return _ONNX_README.format(
        name=name, limit=_limit(settings), inputs=described[0], outputs=described[1], usage=usage
    )


def _limit(settings: dict[str, Any]) -> str:
    """Returns the part of a README that gives the longest input."""
    return "" if settings["max_length"] is None else f", up to {settings['max_length']:,} tokens"
