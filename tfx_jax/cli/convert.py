"""`tfx-jax convert`: rewrites a Hugging Face folder, or exports a model trained with tfx_jax as one."""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.model_card import NAME, folder_card, run_card, weights_line, write_card
from tfx_jax.cli.support.options import add_folder_options, check_local, check_one_source, load_trained, set_up_program
from tfx_jax.cli.support.progress import Progress
from tfx_jax.data.tokenizers.hf_tokenizer import TEMPLATE_FILES, TOKENIZER_FILES, HFTokenizer, write_template
from tfx_jax.errors import UserError
from tfx_jax.files import read_small_file
from tfx_jax.hub import check_upload, local_folder, upload
from tfx_jax.models import hf
from tfx_jax.models.hf.folder import Tensors, read_json
from tfx_jax.training.checkpoint.base import absolute_source
from tfx_jax.training.checkpoint.checkpoints import best_or_latest_step
from tfx_jax.training.config import load_config
from tfx_jax.training.workdir import is_workdir

_DTYPES = ("float32", "float16", "bfloat16")
# Files that are copied in addition to config.json and the weights.
_COPIED = (*TOKENIZER_FILES, *TEMPLATE_FILES, "generation_config.json", "preprocessor_config.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf")
_PARTS = ("model.safetensors.index.json", "model-*-of-*.safetensors")  # which transformers would prefer
# Fields of config.json that describe the history or storage of the source folder, or that name code.
_DROPPED = {"dtype", "torch_dtype", "transformers_version", "auto_map", "quantization_config"}


def run(argv: Sequence[str]) -> int:
    """Converts a model, reads the written folder back to verify it, and prints a summary to stderr."""
    parser = Parser(
        "convert",
        "Reads a Hugging Face folder in any layout (one or several weight files, old or new formats), or a model "
        "trained with tfx_jax, and writes a clean folder: config.json, model.safetensors, the tokenizer and a model "
        "card, README.md. No code from the source folder is executed.",
    )
    add_folder_options(parser, "to convert")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="dtype of the weights in the written file; %(default)s by default",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is already in the output folder")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a --workdir trained with config.lora, write only the adapters, as a PEFT folder; merged by default",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the folder to this model of the Hugging Face hub; a new one is private",
    )
    parser.add_argument("--json", action="store_true", help="also print one JSON object to standard output")
    arguments = parser.parse_args(argv)
    check_one_source(arguments)
    if arguments.push is not None:
        check_upload(arguments.push)
    set_up_program()
    if arguments.adapter:
        return _write_adapter(arguments, argv)
    options = {"dtype": arguments.dtype, "allow_nonfinite": arguments.allow_nonfinite}
    output = pathlib.Path(check_local(arguments.output, "convert"))
    progress = Progress("read {} parameters")
    progress.stage(f"reading {arguments.model or arguments.workdir}")
    if arguments.workdir is not None:
        _check_output(source=None, output=output, allowed=arguments.overwrite)
        trained, tokenizer = load_trained(arguments)
        try:
            model = hf.completed(trained)
        except ValueError as error:
            raise UserError(f"{arguments.workdir}: {error}") from None
        # Other programs read from these fields where a generated text ends.
        special_ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("bos", "eos")}
        fields = {name: index for name, index in special_ids.items() if index is not None}
        _save(model, output, fields, options, progress)
        copied = _copy(epath.Path(arguments.workdir) / "tokenizer", output)
        left_out, source_bytes = [], None
        _write_special_tokens(output, tokenizer, model.config.kind)
    else:
        source = pathlib.Path(hf.base_folder(check_local(arguments.model, "convert")))
        _check_output(source, output, allowed=arguments.overwrite)
        source_fields = _config(source)
        model = hf.load(arguments.model, allow_nonfinite=arguments.allow_nonfinite, on_read=progress.update)
        # Names that begin with "_" are private fields of transformers, such as "_name_or_path".
        fields = {
            name: value for name, value in source_fields.items() if not (name in _DROPPED or name.startswith("_"))
        }
        _save(model, output, fields, options, progress)
        copied = _copy(source, output)
        source_bytes = Tensors(source).num_bytes
        left_out = _left_out(source, output, hf.FAMILIES[_config(output)["architectures"][0]])
    _verify(model, output, arguments.dtype)
    progress.clear()
    architecture = _config(output)["architectures"][0]
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, hf.STORED)))
    weights = weights_line(architecture, num_parameters, arguments.dtype)
    if arguments.workdir is not None:
        card = _card_of_run(arguments, argv, output, weights, architecture)
    else:
        card = folder_card(
            output.name,
            weights,
            source=None if hf.is_adapter(local_folder(arguments.model)) else source,
            name=arguments.model,
            architecture=architecture,
            argv=argv,
        )
    write_card(output, card)
    summary = {
        "architecture": architecture,
        "parameters": num_parameters,
        "dtype": arguments.dtype,
        "bytes_before": source_bytes,
        "bytes_after": Tensors(output).num_bytes,
        "output": str(output),
        "files": ["config.json", "model.safetensors", *copied, NAME],
        "left_out": left_out,
    }
    written_bytes = f"{summary['bytes_after']:,}"
    sizes = f"{written_bytes} bytes" if source_bytes is None else f"{source_bytes:,} bytes before, {written_bytes}"
    print(
        f"{summary['architecture']}: {summary['parameters']:,} parameters; {sizes} as {arguments.dtype}",
        file=sys.stderr,
    )
    print(f"{output}: {', '.join(summary['files'])}; verified by reading it back", file=sys.stderr)
    if left_out:
        others = f" and {len(left_out) - 3:,} more" if len(left_out) > 3 else ""
        reasons = "copies, constants, or parts of another architecture"
        print(f"tensors left out ({reasons}): {', '.join(left_out[:3])}{others}", file=sys.stderr)
    return _finish(arguments, summary)


def _finish(arguments: argparse.Namespace, summary: dict[str, Any]) -> int:
    """Uploads the files of `summary` with --push, and prints it with --json."""
    if arguments.push is not None:
        summary["url"] = upload(pathlib.Path(summary["output"]), arguments.push, summary["files"])
        print(f"uploaded to {summary['url']}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(summary))
    return 0


def _card_of_run(
    arguments: argparse.Namespace, argv: Sequence[str], output: pathlib.Path, weights: str, architecture: str
) -> str:
    """Returns the model card of the run that --workdir and --step name; see `run_card`."""
    step = best_or_latest_step(arguments.workdir) if arguments.step is None else arguments.step
    return run_card(
        output.name,
        weights,
        arguments.workdir,
        checkpoint=f"step {step:,}" if isinstance(step, int) else step,
        init_from=load_config(arguments.workdir).init_from,
        architecture=architecture,
        argv=argv,
    )


def _write_adapter(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Writes the adapters of a run as a PEFT folder, with the tokenizer and a model card."""
    if arguments.workdir is None:
        raise UserError("--adapter needs the --workdir of a run trained with config.lora, not --model")
    if arguments.dtype != "float32":
        raise UserError(f"--adapter writes float32: leave out --dtype={arguments.dtype}")
    output = pathlib.Path(check_local(arguments.output, "convert"))
    base = load_config(arguments.workdir).init_from
    if base and is_workdir(local_folder(base)):
        raise UserError(
            f"the run started from the workdir {base}, and PEFT needs a Hugging Face folder: leave out --adapter, and "
            "the adapters are merged"
        )
    _check_output(source=None, output=output, allowed=arguments.overwrite)
    model, _ = load_trained(arguments)
    base_name = absolute_source(base)
    try:
        hf.save_adapter(model, output, base=base_name, allow_nonfinite=arguments.allow_nonfinite)
    except ValueError as error:
        raise UserError(f"{arguments.workdir}: {error}") from None
    weights = "adapter_model.safetensors"
    _remove(output, "config.json", "model.safetensors", *_PARTS)
    files = ["adapter_config.json", weights, *_copy(epath.Path(arguments.workdir) / "tokenizer", output), NAME]
    description = "Weights: adapters, float32, of the model that adapter_config.json names."
    write_card(output, _card_of_run(arguments, argv, output, description, architecture=""))
    size = (output / weights).stat().st_size
    summary = {"base": base_name, "bytes_after": size, "output": str(output), "files": files}
    print(f"adapters of {base_name}: {size:,} bytes; {output}: {', '.join(files)}", file=sys.stderr)
    return _finish(arguments, summary)


def _save(
    model: Any, output: pathlib.Path, fields: dict[str, Any], options: dict[str, Any], progress: Progress
) -> None:
    """Writes config.json, with additional `fields`, and the weights; `options` are further arguments of `hf.save`."""
    progress.stage(f"writing {output}")
    try:
        hf.save(model, output, fields=fields, **options)
    except ValueError as error:
        raise UserError(f"{output}: {error}") from None
    _remove(output, *_PARTS, "adapter_config.json", "adapter_model.safetensors")


def _check_output(source: pathlib.Path | None, output: pathlib.Path, *, allowed: bool) -> None:
    """Raises UserError if `output` cannot be written to, or holds a model and `allowed` (--overwrite) is False."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output={output} is a file: name a folder")
    if source is not None and source.exists() and output.samefile(source):
        raise UserError(f"--output={output} is the folder that --model reads: name another folder")
    if allowed:
        return
    for pattern in ("config.json", *_COPIED, *_WEIGHTS, NAME):
        for path in sorted(output.glob(pattern)):
            raise UserError(f"--output={output} already contains {path.name}: name another folder, or add --overwrite")


def _copy(source: pathlib.Path | epath.Path, output: pathlib.Path) -> list[str]:
    """Copies the files of `_COPIED` and returns their names; first deletes such files of another model in `output`."""
    names = [name for name in _COPIED if (source / name).is_file()]
    try:
        for name in _COPIED:
            (output / name).unlink(missing_ok=True)
        for name in names:
            (output / name).write_bytes(read_small_file(source / name))
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error}") from None
    return names


def _write_special_tokens(output: pathlib.Path, tokenizer: HFTokenizer, kind: str) -> None:
    """Makes the written tokenizer add the special tokens that training added: [CLS] ... [SEP] (BERT) or a final EOS."""
    # For each kind of model, the tokens to add before and after a text; None: no such token.
    first, last = {
        "bert": (tokenizer.cls_id, tokenizer.sep_id),
        "encoder_decoder": (None, tokenizer.eos_id),
    }.get(kind, (None, None))
    if last is not None:
        write_template(output, tokenizer, first=first, last=last)


def _remove(output: pathlib.Path, *patterns: str) -> None:
    """Deletes files of an earlier model."""
    for pattern in patterns:
        for path in output.glob(pattern):
            path.unlink()


def _left_out(source: pathlib.Path, output: pathlib.Path, family: hf.Family) -> list[str]:
    """Returns the current names of the source's tensors that were not written because the model does not use them."""

    def tensor_names(folder: pathlib.Path) -> set[str]:
        return {name.removeprefix(family.prefix) for name in Tensors(folder, family.renamed).shapes}

    return sorted(tensor_names(source) - tensor_names(output))


def _verify(model: Any, output: pathlib.Path, dtype: str) -> None:
    """Reads the written folder back and compares parameters, bit for bit, and configuration with the model.

    Raises:
      UserError: if they differ.
    """
    progress = Progress("read {} parameters again")
    progress.stage(f"reading {output} again")
    # Non-finite parameters were rejected or allowed before writing.
    read_back = hf.load(output, allow_nonfinite=True, on_read=progress.update)
    progress.clear()
    written_params = jax.tree.leaves(nnx.state(model, hf.STORED))
    read_params = jax.tree.leaves(nnx.state(read_back, hf.STORED))
    stored_dtype = jax.numpy.dtype(dtype)
    is_equal = all(
        np.array_equal(np.asarray(written).astype(stored_dtype), np.asarray(read).astype(stored_dtype), equal_nan=True)
        for written, read in zip(written_params, read_params, strict=True)
    )
    # Compares the fields of config.json: it has no initializers and does not say whether d_ff was given or 4 * d_model.
    write_fields = hf.FAMILIES[_config(output)["architectures"][0]].write_config
    if write_fields(read_back.config) != write_fields(model.config) or not is_equal:
        raise UserError(f"{output} differs from the model when read back: delete it, check the disk and convert again")


def _config(folder: pathlib.Path) -> dict[str, Any]:
    return read_json(epath.Path(folder) / "config.json")
