"""The configuration: the section ``hicache_ext`` and the document around it that SGLang reads."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from hicache_ext.config.problems import did_you_mean, key_path, listed, quoted, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, allowed_for, true_or_false
from hicache_ext.config.sections import (
    POLICIES_ALLOWED,
    BackgroundConfig,
    EventsConfig,
    HintsConfig,
    KernelsConfig,
    LinkerConfig,
    PdConfig,
    PrefetchConfig,
    RecordConfig,
    StorePolicy,
    TracingConfig,
    parse_policies,
)
from hicache_ext.config.tier import AnyTier, TierConfig, tier_types
from hicache_ext.config.values import (
    LONGEST_DURATION,
    NO_LIMIT,
    directory_relation,
    duration,
    format_duration,
    number,
    whole_number,
)
from hicache_ext.errors import ConfigError
from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.storage.contract.tenants import DEFAULT, LONGEST_NAME, MOST_TENANTS, Tenant

BACKEND_NAME = "hicache_ext"
MODULE_PATH = "hicache_ext.storage.backend"
CLASS_NAME = "HiCacheExtBackend"
SECTION = "hicache_ext"

Role = Literal["auto", "prefill", "decode", "both"]
ServerRole = Literal["prefill", "decode", "both"]
"""What a server is once it runs; ``auto`` has been resolved."""

_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
_TIER_NAME_ALLOWED = "a lower-case letter, then lower-case letters, digits, '_' and '-'"
_NAMES_ALLOWED = "a list of tier names"
_INTERFACE_ALLOWED = "1 or true"
_INTERFACE_REASON = "without it SGLang never uses the zero-copy calls that this backend serves"
_DTYPE = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_DTYPE_ALLOWED = "a logical dtype such as bfloat16 or fp8_e4m3"
_SHORT_DTYPES = {
    "auto": "leave the key out to use the dtype that SGLang runs with",
    "bf16": "write bfloat16",
    "fp16": "write float16",
    "half": "write float16",
    "fp8": "write fp8_e4m3 or fp8_e5m2",
}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError("", f"{shown(value)} is not text; put it in quotes", "text")
    if not value.strip() or not value.isprintable():
        raise ConfigError("", f"{shown(value)} is empty or has unprintable characters", "text")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


PROMOTE_NOTHING = "off"


def _promote_to(value: object) -> str:
    # An empty value has always meant no promotion.
    return PROMOTE_NOTHING if value is None else _text(value)


def _weights_epoch(value: object) -> str:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _dtype(value: object) -> str | None:
    if value is None:
        return None
    text = _text(value)
    if text in _SHORT_DTYPES:
        raise ConfigError("", f"{shown(value)} is not the name of one dtype; {_SHORT_DTYPES[text]}", _DTYPE_ALLOWED)
    if not _DTYPE.fullmatch(text):
        raise refuse(value, _DTYPE_ALLOWED)
    return text


def _interface_v1(value: object) -> int:
    if value is True or (isinstance(value, int) and value == 1):
        return 1
    if isinstance(value, str):
        problem = f"{shown(value)} is text, and SGLang takes any text, even '0', for on"
    else:
        problem = f"{shown(value)} is not accepted: {_INTERFACE_REASON}"
    raise ConfigError("", problem, _INTERFACE_ALLOWED)


def _tp_lcm_size(value: object) -> int | None:
    return None if value is None else whole_number(1, NO_LIMIT)(value)


def _check_tier_name(name: str) -> str:
    if name == PROMOTE_NOTHING:
        raise ConfigError("", "this name has a meaning of its own in promote_to", "another name")
    if not _TIER_NAME.fullmatch(name):
        raise ConfigError("", "not a tier name", _TIER_NAME_ALLOWED)
    return name


class ModelConfig(ConfigModel):
    """Which weights computed the KV, where SGLang does not say it itself."""

    id: Annotated[str | None, Allowed("text", _optional_text)] = None
    """the model's name; None is the name under which SGLang serves it"""
    revision: Annotated[str | None, Allowed("text", _optional_text)] = None
    """of the weights, e.g. a commit"""
    fingerprint: Annotated[str, Allowed("auto, off, or text used as it is", _text)] = "auto"
    """auto: a digest of the weight files; off: none; any other text is used as it is"""
    weights_epoch: Annotated[str, Allowed("text or a whole number", _weights_epoch)] = "0"
    """change it when the weights change under the same name"""


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise refuse(value, _NAMES_ALLOWED)
    for position, name in enumerate(value):
        if not isinstance(name, str):
            raise refuse(name, _NAMES_ALLOWED, f"[{position}]")
    return tuple(value)


_Locations = Annotated[tuple[str, ...], Allowed(_NAMES_ALLOWED)]
_Policies = Annotated[dict[str, StorePolicy], Allowed(POLICIES_ALLOWED, parse_policies)]
_PromoteTo = Annotated[str | None, Allowed("the name of a tier, or off", _promote_to)]
_Seconds = Annotated[float | None, Allowed("a number of seconds", number(0, LONGEST_DURATION))]
_TENANT = re.compile(rf"[A-Za-z0-9._-]{{1,{LONGEST_NAME}}}", re.ASCII)
_SHARE_ALLOWED = "a percentage, such as 20%"


def _check_tenant(name: str) -> str:
    if not _TENANT.fullmatch(name):
        allowed = f"up to {LONGEST_NAME} letters, digits, '.', '_' and '-'"
        raise ConfigError("", "not a name of a tenant", allowed)
    return name


def _share(value: object) -> float:
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%", value, re.ASCII) if isinstance(value, str) else None
    if found is None or float(found[1]) > 100:
        raise refuse(value, _SHARE_ALLOWED)
    return float(found[1]) / 100


class TenantConfig(ConfigModel):
    """What one tenant may have."""

    share: Annotated[float, Allowed(_SHARE_ALLOWED, _share)] = 0.0
    """of the slots of each file tier: so many of its pages no other tenant evicts"""
    lease: Annotated[
        float | None,
        Allowed("a duration up to longest_lease, or 0", duration(0, 7 * 86400)),
    ] = None
    """how long its requests may keep their prompts with a hint; left out: longest_lease"""


class RoleConfig(ConfigModel):
    """What is different on the servers of one role; what is left out is as for all of them."""

    retrieve_locations: Annotated[tuple[str, ...], Allowed(_NAMES_ALLOWED, _names)] = ()
    store_locations: Annotated[tuple[str, ...], Allowed(_NAMES_ALLOWED, _names)] = ()
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
    kv_dtype: Annotated[str | None, Allowed(_DTYPE_ALLOWED, _dtype)] = None
    """the logical dtype of the KV cache, where SGLang's is not the right one"""
    longest_lease: Annotated[float, Allowed("a duration up to 7d, such as 1h, or 0", duration(0, 7 * 86400))] = 3600.0
    """how long a request may keep its prompt in a file tier with a hint; 0: of what requests say, only no_store and
    priority are followed"""
    tenants: Annotated[
        dict[Annotated[str, AfterValidator(_check_tenant)], TenantConfig] | None,
        Allowed("a mapping of up to 62 names and default, such as {team-a: {share: 20%}}"),
    ] = None
    """name -> what this tenant may have in file tiers with slabs; left out: none (docs/agents.md)"""
    watch_config: bool = False
    """true: take over changes of the configuration file as they are written"""
    kernels: KernelsConfig = KernelsConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    background: BackgroundConfig = BackgroundConfig()
    linker: LinkerConfig = LinkerConfig()
    """SGLang's external linker, in place of its host cache"""
    events: Annotated[EventsConfig | None, Allowed("a mapping with endpoint, replay_endpoint, topic or interval")] = (
        None
    )
    """tell KV-aware routers which pages come and go in the tiers; left out: off"""
    tracing: Annotated[TracingConfig | None, Allowed("a mapping with endpoint, such as {endpoint: sglang}")] = None
    """a span of OpenTelemetry for each call of a tier; left out: none"""
    record: Annotated[
        RecordConfig | None, Allowed("a mapping with path, such as {path: /var/lib/hicache-recordings, size: 256MiB}")
    ] = None
    """write what requests ask for to files, without tokens and text; left out: off"""
    roles: Annotated[
        dict[ServerRole, RoleConfig],
        Field(default_factory=dict),
        Allowed("a mapping of prefill, decode or both to settings, such as {decode: {retrieve_locations: []}}"),
    ]
    """what is different on the servers of one role, so that all of them share a file"""
    # Last: its check needs all that stands before it.

    @classmethod
    def misplaced_key(cls, key: str) -> str | None:
        return "it belongs at the top level of the file" if key in ExtraConfig.model_fields else None

    @property
    def tenant_limits(self) -> dict[str, Tenant] | None:
        """What is in force for each tenant; None without tenants."""
        if self.tenants is None:
            return None
        longest = self.longest_lease
        return {
            name: Tenant(limits.share, longest if limits.lease is None else limits.lease)
            for name, limits in self.tenants.items()
        }

    @property
    def lossy_codecs(self) -> frozenset[str]:
        """Those of all tiers, also of tiers that other roles use: what one node of a pair restores, the other goes on
        with."""
        return frozenset(tier.codec for tier in self.tiers.values() if tier.codec in LOSSY_CODECS)

    def for_role(self, role: ServerRole) -> HicacheExtConfig:
        """The configuration of a server of ``role``: its overrides applied, and only the tiers that it uses.

        A ``role`` in the file wins over the one that is given, which is what SGLang was launched as.
        """
        return _view(
            self.role if self.role != "auto" else role, {name: getattr(self, name) for name in _SHARED}, self.roles
        )

    @model_validator(mode="before")
    @classmethod
    def _lists_that_were_left_out_hold_every_tier(cls, values: Any) -> Any:
        tiers = values.get("tiers") if isinstance(values, Mapping) else None
        names = list(tiers) if isinstance(tiers, Mapping) else []
        return {"retrieve_locations": names, "store_locations": names, **values} if names else values

    @field_validator("tiers", mode="after")
    @classmethod
    def _at_least_one_tier_and_no_shared_directory(cls, tiers: dict[str, AnyTier]) -> dict[str, AnyTier]:
        if not tiers:
            raise ConfigError("", "at least one tier is needed", "a mapping of names to tiers")
        owners: list[tuple[str, str]] = []
        for name, tier in tiers.items():
            for directory in tier.directories():
                for owner, other in owners:
                    if relation := directory_relation(directory, other):
                        problem = f"a directory of this tier {relation} one of tier {owner!r}"
                        raise ConfigError(f".{name}.path", problem, "directories of one tier only")
            owners.extend((name, directory) for directory in tier.directories())
        return tiers

    @field_validator("tenants", mode="after")
    @classmethod
    def _shares_and_leases_fit(
        cls, configured: dict[str, TenantConfig] | None, info: ValidationInfo
    ) -> dict[str, TenantConfig] | None:
        longest = info.data.get("longest_lease", math.inf)
        for name, tenant in (configured or {}).items():
            if tenant.lease is not None and tenant.lease > longest:
                problem = f"is more than longest_lease, {format_duration(longest)}"
                raise ConfigError(f".{name}.lease", problem, "at most longest_lease")
        names = [name for name in configured or () if name != DEFAULT]
        if len(names) > MOST_TENANTS:
            problem = f"{len(names)} tenants are more than an index has numbers for"
            raise ConfigError("", problem, f"up to {MOST_TENANTS}, and default")
        if (shares := round(sum(tenant.share for tenant in (configured or {}).values()), 9)) > 1:
            raise ConfigError("", f"the shares are {100 * shares:g}% together", "at most 100%")
        return configured

    @field_validator("record", mode="after")
    @classmethod
    def _recordings_apart_from_pages(cls, record: RecordConfig | None, info: ValidationInfo) -> RecordConfig | None:
        if record is None:
            return None
        for name, tier in info.data.get("tiers", {}).items():
            for directory in tier.directories():
                if relation := directory_relation(os.path.normpath(record.path), directory):
                    problem = f"{quoted(record.path)} {relation} a directory of tier {name!r}"
                    raise ConfigError(".path", problem, "a directory for recordings alone")
        return record

    @field_validator("retrieve_locations", "store_locations", mode="before")
    @classmethod
    def _known_and_distinct(cls, value: object, info: ValidationInfo) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise refuse(value, _NAMES_ALLOWED)
        tiers = _tier_names(info)
        for position, name in enumerate(value):
            place = f"[{position}]"
            if not isinstance(name, str):
                raise refuse(name, listed(tiers) or _NAMES_ALLOWED, place)
            if tiers and name not in tiers:
                raise _no_such_tier(name, tiers, place)
            if name in value[:position]:
                raise ConfigError(place, f"{quoted(name)} is listed twice", "each tier once")
        if not value and info.field_name == "retrieve_locations" and info.data.get("role", "decode") != "decode":
            problem = f"must not be empty with role {info.data['role']}: only a decode node may read from no tier"
            raise ConfigError("", problem, listed(tiers))
        if not value and info.field_name == "store_locations" and info.data.get("retrieve_locations") == ():
            problem = "retrieve_locations and store_locations are both empty, so that no tier is ever used"
            raise ConfigError("", problem, listed(tiers))
        return tuple(value)

    @field_validator("promote_to", mode="after")
    @classmethod
    def _promotion_is_possible(cls, value: str | None, info: ValidationInfo) -> str | None:
        tiers, locations = _tier_names(info), info.data.get("retrieve_locations")
        if value is None or value == PROMOTE_NOTHING:
            return value
        if tiers and value not in tiers:
            raise _no_such_tier(value, tiers, "")
        if locations is None:
            return value
        if value not in locations:
            problem = f"{quoted(value)} is not in retrieve_locations, so that what is promoted would never be read"
            raise ConfigError("", problem, listed(locations[:-1]) or "leave it out")
        if value == locations[-1]:
            problem = f"{quoted(value)} is the last of retrieve_locations, so that nothing is ever promoted to it"
            raise ConfigError("", problem, listed(locations[:-1]) or "leave it out with one location")
        return value

    @field_validator("store_policies", mode="after")
    @classmethod
    def _policies_of_known_tiers(cls, value: dict[str, StorePolicy], info: ValidationInfo) -> dict[str, StorePolicy]:
        tiers = _tier_names(info)
        for name in value:
            if tiers and name not in tiers:
                raise _no_such_tier(name, tiers, "")
        return value

    @field_validator("pd", mode="after")
    @classmethod
    def _hints_can_be_sent_and_followed(cls, pd: PdConfig, info: ValidationInfo) -> PdConfig:
        # The lists and promote_to of one role: what stands in a file for several is checked role by role.
        if pd.hints.enabled and info.data.get("role") in ("prefill", "decode"):
            _refuse_hints_that_go_nowhere(pd.hints, info.data)
        return pd

    @field_validator("roles", mode="before")
    @classmethod
    def _known_roles(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            raise refuse(value, allowed_for(cls, "roles"))
        for name in value:
            if name not in get_args(ServerRole):
                problem = f"unknown role {quoted(str(name))}{did_you_mean(str(name), get_args(ServerRole))}"
                raise ConfigError("", problem, listed(get_args(ServerRole)))
        return value

    @field_validator("roles", mode="after")
    @classmethod
    def _every_role_is_sound(
        cls, roles: dict[ServerRole, RoleConfig], info: ValidationInfo
    ) -> dict[ServerRole, RoleConfig]:
        # Where another key is wrong already, that is the sentence to read first.
        if all(name in info.data for name in _SHARED):
            for role in roles:
                try:
                    _view(role, info.data, roles)
                except ValidationError as error:
                    details = error.errors(include_url=False)[0]
                    first = details["ctx"]["error"]
                    key = "." + key_path((role, *details["loc"])) + first.key
                    raise ConfigError(key, first.problem, first.allowed) from None
        return roles


def _refuse_hints_that_go_nowhere(hints: HintsConfig, values: Mapping[str, Any]) -> None:
    role = values["role"]
    place = "store_locations" if role == "decode" else "retrieve_locations"
    locations, tiers = values.get(place), values.get("tiers")
    if locations is None or tiers is None or "promote_to" not in values:
        return  # That is wrong already.
    over = hints_over(hints, locations)
    if over is None or over not in locations:
        problem = f"{quoted(over or '')} is not in {place} of the role {role}, so that no hint passes there"
        raise ConfigError(".hints.over", problem, listed(locations) or f"a tier of {place}")
    if not tiers[over].carries_hints:
        problem = f"tier {quoted(over)} is of type {tiers[over].type}, which carries no hints"
        allowed = [name for name in locations if tiers[name].carries_hints]
        types = [name for name, model in tier_types().items() if model.carries_hints]
        raise ConfigError(".hints.over", problem, listed(allowed) or f"a tier of type {listed(types)}")
    nearer = [tiers[name] for name in locations[:-1] if name in values.get("store_locations", ())]
    if role == "prefill" and not _may_promote(values["promote_to"], nearer):
        problem = "a prefill node brings the pages to the tier promote_to, and there is none"
        raise ConfigError(".hints.enabled", problem, "promote_to: the nearest of retrieve_locations")


def _may_promote(promote_to: str | None, nearer: Sequence[TierConfig]) -> bool:
    """Whether there is a tier to promote to; where none is named it takes a private one that others are behind of."""
    if promote_to is not None:
        return promote_to != PROMOTE_NOTHING
    return any(tier.may_be_private for tier in nearer)


def hints_over(hints: HintsConfig, locations: Sequence[str]) -> str | None:
    """The name of the tier that carries the hints; ``locations`` that a decode node writes, or a prefill node reads."""
    return hints.over or (locations[-1] if locations else None)


_SHARED = tuple(name for name in HicacheExtConfig.model_fields if name not in ("role", "roles"))
"""What every role has."""


def _view(role: ServerRole, shared: Mapping[str, Any], roles: Mapping[ServerRole, RoleConfig]) -> HicacheExtConfig:
    """The configuration of one role. Raises ValidationError."""
    own = roles.get(role) or RoleConfig.model_validate({})
    values = {name: shared[name] for name in _SHARED} | {name: getattr(own, name) for name in own.model_fields_set}
    if "promote_to" not in own.model_fields_set and values["promote_to"] not in values["retrieve_locations"][:-1]:
        # Inherited, and of no use to a role that reads elsewhere.
        values["promote_to"] = shared["promote_to"] if shared["promote_to"] == PROMOTE_NOTHING else None
    if values["promote_to"] is None:
        # Left out; an empty value would be more than that.
        del values["promote_to"]
    tiers = values["tiers"]
    view = HicacheExtConfig.model_validate({"role": role, **values}, context={"tier_names": tuple(tiers)})
    used = {*view.retrieve_locations, *view.store_locations}
    return view.model_copy(update={"tiers": {name: tier for name, tier in tiers.items() if name in used}})


class ExtraConfig(ConfigModel):
    """The whole document: what ``--hicache-storage-backend-extra-config`` is given.

    SGLang takes its own keys out before the backend sees the document on a prefill node, and leaves them in on a decode
    node; they are None here where they are absent.
    """

    required_because: ClassVar[Mapping[str, str]] = {"interface_v1": f"required: {_INTERFACE_REASON}"}

    backend_name: Literal["hicache_ext"]
    module_path: Literal["hicache_ext.storage.backend"]
    class_name: Literal["HiCacheExtBackend"]
    interface_v1: Annotated[int, Allowed(_INTERFACE_ALLOWED, _interface_v1)]
    hicache_ext: HicacheExtConfig
    prefetch_threshold: Annotated[int | None, Allowed("a whole number of tokens", whole_number(0, NO_LIMIT))] = None
    prefetch_timeout_base: _Seconds = None
    prefetch_timeout_per_ki_token: _Seconds = None
    hicache_storage_pass_prefix_keys: Annotated[bool | None, Allowed("true or false", true_or_false)] = None
    tp_lcm_size: Annotated[int | None, Allowed("a positive whole number", _tp_lcm_size)] = None
    allocator: Literal["shm"] | None = None
    """page-aligned host memory; SGLang honours it only in inline JSON, and on decode nodes"""

    @classmethod
    def misplaced_key(cls, key: str) -> str | None:
        return f"it belongs under '{SECTION}'" if key in HicacheExtConfig.model_fields else None

    @classmethod
    def around(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """The complete document around a (raw) section ``hicache_ext``."""
        return {
            "backend_name": BACKEND_NAME,
            "module_path": MODULE_PATH,
            "class_name": CLASS_NAME,
            "interface_v1": 1,
            SECTION: dict(section),
        }

    @classmethod
    def validated(cls, document: Mapping[str, Any]) -> Self:
        """``document`` validated; names of tiers are known to every check even where a tier itself is wrong."""
        section = document.get(SECTION)
        tiers = section.get("tiers") if isinstance(section, Mapping) else None
        names = tuple(tiers) if isinstance(tiers, Mapping) else ()
        return cls.model_validate(dict(document), context={"tier_names": names})


def _tier_names(info: ValidationInfo) -> tuple[str, ...]:
    if isinstance(info.context, dict):
        return tuple(info.context.get("tier_names", ()))
    return tuple(info.data.get("tiers", ()))


def _no_such_tier(name: str, tiers: tuple[str, ...], place: str) -> ConfigError:
    return ConfigError(place, f"no tier is named {quoted(name)}{did_you_mean(name, tiers)}", listed(tiers))
