"""Images of files."""

import io

import numpy as np
import PIL.Image
import PIL.ImageOps
from etils import epath

from tfx_jax.errors import UserError

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What the names of images end with."""


def read_image(path: epath.PathLike, size: int) -> np.ndarray:
    """Reads a picture in any format that Pillow knows.

    Args:
      path: of the file.
      size: pixels that both sides must have; resize or crop images before.

    Returns:
      Red, green and blue, [size, size, 3] uint8; what is transparent keeps its color. Gray of 16 bits or of floats is
      scaled to 8 bits, and the picture is turned as its EXIF orientation says; both in `read_center` too.

    Raises:
      UserError: if there is no such file, it is no picture, or it has another size.
    """
    image = np.array(_read(path, "RGB"))
    if image.shape[:2] != (size, size):
        height, width, _ = image.shape
        raise UserError(f"{path} has {width} x {height} pixels, but the model reads {size} x {size}: resize it")
    return image


def read_center(path: epath.PathLike, size: int, num_channels: int) -> np.ndarray:
    """Reads the largest square in the middle of a picture, and resizes it, bicubically.

    Args:
      path: of the file.
      size: pixels of both sides of the result.
      num_channels: 3 for red, green and blue, 1 for gray.

    Returns:
      [size, size, num_channels] uint8.

    Raises:
      UserError: if there is no such file, or it is no picture.
    """
    picture = _read(path, {1: "L", 3: "RGB"}[num_channels])
    fitted = PIL.ImageOps.fit(picture, (size, size), PIL.Image.Resampling.BICUBIC)
    return np.array(fitted).reshape(size, size, num_channels)


def _read(path: epath.PathLike, mode: str) -> PIL.Image.Image:
    try:
        with PIL.Image.open(io.BytesIO(epath.Path(path).read_bytes())) as picture:
            return _eight_bits(PIL.ImageOps.exif_transpose(picture), path).convert(mode)
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:  # whatever Pillow raises
        raise UserError(f"{path} cannot be read as an image: {' '.join(str(error).split())}") from None


def _eight_bits(picture: PIL.Image.Image, path: epath.PathLike) -> PIL.Image.Image:
    """Scales gray of more than 8 bits, which Pillow would cut off at 255."""
    if not picture.mode.startswith(("I", "F")):
        return picture
    values = np.asarray(picture).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    is_float = picture.mode.startswith("F")
    # Whole numbers have 16 bits. Floats go up to 1 or, where one is above, to 255.
    most = (1 if high <= 1 else 255) if is_float else 65_535
    if not (low >= 0 and high <= most):  # NaN too
        allowed = "0 to 1 or 0 to 255" if is_float else "0 to 65535"
        raise UserError(f"{path} has gray values from {low:g} to {high:g}, not {allowed}: convert it to 8 bits")
    return PIL.Image.fromarray(np.rint(values * (255 / most)).astype(np.uint8))
