"""The tier types: the class behind each name in ``tiers.<name>.type``.

Ours are in a table; other packages provide theirs through the entry point group ``hicache_ext.tiers``
(docs/write-a-tier.md). A type's module is imported when a configuration names it, its store when a tier is opened.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar

from hicache_ext.errors import StoreSetupError, TierTypeError
from hicache_ext.storage.contract.diagnosis import Finding

if TYPE_CHECKING:
    from hicache_ext.storage.contract.store import PageStore

logger = logging.getLogger(__name__)

GROUP = "hicache_ext.tiers"
"""The entry point group; its entries are: type name = module:class of its ``TierType``."""

_OUR_PACKAGE = "hicache-ext"
_OURS = {
    "file": "hicache_ext.storage.tiers.file.tier_type:FileTier",
    "memory": "hicache_ext.storage.tiers.memory:MemoryTier",
    "mooncake": "hicache_ext.storage.tiers.mooncake.tier_type:MooncakeTier",
    "object": "hicache_ext.storage.tiers.object.tier_type:ObjectTier",
    "redis": "hicache_ext.storage.tiers.redis.tier_type:RedisTier",
}


class TierType(ABC):
    """One type of tier. Instantiated once, without arguments.

    Its module is imported to check a configuration, so it imports only the configuration class and nothing heavy:
    ``open`` imports the store.
    """

    config: ClassVar[type[Any]]
    """The class of the settings, a ``TierConfig`` (config/tier.py)."""
    install: ClassVar[str] = ""
    """The command that installs packages which the store imports and this package does not bring."""

    @abstractmethod
    def open(self, name: str, tier: Any) -> PageStore:
        """Open and return the store of ``tiers.<name>``; ``tier`` is an instance of ``config``.

        Raises StoreSetupError, or ConfigError for mistakes that show only on this machine. May be called from any
        thread, and again after it has raised."""

    def examine(self, name: str, tier: Any) -> Sequence[Finding]:
        """Return findings about a tier for ``hicache-ext doctor``, without changing its pages.

        The default opens the tier and calls its ``diagnose``. If the store has none, it tries a few pages under a
        separate identity and removes them again. Raises the errors of ``open``."""
        from hicache_ext.storage.contract.trial import try_store

        with closing(self.open(name, tier)) as store:
            diagnose: Callable[[], Sequence[Finding]] | None = getattr(store, "diagnose", None)
            return try_store(store) if diagnose is None else diagnose()

    def series(self) -> Mapping[str, Sequence[str]]:
        """Return the reasons, by event, that its stores count besides those of every tier (reports.py), so that they
        are exported before the first event."""
        return {}


def tier_type_names() -> list[str]:
    """Return the names of all types, sorted, without importing any of them."""
    return sorted(_entries())


def tier_type(name: str) -> TierType:
    """Return the type of this name. Raises TierTypeError if none or several have the name, or if it cannot be
    imported."""
    found = _entries().get(name, {})
    if len(found) > 1:
        raise TierTypeError(name, f"is brought by several packages ({', '.join(sorted(found))}): uninstall all but one")
    for package, entry in found.items():
        try:
            return _loaded(entry)
        except Exception as error:
            if package == _OUR_PACKAGE:
                raise
            raise TierTypeError(name, f"of the package {package} cannot be used: {_words(error)}") from error
    raise TierTypeError(name, "is not known: no installed package brings it")


def open_tier(name: str, tier: Any) -> PageStore:
    """Open the store of one configured tier. Raises StoreSetupError, TierTypeError or ConfigError with a sentence."""
    kind = tier_type(tier.type)
    with _missing_packages_named(name, kind), ExitStack() as undo:
        bare = kind.open(name, tier)
        undo.callback(bare.close)
        store: PageStore = tier.transformed(name, bare)
        undo.pop_all()
        return store


def examine_tier(name: str, tier: Any) -> Sequence[Finding]:
    """Run ``TierType.examine`` for one configured tier. Raises the errors of ``open_tier``."""
    kind = tier_type(tier.type)
    # Called for its errors: it reports what is wrong with the tier's keys.
    tier.transforms(name)
    with _missing_packages_named(name, kind):
        return kind.examine(name, tier)


@contextmanager
def _missing_packages_named(name: str, kind: TierType) -> Iterator[None]:
    """Raise StoreSetupError if a package that the store imports is missing or cannot be imported."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "hicache_ext":
            raise
        is_of_others = package != type(kind).__module__.partition(".")[0]
        remedies = [kind.install] if kind.install and is_of_others else []
        raise StoreSetupError(name, f"a package that it needs cannot be imported ({error})", remedies) from error


def series_of_type(name: str) -> Mapping[str, Sequence[str]]:
    """Return ``TierType.series`` of the type ``name``; empty if the type is not registered."""
    try:
        return tier_type(name).series()
    except TierTypeError:
        return {}


def broken_tier_types() -> list[TierTypeError]:
    """Return the errors of types that other packages provide. Imports every type."""
    errors = []
    for name in tier_type_names():
        try:
            tier_type(name)
        except TierTypeError as error:
            errors.append(error)
    return errors


def _entries() -> dict[str, dict[str, EntryPoint]]:
    """Return the entry points by type name and package."""
    found = {name: {_OUR_PACKAGE: EntryPoint(name, value, GROUP)} for name, value in _OURS.items()}
    for package, entry in _installed(tuple(sys.path)):
        found.setdefault(entry.name, {})[package] = entry
    return found


@functools.lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> list[tuple[str, EntryPoint]]:
    """Return the entry points of other packages. ``path``: the current ``sys.path``, as the cache key."""
    try:
        entries = importlib.metadata.entry_points(group=GROUP)
    except Exception as error:  # noqa: BLE001 - any installed package may cause it, and our types need none of them
        logger.warning("hicache_ext: tier types of other packages cannot be looked for: %s", _words(error))
        return []
    return [(_package_of(entry), entry) for entry in entries]


def _package_of(entry: EntryPoint) -> str:
    """Return the package's name, or else the class's location: interrupted uninstalls leave entry points unnamed."""
    try:
        name = None if entry.dist is None else entry.dist.name
    except Exception:  # noqa: BLE001 - a parser may raise anything for missing or damaged files
        name = None
    return name or entry.value


@functools.cache
def _loaded(entry: EntryPoint) -> TierType:
    """Import and instantiate the type. Raises whatever an import may raise, and TypeError."""
    loaded = entry.load()
    if not (isinstance(loaded, type) and issubclass(loaded, TierType) and isinstance(loaded.config, type)):
        raise TypeError(f"{entry.value} is no subclass of TierType with a class config")
    return loaded()


def _words(error: Exception) -> str:
    """Format ``error`` on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
