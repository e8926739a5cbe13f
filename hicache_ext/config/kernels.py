"""``kernels:``, how bytes move between the GPU and host memory; environment variables override it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, WithJsonSchema

from hicache_ext.config.schema import Allowed, ConfigModel, as_config_error, checked
from hicache_ext.config.values import absolute_path, whole_number
from hicache_ext.errors import ConfigError

EngineName = Literal["auto", "sglang", "reference", "batched_dma", "rectangle_dma", "triton"]

MOST_PROGRAMS = 1024

_PROGRAMS_ALLOWED = f"1 to {MOST_PROGRAMS}"
_CALIBRATION_ALLOWED = "an absolute path"


def _calibration(value: object) -> Path | None:
    return None if value is None else Path(absolute_path(_CALIBRATION_ALLOWED)(value))


class KernelsConfig(ConfigModel):
    """``auto`` follows the calibration; any other engine serves whatever it can, SGLang's own path the rest."""

    engine: Annotated[
        EngineName,
        Field(description="what moves bytes between the GPU and host memory; auto: what the calibration found fastest"),
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
        checked(whole_number(1, MOST_PROGRAMS, _PROGRAMS_ALLOWED)),
    ] = 4

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> KernelsConfig:
        """This section, overridden by the environment. Raises ``ConfigError`` naming the variable."""
        found = self
        for variable, field in _VARIABLES.items():
            if text := environment.get(variable):
                value = int(text) if field == "triton_programs" and text.isascii() and text.isdecimal() else text
                try:
                    read = KernelsConfig.model_validate({field: value})
                except ValidationError as error:
                    wrong = as_config_error(error)
                    raise ConfigError(variable, wrong.problem, wrong.allowed) from None
                found = found.model_copy(update={field: getattr(read, field)})
        return found


_VARIABLES = {
    "HICACHE_EXT_KERNEL_ENGINE": "engine",
    "HICACHE_EXT_KERNEL_CALIBRATION": "calibration",
    "HICACHE_EXT_KERNEL_PROGRAMS": "triton_programs",
}
