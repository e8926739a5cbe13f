"""What a codec does with pages, by dtype: ratio, ratio in rooms, GB/s of pages of one thread.

    python -m benchmarks.bench_codec [--codec int8] kv.npy ...

A file has the KV of one text as bfloat16 bits: an int16 array [layers, 2, tokens, heads, head dim], as a model of
transformers gives it in its cache. Other dtypes are made of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from hicache_ext.page.transforms.codec import Codec, lossy_fact
from hicache_ext.page.transforms.header import LOSSY_CODECS

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def pages_of(file: Path, tokens: int, layout: str, dtype: str) -> list[bytes]:
    """All whole pages of one file."""
    kv = torch.tensor(np.load(file)).view(torch.bfloat16).to(DTYPES[dtype])
    order = {"page_first": (1, 2, 0, 3, 4), "page_first_direct": (1, 0, 2, 3, 4), "layer_first": (0, 1, 2, 3, 4)}
    count = kv.shape[2] // tokens
    return [
        kv[:, :, tokens * page : tokens * (page + 1)]
        .permute(*order[layout])
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for page in range(count)
    ]


def seconds_of(work: Callable[[int], object], count: int) -> float:
    """Median of seven rounds, of each of so many pieces."""
    rounds = []
    for _ in range(7):
        began = time.perf_counter()
        for piece in range(count):
            work(piece)
        rounds.append((time.perf_counter() - began) / count)
    return statistics.median(rounds)


def row(name: str, dtype: str, head: int, contents: Sequence[bytes]) -> str:
    size = len(contents[0])
    pool = {"dtype": dtype, "kind": "MHATokenToKVPoolHost", "geometry": {"head_dim": str(head)}}
    codec = Codec(name).for_pages({"model": {"compute": lossy_fact("", LOSSY_CODECS)}, "pool": pool}, size)
    assert codec is not None
    memory, page = memoryview(bytearray(codec.rooms[-1])), memoryview(bytearray(size))
    encoded, rooms = [], []
    for content in contents:
        length = codec.encode(memoryview(content), memory)
        encoded.append(bytes(memory[:length]) if length else content)
        rooms.append(min((room for room in codec.rooms if length and room >= length), default=size))
        if length:
            codec.decode(memory[:length], page)
            assert page == content or name != "lossless"
    coded = [number for number, one in enumerate(encoded) if len(one) < size]
    some = coded[:16]
    views = [memoryview(contents[number]) for number in some]
    pieces = [memoryview(encoded[number]) for number in some]
    encoding = seconds_of(lambda piece: codec.encode(views[piece], memory), len(some))
    decoding = seconds_of(lambda piece: codec.decode(pieces[piece], page), len(some))
    total = size * len(contents)
    return (
        f"{dtype:14} {size:>8} {len(contents):>4} {1 - len(coded) / len(contents):>5.2f} "
        f"{total / sum(map(len, encoded)):>6.3f} {total / sum(rooms):>6.3f} "
        f"{size / encoding / 1e9:>6.2f} {size / decoding / 1e9:>6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--layouts", nargs="+", default=["page_first", "page_first_direct", "layer_first"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--codec", default="lossless", choices=["lossless", "int8", "fp8"])
    given = parser.parse_args()
    for tokens in given.tokens:
        for layout in given.layouts:
            print(f"\n{tokens} tokens, {layout}\ndtype             bytes pages   raw  ratio stored  enc    dec GB/s")
            for dtype in given.dtypes:
                found = [page for file in given.files for page in pages_of(file, tokens, layout, dtype)]
                head = np.load(given.files[0], mmap_mode="r").shape[-1]
                print(row(given.codec, dtype, head, found), flush=True)


if __name__ == "__main__":
    main()
