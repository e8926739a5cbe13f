"""Copy engines on a real GPU, with races on purpose. Needs a CUDA device and says so without one.

::

    python -m tests.campaigns.gpu_kernels                # every check, about two minutes
    compute-sanitizer --tool memcheck python -m tests.campaigns.gpu_kernels --small

Each check runs every engine that this machine has:

- *exact*: all layouts, directions and page sizes against the reference, bytes around included;
- *late consumer*: delays between the layers of a load; a consumer stream that waits layer by layer reads each layer's
  bytes at once, and must never see the old ones;
- *late producer*: the device slots are written by a delayed kernel before a load, and by another after the load's last
  event; neither may mix with the copy. A write-back of bytes that a delayed kernel still has to make must get them;
- *freed indices*: index tensors are freed and their memory reused as soon as a load is submitted;
- *both ways*: a load and a write-back of other pages at once;
- *refusals*: graph capture and the default stream are refused before anything reaches the driver.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels.check import CheckedMemory
from benchmarks.kernels.gpu import gpu_facts
from hicache_ext.errors import CopyError
from hicache_ext.kernels.batched_dma import BatchedDmaEngine, open_driver
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation, ReferenceEngine, Submit
from hicache_ext.kernels.geometry import HOST_LAYOUTS, page_tokens
from hicache_ext.kernels.selection import Selector
from hicache_ext.kernels.triton_engine import TritonEngine
from hicache_ext.runtime.metrics import TierMetrics
from tests.rigs.layerwise import LayerwiseLoader, copy_now

_DELAY_CYCLES = 20_000_000
"""About 10 ms: longer than any copy here."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much the checks move."""

    layers: int
    pages: int
    rounds: int


def engines() -> Iterator[tuple[str, CopyEngine]]:
    """Every engine of this machine."""
    try:
        yield "batched_dma", BatchedDmaEngine(open_driver())
    except CopyError as error:
        print(f"  not here: {error}")
    yield "triton", TritonEngine()


def check_exact(engine: CopyEngine, size: Size) -> int:
    """Cases that were equal to the reference."""
    cases = 0
    for layout in HOST_LAYOUTS:
        for page_size, row in ((1, 512), (16, 576), (16, 656), (64, 2048), (16, 72), (4, 12)):
            memory = CheckedMemory(layout, "cuda", layers=size.layers, page_size=page_size, row=row)
            for direction in Direction:
                expected = memory.after(ReferenceEngine(), direction, torch.cuda.synchronize)
                with torch.cuda.stream(torch.cuda.Stream()):
                    found = memory.after(engine, direction, torch.cuda.synchronize)
                if found is not None:
                    assert expected is not None
                    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), (layout, page_size)
                    cases += 1
    assert cases, "the engine refused everything"
    return cases


def loader_of(memory: CheckedMemory, engine: CopyEngine) -> LayerwiseLoader:
    selector = Selector({engine.name: lambda: engine}, engine=engine.name, metrics=TierMetrics("campaign"))
    return LayerwiseLoader(memory.stack, selector)


class Delayed:
    """An engine that sleeps on the stream before every submission, so that a consumer that does not wait is early."""

    def __init__(self, engine: CopyEngine) -> None:
        self.name = engine.name
        self._engine = engine

    def refusal(self, operation: Operation) -> str | None:
        return self._engine.refusal(operation)

    def begin(self, operation: Operation) -> Submit:
        submit = self._engine.begin(operation)

        def submit_late(first: int, last: int) -> None:
            torch.cuda._sleep(_DELAY_CYCLES)
            submit(first, last)

        return submit_late


def check_late_consumer(engine: CopyEngine, size: Size) -> int:
    """A stream that waits for each layer reads that layer's new bytes, however late they come."""
    for _ in range(size.rounds):
        memory = CheckedMemory("page_first_direct", "cuda", layers=size.layers, pages=size.pages)
        expected = memory.after(ReferenceEngine(), Direction.LOAD, torch.cuda.synchronize)
        assert expected is not None
        consumer = torch.cuda.Stream()
        seen = []
        with torch.cuda.stream(consumer):
            load = loader_of(memory, Delayed(engine)).load(*memory.tokens)
            for layer, buffer in enumerate(memory.device):
                load.wait(layer)
                seen.append(buffer.clone())
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True)), "a layer was read before it came"
    return size.rounds


def check_late_producer(engine: CopyEngine, size: Size) -> int:
    """What the current stream does before a load or a write-back happens before it, what it does after, after."""
    for _ in range(size.rounds):
        memory = CheckedMemory("page_first_direct", "cuda", layers=size.layers, pages=size.pages)
        expected = memory.after(ReferenceEngine(), Direction.LOAD, torch.cuda.synchronize)
        assert expected is not None
        before = [buffer.clone() for buffer in memory.device]
        loader = loader_of(memory, engine)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(_DELAY_CYCLES)
            for buffer in memory.device:
                buffer.zero_()
            for buffer, content in zip(memory.device, before, strict=True):
                buffer.copy_(content)
            load = loader.load(*memory.tokens)
            load.wait(len(memory.device) - 1)
            seen = [buffer.clone() for buffer in memory.device]
            for buffer in memory.device:
                buffer.fill_(7)
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True)), "a load overtook the stream"
        assert all(bool((buffer == 7).all()) for buffer in memory.device), "a load came after its own event"

        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(_DELAY_CYCLES)
            for buffer in memory.device:
                buffer.fill_(9)
            loader.back_up(*memory.tokens).synchronize()
        pages = memory.host.view(size.pages, -1)[[6, 1, 2]]
        assert bool((pages == 9).all()), "a write-back read bytes before they were made"
    return size.rounds


def check_freed_indices(engine: CopyEngine, size: Size) -> int:
    """Index tensors may be freed, and their memory reused, as soon as a load is submitted."""
    for _ in range(size.rounds):
        memory = CheckedMemory("page_first_direct", "cuda", layers=size.layers, pages=size.pages)
        expected = memory.after(ReferenceEngine(), Direction.LOAD, torch.cuda.synchronize)
        assert expected is not None
        host, device = memory.tokens
        if engine.name == TritonEngine.name:
            host, device = host.cuda(), device.cuda()
        else:
            host, device = host.clone(), device.clone()
        count = host.numel()
        load = loader_of(memory, Delayed(engine)).load(host, device)
        del host, device, memory.tokens
        for where in ("cuda", "cpu"):
            for _again in range(16):
                torch.full((count,), 3, dtype=torch.int64, device=where)
        load.synchronize()
        assert all(torch.equal(*pair) for pair in zip(memory.device, expected, strict=True)), "indices were read late"
    return size.rounds


def check_both_ways(engine: CopyEngine, size: Size) -> int:
    """A load and a write-back of other pages at once."""
    for _ in range(size.rounds):
        memory = CheckedMemory("page_first_direct", "cuda", layers=size.layers, pages=size.pages)
        page_size = memory.stack.shape.page_size
        back = page_tokens([0, 3, 4], page_size), page_tokens([1, 2, 3], page_size)
        device_before = [buffer.clone() for buffer in memory.device]
        expected = memory.after(ReferenceEngine(), Direction.LOAD, torch.cuda.synchronize)
        assert expected is not None
        loader = loader_of(memory, engine)
        load = loader.load(*memory.tokens)
        loader.back_up(*back).synchronize()
        load.synchronize()
        assert all(torch.equal(*pair) for pair in zip(memory.device, expected, strict=True))
        for layer, buffer in enumerate(device_before):
            stored = memory.host.view(size.pages, size.layers, -1)[[0, 3, 4], layer].flatten()
            written = buffer[page_size : 4 * page_size].flatten().cpu()
            assert torch.equal(stored, written)
    return size.rounds


def check_refusals(engine: CopyEngine, size: Size) -> int:
    """Graph capture is refused by all, the default stream by those of the driver."""
    memory = CheckedMemory("page_first_direct", "cuda", layers=size.layers, pages=size.pages)
    operation = Operation(memory.stack, Direction.LOAD, *memory.tokens)
    if isinstance(engine, BatchedDmaEngine):
        with torch.cuda.stream(torch.cuda.default_stream()):
            assert engine.refusal(operation) == "default_stream"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = engine.refusal(operation)
        memory.device[0].add_(0)
    assert captured == "graph_capture", captured
    with torch.cuda.stream(torch.cuda.Stream()):
        copy_now(engine, operation)
    torch.cuda.synchronize()
    return 2


CHECKS: dict[str, Callable[[CopyEngine, Size], int]] = {
    "exact": check_exact,
    "late consumer": check_late_consumer,
    "late producer": check_late_producer,
    "freed indices": check_freed_indices,
    "both ways": check_both_ways,
    "refusals": check_refusals,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few and small copies, for compute-sanitizer")
    parser.add_argument("--check", action="append", choices=sorted(CHECKS), help="may be repeated (default: all)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This needs a machine with an NVIDIA GPU; there is none here. Nothing was checked.", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in gpu_facts().items()))
    size = Size(layers=2, pages=8, rounds=1) if arguments.small else Size(layers=8, pages=64, rounds=20)
    failures = 0
    for engine_name, engine in engines():
        for name in arguments.check or CHECKS:
            try:
                count = CHECKS[name](engine, size)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the other checks tell more about a failure
                failures += 1
                print(f"FAILED  {engine_name}: {name}: {type(error).__name__}: {error}", flush=True)
            else:
                print(f"ok      {engine_name}: {name} ({count})", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
