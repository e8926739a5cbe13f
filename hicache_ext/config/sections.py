"""The sections of the configuration besides ``tiers``: what each takes, and what is wrong with a value."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from hicache_ext.config.problems import refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel
from hicache_ext.config.values import NO_LIMIT, absolute_path, duration, size, whole_number
from hicache_ext.errors import ConfigError

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

_PATH_ALLOWED = "an absolute path"


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


ENDPOINT_ALLOWED = "tcp://ADDRESS:PORT with an address of this machine, or * for all of them, such as tcp://*:5657"
_ENDPOINT = re.compile(r"tcp://(?:\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)
_TOPIC_ALLOWED = "text without line breaks"


def _endpoint(value: object) -> str:
    found = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or found is None or not 0 < int(found[1]) < 1 << 16:
        raise refuse(value, ENDPOINT_ALLOWED)
    return value


def _topic(value: object) -> str:
    if not isinstance(value, str) or (value and not value.isprintable()):
        raise ConfigError("", f"{shown(value)} is not accepted", _TOPIC_ALLOWED)
    return value


_Endpoint = Annotated[str, Allowed(ENDPOINT_ALLOWED, _endpoint)]


class EventsConfig(ConfigModel):
    """``events``: on where it is there."""

    required_because: ClassVar[Mapping[str, str]] = {
        "endpoint": "required: where routers subscribe",
        "replay_endpoint": "required: a router that missed an event could never be right again without it",
    }
    removed: ClassVar[Mapping[str, str]] = {
        "interval": "the tiers are looked at every second, and less often where a look takes long"
    }

    endpoint: _Endpoint
    """where routers subscribe; each DP replica takes the next port"""
    replay_endpoint: _Endpoint
    """where routers ask for what they missed; each DP replica takes the next port"""
    topic: Annotated[str, Allowed(_TOPIC_ALLOWED, _topic)] = ""
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
        raise refuse(value, COLLECTOR_ALLOWED)
    try:
        parts = urllib.parse.urlsplit(value)
        port_is_sound = parts.port != 0
    except ValueError:
        raise refuse(value, COLLECTOR_ALLOWED) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sound:
        raise refuse(value, COLLECTOR_ALLOWED)
    if parts.path in ("", "/"):
        raise ConfigError("", f"{shown(value)} has no path", f"such as {value.rstrip('/')}/v1/traces")
    return value


class TracingConfig(ConfigModel):
    """``tracing``: on where it is there."""

    required_because: ClassVar[Mapping[str, str]] = {"endpoint": "required: where spans go"}

    endpoint: Annotated[str, Allowed(COLLECTOR_ALLOWED, _collector)]
    """where spans go: the collector of SGLang's --enable-trace, or one of your own"""


# Not in the class: its field has the name of the parser.
_RecordingsSize = Annotated[int, Allowed("a size of 1MiB or more, such as 256MiB", size(1 << 20, NO_LIMIT))]


class RecordConfig(ConfigModel):
    """``record``: on where it is there."""

    required_because: ClassVar[Mapping[str, str]] = {"path": "required: the directory that recordings go to"}

    path: Annotated[str, Allowed(_PATH_ALLOWED, absolute_path)]
    """a directory for recordings alone; several processes may share it"""
    size: _RecordingsSize = 256 << 20
    """of all files in it together; the oldest are removed"""


# -- pd ----------------------------------------------------------------------------------------------------------------


PullMode = Literal["off", "fixed", "adaptive"]


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
        "speculative": "with EAGLE or MTP a decode node is refused unless pd.write.enabled is false",
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

    mode: PullMode = "off"
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
