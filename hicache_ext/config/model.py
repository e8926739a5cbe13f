"""The models of the configuration: the sections other than ``tiers``, the whole of ``hicache_ext``, and the surrounding
document that SGLang reads. They define what each key accepts."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from hicache_ext.config.problems import config_error, did_you_mean, listed, quoted, refuse, shown
from hicache_ext.config.schema import OFF, Allowed, ConfigModel
from hicache_ext.config.tier import AnyTier, tier_types
from hicache_ext.config.values import (
    LONGEST_DURATION,
    NO_LIMIT,
    absolute_path,
    directory_relation,
    duration,
    format_duration,
    from_list,
    not_empty,
    or_word,
    size,
    whole_number,
)
from hicache_ext.errors import ConfigError
from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.storage.contract.tenants import DEFAULT, LONGEST_NAME, MOST_TENANTS, Tenant

BACKEND_NAME = "hicache_ext"
SECTION = "hicache_ext"

Role = Literal["auto", "prefill", "decode", "both"]
ServerRole = Literal["prefill", "decode", "both"]
"""The role of a running server, with ``auto`` resolved."""


# -- sections ----------------------------------------------------------------------------------------------------------

StorePolicy = Literal["sync", "async"]

_BufferSize = Annotated[
    int, Allowed("a size such as 256MiB, at least 1MiB, or 0 for none", size(1 << 20, NO_LIMIT, or_none=True))
]
_Duration = Annotated[float, Allowed("a duration from 10ms to 1h, such as 5s", duration(0.01, 3600))]


class PrefetchConfig(ConfigModel):
    """Pages fetched from outer tiers while SGLang allocates and queues; per rank."""

    removed: ClassVar[Mapping[str, str]] = {
        "lifetime": "a page that nobody reads is kept for 30 seconds",
        "streams": "four calls on each outer tier go on simultaneously",
    }

    buffer: _BufferSize = 256 * 1024 * 1024
    """bytes of host memory that fetched pages may take until they are read; 0: no prefetch"""


class BackgroundConfig(ConfigModel):
    """Writes that no request waits for; per rank."""

    removed: ClassVar[Mapping[str, str]] = {"promotion_buffer": "128MiB may wait to be promoted"}

    store_buffer: _BufferSize = 256 * 1024 * 1024
    """bytes waiting for each tier with the policy async; what does not fit is dropped and counted"""
    drain: _Duration = 5.0
    """how long the server waits at its end for what is still to be written"""


EngineName = Literal["auto", "sglang", "reference", "batched_dma", "triton"]


class KernelsConfig(ConfigModel):
    """``auto`` follows the calibration; any other engine serves whatever it can, SGLang's own path the rest."""

    removed: ClassVar[Mapping[str, str]] = {
        "triton_programs": "the Triton engine copies with four programs, each on a multiprocessor",
        "calibration": "it lies where hicache-ext bench kernels --calibrate writes it, below XDG_CACHE_HOME",
    }

    engine: EngineName = "auto"
    """what moves bytes between the GPU and host memory; auto: what the calibration found fastest"""


class LinkerConfig(ConfigModel):
    """``linker``: only where SGLang moves pages through its external linker, without a host cache; per rank."""

    staging: Annotated[int, Allowed("a size such as 2GiB, at least 1MiB", size(1 << 20, NO_LIMIT))] = (
        2 * 1024 * 1024 * 1024
    )
    """bytes of page-locked host memory through which pages pass, half of it for each direction"""
    load_timeout: _Duration = 5.0
    """how long a request waits in the queue for its stored pages; then it is computed"""


_ENDPOINT = re.compile(r"tcp://(?:\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)


def _endpoint(value: object) -> str:
    found = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or found is None or not 0 < int(found[1]) < 1 << 16:
        raise refuse(value)
    return value


_Endpoint = Annotated[
    str,
    Allowed(
        "tcp://ADDRESS:PORT with an address of this machine, or * for all of them, such as tcp://*:5657", _endpoint
    ),
]


class EventsConfig(ConfigModel):
    """``events``: on where it is there."""

    removed: ClassVar[Mapping[str, str]] = {
        "interval": "the tiers are looked at every second, and less often where a look takes long"
    }

    endpoint: _Endpoint
    """where routers subscribe; each DP replica takes the next port"""
    replay_endpoint: _Endpoint
    """where routers ask for what they missed; each DP replica takes the next port"""
    topic: Annotated[
        # The pattern means the same in Python, JavaScript and pydantic: it is part of the JSON Schema.
        str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"), Allowed("text without line breaks")
    ] = ""
    """the first frame of every message"""

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.endpoint.rpartition(":")[2] == self.replay_endpoint.rpartition(":")[2]:
            problem = "has the port of endpoint"
            raise ConfigError(".replay_endpoint", problem, "another port")
        return self


SGLANG = "sglang"
COLLECTOR_ALLOWED = (
    "sglang, for the collector of --enable-trace, or the address of an OTLP/HTTP collector, such as"
    " http://127.0.0.1:4318/v1/traces"
)


def _collector(value: object) -> str:
    if value == SGLANG:
        return SGLANG
    if isinstance(value, str) and any(sign in value for sign in "@?#"):
        # Not shown: it may be a secret.
        problem = "has more in it than host, port and path: a user, a password, a query"
        raise ConfigError("", problem, "credentials in the environment variable OTEL_EXPORTER_OTLP_HEADERS")
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value:
        raise refuse(value)
    try:
        parts = urllib.parse.urlsplit(value)
        port_is_sound = parts.port != 0
    except ValueError:
        raise refuse(value) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sound:
        raise refuse(value)
    if parts.path in ("", "/"):
        raise ConfigError("", f"{shown(value)} has no path", f"such as {value.rstrip('/')}/v1/traces")
    return value


class TracingConfig(ConfigModel):
    """``tracing``: on where it is there."""

    endpoint: Annotated[str, Allowed(COLLECTOR_ALLOWED, _collector)]
    """where spans go: the collector of SGLang's --enable-trace, or one of your own"""


# Outside the class, where the field ``size`` would hide the parser of that name.
_RecordingsSize = Annotated[int, Allowed("a size of 1MiB or more, such as 256MiB", size(1 << 20, NO_LIMIT))]


class RecordConfig(ConfigModel):
    """``record``: on where it is there."""

    path: Annotated[str, Allowed("an absolute path", absolute_path)]
    """a directory for recordings alone; several processes may share it"""
    size: _RecordingsSize = 256 << 20
    """of all files in it together; the oldest are removed"""


_Tokens = Annotated[int, Allowed("a whole number of tokens", whole_number(0, NO_LIMIT))]


class WriteConfig(ConfigModel):
    """``pd.write``: how a decode node writes the KV of what it generated."""

    removed: ClassVar[Mapping[str, str]] = {
        "stride": "a running request is copied every 256 tokens",
        "flush_on_abort": "what an aborted request had generated is written",
        "missing_prefix": "a continuation whose prompt is not in the pool is not written",
        "prefix_grace": "the prefill node has 5 s to write the prompt",
        "drop": "the oldest continuation of the lowest priority goes first",
        "retry_within": "no write is tried again later than 30 s after the first attempt",
        "pages_in_flight": "512 pages are handed to the storage thread, the others wait",
        "retries": "a failed write is tried again three times",
        "ttl": "the writer cannot expire single pages; where the tier has a ttl, set that in the decode node's file",
        "speculative": "drafts of EAGLE and MTP are written where a prefill node can use them",
    }

    enabled: bool = True
    """false: SGLang's own decode offload, unchanged"""
    min_tokens: _Tokens = 0
    """requests that generate fewer tokens than this are not written"""


class PullConfig(ConfigModel):
    """``pd.pull``: when a prefill node reads a prefix from storage instead of computing it."""

    removed: ClassVar[Mapping[str, str]] = {
        "hysteresis": "after a tier was too slow, a pull must be cheaper by a fifth",
        "probe_interval": "a tier that is not used is measured every 10 s",
        "prefill_rate": "what a prefill takes is measured",
    }

    mode: Literal["off", "fixed", "adaptive"] = "off"
    """off: always pull; fixed: from min_tokens on; adaptive: when measured to be cheaper"""
    min_tokens: _Tokens = 256
    """shorter prefixes are computed (modes fixed and adaptive)"""


class HintsConfig(ConfigModel):
    """``pd.hints``: a decode node says which conversations are in the pool, and prefill nodes bring them to a local
    tier before the next turn arrives."""

    removed: ClassVar[Mapping[str, str]] = {
        "interval": "a prefill node looks for hints twice a second",
        "max_pages": "a hint names the first 2048 pages of a conversation",
        "keep": "the pool keeps the newest 256 hints",
        "lifetime": "hints older than 60 s are ignored",
    }

    enabled: bool = False
    """true: decode nodes send hints, prefill nodes follow them into promote_to"""
    over: Annotated[str | None, Allowed("the name of a tier")] = None
    """the tier whose engine carries the hints, of type redis or file; left out: the last of store_locations on a decode
    node, of retrieve_locations on a prefill node"""


class PdConfig(ConfigModel):
    """``pd``: prefill/decode disaggregation. See docs/pd.md."""

    write: WriteConfig = WriteConfig()
    pull: PullConfig = PullConfig()
    hints: HintsConfig = HintsConfig()


# -- whole configuration -----------------------------------------------------------------------------------------------

_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
_TIER_NAME_ALLOWED = "a lower-case letter, then lower-case letters, digits, '_' and '-'"
_INTERFACE_ALLOWED = (
    "1 or true, without which SGLang never uses the zero-copy calls that this backend serves; no text,"
    " of which SGLang takes any, even '0', for on"
)
# No short names: bf16 and bfloat16 would be two identities, and fp8 is ambiguous.
_DTYPE = re.compile(r"(?!(?:auto|bf16|fp16|half|fp8)$)[a-z][a-z0-9_]*", re.ASCII)
_DTYPE_ALLOWED = "the whole name of a dtype, such as bfloat16, float16, fp8_e4m3 or fp8_e5m2"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError("", f"{shown(value)} is not text; put it in quotes", "text")
    if not value.strip() or not value.isprintable():
        raise ConfigError("", f"{shown(value)} is empty or has unprintable characters", "text")
    return value


_Text = Annotated[str | None, Allowed("text", or_word(None, None, _text))]

PROMOTE_NOTHING = OFF


def _weights_epoch(value: object) -> str:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _dtype(value: object) -> str:
    text = _text(value)
    if not _DTYPE.fullmatch(text):
        raise refuse(value)
    return text


def _check_tier_name(name: str) -> str:
    if name == PROMOTE_NOTHING:
        raise ConfigError("", "this name has a meaning of its own in promote_to", "another name")
    if not _TIER_NAME.fullmatch(name):
        raise ConfigError("", "not a tier name", _TIER_NAME_ALLOWED)
    return name


class ModelConfig(ConfigModel):
    """Which weights computed the KV, where SGLang does not say it itself."""

    id: _Text = None
    """the model's name; None is the name under which SGLang serves it"""
    revision: _Text = None
    """of the weights, e.g. a commit"""
    fingerprint: Annotated[str, Allowed("auto, off, or text used as it is", _text)] = "auto"
    """auto: a digest of the weight files; off: none; any other text is used as it is"""
    weights_epoch: Annotated[str, Allowed("text or a whole number", _weights_epoch)] = "0"
    """change it when the weights change under the same name"""


# Not a set, whose order would differ between ranks.
_Locations = Annotated[
    tuple[str, ...],
    from_list,
    Allowed("a list of tier names"),
]
_Policies = Annotated[
    dict[str, StorePolicy], Allowed("a mapping of tier names to sync or async, such as {pool: async}")
]
# An empty value has always meant no promotion.
_PromoteTo = Annotated[str | None, Allowed("the name of a tier, or off", or_word(None, PROMOTE_NOTHING, _text))]
_Seconds = Annotated[float | None, Field(ge=0, le=LONGEST_DURATION), Allowed("a number of seconds", not_empty)]
_Tenant = Annotated[str, Field(pattern=rf"^[A-Za-z0-9._-]{{1,{LONGEST_NAME}}}$")]


def _share(value: object) -> float:
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%", value, re.ASCII) if isinstance(value, str) else None
    if found is None or float(found[1]) > 100:
        raise refuse(value)
    return float(found[1]) / 100


class TenantConfig(ConfigModel):
    """What one tenant may have."""

    share: Annotated[float, Allowed("a percentage, such as 20%", _share)] = 0.0
    """of the slots of each file tier: so many of its pages no other tenant evicts"""
    lease: Annotated[float | None, Allowed("a duration up to longest_lease, or 0", duration(0, 7 * 86400))] = None
    """how long its requests may keep their prompts with a hint; left out: longest_lease"""


class RoleConfig(ConfigModel):
    """What is different on the servers of one role; what is left out is as for all of them."""

    retrieve_locations: _Locations = ()
    store_locations: _Locations = ()
    store_policies: Annotated[_Policies, Field(default_factory=dict)]
    promote_to: _PromoteTo = None
    kernels: KernelsConfig = KernelsConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    background: BackgroundConfig = BackgroundConfig()


class HicacheExtConfig(ConfigModel):
    """Everything under ``hicache_ext:``, checked, with names, sizes and templates resolved."""

    role: Role = "auto"
    """what this server does in a disaggregated pair; auto: as SGLang was launched"""
    tiers: Annotated[
        dict[Annotated[str, AfterValidator(_check_tier_name)], AnyTier],
        Allowed("a mapping of names to tiers, such as nvme: {type: file, path: /mnt/nvme0/hicache, capacity: 512GiB}"),
    ]
    """name -> tier"""
    retrieve_locations: Annotated[_Locations, Field(default_factory=tuple)]
    """tiers in the order in which they are read; left out: all, as written"""
    store_locations: Annotated[_Locations, Field(default_factory=tuple)]
    """tiers that a write goes to; left out: all"""
    store_policies: Annotated[_Policies, Field(default_factory=dict)]
    """sync: a write waits for the tier and counts; async: it goes there in the background; left out: async for shared
    tiers behind a private one, except on decode nodes"""
    promote_to: _PromoteTo = None
    """the tier to which pages found further out are written back, or off; left out: the nearest private one that is
    read and written"""
    model: ModelConfig = ModelConfig()
    pd: PdConfig = PdConfig()
    """prefill/decode disaggregation"""
    kv_dtype: Annotated[str | None, Allowed(_DTYPE_ALLOWED, or_word(None, None, _dtype))] = None
    """the logical dtype of the KV cache, where SGLang's is not the right one"""
    longest_lease: Annotated[float, Allowed("a duration up to 7d, such as 1h, or 0", duration(0, 7 * 86400))] = 3600.0
    """how long a request may keep its prompt in a file tier with a hint; 0: of what requests say, only no_store and
    priority are followed"""
    tenants: Annotated[
        dict[_Tenant, TenantConfig] | None,
        Allowed(
            "a mapping of up to 62 names (up to 64 letters, digits, '.', '_' and '-') and default, "
            "such as {a: {share: 20%}}"
        ),
    ] = None
    """name -> what this tenant may have in file tiers with slabs; left out: none (docs/agents.md)"""
    watch_config: bool = False
    """true: take over changes of the configuration file as they are written"""
    kernels: KernelsConfig = KernelsConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    background: BackgroundConfig = BackgroundConfig()
    linker: LinkerConfig = LinkerConfig()
    """SGLang's external linker, in place of its host cache"""
    events: EventsConfig | None = None
    """tell KV-aware routers which pages come and go in the tiers; left out: off"""
    tracing: TracingConfig | None = None
    """a span of OpenTelemetry for each call of a tier; left out: none"""
    record: RecordConfig | None = None
    """write what requests ask for to files, without tokens and text; left out: off"""
    roles: Annotated[
        dict[ServerRole, RoleConfig],
        Field(default_factory=dict),
        Allowed("a mapping of prefill, decode or both to settings, such as {decode: {retrieve_locations: []}}"),
    ]
    """what is different on the servers of one role, so that all of them share a file"""

    @classmethod
    def misplaced_key(cls, key: str) -> str | None:
        return "it belongs at the top level of the file" if key in ExtraConfig.model_fields else None

    @property
    def tenant_limits(self) -> dict[str, Tenant] | None:
        """Return the limits in force for each tenant; None without tenants."""
        if self.tenants is None:
            return None
        longest = self.longest_lease
        return {
            name: Tenant(limits.share, longest if limits.lease is None else limits.lease)
            for name, limits in self.tenants.items()
        }

    @property
    def lossy_codecs(self) -> frozenset[str]:
        """Return the lossy codecs of all tiers, including tiers used by other roles: what one node of a pair restores,
        the other continues with."""
        return frozenset(tier.codec for tier in self.tiers.values() if tier.codec in LOSSY_CODECS)

    def for_role(self, role: ServerRole) -> HicacheExtConfig:
        """Return the configuration of a server of ``role``, with its overrides applied and only the tiers it uses.

        A ``role`` in the file wins over the one that is given, which is what SGLang was launched as. Raises ConfigError
        for what only shows where the role is known.
        """
        view = self._view(self.role if self.role != "auto" else role)
        if errors := _misfits(view):
            raise config_error([ConfigError(SECTION + one.key, one.problem, one.allowed) for one in errors])
        used = {*view.retrieve_locations, *view.store_locations}
        return view.model_copy(update={"tiers": {name: tier for name, tier in self.tiers.items() if name in used}})

    def _view(self, role: ServerRole) -> HicacheExtConfig:
        """Return the configuration of one role, unchecked and with all tiers."""
        own = self.roles.get(role) or RoleConfig.model_validate({})
        changed = {name: getattr(own, name) for name in own.model_fields_set}
        view = self.model_copy(update={**changed, "role": role, "roles": {}})
        if "promote_to" in changed or view.promote_to in (PROMOTE_NOTHING, *view.retrieve_locations[:-1]):
            return view
        # An inherited value, useless to a role that reads from other tiers.
        return view.model_copy(update={"promote_to": None})

    @model_validator(mode="before")
    @classmethod
    def _lists_that_were_left_out_hold_every_tier(cls, values: Any) -> Any:
        tiers = values.get("tiers") if isinstance(values, Mapping) else None
        names = list(tiers) if isinstance(tiers, Mapping) else []
        return {"retrieve_locations": names, "store_locations": names, **values} if names else values

    @model_validator(mode="after")
    def _all_fits_together(self) -> Self:
        if errors := _misfits(self):
            raise config_error(errors)
        return self


def _misfits(config: HicacheExtConfig) -> list[ConfigError]:
    """Return errors in combinations of individually valid values, per role, too. Keys are relative to the section."""
    errors = list(_misnamed(config)) or list(_contradictions(config))
    told = set(map(str, errors))
    for role in config.roles:
        found = [error for error in _misfits(config._view(role)) if str(error) not in told]
        errors += [ConfigError(f".roles.{role}{one.key}", one.problem, one.allowed) for one in found]
    return errors


def _misnamed(config: HicacheExtConfig) -> Iterator[ConfigError]:
    """Yield errors for names of tiers that do not exist or are not allowed in their place."""
    tiers = tuple(config.tiers)
    if not tiers:
        yield ConfigError(".tiers", "at least one tier is needed", "a mapping of names to tiers")
        return
    for place in ("retrieve_locations", "store_locations"):
        names = getattr(config, place)
        for position, name in enumerate(names):
            if name not in tiers:
                yield _no_such_tier(f".{place}[{position}]", name, tiers)
            elif name in names[:position]:
                yield ConfigError(f".{place}[{position}]", f"{quoted(name)} is listed twice", "each tier once")
    for name in config.store_policies:
        if name not in tiers:
            yield _no_such_tier(".store_policies", name, tiers)
    target, read = config.promote_to, config.retrieve_locations
    if target is not None and target not in (PROMOTE_NOTHING, *tiers):
        yield _no_such_tier(".promote_to", target, tiers)
    elif target is not None and target not in (PROMOTE_NOTHING, *read):
        problem = f"{quoted(target)} is not in retrieve_locations, so that what is promoted would never be read"
        yield ConfigError(".promote_to", problem, listed(read[:-1]) or "leave it out")
    elif target in read[-1:]:
        problem = f"{quoted(target)} is the last of retrieve_locations, so that nothing is ever promoted to it"
        yield ConfigError(".promote_to", problem, listed(read[:-1]) or "leave it out with one location")


def _no_such_tier(key: str, name: str, tiers: tuple[str, ...]) -> ConfigError:
    return ConfigError(key, f"no tier is named {quoted(name)}{did_you_mean(name, tiers)}", listed(tiers))


def _contradictions(config: HicacheExtConfig) -> Iterator[ConfigError]:
    """Yield errors for contradictions between two keys."""
    if not config.retrieve_locations and config.role != "decode":
        problem = f"must not be empty with role {config.role}: only a decode node may read from no tier"
        yield ConfigError(".retrieve_locations", problem, listed(config.tiers))
    elif not config.retrieve_locations and not config.store_locations:
        problem = "retrieve_locations and store_locations are both empty, so that no tier is ever used"
        yield ConfigError(".store_locations", problem, listed(config.tiers))
    owners = [(name, directory) for name, tier in config.tiers.items() for directory in tier.directories()]
    for position, (name, directory) in enumerate(owners):
        for owner, other in owners[:position]:
            if owner != name and (relation := directory_relation(directory, other)):
                problem = f"a directory of this tier {relation} one of tier {owner!r}"
                yield ConfigError(f".tiers.{name}.path", problem, "directories of one tier only")
    if (record := config.record) is not None:
        for owner, other in owners:
            if relation := directory_relation(os.path.normpath(record.path), other):
                problem = f"{quoted(record.path)} {relation} a directory of tier {owner!r}"
                yield ConfigError(".record.path", problem, "a directory for recordings alone")
    tenants = config.tenants or {}
    for name, tenant in tenants.items():
        if tenant.lease is not None and tenant.lease > config.longest_lease:
            problem = f"is more than longest_lease, {format_duration(config.longest_lease)}"
            yield ConfigError(f".tenants.{name}.lease", problem, "at most longest_lease")
    if (named := len(tenants.keys() - {DEFAULT})) > MOST_TENANTS:
        problem = f"{named} tenants are more than an index has numbers for"
        yield ConfigError(".tenants", problem, f"up to {MOST_TENANTS}, and default")
    if (shares := round(sum(tenant.share for tenant in tenants.values()), 9)) > 1:
        yield ConfigError(".tenants", f"the shares are {100 * shares:g}% together", "at most 100%")
    # Applies to the lists and promote_to of one role: a file for several roles is checked role by role.
    if config.pd.hints.enabled and config.role in ("prefill", "decode"):
        yield from _hints_that_go_nowhere(config)


def _hints_that_go_nowhere(config: HicacheExtConfig) -> Iterator[ConfigError]:
    tiers, place = config.tiers, "store_locations" if config.role == "decode" else "retrieve_locations"
    locations = getattr(config, place)
    over = hints_over(config.pd.hints, locations)
    if over is None or over not in locations:
        problem = f"{quoted(over or '')} is not in {place} of the role {config.role}, so that no hint passes there"
        yield ConfigError(".pd.hints.over", problem, listed(locations) or f"a tier of {place}")
    elif not tiers[over].carries_hints:
        problem = f"tier {quoted(over)} is of type {tiers[over].type}, which carries no hints"
        allowed = [name for name in locations if tiers[name].carries_hints]
        types = [name for name, model in tier_types().items() if model.carries_hints]
        yield ConfigError(".pd.hints.over", problem, listed(allowed) or f"a tier of type {listed(types)}")


def hints_over(hints: HintsConfig, locations: Sequence[str]) -> str | None:
    """Return the tier that carries the hints; ``locations`` are those a decode node writes or a prefill node reads."""
    return hints.over or (locations[-1] if locations else None)


class ExtraConfig(ConfigModel):
    """The whole document: what ``--hicache-storage-backend-extra-config`` is given.

    SGLang takes its own keys out before the backend sees the document on a prefill node, and leaves them in on a decode
    node; they are None here where they are absent.
    """

    backend_name: Literal["hicache_ext"]
    module_path: Literal["hicache_ext.storage.backend"]
    class_name: Literal["HiCacheExtBackend"]
    interface_v1: Annotated[Literal[1], Allowed(_INTERFACE_ALLOWED, not_empty)]
    hicache_ext: HicacheExtConfig
    prefetch_threshold: Annotated[int | None, Allowed("a whole number of tokens", whole_number(0, NO_LIMIT))] = None
    prefetch_timeout_base: _Seconds = None
    prefetch_timeout_per_ki_token: _Seconds = None
    hicache_storage_pass_prefix_keys: Annotated[bool | None, Allowed("true or false", not_empty)] = None
    tp_lcm_size: Annotated[int | None, Field(ge=1), Allowed("a positive whole number")] = None
    allocator: Literal["shm"] | None = None
    """page-aligned host memory; SGLang honours it only in inline JSON, and on decode nodes"""

    @classmethod
    def misplaced_key(cls, key: str) -> str | None:
        return f"it belongs under '{SECTION}'" if key in HicacheExtConfig.model_fields else None

    @classmethod
    def around(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete document around a (raw) section ``hicache_ext``."""
        return {
            "backend_name": BACKEND_NAME,
            "module_path": "hicache_ext.storage.backend",
            "class_name": "HiCacheExtBackend",
            "interface_v1": 1,
            SECTION: dict(section),
        }
