"""Images of files: what is read is what was written, and what cannot be read is named."""

import numpy as np
import PIL.Image
import pytest

from tfx_jax.data.sources.images import IMAGE_SUFFIXES, image_of, read_center, read_image
from tfx_jax.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 7, 3)).astype(np.uint8)


def test_pixels_are_those_of_the_file_in_rows_and_columns(tmp_path):
    for name in ("a.png", "a.bmp"):
        PIL.Image.fromarray(PIXELS).save(tmp_path / name)
        np.testing.assert_array_equal(read_image(tmp_path / name, 7), PIXELS)
    PIL.Image.fromarray(PIXELS[..., 0]).save(tmp_path / "gray.png")
    np.testing.assert_array_equal(read_image(tmp_path / "gray.png", 7), np.repeat(PIXELS[..., :1], 3, axis=2))


@pytest.mark.parametrize("is_cropped", [True, False])
def test_files_have_the_channels_of_the_model(tmp_path, is_cropped):
    PIL.Image.fromarray(PIXELS[..., 0]).save(tmp_path / "gray.png")
    found = image_of(tmp_path / "gray.png", 7, 1, is_cropped=is_cropped)
    np.testing.assert_array_equal(found, PIXELS[..., :1])
    with pytest.raises(UserError, match=r"of uint8, got \[7, 7, 3\] of uint8: resize and convert it"):
        image_of(PIXELS, 7, 1, is_cropped=is_cropped)


def test_what_cannot_be_read_is_named_in_one_line(tmp_path):
    PIL.Image.fromarray(PIXELS[:5]).save(tmp_path / "wide.png")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "wide.png").read_bytes()[:60])
    for name, message in (
        ("none.png", "there is no image {}"),
        ("text.png", "{} cannot be read as an image: it is none of BMP, GIF, JPEG, PNG"),
        ("cut.png", "{} cannot be read as an image: "),
        ("wide.png", "{} has 7 x 5 pixels, but the model reads 7 x 7: resize it"),
    ):
        with pytest.raises(UserError) as caught:
            read_image(tmp_path / name, 7)
        assert str(caught.value).startswith(message.format(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_images_of_other_formats_and_of_too_many_pixels_are_not_decoded(tmp_path, monkeypatch):
    """As an EPS would start Ghostscript, whatever the name of its file."""
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 7\n%%EndComments\nshowpage\n")
    with PIL.Image.open(tmp_path / "eps.png") as picture:
        assert picture.format == "EPS"  # if Pillow may choose
    PIL.Image.new("1", (8_001, 8_000)).save(tmp_path / "large.png")
    monkeypatch.setattr(PIL.Image.Image, "load", lambda self: pytest.fail("it is decoded"))
    for name, message in (
        ("eps.png", "{} cannot be read as an image: it is none of BMP, GIF, JPEG, PNG"),
        ("large.png", "{} has 8001 x 8000 pixels, more than 64,000,000: make it smaller"),
    ):
        for read in (lambda path: read_image(path, 7), lambda path: read_center(path, 7, 3)):
            with pytest.raises(UserError) as caught:
                read(tmp_path / name)
            assert str(caught.value).startswith(message.format(tmp_path / name))


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_all_suffixes_are_of_formats_that_are_read(tmp_path, suffix):
    PIL.Image.fromarray(PIXELS).save(tmp_path / f"a{suffix}")
    assert read_image(tmp_path / f"a{suffix}", 7).shape == (7, 7, 3)


@pytest.mark.parametrize("read", [lambda path: read_image(path, 7), lambda path: read_center(path, 7, 3)])
def test_gray_of_more_bits_is_scaled(tmp_path, read):
    gray = PIXELS[..., 0]
    want = np.repeat(gray[..., np.newaxis], 3, axis=2)
    for name, values in {
        "16.png": gray.astype(np.uint16) * 257,
        "16.tif": gray.astype(np.uint16) * 257,
        "32.tif": gray.astype(np.int32) * 257,
        "unit.tif": gray.astype(np.float32) / 255,
        "float.tif": gray.astype(np.float32),
    }.items():
        PIL.Image.fromarray(values).save(tmp_path / name)
        np.testing.assert_array_equal(read(tmp_path / name), want)
    for bad in (np.nan, -1.0, 256.0, np.inf):
        PIL.Image.fromarray(np.where(gray > 200, bad, gray).astype(np.float32)).save(tmp_path / "bad.tif")
        with pytest.raises(UserError, match=r"bad\.tif has gray values from .*, not 0 to 1 or 0 to 255: convert it"):
            read(tmp_path / "bad.tif")
    PIL.Image.fromarray(np.full((7, 7), 70_000, np.int32)).save(tmp_path / "bad.tif")
    with pytest.raises(UserError, match=r"bad\.tif has gray values from 70000 to 70000, not 0 to 65535"):
        read(tmp_path / "bad.tif")


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    """EXIF's orientations 2 to 8, by hand."""
    turned = {
        1: PIXELS, 2: PIXELS[:, ::-1], 3: PIXELS[::-1, ::-1], 4: PIXELS[::-1], 5: PIXELS.swapaxes(0, 1),
        6: PIXELS.swapaxes(0, 1)[:, ::-1], 7: PIXELS[::-1, ::-1].swapaxes(0, 1), 8: PIXELS.swapaxes(0, 1)[::-1],
    }  # fmt: skip
    for orientation, want in turned.items():
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        for name in ("a.png", "a.tif"):
            PIL.Image.fromarray(PIXELS).save(tmp_path / name, exif=exif)
            np.testing.assert_array_equal(read_image(tmp_path / name, 7), want, err_msg=f"{orientation} {name}")
            np.testing.assert_array_equal(read_center(tmp_path / name, 7, 3), want)
