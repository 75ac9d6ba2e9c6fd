"""Models in and out of Hugging Face folders (config.json and safetensors), without torch or transformers.

    model = hf.load("path/to/gpt2")  # or a name of the hub, "gpt2", that is downloaded
    logits = model(tokens)
    hf.save(model, "path/to/another")

There is one table of names for each family, beside this file. Nothing that a folder holds is executed.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.typing import DTypeLike

from tfx_jax.errors import UserError
from tfx_jax.fields import check_fields
from tfx_jax.hub import local_folder
from tfx_jax.models.bert import Bert
from tfx_jax.models.config import DTYPES
from tfx_jax.models.finite import is_finite, nonfinite
from tfx_jax.models.gpt import GPT
from tfx_jax.models.hf import bert, bigbird, gpt, llama, longformer, marian, modernbert, peft, t5, vit
from tfx_jax.models.hf.encoders import ENCODERS
from tfx_jax.models.hf.folder import Fields, Tensors, read_json, write_folder
from tfx_jax.models.hf.names import Row, read_params, stored_as, write_params
from tfx_jax.models.hf.peft import is_adapter
from tfx_jax.models.t5 import T5
from tfx_jax.models.transformer import Transformer
from tfx_jax.models.vit import ViT
from tfx_jax.nn.lora import adapters_of, merged


class Family(NamedTuple):
    """How the folders of one architecture are read and written.

    Attributes:
      model: the class that they become; it has its configuration as `config`.
      read_config: from the fields of config.json to the model's configuration.
      write_config: back, to the fields; "architectures" among them.
      rows: the table of names, for a configuration.
      rows_of: from the fields of a folder to its `rows`, where they say more than the configuration keeps.
      completed_config: from a configuration and the names of all tensors to the configuration, where they say more.
      prefix: what the names of a whole model have in front of those in the table; a bare body lacks it.
      ignored: patterns of tensors that say nothing of their own: copies of tied matrices, constant masks; or belong to
        another architecture that is saved in the same file.
      copies: patterns of tensors, and the tensor in the table with which each shares its values.
      renamed: patterns in the names of older folders, and what newer ones have in their place.
      completed: the same function as a model, with all parameters that a folder has.
      fits: whether a folder can say what a configuration says of attention.
    """

    model: type[Any]
    read_config: Callable[[Fields], Any]
    write_config: Callable[[Any], dict[str, Any]]
    rows: Callable[[Any], Sequence[Row]]
    rows_of: Callable[[Fields], Callable[[Any], Sequence[Row]]] | None = None
    completed_config: Callable[[Any, Collection[str]], Any] | None = None
    prefix: str = ""
    ignored: Sequence[str] = ()
    copies: Sequence[tuple[str, str]] = ()
    renamed: Sequence[tuple[str, str]] = ()
    completed: Callable[[Any], Any] = lambda model: model
    fits: Callable[[Any], bool] = lambda config: config.attention.name == "dense"


_GPT2 = Family(
    GPT,
    gpt.read_gpt2_config,
    gpt.write_config,
    gpt.rows,
    prefix="transformer.",
    ignored=(r"lm_head\.weight", r"h\.\d+\.attn\.(bias|masked_bias)"),
    copies=((r"lm_head\.weight", "wte.weight"),),
    completed=gpt.with_offsets,
)
_GPT1 = _GPT2._replace(read_config=gpt.read_gpt1_config, copies=((r"lm_head\.weight", "tokens_embed.weight"),))


def _t5(architecture: str) -> Family:
    """A family of `t5`."""
    model = t5.ARCHITECTURES[architecture][0]
    return Family(
        model,
        functools.partial(t5.read_config, architecture),
        functools.partial(t5.write_config, architecture),
        functools.partial(t5.rows, architecture),
        functools.partial(t5.rows_of, architecture),
        ignored=(
            r"(encoder|decoder)\.embed_tokens\.weight",
            r"lm_head\.weight",
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # of no use to anyone
            *([] if model is T5 else [r"decoder\..*"]),
        ),
        copies=((r"(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight", "shared.weight"),)
        if model is T5
        else ((r"encoder\.embed_tokens\.weight", "shared.weight"),),
        fits=functools.partial(t5.fits, architecture),
    )


def _transformer(architecture: str) -> Family:
    """A family of `marian`, whose models are all of one class."""
    return Family(
        Transformer,
        functools.partial(marian.read_config, architecture),
        functools.partial(marian.write_config, architecture),
        marian.rows,
        completed_config=None if architecture == "MarianMTModel" else marian.completed_config,
        completed=marian.as_marian,
        ignored=(r"model\.(encoder|decoder)\.embed_(tokens|positions)\.weight", r"lm_head\.weight"),
        copies=(
            (r"model\.(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight", "model.shared.weight"),
            (r"lm_head\.weight", "model.decoder.embed_tokens.weight"),
        ),
        fits=functools.partial(marian.fits, architecture),
    )


def _with_heads(module: Any, architecture: str) -> Family:
    """Of a module with a table for each of its architectures."""
    model, head = module.HEADS[architecture]
    is_masked_lm = any(row.ours == "masked_lm/bias" for row in head)
    return Family(
        model,
        functools.partial(module.read_config, architecture),
        functools.partial(module.write_config, architecture),
        functools.partial(module.rows, architecture),
        completed_config=_with_pooler(functools.partial(module.rows, architecture)) if model in _BODIES else None,
        ignored=module.IGNORED,
        copies=module.COPIES if is_masked_lm else (),
        renamed=module.renamed(architecture),
        fits=functools.partial(module.fits, architecture) if module is vit else module.fits,
    )


_BODIES = (Bert, ViT)


def _with_pooler(rows: Callable[[Any], Sequence[Row]]) -> Callable[[Any, Collection[str]], Any]:
    """Of a body, whether it has a pooler is known by its tensors alone."""

    def complete(config: Any, names: Collection[str]) -> Any:
        poolers = [row for row in rows(dataclasses.replace(config, has_pooler=True)) if row.ours.startswith("pooler/")]
        return dataclasses.replace(config, has_pooler=any(row.theirs in names for row in poolers))

    return complete


def _llama(architecture: str) -> Family:
    """A family of `llama`, whose models are all of one class."""
    return Family(
        llama.Llama,
        functools.partial(llama.read_config, architecture),
        functools.partial(llama.write_config, architecture),
        functools.partial(llama.rows, architecture),
        ignored=llama.IGNORED,
        copies=llama.COPIES,
        fits=functools.partial(llama.fits, architecture),
    )


_MODULES = (bert, *ENCODERS, modernbert, bigbird, longformer, vit)

# By the name in "architectures" or, in a folder without that, by "model_type". Of those with one class, the first is
# what a model is saved as that does not say otherwise.
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": _GPT2,
    "OpenAIGPTLMHeadModel": _GPT1,
    **{name: _with_heads(module, name) for module in _MODULES for name in module.HEADS},
    **{name: _t5(name) for name in t5.ARCHITECTURES},
    **{name: _transformer(name) for name in marian.ARCHITECTURES},
    **{name: _llama(name) for name in llama.ARCHITECTURES},
}
_BY_MODEL_TYPE = {
    "gpt2": "GPT2LMHeadModel",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "bert": "BertModel",
    "big_bird": "BigBirdModel",
    "longformer": "LongformerModel",
    "vit": "ViTModel",
    "deit": "DeiTModel",
    "modernbert": "ModernBertModel",
    **t5.MODEL_TYPES,
    **marian.MODEL_TYPES,
    **llama.MODEL_TYPES,
    **{encoder.MODEL_TYPE: next(iter(encoder.HEADS)) for encoder in ENCODERS},
}


def load(
    path: epath.PathLike,
    *,
    architecture: str | None = None,
    dtype: DTypeLike = jnp.float32,
    allow_nonfinite: bool = False,
    on_read: Callable[[int, int], object] | None = None,
) -> Any:
    """Reads a model.

    Args:
      path: a folder with config.json and model.safetensors, or several with an index; one with an adapter of PEFT,
        which is merged into the model that it names; or, where no such folder is, the name of a model on the Hugging
        Face hub.
      architecture: one of `FAMILIES`, to read another model than the one that config.json names of what the folder
        holds: the body alone, or all heads of a pre-training.
      dtype: of the computation; parameters become float32 whatever the file has.
      allow_nonfinite: whether a parameter may be NaN or infinite.
      on_read: is told how many parameters are read and how many there are, after each array.

    Returns:
      The model of the architecture. Called with tokens it gives logits, or what else its class says.

    Raises:
      UserError: for a folder that is damaged, has a parameter that is NaN or infinite, or holds what our model of the
        family cannot express; for a `dtype` other than float32 and bfloat16.
    """
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise UserError(
            f"dtype must be {' or '.join(DTYPES)}, got {name}: activations of T5 and others overflow float16"
        )
    folder = base_folder(path)
    family, config = _open(folder, architecture)
    config.dtype = name
    adapter = local_folder(path)
    if adapter == folder:
        tensors = Tensors(folder, family.renamed)
    else:
        tensors = peft.AdaptedTensors(folder, family.renamed, adapter, family.prefix)
    _check_depth(config, tensors, folder)
    try:
        abstract = nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0)))
        graphdef, state, others = nnx.split(abstract, nnx.Param, ...)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    shapes = {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    rows = family.rows(config)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors.shapes) else ""
    params: dict[str, Any] = {}
    spoilt: list[str] = []
    done, total = 0, sum(map(math.prod, shapes.values()))
    try:
        _take_copies({row.theirs for row in rows}, tensors, prefix, family.copies)
        _refuse_unknown(rows, set(tensors.shapes), prefix, shapes, family.ignored)
        _refuse_other_copies({row.theirs for row in rows}, tensors, prefix, family.copies)
        for name, param, names in read_params(rows, tensors, prefix, shapes, np.float32):
            # One after the other, so that never more than one is there twice.
            _set(params, name, jax.block_until_ready(jax.device_put(param)))
            spoilt += names
            if on_read is not None:
                done += param.size
                on_read(done, total)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    if spoilt and not allow_nonfinite:
        raise nonfinite(dict.fromkeys(spoilt), folder)
    # What training leaves in a model beside its parameters, such as auxiliary losses, a folder does not hold.
    for place, leaf in nnx.to_flat_state(others):
        _set(params, "/".join(map(str, place)), jax.device_put(np.zeros(leaf.shape, leaf.dtype)))
    return nnx.merge(graphdef, params)


def supported() -> str:
    """A table of `FAMILIES` in Markdown: what loads, as what it is saved, and what can generate text."""
    heading = ("architecture", "loads as", "saves as", "generates")
    lines = [heading, tuple("---" for _ in heading)]
    for name, family in sorted(FAMILIES.items(), key=lambda item: item[0].lower()):
        saved = "T5ForConditionalGeneration" if name == "T5WithLMHeadModel" else name
        lines.append((name, family.model.__name__, saved, "yes" if hasattr(family.model, "decoder") else "no"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load_config(path: epath.PathLike, *, architecture: str | None = None) -> Any:
    """Reads a model's configuration, and not its parameters; arguments and errors as for `load`."""
    return _open(base_folder(path), architecture)[1]


def base_folder(path: epath.PathLike) -> epath.Path:
    """Returns the folder of a model, which of an adapter is the one that it names.

    Raises:
      UserError: if there is none.
    """
    folder = local_folder(path)
    return local_folder(peft.base_of(folder)) if is_adapter(folder) else folder


def end_ids(path: epath.PathLike) -> tuple[int, ...]:
    """The tokens that end a text: `eos_token_id` of generation_config.json, or of config.json; none if neither says it.

    Raises:
      UserError: if they are no ids.
    """
    for name in ("generation_config.json", "config.json"):
        file = base_folder(path) / name
        found = read_json(file).get("eos_token_id") if file.exists() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(index) is int and index >= 0 for index in ids):
                raise UserError(f"{file}: eos_token_id is {found!r}, not a token or a list of them")
            return tuple(ids)
    return ()


def save(
    model: Any,
    path: epath.PathLike,
    *,
    dtype: DTypeLike = jnp.float32,
    fields: Mapping[str, Any] | None = None,
    allow_nonfinite: bool = False,
) -> None:
    """Writes a folder that `load` reads, and `transformers` too.

    Args:
      model: what `load` gives, or a model made otherwise of one of these classes; it stays as it is. What is written
        is `completed(model)`.
      path: the folder, which is made if it does not exist; what it has beside config.json and weights stays.
      dtype: in which the parameters are stored: float32, float16 or bfloat16.
      fields: more of config.json, such as "bos_token_id"; what it says of the model itself is not changed by them, but
        "architectures" chooses among those that are the same function, such as Llama and Mistral without windows.
      allow_nonfinite: whether a parameter may be NaN or infinite.

    Raises:
      UserError: if it cannot be written, or a parameter is too large for `dtype`, NaN or infinite.
      ValueError: for a model that is of no such family or has what a folder cannot express.
    """
    model = completed(model)
    family = _family_for(model, fields or {})
    config = family.write_config(model.config)
    state = nnx.state(model, nnx.Param)
    params = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
    rows = family.rows(model.config)
    for name in sorted(params.keys() ^ {row.ours for row in rows}):
        raise ValueError(f"either the model or a folder with a {config['architectures'][0]} has no {name}")
    tensors = write_params(rows, params)
    spoilt = [family.prefix + name for name, tensor in tensors.items() if not is_finite(tensor)]
    if spoilt and not allow_nonfinite:
        raise nonfinite(spoilt, f"not written to {path}")
    stored = {family.prefix + name: stored_as(dtype, name, tensor) for name, tensor in tensors.items()}
    write_folder(path, {**(fields or {}), **config, "dtype": jnp.dtype(dtype).name}, stored)


def completed(model: Any) -> Any:
    """The model that `load` makes of what `save` writes of this one.

    It is the same function, with its adapters merged. A GPT without offsets (`use_bias=False`) gets zeros, because
    Hugging Face's has them everywhere; so does a Transformer, and the places of its residual are ordered as Marian has
    its sinusoids.

    Raises:
      ValueError: for a model that is of no such family, or a Transformer that is like none of Marian's.
    """
    return _families_of(model)[0].completed(merged(model))


def save_adapter(model: Any, path: epath.PathLike, *, base: str, allow_nonfinite: bool = False) -> None:
    """Writes the adapters of a model as a folder that PEFT reads, and `load` too.

    Args:
      model: with adapters (`tfx_jax.nn.adapt`).
      path: the folder, which is made if it does not exist.
      base: folder or name on the hub of the model that was fine-tuned, which the adapter names; it has to be there.
      allow_nonfinite: whether a parameter may be NaN or infinite.

    Raises:
      UserError: if it cannot be written, or a parameter is NaN or infinite.
      ValueError: for a model without adapters, or one that is of no family of `save`.
    """
    adapters = adapters_of(model)
    if not adapters:
        raise ValueError("the model has no adapters: train with config.lora.rank above 0, or save the model itself")
    family = _family_for(model, read_json(base_folder(base) / "config.json"))
    trained = {"/".join(map(str, place)): leaf for place, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    heads = {name: np.asarray(leaf[...]) for name, leaf in trained.items() if "_adapter/" not in name}
    rows, kind = family.rows(model.config), getattr(model.config, "kind", "")
    config, tensors = peft.adapter_files(adapters, heads, rows, prefix=family.prefix, base=base, kind=kind)
    spoilt = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if spoilt and not allow_nonfinite:
        raise nonfinite(spoilt, f"not written to {path}")
    write_folder(path, config, tensors, names=(peft.CONFIG, peft.WEIGHTS))


def _families_of(model: Any) -> list[Family]:
    families = [family for family in FAMILIES.values() if issubclass(type(model), family.model)]
    if not families:
        raise ValueError(f"{type(model).__name__} has no form in Hugging Face's folders")
    return families


def _family_for(model: Any, fields: Mapping[str, Any]) -> Family:
    """The family as which a model is saved, where several are the same function the one that config.json names."""
    families = _families_of(model)
    named = FAMILIES.get(str((fields.get("architectures") or [None])[0]))
    if named in families:
        families = [named, *families]
    family = next((family for family in families if family.fits(model.config)), None)
    if family is None:
        raise ValueError(f"a Hugging Face folder cannot say that a model has {_described(model.config)}")
    return family


def _described(config: Any) -> str:
    """The attention of a model, in words."""
    options = ", ".join(f"{name}={value}" for name, value in config.attention.options.given.items())
    return f"{config.attention.name} attention{f' with {options}' if options else ''}"


def _open(folder: epath.Path, architecture: str | None) -> tuple[Family, Any]:
    """The family of a folder, and the configuration of its model."""
    path = folder / "config.json"
    values = read_json(path)
    values |= _start_of_generation(folder)
    family = _family_of(values if architecture is None else {"architectures": [architecture]}, path)
    fields = Fields(values, path)
    fields.require(quantization_config=None)
    config = family.read_config(fields)
    if family.rows_of is not None:
        family = family._replace(rows=family.rows_of(fields))
    if family.completed_config is not None:
        config = family.completed_config(config, Tensors(folder, family.renamed).shapes)
    check_fields(config, f"{path}: the model's configuration")
    return family, config


def _start_of_generation(folder: epath.Path) -> dict[str, int]:
    """The token that generation_config.json says a decoder starts with, which precedes that of config.json."""
    path = folder / "generation_config.json"
    name = "decoder_start_token_id"
    start = read_json(path).get(name) if path.exists() else None
    if start is not None and (type(start) is not int or start < 0):
        raise UserError(f"{path}: {name} is {start!r}, not a token")
    return {} if start is None else {name: start}


def _check_depth(config: Any, tensors: Tensors, folder: epath.Path) -> None:
    """Refuses more layers than a folder can hold, before anything is made of that many."""
    count = sum(getattr(config, name, None) or 0 for name in ("num_layers", "num_decoder_layers"))
    if count > len(tensors.shapes):
        raise UserError(
            f"{folder / 'config.json'} asks for {count:,} layers, but there are {len(tensors.shapes):,} tensors"
        )


def _family_of(values: dict[str, Any], path: epath.Path) -> Family:
    names = values.get("architectures") or [_BY_MODEL_TYPE.get(str(values.get("model_type")), values.get("model_type"))]
    if not isinstance(names, list) or not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise UserError(f"{path}: the architecture {names!r} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[names[0]]


def _refuse_unknown(
    rows: Sequence[Row], names: set[str], prefix: str, shapes: dict[str, tuple[int, ...]], ignored: Sequence[str]
) -> None:
    """What a table does not name would be lost in silence."""
    known = {prefix + name for row in rows for name in row.tensor_names(shapes[row.ours])}
    pattern = re.compile(f"({re.escape(prefix)})?({'|'.join(ignored)})") if ignored else None
    for name in sorted(names - known):
        if pattern is None or not pattern.fullmatch(name):
            raise UserError(f"there is a tensor {name}, for which the model has no place")


def _take_copies(theirs: set[str], tensors: Tensors, prefix: str, copies: Sequence[tuple[str, str]]) -> None:
    """Reads a shared tensor from a copy where the folder leaves the original out, as savers that drop duplicates do."""
    for pattern, original in copies:
        if original in theirs and prefix + original not in tensors.shapes:
            matching = re.compile(f"({re.escape(prefix)})?({pattern})")
            copy = next((name for name in sorted(tensors.shapes.keys() - theirs) if matching.fullmatch(name)), None)
            if copy is not None:
                tensors.add_name(prefix + original, copy)


def _refuse_other_copies(theirs: set[str], tensors: Tensors, prefix: str, copies: Sequence[tuple[str, str]]) -> None:
    """A tensor that the model has not beside another could as well be a parameter of its own, and would be lost."""
    for pattern, original in copies:
        pair = [prefix + original]
        if original not in theirs or pair[0] not in tensors.shapes:
            continue
        for name in sorted(tensors.shapes.keys() - theirs):
            if not re.fullmatch(f"({re.escape(prefix)})?({pattern})", name):
                continue
            one, other = tensors.read([*pair, name])
            if not np.array_equal(one, other, equal_nan=True):
                raise UserError(f"the tensor {name} is not {pair[0]}, with which the model shares it")


def _set(nested: dict[str, Any], path: str, value: Any) -> None:
    *folders, name = path.split("/")
    for folder in folders:
        nested = nested.setdefault(folder, {})
    nested[name] = value
