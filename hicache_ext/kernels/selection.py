"""Chooses the engine for each operation, and counts choices by engine and reason.

On the CPU it chooses the reference; on a GPU SGLang's own path, unless an engine is configured or the calibration of
this GPU found one clearly faster. Operations that an engine refuses always take SGLang's own path.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from hicache_ext.config import KernelsConfig
from hicache_ext.errors import CopyError
from hicache_ext.kernels.engine import SGLANG, CopyEngine, Operation, ReferenceEngine, Submit
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics

if TYPE_CHECKING:
    from hicache_ext.kernels.calibration import Calibration

logger = logging.getLogger(__name__)

kernel_metrics = TierMetrics("kernels", prefix="copy_")
"""Operations of this process, with keys like ("load", "triton: calibrated"): direction, engine and reason."""


class Selector:
    """Chooses an engine for every operation. One per process in SGLang; not thread-safe.

    ``engines`` constructs each engine at its first use; one whose construction fails is unavailable from then on.
    """

    def __init__(
        self,
        engines: Mapping[str, Callable[[], CopyEngine]],
        *,
        engine: str = "auto",
        calibration: Calibration | None = None,
        metrics: TierMetrics = kernel_metrics,
    ) -> None:
        self._constructors = engines
        self._engine = engine
        self._calibration = calibration
        self._metrics = metrics
        self._engines: dict[str, CopyEngine | None] = {}
        self._log = LimitedLog(logger, math.inf)

    def choose(self, operation: Operation) -> CopyEngine | None:
        """Return the engine for ``operation``, which will be submitted in the current stream; None for the caller's
        own path."""
        name, reason = self._wanted(operation)
        engine = None
        if name != SGLANG:
            engine = self._get_engine(name)
            refusal = "unavailable" if engine is None else engine.refusal(operation)
            if refusal is not None:
                engine, reason = None, refusal
        self.count(operation.direction, engine, reason)
        return engine

    def begin(self, operation: Operation) -> Callable[..., bool]:
        """Choose an engine, and plan ``operation`` once for all layers. The returned function submits copies as
        ``Submit`` does, by default all; it returns False if the caller has to copy them itself."""
        engine = self.choose(operation)
        copy: Submit | None = None

        def submit(first: int = 0, last: int = len(operation.stack.copies)) -> bool:
            nonlocal engine, copy
            if engine is None:
                return False
            try:
                copy = copy or engine.begin(operation)
                copy(first, last)
            except CopyError as error:
                # Copies submitted so far moved the right bytes; repeating them does no harm.
                logger.warning("copy engine %s failed and is given up: %s", engine.name, error)
                self.count(operation.direction, None, "failed")
                self._engines[engine.name] = None
                engine = None
            return engine is not None

        return submit

    def count(self, direction: str, engine: CopyEngine | None, reason: str) -> None:
        """Count one operation, and log the first of its kind."""
        name = engine.name if engine else SGLANG
        kind = f"{name}: {reason}"
        self._metrics.add(str(direction), kind)
        self._log.log(logging.INFO, kind, "copies between host and device: %s (%s)", name, reason)

    def _wanted(self, operation: Operation) -> tuple[str, str]:
        """Return the name of an engine, and the reason for it as a metric label."""
        if self._engine != "auto":
            return self._engine, "configured"
        if operation.stack.device.type == "cpu":
            return ReferenceEngine.name, "cpu"
        if self._calibration is None:
            return SGLANG, "not_calibrated"
        from hicache_ext.kernels.calibration import Measurement

        fastest = self._calibration.fastest(Measurement.of(operation, {}), self._constructors)
        return (SGLANG, "not_measured") if fastest is None else (fastest, "calibrated")

    def _get_engine(self, name: str) -> CopyEngine | None:
        if name not in self._engines:
            try:
                self._engines[name] = self._constructors[name]()
            except (CopyError, ImportError, KeyError) as error:
                logger.warning("copy engine %s is not available: %s", name, error)
                self._engines[name] = None
        return self._engines[name]


def _batched_dma() -> CopyEngine:
    from hicache_ext.kernels.batched_dma import BatchedDmaEngine, open_driver

    return BatchedDmaEngine(open_driver())


def _triton() -> CopyEngine:
    from hicache_ext.kernels.triton_engine import TritonEngine

    return TritonEngine()


ENGINES: Mapping[str, Callable[[], CopyEngine]] = {
    ReferenceEngine.name: ReferenceEngine,
    "batched_dma": _batched_dma,
    "triton": _triton,
}
"""All engines of this package. Unused ones are not imported."""


def make_selector(settings: KernelsConfig) -> Selector:
    """Return a selector for this machine."""
    calibration: Calibration | None = None
    if torch.cuda.is_available():
        from hicache_ext.kernels.calibration import calibration_of_machine

        calibration = calibration_of_machine()
    return Selector(ENGINES, engine=settings.engine, calibration=calibration)
