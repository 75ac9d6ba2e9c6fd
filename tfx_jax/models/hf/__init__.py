"""Loads and saves Hugging Face folders (config.json and safetensors), without torch or transformers.

    model = hf.load("path/to/gpt2")  # or a name on the hub, "gpt2", which is downloaded
    logits = model(tokens)
    hf.save(model, "path/to/another")

Each module of this package has the tables of names of one family: which tensor of a file holds which parameter. Nothing
in a folder is executed.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from tfx_jax.arrays import leaves_by_path
from tfx_jax.errors import UserError
from tfx_jax.fields import check_fields
from tfx_jax.hub import local_folder
from tfx_jax.models.bert import Bert
from tfx_jax.models.config import DTYPES
from tfx_jax.models.finite import is_finite, nonfinite
from tfx_jax.models.gpt import GPT
from tfx_jax.models.hf import bert, bigbird, clip, gpt, llama, longformer, marian, modernbert, peft, t5, vit, whisper
from tfx_jax.models.hf.encoders import ENCODERS
from tfx_jax.models.hf.folder import Fields, Tensors, read_json, write_folder
from tfx_jax.models.hf.names import Row, read_params, stored_as, write_params
from tfx_jax.models.hf.peft import is_adapter
from tfx_jax.models.t5 import T5, T5Classifier
from tfx_jax.models.transformer import Transformer, TransformerClassifier
from tfx_jax.models.vit import ViT
from tfx_jax.models.whisper import Whisper
from tfx_jax.nn.basic import Buffer
from tfx_jax.nn.lora import adapters_of, merged

STORED = (nnx.Param, Buffer)
"""Kinds of variables that folders contain."""


class Family(NamedTuple):
    """How the folders of one architecture are read and written.

    Attributes:
      model: class of the model; an instance has its configuration as `config`.
      read_config: function from the fields of config.json to the model's configuration.
      write_config: function from a configuration to the fields of config.json, including "architectures".
      rows: function from a configuration to the table of names.
      rows_of: function from the fields of a folder to a function that replaces `rows`, if the table depends on fields
        that the configuration does not keep.
      completed_config: function from a configuration and the names of all tensors to a configuration, if some options
        can be seen only from the tensors that exist.
      prefix: start of the tensor names of a whole model that the table omits; a bare encoder or decoder lacks it.
      ignored: patterns of tensors that are not read: copies of tied matrices, constant masks, and tensors of another
        architecture that is saved in the same file.
      copies: pairs (pattern, original): tensors whose names match the pattern repeat the tensor `original` of the
        table.
      renamed: pairs (pattern, replacement): how tensor names of a folder change to those of the table, as in older
        folders or for a part of a model with a head.
      completed: function from a model to one that computes the same and has all parameters that a folder has.
      fits: function that tells whether a folder can express a configuration.
      check: function from a configuration and the tensors that raises UserError for a constant, which is not read, with
        other values than the model computes.
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
    check: Callable[[Any, Tensors], None] = lambda config, tensors: None


_GPT2 = Family(
    GPT,
    read_config=gpt.read_gpt2_config,
    write_config=gpt.write_config,
    rows=gpt.rows,
    prefix="transformer.",
    ignored=(r"lm_head\.weight", r"h\.\d+\.attn\.(bias|masked_bias)"),
    copies=((r"lm_head\.weight", "wte.weight"),),
    completed=gpt.with_offsets,
)
_GPT1 = _GPT2._replace(read_config=gpt.read_gpt1_config, copies=((r"lm_head\.weight", "tokens_embed.weight"),))


def _t5(architecture: str) -> Family:
    """Returns how folders of an architecture of the module `t5`, a whole T5 or an encoder, are read and written."""
    model = t5.ARCHITECTURES[architecture][0]
    prefix = "transformer." if model in t5.HEADS else ""  # of all tensors but those of the head
    below = re.escape(prefix)
    shared = f"{prefix}shared.weight"
    has_decoder = model in (T5, T5Classifier)
    return Family(
        model,
        read_config=functools.partial(t5.read_config, architecture),
        write_config=functools.partial(t5.write_config, architecture),
        rows=functools.partial(t5.rows, architecture),
        rows_of=functools.partial(t5.rows_of, architecture),
        ignored=(
            rf"({below})?(encoder|decoder)\.embed_tokens\.weight",
            r"lm_head\.weight",
            # In older files, unused.
            rf"({below})?decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            *([] if has_decoder else [r"decoder\..*"]),
        ),
        copies=(
            (rf"{below}(encoder|decoder)\.embed_tokens\.weight", shared),
            *(((r"lm_head\.weight", shared),) if model is T5 else ()),
        ),
        fits=functools.partial(t5.fits, architecture),
    )


_COPIES_AND_POSITIONS = (r"model\.(encoder|decoder)\.embed_(tokens|positions)\.weight", r"lm_head\.weight")


def _transformer(architecture: str) -> Family:
    """Returns how folders of an architecture of the module `marian` are read and written, all as a `Transformer`."""
    return Family(
        Transformer,
        read_config=functools.partial(marian.read_config, architecture),
        write_config=functools.partial(marian.write_config, architecture),
        rows=marian.rows,
        completed_config=None if architecture == "MarianMTModel" else marian.completed_config,
        completed=marian.as_marian,
        ignored=_COPIES_AND_POSITIONS,
        copies=(
            (r"model\.(encoder|decoder)\.embed_tokens\.weight", "model.shared.weight"),
            (r"lm_head\.weight", "model.shared.weight"),
            (r"lm_head\.weight", "model.decoder.embed_tokens.weight"),
        ),
        fits=functools.partial(marian.fits, architecture),
        check=marian.check_sinusoids,
    )


def _transformer_classifier(architecture: str) -> Family:
    """Returns the family of a classifier of `marian`."""
    return Family(
        TransformerClassifier,
        read_config=functools.partial(marian.read_classifier_config, architecture),
        write_config=functools.partial(marian.write_classifier_config, architecture),
        rows=marian.classifier_rows,
        ignored=(*_COPIES_AND_POSITIONS, "final_logits_bias"),
        copies=((r"model\.(encoder|decoder)\.embed_tokens\.weight", "model.shared.weight"),),
        fits=functools.partial(marian.fits, marian.CLASSIFIERS[architecture]),
    )


def _with_heads(module: Any, architecture: str) -> Family:
    """Returns how folders of an architecture of a module with `HEADS`, such as `bert`, are read and written."""
    model, head = module.HEADS[architecture]
    is_masked_lm = any(row.path == "masked_lm/bias" for row in head)
    return Family(
        model,
        read_config=functools.partial(module.read_config, architecture),
        write_config=functools.partial(module.write_config, architecture),
        rows=functools.partial(module.rows, architecture),
        completed_config=_with_pooler(functools.partial(module.rows, architecture)) if model in _BODIES else None,
        ignored=module.IGNORED,
        copies=module.COPIES if is_masked_lm else (),
        renamed=module.renamed(architecture),
        fits=functools.partial(module.fits, architecture) if module is vit else module.fits,
    )


_BODIES = (Bert, ViT)  # models without a head, which may have a pooler


def _with_pooler(rows: Callable[[Any], Sequence[Row]]) -> Callable[[Any, Collection[str]], Any]:
    """Returns a `Family.completed_config` that sets `has_pooler`, which only the names of the tensors tell."""

    def complete(config: Any, names: Collection[str]) -> Any:
        """Returns the configuration with `has_pooler` set if a tensor of a pooler exists."""
        all_rows = rows(dataclasses.replace(config, has_pooler=True))
        pooler_tensors = {row.tensor for row in all_rows if row.path.startswith("pooler/")}
        return dataclasses.replace(config, has_pooler=any(name in names for name in pooler_tensors))

    return complete


def _llama(architecture: str) -> Family:
    """Returns how folders of an architecture of the module `llama` are read and written, all as a `Llama`."""
    return Family(
        llama.Llama,
        read_config=functools.partial(llama.read_config, architecture),
        write_config=functools.partial(llama.write_config, architecture),
        rows=functools.partial(llama.rows, architecture),
        ignored=llama.IGNORED,
        copies=llama.COPIES,
        fits=functools.partial(llama.fits, architecture),
    )


def _llama_body(architecture: str) -> Family:
    """Returns the family of a Llama without an output layer."""
    base = llama.BODIES[architecture]
    return Family(
        llama.LlamaBody,
        read_config=functools.partial(llama.read_config, base),
        write_config=functools.partial(llama.write_body_config, architecture),
        rows=functools.partial(llama.body_rows, architecture),
        ignored=(r"lm_head\.weight", r"score\.weight", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        renamed=((r"^model\.", ""),),  # a body may be read from a folder with a head
        fits=functools.partial(llama.fits, base),
    )


def _llama_classifier(architecture: str) -> Family:
    """Returns the family of a classifier of `llama`."""
    return Family(
        llama.LlamaClassifier,
        read_config=functools.partial(llama.read_classifier_config, architecture),
        write_config=functools.partial(llama.write_classifier_config, architecture),
        rows=functools.partial(llama.classifier_rows, architecture),
        ignored=llama.IGNORED,
        fits=functools.partial(llama.fits, llama.CLASSIFIERS[architecture]),
    )


_WHISPER = Family(
    Whisper,
    read_config=whisper.read_config,
    write_config=whisper.write_config,
    rows=whisper.rows,
    ignored=(r"proj_out\.weight",),
    copies=((r"proj_out\.weight", "model.decoder.embed_tokens.weight"),),
    fits=lambda config: True,
)


def _clip(architecture: str) -> Family:
    """Returns the family of CLIP or SigLIP, or of one of their towers."""
    return Family(
        clip.ARCHITECTURES[architecture][0],
        read_config=functools.partial(clip.read_config, architecture),
        write_config=functools.partial(clip.write_config, architecture),
        rows=functools.partial(clip.rows, architecture),
        ignored=clip.ignored(architecture),
        renamed=clip.renamed(architecture),
        fits=functools.partial(clip.fits, architecture),
    )


_MODULES = (bert, *ENCODERS, modernbert, bigbird, longformer, vit)

# Families by the name in "architectures" of config.json. If several have the same class, a model is saved as the first
# one that fits, unless `save` gets another in `fields`.
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": _GPT2,
    "OpenAIGPTLMHeadModel": _GPT1,
    **{name: _with_heads(module, name) for module in _MODULES for name in module.HEADS},
    **{name: _t5(name) for name in t5.ARCHITECTURES},
    **{name: _transformer(name) for name in marian.ARCHITECTURES},
    **{name: _transformer_classifier(name) for name in marian.CLASSIFIERS},
    **{name: _llama(name) for name in llama.ARCHITECTURES},
    **{name: _llama_body(name) for name in llama.BODIES},
    **{name: _llama_classifier(name) for name in llama.CLASSIFIERS},
    whisper.ARCHITECTURE: _WHISPER,
    **{name: _clip(name) for name in clip.ARCHITECTURES},
}
# Architectures by "model_type", for a config.json without "architectures".
_BY_MODEL_TYPE = {
    "gpt2": "GPT2LMHeadModel",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "bert": "BertModel",
    "big_bird": "BigBirdModel",
    "longformer": "LongformerModel",
    "vit": "ViTModel",
    "deit": "DeiTModel",
    "modernbert": "ModernBertModel",
    "whisper": whisper.ARCHITECTURE,
    **t5.MODEL_TYPES,
    **marian.MODEL_TYPES,
    **llama.MODEL_TYPES,
    **clip.MODEL_TYPES,
    **{encoder.MODEL_TYPE: next(iter(encoder.HEADS)) for encoder in ENCODERS},
}


def load(
    path: epath.PathLike,
    *,
    architecture: str | None = None,
    dtype: DTypeLike = jnp.float32,
    allow_nonfinite: bool = False,
    keep_bfloat16: bool = False,
    shardings: Callable[[Any], Any] | None = None,
    on_read: Callable[[int, int], object] | None = None,
) -> Any:
    """Reads a model.

    Args:
      path: a folder with config.json and either model.safetensors or several safetensors files with an index; or a
        folder with a PEFT adapter, which is merged into the model that it names; or, if no such folder exists, the name
        of a model on the Hugging Face hub.
      architecture: a key of `FAMILIES` to load instead of the architecture in config.json, for example the encoder
        without its head, or all heads of a pretraining.
      dtype: dtype of the computation; parameters are converted to float32, unless `keep_bfloat16`.
      allow_nonfinite: whether a parameter may be NaN or infinite.
      keep_bfloat16: whether parameters that are stored as bfloat16 stay so, for inference in half of the memory. With
        `dtype=bfloat16`, outputs are the same.
      shardings: function from the parameters' shapes, nested dictionaries, to their shardings on a mesh, such as
        `lambda params: tfx_jax.training.sharding.state_shardings(params, mesh)`. Each process reads the shards of its
        devices only. None means the default device.
      on_read: called as `on_read(done, total)` after each array, with the number of parameters that are read and that
        exist.

    Returns:
      The model, an instance of `FAMILIES[architecture].model`; see this class for its inputs and outputs.

    Raises:
      UserError: if the folder is damaged, has a parameter that is NaN or infinite, or has an option or tensor that the
        class does not support; if `dtype` is neither float32 nor bfloat16.
    """
    name = _dtype_name(dtype, DTYPES, hint=": activations of T5 and others overflow float16")
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
        graphdef, state, others = nnx.split(abstract, STORED, ...)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    shapes = {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    rows = family.rows(config)
    # A bare encoder or decoder is stored without the prefix.
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors.shapes) else ""
    params: dict[str, Any] = {}
    nonfinite_names: list[str] = []
    done = 0
    total = sum(map(math.prod, shapes.values()))
    try:
        _take_copies({row.tensor for row in rows}, tensors, prefix, family.copies)
        names = {prefix + name for row in rows for name in row.tensor_names(shapes[row.path])}
        _refuse_unknown(set(tensors.shapes) - names, prefix, family.ignored)
        _refuse_other_copies({row.tensor for row in rows}, tensors, prefix, family.copies)
        family.check(config, tensors)
        if isinstance(tensors, peft.AdaptedTensors):
            tensors.check_replaced(names, {row.tensor for row in rows}, prefix, family.copies)
        options: dict[str, Any] = {"keep_bfloat16": keep_bfloat16}
        if shardings is not None:
            options["shardings"] = leaves_by_path(shardings(nnx.to_pure_dict(state)))
        for name, param, new_nonfinite_names in read_params(rows, tensors, prefix, shapes, **options):
            # Wait for each array, so that at most one exists on the host and on the device at the same time.
            _set(params, name, jax.block_until_ready(param if shardings is not None else jax.device_put(param)))
            nonfinite_names += new_nonfinite_names
            if on_read is not None:
                done += param.size
                on_read(done, total)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    if shardings is not None and not allow_nonfinite:
        nonfinite_names = _of_all_processes(nonfinite_names, sorted(tensors.shapes))
    if nonfinite_names and not allow_nonfinite:
        raise nonfinite(dict.fromkeys(nonfinite_names), folder)
    # Variables that are not parameters, such as auxiliary losses, are not in the folder and start at zero.
    for path_of_leaf, leaf in nnx.to_flat_state(others):
        _set(params, "/".join(map(str, path_of_leaf)), jax.device_put(np.zeros(leaf.shape, leaf.dtype)))
    return nnx.merge(graphdef, params)


def _dtype_name(dtype: DTypeLike | None, names: Sequence[str], *, hint: str = "") -> str:
    """Returns the name of a dtype; raises UserError if it is not one of `names`."""
    try:
        name = "None" if dtype is None else jnp.dtype(dtype).name  # NumPy takes None for float64
    except TypeError:
        name = repr(dtype)
    if name not in names:
        raise UserError(f"dtype must be {', '.join(names[:-1])} or {names[-1]}, got {name}{hint}")
    return name


def _of_all_processes(local: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns those of `names` that are in `local` of some process.

    Each process reads only its shards, but all must fail if one finds a value that is not finite.
    """
    if jax.process_count() == 1:
        return list(local)
    flags = multihost_utils.process_allgather(np.array([name in local for name in names]))  # [processes, names]
    return [names[index] for index in np.flatnonzero(np.any(flags, axis=0)).tolist()]


def supported() -> str:
    """Returns a Markdown table of `FAMILIES`: architecture, our class, saved architecture, whether it generates."""
    heading = ("architecture", "loads as", "saves as", "generates")
    lines = [heading, tuple("---" for _ in heading)]
    for name, family in sorted(FAMILIES.items(), key=lambda item: item[0].lower()):
        saved = "T5ForConditionalGeneration" if name == "T5WithLMHeadModel" else name
        lines.append((name, family.model.__name__, saved, "yes" if hasattr(family.model, "decoder") else "no"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load_config(path: epath.PathLike, *, architecture: str | None = None) -> Any:
    """Reads a model's configuration without its parameters; arguments and errors are those of `load`."""
    return _open(base_folder(path), architecture)[1]


def base_folder(path: epath.PathLike) -> epath.Path:
    """Returns the folder of a model; for a folder with an adapter, the folder of the model that the adapter names.

    Raises:
      UserError: if the folder does not exist or cannot be downloaded.
    """
    folder = local_folder(path)
    return local_folder(peft.base_of(folder)) if is_adapter(folder) else folder


def end_ids(path: epath.PathLike) -> tuple[int, ...]:
    """Returns the ids of tokens that end a text, the field `eos_token_id`; see `token_ids`."""
    return token_ids(path, "eos_token_id")


def first_ids(path: epath.PathLike) -> tuple[int, ...]:
    """Returns the ids of tokens that every output begins with, the field `forced_bos_token_id`; see `token_ids`."""
    return token_ids(path, "forced_bos_token_id")


def output_ids(path: epath.PathLike) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `end_ids` and `first_ids`, and warns of fields that forbid tokens, which a `Transcriber` alone reads."""
    file = base_folder(path) / "generation_config.json"
    values = read_json(file) if file.exists() else {}
    unused = [name for name in ("suppress_tokens", "begin_suppress_tokens") if values.get(name)]
    padding = [[values.get("pad_token_id")]]  # what a Marian forbids, and what is never generated anyway
    if values.get("bad_words_ids") not in (None, [], padding):
        unused.append("bad_words_ids")
    for name in unused:
        logging.warning("%s: %s is not used, so these tokens may be generated", file, name)
    return end_ids(path), first_ids(path)


def token_ids(path: epath.PathLike, field: str) -> tuple[int, ...]:
    """Returns a field with one token id or several of generation_config.json or, if unset, of config.json.

    Empty if neither file sets it.

    Raises:
      UserError: if a value is not a token id or a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        file = base_folder(path) / name
        value = read_json(file).get(field) if file.exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(index) is int and index >= 0 for index in ids):
                raise UserError(f"{file}: {field} must be a token id or a list of token ids, got {value!r}")
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
      model: a model of a class in `FAMILIES`; it is not changed. `completed(model)` is written.
      path: the folder, created if needed. Other files than config.json and the weights are kept.
      dtype: dtype of the stored parameters: float32, float16 or bfloat16.
      fields: further fields of config.json, such as "bos_token_id"; they do not override the fields of the model's
        configuration. "architectures" selects among architectures that compute the same, such as Llama and Mistral
        without windows.
      allow_nonfinite: whether a parameter may be NaN or infinite.

    Raises:
      UserError: if the folder cannot be written, `dtype` is another one, or a parameter is too large for it, NaN or
        infinite.
      ValueError: if no family has the model's class, or its architectures cannot express an option of the model.
    """
    dtype_name = _dtype_name(dtype, ("float32", "float16", "bfloat16"))
    model = completed(model)
    family = _family_for(model, fields or {})
    config = family.write_config(model.config)
    state = nnx.state(model, STORED)
    params = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
    rows = family.rows(model.config)
    for name in sorted(params.keys() ^ {row.path for row in rows}):  # in one of both, but not in the other
        raise ValueError(f"either the model or a folder with a {config['architectures'][0]} has no {name}")
    tensors = write_params(rows, params)
    nonfinite_names = [family.prefix + name for name, tensor in tensors.items() if not is_finite(tensor)]
    if nonfinite_names and not allow_nonfinite:
        raise nonfinite(nonfinite_names, f"not written to {path}")
    stored = {family.prefix + name: stored_as(dtype, name, tensor) for name, tensor in tensors.items()}
    # What the model's configuration is read from is written by it alone: a source may spell it in another way.
    names_read = set[str]()
    config_fields = Fields(config, path, names_read=names_read)
    family.read_config(config_fields)
    if family.rows_of is not None:
        family.rows_of(config_fields)
    others = {name: value for name, value in (fields or {}).items() if name not in names_read}
    write_folder(path, {**others, **config, "dtype": dtype_name}, stored)


def completed(model: Any) -> Any:
    """Returns the model that `load` would read after `save`.

    It computes the same, with adapters merged. A GPT or Transformer without biases (`use_bias=False`) gets biases of
    zero, because Hugging Face's models always have them. The features of a Transformer are reordered if its sinusoids
    are interleaved, because Marian has all sines first.

    Raises:
      ValueError: if no family has the model's class, or Marian cannot express a Transformer.
    """
    return _families_of(model)[0].completed(merged(model))


def save_adapter(model: Any, path: epath.PathLike, *, base: str, allow_nonfinite: bool = False) -> None:
    """Writes the adapters and trained heads of a model as a folder that PEFT and `load` can read.

    Args:
      model: a model with adapters (`tfx_jax.nn.adapt`).
      path: the folder, created if needed.
      base: folder, or name on the hub, of the model that was fine-tuned; it must exist. The adapter stores this name.
      allow_nonfinite: whether a parameter may be NaN or infinite.

    Raises:
      UserError: if the folder cannot be written, a parameter is NaN or infinite, or PEFT cannot express an adapter.
      ValueError: if the model has no adapters, or no family has its class.
    """
    adapters = adapters_of(model)
    if not adapters:
        raise ValueError("the model has no adapters: train with config.lora.rank above 0, or save the model itself")
    family = _family_for(model, read_json(base_folder(base) / "config.json"))
    trained = {"/".join(map(str, parts)): leaf for parts, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    heads = [name for name in trained if "_adapter/" not in name]
    params = {"/".join(map(str, parts)): leaf[...] for parts, leaf in nnx.to_flat_state(nnx.state(model))}
    rows = family.rows(model.config)
    is_generator = hasattr(model, "decoder")  # a classifier may have the configuration of a model that generates
    kind = getattr(model.config, "kind", "") if is_generator else ""
    config, tensors = peft.adapter_files(adapters, heads, params, rows, prefix=family.prefix, base=base, kind=kind)
    nonfinite_names = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if nonfinite_names and not allow_nonfinite:
        raise nonfinite(nonfinite_names, f"not written to {path}")
    write_folder(path, config, tensors, names=(peft.CONFIG, peft.WEIGHTS))


def _families_of(model: Any) -> list[Family]:
    """Returns the families with the class of a model; raises ValueError if there are none."""
    families = [family for family in FAMILIES.values() if issubclass(type(model), family.model)]
    if not families:
        raise ValueError(f"{type(model).__name__} has no form in Hugging Face's folders")
    return families


def _family_for(model: Any, fields: Mapping[str, Any]) -> Family:
    """Returns the first family that can express a model, trying the one named in "architectures" of `fields` first.

    Raises:
      ValueError: if there is none.
    """
    families = _families_of(model)
    named = FAMILIES.get(str((fields.get("architectures") or [None])[0]))
    if named in families:
        families = [named, *families]
    family = next((family for family in families if family.fits(model.config)), None)
    if family is None:
        raise ValueError(
            f"no Hugging Face architecture supports {_described(model)}, so the model cannot be written as a folder"
        )
    return family


def _described(model: Any) -> str:
    """Returns what an error says of a model that no folder can express: its attention, if that is not dense."""
    attention = getattr(model.config, "attention", None)
    if attention is None or attention.name == "dense":
        return f"a {type(model).__name__} with these options"
    options = ", ".join(f"{name}={value}" for name, value in attention.options.given.items())
    return f"{attention.name} attention{f' with {options}' if options else ''}"


def _open(folder: epath.Path, architecture: str | None) -> tuple[Family, Any]:
    """Returns the family of a folder, or of `architecture` if given, and the model's configuration."""
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
    """Returns `decoder_start_token_id` of generation_config.json, which overrides config.json; empty if not set."""
    path = folder / "generation_config.json"
    name = "decoder_start_token_id"
    start = read_json(path).get(name) if path.exists() else None
    if start is not None and (type(start) is not int or start < 0):
        raise UserError(f"{path}: {name} is {start!r}, not a token")
    return {} if start is None else {name: start}


def _check_depth(config: Any, tensors: Tensors, folder: epath.Path) -> None:
    """Raises UserError if there are more layers than tensors, before a damaged number of layers takes all memory."""
    count = sum(getattr(config, name, None) or 0 for name in ("num_layers", "num_decoder_layers"))
    if count > len(tensors.shapes) and not getattr(config, "share_layers", False):
        raise UserError(
            f"{folder / 'config.json'} asks for {count:,} layers, but there are {len(tensors.shapes):,} tensors"
        )


def _family_of(values: dict[str, Any], path: epath.Path) -> Family:
    """Returns the family that the fields of a config.json name; `path` is for the error."""
    names = values.get("architectures") or [_BY_MODEL_TYPE.get(str(values.get("model_type")), values.get("model_type"))]
    if not isinstance(names, list) or not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise UserError(f"{path}: the architecture {names!r} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[names[0]]


def _refuse_unknown(names: Collection[str], prefix: str, ignored: Sequence[str]) -> None:
    """Raises UserError for a tensor that no row of the table reads, because its values would be lost.

    Args:
      names: names of the tensors of the folder that no row reads.
      prefix: start of these names that the table omits.
      ignored: patterns of tensors that may be left out.
    """
    pattern = re.compile(f"({re.escape(prefix)})?({'|'.join(ignored)})") if ignored else None
    for name in sorted(names):
        if pattern is None or not pattern.fullmatch(name):
            raise UserError(f"there is a tensor {name}, for which the model has no place")


def _take_copies(table_names: set[str], tensors: Tensors, prefix: str, copies: Sequence[tuple[str, str]]) -> None:
    """Adds the name of a missing original to one of its copies: some writers store only one of several equal tensors.

    Args:
      table_names: names of the tensors in the table.
      tensors: the tensors of the folder; names are added.
      prefix: start of the names in the folder that the table omits.
      copies: pairs (pattern, original) as in `Family`.
    """
    for pattern, original in copies:
        if original in table_names and prefix + original not in tensors.shapes:
            matching = re.compile(f"({re.escape(prefix)})?({pattern})")
            copy = next(
                (name for name in sorted(tensors.shapes.keys() - table_names) if matching.fullmatch(name)), None
            )
            if copy is not None:
                tensors.add_name(prefix + original, copy)


def _refuse_other_copies(
    table_names: set[str], tensors: Tensors, prefix: str, copies: Sequence[tuple[str, str]]
) -> None:
    """Raises UserError if a tensor that should be a copy has other values than its original, which would be lost.

    The arguments are those of `_take_copies`.
    """
    for pattern, original in copies:
        original_name = prefix + original
        if original not in table_names or original_name not in tensors.shapes:
            continue
        for name in sorted(tensors.shapes.keys() - table_names):
            if not re.fullmatch(f"({re.escape(prefix)})?({pattern})", name):
                continue
            original_values, values = tensors.read([original_name, name])
            if not np.array_equal(original_values, values, equal_nan=True):
                raise UserError(
                    f"the tensor {name} has other values than {original_name}, but here they are one shared parameter"
                )


def _set(nested: dict[str, Any], path: str, value: Any) -> None:
    """Sets the entry of a nested dictionary at a path such as "a/b/c"."""
    *folders, name = path.split("/")
    for folder in folders:
        nested = nested.setdefault(folder, {})
    nested[name] = value
