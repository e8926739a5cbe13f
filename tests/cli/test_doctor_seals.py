"""hicache-ext doctor: who else may have the keys of a sealed tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli import doctor_command
from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig
from hicache_ext.page.transforms.sealing import CipherKind

SECRET = "0123456789abcdef0123456789abcdef-the-secret"


def findings(tmp_path: Path, capsys: pytest.CaptureFixture[str], *keys: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Those about the seal of a tier with these keys, by subject."""
    seal = {"mode": "encrypt", "keys": list(keys)}
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "layout": "pages", "seal": seal}
    main(["doctor", "--json", json.dumps(ExtraConfig.around({"tiers": {"disk": disk}}))])
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    (found,) = [s["findings"] for s in json.loads(printed.out)["sections"] if s["title"].startswith("tier disk")]
    return {one["subject"]: one for one in found if one["subject"].startswith("seal")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def test_a_key_that_its_account_alone_has_is_no_trouble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    found = findings(tmp_path, capsys, {"id": "new", "file": str(file)}, {"id": "old", "file": str(file)})
    assert list(found) == ["seal"] and found["seal"]["level"] == "ok"
    assert found["seal"]["seen"] == "encrypt, pages are written with key new and read with old, too"


@pytest.mark.parametrize(
    ("mode", "level", "who"),
    [(0o644, "warning", "every account"), (0o622, "warning", "every account"), (0o440, "note", "group ")],
)
def test_a_key_file_that_others_may_read_or_change_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: Path, mode: int, level: str, who: str
) -> None:
    file.chmod(mode)
    one = findings(tmp_path, capsys, {"id": "new", "file": str(file)})["seal key new"]
    assert one["level"] == level and who in one["seen"] and str(file) in one["seen"]
    assert "chmod 600" in one["remedy"]


def test_a_key_in_the_environment_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEAL_KEY", SECRET)
    assert findings(tmp_path, capsys, {"id": "new", "env": "SEAL_KEY"})["seal key new"]["level"] == "note"


def test_a_slow_cipher_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setattr(doctor_command, "fastest_cipher", lambda: CipherKind.CHACHA20_POLY1305)
    assert "ChaCha20" in findings(tmp_path, capsys, {"id": "new", "file": str(file)})["seal cipher"]["seen"]
