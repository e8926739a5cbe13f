"""Compiled code that is kept: found wherever it is, used only from files that nobody else could have written."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_ext.runtime import code_cache as module
from hicache_ext.runtime.code_cache import CodeCache, code_cache

FUNCTIONS = {"a.module.function": os.urandom(3000), "a.module.other": b""}
STRANGER = 54321


def cache_in(*directories: Path) -> CodeCache:
    return CodeCache("of_a_test", directories, directories)


def kept_in(directory: Path) -> Path:
    cache_in(directory).keep(FUNCTIONS, directory)
    (file,) = directory.iterdir()
    return file


def test_what_is_kept_is_found_and_readable_for_all_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        file = kept_in(tmp_path)
    finally:
        os.umask(before)
    assert cache_in(tmp_path).find() == (FUNCTIONS, ())
    assert file.stat().st_mode & 0o777 == 0o644


def test_another_version_does_not_find_it(tmp_path: Path) -> None:
    kept_in(tmp_path)
    assert CodeCache("another", (tmp_path,), (tmp_path,)).find() == (None, ())


def test_it_is_found_where_nothing_can_be_written(tmp_path: Path) -> None:
    kept_in(tmp_path)
    not_there, in_a_file = tmp_path / "not there", tmp_path / "file" / "cache"
    (tmp_path / "file").touch()
    assert cache_in(not_there, in_a_file, tmp_path).find() == (FUNCTIONS, ())
    assert not not_there.exists()


def test_the_first_directory_that_can_be_written_takes_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place, reason = cache_in(tmp_path / "file" / "cache", tmp_path / "new" / "cache").place()
    assert (place, reason) == (tmp_path / "new" / "cache", "")
    assert not list((tmp_path / "new" / "cache").iterdir())


def test_where_no_directory_can_be_written_each_has_its_reason(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).touch()
    place, reason = cache_in(tmp_path / "one" / "x", tmp_path / "other" / "y").place()
    assert place is None
    words = os.strerror(errno.ENOTDIR)
    assert reason == f"{tmp_path}/one/x: {words}; {tmp_path}/other/y: {words}"


def test_an_account_without_a_home_has_a_reason_too() -> None:
    assert cache_in().place() == (None, "this account has no home directory")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    kept_in(tmp_path).chmod(mode)
    found, (sentence,) = cache_in(tmp_path).find()
    assert found is None
    assert sentence.startswith(f"{tmp_path}/hicache_ext-of_a_test.")
    assert "other accounts may write it" in sentence


def test_a_file_of_another_account_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("missing: root, who gives files away")
    os.chown(kept_in(tmp_path), STRANGER, -1)
    found, (sentence,) = cache_in(tmp_path).find()
    assert found is None
    assert f"it belongs to account {STRANGER}" in sentence


def test_a_file_of_root_is_used_by_another_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("missing: root")
    kept_in(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert cache_in(tmp_path).find() == (FUNCTIONS, ())


def _as_a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _as_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o644)


def _cut(file: Path) -> None:
    os.truncate(file, 500)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _with_another_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def _of_another_format(file: Path) -> None:
    file.write_bytes(b"hicache_ext compiled 0\n" + file.read_bytes()[len(module._BEGINNING) :])


@pytest.mark.parametrize(
    "spoil", [_as_a_link, _as_a_pipe, _cut, _empty, _longer, _with_another_bit, _of_another_format]
)
def test_a_file_that_is_not_whole_and_plain_is_refused_and_kept_anew(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(kept_in(tmp_path))
    found, refused = cache_in(tmp_path).find()
    assert (found, len(refused)) == (None, 1)
    cache_in(tmp_path).keep(FUNCTIONS, tmp_path)
    assert cache_in(tmp_path).find() == (FUNCTIONS, ())


class _Evil:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("refused", ["belongs to another account", "may be written by others", "without its digest"])
def test_nothing_is_unpickled_of_a_file_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "cache"
    place.mkdir()
    file = kept_in(place)
    digest = module.hashlib.sha256(pickle.dumps(_Evil())).digest()
    if refused == "without its digest":
        digest = bytes(len(digest))
    file.write_bytes(module._BEGINNING + digest + pickle.dumps(_Evil()))
    if refused == "belongs to another account":
        if os.geteuid():
            pytest.skip("missing: root, who gives files away")
        os.chown(file, STRANGER, -1)
    elif refused == "may be written by others":
        file.chmod(0o666)
    assert cache_in(place).find()[0] is None
    assert not Path("executed").exists()
    file.write_bytes(module._BEGINNING + module.hashlib.sha256(pickle.dumps(_Evil())).digest() + pickle.dumps(_Evil()))
    file.chmod(0o644)
    os.chown(file, os.geteuid(), -1)
    cache_in(place).find()
    assert Path("executed").exists(), "what the test plants would do nothing"


def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            cache_in(tmp_path).keep(FUNCTIONS, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_configured_directory_is_the_only_one_that_is_written_and_the_first_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    configured = code_cache("some")
    assert configured.written == (tmp_path,)
    assert configured.read[0] == tmp_path
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/somebody/cache")
    own = code_cache("some")
    assert own.written == own.read == (*configured.read[1:2], Path("/home/somebody/cache/hicache_ext"))
    assert own.written[0].name == "__pycache__"


def test_code_for_another_processor_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from numba.core.codegen import JITCPUCodegen

    here = code_cache("some").version
    monkeypatch.setattr(JITCPUCodegen, "magic_tuple", lambda _: ("x86_64-unknown-linux-gnu", "generic", ""))
    assert code_cache("some").version != here
