"""What an operator may say about copy engines: the section ``kernels:`` and environment variables that override it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hicache_ext.errors import ConfigError

ENGINE_CHOICES = ("auto", "sglang", "reference", "batched_dma", "rectangle_dma", "triton")
ENGINE_VARIABLE = "HICACHE_EXT_KERNEL_ENGINE"
CALIBRATION_VARIABLE = "HICACHE_EXT_KERNEL_CALIBRATION"
PROGRAMS_VARIABLE = "HICACHE_EXT_KERNEL_PROGRAMS"
MOST_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """``auto`` follows the calibration; any other engine serves whatever it can, SGLang's own path the rest."""

    engine: str = "auto"
    calibration: Path | None = None
    """None: where ``hicache-ext bench kernels --calibrate`` puts it."""
    triton_programs: int = 4

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> KernelSettings:
        """These settings, overridden by the environment. Raises ``ConfigError`` naming the variable."""
        settings = self
        if engine := environment.get(ENGINE_VARIABLE):
            if engine not in ENGINE_CHOICES:
                raise ConfigError(ENGINE_VARIABLE, f"{engine!r} is not an engine", ", ".join(ENGINE_CHOICES))
            settings = replace(settings, engine=engine)
        if path := environment.get(CALIBRATION_VARIABLE):
            settings = replace(settings, calibration=Path(path))
        if programs := environment.get(PROGRAMS_VARIABLE):
            if not programs.isdecimal() or not 1 <= int(programs) <= MOST_PROGRAMS:
                raise ConfigError(PROGRAMS_VARIABLE, f"{programs!r} is not accepted", f"1 to {MOST_PROGRAMS}")
            settings = replace(settings, triton_programs=int(programs))
        return settings
