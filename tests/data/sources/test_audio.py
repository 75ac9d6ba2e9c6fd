"""Sounds of WAV files: whatever numbers they have, whatever their rate, in folders and in zips; damaged ones."""

import io
import struct
import zipfile

import numpy as np
import pytest
import scipy.io.wavfile

from tfx_jax.data.sources.audio import SoundFiles, read_wav
from tfx_jax.errors import UserError

RATE = 8_000
SOUND = np.random.default_rng(0).uniform(-0.9, 0.9, 400)


def wav(samples, rate=RATE):
    """The bytes of a file."""
    file = io.BytesIO()
    scipy.io.wavfile.write(file, rate, samples)
    return file.getvalue()


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        (np.rint(SOUND * 2**15).astype(np.int16), 0),
        (np.rint(SOUND * 2**31).astype(np.int32), 1),
        (np.rint(SOUND * 128 + 128).astype(np.uint8), 129),
        (SOUND.astype(np.float32), 1),
        (SOUND, 1),
    ],
    ids=["int16", "int32", "uint8", "float32", "float64"],
)
def test_all_kinds_of_numbers_are_one_sound(samples, error):
    """Exactly, or to the last of 16 bits; of eight bits, to half of one of these."""
    found = read_wav(wav(samples), RATE, name="a.wav")
    assert found.dtype == np.int16
    assert np.abs(found - np.rint(SOUND * 2**15)).max() <= error


def test_24_bits_are_read():
    """Of which scipy writes none."""
    numbers = np.rint(SOUND * 2**23).astype(np.int32)
    data = b"".join(struct.pack("<i", number)[:3] for number in numbers)
    header = struct.pack("<HHIIHH", 1, 1, RATE, 3 * RATE, 3, 24)
    chunks = b"WAVEfmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", len(data)) + data
    found = read_wav(b"RIFF" + struct.pack("<I", len(chunks)) + chunks, RATE, name="a.wav")
    assert np.abs(found - np.rint(SOUND * 2**15)).max() <= 1


def test_channels_are_averaged_and_what_is_too_loud_is_cut():
    both = np.stack([np.full(5, 1.5), np.full(5, 0.9)], axis=1)
    np.testing.assert_array_equal(read_wav(wav(both), RATE, name="a.wav"), np.full(5, 32_767))
    both[:, 0] = -0.9
    np.testing.assert_array_equal(read_wav(wav(both), RATE, name="a.wav"), np.zeros(5))


@pytest.mark.parametrize("rate", [4_000, 11_025, 44_100])
def test_a_sound_of_another_rate_is_the_same_sound(rate):
    """A tone, away from the edges, where a filter has heard nothing yet."""
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    found = read_wav(wav(tone, rate), RATE, name="a.wav") / 2**15
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE)
    assert abs(len(found) - RATE) <= 1
    np.testing.assert_allclose(found[400:-400], wanted[400:-400], atol=2e-3)


@pytest.mark.parametrize("rate", [1, RATE // 4 - 1, 192_001, 10**8])
def test_rates_that_would_need_much_memory_are_refused(rate):
    with pytest.raises(UserError, match=f"^a.wav has a sample rate of {rate:,} Hz, not {RATE // 4:,} to 192,000 Hz"):
        read_wav(wav(SOUND, rate), RATE, name="a.wav")


def test_folders_and_zips_have_the_same_files(tmp_path):
    for name in ("b.wav", "a.WAV", "notes.txt"):
        (tmp_path / name).write_bytes(wav(np.array([1, 2, 3], np.int16)))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for name in ("b.wav", "a.WAV", "notes.txt"):
            file.write(tmp_path / name, name)
    for files in (SoundFiles(tmp_path), SoundFiles(tmp_path / "all.zip")):
        assert files.names == ["a.WAV", "b.wav"]
        np.testing.assert_array_equal(files.read_sound("b.wav", RATE), [1, 2, 3])
        with pytest.raises(UserError, match=r"^there is no file c\.wav in "):
            files.read("c.wav")


def test_what_is_no_sound_is_one_line(tmp_path):
    whole = wav(np.array([1, 2, 3], np.int16))
    for content, message in (
        (b"", "a.wav cannot be read as a WAV file: "),
        (b"no sound at all", "a.wav cannot be read as a WAV file: "),
        (whole[:30], "a.wav cannot be read as a WAV file: "),
        (wav(np.zeros(0, np.int16)), "the recording a.wav is empty (0 audio samples)"),
        (wav(np.array([0, np.nan])), "a.wav has a sample that is NaN or infinite"),
    ):
        with pytest.raises(UserError) as caught:
            read_wav(content, RATE, name="a.wav")
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
    (tmp_path / "no.zip").write_text("no zip")
    with pytest.raises(UserError, match=r"no\.zip cannot be read as a zip: "):
        SoundFiles(tmp_path / "no.zip")
    with pytest.raises(UserError, match=r"^there is no folder or zip .*none$"):
        SoundFiles(tmp_path / "none")


@pytest.mark.parametrize("missing", [1, 2, 399, 797])
def test_a_recording_without_its_end_is_refused(missing):
    with pytest.raises(UserError, match="it ends before its last sample"):
        read_wav(wav(np.rint(SOUND * 2**15).astype(np.int16))[:-missing], RATE, name="a.wav")


def test_a_recording_that_was_written_to_a_pipe_is_read():
    content = bytearray(wav(np.rint(SOUND * 2**15).astype(np.int16)))
    content[4:8] = content[40:44] = b"\xff" * 4
    assert content[36:40] == b"data"
    np.testing.assert_array_equal(read_wav(bytes(content), RATE, name="a.wav"), np.rint(SOUND * 2**15))


def test_a_damaged_zip_is_one_line(tmp_path):
    path, content = tmp_path / "a.zip", wav(np.rint(SOUND * 2**15).astype(np.int16))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.wav", content)
    packed = path.read_bytes()
    for place in range(35, len(packed) - 100, 7):  # in the compressed samples
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :])
        with pytest.raises(UserError, match=r"a\.wav in .* cannot be read"):
            SoundFiles(path).read("a.wav")


def test_damage_anywhere_is_a_sound_or_one_line():
    whole, rng = wav(np.arange(50, dtype=np.int16)), np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for place in rng.integers(len(content), size=rng.integers(3)):
            content[place] = rng.integers(256)
        try:
            assert read_wav(bytes(content), RATE, name="a.wav").dtype == np.int16
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017, most of them are none
