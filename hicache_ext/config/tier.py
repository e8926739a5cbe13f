"""What every type of tier has in the configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, WithJsonSchema, model_validator

from hicache_ext.config.admission import (
    BUDGET_ALLOWED,
    DAY,
    DISK_SIZE_ALLOWED,
    DWPD_ALLOWED,
    SMALLEST_DISK,
    parse_budget,
)
from hicache_ext.config.guards import GuardsConfig
from hicache_ext.config.problems import listed
from hicache_ext.config.schema import DURATION_SCHEMA, Allowed, ConfigModel, as_pydantic_error, checked, one_of
from hicache_ext.config.seal import SealConfig
from hicache_ext.config.sharing import Sharing, sharing_of_directories
from hicache_ext.config.values import NO_LIMIT, duration, number, or_auto, or_off, size
from hicache_ext.errors import ConfigError, MissingPackageError
from hicache_ext.packages import need
from hicache_ext.page.transforms.codec import LOSSY_CODECS

if TYPE_CHECKING:
    from hicache_ext.page.transforms.codec import Codec
    from hicache_ext.page.transforms.forms import Transforms
    from hicache_ext.storage.contract.store import PageStore

CODECS = ("off", "lossless", "auto", *LOSSY_CODECS)
ADMISSION = ("all", "learned")

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
        Literal["off", "lossless", "auto", "int8", "fp8"],
        Field(
            description="lossless: pages take fewer bytes; auto: where that was measured to be faster; int8, fp8: fewer"
            " still, and not what was computed"
        ),
        Allowed(listed(CODECS)),
        one_of(*CODECS),
    ] = "off"
    seal: Annotated[
        SealConfig | None,
        Field(description="left out: who reaches the medium can read and make pages"),
    ] = None

    admission: Annotated[
        Literal["all", "learned"],
        Field(description="learned: pages that will hardly return in time are stored at their second request"),
        Allowed(listed(ADMISSION)),
        one_of(*ADMISSION),
    ] = "all"
    write_budget: Annotated[
        float | None,
        Field(description="what all ranks of this server together may write to the tier; left out: no limit"),
        Allowed(BUDGET_ALLOWED),
        checked(parse_budget),
        WithJsonSchema({"type": "string"}),
    ] = None
    dwpd: Annotated[
        float | None,
        Field(description="the same as writes of the whole disk per day; with disk_size"),
        Allowed(DWPD_ALLOWED),
        checked(number(0.01, 100, DWPD_ALLOWED)),
    ] = None
    disk_size: Annotated[
        int | None,
        Field(description="of dwpd: the size of the disk, or of all disks of the tier together"),
        Allowed(DISK_SIZE_ALLOWED),
        checked(size(SMALLEST_DISK, NO_LIMIT, DISK_SIZE_ALLOWED)),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": SMALLEST_DISK}, {"type": "string"}]}),
    ] = None

    _writers: int = PrivateAttr(default=1)

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

    live_keys: ClassVar[frozenset[str]] = frozenset(
        {"required", "timeout", "guards", "seal", "admission", "write_budget", "dwpd", "disk_size"}
    )
    """Keys that a reload may change while the tier is in use. Every other change is refused with a sentence."""

    @model_validator(mode="after")
    def _a_budget_is_said_once(self) -> Self:
        if self.write_budget is not None and self.dwpd is not None:
            raise as_pydantic_error(
                ConfigError(".write_budget", "dwpd says what may be written, too", "one of the two")
            )
        if self.dwpd is not None and self.disk_size is None:
            raise as_pydantic_error(ConfigError(".dwpd", "of what size is the disk?", "with disk_size, such as 3.84TB"))
        if self.disk_size is not None and self.dwpd is None:
            raise as_pydantic_error(ConfigError(".disk_size", "says nothing without dwpd", "with dwpd"))
        return self

    @property
    def bytes_a_second(self) -> float | None:
        """What all ranks of this server may write together; None: no limit."""
        if self.dwpd is not None and self.disk_size is not None:
            return self.dwpd * self.disk_size / DAY
        return self.write_budget

    @property
    def writers(self) -> int:
        """Ranks of this server that write to the tier."""
        return self._writers

    def written_by(self, ranks: int) -> Self:
        """This tier, with so many ranks that write to it."""
        mine = self.model_copy()
        mine._writers = max(1, ranks)
        return mine

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

        if self.codec in LOSSY_CODECS:
            from hicache_ext.page.transforms.lossy import LossyCodec
            from hicache_ext.page.transforms.rows import Code

            return LossyCodec(Code(self.codec))
        return PayingCodec(LosslessCodec()) if self.codec == "auto" else LosslessCodec()

    def transformed(self, name: str, store: PageStore) -> PageStore:
        """The store of ``tiers.<name>`` with what is done to its pages around it. Raises ConfigError."""
        transforms = self.transforms(name)
        if transforms is None:
            return store
        from hicache_ext.storage.contract.transforming.store import transformed

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
