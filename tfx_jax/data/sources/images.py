"""Readers of image files."""

import io
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from etils import epath

from tfx_jax.errors import UserError

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of the names of image files."""

# Those of the other readers of Pillow are less safe: EPS runs programs.
_FORMATS = "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"
_MAX_PIXELS = 64_000_000  # of a file: small files can decode to gigabytes
_MODES = {1: "L", 3: "RGB"}  # Pillow's modes of grayscale and color, by the number of channels


def read_image(path: epath.PathLike, size: int, num_channels: int = 3) -> np.ndarray:
    """Reads an image file in the format BMP, GIF, JPEG, PNG, PPM, TIFF or WebP.

    Args:
      path: path of the file.
      size: required width and height in pixels.
      num_channels: 3 for RGB, 1 for grayscale.

    Returns:
      [size, size, num_channels] uint8. Transparency is ignored. Grayscale of 16 bits or floats is scaled to 8 bits,
      and the EXIF orientation is applied; `read_center` does the same.

    Raises:
      UserError: if the file does not exist, is not an image, has more than 64 megapixels, or has another size.
    """
    picture = _read(path, _MODES[num_channels])
    if picture.size != (size, size):
        raise UserError(
            f"{path} has {picture.width} x {picture.height} pixels, but the model reads {size} x {size}: resize it"
        )
    return np.array(picture).reshape(size, size, num_channels)


def read_center(path: epath.PathLike, size: int, num_channels: int) -> np.ndarray:
    """Reads an image, crops the largest centered square, and resizes it bicubically.

    Args:
      path: path of the file.
      size: width and height of the result in pixels.
      num_channels: 3 for RGB, 1 for grayscale.

    Returns:
      [size, size, num_channels] uint8.

    Raises:
      UserError: if the file does not exist, is not an image, or has more than 64 megapixels.
    """
    picture = _read(path, _MODES[num_channels])
    fitted = PIL.ImageOps.fit(picture, (size, size), PIL.Image.Resampling.BICUBIC)
    return np.array(fitted).reshape(size, size, num_channels)


def image_of(source: Any, size: int, num_channels: int, *, is_cropped: bool = True) -> np.ndarray:
    """Returns the pixels of an image that is given as a file or as an array.

    Args:
      source: path of a file, read by `read_center` (or `read_image`, if not `is_cropped`), or [size, size,
        num_channels] uint8.
      size: width and height in pixels.
      num_channels: 3 for RGB, 1 for grayscale.
      is_cropped: whether files of other sizes are cropped and resized.

    Raises:
      UserError: if a file cannot be read, or an array has another shape or dtype.
    """
    if not hasattr(source, "shape"):
        return read_center(source, size, num_channels) if is_cropped else read_image(source, size, num_channels)
    image = np.asarray(source)
    if image.shape != (size, size, num_channels) or image.dtype != np.uint8:
        raise UserError(
            f"an image must be an array [{size}, {size}, {num_channels}] of uint8, got {list(image.shape)} of "
            f"{image.dtype}: resize and convert it"
        )
    return image


def _read(path: epath.PathLike, mode: str) -> PIL.Image.Image:
    """Returns an upright image converted to Pillow's mode "RGB" or "L" (grayscale); raises UserError on failure."""
    try:
        with PIL.Image.open(io.BytesIO(epath.Path(path).read_bytes()), formats=_FORMATS) as picture:
            if picture.width * picture.height > _MAX_PIXELS:
                raise UserError(
                    f"{path} has {picture.width} x {picture.height} pixels, more than {_MAX_PIXELS:,}: make it smaller"
                )
            return _eight_bits(PIL.ImageOps.exif_transpose(picture), path).convert(mode)
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except UserError:
        raise
    except PIL.UnidentifiedImageError:
        raise UserError(f"{path} cannot be read as an image: it is none of {', '.join(_FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {' '.join(str(error).split())}") from None


def _eight_bits(picture: PIL.Image.Image, path: epath.PathLike) -> PIL.Image.Image:
    """Scales grayscale of more than 8 bits to 8 bits, which Pillow would clip at 255 instead.

    `path` is the name of the image in the UserError for values out of range.
    """
    if not picture.mode.startswith(("I", "F")):  # Pillow's modes of 32-bit integers, 16-bit integers, and floats
        return picture
    values = np.asarray(picture).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    is_float = picture.mode.startswith("F")
    # Integers have 16 bits. Floats are in [0, 1], or in [0, 255] if a value is above 1.
    largest = (1 if high <= 1 else 255) if is_float else 65_535
    if not (low >= 0 and high <= largest):  # written with `not`, so that NaN is rejected too
        allowed = "0 to 1 or 0 to 255" if is_float else "0 to 65535"
        raise UserError(f"{path} has gray values from {low:g} to {high:g}, not {allowed}: convert it to 8 bits")
    return PIL.Image.fromarray(np.rint(values * (255 / largest)).astype(np.uint8))
