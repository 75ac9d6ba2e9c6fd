"""The sections of `benchmarks.card`: `python -m benchmarks.card.sections NAME OPTIONS`, with OPTIONS as JSON.

A section prints each of its rows as a line of JSON as soon as it is measured; whatever else a library prints goes to
standard error.
"""

import dataclasses
import io
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from benchmarks.peers.machine import version
from benchmarks.peers.measure import Result, Row, measure
from benchmarks.peers.rows import attention_row, decoding_row, generating_row, gpt_training_row, training_row
from benchmarks.peers.worker import cores

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
_SAVING = 20.0  # seconds in which a run that is told to end saves

# Programs whose step is predicted and measured, with their overrides; those that say most about the prediction first.
_TOKENS = "--config.task.data.tokens_per_batch"
_LOOP = "--config.model.unroll=False"  # which compiles in a fraction of the time, and there are ten minutes in all
PROGRAMS = {
    "full": (
        ("transformer_wmt14_ende:big", "--config.model.dtype=bfloat16", f"{_TOKENS}=16384"),
        ("gpt_wikitext2:base", _LOOP, f"{_TOKENS}=32768"),
        ("transformer_wmt14_ende:base", "--config.model.dtype=bfloat16", f"{_TOKENS}=32768"),
        ("bert_wikitext2:base", _LOOP),
        ("vit_digits:b16", _LOOP),
        ("t5_wikitext2:small", _LOOP, f"{_TOKENS}=32768"),
        ("gpt_char_tinyshakespeare:full", _LOOP),
        ("transformer_xl_char_tinyshakespeare:full", _LOOP),
    ),
    "tiny": (("gpt_char_tinyshakespeare:test",),),
}
# Trainings, the folder below --data-dir in which their files may be, and the file by which it is recognized.
RUNS = {
    "full": (
        ("gpt_char_tinyshakespeare:full", "tinyshakespeare", "input.txt"),
        ("transformer_tiny_multi30k:paper", "multi30k-bpe", "train.en.gz"),
    ),
    "tiny": (("gpt_char_tinyshakespeare:test", "", ""),),
}

Options = dict[str, Any]


def machine(options: Options) -> Iterator[dict[str, Any]]:
    """Yields devices and versions."""
    import jax

    device = jax.devices()[0]
    yield {
        "row": "machine",
        "device": device.device_kind,
        "devices": jax.device_count(),
        "has_accelerator": device.platform in ("gpu", "tpu"),
        "cores": cores(),
        "python": platform.python_version(),
        **{name: version(name) or "none" for name in _PACKAGES},
    }


def correctness(options: Options) -> Iterator[dict[str, Any]]:
    """Yields errors of attention."""
    from benchmarks.card import correctness

    yield from correctness.rows(options["size"])


def prediction(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what `tfx-jax bench step` says of programs; where the prediction is a bound, no step takes less."""
    import jax

    from tfx_jax.cli import bench

    for config, *overrides in PROGRAMS[options["size"]]:
        output = io.StringIO()
        try:
            with redirect_stdout(output):
                bench.run(["step", f"--config={config}", "--steps=5", "--json", *overrides])
        except Exception as error:
            yield {"row": config, "outcome": f"failed: {' '.join(str(error).split())}"}
            continue
        found = json.loads(output.getvalue())
        predicted, measured = found["predicted_step_seconds"], found["median_step_seconds"]
        row = {
            "row": config,
            "predicted ms": None if predicted is None else 1e3 * predicted,
            "is bound": found["prediction_is_bound"],
            "measured ms": 1e3 * measured,
            "measured / predicted": None if predicted is None else measured / predicted,
            "tokens/s": found["target_tokens_per_second"],
            "matmul utilization": found["utilization"],
            "compile s": found["compile_seconds"],
        }
        if found["peak_memory_source"] != "device":  # a device's peak is that of all programs so far
            row["GiB"] = found["peak_memory_bytes"] / 2**30
        yield row | {"outcome": "measured"}
        jax.clear_caches()


def compared_rows(section: str, size: str, output: pathlib.Path) -> list[Row]:
    """Returns the comparisons of a section; `output` is the folder for weights that sides share."""
    full: dict[str, list[Row]] = {
        "training": [
            gpt_training_row("gpt2", 16, 1_024, "bfloat16", target=1.0),
            training_row("train_big", "big", 128, 64, "bfloat16", target=1.0),
            training_row("train_base", "base", 256, 64, "bfloat16", target=1.0),
        ],
        "decoding": [
            generating_row("gpt2", 1, "bfloat16", output),
            decoding_row("decode_base", "base", 128, "bfloat16", targets=(None, 1.0)),
            generating_row("llama", 1, "bfloat16", output),
            generating_row("gpt2", 32, "bfloat16", output),
            generating_row("llama", 32, "bfloat16", output),
        ],
        "attention": [
            attention_row(length, is_causal, "bfloat16")
            for length, is_causal in ((4_096, True), (1_024, True), (16_384, True), (65_536, True), (4_096, False))
        ],
    }
    sizes = {"prompt_length": 4, "length": 6}
    tiny: dict[str, list[Row]] = {
        "training": [
            gpt_training_row("gpt2_small", 2, 16, "float32", target=1.0),
            training_row("train_small", "small", 2, 8, "float32", target=1.0),
        ],
        "decoding": [
            *(generating_row(name, 1, "float32", output, **sizes) for name in ("llama_small", "gpt2_small")),
            decoding_row("decode_small", "small", 2, "float32", targets=(None, 1.0)),
        ],
        "attention": [attention_row(64, True, "float32")],
    }
    return (full if size == "full" else tiny)[section]


def training(options: Options) -> Iterator[dict[str, Any]]:
    """Yields training steps beside PyTorch's."""
    yield from _compared("training", options, unneeded=("PyTorch eager",))


def decoding(options: Options) -> Iterator[dict[str, Any]]:
    """Yields beam search and greedy generation beside those of transformers."""
    yield from _compared("decoding", options, unneeded=("CTranslate2 float32", "CTranslate2 bfloat16"))


def attention(options: Options) -> Iterator[dict[str, Any]]:
    """Yields forward and backward passes of attention beside PyTorch's."""
    yield from _compared("attention", options)


def _compared(section: str, options: Options, unneeded: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yields a row for each side of each comparison; those after the first side have the ratio to it."""
    from tfx_jax.training.reporting.meter import peak_flops

    is_full, logs = options["size"] == "full", pathlib.Path(options["output"]) / "logs"
    # This process must not take the device's memory from those of the sides, so it asks JAX nothing.
    peak = peak_flops([options["device"]])
    timing = {"rounds": 3, "turn_seconds": 0.5} if is_full else {"rounds": 1, "turn_seconds": 0.0}
    for row in compared_rows(section, options["size"], pathlib.Path(options["output"]) / "models"):
        sides = tuple(side for side in row.sides if side.label not in unneeded)
        result = measure(dataclasses.replace(row, sides=sides), logs, compiles_together=is_full, **timing)
        yield from sides_of(result, peak)


def sides_of(result: Result, peak: float | None) -> Iterator[dict[str, Any]]:
    """Yields what was measured of each side of a row.

    Args:
      result: the measurement.
      peak: FLOP/s of the device, for the utilization where our side counts its FLOPs; None if unknown.
    """
    ours = result.row.sides[0].label
    flops = result.about.get(ours, {}).get("flops")
    for side in result.row.sides:
        found = {"row": result.row.title, "unit": result.row.unit, "side": side.label}
        if side.label in result.skipped:
            yield found | {"outcome": _reason(result.skipped[side.label])}
            continue
        if not result.samples.get(side.label):
            yield found | {"outcome": f"not measured without {ours}"}
            continue
        speed = statistics.median(result.speeds(side.label))
        seconds = result.work[side.label] / speed
        found |= {"units/s": speed, "ms": 1e3 * seconds}
        if flops and peak:
            found["MFU"] = flops / seconds / peak
        if side.label != ours:
            ratios = result.ratios(side.label)
            found |= {"ours / this": statistics.median(ratios), "range": f"{min(ratios):.2f} to {max(ratios):.2f}"}
        yield found | {"outcome": "measured"}


def _reason(text: str) -> str:
    return "no PyTorch" if text.startswith("torch") and text.endswith("not installed") else text


def runs(options: Options) -> Iterator[dict[str, Any]]:
    """Yields how far trainings got, each in an equal part of the time that remains."""
    deadline = options["ends"] - _SAVING
    planned = RUNS[options["size"]]
    for index, (config, folder, file) in enumerate(planned):
        arguments = ["train", f"--config={config}", f"--workdir={options['output']}/runs/{config.replace(':', '_')}"]
        if file:
            data_dir = _folder_with(file, folder, options["data_dir"])
            if data_dir is None:
                yield {"row": config, "outcome": f"not run: no {file} in --data-dir"}
                continue
            arguments += [f"--config.task.data.data_dir={data_dir}"]
        seconds = max(deadline - time.time(), 1.0) / (len(planned) - index)
        yield {"row": config} | train(arguments, seconds, pathlib.Path(options["output"]) / "logs" / f"run_{index}.log")


def _folder_with(file: str, folder: str, data_dir: str | None) -> str | None:
    """Returns `data_dir`, or its folder `folder`, if it has the file; else None."""
    candidates = [] if data_dir is None else [pathlib.Path(data_dir) / folder, pathlib.Path(data_dir)]
    return next((str(path) for path in candidates if (path / file).exists()), None)


def train(arguments: Sequence[str], seconds: float, log: pathlib.Path) -> dict[str, Any]:
    """Runs `tfx-jax train` for a time, and returns how it ended with the last line that it logged of a step."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "tfx_jax", *arguments], stdout=output, stderr=output)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it saves, and resumes when it is run again
            try:
                status = process.wait(_SAVING)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    outcomes = {
        0: "complete",
        128 + signal.SIGTERM: "stopped and saved at its limit",
        -signal.SIGTERM: "stopped at its limit before the first step",
    }
    steps = [line for line in lines if line.startswith("step ")]
    return {
        "seconds": time.monotonic() - start,
        "last step": steps[-1] if steps else "none",
        "outcome": outcomes.get(status) or f"failed with status {status}: {lines[-1] if lines else ''}",
    }


SECTIONS: dict[str, Callable[[Options], Iterator[dict[str, Any]]]] = {
    "machine": machine,
    "correctness": correctness,
    "prediction": prediction,
    "training": training,
    "decoding": decoding,
    "attention": attention,
    "runs": runs,
}


def main() -> None:
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for row in SECTIONS[sys.argv[1]](json.loads(sys.argv[2])):
        rows.write(json.dumps(row) + "\n")
        rows.flush()


if __name__ == "__main__":
    main()
