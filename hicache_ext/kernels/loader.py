"""Layer-wise overlap, usable without SGLang: a load that goes on layer by layer while the layers before it compute.

::

    loader = LayerwiseLoader(stack, make_selector(KernelsConfig(), fallback=ReferenceEngine()))
    load = loader.load(host_indices, device_indices)   # submits every layer, waits for none
    for layer in range(layers):
        load.wait(layer)                               # the current stream waits, the CPU does not
        forward(layer)

    done = loader.back_up(host_indices, device_indices)
    done.synchronize()                                 # the bytes are in host memory

All layers are submitted before ``load`` returns: a stream that waits for an event which is not recorded yet does not
wait at all, so that submitting from another thread would be a race.
"""

from __future__ import annotations

from typing import Any

import torch

from hicache_ext.errors import CopyError
from hicache_ext.kernels.engine import Direction, Operation, Transfer
from hicache_ext.kernels.geometry import LayerStack
from hicache_ext.kernels.selection import Selector


class Submission:
    """One operation under way: planned once, submitted layer by layer in the current stream. For one thread."""

    def __init__(self, operation: Operation, selector: Selector) -> None:
        self._operation = operation
        self._selector = selector
        self._choice = selector.choose(operation)
        self._transfer: Transfer | None = None

    def submit(self, layer: int) -> bool:
        """Submit one layer of the stack; False if the caller has to copy this layer itself."""
        return self._submit(*self._operation.stack.layers[layer])

    def submit_all(self) -> bool:
        """Submit all layers at once; False if the caller has to copy them itself."""
        return self._submit(0, len(self._operation.stack.copies))

    def _submit(self, first: int, last: int) -> bool:
        while (engine := self._choice.engine) is not None:
            try:
                if self._transfer is None:
                    self._transfer = engine.begin(self._operation)
                self._transfer.submit(first, last)
            except CopyError as error:
                # What was submitted so far copied the right bytes; copying them again does no harm.
                self._transfer = None
                self._choice = self._selector.failed(self._operation, engine, error)
                if self._choice.engine is engine:
                    raise
            else:
                return True
        return False


class LayerwiseLoad:
    """A load whose layers are all submitted; each is done when its event is."""

    def __init__(self, events: list[Any], device_module: Any) -> None:
        self._events = events
        self._device_module = device_module

    def wait(self, layer: int) -> None:
        """Make the current stream wait for ``layer``. Any thread."""
        self._device_module.current_stream().wait_event(self._events[layer])

    def is_done(self, layer: int) -> bool:
        """Whether ``layer`` is on the device already."""
        return bool(self._events[layer].query())

    def synchronize(self) -> None:
        """Block this thread until all layers are on the device."""
        for event in self._events[-1:]:
            event.synchronize()


class LayerwiseLoader:
    """Loads and writes back the layers of one stack, each direction in a stream of its own.

    ``selector`` must have a fallback engine. For one thread at a time.
    """

    def __init__(self, stack: LayerStack, selector: Selector) -> None:
        self._stack = stack
        self._selector = selector
        self._device_module = torch.get_device_module(stack.device)
        self._load_stream = self._device_module.Stream()
        self._back_up_stream = self._device_module.Stream()

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerwiseLoad:
        """Host to device, layer after layer. The copies begin when the work that is in the current stream has ended.

        Raises ``ValueError`` for unequal lengths, ``CopyError`` if no engine could submit.
        """
        events = []
        with self._in_stream(self._load_stream, host_indices, device_indices):
            submission = self._submission(Direction.LOAD, host_indices, device_indices)
            for layer in range(len(self._stack.layers)):
                _check(submission.submit(layer))
                event = self._device_module.Event()
                event.record()
                events.append(event)
        return LayerwiseLoad(events, self._device_module)

    def back_up(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> Any:
        """Device to host, all layers; the event that tells when the bytes are in host memory. Errors as ``load``."""
        with self._in_stream(self._back_up_stream, host_indices, device_indices):
            _check(self._submission(Direction.BACK_UP, host_indices, device_indices).submit_all())
            event = self._device_module.Event()
            event.record()
        return event

    def _submission(self, direction: Direction, host: torch.Tensor, device: torch.Tensor) -> Submission:
        return Submission(Operation(self._stack, direction, host, device), self._selector)

    def _in_stream(self, stream: Any, *indices: torch.Tensor) -> Any:
        """The context in which ``stream`` is current, behind what the current stream holds now."""
        stream.wait_stream(self._device_module.current_stream())
        for tensor in indices:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)  # the caller may free it as soon as we return
        return self._device_module.stream(stream)


def _check(submitted: bool) -> None:
    if not submitted:
        raise CopyError("no engine could submit the copies, and there is no fallback")
