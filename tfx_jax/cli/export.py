"""`tfx-jax export`: writes a model as `jax.export` programs or as ONNX, which run without tfx_jax."""

import pathlib
import sys
from collections.abc import Sequence

import jax
from flax import nnx

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.options import (
    add_folder_options,
    check_local,
    check_one_source,
    load_generating_folder,
    load_model,
    set_up_program,
)
from tfx_jax.errors import UserError
from tfx_jax.hub import local_folder
from tfx_jax.models.export import PLATFORMS, export, export_onnx


def run(argv: Sequence[str]) -> int:
    """Loads a model and exports it."""
    parser = Parser(
        "export",
        "Writes a folder with model.npz, the weights and programs of a model for any batch and length; run.py, which "
        "runs them with jax and flatbuffers on CPUs, GPUs and TPUs; and README.md. A model that generates is exported "
        "as prefill and cached decoding step, any other as one call. With --format=onnx, model.onnx and README.md for "
        "ONNX Runtime: of models that do not generate, such as encoders and classifiers.",
    )
    add_folder_options(parser, "to export")
    parser.add_argument("--output", required=True, help="folder to write, which is empty or does not exist yet")
    parser.add_argument(
        "--format",
        choices=("jax", "onnx"),
        default="jax",
        help="programs of jax.export, or ONNX; %(default)s by default",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the computation; %(default)s by default",
    )
    parser.add_argument("--int8", action="store_true", help="decode with int8 weights: faster, but not exact")
    arguments = parser.parse_args(argv)
    check_one_source(arguments)
    is_onnx = arguments.format == "onnx"
    if is_onnx and (arguments.int8 or arguments.dtype != "float32"):
        raise UserError("--format=onnx is for float32: leave out --int8 and --dtype")
    output = pathlib.Path(check_local(arguments.output, "export"))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output={output} exists and is not an empty folder: name another one")
    set_up_program()
    if arguments.model is not None:
        model, eos_ids, first_ids = load_generating_folder(arguments, local_folder(arguments.model))
    else:
        run, params = load_model(arguments, dtype=arguments.dtype)
        model = nnx.merge(run.graphdef, jax.device_put(params))
        eos_id = getattr(getattr(run.task, "tokenizer", None), "eos_id", None)  # no tokenizer: images
        eos_ids, first_ids = () if eos_id is None else (eos_id,), ()
    if is_onnx:
        export_onnx(model, output)
        print(f"{output}: model.onnx ({(output / 'model.onnx').stat().st_size:,} bytes), README.md", file=sys.stderr)
        return 0
    export(model, output, eos_ids=eos_ids, first_ids=first_ids, int8=arguments.int8)
    size = (output / "model.npz").stat().st_size
    print(f"{output}: model.npz ({size:,} bytes, for {', '.join(PLATFORMS)}), run.py, README.md", file=sys.stderr)
    return 0
