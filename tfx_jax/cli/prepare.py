"""`tfx-jax prepare`: downloads a TFDS data set and builds it in the format that training reads."""

import json
import shlex
import sys
from collections.abc import Sequence

from tfx_jax.arguments import Parser
from tfx_jax.cli.support.options import set_up_program
from tfx_jax.data.sources.prepare import prepare
from tfx_jax.data.sources.tfds import import_tfds
from tfx_jax.errors import printable


def run(argv: Sequence[str]) -> int:
    """Prepares the data set; rerunning an interrupted command resumes it."""
    parser = Parser("prepare", "Downloads a translation data set of TFDS and builds it, without TensorFlow.")
    parser.add_argument("name", help="TFDS name of the data set and its configuration, such as wmt14_translate/de-en")
    parser.add_argument(
        "--data-dir",
        default="",
        help="local folder to build in; by default TFDS_DATA_DIR, else ~/tensorflow_datasets",
    )
    parser.add_argument("--base-url", help="mirror to download from: replaces http://HOST in every address")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(argv)
    set_up_program()
    if not sys.stderr.isatty():
        import_tfds().disable_progress_bar()
    prepared = prepare(arguments.name, arguments.data_dir, base_url=arguments.base_url)
    if arguments.json:
        print(json.dumps({"dataset": prepared.name, "data_dir": str(prepared.data_dir), "pairs": prepared.sizes}))
        return 0
    sizes = ", ".join(f"{size:,} {printable(split)}" for split, size in prepared.sizes.items())
    print(
        f"{prepared.name}: {sizes} pairs; train with --config.task.data.dataset={prepared.name} "
        f"--config.task.data.data_dir={shlex.quote(str(prepared.data_dir))}"
    )
    return 0
