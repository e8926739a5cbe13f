"""The Triton kernel compiled for real GPUs without one: what the interpreter accepts, a compiler may not."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from hicache_ext.kernels.engine import Direction
from hicache_ext.kernels.triton_engine import constants_of
from tests.kernels.stacks import plain_memory

pytestmark = [pytest.mark.slow, pytest.mark.pairs]

if importlib.util.find_spec("triton") is None:
    pytest.skip("missing: triton", allow_module_level=True)

CAPABILITIES = [80, 90, 100]
SIGNATURE = {
    "bases": "*i64",
    "first": "i32",
    "host_indices": "*i64",
    "device_indices": "*i64",
    "rows": "i32",
    "units": "i32",
}
"""Types of the run-time arguments, for compiling without a GPU."""


def compile_for(
    capability: int, row: int, direction: Direction, layout: str = "page_first", page_size: int = 16
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hicache_ext.kernels.triton_kernel import compiled

    stack = plain_memory(layout=layout, row=row, page_size=page_size).stack
    # Addresses of tensors are 16-byte aligned or better; which ones torch gives does not decide this test.
    constants = constants_of(stack, direction)
    signature = {**SIGNATURE, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(compiled(), signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 32})


def row_accesses(ptx: str) -> set[str]:
    """The kinds of loads and stores that move rows; 64-bit scalars are what fetches indices and bases."""
    found = set(re.findall(r"(ld\.global\.\S+|st\.global\.\S+)", ptx))
    return {access for access in found if not access.startswith("ld.global.b64")}


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("row", [128, 576, 656, 2048, 16384])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_of_16_byte_multiples_move_in_16_byte_vectors_only(
    capability: int, row: int, direction: Direction
) -> None:
    ptx = compile_for(capability, row, direction).asm["ptx"]
    assert row_accesses(ptx) == {"ld.global.v4.b32", "st.global.v4.b32"}


@pytest.mark.parametrize(
    ("row", "widest"), [(72, "v2.b32"), (20, "b32"), (6, "b16"), (3, "b8")], ids=["8", "4", "2", "1"]
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_odd_rows_move_in_the_widest_words_their_alignment_allows(capability: int, row: int, widest: str) -> None:
    ptx = compile_for(capability, row, Direction.LOAD).asm["ptx"]
    assert row_accesses(ptx) == {f"ld.global.{widest}", f"st.global.{widest}"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_assembler_accepts_it(capability: int) -> None:
    assert len(compile_for(capability, 2048, Direction.LOAD).asm["cubin"]) > 0
