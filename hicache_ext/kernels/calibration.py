"""What ``hicache-ext bench kernels --calibrate`` measured on one model of GPU, and which engine that makes the fastest.

One JSON file per GPU model, in ``$XDG_CACHE_HOME/hicache_ext/kernels`` unless configured otherwise. It holds seconds
per layer for each engine and for SGLang's own path, measured side by side, by direction, host layout, where the token
indices are, and size. An engine is chosen only where SGLang's own path was measured too and was clearly slower.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError

from hicache_ext.errors import CalibrationError
from hicache_ext.kernels.engine import SGLANG, Direction, Operation
from hicache_ext.runtime.whole_file import write_whole

logger = logging.getLogger(__name__)

MARGIN = 1.05
"""How many times as fast as the baseline an engine must be: what is closer than that is noise."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What makes one engine faster than another, and how fast each was there."""

    direction: Direction
    layout: str
    """The host layout; "" outside of SGLang."""
    run_bytes: int
    """Bytes of a run, as far as the geometry says: pages that happen to be neighbours make longer ones."""
    bytes_per_layer: int
    indices: Literal["cpu", "device"]
    seconds: Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
    """Per layer, submission included, by engine; empty where ``fastest`` is asked."""

    @classmethod
    def of(cls, operation: Operation, seconds: dict[str, float]) -> Measurement:
        stack = operation.stack
        copies = len(stack.copies) // max(len(stack.layers), 1)
        moved = operation.tokens * stack.shape.row_bytes * max(copies, 1)
        indices: Literal["cpu", "device"] = "cpu" if operation.indices_on_cpu else "device"
        return cls(operation.direction, stack.layout, stack.run_bytes, moved, indices, seconds)

    def distance(self, other: Measurement) -> float:
        """Between sizes, in doublings; infinite where anything else differs."""
        if (self.direction, self.layout, self.indices) != (other.direction, other.layout, other.indices):
            return math.inf
        sizes = (self.run_bytes, other.run_bytes), (self.bytes_per_layer, other.bytes_per_layer)
        return sum(abs(math.log2(max(mine, 1) / max(theirs, 1))) for mine, theirs in sizes)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements of one GPU model."""

    gpu: str
    driver: str
    date: str
    measurements: tuple[Measurement, ...]
    version: Literal[1] = 1
    """Of the file's format."""

    def fastest(self, wanted: Measurement, engines: Container[str]) -> str | None:
        """That of ``engines`` that is clearly faster than SGLang's own path where the sizes are nearest, ``SGLANG`` if
        none is. A file may name engines that no longer exist.

        None if nothing like ``wanted`` was measured together with SGLang's own path.
        """
        measured = [one for one in self.measurements if SGLANG in one.seconds]
        nearest = min(measured, key=wanted.distance, default=None)
        if nearest is None or math.isinf(wanted.distance(nearest)):
            return None
        seconds = nearest.seconds
        engine = min((name for name in seconds if name == SGLANG or name in engines), key=lambda name: seconds[name])
        return engine if seconds[engine] * MARGIN <= seconds[SGLANG] else SGLANG


def calibration_file(gpu: str) -> Path:
    """Where the calibration of a GPU model lies; ``gpu`` is its name in the driver.

    Raises ``CalibrationError`` for an account without a home directory."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise CalibrationError("this account has no home directory; set XDG_CACHE_HOME") from None
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"
    return cache / "hicache_ext" / "kernels" / f"{slug}.json"


_FILE = TypeAdapter(Calibration)


def read_calibration(path: Path) -> Calibration:
    """Raises :class:`CalibrationError` with one sentence if the file is missing or is not a calibration."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = ": ".join(map(str, [*first["loc"], first["msg"]]))
        raise CalibrationError(f"{path} is not a calibration: {found}") from error


def calibration_of_machine() -> Calibration | None:
    """That of this machine's GPU, if there is one. What cannot be read is left unused, with a warning."""
    try:
        path = calibration_file(torch.cuda.get_device_name())
        return read_calibration(path) if path.exists() else None
    except CalibrationError as error:
        logger.warning("%s; copies stay with SGLang's own path", error)
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Whole or not at all: other processes may read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _FILE.dump_json(calibration, indent=1).decode() + "\n")
