"""How fast a node computes a prefill: given, measured, or estimated from a data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_ext.errors import ConfigError
from hicache_ext.plan.model import ModelSize

UTILISATION = 0.4
"""Of the peak: an assumption, and the plan says so."""

PEAK_TFLOPS = {
    # 624 with sparsity
    "a100": (312.0, "NVIDIA A100 data sheet, dense BF16"),
    # The data sheets of both print 1,979 with sparsity, the white paper 989.4 without.
    "h100": (989.4, "NVIDIA H100 SXM data sheet, dense BF16"),
    "h200": (989.4, "NVIDIA H200 SXM data sheet, dense BF16"),
    # 733 with sparsity
    "l40s": (362.05, "NVIDIA L40S data sheet, dense BF16"),
    # 2,614.9 with sparsity
    "mi300x": (1307.4, "AMD Instinct MI300X data sheet, dense BF16"),
}
"""GPU -> 10^12 operations per second, and where the figure is from. None is with sparsity: a prefill has none."""


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Tokens per second of one node, and where that is known from."""

    tokens_per_second: float
    source: str


def estimated(gpu: str, gpus: int, model: ModelSize) -> PrefillRate:
    """Two operations for each parameter that a token passes through; attention to earlier tokens is left out, so long
    prompts take longer. Raises ConfigError where the GPU or the parameters are not known."""
    if gpu.lower() not in PEAK_TFLOPS:
        raise ConfigError("--gpu", f"{gpu!r} is not in the table", f"{', '.join(PEAK_TFLOPS)}, or --prefill-rate")
    if not model.active_parameters:
        raise ConfigError("--gpu", "the parameters of the model are not known", "--prefill-rate in tokens per second")
    peak, source = PEAK_TFLOPS[gpu.lower()]
    rate = gpus * peak * 1e12 * UTILISATION / (2 * model.active_parameters)
    return PrefillRate(rate, f"estimate: {gpus} x {peak:g} TFLOPS ({source}), {UTILISATION:.0%} of it assumed")
