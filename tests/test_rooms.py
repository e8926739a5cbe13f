"""The rooms of the package: arrows run downwards only, nothing runs in a circle, SGLang is known in one room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rooms import KNOW_SGLANG, ORDER, Imports, picture, room_of, table


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports.read()


def test_every_room_has_a_place_in_the_order(imports: Imports) -> None:
    known = {room for room in ORDER if not room.endswith("*")}
    assert {room for room in imports.lines_of_rooms() if not room.startswith("storage.tiers.")} == known


def test_a_room_imports_only_from_rooms_below_it(imports: Imports) -> None:
    assert imports.upward() == []


def test_no_modules_import_each_other(imports: Imports) -> None:
    assert imports.circles() == []


def test_sglang_is_imported_in_its_room_and_by_the_rig_only(imports: Imports) -> None:
    assert [module for module in sorted(imports.knows_sglang) if room_of(module) not in KNOW_SGLANG] == []


def test_no_room_has_more_than_a_third_of_the_lines(imports: Imports) -> None:
    lines = imports.lines_of_rooms()
    assert [room for room, count in lines.items() if count > sum(lines.values()) / 3] == []


def test_wrong_arrows_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    package = tmp_path / "hicache_ext"
    for file, text in {
        "__init__.py": "",
        "errors.py": "def late():\n    import sglang.srt.server_args\n",
        "page/__init__.py": "",
        "page/identity.py": "from hicache_ext.page import hashes\n",
        "page/hashes.py": "def late():\n    from hicache_ext.page.identity import Shard\n",
        "runtime/__init__.py": "import hicache_ext.page.hashes\n",
        "storage/__init__.py": "",
        "storage/tiers/__init__.py": "",
        "storage/tiers/file/__init__.py": "",
        "storage/tiers/redis/__init__.py": "from hicache_ext.storage.tiers import file\n",
        "storage/tiering/__init__.py": "from hicache_ext.storage.tiers.redis import anything\n",
    }.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = Imports.read(package)
    assert found.upward() == [
        "hicache_ext.runtime -> hicache_ext.page.hashes",
        "hicache_ext.storage.tiers.redis -> hicache_ext.storage.tiers.file",
    ]
    assert found.circles() == [["hicache_ext.page.hashes", "hicache_ext.page.identity"]]
    assert found.knows_sglang == {"hicache_ext.errors"}


def test_the_picture_leaves_out_arrows_that_follow_from_others(imports: Imports) -> None:
    drawn = picture(imports)
    assert "config --> page" not in drawn or "config --> storage_contract" not in drawn
    assert all(room.replace(".", "_") in drawn and f"| {room} |" in table(imports) for room in ("errors", "sglang"))
