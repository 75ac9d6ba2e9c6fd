"""`tfx-jax attend`: shows the attention weights for a text, a pair of texts, an image or a record of events."""

import argparse
from collections.abc import Sequence

import numpy as np

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.cli.support.attention_view import AttentionView
from tfx_jax.cli.support.options import add_model_options, load_model, set_up_program
from tfx_jax.data.sources.images import read_center, read_image
from tfx_jax.data.sources.lines import is_blank
from tfx_jax.data.sources.splits import SPLITS, Split
from tfx_jax.errors import UserError, printable
from tfx_jax.tasks.events import EventClassificationTask
from tfx_jax.tasks.vision.captioning import CaptioningTask
from tfx_jax.tasks.vision.image_classification import ImageClassificationTask
from tfx_jax.training.reporting.attention_plot import save_attention, save_figure
from tfx_jax.training.reporting.image_plot import plot_maps


def run(argv: Sequence[str]) -> int:
    """Draws or lists attention weights; without --target, those of the model's own translation or caption."""
    parser = Parser(
        "attend",
        "Shows the attention weights of a trained model for a text, a pair of texts, an image or a record of events.",
    )
    add_model_options(parser)
    parser.add_argument("--source", help="models of text: the text, or the first text of a pair")
    parser.add_argument("--image", help="image models: image file, or the number of an image of --split, from 1")
    parser.add_argument(
        "--target",
        help="translation, answer, caption or second text of the pair; by default what the model writes",
    )
    parser.add_argument("--output", help="image file to write (.png, .pdf or .svg)")
    parser.add_argument(
        "--html", help="models of text: HTML page to write, to choose heads and point at words in a browser"
    )
    parser.add_argument(
        "--row",
        type=at_least_one,
        help="models of events: list the events of this record of --split with their weights, from 1",
    )
    parser.add_argument(
        "--split",
        default="validation",
        choices=SPLITS,
        help="split that --row, or --image with a number, refers to; %(default)s by default",
    )
    arguments = parser.parse_args(argv)
    inputs = [value for value in (arguments.source, arguments.image, arguments.row) if value is not None]
    if len(inputs) != 1:
        raise UserError(
            "attend needs exactly one of --source=TEXT (text), --image=FILE (images) and --row=NUMBER (events)"
        )
    if arguments.row is not None:
        return _list_events(arguments)
    if arguments.output is None and arguments.html is None:
        raise UserError("attend needs a file to write: --output=IMAGE, --html=PAGE or both")
    return _attend_to_image(arguments) if arguments.source is None else _attend_to_sentence(arguments)


def _attend_to_sentence(arguments: argparse.Namespace) -> int:
    """Writes the maps of all heads for a text, a pair of texts, or a text and what the model writes."""
    if is_blank(arguments.source):
        raise UserError("--source is empty: give a text")
    set_up_program()
    run, params = load_model(arguments)
    task = run.task
    if not hasattr(task, "attention") or isinstance(task, CaptioningTask | ImageClassificationTask):
        raise UserError(
            f"--source needs a model of text, but {arguments.workdir} holds another: name another run, or give "
            "--image or --row"
        )
    maps, source, target = task.attention(run.trained(params), arguments.source, arguments.target)
    # The decoder of a pair reads the target delayed by one step; a language model reads the text itself.
    target_inputs = ["<s>", *target[:-1]] if source else target
    if arguments.output is not None:
        save_attention(arguments.output, maps, source, target, target_inputs=target_inputs)
        print(f"drew {len(maps)} attention maps in {arguments.output}")
    if arguments.html is not None:
        AttentionView(maps, source, target, target_inputs=target_inputs).save(arguments.html)
        print(f"wrote {len(maps)} attention maps to {arguments.html}")
    return 0


def _attend_to_image(arguments: argparse.Namespace) -> int:
    """Draws one attention map per word of a caption, or attention maps for the predicted class of an image."""
    if arguments.html is not None:
        raise UserError("--html is for text: for an image give --output=FILE")
    set_up_program()
    run, params = load_model(arguments)
    task, model = run.task, run.trained(params)
    if not isinstance(task, CaptioningTask | ImageClassificationTask):
        raise UserError(
            f"--image needs a model that captions or classifies images, but {arguments.workdir} holds another"
        )
    image = _read_image(task, arguments.image, arguments.split)
    if isinstance(task, CaptioningTask):
        result = task.attention(model, image, arguments.target)
    else:
        if arguments.target is not None:
            raise UserError("--target is a caption, but this model classifies images: leave --target out")
        result = task.attention(model, image)
    save_figure(arguments.output, lambda: plot_maps(image, result.titles, result.maps))
    print(f"drew {len(result.maps)} attention maps in {arguments.output}: {printable(result.answer)}")
    return 0


def _read_image(task: CaptioningTask | ImageClassificationTask, image: str, split: Split) -> np.ndarray:
    """Returns the pixels of an image file, or of the image of that number in a split."""
    if not image.isdecimal():
        if isinstance(task, CaptioningTask):
            return read_image(image, task.model_config.image_size)
        return read_center(image, task.model_config.image_size, task.model_config.num_channels)
    images = task.rows(split)
    if not 1 <= int(image) <= len(images):
        raise UserError(f"--image={image} must be a number from 1 to {len(images):,}, the images of the {split} split")
    return images[int(image) - 1].image


def _list_events(arguments: argparse.Namespace) -> int:
    """Prints the events of a record by decreasing weight, one per line: weight, name, value and, if known, time.

    If the weight is a mean over several hops of attention, the weight of each hop follows.
    """
    set_up_program()
    run, params = load_model(arguments, EventClassificationTask)
    probability, label, shares = run.task.event_attention(run.trained(params), arguments.split, arguments.row - 1)
    print(f"record {arguments.row} of {arguments.split}: label {label}, probability of label 1 {probability:.3f}")
    has_times = any(share.time for share in shares)  # in tables all times are 0
    for share in shares:
        columns = [f"{share.weight:.4f}", printable(share.name), f"{share.value:g}"]
        if has_times:
            columns.append(f"{share.time:.2f}")
        if len(share.hops) > 1:
            columns += [f"{hop:.4f}" for hop in share.hops]
        print("\t".join(columns))
    return 0
