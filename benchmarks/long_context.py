r"""Where does each long-context attention begin to pay? Time and memory against dense attention, by length.

    python benchmarks/long_context.py --output=runs/long_context

prints four tables (causal or not; forward alone or with the backward pass) and writes them as long_context.md, with
long_context.json and .png beside it: eight minutes on two idle cores for the ten functions of the tables; all 22
were not timed. It runs unchanged on an accelerator, where `--dtype=bfloat16` is the usual choice; `--lengths` and
`--functions` choose less.

    python benchmarks/long_context.py --models --output=runs/long_models

measures what is left of that in models: the gradient of the loss of the encoder of Long Range Arena, and of a GPT, on
one text, two layers of d_model 128 with two heads. That takes 40 minutes on a busy core.

One sequence, one head of size 64, normal inputs. "dense" is `dot_product_attention`, compiled by XLA without a fused
kernel; the others have the options of `tfx_jax/planning/attentions.py`, the published ones where there are any. Only
"chunked" computes the same as dense attention: a crossover says nothing about quality.

Time is the median of 3 to 9 runs after one that is not counted, the functions taking turns with dense attention so that
what else the machine does meets them all; a program that needs more than `--seconds` for one run is timed once, one
expected to need more than `--longest` not at all. Memory is what the compiler plans, temporary buffers and results: so
it is known even where the device (of a CPU, what is free of its memory) has no room for it, and the program is not run.

Measured on two cores of an AMD EPYC, other processes of low priority beside it, jax 0.10.2, float32, with
`--lengths=1024,4096,16384,65536 --longest=12 --seconds=1`; milliseconds / MiB, forward and backward, both ways:

    T             1,024         4,096          16,384          65,536      faster from
    dense      9.9 / 17     179 / 260   4,436 / 4,112      - / 65,600
    chunked     10 / 3.4    108 / 13    2,160 / 37         - / 145              4,096
    local      1.5 / 3      3.8 / 12       24 / 48       155 / 192              1,024
    window     3.3 / 8.5     12 / 34       90 / 136      429 / 544              1,024
    bigbird    6.5 / 14      38 / 59      150 / 219      799 / 880              1,024
    lsh         57 / 7      126 / 28      571 / 112    2,290 / 448              4,096
    routing    2.8 / 3.2     11 / 18       73 / 89       457 / 484              1,024
    strided    8.8 / 7.6    120 / 13    1,647 / 37         - / 145              1,024
    sinkhorn   1.9 / 3.3    7.1 / 16       77 / 97       524 / 645              1,024
    favor      5.3 / 5.1     10 / 22       60 / 88       284 / 352              1,024
    linear     1.5 / 1.8    3.3 / 6.1      16 / 24        96 / 97               1,024
    nystrom    2.2 / 3      4.4 / 11       19 / 41       144 / 161              1,024
    linformer  3.7 / 7       12 / 28       63 / 112      363 / 448              1,024

and causal:

    dense      7.3 / 17     160 / 260   2,600 / 4,112      - / 65,600
    chunked    6.0 / 3.4     83 / 13    1,211 / 37         - / 145              1,024
    local      1.5 / 3      4.7 / 12       28 / 48       189 / 192              1,024
    window     2.3 / 6      9.3 / 24       70 / 96       240 / 384              1,024
    lsh         25 / 6.9     97 / 28      422 / 111    1,876 / 444              4,096
    strided    7.1 / 7.7     85 / 13    1,047 / 37         - / 145              1,024
    favor       11 / 5.5     49 / 14      193 / 47       840 / 180              4,096
    linear     5.5 / 3.3     21 / 10       78 / 39       339 / 153              1,024
    retention  1.1 / 3      5.2 / 12       28 / 48       135 / 193              1,024
    gated_linear
               2.7 / 7.2     16 / 29       96 / 115      412 / 458              1,024
    state_space_duality
               1.4 / 4.1    8.0 / 16       56 / 64       200 / 257              1,024
    delta_rule 3.8 / 7       18 / 30      100 / 120      384 / 481              1,024
    gated_delta_rule
               4.2 / 8.1     22 / 34      118 / 136      440 / 546              1,024
    kimi_delta 6.1 / 13      38 / 52      167 / 209      668 / 836              1,024

and causal, those that select keys by content, on two cores of another machine, a shared Intel Xeon at work, with dense
and chunked attention beside them for comparison (* = one run):

    T             1,024         4,096          16,384          65,536      faster from
    dense       23 / 17     318 / 260   6,882*/ 4,112      - / 65,600
    chunked     14 / 3.4    175 / 13    2,360*/ 37    not measured              1,024
    moba       7.2 / 3.9     45 / 15      237 / 61     1,696*/ 243              1,024
    native_sparse
                38 / 15     300 / 67    1,990*/ 269    8,259*/ 1,075            4,096
    indexed     34 / 6.7    562 / 27   12,800*/ 113        - / 450  never to 16,384

All others need less memory from 1,024 tokens on. Dense attention has no room at 65,536; what takes longer than a second
ran once. LSH loses at 1,024 tokens, native sparse attention too. On a GPU: not yet run.

Measured of models (`--models --longest=150`), on one core of another machine, the other core at work, jax 0.10.2,
float32; milliseconds / MiB, from 4,096 tokens mostly of one run. The encoder:

    T          1,024         4,096          16,384          65,536      faster from   smaller from
    dense      342 / 105   3,245 / 1,218     - / 17,540      - / 272,904
    chunked    306 / 57    3,252 / 203   38,818 / 804        - / 3,209        1,024            256
    local      157 / 55      633 / 216    2,977 / 856    9,960 / 3,417          256            256
    window     221 / 74      846 / 290    3,859 / 1,152 15,252 / 4,601        1,024          1,024
    bigbird    309 / 99    1,200 / 412    4,633 / 1,664 22,000 / 6,671        1,024          1,024
    lsh        428 / 58    1,410 / 225    7,932 / 895   31,377 / 3,573        4,096            256
    routing    145 / 57      672 / 235    2,744 / 984   14,872 / 4,346          256            256
    favor      200 / 62      759 / 255    3,270 / 1,013 14,227 / 4,042        1,024          1,024
    linear     164 / 56      666 / 221    2,914 / 878   11,427 / 3,505          256            256
    nystrom    152 / 61      694 / 224    2,392 / 873   10,416 / 3,471        1,024          1,024

and the GPT:

    dense      345 / 106   3,644 / 1,220     - / 17,547      - / 272,936
    chunked    230 / 57    2,319 / 205   20,952 / 812        - / 3,241        1,024            256
    local      156 / 55      571 / 218    2,515 / 864   12,211 / 3,449          256            256
    window     184 / 65      733 / 255    2,989 / 1,012 12,948 / 4,041        1,024          1,024
    lsh        372 / 58    1,302 / 227    5,800 / 903   26,649 / 3,605        4,096            256
    routing    171 / 57      650 / 237    2,736 / 992   14,883 / 4,378          256            256
    favor      291 / 54      974 / 211    4,369 / 837   17,681 / 3,340        1,024          1,024
    linear     201 / 52      706 / 202    2,821 / 800   12,931 / 3,192        1,024            256

A model's crossovers are those of its attention, but what is gained is less: at 4,096 tokens local attention makes a
step 5 to 6 times as fast, not 60 to 160 times. Beyond 4,096 tokens the rest of a model costs most of what a linear
attention leaves, and some 50 KiB a token. Here it showed that chunked attention in a scan over layers held the masks of
all pairs, 19,211 MiB at 65,536 tokens; it does no longer, and its rows were measured after that.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from tfx_jax.functional.attention import SPECS
from tfx_jax.models.gpt import GPT, GPTConfig
from tfx_jax.models.long_encoder import LongEncoder, LongEncoderConfig
from tfx_jax.planning.attentions import ATTENTIONS
from tfx_jax.planning.workloads import attention_program
from tfx_jax.tasks import language_model_loss, long_range_loss

HEAD_SIZE = 64
NUM_HEADS = 2  # heads of a model, with `--models`
FULL = ("dense", "chunked")
SPARSE = ("local", "window", "bigbird", "lsh", "routing", "strided", "sinkhorn", "moba", "native_sparse", "indexed")
LOW_RANK = ("favor", "linear", "nystrom", "linformer")
RECURRENT = ("retention", "gated_linear", "state_space_duality", "delta_rule", "gated_delta_rule", "kimi_delta")
FUNCTIONS = (*FULL, *SPARSE, *LOW_RANK, *RECURRENT)
TABLES = {  # titles by (is_causal, with_gradient)
    (False, False): "Both ways, forward",
    (False, True): "Both ways, forward and backward",
    (True, False): "Causal, forward",
    (True, True): "Causal, forward and backward",
}
MODEL_TABLES = {(False, True): "An encoder, the gradient of a step", (True, True): "A GPT, the gradient of a step"}
Titles = dict[tuple[bool, bool], str]
# Field of `Cell`, factor of the unit, name of the unit.
QUANTITIES = (("seconds", 1e3, "milliseconds"), ("memory", 2**-20, "MiB of temporary buffers and results"))
LEGEND = """Each cell: milliseconds / MiB of temporary buffers and results; * = one run only. In brackets: dense
attention's figure over this one's at the greatest length where both are known."""


@dataclasses.dataclass
class Cell:
    """Time and memory of one function at one length."""

    function: str
    is_causal: bool
    with_gradient: bool
    length: int
    memory: int  # bytes of temporary buffers and results
    times: list[float] = dataclasses.field(default_factory=list)  # seconds of each run
    obstacle: str | None = None  # too much "memory" or "time" to run it

    @property
    def seconds(self) -> float | None:
        """The median of the times; None if the program was not run."""
        return statistics.median(self.times) if self.times else None


Prepared = tuple[jax.stages.Compiled, Sequence[Any]]
"""(compiled program, its arguments)."""


def function_program(name: str, length: int, is_causal: bool, with_gradient: bool, dtype: str) -> Prepared:
    """Compiles an attention function for one sequence.

    The arguments of the program are query, key, value and, for the backward pass, the gradient of the output.
    """
    attend, arrays = ATTENTIONS[name].make(length, 1, HEAD_SIZE), function_inputs(length, dtype)
    return attention_program(attend, is_causal, with_gradient).lower(*arrays).compile(), arrays


@functools.lru_cache(maxsize=1)  # all functions have the same inputs
def function_inputs(length: int, dtype: str) -> Sequence[jax.Array]:
    return list(jnp.asarray(np.random.default_rng(0).normal(size=(4, 1, length, 1, HEAD_SIZE)), dtype))


def model_program(name: str, length: int, is_causal: bool, with_gradient: bool, dtype: str) -> Prepared:
    """Compiles the gradient of the loss of a GPT (if causal) or of the encoder of Long Range Arena on one text.

    The arguments of the program are the parameters and the batch.
    """
    del with_gradient  # models are always measured with gradients
    attend, width = ATTENTIONS[name].make(length, NUM_HEADS, HEAD_SIZE), NUM_HEADS * HEAD_SIZE
    sizes: dict[str, Any] = {"num_layers": 2, "d_model": width, "num_heads": NUM_HEADS, "d_ff": 4 * width}
    sizes |= {"vocab_size": 257, "dropout_rate": 0.0, "dtype": dtype}
    text = jnp.asarray(np.random.default_rng(0).integers(1, 257, (1, length + 1)), jnp.int32)
    kind: Any
    if is_causal:
        kind, config, loss_of = GPT, GPTConfig(**sizes, max_length=length), language_model_loss
        batch = {"inputs": text[:, :-1], "targets": text[:, 1:], "weights": jnp.ones((1, length))}
    else:
        kind, config, loss_of = LongEncoder, LongEncoderConfig(**sizes, labels=("0", "1")), long_range_loss
        batch = {"tokens": text[:, 1:], "label": jnp.ones(1, jnp.int32), "row_weights": jnp.ones(1)}

    def make() -> Any:
        return kind(config, attention_fn=attend, rngs=nnx.Rngs(0))

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_of(nnx.merge(graphdef, params), batch, None).loss

    graphdef, _ = nnx.split(nnx.eval_shape(make))
    params = jax.jit(lambda: nnx.state(make()))()
    return jax.jit(jax.grad(loss)).lower(params, batch).compile(), (params, batch)


def available_memory() -> float:
    """Returns the bytes that a program may use: 90 % of a device's memory, or of the machine's memory that is free."""
    stats = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
    return 0.9 * stats.get("bytes_limit", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def expected_seconds(shorter: dict[int, Cell], length: int) -> float:
    """Predicts the seconds of a run from the runs at shorter lengths.

    Extrapolates the power law of the last two runs, with an exponent between 1 and 2.
    """
    known = [(cell.length, cell.seconds) for cell in shorter.values() if cell.seconds is not None]
    if len(known) < 2:
        return known[0][1] * (length / known[0][0]) ** 2 if known else 0.0
    (length_1, seconds_1), (length_2, seconds_2) = known[-2:]
    power = math.log(seconds_2 / seconds_1) / math.log(length_2 / length_1)
    return seconds_2 * (length / length_2) ** min(max(power, 1.0), 2.0)


def timed(program: jax.stages.Compiled, arrays: Sequence[jax.Array]) -> float:
    """Returns the seconds of one run."""
    start = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    return time.perf_counter() - start


def measure(length: int, table: tuple[bool, bool], earlier: list[Cell], arguments: argparse.Namespace) -> list[Cell]:
    """Compiles every function at one length, then runs all of them in turn.

    Args:
      length: number of tokens.
      table: (is_causal, with_gradient).
      earlier: cells of shorter lengths, for predicting times.
      arguments: options of the command line.

    Returns:
      One cell for each function.
    """
    prepare = model_program if arguments.models else function_program
    cells, runs = [], []
    budget = arguments.seconds
    for name in arguments.functions:
        if (not SPECS[name].causal) if table[0] else SPECS[name].causal_only:
            continue  # it has no such form
        program, arrays = prepare(name, length, *table, arguments.dtype)
        analysis = program.memory_analysis()
        assert analysis is not None  # CPU, GPU and TPU have one
        cell = Cell(name, *table, length, memory=analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
        cells.append(cell)
        if cell.memory > available_memory():
            cell.obstacle = "memory"
        elif expected_seconds(row_of(earlier, name, table), length) > arguments.longest:
            cell.obstacle = "time"
        else:
            warm_up = timed(program, arrays)
            runs.append((cell, (program, arrays), 1 if warm_up > budget else min(max(int(budget / warm_up), 3), 9)))

    turns = max((count for *_, count in runs), default=0)
    for turn in range(turns):
        for cell, prepared, count in runs:
            if turn * count % turns < count:  # true in `count` of the turns, evenly spread
                cell.times.append(timed(*prepared))
    return cells


def row_of(cells: Sequence[Cell], name: str, table: tuple[bool, bool]) -> dict[int, Cell]:
    """Returns the cells of a function in a table, (is_causal, with_gradient), by length."""
    return {c.length: c for c in cells if (c.function, c.is_causal, c.with_gradient) == (name, *table)}


def ratios(dense: dict[int, Cell], row: dict[int, Cell], quantity: str) -> dict[int, float]:
    """Returns dense attention's seconds or memory divided by those of a function, by length.

    The ratio is infinite if dense attention does not fit into the memory.

    Args:
      dense: cells of dense attention by length.
      row: cells of the function by length.
      quantity: "seconds" or "memory".
    """
    result = {}
    for length in row:
        dense_value, value = getattr(dense[length], quantity), getattr(row[length], quantity)
        if value is not None and (dense_value is not None or dense[length].obstacle == "memory"):
            result[length] = math.inf if dense_value is None else dense_value / value
    return result


def crossover(found: dict[int, float]) -> str:
    """Returns the length from which on a function beats dense attention, and its ratio at the greatest known length.

    `found` are the `ratios`.
    """
    if not found:
        return "unknown"
    lost = max((length for length in found if found[length] <= 1), default=0)
    words = f"{min(length for length in found if length > lost):,}" if lost < max(found) else "never"
    last = max((length for length in found if math.isfinite(found[length])), default=None)
    return words if last is None else f"{words} (x {found[last]:,.2f} at {last:,})"


def as_text(cell: Cell) -> str:
    """Returns a cell as "milliseconds / MiB", see LEGEND."""
    shown = [1e3 * (cell.seconds or 0), cell.memory / 2**20]
    time_taken, memory = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in shown]
    return f"{f'too much {cell.obstacle}' if cell.obstacle else time_taken + '*' * (len(cell.times) == 1)} / {memory}"


def report(cells: Sequence[Cell], titles: Titles, device: str) -> str:
    """Returns the tables in Markdown; `titles` are their titles by (is_causal, with_gradient)."""
    lines = ["# Long-context attention against dense attention", "", device, "", LEGEND, ""]
    for table, title in titles.items():
        dense = row_of(cells, "dense", table)
        header = ["T", *(f"{length:,}" for length in dense), "faster from", "smaller from"]
        lines += [f"## {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        for name in FUNCTIONS:
            if row := row_of(cells, name, table):
                wins = [crossover(ratios(dense, row, quantity)) for quantity, *_ in QUANTITIES]
                columns = [name, *map(as_text, row.values()), *(["", ""] if name == "dense" else wins)]
                lines += ["| " + " | ".join(columns) + " |"]
        lines += [""]
    return "\n".join(lines)


def plot(cells: Sequence[Cell], titles: Titles, path: pathlib.Path) -> None:
    """Draws time above and memory below, with a column for each table."""
    figure = Figure(figsize=(3 + 3.5 * len(titles), 7.5), layout="constrained")
    panels = figure.subplots(len(QUANTITIES), len(titles), sharex=True, sharey="row")
    for panels_of_one, (quantity, factor, unit) in zip(panels, QUANTITIES, strict=True):
        for panel, (table, title) in zip(panels_of_one, titles.items(), strict=True):
            panel.set(title=title, xlabel="length T", ylabel=unit)
            panel.label_outer()
            panel.grid(alpha=0.3)
            for index, name in enumerate(FUNCTIONS):
                row = [(c.length, getattr(c, quantity)) for c in row_of(cells, name, table).values()]
                if points := [(length, factor * value) for length, value in row if value is not None]:
                    style = {"color": f"C{index}"} if index else {"color": "black", "linewidth": 3}
                    panel.loglog(*zip(*points, strict=True), marker="o", label=name, **style)
    legend = panels[1, 0].get_legend_handles_labels()  # in this panel every function has a line
    figure.legend(*legend, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)


def lengths(text: str) -> list[int]:
    """Parses numbers separated by commas; returns them sorted."""
    return sorted({int(length) for length in text.split(",")})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for table, data and plot")
    parser.add_argument("--lengths", type=lengths, default="256,1024,4096,16384,65536", help="in tokens, with commas")
    parser.add_argument("--functions", default=",".join(FUNCTIONS), help="with commas; dense always runs")
    parser.add_argument("--models", action="store_true", help="measure the gradients of small models with them")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=1.5, help="for the runs of one cell, as far as three allow it")
    parser.add_argument("--longest", type=float, default=40.0, help="seconds; what must take longer is not run")
    arguments = parser.parse_args(argv)
    chosen = {"dense", *arguments.functions.split(",")}
    if not chosen <= set(FUNCTIONS):
        parser.error(f"unknown functions {sorted(chosen - set(FUNCTIONS))}; there are {', '.join(FUNCTIONS)}")
    arguments.functions = [name for name in FUNCTIONS if name in chosen]
    arguments.output.mkdir(parents=True, exist_ok=True)

    device = f"{jax.devices()[0].device_kind} ({os.cpu_count()} cores), jax {jax.__version__}, {arguments.dtype}"
    titles, cells = MODEL_TABLES if arguments.models else TABLES, []
    for table, title in titles.items():
        for length in arguments.lengths:
            print(f"{title}: {length:,} tokens", file=sys.stderr)
            cells += measure(length, table, cells, arguments)
            # After each length, so that a failure leaves what was measured before it.
            rows = [dataclasses.asdict(cell) | {"seconds": cell.seconds} for cell in cells]
            (arguments.output / "long_context.json").write_text(json.dumps({"device": device, "cells": rows}, indent=1))
            (arguments.output / "long_context.md").write_text(report(cells, titles, device))
    print(report(cells, titles, device))
    plot(cells, titles, arguments.output / "long_context.png")


if __name__ == "__main__":
    main()
