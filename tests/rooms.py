"""The rooms of the package, as its imports draw them. ``python -m tests.rooms`` prints the picture for the docs, and
``python -m tests.rooms --budgets`` the table of bounds for tests/test_rooms.py.

A room is a directory (or a file at the top) with one subject. Rooms have an order; a module imports from its own room
and from rooms before it. Every import counts: inside functions and for type checking, too. And so does a package whose
``__init__`` is run because a name is taken out of it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hicache_ext"

ORDER = (
    "version",
    "errors",
    "packages",
    "native",
    "runtime",
    "page",
    "storage.contract",
    "config",
    "storage.guards",
    "storage.tiers.*",
    "storage.tiering",
    "storage.serving",
    "kernels",
    "pd",
    "doors",
    "sglang",
    "testing",
    "bench",
    "plan",
    "cli",
)
"""Lowest first. The rooms of storage.tiers.* do not import each other."""

DOORS = ("hicache_ext.storage.opening", "hicache_ext.storage.store")
"""Names that users import; they only pass on what rooms below have."""
SGLANG_DOOR = "hicache_ext.storage.backend"
"""The name that SGLang's configuration has; it belongs to the room sglang."""
KNOW_SGLANG = ("sglang", "testing")
SGLANG_PACKAGES = ("sglang", "sgl_kernel")


def room_of(module: str) -> str:
    """``hicache_ext.storage.tiers.file.slab.index`` -> ``storage.tiers.file``."""
    parts = module.split(".")[1:]
    if module in DOORS:
        return "doors"
    if module == SGLANG_DOOR:
        return "sglang"
    if parts == ["__main__"]:
        return "cli"
    if not parts or parts in (["storage"], ["storage", "tiers"]):
        return "version"
    if parts[0] == "storage":
        return ".".join(parts[: 3 if parts[1] == "tiers" else 2])
    return parts[0]


def rank_of(room: str) -> int:
    """The place of a room in the order. Raises ValueError for a room that has none."""
    return ORDER.index("storage.tiers.*" if room.startswith("storage.tiers.") else room)


@dataclass(slots=True)
class Imports:
    """Of every module of a package: the modules of the package it imports, and whether it imports SGLang."""

    lines: dict[str, int] = field(default_factory=dict)
    of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    knows_sglang: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, package: Path = PACKAGE) -> Imports:
        found = cls()
        trees = {}
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text()
            found.lines[module] = len(text.splitlines())
            trees[module] = ast.parse(text)
        for module, tree in trees.items():
            for package_name, name in _imported(tree):
                if name.partition(".")[0] in SGLANG_PACKAGES:
                    found.knows_sglang.add(module)
                while name and name not in trees:
                    name = name.rpartition(".")[0]
                found.of[module] |= {name, package_name} & trees.keys() - {module}
        return found

    def upward(self) -> list[str]:
        """Imports from a room that is not below, as ``module -> module``."""
        return [
            f"{module} -> {target}"
            for module, targets in sorted(self.of.items())
            for target in sorted(targets)
            if (ours := room_of(module)) != (its := room_of(target)) and rank_of(its) >= rank_of(ours)
        ]

    def circles(self) -> list[list[str]]:
        """Modules that import each other, directly or around (Tarjan)."""
        number: dict[str, int] = {}
        lowest: dict[str, int] = {}
        stack: list[str] = []
        circles: list[list[str]] = []

        def visit(module: str) -> None:
            number[module] = lowest[module] = len(number)
            stack.append(module)
            for target in self.of[module]:
                if target not in number:
                    visit(target)
                if target in stack:
                    lowest[module] = min(lowest[module], lowest[target])
            if lowest[module] == number[module]:
                at = stack.index(module)
                members = stack[at:]
                del stack[at:]
                if len(members) > 1:
                    circles.append(sorted(members))

        for module in self.lines:
            if module not in number:
                visit(module)
        return circles

    def lines_of_rooms(self) -> dict[str, int]:
        """Room -> lines, in the order of the rooms."""
        lines: dict[str, int] = defaultdict(int)
        for module, count in self.lines.items():
            lines[room_of(module)] += count
        return {room: lines[room] for room in sorted(lines, key=lambda room: (rank_of(room), room))}

    def between_rooms(self) -> dict[str, set[str]]:
        """Room -> the rooms it imports from."""
        rooms: dict[str, set[str]] = {room: set() for room in self.lines_of_rooms()}
        for module, targets in self.of.items():
            rooms[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
        return rooms


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The module or package that a name is taken out of, and the whole name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno} has a relative import: write the whole name")
            yield from ((node.module or "", f"{node.module}.{alias.name}") for alias in node.names)


def _without_detours(rooms: dict[str, set[str]]) -> dict[str, set[str]]:
    """Only the arrows that no other path of arrows stands for."""

    def reached(room: str) -> set[str]:
        return {far for near in rooms[room] for far in {near} | reached(near)}

    return {
        room: {near for near in nears if not any(near in reached(o) for o in nears)} for room, nears in rooms.items()
    }


def table(imports: Imports) -> str:
    lines = imports.lines_of_rooms()
    total = sum(lines.values())
    rows = [f"| {room} | {count:,} | {count / total:.1%} |" for room, count in lines.items() if room != "version"]
    return "\n".join(["| room | lines | share |", "|---|---:|---:|", *rows, f"| all | {total:,} | |"])


def picture(imports: Imports) -> str:
    """Mermaid: an arrow from each room to those it imports from, less those that follow from others."""
    lines = imports.lines_of_rooms()
    rooms = {room: nears - {"version"} for room, nears in imports.between_rooms().items() if room != "version"}
    text = ["graph TD"]
    text += [f'    {room.replace(".", "_")}["{room} ({lines[room]:,})"]' for room in reversed(rooms)]
    text += [
        f"    {room.replace('.', '_')} --> {near.replace('.', '_')}"
        for room, nears in reversed(_without_detours(rooms).items())
        for near in sorted(nears)
    ]
    return "\n".join(text)


AIMS = {
    "storage.tiers.file": 6_900,
    "sglang": 5_000,
    "storage.tiering": 3_300,
    "storage.tiers.redis": 2_500,
    "testing": 2_800,
    "bench": 1_600,
    "cli, doctor": 2_500,
    "storage.contract": 2_600,
    "page": 2_300,
    "runtime": 1_900,
    "config": 1_700,
    "storage.tiers.object, storage.tiers.mooncake": 3_200,
    "storage.serving, storage.guards": 2_600,
    "kernels, plan, pd": 3_400,
    "native": 1_600,
    "the rest": 400,
    "files of Python": 215,
    "classes": 300,
    "configuration keys": 85,
    "words of docs": 55_000,
}
"""What is to be reached: lines of rooms (those of C count, too), and what a newcomer has to take in."""


def measured() -> dict[str, int]:
    """What is there now of all that ``AIMS`` has."""
    lines = Imports.read().lines_of_rooms()
    lines["native"] += sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.[ch]"))
    now = {name: sum(lines.pop(room, 0) for room in name.split(", ")) for name in AIMS if name in _ROOMS}
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    pages = subprocess.run(["git", "ls-files", "docs"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    texts = [path for name in pages.stdout.split() if (path := PACKAGE.parent / name).suffix == ".md" and path.exists()]
    return {
        **now,
        "the rest": sum(lines.values()),
        "files of Python": len(trees),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree)),
        "configuration keys": len(configuration_keys()),
        "words of docs": sum(len(path.read_text().split()) for path in texts),
    }


_ROOMS = frozenset(list(AIMS)[: list(AIMS).index("the rest")])


def configuration_keys() -> set[str]:
    """Every key under ``hicache_ext``; those that all types of tier have count once, those of roles not at all."""
    from hicache_ext.config import HicacheExtConfig, TierConfig, tier_types

    keys = set(_keys_of(HicacheExtConfig, "")) - {"roles"}
    for name, model in tier_types().items():
        common = TierConfig.model_fields
        keys |= {f"tiers.{'' if key.split('.')[0] in common else name + '.'}{key}" for key in _keys_of(model, "")}
    return keys - {"tiers"}


def _keys_of(model: type[typing.Any], above: str) -> Iterator[str]:
    for name, known in model.model_fields.items():
        below = [] if name in ("roles", "tiers") else _models_in(known.annotation)
        for section in below:
            yield from _keys_of(section, f"{above}{name}.")
        if not below:
            yield above + name


def _models_in(kind: object) -> list[type[typing.Any]]:
    if hasattr(kind, "model_fields"):
        return [typing.cast("type[typing.Any]", kind)]
    return [model for part in typing.get_args(kind) for model in _models_in(part)]


def budgets() -> str:
    """The table ``BUDGETS`` of tests/test_rooms.py, with what is there now."""
    rows = [f'    "{name}": ({now:_}, {AIMS[name]:_}),' for name, now in measured().items()]
    return "\n".join(["BUDGETS = {", *rows, "}"])


if __name__ == "__main__" and sys.argv[1:] == ["--budgets"]:
    print(budgets())
elif __name__ == "__main__":
    read = Imports.read()
    print(f"```mermaid\n{picture(read)}\n```\n\n{table(read)}")
    for trouble in (*read.upward(), *(" <-> ".join(circle) for circle in read.circles())):
        print(f"\nwrong: {trouble}")
