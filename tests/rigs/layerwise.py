"""Layer-wise overlap without SGLang: a load that goes on layer by layer while the layers before it compute.

All layers are submitted before ``load`` returns: a stream that waits for an event which is not recorded yet does not
wait at all, so that submitting from another thread would be a race.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hicache_ext.errors import CopyError
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation
from hicache_ext.kernels.geometry import LayerStack
from hicache_ext.kernels.selection import Selector


def copy_now(engine: CopyEngine, operation: Operation, layers: Sequence[int] | None = None) -> None:
    """Submit ``layers`` (default: all) of ``operation``. Raises :class:`CopyError` if the engine refuses."""
    if reason := engine.refusal(operation):
        raise CopyError(f"{engine.name} refused: {reason}")
    submit = engine.begin(operation)
    if layers is None:
        submit(0, len(operation.stack.copies))
        return
    for layer in layers:
        submit(*operation.stack.layers[layer])


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

    ``fallback`` copies what the chosen engine does not. For one thread at a time.
    """

    def __init__(self, stack: LayerStack, selector: Selector, fallback: CopyEngine | None = None) -> None:
        self._stack = stack
        self._selector = selector
        self._fallback = fallback
        self._device_module = torch.get_device_module(stack.device)
        self._load_stream = self._device_module.Stream()
        self._back_up_stream = self._device_module.Stream()

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerwiseLoad:
        """Host to device, layer after layer. The copies begin when the work that is in the current stream has ended.

        Raises ``ValueError`` for unequal lengths, ``CopyError`` if no engine could submit.
        """
        events = []
        with self._in_stream(self._load_stream, host_indices, device_indices):
            operation = Operation(self._stack, Direction.LOAD, host_indices, device_indices)
            submit = self._selector.begin(operation)
            for layer, copies in enumerate(self._stack.layers):
                if not submit(*copies):
                    self._fall_back(operation, [layer])
                event = self._device_module.Event()
                event.record()
                events.append(event)
        return LayerwiseLoad(events, self._device_module)

    def back_up(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> Any:
        """Device to host, all layers; the event that tells when the bytes are in host memory. Errors as ``load``."""
        with self._in_stream(self._back_up_stream, host_indices, device_indices):
            operation = Operation(self._stack, Direction.BACK_UP, host_indices, device_indices)
            if not self._selector.begin(operation)():
                self._fall_back(operation)
            event = self._device_module.Event()
            event.record()
        return event

    def _fall_back(self, operation: Operation, layers: Sequence[int] | None = None) -> None:
        if self._fallback is None:
            raise CopyError("no engine could submit the copies, and there is no fallback")
        copy_now(self._fallback, operation, layers)

    def _in_stream(self, stream: Any, *indices: torch.Tensor) -> Any:
        """The context in which ``stream`` is current, behind what the current stream holds now."""
        stream.wait_stream(self._device_module.current_stream())
        for tensor in indices:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)  # the caller may free it as soon as we return
        return self._device_module.stream(stream)
