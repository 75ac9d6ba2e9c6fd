"""What a model in training looks at, for TensorBoard: one example, at each evaluation, so that one sees it learn."""

import io
import math
from typing import TYPE_CHECKING, Any

from tfx_jax.errors import UserError
from tfx_jax.tasks.prediction import ImageAttention, PairAttention, TrainedModel
from tfx_jax.training.reporting.progress import Progress
from tfx_jax.training.sharding.distributed import is_primary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PIXELS = 1e6  # some 100 kB, which every later report reads over


def write_attention(task: Any, model: TrainedModel, progress: Progress, step: int) -> None:
    """Adds the picture "validation/attention" to what TensorBoard shows, if the task and its model can give it.

    It costs one program in a training, and at each evaluation that program on one example and about a second of
    drawing. What goes wrong with it does not stop a training. All processes call this; the first draws.

    Args:
      task: a task, see `tfx_jax.tasks.task.Task`.
      model: as the evaluation had it.
      progress: of the training.
      step: where it is.
    """
    if not hasattr(task, "attention_example"):
        return
    try:
        example = task.attention_example(model)
        if example is not None and is_primary():
            progress.image(step, "validation/attention", _png(_draw(example)))
    except (ImportError, UserError):  # there is no Matplotlib, or the model has no attention
        return
    except Exception as error:  # whatever Matplotlib raises
        progress.message(f"no picture of attention: {' '.join(str(error).split())}")


def _draw(example: PairAttention | ImageAttention) -> "Figure":
    """Draws an image with its maps, or of a pair the heads of the last layer in which one side looks at the other."""
    from tfx_jax.training.reporting.attention_plot import plot_attention  # Matplotlib is slow to import
    from tfx_jax.training.reporting.image_plot import plot_maps

    if isinstance(example, ImageAttention):
        return plot_maps(example.image, example.titles, example.maps)
    layers = {name: int(name.split("/")[1]) for name in example.maps if name.endswith("/cross")}
    last = max(layers.values())
    maps = {name: example.maps[name] for name, layer in layers.items() if layer == last}
    lead = last if f"decoder/{last}/cross" in maps else None
    return plot_attention(maps, example.source, example.target, lead_layer=lead)


def _png(figure: "Figure") -> bytes:
    width, height = figure.get_size_inches()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=min(100.0, math.sqrt(_MOST_PIXELS / (width * height))))
    return picture.getvalue()
