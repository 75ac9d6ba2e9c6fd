"""`tfx-jax bench WHAT [options]`: measures the speed of this machine and compares it with its peak."""

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.cli.support.overrides import OVERRIDES_HELP
from tfx_jax.cli.train import CONFIG_HELP, load_config_file
from tfx_jax.errors import UserError
from tfx_jax.planning import workloads
from tfx_jax.planning.attentions import ATTENTIONS
from tfx_jax.planning.input_pipeline import data
from tfx_jax.planning.measure import SMALLER_WORK, Workload, measured, without_compilation_cache
from tfx_jax.training.guards.memory import out_of_memory_as_user_error

Options = argparse.Namespace


class _Kind(NamedTuple):
    """A benchmark: its summary, its flags, the function that measures it, and whether it takes `--config.` flags."""

    summary: str
    add_options: Callable[[Parser], None]
    measure: Callable[[Options], dict[str, Any]]
    takes_overrides: bool = False


def run(argv: Sequence[str]) -> int:
    """Prints one measurement, and nothing else, to standard output."""
    arguments = list(argv)
    if not arguments or arguments[0].startswith("-"):
        _general_help(arguments)
    name = arguments.pop(0)
    if name not in _KINDS:
        raise UserError(f"cannot measure {name!r}; use one of {', '.join(_KINDS)}")
    kind = _KINDS[name]
    parser = Parser(f"bench {name}", f"Measures {kind.summary}")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (bytes, seconds, FLOP/s) instead of text"
    )
    kind.add_options(parser)
    options, options.overrides = parser.parse_known_args(arguments)
    if options.overrides and not kind.takes_overrides:
        raise UserError(f"unknown argument {options.overrides[0]}; see {parser.prog} --help")
    set_up_program()
    with without_compilation_cache(), out_of_memory_as_user_error(SMALLER_WORK):
        result = {"benchmark": name} | kind.measure(options) | _machine()
    print(json.dumps(result) if options.json else as_text(result))
    return 0


def _general_help(arguments: list[str]) -> NoReturn:
    """Prints the help of `bench` without WHAT and exits; raises UserError unless -h or --help asked for it."""
    if arguments[:1] not in (["-h"], ["--help"]):
        raise UserError(f"name what to measure: one of {', '.join(_KINDS)}")
    parser = Parser("bench", "Measures training, decoding, attention functions or input pipelines on this machine.")
    parser.usage = "tfx-jax bench WHAT [options]"
    summaries = " ".join(f"{name}: {kind.summary}" for name, kind in _KINDS.items())
    parser.add_argument("WHAT", help=f"{summaries} tfx-jax bench WHAT --help lists the options.")
    parser.epilog = "for example: tfx-jax bench train --model=base --batch=16 --length=32 --json"
    parser.print_help()
    parser.exit()


def _machine() -> dict[str, Any]:
    """Returns the values of a measurement that describe the machine."""
    devices = jax.devices()
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "cpu_cores": os.cpu_count(),
        "jax_version": jax.__version__,
    }


def as_text(result: dict[str, Any]) -> str:
    """Formats a measurement for reading, one value per line.

    >>> result = {"model": "base", "median_step_seconds": 0.0123, "flops_per_second": 2.5e11, "utilization": None}
    >>> print(as_text(result))
    model                          base
    median step                    0.0123 s
    flops per second               250 G
    utilization                    unknown
    """
    return "\n".join("{:<30} {}".format(*_line(name, value)) for name, value in result.items())


def _line(name: str, value: Any) -> tuple[str, str]:
    """Returns the pair (label, text) of a value; the suffix of `name` gives its unit."""
    label = name.replace("_", " ")
    if value is None:
        return label.removesuffix(" seconds").removesuffix(" bytes"), "unknown"
    if name.endswith("_seconds"):
        return label.removesuffix(" seconds"), f"{value:.3g} s"
    if name.endswith("_bytes"):
        return label.removesuffix(" bytes"), f"{value / 2**20:,.1f} MiB"
    if "flops" in name:
        return label, f"{value / 1e9:,.4g} G"
    if name == "utilization" or name.endswith("_share"):
        return label, f"{100 * value:.1f} %"
    if isinstance(value, bool):
        return label, "yes" if value else "no"
    return label, f"{value:,.0f}" if isinstance(value, int | float) else value


def _add_common_options(parser: Parser, steps: int) -> None:
    """Adds --steps, which is `steps` by default, and --dtype."""
    parser.add_argument(
        "--steps", type=at_least_one, default=steps, help="number of timed steps; %(default)s by default"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the computation; %(default)s by default",
    )


def _add_model_options(parser: Parser, steps: int) -> None:
    """Adds the flags of `bench train` and `bench decode`; `steps` is the default of --steps."""
    parser.add_argument(
        "--model", choices=tuple(workloads.MODELS), default="tiny", help="size of the model; %(default)s by default"
    )
    parser.add_argument("--batch", type=at_least_one, default=16, help="sentences per batch; %(default)s by default")
    parser.add_argument(
        "--length",
        type=at_least_one,
        default=32,
        help="tokens per target sentence, without padding; %(default)s by default",
    )
    _add_common_options(parser, steps)


def _measured(workload: Workload, options: Options, **settings: Any) -> dict[str, Any]:
    """Times a workload, and returns the settings with the result."""
    settings |= {"dtype": options.dtype}
    return settings | measured(workload, steps=options.steps, dtype=options.dtype)


def _train(options: Options) -> dict[str, Any]:
    """Measures `bench train`."""
    model, batch, length = options.model, options.batch, options.length
    workload = workloads.training_workload(workloads.MODELS[model](dtype=options.dtype), batch=batch, length=length)
    return _measured(workload, options, model=model, batch=batch, length=length)


def _add_step_options(parser: Parser) -> None:
    """Adds the flags of `bench step`."""
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument("--steps", type=at_least_one, default=10, help="number of timed steps; %(default)s by default")
    parser.epilog = OVERRIDES_HELP


def _step(options: Options) -> dict[str, Any]:
    """Measures `bench step`, and adds the time and memory that the plan predicts."""
    config = load_config_file(options.config, options.overrides)
    workload, plan = workloads.planned_training_workload(config)
    predicted = {
        "predicted_step_seconds": plan.predicted_step_seconds,
        "prediction_is_bound": plan.is_bound,
        "predicted_memory_bytes": plan.peak_bytes,
    }
    dtype = getattr(config.model, "dtype", "float32")
    return {"config": options.config} | predicted | measured(workload, steps=options.steps, dtype=dtype)


def _add_decode_options(parser: Parser) -> None:
    """Adds the flags of `bench decode`."""
    _add_model_options(parser, steps=5)
    parser.add_argument(
        "--beam", type=at_least_one, default=4, help="beam width (hypotheses per sentence); %(default)s by default"
    )
    parser.add_argument(
        "--source-length", type=at_least_one, default=32, help="tokens per source sentence; %(default)s by default"
    )
    parser.add_argument("--int8", action="store_true", help="decode with int8 weights")


def _decode(options: Options) -> dict[str, Any]:
    """Measures `bench decode`."""
    sizes = {"batch": options.batch, "source_length": options.source_length, "length": options.length}
    model = workloads.MODELS[options.model](dtype=options.dtype)
    workload = workloads.decoding_workload(model, beam_size=options.beam, int8=options.int8, **sizes)
    return _measured(workload, options, model=options.model, beam=options.beam, int8=options.int8, **sizes)


def _add_attention_options(parser: Parser) -> None:
    """Adds the flags of `bench attention`."""
    parser.add_argument(
        "--function",
        required=True,
        choices=tuple(ATTENTIONS),
        help="attention function to measure; dense is dot_product_attention",
    )
    parser.add_argument(
        "--length", type=at_least_one, default=1_024, help="tokens per sequence; %(default)s by default"
    )
    parser.add_argument("--batch", type=at_least_one, default=1, help="sequences per batch; %(default)s by default")
    parser.add_argument(
        "--heads", type=at_least_one, default=8, help="number of attention heads; %(default)s by default"
    )
    parser.add_argument("--head-size", type=at_least_one, default=64, help="features per head; %(default)s by default")
    parser.add_argument("--causal", action="store_true", help="apply a causal mask")
    parser.add_argument(
        "--forward", action="store_true", help="measure the forward pass only, without the backward pass"
    )
    _add_common_options(parser, steps=10)


def _attention(options: Options) -> dict[str, Any]:
    """Measures `bench attention`."""
    sizes = {"batch": options.batch, "length": options.length}
    workload = workloads.attention_workload(
        options.function,
        num_heads=options.heads,
        head_size=options.head_size,
        is_causal=options.causal,
        with_gradient=not options.forward,
        dtype=options.dtype,
        **sizes,
    )
    settings = {"function": options.function, "heads": options.heads, "head_size": options.head_size, **sizes}
    return _measured(workload, options, **settings, causal=options.causal, backward=not options.forward)


def _add_data_options(parser: Parser) -> None:
    """Adds the flags of `bench data`."""
    parser.add_argument("--config", required=True, help=CONFIG_HELP)
    parser.add_argument(
        "--workdir",
        help="folder of a run whose tokenizer is used; by default a tokenizer is trained, and its training timed",
    )
    parser.add_argument(
        "--steps", type=at_least_one, default=200, help="number of batches to read; %(default)s by default"
    )
    parser.epilog = "--config.FIELD=VALUE overrides a field, for example --config.task.data.sort_buffer=4096"


def _data(options: Options) -> dict[str, Any]:
    """Measures `bench data`, with a tokenizer in a temporary folder unless --workdir names a run."""
    config = load_config_file(options.config, options.overrides)
    with contextlib.ExitStack() as stack:
        workdir = options.workdir or stack.enter_context(tempfile.TemporaryDirectory())
        return {"config": options.config} | data(config, workdir, steps=options.steps)


_KINDS = {
    "train": _Kind(
        "one training step of a translation model.",
        add_options=lambda parser: _add_model_options(parser, steps=10),
        measure=_train,
    ),
    "step": _Kind(
        "a training step of an experiment, compared with the prediction of tfx-jax plan.",
        add_options=_add_step_options,
        measure=_step,
        takes_overrides=True,
    ),
    "decode": _Kind(
        "beam search over a batch with random weights; all targets have one length.",
        add_options=_add_decode_options,
        measure=_decode,
    ),
    "attention": _Kind(
        "one attention function, forward and backward.", add_options=_add_attention_options, measure=_attention
    ),
    "data": _Kind(
        "the input pipeline of an experiment.", add_options=_add_data_options, measure=_data, takes_overrides=True
    ),
}
