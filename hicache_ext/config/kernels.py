"""``kernels:``, how bytes move between the GPU and host memory; environment variables override it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import did_you_mean, listed, quoted, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, checked
from hicache_ext.config.templates import expand_templates
from hicache_ext.errors import ConfigError

EngineName = Literal["auto", "sglang", "reference", "batched_dma", "rectangle_dma", "triton"]

ENGINES = ("auto", "sglang", "reference", "batched_dma", "rectangle_dma", "triton")
MOST_PROGRAMS = 1024

_PROGRAMS_ALLOWED = f"1 to {MOST_PROGRAMS}"
_CALIBRATION_ALLOWED = "an absolute path"


def parse_engine(value: object) -> str:
    """The name of an engine."""
    if isinstance(value, str) and value in ENGINES:
        return value
    if isinstance(value, str):
        raise ConfigError("", f"{shown(value)} is not accepted{did_you_mean(value, ENGINES)}", listed(ENGINES))
    raise refuse(value, listed(ENGINES))


def parse_calibration(value: object) -> Path | None:
    """The path of a calibration file, or None for the usual place."""
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise refuse(value, _CALIBRATION_ALLOWED)
    path = expand_templates(value)
    if not os.path.isabs(path):
        raise ConfigError("", f"{quoted(value)} is not an absolute path", _CALIBRATION_ALLOWED)
    return Path(path)


def parse_programs(value: object) -> int:
    """How many programs a Triton copy may use."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PROGRAMS:
        raise refuse(value, _PROGRAMS_ALLOWED)
    return value


class KernelsConfig(ConfigModel):
    """``auto`` follows the calibration; any other engine serves whatever it can, SGLang's own path the rest."""

    engine: Annotated[
        EngineName,
        Field(description="what moves bytes between the GPU and host memory; auto: what the calibration found fastest"),
        Allowed(listed(ENGINES)),
        checked(parse_engine),
    ] = "auto"
    calibration: Annotated[
        Path | None,
        Field(description="what hicache-ext bench kernels --calibrate wrote; left out: where it writes by itself"),
        Allowed(_CALIBRATION_ALLOWED),
        checked(parse_calibration),
        WithJsonSchema({"type": "string"}),
    ] = None
    triton_programs: Annotated[
        int,
        Field(description="programs of the Triton engine, each of which occupies a multiprocessor while it copies"),
        Allowed(_PROGRAMS_ALLOWED),
        checked(parse_programs),
    ] = 4

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> KernelsConfig:
        """This section, overridden by the environment. Raises ``ConfigError`` naming the variable."""
        values = self.model_dump()
        for variable, (field, parse) in _VARIABLES.items():
            if text := environment.get(variable):
                try:
                    values[field] = parse(text)
                except ConfigError as error:
                    raise ConfigError(variable, error.problem, error.allowed) from None
        return self.model_copy(update=values)


def _number(text: str) -> int:
    return parse_programs(int(text) if text.isascii() and text.isdecimal() else text)


_VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    "HICACHE_EXT_KERNEL_ENGINE": ("engine", parse_engine),
    "HICACHE_EXT_KERNEL_CALIBRATION": ("calibration", parse_calibration),
    "HICACHE_EXT_KERNEL_PROGRAMS": ("triton_programs", _number),
}
