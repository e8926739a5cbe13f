"""What the kernel benchmark found: tables and JSON.

CPU submit cost: microseconds of the scheduler's thread for one operation, medians; the driver is replaced by a C
function that does nothing, so the driver's own time is not in it. *Plan* is made once per operation, *layers* is the
submission of all layers of a load one by one, *write-back* is plan and submission of all layers together. The pages are
scattered, so that none are neighbours: the longest plan there is.

GB/s are 10^9 bytes from the call to the last byte, medians; segments are apart on both sides and in random order, so
that nothing merges. The peak is one pinned copy of as many bytes. Slow-down is of the median round of the work beside
copies that never pause. In the pipeline a layer's compute takes about 3 ms; stall is what the forward pass waited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.kernels.gpu import PEAK, Interference, Pipeline, Rate
from benchmarks.kernels.submit import SubmitCost
from hicache_ext.bench.frame import Table, number
from hicache_ext.config.values import format_size
from hicache_ext.kernels.engine import Direction

OUTSTANDING = "GPU figures are outstanding: this run was on a machine without a CUDA device."


@dataclass(slots=True)
class KernelResults:
    """Everything one run measured."""

    submits: list[SubmitCost] = field(default_factory=list)
    checks: dict[str, int] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=list)
    interferences: list[Interference] = field(default_factory=list)
    pipelines: list[Pipeline] = field(default_factory=list)

    def entries(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "submit": [_finite(asdict(cost)) for cost in self.submits],
            "checked_cases": self.checks,
            "rates": [asdict(rate) for rate in self.rates],
            "interference": [asdict(found) for found in self.interferences],
            "pipeline": [asdict(found) for found in self.pipelines],
        }


def tables(results: KernelResults) -> Iterator[Table]:
    yield from _submit_tables(results.submits)
    if results.checks:
        rows = tuple((name, str(count)) for name, count in results.checks.items())
        yield Table("byte for byte equal to the reference", ("engine", "cases"), rows)
    yield from _rate_tables(results.rates)
    if results.interferences:
        yield Table(
            "slow-down of work beside copies",
            ("", "direction", "work", "slower by", "GB/s meanwhile"),
            tuple(
                (found.contender, found.direction, found.work, f"{found.slow_down:.1%}", _gb(found.bytes_per_second))
                for found in results.interferences
            ),
        )
    if results.pipelines:
        yield Table(
            "32-layer pipeline",
            ("", "load ms", "compute ms", "together ms", "x max(load, compute)", "stall us/layer"),
            tuple(_pipeline_cells(found) for found in results.pipelines),
        )


def _submit_tables(costs: list[SubmitCost]) -> Iterator[Table]:
    for case in dict.fromkeys(cost.case for cost in costs):
        title = (
            f"CPU submit cost: {case.layout}, {case.layers} layers x {case.pages} pages of {case.page_size} tokens, "
            f"K and V, rows of {format_size(case.row_bytes)}"
        )
        yield Table(
            title,
            ("", "descriptors", "plan us", "layers us", "load us", "us/layer", "ns/descriptor", "write-back us"),
            tuple(_submit_cells(cost) for cost in costs if cost.case == case),
        )


def _submit_cells(cost: SubmitCost) -> tuple[str, ...]:
    return (
        cost.engine,
        f"{cost.descriptors:,}",
        number(cost.plan_us),
        number(cost.layers_us),
        number(cost.load_us),
        number(cost.load_us / cost.case.layers),
        number(cost.load_us / cost.descriptors * 1e3),
        "-" if math.isnan(cost.write_back_us) else number(cost.write_back_us),
    )


def _rate_tables(rates: list[Rate]) -> Iterator[Table]:
    for direction in Direction:
        of_direction = [rate for rate in rates if rate.direction == direction]
        for segment_bytes in sorted({rate.segment_bytes for rate in of_direction}):
            here = [rate for rate in of_direction if rate.segment_bytes == segment_bytes]
            peaks = {rate.count: rate.bytes_per_second for rate in here if rate.contender == PEAK}
            yield Table(
                f"{direction}: segments of {format_size(segment_bytes)}",
                ("", "N", "GB/s", "of the peak", "submit us", "ns/descriptor"),
                tuple(
                    (
                        rate.contender,
                        f"{rate.count:,}",
                        _gb(rate.bytes_per_second),
                        f"{rate.bytes_per_second / peaks[rate.count]:.2f}" if rate.count in peaks else "-",
                        number(rate.submit_seconds * 1e6),
                        number(rate.submit_seconds * 1e9 / rate.count),
                    )
                    for rate in here
                ),
            )


def _pipeline_cells(found: Pipeline) -> tuple[str, ...]:
    ideal = max(found.load_seconds, found.compute_seconds)
    return (
        found.contender,
        number(found.load_seconds * 1e3),
        number(found.compute_seconds * 1e3),
        number(found.together_seconds * 1e3),
        f"{found.together_seconds / ideal:.2f}",
        number(found.stall_seconds * 1e6),
    )


def _gb(bytes_per_second: float) -> str:
    return number(bytes_per_second / 1e9)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN is not JSON."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
