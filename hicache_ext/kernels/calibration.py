"""The measurements of ``hicache-ext bench kernels --calibrate`` on one GPU model, and the fastest engine they imply.

There is one JSON file per GPU model, in ``$XDG_CACHE_HOME/hicache_ext/kernels`` unless configured otherwise. It holds
seconds per layer for each engine and for SGLang's own path, measured side by side, by direction, host layout, location
of the token indices, and size. An engine is chosen only if SGLang's own path was measured too and was clearly slower.
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
"""Least speedup of an engine over the baseline; anything smaller is noise."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The conditions that decide which engine is fastest, and the speed of each under them."""

    direction: Direction
    layout: str
    """The host layout; "" outside SGLang."""
    run_bytes: int
    """Bytes of a run according to the geometry; pages that happen to be neighbours make longer runs."""
    bytes_per_layer: int
    indices: Literal["cpu", "device"]
    seconds: Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
    """Engine -> seconds per layer, including submission; empty in an argument of ``fastest``."""

    @classmethod
    def of(cls, operation: Operation, seconds: dict[str, float]) -> Measurement:
        stack = operation.stack
        copies = len(stack.copies) // max(len(stack.layers), 1)
        moved = operation.tokens * stack.shape.row_bytes * max(copies, 1)
        indices: Literal["cpu", "device"] = "cpu" if operation.indices_on_cpu else "device"
        return cls(operation.direction, stack.layout, stack.run_bytes, moved, indices, seconds)

    def distance(self, other: Measurement) -> float:
        """Return the distance between sizes, in doublings; infinite if anything else differs."""
        if (self.direction, self.layout, self.indices) != (other.direction, other.layout, other.indices):
            return math.inf
        sizes = (self.run_bytes, other.run_bytes), (self.bytes_per_layer, other.bytes_per_layer)
        return sum(abs(math.log2(max(own, 1) / max(compared, 1))) for own, compared in sizes)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements of one GPU model."""

    gpu: str
    driver: str
    date: str
    measurements: tuple[Measurement, ...]
    version: Literal[1] = 1
    """Version of the file's format."""

    def fastest(self, wanted: Measurement, engines: Container[str]) -> str | None:
        """Return the fastest of ``engines`` at the nearest measured sizes if it is clearly faster than SGLang's own
        path, otherwise ``SGLANG``; a file may name engines that no longer exist.

        Returns None if nothing like ``wanted`` was measured together with SGLang's own path.
        """
        measured = [measurement for measurement in self.measurements if SGLANG in measurement.seconds]
        nearest = min(measured, key=wanted.distance, default=None)
        if nearest is None or math.isinf(wanted.distance(nearest)):
            return None
        seconds = nearest.seconds
        engine = min((name for name in seconds if name == SGLANG or name in engines), key=lambda name: seconds[name])
        return engine if seconds[engine] * MARGIN <= seconds[SGLANG] else SGLANG


def calibration_file(gpu: str) -> Path:
    """Return the path of a GPU model's calibration; ``gpu`` is its name in the driver.

    Raises ``CalibrationError`` for an account without a home directory."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise CalibrationError("this account has no home directory; set XDG_CACHE_HOME") from None
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"
    return cache / "hicache_ext" / "kernels" / f"{slug}.json"


_FILE = TypeAdapter(Calibration)


def read_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises :class:`CalibrationError` with one sentence if it is missing or invalid."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = ": ".join(map(str, [*first["loc"], first["msg"]]))
        raise CalibrationError(f"{path} is not a calibration: {found}") from error


def calibration_of_machine() -> Calibration | None:
    """Return the calibration of this machine's GPU, or None. An unreadable file is ignored with a warning."""
    try:
        path = calibration_file(torch.cuda.get_device_name())
        return read_calibration(path) if path.exists() else None
    except CalibrationError as error:
        logger.warning("%s; copies stay with SGLang's own path", error)
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration atomically, since other processes may read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _FILE.dump_json(calibration, indent=1).decode() + "\n")
