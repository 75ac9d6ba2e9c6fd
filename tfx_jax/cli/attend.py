"""`tfx-jax attend`: what a model looks at, in a sentence pair or in an image, as a picture or as a page to explore."""

import argparse
from collections.abc import Sequence

import numpy as np

from tfx_jax.cli.attention_plot import save_attention, save_figure
from tfx_jax.cli.attention_view import AttentionView
from tfx_jax.cli.caption_plot import plot_caption
from tfx_jax.cli.options import add_model_options, load_model, set_up_program
from tfx_jax.cli.parser import Parser
from tfx_jax.data.images import read_image
from tfx_jax.errors import UserError
from tfx_jax.tasks.captioning import CaptioningTask
from tfx_jax.tasks.translation import TranslationTask


def run(argv: Sequence[str]) -> int:
    """Draws the attention to a source; without a target, of the model's own translation or caption."""
    parser = Parser(
        "attend", "Draws what a trained model looks at: every head in a sentence pair, or each word in an image."
    )
    add_model_options(parser)
    parser.add_argument("--source", help="sentence to read")
    parser.add_argument("--image", help="image to describe: a file, or the number of one of the test split")
    parser.add_argument("--target", help="its translation or caption; the model's own by default")
    parser.add_argument("--output", help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--html", help="page to write, for a browser: choose heads, point at words; not of an image")
    arguments = parser.parse_args(argv)
    if (arguments.source is None) == (arguments.image is None):
        raise UserError("attend needs --source=SENTENCE, of a translation, or --image=FILE, of a caption")
    if arguments.output is None and arguments.html is None:
        raise UserError("attend needs --output=PICTURE or --html=PAGE, or both")
    if arguments.image is not None:
        return _attend_to_image(arguments)
    if not arguments.source.strip():
        raise UserError("--source is empty")
    set_up_program()
    run, params = load_model(arguments, TranslationTask)
    maps, source, target = run.task.attention(run.trained(params), arguments.source, arguments.target)
    target_inputs = ["<s>", *target[:-1]]
    if arguments.output is not None:
        save_attention(arguments.output, maps, source, target, target_inputs=target_inputs)
        print(f"drew {len(maps)} attention maps in {arguments.output}")
    if arguments.html is not None:
        AttentionView(maps, source, target, target_inputs=target_inputs).save(arguments.html)
        print(f"wrote {len(maps)} attention maps to {arguments.html}")
    return 0


def _attend_to_image(arguments: argparse.Namespace) -> int:
    if arguments.html is not None:
        raise UserError("--html shows a sentence pair: of an image there is --output=PICTURE")
    set_up_program()
    run, params = load_model(arguments, CaptioningTask)
    image = _read(run.task, arguments.image)
    words, weights = run.task.attention(run.trained(params), image, arguments.target)
    save_figure(arguments.output, lambda: plot_caption(image, words, weights))
    print(f"drew {len(weights)} attention maps in {arguments.output}: {' '.join(words[:-1])}")
    return 0


def _read(task: CaptioningTask, image: str) -> np.ndarray:
    """The pixels of a file, or of an image of the test split."""
    if not image.isdecimal():
        return read_image(image, task.model_config.image_size)
    images = task.images("test")
    if int(image) >= len(images):
        raise UserError(
            f"--image={image} is none of the {len(images):,} images of the test split, the first of which is 0"
        )
    return images[int(image)].image
