"""Images of files."""

import io

import numpy as np
import PIL.Image
from etils import epath

from tfx_jax.errors import UserError


def read_image(path: epath.PathLike, size: int) -> np.ndarray:
    """Reads a picture in any format that Pillow knows.

    Args:
      path: of the file.
      size: pixels that both sides must have: whoever resizes, or cuts, knows what is lost.

    Returns:
      Red, green and blue, [size, size, 3] uint8; what is transparent keeps its colour.

    Raises:
      UserError: if there is no such file, it is no picture, or it has another size.
    """
    try:
        with PIL.Image.open(io.BytesIO(epath.Path(path).read_bytes())) as picture:
            image = np.array(picture.convert("RGB"))
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:  # whatever Pillow raises
        raise UserError(f"{path} cannot be read as an image: {' '.join(str(error).split())}") from None
    if image.shape[:2] != (size, size):
        height, width, _ = image.shape
        raise UserError(f"{path} has {width} x {height} pixels, but the model reads {size} x {size}: resize it")
    return image
