"""What every type of tier has in the configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from hicache_ext.config.guards import GuardsConfig
from hicache_ext.config.problems import listed
from hicache_ext.config.schema import DURATION_SCHEMA, Allowed, ConfigModel, checked, one_of
from hicache_ext.config.seal import SealConfig
from hicache_ext.config.sharing import Sharing, sharing_of_directories
from hicache_ext.config.values import duration, or_auto, or_off
from hicache_ext.errors import ConfigError, MissingPackageError
from hicache_ext.packages import need

if TYPE_CHECKING:
    from hicache_ext.page.transforms.codec import Codec
    from hicache_ext.page.transforms.forms import Transforms
    from hicache_ext.storage.contract.store import PageStore

CODECS = ("off", "lossless", "auto")

READ_TIMEOUT = 1.0
"""Seconds, where none are configured, for what a first token may wait for."""
WRITE_TIMEOUT = 5.0
"""Seconds, where none are configured, for what no request waits for."""

_TIMEOUT_ALLOWED = "a duration from 1ms to 1h, such as 2s"
_REMOTE_TIMEOUT_ALLOWED = f"{_TIMEOUT_ALLOWED}, or auto"
_OPTIONAL_TIMEOUT_ALLOWED = f"{_TIMEOUT_ALLOWED}, or off, or auto"


class TierConfig(ConfigModel):
    """What every type of tier has. ``type`` picks the class; the tier's name is its key in ``tiers``."""

    type: Annotated[str, Allowed("the type of a tier")]
    required: Annotated[bool, Field(description="false: the server starts even if this tier cannot")] = True
    timeout: Annotated[
        float | None,
        Field(
            description="the longest one call may take; auto: off on local file systems, on others 1s, for writes 5s",
            json_schema_extra={"default": "auto"},
        ),
        Allowed(_OPTIONAL_TIMEOUT_ALLOWED),
        checked(or_auto(or_off(math.inf, duration(0.001, 3600, _OPTIONAL_TIMEOUT_ALLOWED)))),
        DURATION_SCHEMA,
    ] = None
    guards: GuardsConfig = GuardsConfig()
    codec: Annotated[
        Literal["off", "lossless", "auto"],
        Field(description="lossless: pages take fewer bytes; auto: where that was measured to be faster"),
        Allowed(listed(CODECS)),
        one_of(*CODECS),
    ] = "off"
    seal: Annotated[
        SealConfig | None,
        Field(description="left out: who reaches the medium can read and make pages"),
    ] = None

    keeps_timeout: ClassVar[bool] = False
    """Whether the store of this type ends each call within ``timeout`` by itself, on every path, and then leaves the
    batch's memory alone. Other stores are given memory of the deadline guard instead of SGLang's host pages."""

    remote: ClassVar[bool] = False
    """Whether its pages are reached over the network. Then it is shared, and the guards take it for slow."""

    carries_hints: ClassVar[bool] = False
    """Whether its store is a board for the hints between decode and prefill nodes (contract/hint_board.py)."""

    lists_pages: ClassVar[bool] = False
    """Whether its store can tell cheaply which pages it holds (contract/abilities.py), so that events can."""

    keeps_identities: ClassVar[bool] = False
    """Whether the documents of its identities are kept beside its pages, where tools find them."""

    block: ClassVar[int] = 1
    """Bytes of which the store takes whole ones for each page anyway: sealed pages are padded to them."""

    live_keys: ClassVar[frozenset[str]] = frozenset({"required", "timeout", "guards", "seal"})
    """Keys that a reload may change while the tier is in use. Every other change is refused with a sentence."""

    def directories(self) -> tuple[str, ...]:
        """The local directories this tier owns; no two tiers may share one."""
        return ()

    @property
    def may_be_private(self) -> bool:
        """Whether it may turn out, by ``sharing``, that no other machine has its pages. Looks at nothing."""
        return not self.remote

    @property
    def tells_pages(self) -> bool:
        """Whether KV events can say which pages it holds: not where a seal hides their names."""
        return self.lists_pages and (self.seal is None or self.seal.mode != "encrypt")

    def sharing(self) -> Sharing:
        """Whether other machines have its pages, on this node. Asks no server."""
        if directories := self.directories():
            return sharing_of_directories(directories)
        return Sharing(self.remote, "reached over the network" if self.remote else "of this machine")

    def for_rank(self, tp_rank: int) -> Self:
        """This tier as the tensor-parallel rank ``tp_rank`` uses it. Raises ConfigError, its key below the tier's."""
        return self

    def transforms(self, name: str) -> Transforms | None:
        """What is done to the pages of ``tiers.<name>`` on their way; None for nothing. Raises ConfigError."""
        if self.seal is None and self.codec == "off":
            return None
        from hicache_ext.page.transforms.forms import Transforms

        seal = None if self.seal is None else self.seal.opened(f"hicache_ext.tiers.{name}.seal")
        return Transforms(self._opened_codec(f"hicache_ext.tiers.{name}.codec"), seal, self.block)

    def _opened_codec(self, key: str) -> Codec | None:
        """``key``: the key path of ``codec``. Raises ConfigError."""
        if self.codec == "off":
            return None
        try:
            need("zstandard")
        except MissingPackageError as error:
            raise ConfigError(key, str(error)) from None
        from hicache_ext.page.transforms.lossless import LosslessCodec
        from hicache_ext.page.transforms.paying import PayingCodec

        return PayingCodec(LosslessCodec()) if self.codec == "auto" else LosslessCodec()

    def transformed(self, name: str, store: PageStore) -> PageStore:
        """The store of ``tiers.<name>`` with what is done to its pages around it. Raises ConfigError."""
        transforms = self.transforms(name)
        if transforms is None:
            return store
        from hicache_ext.storage.contract.transforming.layers import transformed

        return transformed(store, transforms.codec, transforms.seal, block=transforms.block)

    def summary(self) -> str:
        """One line for ``hicache-ext config check``; secrets never appear in it."""
        return self.type


class RemoteTierConfig(TierConfig):
    """A tier that is reached over the network."""

    remote: ClassVar[bool] = True

    timeout: Annotated[
        float | None,
        Field(
            description="the longest one call may take, pages not done by then are misses; auto: 1s, for writes 5s",
            json_schema_extra={"default": "auto"},
        ),
        Allowed(_REMOTE_TIMEOUT_ALLOWED),
        checked(or_auto(duration(0.001, 3600, _REMOTE_TIMEOUT_ALLOWED))),
        DURATION_SCHEMA,
    ] = None

    @property
    def longest_call(self) -> float:
        """Seconds after which the store itself ends any call. The guards give most calls less."""
        return WRITE_TIMEOUT if self.timeout is None else self.timeout
