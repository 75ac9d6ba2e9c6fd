"""`tfx-jax attend`: what a model looks at, in a pair of sentences, in an image or in a record of events."""

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
from tfx_jax.tasks.text.sentence_pairs import SentencePairTask
from tfx_jax.tasks.text.translation import TranslationTask
from tfx_jax.tasks.vision.captioning import CaptioningTask
from tfx_jax.tasks.vision.image_classification import ImageClassificationTask
from tfx_jax.training.reporting.attention_plot import save_attention, save_figure
from tfx_jax.training.reporting.image_plot import plot_maps


def run(argv: Sequence[str]) -> int:
    """Shows the attention to a source; without a target, of the model's own translation or caption."""
    parser = Parser(
        "attend",
        "Shows what a trained model looks at: in a pair of sentences, in an image, in a record of events.",
    )
    add_model_options(parser)
    parser.add_argument("--source", help="sentence to read: of a pair, the first, and the premise of a second one")
    parser.add_argument("--image", help="image to look at: a file, or the number of one of --split, from 1")
    parser.add_argument("--target", help="translation or caption, the model's own by default; or the second sentence")
    parser.add_argument("--output", help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--html", help="page to write, for a browser: choose heads, point at words; of a sentence pair")
    parser.add_argument("--row", type=at_least_one, help="of a model of events: list those of this record, from 1")
    parser.add_argument("--split", default="validation", choices=SPLITS, help="of --row and of a number of an image")
    arguments = parser.parse_args(argv)
    if [arguments.source, arguments.image, arguments.row].count(None) != 2:
        raise UserError(
            "attend needs one of --source=SENTENCE, --image=FILE of a model of images, --row=NUMBER of events"
        )
    if arguments.row is not None:
        return _list_events(arguments)
    if arguments.output is None and arguments.html is None:
        raise UserError("attend needs --output=PICTURE or --html=PAGE, or both")
    return _attend_to_image(arguments) if arguments.source is None else _attend_to_sentence(arguments)


def _attend_to_sentence(arguments: argparse.Namespace) -> int:
    """Draws every head, of a translation or of two sentences."""
    if is_blank(arguments.source):
        raise UserError("--source is empty")
    set_up_program()
    run, params = load_model(arguments)
    if not isinstance(run.task, TranslationTask | SentencePairTask):
        raise UserError(f"{arguments.workdir} holds no model of sentence pairs: attend draws translations and pairs")
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
    """Draws where each word of a caption looks, or what makes the class of an image."""
    if arguments.html is not None:
        raise UserError("--html shows a sentence pair: of an image there is --output=PICTURE")
    set_up_program()
    run, params = load_model(arguments)
    task, model = run.task, run.trained(params)
    if not isinstance(task, CaptioningTask | ImageClassificationTask):
        raise UserError(f"{arguments.workdir} holds no model of images: --image is for those that describe or classify")
    image = _read(task, arguments.image, arguments.split)
    if isinstance(task, CaptioningTask):
        found = task.attention(model, image, arguments.target)
    else:
        if arguments.target is not None:
            raise UserError("--target is a caption, and this model writes none: it classifies images")
        found = task.attention(model, image)
    save_figure(arguments.output, lambda: plot_maps(image, found.titles, found.maps))
    print(f"drew {len(found.maps)} attention maps in {arguments.output}: {printable(found.said)}")
    return 0


def _read(task: CaptioningTask | ImageClassificationTask, image: str, split: Split) -> np.ndarray:
    """The pixels of a file, or of an image of a split."""
    if not image.isdecimal():
        if isinstance(task, CaptioningTask):
            return read_image(image, task.model_config.image_size)
        return read_center(image, task.model_config.image_size, task.model_config.num_channels)
    images = task.rows(split)
    if not 1 <= int(image) <= len(images):
        raise UserError(f"--image={image} is none of the {len(images):,} images of the {split} split, from 1")
    return images[int(image) - 1].image


def _list_events(arguments: argparse.Namespace) -> int:
    """Prints the events of a record by falling weight, one a line: weight, name, value and, of what has any, time.

    Where the weight is a mean over several rows of attention, that of each row follows.
    """
    set_up_program()
    run, params = load_model(arguments, EventClassificationTask)
    probability, label, shares = run.task.attention(run.trained(params), arguments.split, arguments.row - 1)
    print(f"record {arguments.row} of {arguments.split}: label {label}, probability of label 1 {probability:.3f}")
    has_times = any(share.time for share in shares)
    for share in shares:
        behind = [f"{share.time:.2f}"] * has_times + [f"{hop:.4f}" for hop in share.hops if len(share.hops) > 1]
        print("\t".join([f"{share.weight:.4f}", printable(share.name), f"{share.value:g}", *behind]))
    return 0
