"""Pages as fewer bytes, exactly: what repeats in the numbers of the KV (exponents) is coded, all else kept as it is.

An encoded page is ``head || rest || frame``, then zeros up to the room. The head has 8 bytes, little-endian: method
(1), version (1), zeros (2), bytes of the frame (4). ``frame`` is one Zstandard frame with the plane ``top`` of
numbers.py; ``rest`` is the other plane. A page of other numbers has no ``rest``, its frame has all bytes.

Zstandard's matches find next to nothing in a plane of exponents, and cost most of the time. So it is told to look for
seven equal bytes in a table of 64 places: what is left is its Huffman code, for each 128 KiB its own. Measurements:
docs/codecs.md.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from hicache_ext.errors import FormatError
from hicache_ext.packages import missing_package
from hicache_ext.page.transforms.in_numpy import Bytes
from hicache_ext.page.transforms.numbers import SPLITS, Split

_HEAD = struct.Struct("<BBHI")
_VERSION = 1
_FRAME_START = b"\x28\xb5\x2f\xfd"
_METHOD_OF_BYTES = 1
"""Other methods are the bits of a number."""

CODE = 1
"""In the header of the page (codec.py)."""
_SMALLEST = 2048
"""Bytes of a page; of smaller ones a medium stores as many blocks, and a header, too."""
_PARTS = 128
_ROOMS = {
    "bfloat16": (87, 88, 89, 96),
    "float16": (111, 112, 113, 116),
    "float32": (107, 108, 109, 114),
    "float8_e4m3": (110, 111, 112, 116),
    "float8_e5m2": (96, 97, 98, 108),
}
"""In 128ths of a page, by the beginning of the dtype. Real pages of one model scatter by less than one of them, and the
models differ by two (docs/codecs.md); the last one is for others."""
_ROOMS_OF_BYTES = (80, 96, 112, 120)
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float8_e4m3": 8, "float8_e5m2": 8}


@dataclass(frozen=True, slots=True)
class LosslessCodec:
    """``codec: lossless``. Raises MissingPackageError without the package ``zstandard``."""

    def __post_init__(self) -> None:
        _zstandard()

    @property
    def label(self) -> bytes:
        return b"lossless-%d" % _VERSION

    def for_pages(self, document: Mapping[str, Any], payload: int) -> LosslessPages | None:
        """None for pages that are too small."""
        pool = document.get("pool")
        dtype = str(pool.get("dtype")) if isinstance(pool, Mapping) else ""
        known = next((name for name in _BITS if dtype.startswith(name)), None)
        rooms = rooms_of(payload, _ROOMS_OF_BYTES if known is None else _ROOMS[known])
        split = None if known is None else SPLITS[_BITS[known]]
        if split is not None and payload % split.group:
            split = None
        return LosslessPages(payload, split, rooms) if rooms else None


def rooms_of(payload: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """So many 128ths of a page."""
    return tuple(payload * part // _PARTS for part in parts) if payload >= _SMALLEST else ()


class LosslessPages:
    """The codec for pages of one length (codec.py)."""

    def __init__(self, payload: int, split: Split | None, rooms: tuple[int, ...]) -> None:
        self._payload = payload
        self._split = split
        self._method = _METHOD_OF_BYTES if split is None else split.bits
        self._top, self._rest = (payload, 0) if split is None else split.planes(payload)
        self.rooms = rooms
        self.code = CODE

    def pays(self) -> bool:
        return True

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        page, target = np.frombuffer(payload, np.uint8), np.frombuffer(encoded, np.uint8)
        if page.size != self._payload:
            raise ValueError(f"a page of {page.size} bytes in place of {self._payload}")
        begin = _HEAD.size + self._rest
        if target.size <= begin:
            return 0
        if self._split is None:
            top = page
        else:
            top = np.empty(self._top, np.uint8)
            self._split.split(page, top, target[_HEAD.size : begin])
        frame = np.frombuffer(frame_of(top), np.uint8)
        if begin + frame.size > target.size:
            return 0
        np.copyto(target[begin : begin + frame.size], frame)
        _HEAD.pack_into(encoded, 0, self._method, _VERSION, 0, frame.size)
        return begin + frame.size

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        page = np.frombuffer(payload, np.uint8)
        begin = _HEAD.size + self._rest
        if page.size != self._payload or len(encoded) < begin:
            raise FormatError("encoded_length", f"{len(encoded)} bytes for {page.size}")
        method, version, zeros, length = _HEAD.unpack_from(encoded)
        if (method, version, zeros) != (self._method, _VERSION, 0):
            raise FormatError("encoding", f"method {method}, version {version}")
        if length > len(encoded) - begin:
            raise FormatError("encoded_length", f"a frame of {length} bytes in {len(encoded) - begin}")
        top = np.frombuffer(plane_in(encoded[begin : begin + length], self._top), np.uint8)
        if self._split is None:
            np.copyto(page, top)
        else:
            self._split.join(top, np.frombuffer(encoded, np.uint8)[_HEAD.size : begin], page)


def frame_of(plane: Bytes) -> bytes:
    """``plane`` as one Zstandard frame."""
    frame: bytes = _coders().compressor.compress(plane)
    return frame


def plane_in(frame: memoryview, size: int) -> bytes:
    """The ``size`` bytes of which ``frame`` is the Zstandard frame. Raises FormatError; takes no more memory than
    that, whatever the frame says of itself."""
    zstandard = _zstandard()
    try:
        said = zstandard.get_frame_parameters(frame)
        # Zstandard allocates what the frame says, before it looks further.
        if bytes(frame[:4]) != _FRAME_START or said.content_size != size or said.dict_id:
            raise FormatError("encoding", f"a frame of {said.content_size} bytes for {size}")
        plane: bytes = _coders().decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError("encoding", str(error)) from error
    if len(plane) != size:
        raise FormatError("encoding", f"{len(plane)} bytes for {size}")
    return plane


class _Coders(threading.local):
    """Zstandard's contexts: one thread at a time may use each."""

    def __init__(self) -> None:
        zstandard = _zstandard()
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
            write_checksum=False,
            write_dict_id=False,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


@functools.cache
def _coders() -> _Coders:
    return _Coders()


def _zstandard() -> ModuleType:
    """Imported only where a codec is used. Raises MissingPackageError."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_package("zstandard") from error
    return zstandard
