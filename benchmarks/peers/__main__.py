r"""Are we faster than what a user would otherwise run? Paired comparisons, by one command.

    python -m benchmarks.peers --output=runs/peers --data-dir=DIR

from the root of the repository prints a table and writes it as peers.md, with every sample in peers.json and a figure
in peers.png. `--page=docs/speed.md` also writes the table into that page's section on this make of processor or
accelerator. `--only=train_base,decode_base` chooses rows, `--list` names them, `--device=gpu` takes bfloat16, the big
model and longer sequences. DIR holds train.en.gz and train.de.gz of Multi30k with BPE applied, as for
experiments/transformer_tiny_multi30k.py. Rows whose peer, data or device is missing are listed with the reason.

The peers are no dependencies of ours. For a CPU, beside an installed tfx_jax (PyTorch's build for CPUs first:
transformers alone would draw the one for CUDA):

    pip install torch==2.13.0
    pip install transformers==5.23.0 ctranslate2==4.8.5

for a GPU `pip install "jax[cuda13]" torch transformers ctranslate2`. PyTorch's compiler also needs a C++ compiler.

Every side is a process of its own, which has compiled and warmed up before the first round and sleeps while the others
have their turn; all may use all cores. Figures are medians of ratios inside rounds (see `measure`): the machine's noise
meets both sides. Sides do the same work: equal sizes, vocabulary, batch, dropout, precision and output length. What
each of them is, is said where it is built: `ours`, `text`, `torch_peers`, `torch_recurrent`,
`torch_recurrences`, `translators`, `linen`, `startup`.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.peers.machine import description, processor
from benchmarks.peers.measure import measure
from benchmarks.peers.report import as_json, draw, table, with_section
from benchmarks.peers.rows import all_rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.peers", allow_abbrev=False)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("runs/peers"), help="folder for the results"
    )
    parser.add_argument("--data-dir", default="", help="folder of Multi30k's train.en.gz and train.de.gz, BPE applied")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", default="", help="rows, separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--turn-seconds", type=float, default=1.0, help="how long a turn lasts, if a unit is shorter")
    parser.add_argument("--page", type=pathlib.Path, help="page of which to replace this machine's section")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    arguments = parser.parse_args(argv)

    rows = all_rows(arguments.device, arguments.data_dir, arguments.output.resolve())
    names = [row.name for row in rows]
    if arguments.list:
        print("\n".join(f"{row.name:<24} {row.title}" for row in rows))
        return 0
    wanted = arguments.only.split(",") if arguments.only else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"unknown row {', '.join(unknown)}; there are {', '.join(names)}")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.page is not None:
        if arguments.only:
            parser.error("--page replaces all rows of this machine: leave --only out")
        if not arguments.page.is_file():
            parser.error(f"--page: {arguments.page} is not a file")
        try:
            with_section(arguments.page.read_text(), "", "")
        except ValueError as error:
            parser.error(f"--page: {error}")

    arguments.output.mkdir(parents=True, exist_ok=True)
    results = []
    for row in rows:
        if row.name in wanted:
            print(f"{row.name}: {row.title}", file=sys.stderr, flush=True)
            logs = arguments.output / "logs"
            results.append(measure(row, logs, rounds=arguments.rounds, turn_seconds=arguments.turn_seconds))
            # After each row, so that one who stops early keeps the rows so far.
            text = f"{description()} {arguments.rounds} rounds.\n\n{table(results)}"
            (arguments.output / "peers.md").write_text(text)
            (arguments.output / "peers.json").write_text(json.dumps(as_json(results)))
    draw(results, arguments.output / "peers.png")
    if arguments.page is not None:
        arguments.page.write_text(with_section(arguments.page.read_text(), processor(arguments.device), text))
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
