"""Attention plots in TensorBoard: the same example at each evaluation shows how attention develops."""

import io
import math
from typing import TYPE_CHECKING, Any

from tfx_jax.errors import UserError
from tfx_jax.tasks.prediction import ImageAttention, PairAttention, TrainedModel
from tfx_jax.training.reporting.progress import Progress
from tfx_jax.training.sharding.distributed import is_primary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PIXELS = 1e6  # about 100 kB per image, which every later report must skip


def write_attention(task: Any, model: TrainedModel, progress: Progress, step: int) -> None:
    """Writes the image "validation/attention" to TensorBoard, if the task and its model support it.

    It costs one compilation per run, and at each evaluation one example and about a second of drawing. Errors do not
    stop the run. All processes must call this; only the first draws.

    Args:
      task: a task, see `tfx_jax.tasks.task.Task`.
      model: model of the evaluation.
      progress: writer of the run.
      step: current step.
    """
    if not hasattr(task, "attention_example"):
        return
    try:
        example = task.attention_example(model)
        if example is not None and is_primary():
            progress.image(step, "validation/attention", _png(_draw(example)))
    except (ImportError, UserError):  # Matplotlib is not installed, or the model has no attention
        return
    except Exception as error:  # Matplotlib raises errors of many classes
        progress.message(f"no picture of attention: {' '.join(str(error).split())}")


def _draw(example: PairAttention | ImageAttention) -> "Figure":
    """Draws an image with its maps or, for texts, the heads of the last layer: of cross-attention, if there is any."""
    from tfx_jax.training.reporting.attention_plot import plot_attention  # Matplotlib is slow to import
    from tfx_jax.training.reporting.image_plot import plot_maps

    if isinstance(example, ImageAttention):
        return plot_maps(example.image, example.titles, example.maps)
    kind = "cross" if any(name.endswith("/cross") for name in example.maps) else "self"
    # Names are "STACK/LAYER/KIND", such as "decoder/5/cross".
    layers = {name: int(name.split("/")[1]) for name in example.maps if name.endswith(f"/{kind}")}
    last_layer = max(layers.values())
    maps = {name: example.maps[name] for name, layer in layers.items() if layer == last_layer}
    lead_layer = last_layer if f"decoder/{last_layer}/cross" in maps else None
    return plot_attention(maps, example.source, example.target, lead_layer=lead_layer)


def _png(figure: "Figure") -> bytes:
    """Returns a figure as a PNG image of at most `_MOST_PIXELS` pixels."""
    width, height = figure.get_size_inches()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=min(100.0, math.sqrt(_MOST_PIXELS / (width * height))))
    return picture.getvalue()
