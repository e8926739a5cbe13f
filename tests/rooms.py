"""The rooms of the package, as its imports draw them. ``python -m tests.rooms`` prints the picture for the docs.

A room is a directory (or a file at the top) with one subject. Rooms have an order; a module imports from its own room
and from rooms before it. Every import counts: inside functions and for type checking, too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hicache_ext"

ORDER = (
    "version",
    "errors",
    "packages",
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
            for name in _imported(tree):
                if name.partition(".")[0] in SGLANG_PACKAGES:
                    found.knows_sglang.add(module)
                while name and name not in trees:
                    name = name.rpartition(".")[0]
                if name and name != module:
                    found.of[module].add(name)
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


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno} has a relative import: write the whole name")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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


if __name__ == "__main__":
    read = Imports.read()
    print(f"```mermaid\n{picture(read)}\n```\n\n{table(read)}")
    for trouble in (*read.upward(), *(" <-> ".join(circle) for circle in read.circles())):
        print(f"\nwrong: {trouble}")
