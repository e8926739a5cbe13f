"""What ``hicache-ext doctor`` says about a file tier that it does not open: what is at its paths stays as it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import Access
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import trial_directory, try_store
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.diagnosis import of_paths, trial_page
from hicache_ext.storage.tiers.file.layout_choice import LayoutChoice
from hicache_ext.storage.tiers.file.manifest import check_before_start, format_and_layout, newer_versions, slab_home
from hicache_ext.storage.tiers.file.modes import MANIFEST
from hicache_ext.storage.tiers.file.opening import chosen_layout, open_paths
from hicache_ext.storage.tiers.file.users import of_users

_TRIAL_CAPACITY = 256 << 20
"""Of a path in a trial; a part of it is taken."""


def examine(name: str, tier: FileTierConfig) -> list[Finding]:
    """What ``diagnose`` says, for a tier that is not opened: what is at its paths stays as it is.

    The trial is a tier of its own in a directory beside the data, on the same file systems, which is taken away again.
    Raises StoreSetupError where a server would not start, ConfigError.
    """
    paths = [Path(path) for path in tier.path]
    layouts: dict[Path, LayoutChoice] = {}
    findings: list[Finding] = []
    broken: dict[Path, StoreSetupError] = {}
    with ExitStack() as trials:
        places: dict[Path, Path] = {}
        for path in paths:
            try:
                layouts[path] = chosen_layout(name, tier, path)
                check_before_start(path, layouts[path].layout, name)
                findings += [*_as_found(path, layouts[path].layout, tier), *of_users(path, layouts[path].layout)]
                places[path] = trials.enter_context(trial_directory(path))
            except OSError as error:
                remedies = ["run the doctor as the server's account"] if isinstance(error, PermissionError) else []
                reason = f"directory {str(path)!r}: {error.strerror or error}"
                broken[path] = StoreSetupError(name, reason, remedies)
        if not places:
            raise next(iter(broken.values()))
        for path, refusal in broken.items():
            findings.append(Finding("path", Level.ERROR, f"{path}: {refusal.reason}", "look at its disk and mount"))
        store = trials.enter_context(closing(_trial_store(name, tier, layouts, places)))
        why = list(dict.fromkeys(chosen.reason for path, chosen in layouts.items() if path in places))
        findings += of_paths(list(places), list(places), tier.capacity, store, why)
        return findings + try_store(store, trial_page(store.describe().details["capacity"], len(places)))


def _trial_store(
    name: str, tier: FileTierConfig, layouts: Mapping[Path, LayoutChoice], places: Mapping[Path, Path]
) -> PageStore:
    """A small tier like this one, in other directories. Raises StoreSetupError or ConfigError, in which the tier's own
    paths are named."""
    chosen = {choice.layout for choice in layouts.values()}
    if tier.io == "direct" and chosen != {"slab"}:
        pages = next(path for path, choice in layouts.items() if choice.layout != "slab")
        raise StoreSetupError(name, f"io is 'direct', and {str(pages)!r} holds page files, which are not aligned")
    small = {
        "path": tuple(str(place) for place in places.values()),
        "capacity": None if tier.capacity is None else min(tier.capacity, len(places) * _TRIAL_CAPACITY),
        "layout": chosen.pop() if len(chosen) == 1 else "auto",
        "ttl": None,
    }
    try:
        return open_paths(name, tier.model_copy(update=small))
    except StoreSetupError as error:
        reason = error.reason
        for path, place in places.items():
            reason = reason.replace(str(place), str(path))
        raise StoreSetupError(name, reason) from None


def _as_found(path: Path, layout: str, tier: FileTierConfig) -> list[Finding]:
    """What a server would change at its start. Raises OSError."""
    if not path.exists():
        return []
    findings: list[Finding] = []
    home = slab_home(path) if layout == "slab" else path
    if (home / MANIFEST).exists() and format_and_layout(home) is None:
        seen = f"{home / MANIFEST} cannot be read, after a power loss perhaps; a server makes it anew at its start"
        findings.append(Finding("format", Level.WARNING, seen, "nothing: its pages are kept"))
    for newer in newer_versions(path):
        seen = f"{newer} is of a newer release; it stays as it is, and does not count in the capacity"
        findings.append(Finding("newer release", Level.WARNING, seen, "remove it if no such release will come back"))
    status, wanted = path.stat(), Access(tier.mode == "group")
    if stat.S_IMODE(status.st_mode) & ~0o2000 & ~wanted.directory_mode:
        seen = f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and not {wanted.directory_mode:04o}"
        if status.st_uid == os.geteuid():
            findings.append(Finding("mode", Level.NOTE, f"{seen}; a server changes that at its start", "nothing"))
        else:
            seen += f", and belongs to uid {status.st_uid}; what a server makes in it is closed to others all the same"
            findings.append(Finding("mode", Level.NOTE, seen, "chown it to the server's account"))
    return findings
