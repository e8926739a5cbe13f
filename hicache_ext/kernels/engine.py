"""What a copy engine is: the one interface behind which the ways to move rows differ.

An *operation* moves one set of tokens, in one direction, for some or all layers of a pool. It is made once; an engine
*begins* it once and is then told layer by layer what to submit. All of that happens on one thread (in SGLang: the
scheduler's, before the forward pass), inside the stream in which the copies shall run.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hicache_ext.kernels.geometry import LayerStack
from hicache_ext.kernels.plan import CopyPlan, make_plan

SGLANG = "sglang"
"""The name of SGLang's own path, which is no engine of ours."""


class Direction(StrEnum):
    """``load`` is host to device, ``back_up`` device to host."""

    LOAD = "load"
    BACK_UP = "back_up"


class Operation:
    """One set of tokens to move: int64 token indices of equal length, one per token, on the CPU or on the device.

    No index occurs twice on the side that is written. Raises ``ValueError`` for unequal lengths.
    """

    def __init__(
        self, stack: LayerStack, direction: Direction, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None:
        if host_indices.numel() != device_indices.numel():
            raise ValueError(f"{host_indices.numel()} host tokens, but {device_indices.numel()} device tokens")
        self.stack = stack
        self.direction = direction
        self.host_indices = host_indices
        self.device_indices = device_indices

    @property
    def tokens(self) -> int:
        return self.host_indices.numel()

    @property
    def indices_on_cpu(self) -> bool:
        """Whether the plan can be made without waiting for the device."""
        return self.host_indices.device.type == "cpu" and self.device_indices.device.type == "cpu"

    @cached_property
    def cpu_indices(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Host and device indices as arrays. Waits for the device unless ``indices_on_cpu``."""
        return self.host_indices.cpu().numpy(), self.device_indices.cpu().numpy()

    @cached_property
    def plan(self) -> CopyPlan:
        """Made at first use, once for all layers."""
        return make_plan(self.stack.shape, *self.cpu_indices)


class Transfer(Protocol):
    """One engine's state for one operation. Dropping it is always safe: what is submitted stays valid."""

    def submit(self, first: int, last: int) -> None:
        """Submit copies ``first`` to ``last - 1`` of the stack to the current stream of the device.

        On return they need only be ordered on that stream. Raises :class:`CopyError` if they could not be submitted.
        """


class CopyEngine(Protocol):
    """A way to move rows. Engines are stateless between operations and used from one thread at a time."""

    name: str

    def refusal(self, operation: Operation) -> str | None:
        """Why this engine cannot serve ``operation`` in the current stream, in a word or two; None if it can."""

    def begin(self, operation: Operation) -> Transfer:
        """Plan ``operation``; ``refusal`` has answered None for it in the same stream."""
