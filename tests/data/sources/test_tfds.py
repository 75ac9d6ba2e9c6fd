"""A small translation data set, prepared and read back without TensorFlow."""

import builtins
import itertools
import os
import shutil
import sys

import fsspec
import fsspec.implementations.dirfs
import pytest
from etils import epath

from tests.data.tokenizers_made_here import make_tokenizer
from tfx_jax.data.batching.batches import LoaderOptions
from tfx_jax.data.batching.pairs import pair_batches
from tfx_jax.data.sources import text, tfds
from tfx_jax.errors import UserError

pytest.importorskip("tensorflow_datasets")

SENTENCES = [{"en": f"sentence {index} ü", "ja": f"文 {index} ？"} for index in range(30)]
LANGUAGES = {"source_language": "en", "target_language": "ja"}


def _prepare(data_dir, *, version="1.0.0", count=20):
    import tensorflow_datasets
    from tensorflow_datasets.core import registered

    with registered.skip_registration():

        class Toy(tensorflow_datasets.core.GeneratorBasedBuilder):
            VERSION = tensorflow_datasets.core.Version(version)
            BUILDER_CONFIGS = (tensorflow_datasets.core.BuilderConfig(name="en-ja"),)

            def _info(self):
                features = tensorflow_datasets.features.Translation(("en", "ja"))
                return tensorflow_datasets.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager):
                return {"train": enumerate(SENTENCES[:count]), "test": enumerate(SENTENCES[20:])}

            def _generate_examples(self, **_):
                raise NotImplementedError

    Toy(config="en-ja", data_dir=data_dir, file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    _prepare(folder)
    return folder


def _sides(pairs):
    return sorted((pairs[index]["source"], pairs[index]["target"]) for index in range(len(pairs)))


def _expected(sentences):
    return sorted((sentence["en"], sentence["ja"]) for sentence in sentences)


def test_reads_pairs_without_tensorflow(data_dir):
    pairs = tfds.tfds_pairs("toy/en-ja", "train", data_dir=str(data_dir), **LANGUAGES)
    assert _sides(pairs) == _expected(SENTENCES[:20])
    assert pairs[2].keys() == {"source", "target"}
    assert text.get_pairs(pairs, [7, 2]) == [pairs[7], pairs[2]]
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("damage", [lambda text: text[:70], lambda text: text.replace("ranslation", "ranslatioN")])
def test_a_damaged_description_is_one_line(data_dir, tmp_path, name, damage):
    folder = shutil.copytree(data_dir / "toy" / "en-ja" / "1.0.0", tmp_path / "toy" / "en-ja" / "1.0.0")
    before = (folder / name).read_text()
    (folder / name).write_text(damage(before))
    if (folder / name).read_text() == before:
        pytest.skip("nothing to damage")
    with pytest.raises(
        UserError, match=r"^the data set in .*/1\.0\.0 is damaged \(.*\): delete it, then prepare or copy"
    ):
        tfds.tfds_pairs("toy/en-ja", "train", data_dir=tmp_path, **LANGUAGES)


def test_a_damaged_record_is_one_line(data_dir, tmp_path):
    """Not found by a count: the bytes of a chunk have a checksum, which is compared when they are read."""
    folder = shutil.copytree(data_dir / "toy" / "en-ja" / "1.0.0", tmp_path / "toy" / "en-ja" / "1.0.0")
    (path,) = folder.glob("toy-train.array_record*")
    data = bytearray(path.read_bytes())
    used = [place for place, byte in enumerate(data) if byte]
    data[used[len(used) // 2]] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        UserError, match=r"^the data set in .*/1\.0\.0 is damaged \(.*\): delete it, then prepare or copy"
    ):
        _sides(tfds.tfds_pairs("toy/en-ja", "train", data_dir=tmp_path, **LANGUAGES))


def test_directions_splits_and_their_parts(data_dir):
    def read(split, source, target):
        return tfds.tfds_pairs("toy/en-ja", split, data_dir=data_dir, source_language=source, target_language=target)

    assert _sides(read("test", "ja", "en")) == sorted((ja, en) for en, ja in _expected(SENTENCES[20:]))
    assert len(read("train[:25%]", "en", "ja")) == 5


def test_the_newest_version_unless_another_is_named(tmp_path):
    for version, count in (("1.9.0", 9), ("1.10.0", 10)):
        _prepare(tmp_path, version=version, count=count)
    lengths = {
        name: len(tfds.tfds_pairs(name, "train", data_dir=tmp_path, **LANGUAGES))
        for name in ("toy/en-ja", "toy/en-ja:1.9.0", "toy/en-ja:1.10.0")
    }
    assert lengths == {"toy/en-ja": 10, "toy/en-ja:1.9.0": 9, "toy/en-ja:1.10.0": 10}


def test_the_folder_of_tfds_is_the_default(data_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(data_dir.parent))
    monkeypatch.setenv("TFDS_DATA_DIR", f"~/{data_dir.name}")
    assert len(tfds.tfds_pairs("toy/en-ja", "train", **LANGUAGES)) == 20


def test_text_may_be_bytes_or_str():
    class Records(list):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    records = Records([{"en": b"caf\xc3\xa9", "ja": "茶"}, {"en": "tea", "ja": "茶".encode()}])
    pairs = tfds.TfdsPairs(records, "en", "ja")
    assert pairs[0] == {"source": "café", "target": "茶"}
    assert pairs.__getitems__([1]) == [{"source": "tea", "target": "茶"}]


def test_feeds_the_pipeline(data_dir):
    pairs = tfds.tfds_pairs("toy/en-ja", "train", data_dir=data_dir, **LANGUAGES)
    words = make_tokenizer(list(text.lines_of(pairs)))
    iterator = iter(pair_batches(pairs, words, LoaderOptions(seed=0), tokens_per_batch=32, max_length=8))
    epoch = list(itertools.takewhile(lambda _: iterator.get_state()["portion"] == 0, iterator))
    iterator.close()
    assert {words.decode(row) for batch in epoch for row in batch["source"]} <= {pair["en"] for pair in SENTENCES}
    assert sum(len(batch["source"]) for batch in epoch) == 16  # all but the last of the 5 batches, of 4 rows each


@pytest.mark.parametrize(
    ("name", "split", "languages", "message"),
    [
        (
            "wmt14_translate/de-en",
            "train",
            {},
            r"de-en holds no prepared TFDS data set: run `tfx-jax prepare wmt14_translate/de-en --data-dir=DIR`, then",
        ),
        (
            "toy/en-ja:2.0.0",
            "train",
            {},
            r"toy/en-ja/2\.0\.0 holds no prepared TFDS data set: run `tfx-jax prepare toy/en-ja ",
        ),
        ("toy", "train", {}, "holds no prepared TFDS data set"),
        ("toy/en-ja", "validation", {}, r"toy/en-ja: Unknown split 'validation'.*\['train', 'test'\]"),
        ("toy/en-ja", "train", {"target_language": "fr"}, "toy/en-ja has no language 'fr'; it has en, ja"),
    ],
)
def test_mistakes(data_dir, name, split, languages, message):
    with pytest.raises(UserError, match=message) as caught:
        tfds.tfds_pairs(name, split, data_dir=data_dir, **{**LANGUAGES, **languages})
    assert "\n" not in str(caught.value)


def test_other_file_formats_are_refused(tmp_path):
    _prepare(tmp_path)
    info = tmp_path / "toy" / "en-ja" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match=r"is stored as .*, not as array records: run `tfx-jax prepare toy/en-ja` with"):
        tfds.tfds_pairs("toy/en-ja", "train", data_dir=tmp_path, **LANGUAGES)


def test_a_version_half_made_is_passed_over(tmp_path):
    _prepare(tmp_path)
    folder = tmp_path / "toy" / "en-ja"
    shutil.copytree(folder / "1.0.0", folder / "incomplete.ABCDEF_1.0.0")
    assert len(tfds.tfds_pairs("toy/en-ja", "train", data_dir=tmp_path, **LANGUAGES)) == 20


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
)
def test_a_shard_that_lost_something_is_named(tmp_path, damage):
    _prepare(tmp_path)
    folder = tmp_path / "toy" / "en-ja" / "1.0.0"
    damage(folder / "toy-train.array_record-00000-of-00001")
    message = (
        rf"train.array_record-00000-of-00001 is missing or damaged: delete {folder}, then run `tfx-jax prepare toy"
    )
    with pytest.raises(UserError, match=message):
        tfds.tfds_pairs("toy/en-ja", "train", data_dir=tmp_path, **LANGUAGES)


@pytest.fixture
def bucket(data_dir, tmp_path, monkeypatch):
    """A bucket gs://bucket whose files lie in `data_dir`, and an empty cache; returns the files that are read."""
    opened = []

    class Bucket(fsspec.implementations.dirfs.DirFileSystem):
        protocol = "gcs"

        def __init__(self, **_):
            super().__init__(path=str(data_dir), fs=fsspec.filesystem("file"))

        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("gs://").removeprefix("bucket").strip("/")

        def _join(self, path):
            return super()._join(self._strip_protocol(path))

        def open(self, path, mode="rb", **options):
            opened.append(path)
            return super().open(path, mode, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EPATH_USE_TF", "false")
    monkeypatch.setattr(
        epath.backend.fsspec_backend, "fs", lambda path: Bucket() if "://" in os.fspath(path) else LOCAL
    )
    return opened


LOCAL = fsspec.filesystem("file")


def test_a_bucket_is_copied_once(bucket, tmp_path):
    for _ in range(2):
        pairs = tfds.tfds_pairs("toy/en-ja", "train", data_dir="gs://bucket/", **LANGUAGES)
        assert _sides(pairs) == _expected(SENTENCES[:20])
    assert sum("train.array_record" in str(path) for path in bucket) == 1
    copies = [path.name for path in (tmp_path / "cache" / "tfx_jax" / "tfds").glob("*/toy/en-ja/*")]
    assert sorted(copies) == ["1.0.0", "1.0.0.lock"]


def test_a_bucket_that_cannot_be_read_costs_one_line(bucket, monkeypatch):
    with pytest.raises(UserError, match="gs://bucket/toy/en-de holds no prepared TFDS data set"):
        tfds.tfds_pairs("toy/en-de", "train", data_dir="gs://bucket", **LANGUAGES)

    def fs(path):
        raise ImportError("Please install gcsfs\nto access Google Storage")

    monkeypatch.setattr(epath.backend.fsspec_backend, "fs", fs)
    with pytest.raises(UserError, match="Please install gcsfs to access Google Storage: install the missing package"):
        tfds.tfds_pairs("toy/en-ja", "train", data_dir="gs://bucket", **LANGUAGES)


def test_names_the_extra_where_tfds_is_not_installed(data_dir, monkeypatch):
    real_import = builtins.__import__

    def without_tfds(name, *rest):
        if name == "tensorflow_datasets":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_tfds)
    with pytest.raises(UserError, match=r"No module named 'tensorflow_datasets'\): pip install \"tfx-jax\[tfds\] "):
        tfds.tfds_pairs("toy/en-ja", "train", data_dir=data_dir, **LANGUAGES)
