"""The medium under a store, accessed behind its back: all that a tier's author writes for the suite.

Nothing here is optional. A case that cannot hold for a tier is left out by a declared property alone, and another case
checks the declaration: of a tier that declares ``shared = False`` it is shown that another machine does not see its
pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar

from hicache_ext.storage.contract.store import PageStore


class Medium(ABC):
    """One fresh, empty medium with room for 64 MiB of pages, and the stores over it. Used on one thread.

    tests/storage/test_outside_tier.py has a whole one.

    It is pickled to be used in another process, where only ``open`` is called: leave open stores and connections out
    (``__getstate__``).
    """

    @property
    @abstractmethod
    def type(self) -> str:
        """The expected ``describe().type``. A class attribute will do, as for everything declared here."""

    @property
    @abstractmethod
    def shared(self) -> bool:
        """Whether other machines see the same pages; if so, ``open_over_a_damaging_path`` is required."""

    between_processes: bool = True
    """Other processes of this machine see the same pages, and the pages outlive the process that wrote them."""

    keeps_identities: bool = False
    """The store is an ``IdentityKeeper``."""

    writes_later: bool = False
    """STORED may be the answer before the page is on the medium, and for a page that another writer stored. The store
    has ``wait_until_written(timeout)``."""

    makes_room_when_full: bool = False
    """Whether cold pages are evicted for new ones on a full medium, even if it then takes none."""

    clears_at_once: bool = True
    """clear() takes an identity out of every process's sight in one step, also if it is killed then."""

    counts_all_identities: bool = True
    """clear(None) counts each identity that had pages. If not, those that only other stores wrote count as one."""

    killed_writes_end_after: float = 0.0
    """Seconds for which a page that a killed process was writing may be refused (REJECTED), at most."""

    largest_page: int = 32 << 20
    """Bytes of payload. Less where the store refuses smaller pages than this."""

    copies: int = 1
    """In how many of the store's tiers each page is kept and counted."""

    start_method: ClassVar[str] = "forkserver"
    """How other processes are started (``multiprocessing``): "spawn" where the environment of this process counts,
    its network for one."""

    @abstractmethod
    def open(self) -> PageStore:
        """Another store over this medium, as another process opens it. Whoever calls this closes the store."""

    @abstractmethod
    def open_elsewhere(self) -> PageStore:
        """A store as another machine opens it with the same configuration: over the same medium if that is shared,
        over one of that machine's own if not (another directory, for instance)."""

    def open_over_a_damaging_path(self) -> PageStore:
        """A store of another machine over the same medium whose path damages about half of the pages that it reads,
        each time in another place. Needed if ``shared``."""
        raise NotImplementedError(
            f"{type(self).__name__} declares shared = True: other machines may read pages over a bad path; "
            "override open_over_a_damaging_path()"
        )

    @abstractmethod
    def read(self, key: bytes) -> bytes | None:
        """The whole object under ``key``, without the store; None when there is none."""

    @abstractmethod
    def write(self, key: bytes, stored: bytes) -> None:
        """Put these bytes under ``key`` without the store, whatever was there; also where no page was stored yet."""

    @abstractmethod
    def keys(self) -> list[bytes]:
        """The keys of all objects that a reader would find, without the store: none that is hidden, half written or
        cleared."""

    @abstractmethod
    def failing(self) -> AbstractContextManager[object]:
        """While entered, every read and write of the medium fails (I/O error, connection lost) for the open stores;
        then it is as before. Root may read what is forbidden: put something else in its place, or patch the calls."""

    @abstractmethod
    def full(self) -> AbstractContextManager[object]:
        """While entered, the medium takes no page more from the open stores (no space on the device, a quota, a limit
        of memory); what is there can be read. Where none can be made small enough, patch the call that writes."""

    def close(self) -> None:  # noqa: B027 - most media are taken away with the test's directory
        """Take the medium away; called once, after every store over it was closed."""
