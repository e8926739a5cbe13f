"""Lets tools inspect or change a file tier's directory in either layout while servers may be using it.

``open_inspector`` only reads: nothing is created, locked or changed, and read permission is enough. ``open_editor``
changes the directory through the same code as the stores.
"""

from __future__ import annotations

from pathlib import Path

from hicache_ext.errors import StoreError
from hicache_ext.storage.tiers.file.inspector import Inspector
from hicache_ext.storage.tiers.file.layouts import Layout, check_before_start, layout_in
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pages.tree import PageTree
from hicache_ext.storage.tiers.file.slab.listing import SlabListing
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.file.usage import occupied_bytes

_REBUILD_AWAITED = 15.0
"""Seconds within which a process that rebuilds the index must make progress."""


def open_inspector(path: Path) -> Inspector:
    """Open ``path`` for reading. Raises StoreError if it is no readable directory of the file tier."""
    layout = _layout(path)
    try:
        return SlabListing(path) if layout == "slab" else PageTree(path)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.filename}: {error.strerror}") from error


def open_editor(path: Path) -> PageFileStore | SlabEditor:
    """Open ``path`` for changes; the caller closes it. Raises StoreError if it is no writable file tier directory."""
    if _layout(path) == "slab":
        return SlabEditor(path)
    # Without a capacity it never evicts; removals go through the shared usage record.
    return PageFileStore(str(path), path, capacity=None)


def _layout(path: Path) -> Layout:
    """Return the layout of ``path``. Raises StoreError if it has none, or more than one."""
    try:
        if (layout := layout_in(path)) is not None:
            check_before_start(path, layout, str(path))
            return layout
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    if not path.exists():
        raise StoreError(f"{str(path)!r} does not exist; a server makes it at its start")
    raise StoreError(f"{str(path)!r} is no directory of a file tier: it has neither pages nor slabs")


class SlabEditor(SlabStore):
    """A slab store that evicts nothing: its capacity is what the directory takes."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), path, capacity=max(1, occupied_bytes(path)))
        # Wait for the rebuild: pages that are not yet found could not be removed.
        before = None
        while not self.wait_until_rebuilt(_REBUILD_AWAITED):
            if (now := (len(self._index.unknown_slabs()), self._index.found)) == before:
                self.close()
                raise StoreError(
                    f"{str(path)!r}: the process that makes its index anew does not go on; see hicache-ext doctor"
                )
            before = now

    def _look_over(self, place: object) -> None:
        """Schedule no scrub: a tool removes only what it was told to remove."""

    def _keep_capacity(self) -> None:
        """Drop no slab: a server may have added one since the capacity was read."""

    def clean_up(self) -> int:
        """Remove left-overs as ``PageFileStore.clean_up`` does."""
        self._allocator.forget_left_slabs()
        return self._index.free_dead()
