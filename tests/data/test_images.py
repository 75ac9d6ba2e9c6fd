"""Images of files: what is read is what was written, and what cannot be read is named."""

import numpy as np
import PIL.Image
import pytest

from tfx_jax.data.images import read_image
from tfx_jax.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 7, 3)).astype(np.uint8)


def test_pixels_are_those_of_the_file_in_rows_and_columns(tmp_path):
    for name in ("a.png", "a.bmp"):
        PIL.Image.fromarray(PIXELS).save(tmp_path / name)
        np.testing.assert_array_equal(read_image(tmp_path / name, 7), PIXELS)
    PIL.Image.fromarray(PIXELS[..., 0]).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(read_image(tmp_path / "grey.png", 7), np.repeat(PIXELS[..., :1], 3, axis=2))


def test_what_cannot_be_read_is_named_in_one_line(tmp_path):
    PIL.Image.fromarray(PIXELS[:5]).save(tmp_path / "wide.png")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "wide.png").read_bytes()[:60])
    for name, message in (
        ("none.png", "there is no image {}"),
        ("text.png", "{} cannot be read as an image: cannot identify image file"),
        ("cut.png", "{} cannot be read as an image: "),
        ("wide.png", "{} has 7 x 5 pixels, but the model reads 7 x 7: resize it"),
    ):
        with pytest.raises(UserError) as caught:
            read_image(tmp_path / name, 7)
        assert str(caught.value).startswith(message.format(tmp_path / name))
        assert "\n" not in str(caught.value)
