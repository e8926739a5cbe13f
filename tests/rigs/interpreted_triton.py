"""The Triton engine with its kernel run by Python, on CPU tensors."""

from __future__ import annotations

from hicache_ext.kernels.engine import Operation
from hicache_ext.kernels.triton_engine import DEFAULT_PROGRAMS, TritonEngine


class InterpretedTritonEngine(TritonEngine):
    """Takes every operation."""

    def __init__(self, *, programs: int = DEFAULT_PROGRAMS) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        from hicache_ext.kernels.triton_kernel import copy_rows

        super().__init__(programs=programs)
        self._kernel = InterpretedFunction(copy_rows)
        self._options = {}

    def refusal(self, operation: Operation) -> str | None:
        return None
