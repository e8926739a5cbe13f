"""The section ``pd``: what a decode node writes, when a prefill node pulls instead of computing, and hints."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hicache_ext.config.problems import refuse
from hicache_ext.config.schema import DURATION_SCHEMA, Allowed, ConfigModel, as_pydantic_error, checked
from hicache_ext.config.units import DURATION_ALLOWED, parse_duration
from hicache_ext.config.values import NO_LIMIT, number, whole_number
from hicache_ext.errors import ConfigError

DropPolicy = Literal["oldest", "shortest"]
MissingPrefix = Literal["skip", "complete", "write"]
PullMode = Literal["off", "fixed", "adaptive"]

_TOKENS_ALLOWED = "a whole number of tokens"
_COUNT_ALLOWED = "a whole number"
_HINT_PAGES_ALLOWED = "a whole number of pages from 1 to 65536"
_KEEP_ALLOWED = "a whole number from 1 to 10000"
_STRIDE_ALLOWED = f"{_TOKENS_ALLOWED} from 1"
_IN_FLIGHT_ALLOWED = f"{_COUNT_ALLOWED} of pages from 1"
_RATE_ALLOWED = "tokens per second, such as 8000"
_SHARE_ALLOWED = "a number from 0 to 0.9"


def _interval(value: object) -> float:
    seconds = parse_duration(value)
    if seconds <= 0:
        raise refuse(value, f"{DURATION_ALLOWED}, more than 0")
    return seconds


def _tier_name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise refuse(value, "the name of a tier")
    return value


def _rate(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise refuse(value, _RATE_ALLOWED)
    return float(value)


def _no_ttl(value: object) -> None:
    if value is not None:
        problem = "the writer cannot expire single pages; where the tier has a ttl, set that in the decode node's file"
        raise ConfigError("", problem, "nothing")


_Tokens = Annotated[int, Allowed(_TOKENS_ALLOWED), checked(whole_number(0, NO_LIMIT, _TOKENS_ALLOWED))]
_Duration = Annotated[float, Allowed(DURATION_ALLOWED), checked(parse_duration), DURATION_SCHEMA]
_Interval = Annotated[float, Allowed(DURATION_ALLOWED), checked(_interval), DURATION_SCHEMA]


class WriteConfig(ConfigModel):
    """``pd.write``: how a decode node writes the KV of what it generated."""

    enabled: Annotated[bool, Field(description="false: SGLang's own decode offload, unchanged")] = True
    stride: Annotated[
        int,
        Field(description="generated tokens between two copies of a running request; rounded to pages, at least one"),
        Allowed(_STRIDE_ALLOWED),
        checked(whole_number(1, NO_LIMIT, _STRIDE_ALLOWED)),
    ] = 256
    min_tokens: Annotated[
        _Tokens, Field(description="requests that generate fewer tokens than this are not written")
    ] = 0
    flush_on_abort: Annotated[
        bool, Field(description="write what an aborted request had generated; a user who stops an answer often goes on")
    ] = True
    missing_prefix: Annotated[
        MissingPrefix,
        Field(
            description="when the pages of the prompt are not in the pool: skip the continuation, complete it with"
            " the prompt's pages, or write it without looking"
        ),
    ] = "skip"
    prefix_grace: Annotated[
        _Duration,
        Field(description="how long the prefill node may take to write the prompt before it counts as missing"),
    ] = 5.0
    drop: Annotated[
        DropPolicy,
        Field(description="which waiting continuation goes first when host memory is full, within the lowest priority"),
    ] = "oldest"
    retries: Annotated[
        int,
        Field(description="how often a failed write is tried again"),
        Allowed(_COUNT_ALLOWED),
        checked(whole_number(0, NO_LIMIT, _COUNT_ALLOWED)),
    ] = 3
    retry_within: Annotated[_Duration, Field(description="no retry later than this after the first attempt")] = 30.0
    pages_in_flight: Annotated[
        int,
        Field(description="pages handed to the storage thread at once; the others wait where they can be dropped"),
        Allowed(_IN_FLIGHT_ALLOWED),
        checked(whole_number(1, NO_LIMIT, _IN_FLIGHT_ALLOWED)),
    ] = 512
    speculative: Annotated[
        Literal["refuse", "target_only"],
        Field(
            description="with EAGLE or MTP: refuse to start, or write the target model's pages without the draft's,"
            " which only helps prefill nodes that keep no draft KV in HiCache"
        ),
    ] = "refuse"
    ttl: Annotated[
        None,
        Field(description="refused: a ttl is set on the tier, in the decode node's own file"),
        Allowed("nothing"),
        checked(_no_ttl),
    ] = None


class PullConfig(ConfigModel):
    """``pd.pull``: when a prefill node reads a prefix from storage instead of computing it."""

    mode: Annotated[
        PullMode,
        Field(description="off: always pull; fixed: from min_tokens on; adaptive: when measured to be cheaper"),
    ] = "off"
    min_tokens: Annotated[_Tokens, Field(description="shorter prefixes are computed (modes fixed and adaptive)")] = 256
    prefill_rate: Annotated[
        float | None,
        Field(description="tokens per second this node computes; left out: measured"),
        Allowed(_RATE_ALLOWED),
        checked(_rate),
    ] = None
    hysteresis: Annotated[
        float,
        Field(description="after a tier was too slow, pull again only when it is cheaper by this share"),
        Allowed(_SHARE_ALLOWED),
        checked(number(0, 0.9, _SHARE_ALLOWED)),
    ] = 0.2
    probe_interval: Annotated[
        _Duration, Field(description="how often a tier that is not used is measured in the background")
    ] = 10.0

    @model_validator(mode="after")
    def _a_rate_needs_the_adaptive_mode(self) -> Self:
        if self.prefill_rate is not None and self.mode != "adaptive":
            problem = f"only mode adaptive uses it, and the mode is {self.mode}"
            raise as_pydantic_error(ConfigError(".prefill_rate", problem, "leave it out, or mode: adaptive"))
        return self


class HintsConfig(ConfigModel):
    """``pd.hints``: a decode node says which conversations are in the pool, and prefill nodes bring them to a local
    tier before the next turn arrives."""

    enabled: Annotated[
        bool, Field(description="true: decode nodes send hints, prefill nodes follow them into promote_to")
    ] = False
    over: Annotated[
        str | None,
        Field(
            description="the tier whose engine carries the hints, of type redis or file; left out: the last of"
            " store_locations on a decode node, of retrieve_locations on a prefill node"
        ),
        Allowed("the name of a tier"),
        checked(_tier_name),
    ] = None
    interval: Annotated[_Interval, Field(description="how often a prefill node looks for hints")] = 0.5
    max_pages: Annotated[
        int,
        Field(description="pages that one hint names at most, from the first page of the conversation on"),
        Allowed(_HINT_PAGES_ALLOWED),
        checked(whole_number(1, 65536, _HINT_PAGES_ALLOWED)),
    ] = 2048
    keep: Annotated[
        int,
        Field(description="hints that the pool keeps; the oldest go first"),
        Allowed(_KEEP_ALLOWED),
        checked(whole_number(1, 10_000, _KEEP_ALLOWED)),
    ] = 256
    lifetime: Annotated[
        _Interval, Field(description="older hints are ignored; the nodes' clocks must agree better than this")
    ] = 60.0


class PdConfig(ConfigModel):
    """``pd``: prefill/decode disaggregation. See docs/pd.md."""

    write: WriteConfig = WriteConfig()
    pull: PullConfig = PullConfig()
    hints: HintsConfig = HintsConfig()
