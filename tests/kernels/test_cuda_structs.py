"""The structs that go to the CUDA driver, compared with the header by a C compiler. No GPU and no toolkit needed."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from hicache_ext.kernels.batched_dma import Attributes

_FIELDS = {
    "CUmemcpyAttributes": (
        Attributes,
        {
            "srcAccessOrder": "source_access_order",
            "srcLocHint": "source_location",
            "dstLocHint": "destination_location",
            "flags": "flags",
        },
    ),
}
_CONSTANTS = {
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 1,
    "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": 1,
    "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 91,
}


def cuda_header() -> Path:
    """The cuda.h that triton brings along."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("missing: triton, which brings cuda.h")
    header = Path(triton.origin).parent / "backends" / "nvidia" / "include" / "cuda.h"
    if not header.exists():
        pytest.skip("missing: cuda.h in triton")
    return header


def test_structs_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("missing: a C compiler")
    lines = [
        *(f'printf("{name} %zu\\n", sizeof({name}));' for name in _FIELDS),
        *(
            f'printf("{name}.{theirs} %zu\\n", offsetof({name}, {theirs}));'
            for name, (_, fields) in _FIELDS.items()
            for theirs in fields
        ),
        *(f'printf("{name} %zu\\n", (size_t){name});' for name in _CONSTANTS),
    ]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\n}\n"
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, f"-I{cuda_header().parent}", source, "-o", program], check=True)
    answer = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    theirs = {name: int(number) for name, number in (line.split() for line in answer.splitlines())}

    ours = dict(_CONSTANTS)
    for name, (struct, fields) in _FIELDS.items():
        ours[name] = ctypes.sizeof(struct)
        ours |= {f"{name}.{field}": getattr(struct, mine).offset for field, mine in fields.items()}
    assert ours == theirs
