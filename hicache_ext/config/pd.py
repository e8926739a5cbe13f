"""The section ``pd``: what a decode node writes, when a prefill node pulls instead of computing, and hints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hicache_ext.config.problems import refuse
from hicache_ext.config.schema import Allowed, ConfigModel, as_pydantic_error, checked
from hicache_ext.config.values import NO_LIMIT, whole_number
from hicache_ext.errors import ConfigError

PullMode = Literal["off", "fixed", "adaptive"]

_TOKENS_ALLOWED = "a whole number of tokens"
_COUNT_ALLOWED = "a whole number"
_RATE_ALLOWED = "tokens per second, such as 8000"


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
        "speculative": "with EAGLE or MTP a decode node is refused unless pd.write.enabled is false",
    }

    enabled: Annotated[bool, Field(description="false: SGLang's own decode offload, unchanged")] = True
    min_tokens: Annotated[
        _Tokens, Field(description="requests that generate fewer tokens than this are not written")
    ] = 0
    retries: Annotated[
        int,
        Field(description="how often a failed write is tried again"),
        Allowed(_COUNT_ALLOWED),
        checked(whole_number(0, NO_LIMIT, _COUNT_ALLOWED)),
    ] = 3
    ttl: Annotated[
        None,
        Field(description="refused: a ttl is set on the tier, in the decode node's own file"),
        Allowed("nothing"),
        checked(_no_ttl),
    ] = None


class PullConfig(ConfigModel):
    """``pd.pull``: when a prefill node reads a prefix from storage instead of computing it."""

    removed: ClassVar[Mapping[str, str]] = {
        "hysteresis": "after a tier was too slow, a pull must be cheaper by a fifth",
        "probe_interval": "a tier that is not used is measured every 10 s",
    }

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

    @model_validator(mode="after")
    def _a_rate_needs_the_adaptive_mode(self) -> Self:
        if self.prefill_rate is not None and self.mode != "adaptive":
            problem = f"only mode adaptive uses it, and the mode is {self.mode}"
            raise as_pydantic_error(ConfigError(".prefill_rate", problem, "leave it out, or mode: adaptive"))
        return self


class HintsConfig(ConfigModel):
    """``pd.hints``: a decode node says which conversations are in the pool, and prefill nodes bring them to a local
    tier before the next turn arrives."""

    removed: ClassVar[Mapping[str, str]] = {
        "interval": "a prefill node looks for hints twice a second",
        "max_pages": "a hint names the first 2048 pages of a conversation",
        "keep": "the pool keeps the newest 256 hints",
        "lifetime": "hints older than 60 s are ignored",
    }

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


class PdConfig(ConfigModel):
    """``pd``: prefill/decode disaggregation. See docs/pd.md."""

    write: WriteConfig = WriteConfig()
    pull: PullConfig = PullConfig()
    hints: HintsConfig = HintsConfig()
