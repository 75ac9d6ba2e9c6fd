"""WMT14 in small, from a local server, through TFDS's own builder and without TensorFlow."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.data.statmt import (
    CRAWL,
    DEV,
    EUROPARL,
    GIGA,
    NEWS,
    SIZES,
    UNITED_NATIONS,
    archives,
    checksums_of,
    expected_pairs,
    path_of,
    serve,
    with_members,
)
from tfx_jax.data.sources import tfds
from tfx_jax.data.sources.prepare import prepare, registered_checksums
from tfx_jax.errors import UserError

pytest.importorskip("tensorflow_datasets")

ARCHIVES = archives()
CHECKSUMS = checksums_of(ARCHIVES)
GERMAN = "wmt14_translate/de-en"


@pytest.fixture
def server():
    with serve({path_of(url): body for url, body in ARCHIVES.items()}) as server:
        yield server


def build(server, folder, name=GERMAN, checksums=CHECKSUMS):
    return prepare(name, folder, base_url=server.url, checksums=checksums, first_pause=0.01)


def read(folder, language, split):
    name, languages = f"wmt14_translate/{language}-en", {"source_language": language, "target_language": "en"}
    pairs = tfds.tfds_pairs(name, split, data_dir=folder, **languages)
    return sorted((pairs[index]["source"], pairs[index]["target"]) for index in range(len(pairs)))


def digest(folder):
    """Every file below a folder and what is in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The records of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with serve({path_of(url): body for url, body in ARCHIVES.items()}) as server:
        build(server, folder)
    return digest(folder / "wmt14_translate")


@pytest.mark.parametrize(("language", "downloads"), [("de", 4), ("fr", 6)])
def test_every_pair_arrives(server, tmp_path, capfd, language, downloads):
    prepared = build(server, tmp_path, f"wmt14_translate/{language}-en")
    expected = expected_pairs(language)
    assert {split: read(tmp_path, language, split) for split in expected} == expected
    assert prepared == (f"wmt14_translate/{language}-en", tmp_path, {split: len(expected[split]) for split in expected})
    assert len(server.requests) == downloads
    assert capfd.readouterr().out == ""
    assert "tensorflow" not in sys.modules


def test_what_is_done_is_not_done_again(server, tmp_path, undisturbed):
    first = build(server, tmp_path)
    requests = len(server.requests)
    before = digest(tmp_path)
    assert build(server, tmp_path) == first
    assert len(server.requests) == requests
    assert digest(tmp_path) == before
    # The second language pair shares most archives.
    build(server, tmp_path, "wmt14_translate/fr-en")
    assert len(server.requests) == requests + 2
    assert digest(tmp_path / "wmt14_translate" / "de-en") == {
        name.removeprefix("de-en/"): content for name, content in undisturbed.items() if name.startswith("de-en/")
    }


def test_archives_may_come_by_hand_and_go_once_unpacked(server, tmp_path):
    downloads = tmp_path / "downloads" / "data.statmt.org" / "wmt19" / "translation-task"
    downloads.mkdir(parents=True)
    (downloads / "dev.tgz").write_bytes(ARCHIVES[DEV])
    build(server, tmp_path)
    assert server.sent(path_of(DEV)) == []
    for url in (EUROPARL, CRAWL, NEWS, DEV):
        (tmp_path / "downloads" / url.removeprefix("http://")).unlink()
    requests = len(server.requests)
    build(server, tmp_path, "wmt14_translate/fr-en")
    assert [name for name, _, _ in server.requests[requests:]] == [path_of(UNITED_NATIONS), path_of(GIGA)]


def test_a_broken_download_goes_on(server, tmp_path, undisturbed):
    half = len(ARCHIVES[EUROPARL]) // 2
    server.breaks[path_of(EUROPARL)] = [half]
    build(server, tmp_path)
    assert server.sent(path_of(EUROPARL)) == [half, len(ARCHIVES[EUROPARL]) - half]
    assert digest(tmp_path / "wmt14_translate") == undisturbed


def test_a_corrupt_download_is_named_and_fetched_again(server, tmp_path, undisturbed):
    good = server.files[path_of(CRAWL)]
    server.files[path_of(CRAWL)] = good[:100] + bytes([good[100] ^ 1]) + good[101:]
    with pytest.raises(
        UserError, match=r"training-parallel-commoncrawl.tgz.partial, from .* was deleted: run the same"
    ):
        build(server, tmp_path)
    server.files[path_of(CRAWL)] = good
    build(server, tmp_path)
    assert server.sent(path_of(EUROPARL)) == [len(ARCHIVES[EUROPARL])]
    assert server.sent(path_of(CRAWL)) == [len(good), len(good)]
    assert digest(tmp_path / "wmt14_translate") == undisturbed


def test_shuffling_on_disk_gives_the_same_records(server, tmp_path, undisturbed, monkeypatch):
    """WMT14 has more than the gigabyte that TFDS shuffles in memory; for its files it would need TensorFlow."""
    from tensorflow_datasets.core import shuffle

    monkeypatch.setattr(shuffle, "MAX_MEM_BUFFER_SIZE", 100)
    flushed = []
    flush = shuffle._Bucket.flush
    monkeypatch.setattr(shuffle._Bucket, "flush", lambda bucket: flushed.append(bucket) or flush(bucket))
    build(server, tmp_path)
    assert len(flushed) == 3 * shuffle.BUCKETS_NUMBER  # every part went that way
    assert digest(tmp_path / "wmt14_translate") == undisturbed


def test_registered_checksums_are_those_of_all_data_sets(server, tmp_path):
    """By default the small archives are refused, also those that TFDS lists under another data set only."""
    with pytest.raises(UserError, match=r"europarl-v7.tgz has [\d,]+ bytes where TFDS registered 657,632,379"):
        build(server, tmp_path, checksums=None)
    with pytest.raises(UserError, match=r"giga-fren.tar has [\d,]+ bytes where TFDS registered 2,595,102,720"):
        build(server, tmp_path, "wmt14_translate/fr-en", CHECKSUMS | {GIGA: registered_checksums()[GIGA]})


def test_mistakes_leave_nothing_behind(tmp_path):
    for name, message in (
        ("wmt41_translate/de-en", "TFDS has no data set wmt41_translate; wmt14_translate/de-en is one"),
        ("wmt14_translate", "wmt14_translate has no 'default': add one of /cs-en, /de-en, /fr-en"),
        ("wmt14_translate/en-de", "wmt14_translate has no 'en-de': add one of /cs-en"),
        ("mnist", "mnist is not a translation data set: its elements have image, label"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            prepare(name, tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"--base-url=mirror\.org should begin with http"):
        prepare(GERMAN, tmp_path, base_url="mirror.org")
    with pytest.raises(
        UserError, match=r"local disk, not to gs://b/d: .*gcloud storage cp -r DIR/wmt14_translate gs://b/d/"
    ):
        prepare(GERMAN, "gs://b/d")
    with pytest.raises(UserError, match="which TFDS reads as wildcards: choose another folder"):
        prepare(GERMAN, tmp_path / "data[1]")
    assert list(tmp_path.iterdir()) == []


def test_what_only_a_person_may_fetch_is_named(server, tmp_path):
    with pytest.raises(
        UserError, match=rf"czeng_10, you must manually download .* place them in {tmp_path}/downloads/manual"
    ):
        build(server, tmp_path, "wmt14_translate/cs-en")


def test_another_file_format_is_refused(server, tmp_path):
    build(server, tmp_path)
    info = tmp_path / "wmt14_translate" / "de-en" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match=r"already set to .*; take another --data-dir"):
        build(server, tmp_path)


def test_a_folder_that_is_a_file(server, tmp_path):
    (tmp_path / "downloads").write_text("")
    with pytest.raises(UserError, match="downloads: File exists; fix this and run the same command again"):
        build(server, tmp_path)


def test_a_second_process_is_kept_out(server, tmp_path):
    (tmp_path / "downloads").mkdir()
    with (tmp_path / "downloads" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=f"another process is preparing data in {tmp_path}/downloads: wait for it"):
            build(server, tmp_path)
    build(server, tmp_path)


SCRIPT = """
import json, resource, sys
from tensorflow_datasets.core import shuffle
from tfx_jax.data.sources.download import Checksum
from tfx_jax.data.sources.prepare import prepare
from tfx_jax.errors import UserError

folder, server, checksums, largest_file = sys.argv[1:]
shuffle.MAX_MEM_BUFFER_SIZE = 1_000
if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest_file), int(largest_file)))
try:
    checksums = {url: Checksum(*checksum) for url, checksum in json.loads(checksums).items()}
    prepare("wmt14_translate/de-en", folder, base_url=server, checksums=checksums)
except UserError as error:
    sys.exit(str(error))
"""


def start(server, folder, *, checksums=CHECKSUMS, largest_file=""):
    arguments = [str(folder), server.url, json.dumps(checksums), str(largest_file)]
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("largest_file", "unpacked"), [(300, False), (500, True), (1_000, True)])
def test_a_full_disk_costs_one_line(server, tmp_path, undisturbed, largest_file, unpacked):
    """In a download, in the files that shuffle, or in the records that array_record writes."""
    if unpacked:
        build(server, tmp_path)
        shutil.rmtree(tmp_path / "wmt14_translate")
    with start(server, tmp_path, largest_file=largest_file) as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].endswith(
        "File too large; fix this and run the same command again: it continues from here"
    )
    build(server, tmp_path)
    assert digest(tmp_path / "wmt14_translate") == undisturbed


# What there is to see on disk in the middle of each step, and how large it is at least.
STEPS = {
    "downloads/www.statmt.org/wmt13/*.tgz.partial": 100_000,
    "downloads/extracted/www.statmt.org/wmt13/*.partial/*/large": 0,
    "downloads/data.statmt.org/*/*/dev.tgz.partial": 100_000,
    "wmt14_translate/de-en/incomplete.*/bucket_*": 0,
    "wmt14_translate/de-en/incomplete.*/*-train.array_record*": 0,
}


@pytest.mark.slow
def test_killed_in_every_step_it_ends_the_same(tmp_path):
    large = archives(SIZES | {"europarl": 3_000})
    large[EUROPARL] = with_members(large[EUROPARL], {"training/large": bytes(200_000_000)})
    large[DEV] = with_members(large[DEV], {"dev/noise": os.urandom(200_000)})
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    def is_there(pattern, size):
        try:
            return any(path.stat().st_size >= size for path in killed.glob(pattern))
        except FileNotFoundError:  # what the one killed before had left is being cleared away
            return False

    with serve({path_of(url): body for url, body in large.items()}) as server:
        build(server, undisturbed, checksums=checksums_of(large))
        server.requests.clear()
        server.bytes_per_second = 400_000
        for pattern, size in STEPS.items():
            with start(server, killed, checksums=checksums_of(large)) as process:
                while process.poll() is None and not is_there(pattern, size):
                    pass
                process.kill()
            assert process.returncode == -signal.SIGKILL, pattern
            assert is_there(pattern, size)
            assert not (killed / "wmt14_translate" / "de-en" / "1.0.0").exists()
        build(server, killed, checksums=checksums_of(large))
        for url in (EUROPARL, CRAWL, NEWS, DEV):
            sent = sum(server.sent(path_of(url)))
            assert len(large[url]) <= sent < len(large[url]) + 80_000  # but for what was on its way to the dead
    assert digest(killed / "wmt14_translate") == digest(undisturbed / "wmt14_translate")
