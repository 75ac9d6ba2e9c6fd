"""`tfx-jax prepare`: a data set of TFDS, downloaded and built where training can read it."""

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
    """Prepares; a command that was interrupted is run again and goes on."""
    parser = Parser("prepare", "Downloads a translation data set of TFDS and builds it, without TensorFlow.")
    parser.add_argument("name", help="data set and configuration, such as wmt14_translate/de-en")
    parser.add_argument("--data-dir", default="", help="local folder; TFDS_DATA_DIR, or ~/tensorflow_datasets")
    parser.add_argument("--base-url", help="mirror that takes the place of http://HOST in every address")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead")
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
