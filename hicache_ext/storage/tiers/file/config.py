"""``type: file``: local disks and shared file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from hicache_ext.config.problems import quoted, refuse, shown
from hicache_ext.config.schema import Allowed
from hicache_ext.config.tier import Sharing, TierConfig
from hicache_ext.config.values import (
    NO_LIMIT,
    SIZE_ALLOWED,
    directory_relation,
    duration,
    expand_templates,
    format_duration,
    format_size,
    one_or_more,
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
_GROUP_ALLOWED = "the name of a group or its number, with mode: group"
_GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,255}")


def _path(text: object, place: str, others: Sequence[str]) -> str:
    """Expand, check and normalise a path: it must be absolute, and not inside another path or around it."""
    if not isinstance(text, str):
        raise refuse(text, _PATH_ALLOWED, place)
    if not text or "\0" in text:
        raise ConfigError(place, f"{shown(text)} is not a path", _PATH_ALLOWED)
    path = expand_templates(text, place)
    # Errors show the text as written, so that they do not reveal the content of an environment variable.
    if not os.path.isabs(path):
        raise ConfigError(place, f"{quoted(text)} is not an absolute path", _PATH_ALLOWED)
    if ".." in path.split("/"):
        raise ConfigError(place, f"{quoted(text)} contains '..'", _PATH_ALLOWED)
    normalised = "/" + os.path.normpath(path).lstrip("/")
    if normalised == "/":
        raise ConfigError(place, "the root directory cannot be a cache directory", _PATH_ALLOWED)
    for earlier, other in enumerate(others):
        if relation := directory_relation(normalised, other):
            raise ConfigError(place, f"{quoted(text)} {relation} path[{earlier}]", "distinct directories")
    return normalised


def parse_group(value: object) -> str | int:
    """Parse a group's name or number. Whether it exists can only be checked on the server's machine."""
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


class FileTierConfig(TierConfig):
    """Local disks and shared file systems."""

    type: Literal["file"] = "file"
    path: Annotated[tuple[str, ...], Allowed(_PATH_ALLOWED, one_or_more(_path))]
    """directories of this tier alone; pages are spread over them"""
    capacity: Annotated[
        int | None,
        Allowed(_CAPACITY_ALLOWED, or_word("unlimited", None, size(SMALLEST_CAPACITY, NO_LIMIT, units=_SIZES_ALLOWED))),
    ]
    """of the whole tier: all paths, ranks and processes together; or unlimited"""
    layout: Literal["auto", "pages", "slab"] = "auto"
    """files of pages, or preallocated slabs with an index; auto goes by the file system"""
    io: Literal["auto", "direct", "buffered"] = "auto"
    """O_DIRECT, or through the page cache; auto measures the device at start"""
    threads: Annotated[
        int | None, Allowed(f"1 to {MOST_THREADS}, or auto", or_word("auto", None, whole_number(1, MOST_THREADS)))
    ] = None
    """I/O threads per rank and path; auto measures"""
    ttl: Annotated[
        float | None,
        Allowed("a duration from 1s to 365d, such as 7d, or none", or_word("none", None, duration(1.0, NO_LIMIT))),
    ] = None
    """pages written longer ago than this are misses, and their room is free"""

    shared: Annotated[bool | None, Allowed("true, false, or auto", or_auto())] = None
    """whether other machines have the same directory; auto goes by the file system"""
    mode: Literal["private", "group"] = "private"
    """who may use the files: the server's account alone, or the members of a group"""
    group: Annotated[str | int | None, Allowed(_GROUP_ALLOWED, parse_group)] = None
    """of mode: group; left out: the group that the directory has"""
    require_mount: bool = False
    """true: no start while a path is on the root file system"""

    removed: ClassVar[Mapping[str, str]] = {"open_files": "a process keeps at most 512 files of slabs open per path"}
    live_keys: ClassVar[frozenset[str]] = TierConfig.live_keys | {"capacity"}
    block: ClassVar[int] = 4096
    carries_hints: ClassVar[bool] = True
    lists_pages: ClassVar[bool] = True
    keeps_identities: ClassVar[bool] = True

    def directories(self) -> tuple[str, ...]:
        return self.path

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

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if self.group is not None and self.mode == "private":
            raise ConfigError(".group", "files of mode private have no group", "with mode: group")
        if self.layout == "slab" and self.shared:
            raise ConfigError(".shared", "slabs belong to one machine", "false, or layout: pages")
        if self.layout == "slab" and self.capacity is None:
            raise ConfigError(".capacity", "the slab layout preallocates its files", "a size such as 512GiB")
        if self.layout == "pages" and self.io == "direct":
            problem = "'direct' needs layout slab: page files are not aligned"
            raise ConfigError(".io", problem, "auto, buffered")
        return self
