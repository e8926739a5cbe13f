"""The configuration that all types of tier share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core.core_schema import ValidationInfo

from hicache_ext.config.problems import did_you_mean, kind_of, listed, quoted, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel
from hicache_ext.config.secrets import SealConfig
from hicache_ext.config.values import SIZE_ALLOWED, duration, or_auto, or_word, parse_size
from hicache_ext.errors import ConfigError, MissingPackageError, TierTypeError
from hicache_ext.packages import need
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.storage.contract.registry import tier_type, tier_type_names

if TYPE_CHECKING:
    from hicache_ext.page.transforms.codec import Codec
    from hicache_ext.page.transforms.forms import Transforms
    from hicache_ext.storage.contract.store import PageStore

BUDGET_ALLOWED = "a size per day, hour or second, such as 20TiB/day or 200MB/s"

_DAY = 86400.0
_SECONDS = {"day": _DAY, "d": _DAY, "hour": 3600.0, "h": 3600.0, "second": 1.0, "s": 1.0}
_BUDGET = re.compile(r"(.+?) ?/ ?([a-z]+)", re.ASCII)


def parse_budget(value: object) -> float:
    """Return bytes per second for a text such as '20TiB/day'. Raises ConfigError with an empty key."""
    if not isinstance(value, str):
        raise refuse(value, BUDGET_ALLOWED)
    match = _BUDGET.fullmatch(value.strip())
    if match is None:
        raise ConfigError("", f"{shown(value)} does not say in what time", BUDGET_ALLOWED)
    size, time = match.groups()
    if time not in _SECONDS:
        raise ConfigError("", f"{shown(value)} has an unknown unit of time", BUDGET_ALLOWED)
    try:
        written = parse_size(size)
    except ConfigError as error:
        raise ConfigError("", error.problem, f"{BUDGET_ALLOWED}; {SIZE_ALLOWED}") from None
    if not written:
        raise ConfigError("", "nothing could be written", BUDGET_ALLOWED)
    return written / _SECONDS[time]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether other machines have the same pages, and the reason in words."""

    shared: bool
    reason: str

    def __str__(self) -> str:
        return f"{'shared' if self.shared else 'private'} ({self.reason})"


READ_TIMEOUT = 1.0
"""Default timeout in seconds for calls that a first token may wait for."""
WRITE_TIMEOUT = 5.0
"""Default timeout in seconds for calls that no request waits for."""

_TIMEOUTS = "a duration from 1ms to 1h, such as 2s"


class TierConfig(ConfigModel):
    """What every type of tier has. ``type`` picks the class; the tier's name is its key in ``tiers``."""

    removed: ClassVar[Mapping[str, str]] = {
        "dwpd": "write_budget bounds what is written, and one disk write a day of 3.84TB is 3.84TB/day",
        "disk_size": "write_budget bounds what is written",
        "guards": "a tier on the network and one with a timeout have all guards, another one has none (docs/guards.md)",
    }

    type: Annotated[str, Allowed("the type of a tier")]
    required: bool = True
    """false: the server starts even if this tier cannot"""
    timeout: Annotated[
        float | None, Allowed(f"{_TIMEOUTS}, or off, or auto", or_auto(or_word("off", math.inf, duration(0.001, 3600))))
    ] = None
    """the longest one call may take; auto: off on local file systems, on others 1s, for writes 5s"""
    codec: Literal["off", "lossless", "auto", "int8", "fp8"] = "off"
    """lossless: pages take fewer bytes; auto: where that was measured to be faster; int8, fp8: fewer still, and not
    what was computed"""
    seal: SealConfig | None = None
    """left out: who reaches the medium can read and make pages"""

    admission: Literal["all", "learned"] = "all"
    """learned: pages that will hardly return in time are stored at their second request"""
    write_budget: Annotated[float | None, Allowed(BUDGET_ALLOWED, parse_budget)] = None
    """what all ranks of this server together may write to the tier; left out: no limit"""
    _only_read: bool = PrivateAttr(default=False)

    keeps_timeout: ClassVar[bool] = False
    """Whether stores of this type end every call within ``timeout`` on their own and then no longer touch the batch's
    memory. Other stores get memory of the deadline guard instead of SGLang's host pages."""

    remote: ClassVar[bool] = False
    """Whether its pages are reached over the network. If so it is shared, and the guards treat it as slow."""

    carries_hints: ClassVar[bool] = False
    """Whether its store is a board for the hints between decode and prefill nodes (contract/abilities.py)."""

    lists_pages: ClassVar[bool] = False
    """Whether its store can list its pages cheaply (contract/abilities.py), so that events can report them."""

    keeps_identities: ClassVar[bool] = False
    """Whether the documents of its identities are stored next to its pages, where tools find them."""

    block: ClassVar[int] = 1
    """Block size in bytes to which the store rounds up each page anyway: sealed pages are padded to it."""

    live_keys: ClassVar[frozenset[str]] = frozenset({"required", "timeout", "seal", "admission", "write_budget"})
    """Keys that a reload may change while the tier is in use. Every other change is refused with a sentence."""

    @property
    def only_read(self) -> bool:
        """Whether this server writes nothing to the tier, and so needs no permission to."""
        return self._only_read

    def not_written(self) -> Self:
        """Return a copy of this tier that is only read."""
        mine = self.model_copy()
        mine._only_read = True
        return mine

    def directories(self) -> tuple[str, ...]:
        """Return the local directories this tier owns; no two tiers may share one."""
        return ()

    @property
    def tells_pages(self) -> bool:
        """Whether KV events can report which pages the tier holds: not if a seal hides their names."""
        return self.lists_pages and (self.seal is None or self.seal.mode != "encrypt")

    def sharing(self) -> Sharing:
        """Return whether other machines have its pages, as seen from this node: if there are several directories, all
        must be shared. Asks no server."""
        if found := [file_system_of(Path(path)) for path in self.directories()]:
            decisive = next((one for one in found if not one.shared), found[0])
            return Sharing(decisive.shared, decisive.reason)
        return Sharing(self.remote, "reached over the network" if self.remote else "of this machine")

    def for_rank(self, tp_rank: int) -> Self:
        """Return this tier for the tensor-parallel rank ``tp_rank``. Raises ConfigError, its key below the tier's."""
        return self

    def transforms(self, name: str) -> Transforms | None:
        """Return the transforms of the pages of ``tiers.<name>``; None if there are none. Raises ConfigError."""
        if self.seal is None and self.codec == "off":
            return None
        from hicache_ext.page.transforms.forms import Transforms

        seal = None if self.seal is None else self.seal.opened(f"hicache_ext.tiers.{name}.seal")
        return Transforms(self._opened_codec(f"hicache_ext.tiers.{name}.codec"), seal, self.block)

    def _opened_codec(self, key: str) -> Codec | None:
        """Return the codec, or None. ``key`` is the key path of ``codec``. Raises ConfigError."""
        if self.codec == "off":
            return None
        try:
            need("zstandard")
        except MissingPackageError as error:
            raise ConfigError(key, str(error)) from None
        from hicache_ext.page.transforms.codec import Codec, Paying

        return Codec("lossless", Paying()) if self.codec == "auto" else Codec(self.codec)

    def transformed(self, name: str, store: PageStore) -> PageStore:
        """Wrap the store of ``tiers.<name>`` in the transforms of its pages. Raises ConfigError."""
        transforms = self.transforms(name)
        if transforms is None:
            return store
        from hicache_ext.storage.contract.transforming.store import TransformedStore

        return TransformedStore(store, transforms.codec, transforms.seal, block=transforms.block)

    def summary(self) -> str:
        """Return one line for ``hicache-ext config check``; secrets never appear in it."""
        return self.type


class RemoteTierConfig(TierConfig):
    """A tier that is reached over the network."""

    remote: ClassVar[bool] = True

    timeout: Annotated[float | None, Allowed(f"{_TIMEOUTS}, or auto", or_auto(duration(0.001, 3600)))] = None
    """the longest one call may take, pages not done by then are misses; auto: 1s, for writes 5s"""

    @property
    def longest_call(self) -> float:
        """Seconds after which the store itself ends any call. The guards give most calls less time."""
        return WRITE_TIMEOUT if self.timeout is None else self.timeout


def tier_types() -> dict[str, type[TierConfig]]:
    """Return the class of each usable ``type``; those of other packages that cannot be imported are left out."""
    classes = {}
    for name in tier_type_names():
        try:
            classes[name] = _class_of(name)
        except TierTypeError:
            continue
    return classes


def _class_of(name: str) -> type[TierConfig]:
    """Return the configuration class of a type. Raises TierTypeError."""
    model = tier_type(name).config
    if not issubclass(model, TierConfig):
        raise TierTypeError(name, f"cannot be used: its configuration {model.__qualname__} is no TierConfig")
    return model


def _by_type(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> TierConfig:
    if isinstance(value, TierConfig):
        return value
    names = tier_type_names()
    if not isinstance(value, Mapping):
        raise ConfigError("", f"{kind_of(value)} is not accepted", "a mapping with a type and its settings")
    if "type" not in value:
        raise ConfigError(".type", "required", listed(names))
    name = value["type"]
    if not isinstance(name, str):
        raise refuse(name, listed(names), ".type")
    if name not in names:
        problem = f"unknown tier type {quoted(name)}{did_you_mean(name, names)}"
        raise ConfigError(".type", problem, listed(names))
    try:
        model = _class_of(name)
    except TierTypeError as error:
        raise ConfigError(".type", str(error)) from None
    return model.model_validate(value, context=info.context)


AnyTier = Annotated[SerializeAsAny[TierConfig], WrapValidator(_by_type)]
"""A tier of the class that its ``type`` names."""
