"""The tables of docs/trouble.md, between its two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.trouble.clients import LIMIT
from benchmarks.trouble.contenders import CONTENDERS
from benchmarks.trouble.rows import ROWS
from hicache_ext.bench.frame import machine_facts

BEGIN, END = "<!-- made by python -m benchmarks.trouble; do not edit -->", "<!-- end of what was made -->"
_PACKAGES = ("sglang", "lmcache", "nixl", "mooncake-transfer-engine-non-cuda", "torch")


def facts_of_run(directory: Path) -> dict[str, Any]:
    """Versions and machine; each cell has its own date."""
    return {"machine": machine_facts(directory, _PACKAGES)}


def write_report(path: Path, document: dict[str, Any]) -> None:
    """Replace what lies between the marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{tables(document)}{END}{after}")


def tables(document: dict[str, Any]) -> str:
    """One table of backends over files, one of those over pools, and what they were measured with."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    place = f"{machine['cpus']} x {machine['cpu_model']}, Linux {machine['kernel']}, {machine['file_system']}"
    days = {cell["date"][:10] for row in document["results"].values() for cell in row.values()}
    words = f"Measured {' to '.join(sorted({min(days), max(days)}))} on {place}; {versions}.\n\n"
    in_directories = [name for name, one in CONTENDERS.items() if one.medium == "directory"]
    in_pools = [name for name in CONTENDERS if name not in in_directories]
    parts = [_table(document["results"], names) for names in (in_directories, in_pools)]
    return f"{words}Over directories:\n\n{parts[0]}\nOver pools:\n\n{parts[1]}"


def _table(results: dict[str, Any], names: list[str]) -> str:
    lines = [f"| trouble | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title in ROWS:
        cells = [_words(results.get(title, {}).get(name)) for name in names]
        if any(cell and not cell.startswith("(") for cell in cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _words(cells: dict[str, Any] | None) -> str:
    """A cell of the table: wrong bytes first, in bold."""
    if cells is None:
        return "(not run)"
    if "not_run" in cells:
        return f"({cells['not_run']})".replace("|", "/")
    words = []
    if cells.get("asked"):
        wrong = f"{cells['wrong']} of {cells['asked']} wrong"
        words.append(f"**{wrong}**" if cells["wrong"] else "0 wrong")
    if cells.get("good"):
        words.append(f"{cells['lost']} of {cells['good']} good pages lost" if cells["lost"] else "none lost")
    if cells.get("raised"):
        words.append(f"raised {cells['raised']} times" if cells["raised"] > 1 else "raised once")
    if "waited" in cells:
        waited = cells["waited"]
        seconds = f"{waited:.1f} s" if waited >= 0.1 else "under 0.1 s"
        words.append(f"**waits for ever** (over {LIMIT:.0f} s)" if waited >= LIMIT else f"waited {seconds}")
    if "beyond" in cells:
        words.append(f"**{cells['beyond'] >> 20} MiB beyond**" if cells["beyond"] >= 1 << 20 else "within the bound")
    if cells.get("note") and not cells.get("raised"):
        words.append(cells["note"])
    return ", ".join(words).replace("|", "/")
