"""``type: file``: local disks and shared file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, WithJsonSchema, field_validator
from pydantic_core.core_schema import ValidationInfo

from hicache_ext.config.problems import listed, quoted, refuse, shown
from hicache_ext.config.schema import Allowed, checked, one_of, true_or_false
from hicache_ext.config.tier import Sharing, TierConfig
from hicache_ext.config.values import (
    NO_LIMIT,
    SIZE_ALLOWED,
    directory_relation,
    duration,
    expand_templates,
    format_duration,
    format_size,
    or_auto,
    or_word,
    size,
    whole_number,
)
from hicache_ext.errors import ConfigError

SMALLEST_CAPACITY = 1024 * 1024
MOST_THREADS = 64

_CAPACITY_ALLOWED = "a size such as 512GiB, or 'unlimited'"
_SIZES_ALLOWED = f"{SIZE_ALLOWED}, or 'unlimited'"
_PATH_ALLOWED = "an absolute path, or a list of them"
_THREADS_ALLOWED = f"1 to {MOST_THREADS}, or auto"
_SHARED_ALLOWED = "true, false, or auto"
_TTL_ALLOWED = "a duration from 1s to 365d, such as 7d, or none"
_MODES = ("private", "group")
_GROUP_ALLOWED = "the name of a group or its number, with mode: group"
_GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,255}")


def parse_paths(value: object) -> tuple[str, ...]:
    """Absolute, normalised, distinct directories, none inside another, templates expanded."""
    single = isinstance(value, str)
    written: Sequence[object] = [value] if single else value if isinstance(value, list | tuple) else []
    if not written:
        problem = "the list is empty" if isinstance(value, list | tuple) else f"{shown(value)} is not accepted"
        raise ConfigError("", problem, _PATH_ALLOWED)
    paths: list[str] = []
    for position, text in enumerate(written):
        place = "" if single else f"[{position}]"
        path = _parse_path(text, place)
        for earlier, other in enumerate(paths):
            if relation := directory_relation(path, other):
                raise ConfigError(place, f"{quoted(str(text))} {relation} path[{earlier}]", "distinct directories")
        paths.append(path)
    return tuple(paths)


def _parse_path(text: object, place: str) -> str:
    if not isinstance(text, str):
        raise refuse(text, _PATH_ALLOWED, place)
    if not text or "\0" in text:
        raise ConfigError(place, f"{shown(text)} is not a path", _PATH_ALLOWED)
    path = expand_templates(text, place)
    # The text is shown as it was written: what came out of an environment variable is not repeated.
    if not os.path.isabs(path):
        raise ConfigError(place, f"{quoted(text)} is not an absolute path", _PATH_ALLOWED)
    if ".." in path.split("/"):
        raise ConfigError(place, f"{quoted(text)} contains '..'", _PATH_ALLOWED)
    normalised = "/" + os.path.normpath(path).lstrip("/")
    if normalised == "/":
        raise ConfigError(place, "the root directory cannot be a cache directory", _PATH_ALLOWED)
    return normalised


def parse_group(value: object) -> str | int:
    """A group's name or its number. Whether there is such a group is for the machine that the server runs on."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise refuse(value, _GROUP_ALLOWED)
    if isinstance(value, int) or value.isdecimal():
        number = int(value)
        if not 0 <= number < (1 << 32) - 1:
            raise ConfigError("", f"{number} is no number of a group", _GROUP_ALLOWED)
        return number
    if not _GROUP_NAME.fullmatch(value):
        raise ConfigError("", f"{shown(value)} is no name of a group", _GROUP_ALLOWED)
    return value


def _shared(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse(value, _SHARED_ALLOWED)


class FileTierConfig(TierConfig):
    """Local disks and shared file systems."""

    type: Annotated[Literal["file"], Allowed("file")] = "file"
    path: Annotated[
        tuple[str, ...],
        Field(description="directories of this tier alone; pages are spread over them"),
        Allowed(_PATH_ALLOWED),
        checked(parse_paths),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
    ]
    capacity: Annotated[
        int | None,
        Field(description="of the whole tier: all paths, ranks and processes together; or unlimited"),
        Allowed(_CAPACITY_ALLOWED),
        checked(or_word("unlimited", None, size(SMALLEST_CAPACITY, NO_LIMIT, _CAPACITY_ALLOWED, units=_SIZES_ALLOWED))),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": SMALLEST_CAPACITY}, {"type": "string"}]}),
    ]
    layout: Annotated[
        Literal["auto", "pages", "slab"],
        Field(description="files of pages, or preallocated slabs with an index; auto goes by the file system"),
        Allowed("auto, pages, slab"),
        one_of("auto", "pages", "slab"),
    ] = "auto"
    io: Annotated[
        Literal["auto", "direct", "buffered"],
        Field(description="O_DIRECT, or through the page cache; auto measures the device at start"),
        Allowed("auto, direct, buffered"),
        one_of("auto", "direct", "buffered"),
    ] = "auto"
    threads: Annotated[
        int | None,
        Field(description="I/O threads per rank and path; auto measures", json_schema_extra={"default": "auto"}),
        Allowed(_THREADS_ALLOWED),
        checked(or_word("auto", None, whole_number(1, MOST_THREADS, _THREADS_ALLOWED))),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_THREADS}, {"const": "auto"}]}),
    ] = None
    ttl: Annotated[
        float | None,
        Field(description="pages written longer ago than this are misses, and their room is free"),
        Allowed(_TTL_ALLOWED),
        checked(or_word("none", None, duration(1.0, NO_LIMIT, _TTL_ALLOWED))),
        WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
    ] = None

    shared: Annotated[
        bool | None,
        Field(
            description="whether other machines have the same directory; auto goes by the file system",
            json_schema_extra={"default": "auto"},
        ),
        Allowed(_SHARED_ALLOWED),
        checked(or_auto(_shared)),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "auto"}]}),
    ] = None
    mode: Annotated[
        Literal["private", "group"],
        Field(description="who may use the files: the server's account alone, or the members of a group"),
        Allowed(listed(_MODES)),
        one_of(*_MODES),
    ] = "private"
    group: Annotated[
        str | int | None,
        Field(description="of mode: group; left out: the group that the directory has"),
        Allowed(_GROUP_ALLOWED),
        checked(parse_group),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}),
    ] = None
    require_mount: Annotated[
        bool,
        Field(description="true: no start while a path is on the root file system"),
        Allowed("true or false"),
        checked(true_or_false),
    ] = False

    @field_validator("group", mode="after")
    @classmethod
    def _a_group_has_its_mode(cls, group: str | int | None, info: ValidationInfo) -> str | int | None:
        if group is not None and info.data.get("mode") == "private":
            raise ConfigError("", "files of mode private have no group", "with mode: group")
        return group

    removed: ClassVar[Mapping[str, str]] = {"open_files": "a process keeps at most 512 files of slabs open per path"}
    live_keys: ClassVar[frozenset[str]] = TierConfig.live_keys | {"capacity"}
    block: ClassVar[int] = 4096
    carries_hints: ClassVar[bool] = True
    lists_pages: ClassVar[bool] = True
    keeps_identities: ClassVar[bool] = True

    @field_validator("shared", mode="after")
    @classmethod
    def _slabs_belong_to_one_machine(cls, shared: bool | None, info: ValidationInfo) -> bool | None:
        if shared and info.data.get("layout") == "slab":
            raise ConfigError("", "slabs belong to one machine", "false, or layout: pages")
        return shared

    def directories(self) -> tuple[str, ...]:
        return self.path

    @property
    def may_be_private(self) -> bool:
        return not self.shared

    def sharing(self) -> Sharing:
        if self.shared is not None:
            return Sharing(self.shared, "as configured")
        if self.layout == "slab":
            return Sharing(False, "slabs belong to one machine")
        return super().sharing()

    def summary(self) -> str:
        capacity = "unlimited" if self.capacity is None else format_size(self.capacity)
        ttl = "" if self.ttl is None else f", ttl {format_duration(self.ttl)}"
        return f"file, capacity {capacity}{ttl}, {', '.join(self.path)}"
