"""The rooms of the package: arrows run downwards only, nothing runs in a circle, SGLang is known in one room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rooms import AIMS, KNOW_SGLANG, ORDER, Imports, measured, picture, room_of, table

BUDGETS = {
    "storage.tiers.file": (9_582, 6_900),
    "sglang": (5_847, 5_000),
    "storage.tiering": (3_890, 3_300),
    "storage.tiers.redis": (2_844, 2_500),
    "testing": (3_197, 2_800),
    "bench": (1_501, 1_600),
    "cli, doctor": (3_408, 2_500),
    "storage.contract": (3_401, 2_600),
    "page": (2_631, 2_300),
    "runtime": (2_395, 1_900),
    "config": (2_055, 1_700),
    "storage.tiers.object, storage.tiers.mooncake": (3_353, 3_200),
    "storage.serving, storage.guards": (3_134, 2_600),
    "kernels, plan, pd": (2_658, 3_400),
    "native": (2_360, 1_600),
    "the rest": (423, 400),
    "files of Python": (218, 215),
    "classes": (370, 300),
    "configuration keys": (92, 85),
    "words of docs": (54_967, 55_000),
}
"""What there may be of each, and what there is to be. The first number is what there was when it was last written down,
and only ever shrinks; ``python -m tests.rooms --budgets`` prints the table. Whoever needs more takes it elsewhere."""


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


def test_nothing_grows_beyond_its_budget() -> None:
    assert {name: aim for name, (_, aim) in BUDGETS.items()} == AIMS
    now = measured()
    assert {name: now[name] for name, bounds in BUDGETS.items() if now[name] > max(bounds)} == {}


def test_a_package_that_is_run_for_a_name_in_it_is_an_import(tmp_path: Path) -> None:
    """A submodule took another one out of its own package, which imports the submodule."""
    package = tmp_path / "hicache_ext"
    (package / "config").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "config" / "__init__.py").write_text("from hicache_ext.config.part import Part\n")
    (package / "config" / "part.py").write_text("from hicache_ext.config import other\n")
    (package / "config" / "other.py").write_text("")
    assert Imports.read(package).circles() == [["hicache_ext.config", "hicache_ext.config.part"]]


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
