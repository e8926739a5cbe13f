"""The parts of the documentation that are made from the code: configuration keys and metrics.

Run as a module (``python -m tests.docs.generated``) this file writes them; test_generated.py compares. Keys, what they
take, their defaults and meanings are those of the configuration models; metrics are those that the package counts, with
the help texts that Prometheus gets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hicache_ext.config import HicacheExtConfig, TierConfig
from hicache_ext.config.model import RoleConfig
from hicache_ext.config.render import json_schema
from hicache_ext.config.schema import allowed_for
from hicache_ext.config.tier import tier_types
from hicache_ext.config.values import format_duration, format_size
from hicache_ext.storage.serving.metrics_export import BUILD_INFO, CALL_SECONDS, HELP
from tests.test_metrics import counted_in_the_package

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- made by python -m tests.docs.generated; do not edit -->", "<!-- end of what was made -->"

_SECTION = "hicache_ext"
_TIER = f"{_SECTION}.tiers.NAME"
_HEAD = "| key | default, or what it takes | meaning |\n|---|---|---|"
_PLAIN = re.compile(
    r"true or false|true, false$|a duration|a size|seconds|whole bytes|a (whole )?number|text|an absolute path|\d"
)
"""Beginnings of what a key takes that its default says as well."""
_GROUPS = {
    "linker_": "The external linker",
    "pd_write_": "The decode writer",
    "hints_": "Hints, on a prefill node",
    "kv_hints_": "What requests say about KV",
    "pull_": "Pull or recompute",
    "copy_": "Copies between GPU and host",
    "events_": "Events for routers",
    "record_": "Recordings",
}
"""Prefix of what is counted outside the tiers -> what it is of."""


# -- configuration -----------------------------------------------------------------------------------------------------


def keys() -> str:
    """A table for each section of the configuration, in Markdown."""
    types = {name: kind for name, kind in tier_types().items() if kind.__module__.startswith("hicache_ext.")}
    parts = [*_sections(_SECTION, HicacheExtConfig)]
    parts += _sections(_TIER, TierConfig, title=f"{_TIER}, every type")
    for name, kind in types.items():
        common = [field for field in kind.model_fields if _is_common(kind, field)]
        if len(common) + 1 < len(kind.model_fields):
            parts += _sections(_TIER, kind, title=f"{_TIER}, type {name}", skip=common, type_name=name)
    return "\n\n".join(parts)


def _sections(
    place: str, model: type[BaseModel], *, title: str = "", skip: Collection[str] = (), type_name: str = ""
) -> Iterator[str]:
    """The table of ``model``, then those of the mappings in it. A section of mappings alone has none."""
    inner: dict[str, type[BaseModel]] = {}
    rows = [f"| `type` | `{type_name}` | which kind of tier |"] if type_name else []
    fields = [name for name in model.model_fields if name != "type" and name not in skip]
    for name in fields:
        below = _model_in(model.model_fields[name].annotation)
        if below is not None:
            inner[f"{place}.{name}"] = below
        rows.append(_row(model, name, _where(f"{place}.{name}", below) if below else ""))
    if _has_values(model):
        heading = f"## `{place}`" if place == _SECTION else f"### `{place}`{title.removeprefix(place)}"
        yield f"{heading}\n\n{_HEAD}\n" + "\n".join(rows)
    for deeper, below in inner.items():
        if below is not RoleConfig:
            yield from _sections(deeper, below)


def _row(model: type[BaseModel], name: str, below: str) -> str:
    meaning = " ".join((model.model_fields[name].description or "").split())
    if below:
        return f"| `{name}` | {below} | {_cell(meaning)} |"
    takes, default = re.sub(", such as [^,]*$", "", _cell(allowed_for(model, name))), _default(model, name)
    if default and _PLAIN.match(takes):
        # The default shows what kind of value it is.
        takes = default
    elif default:
        word = re.compile(rf"\b{re.escape(default.strip('`'))}\b")
        takes = (
            word.sub(lambda found: f"**{found[0]}**", takes, count=1) if word.search(takes) else f"{default}; {takes}"
        )
    elif model.model_fields[name].is_required():
        takes = f"required: {takes}"
    return f"| `{name}` | {takes} | {_cell(meaning)} |"


def _default(model: type[BaseModel], name: str) -> str:
    """As one writes it; "" where there is none, and where leaving the key out means something else than any value."""
    field, takes = model.model_fields[name], allowed_for(model, name)
    value = _schema_of(model).get("properties", {}).get(name, {}).get("default", field.default)
    if value is None and takes.endswith("or auto"):
        value = "auto"
    if value is None or value is PydanticUndefined or value in ("", [], ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float) and "size" in takes:
        return f"`{format_size(int(value))}`"
    if isinstance(value, int | float) and "duration" in takes:
        return f"`{format_duration(float(value))}`"
    return f"`{value}`"


def _schema_of(model: type[BaseModel]) -> Mapping[str, Any]:
    """The part of the JSON Schema that is of ``model``; of what all tiers have, that of a tier."""
    definitions = json_schema()["$defs"]
    found = definitions.get(model.__name__) or definitions.get("FileTierConfig", {})
    return found if isinstance(found, Mapping) else {}


def _is_common(kind: type[TierConfig], name: str) -> bool:
    """Whether a key of a type is that of every tier, said in the same words."""
    common, own = TierConfig.model_fields.get(name), kind.model_fields[name]
    return (
        common is not None
        and (common.description, common.default) == (own.description, own.default)
        and allowed_for(TierConfig, name) == allowed_for(kind, name)
    )


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The mapping that a field holds: itself, one that may be None, or the values of a dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and not issubclass(annotation, TierConfig):
        return annotation
    for part in get_args(annotation):
        if (found := _model_in(part)) is not None:
            return found
    return None


def _has_values(model: type[BaseModel]) -> bool:
    """Whether a section has more than mappings in it."""
    return any(_model_in(field.annotation) is None for field in model.model_fields.values())


def _where(place: str, model: type[BaseModel]) -> str:
    """What a row says of a mapping, whose table stands further below."""
    anchor = place.lower().replace(".", "")
    return f"[below](#{anchor})" if _has_values(model) and model is not RoleConfig else "a mapping"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[", "&#91;")


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Tables of everything that is exported, in Markdown."""
    named = {counted: name for name, counted in counted_in_the_package()}
    tables: dict[str, list[str]] = {"Tiers": [], **{title: [] for title in _GROUPS.values()}}
    for counted, text in HELP.items():
        if counted not in named:
            continue
        title = next((title for prefix, title in _GROUPS.items() if counted.startswith(prefix)), "Tiers")
        tables[title].append(f"| `{named[counted]}` | {_cell(text)} |")
    tables["Tiers"] += [
        f"| `{CALL_SECONDS}` | Histogram of the seconds of whole calls on a tier, waits in guards included. |",
        f"| `{BUILD_INFO}` | Always 1; the label `version` says what runs. |",
    ]
    head = "| metric | meaning |\n|---|---|"
    return "\n\n".join(f"### {title}\n\n{head}\n" + "\n".join(rows) for title, rows in tables.items() if rows)


# -- the pages ---------------------------------------------------------------------------------------------------------

PAGES = {"configuration.md": keys, "metrics.md": metrics}
"""Page -> what makes the part between the marks."""


def in_document(page: str) -> str:
    return (DOCS / page).read_text().split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    for page, make in PAGES.items():
        head, rest = (DOCS / page).read_text().split(BEGIN)
        (DOCS / page).write_text(f"{head}{BEGIN}\n\n{make()}\n\n{END}{rest.split(END)[1]}")
