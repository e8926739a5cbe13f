"""The compiled code of the file tier in this process (compiled_code.py)."""

from __future__ import annotations

from hicache_ext.page import batch_code
from hicache_ext.runtime import jit
from hicache_ext.runtime.compiled_part import CompiledPart, NotCompiled
from hicache_ext.storage.tiers.file.slab.compiled_code import CompiledCode


def _use(code: CompiledCode) -> None:
    jit.use(batch_code, code.batch_kernels)


part = CompiledPart("file", f"{__name__}:part", CompiledCode, _use)


def compiled_code() -> CompiledCode | None:
    """As ``CompiledPart.code``."""
    return part.code()


def wait_for_compiled_code() -> CompiledCode | None:
    """As ``CompiledPart.wait``."""
    return part.wait()


def why_not_compiled() -> NotCompiled | None:
    """As ``CompiledPart.why_not``."""
    return part.why_not()
