"""``kernels:``, how bytes move between the GPU and host memory; environment variables override it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from hicache_ext.config.problems import did_you_mean, listed, refuse, shown
from hicache_ext.config.schema import Allowed, ConfigModel, checked
from hicache_ext.config.values import absolute_path, whole_number
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


_absolute_path = absolute_path(_CALIBRATION_ALLOWED)
_programs = whole_number(1, MOST_PROGRAMS, _PROGRAMS_ALLOWED)


def _calibration(value: object) -> Path | None:
    return None if value is None else Path(_absolute_path(value))


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
        checked(_calibration),
        WithJsonSchema({"type": "string"}),
    ] = None
    triton_programs: Annotated[
        int,
        Field(description="programs of the Triton engine, each of which occupies a multiprocessor while it copies"),
        Allowed(_PROGRAMS_ALLOWED),
        checked(_programs),
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
    return _programs(int(text) if text.isascii() and text.isdecimal() else text)


_VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    "HICACHE_EXT_KERNEL_ENGINE": ("engine", parse_engine),
    "HICACHE_EXT_KERNEL_CALIBRATION": ("calibration", _calibration),
    "HICACHE_EXT_KERNEL_PROGRAMS": ("triton_programs", _number),
}
