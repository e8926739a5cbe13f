"""The digest of a model's weights: every byte of them, once per file, shared by the ranks of a node."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_ext.page import fingerprint as module
from hicache_ext.page.fingerprint import PIECE, ModelFingerprint, digest_of_file
from hicache_ext.runtime.file_systems import Mount

LONG_AGO = 1_600_000_000_000_000_000
SIZE = 2 * PIECE + 12345


def make_model(directory: Path, seed: int = 1, size: int = SIZE) -> Path:
    """What counts is bytes: the file need not be one that torch can read."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"architectures": ["Some"]}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(random.Random(seed).randbytes(size))
    return directory


def digest_of(model: Path, remember_in: Path | None = None) -> str:
    fingerprint = ModelFingerprint(str(model))
    fingerprint.start(remember_in)
    assert fingerprint.done.wait(60)
    assert fingerprint.problem is None
    assert fingerprint.digest is not None
    return fingerprint.digest


def record_name(model: Path) -> str:
    (file,) = [file for file in ModelFingerprint(str(model))._files if file.name == "model.safetensors"]
    name = module._record_name(file)
    assert name is not None
    return name


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as left alone for long, since nobody can set a ctime back."""
    monkeypatch.setattr(module, "is_settled", lambda file, seconds: True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that were read."""
    seen: list[int] = []

    def counting(fd: int, size: int) -> bytes:
        seen.append(size)
        return digest_of_file(fd, size)

    monkeypatch.setattr(module, "digest_of_file", counting)
    return seen


def test_equal_files_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    assert digest_of(make_model(tmp_path / "here")) == digest_of(make_model(tmp_path / "there"))


@pytest.mark.parametrize("position", [0, 4096, PIECE - 1, PIECE, SIZE // 2 + 5000, SIZE - 1])
def test_every_byte_counts(tmp_path: Path, position: int) -> None:
    model = make_model(tmp_path / "model")
    before = digest_of(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    assert digest_of(model) != before


def test_what_says_how_to_compute_counts_and_the_tokenizer_does_not(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    seen = [digest_of(model)]
    shaping = ("config.json", "modeling_some.py", "hf_quant_config.json", "model.safetensors.index.json")
    for name in shaping:
        (model / name).write_text('{"x": 1}')
        seen.append(digest_of(model))
    assert len(set(seen)) == 1 + len(shaping)
    (model / "tokenizer.json").write_text('{"other": 1}')
    assert digest_of(model) == seen[-1]


def test_the_digest_of_a_file_is_what_the_documents_say(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(SIZE)
    (tmp_path / "file").write_bytes(data)
    pieces = [hashlib.sha256(data[at : at + PIECE]).digest() for at in range(0, SIZE, PIECE)]
    expected = hashlib.sha256(b"hicache_ext/weights/2\0" + SIZE.to_bytes(8, "little") + b"".join(pieces)).digest()
    with (tmp_path / "file").open("rb") as file:
        assert digest_of_file(file.fileno(), SIZE) == expected


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_once_and_then_remembered(tmp_path: Path, reads: list[int]) -> None:
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    first = digest_of(model, records)
    assert SIZE in reads
    reads.clear()
    assert digest_of(model, records) == first
    assert SIZE not in reads
    assert [record.stat().st_mode & 0o777 for record in records.iterdir()] == [0o600]
    assert records.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("settled")
def test_a_listener_that_raises_keeps_the_result_from_nobody_and_nothing_is_read_again(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, heard = threading.Event(), threading.Event()
    fingerprint = ModelFingerprint(str(make_model(tmp_path / "model")))
    digests = fingerprint._digests
    monkeypatch.setattr(fingerprint, "_digests", lambda: reading.wait(60) and digests())

    def fail() -> None:
        raise RuntimeError("a tier with a bug")

    fingerprint.start()
    fingerprint.when_done(fail)
    fingerprint.when_done(heard.set)
    reading.set()
    assert heard.wait(10)
    files = len(reads)
    time.sleep(1.2)  # longer than the first pause of a loop that tries again
    assert len(reads) == files


def test_a_machine_without_threads_leaves_a_model_unidentified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fingerprint = ModelFingerprint(str(make_model(tmp_path / "model")))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    fingerprint.start()
    assert fingerprint.done.is_set() and fingerprint.digest is None
    assert "no thread" in str(fingerprint.problem)


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, reads: list[int]) -> None:
    """Two versions of it may have equal times."""
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    digest_of(model, records)
    reads.clear()
    digest_of(model, records)
    assert SIZE in reads


@pytest.mark.usefixtures("settled")
def test_an_edit_that_keeps_size_and_mtime_is_seen(tmp_path: Path) -> None:
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    file = model / "model.safetensors"
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    before = digest_of(model, records)
    file.write_bytes(random.Random(2).randbytes(SIZE))
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    assert digest_of(model, records) != before


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "a digest of another file", "a flipped digit"])
def test_a_damaged_record_is_read_again_and_never_believed(tmp_path: Path, damage: str) -> None:
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    before = digest_of(model, records)
    (record,) = records.iterdir()
    text = record.read_bytes()
    if damage == "a digest of another file":
        other = tmp_path / "other records"
        digest_of(make_model(tmp_path / "other", seed=2), other)
        new = next(other.iterdir()).read_bytes()
    else:
        flipped = (b"1" if text[:1] == b"0" else b"0") + text[1:]
        new = {"empty": b"", "cut": text[:40], "garbage": b"\xff" * 81, "a flipped digit": flipped}[damage]
    record.write_bytes(new)
    assert digest_of(model, records) == before
    assert record.read_bytes() == text


@pytest.mark.usefixtures("settled")
def test_a_directory_that_cannot_be_written_costs_only_the_reading(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "a file").write_text("")
    assert digest_of(model, tmp_path / "a file" / "records") == digest_of(model)


def test_a_file_that_changes_while_the_model_loads_leaves_it_unidentified(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    fingerprint = ModelFingerprint(str(model))
    (model / "model.safetensors").write_bytes(random.Random(3).randbytes(SIZE))
    fingerprint.start()
    fingerprint.done.wait(60)
    assert fingerprint.digest is None
    assert "model.safetensors changed while the model was loaded" in str(fingerprint.problem)


def test_a_file_that_changes_between_the_reading_and_the_load_leaves_it_unidentified(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    fingerprint = ModelFingerprint(str(model))
    told: list[str | None] = []
    fingerprint.when_done(lambda: told.append(fingerprint.digest))
    fingerprint.start()
    fingerprint.done.wait(60)
    make_model(tmp_path / "new", seed=3).joinpath("model.safetensors").rename(model / "model.safetensors")
    fingerprint.loaded()
    assert fingerprint.digest is None
    assert "changed" in str(fingerprint.problem)
    assert told[0] is not None
    assert told[1:] == [None]


def test_files_that_are_added_during_the_load_are_not_part_of_this_digest(tmp_path: Path) -> None:
    """Half a snapshot of the hub, of which SGLang fetches the rest."""
    model = make_model(tmp_path / "model")
    fingerprint = ModelFingerprint(str(model))
    assert fingerprint.loaded()
    (model / "more.safetensors").write_bytes(b"x")
    assert not fingerprint.loaded()
    assert fingerprint.digest is None
    assert fingerprint.problem is not None


@pytest.mark.usefixtures("settled")
def test_bytes_written_through_a_mapping_are_not_taken_for_the_remembered_ones(tmp_path: Path) -> None:
    """A page that is dirty already can be written again without a new ctime."""
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    with (model / "model.safetensors").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[100] = 1
        before = digest_of(model, records)
        mapped[100] = 2
        assert digest_of(model, records) != before


@pytest.mark.parametrize("kind", ["fuse.rclone", "squashfs", "tmpfs", "9p"])
@pytest.mark.usefixtures("settled")
def test_nothing_is_remembered_where_a_ctime_may_be_anything(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    monkeypatch.setattr(module, "file_system_of", lambda path: Mount("", kind, ""))
    digest_of(model, records)
    reads.clear()
    digest_of(model, records)
    assert SIZE in reads


def test_a_record_is_of_one_file_system_and_one_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    names = {record_name(model)}
    monkeypatch.setattr(module, "boot_id", lambda: "another")
    names.add(record_name(model))
    monkeypatch.setattr(module.os, "statvfs", lambda path: SimpleNamespace(f_fsid=17))
    names.add(record_name(model))
    assert len(names) == 3


def test_a_file_that_gets_shorter_under_the_reader_is_a_problem_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    read = module.read_into

    def cut(fd: int, pieces: list[memoryview], offset: int) -> int:
        os.truncate(model / "model.safetensors", 100)
        return read(fd, pieces, offset)

    monkeypatch.setattr(module, "read_into", cut)
    fingerprint = ModelFingerprint(str(model))
    fingerprint.start()
    fingerprint.done.wait(60)
    assert fingerprint.digest is None
    assert fingerprint.problem is not None


@pytest.mark.parametrize("path", ["nowhere", "empty", "s3://bucket/model"])
def test_a_model_without_weight_files_is_a_problem(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    fingerprint = ModelFingerprint(path if "://" in path else str(tmp_path / path))
    fingerprint.start()
    assert fingerprint.done.wait(10)
    assert fingerprint.digest is None
    assert path.rpartition("/")[2] in str(fingerprint.problem)


def test_a_gguf_file_counts_by_its_content_and_with_all_its_parts(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"content")
    assert digest_of(tmp_path / "a.gguf") == digest_of(tmp_path / "b.gguf")
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"part")
    before = digest_of(parts[0])
    parts[1].write_bytes(b"tarp")
    assert digest_of(parts[0]) != before


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    fingerprint = ModelFingerprint(str(model), weights=False)
    fingerprint.start()
    assert fingerprint.done.wait(10)
    assert fingerprint.digest is not None


@pytest.mark.usefixtures("settled")
def test_what_another_process_reads_is_left_to_it_and_taken_from_its_record(tmp_path: Path, reads: list[int]) -> None:
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    expected = digest_of(model)
    fingerprint = ModelFingerprint(str(model))
    reads.clear()
    with module.claimed(records, record_name(model)) as record:
        assert record is not None
        fingerprint.start(records)
        assert not fingerprint.done.wait(1)
        with (model / "model.safetensors").open("rb") as file:
            module._record(record, record_name(model), digest_of_file(file.fileno(), SIZE))
    assert fingerprint.done.wait(30)
    assert fingerprint.digest == expected
    assert SIZE not in reads


def test_a_stopped_process_that_holds_a_record_delays_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_TURN", 0.5)
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    with module.claimed(records, record_name(model)):
        digest_of(model, records)


def test_a_killed_process_gives_its_record_back(tmp_path: Path) -> None:
    model, records = make_model(tmp_path / "model"), tmp_path / "records"
    records.mkdir()
    name = record_name(model)
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(records / name)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with (records / name).open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    holder.wait()
    started = time.monotonic()
    digest_of(model, records)
    assert time.monotonic() - started < module._LONGEST_TURN


def test_a_snapshot_of_the_hub_is_found_through_its_links(tmp_path: Path) -> None:
    blobs = make_model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert digest_of(snapshot) == digest_of(blobs)
    shutil.rmtree(snapshot)
