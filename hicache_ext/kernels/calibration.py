"""What ``hicache-ext bench kernels --calibrate`` measured on one model of GPU, and which engine that makes the fastest.

One JSON file per GPU model, in ``$XDG_CACHE_HOME/hicache_ext/kernels`` unless configured otherwise. It holds seconds
per layer for each engine and for SGLang's own path, measured side by side, by direction, host layout, where the token
indices are, and size. An engine is chosen only where SGLang's own path was measured too and was clearly slower.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hicache_ext.errors import CalibrationError
from hicache_ext.kernels.engine import SGLANG, Direction, Operation
from hicache_ext.runtime.whole_file import json_in, write_whole

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MARGIN = 1.05
"""How many times as fast as the baseline an engine must be: what is closer than that is noise."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What makes one engine faster than another."""

    direction: Direction
    layout: str
    """The host layout; "" outside of SGLang."""
    indices_on_cpu: bool
    run_bytes: int
    """Bytes of a run, as far as the geometry says: pages that happen to be neighbours make longer ones."""
    bytes_per_layer: int

    @classmethod
    def of(cls, operation: Operation) -> Situation:
        stack = operation.stack
        copies = len(stack.copies) // max(len(stack.layers), 1)
        return cls(
            operation.direction,
            stack.layout,
            operation.indices_on_cpu,
            stack.run_bytes,
            operation.tokens * stack.shape.row_bytes * max(copies, 1),
        )

    def distance(self, other: Situation) -> float:
        """Between sizes, in doublings; infinite where anything else differs."""
        if (self.direction, self.layout, self.indices_on_cpu) != (other.direction, other.layout, other.indices_on_cpu):
            return math.inf
        sizes = (self.run_bytes, other.run_bytes), (self.bytes_per_layer, other.bytes_per_layer)
        return sum(abs(math.log2(max(mine, 1) / max(theirs, 1))) for mine, theirs in sizes)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds per layer, submission included, by engine."""

    situation: Situation
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """All measurements of one GPU model."""

    gpu: str
    driver: str
    date: str
    measurements: tuple[Measurement, ...]

    def fastest(self, situation: Situation, engines: Container[str]) -> str | None:
        """That of ``engines`` that is clearly faster than SGLang's own path where the sizes are nearest, ``SGLANG`` if
        none is. A file may name engines that no longer exist.

        None if nothing like ``situation`` was measured together with SGLang's own path.
        """
        near = [
            (measurement.situation.distance(situation), index)
            for index, measurement in enumerate(self.measurements)
            if SGLANG in measurement.seconds
        ]
        distance, index = min(near, default=(math.inf, 0))
        if math.isinf(distance):
            return None
        seconds = self.measurements[index].seconds
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


def read_calibration(path: Path) -> Calibration:
    """Raises :class:`CalibrationError` with one sentence if the file is missing or is not a calibration."""
    try:
        document = json_in(path.read_bytes())
        version = document["version"]
        if version != FORMAT_VERSION:
            raise CalibrationError(f"{path} has calibration format {version}; this version reads {FORMAT_VERSION}")
        measurements = tuple(_measurement(entry) for entry in document["measurements"])
        return Calibration(str(document["gpu"]), str(document["driver"]), str(document["date"]), measurements)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path} is not a calibration: {type(error).__name__}: {error}") from error


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
    document = {
        "version": FORMAT_VERSION,
        "gpu": calibration.gpu,
        "driver": calibration.driver,
        "date": calibration.date,
        "measurements": [_entry(measurement) for measurement in calibration.measurements],
    }
    write_whole(path, json.dumps(document, indent=1) + "\n")


def _entry(measurement: Measurement) -> dict[str, Any]:
    facts = asdict(measurement.situation)
    indices = "cpu" if facts.pop("indices_on_cpu") else "device"
    return {**facts, "indices": indices, "seconds": dict(measurement.seconds)}


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    indices = {"cpu": True, "device": False}[entry["indices"]]
    seconds = {str(name): float(value) for name, value in entry["seconds"].items()}
    if not seconds or not all(math.isfinite(value) and value > 0 for value in seconds.values()):
        raise ValueError("seconds must be positive numbers")
    return Measurement(
        Situation(
            Direction(entry["direction"]),
            str(entry["layout"]),
            indices,
            int(entry["run_bytes"]),
            int(entry["bytes_per_layer"]),
        ),
        seconds,
    )
