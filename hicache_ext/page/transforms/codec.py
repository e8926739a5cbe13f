"""Codecs: encode pages into fewer bytes, for media whose bytes are expensive.

A medium expects one length for each key and treats a page of another length as damaged. So encoded pages cannot have
arbitrary lengths: a codec determines in advance the few lengths (*rooms*) that pages of an identity may have. An
encoded page is stored in the smallest room it fits into, padded with zeros, and each room has separate keys (forms.py).
A page that fits into none is stored unencoded.

An encoded page is ``head || scales || rest || frame``, then zeros up to the room. The head has 8 bytes, little-endian:
method (1), version (1), zeros (2), bytes of the frame (4). ``frame`` is one Zstandard frame with the plane ``top`` of
numbers.py; ``rest`` is the other plane. Numbers without planes have no ``rest``, and all their bytes in the frame.

``lossless`` is exact: it compresses what repeats in the numbers of the KV (exponents) and keeps the rest unchanged.
There are no scales; the method is the bits of a number, or 1 for a page that is treated as bytes.

``int8`` and ``fp8`` are lossy: every row of a page, the numbers of one head of one token in one layer, is quantised
(numbers.py), and the planes are those of the codes; int8 codes have none. The method is 1; with method 0 the plain
codes follow the scales, which is used if a frame would not make them shorter.

Only pools of keys and values are quantised. States of linear attention, latents of MLA, indexes and 8-bit numbers are
encoded losslessly; pages with an infinity, a NaN or a number of 2**100 or more are stored unencoded. Restored values
differ from computed ones, and so does everything computed from them. So a server with a lossy tier has separate
identities (``lossy_fact``): no exact server finds its pages in any tier. Pages of identities that do not declare this
are never quantised, even if brought to a lossy tier: a command that copies them there and back leaves them exact.

Zstandard's matches find next to nothing in a plane of exponents, and take most of the time. So it is told to look for
seven equal bytes in a table of 64 entries, which leaves its Huffman coding, separate for each 128 KiB. Measurements:
docs/codecs.md.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hicache_ext.errors import FormatError
from hicache_ext.packages import missing_package
from hicache_ext.page.page_object import gather
from hicache_ext.page.transforms.header import CODEC_NUMBERS, LOSSY_CODECS
from hicache_ext.page.transforms.numbers import KINDS, SPLITS, Rows, Split
from hicache_ext.runtime.linear_cost import LinearCost
from hicache_ext.runtime.whole_file import json_in

_HEAD = struct.Struct("<BBHI")
_VERSION = 1
_FRAME_START = b"\x28\xb5\x2f\xfd"
_METHOD_AS_THEY_ARE = 0
_METHOD_OF_BYTES = 1

_SMALLEST = 2048
"""Bytes of the smallest page to encode; smaller ones would take as many blocks of the medium, plus a header."""
_SHORTEST_ROW = 16
"""Fewest numbers of a row, because a scale takes as many bytes as two codes."""
_PARTS = 128
_ROOMS = {
    "bfloat16": (87, 88, 89, 96),
    "float16": (111, 112, 113, 116),
    "float32": (107, 108, 109, 114),
    "float8_e4m3": (110, 111, 112, 116),
    "float8_e5m2": (96, 97, 98, 108),
}
"""Rooms in 128ths of a page, by the beginning of the dtype. Real pages of one model scatter by less than one 128th, and
models differ by two (docs/codecs.md); the last room is for other pages."""
_ROOMS_OF_BYTES = (80, 96, 112, 120)
_ROOMS_OF_CODES = {"int8": (104, 110, 115, 128), "fp8": (109, 112, 114, 128)}
"""Rooms in 128ths of the codes; the last one fits every page. docs/codecs.md has measurements of real pages."""
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float8_e4m3": 8, "float8_e5m2": 8}

_KINDS_OF_POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
_HEADS = ("head_dim", "v_head_dim")
_FACT = "codecs"


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec as configured for a tier: ``lossless``, ``int8`` or ``fp8``. Threads: any.

    Raises MissingPackageError without the package ``zstandard``."""

    name: str
    paying: Paying | None = None
    """Decides whether to encode pages; None: always."""

    def __post_init__(self) -> None:
        _zstandard()

    @property
    def label(self) -> bytes:
        """Return a label of the codec and everything that affects ``rooms`` or the meaning of encoded bytes. It is part
        of the keys: servers find each other's pages only if their labels are equal."""
        return _versioned(self.name).encode()

    def for_pages(self, document: Mapping[str, Any], payload: int) -> PageCodec | None:
        """Return the codec for pages of ``payload`` bytes of the identity with this document; None to store them raw.

        It is lossless for pools that are not quantised, and for identities not declared lossy: readers of their pages
        want them exact, wherever the pages were in between."""
        if payload < _SMALLEST:
            return None
        if self.name in _declared_codecs(document):
            rows = rows_of(document, self.name)
            if isinstance(rows, Rows) and not payload % (2 * rows.words * rows.length):
                split = SPLITS[8] if self.name == "fp8" else None
                return PageCodec(payload, split, _ROOMS_OF_CODES[self.name], rows)
        pool = document.get("pool")
        dtype = str(pool.get("dtype")) if isinstance(pool, Mapping) else ""
        known = next((name for name in _BITS if dtype.startswith(name)), None)
        if known is None:
            return PageCodec(payload, None, _ROOMS_OF_BYTES)
        split = SPLITS[_BITS[known]]
        return PageCodec(payload, None if payload % split.group else split, _ROOMS[known])


class PageCodec:
    """A codec for the pages of one identity, all of one length. Threads: any."""

    def __init__(self, payload: int, split: Split | None, parts: tuple[int, ...], rows: Rows | None = None) -> None:
        """``split`` applies to the page's numbers, or to its codes if it is quantised (``rows``). ``parts``: the rooms,
        in 128ths of the bytes that are split."""
        self.payload = payload
        """Bytes of a page."""
        self._split = split
        self._rows = rows
        self._bytes = payload if rows is None else payload // (2 * rows.words)
        """Number of bytes that are split."""
        self._scales = 0 if rows is None else self._bytes // rows.length
        self._begin = _HEAD.size + 2 * self._scales
        """Offset of the split bytes in an encoded page."""
        self._top, self._rest = (self._bytes, 0) if split is None else split.planes(self._bytes)
        self._method = _METHOD_OF_BYTES if split is None or rows is not None else split.bits
        self.code = CODEC_NUMBERS["lossless" if rows is None else rows.code]
        """Number of the codec in the header of the page, 1 to 255."""
        self.rooms = tuple((0 if rows is None else self._begin) + self._bytes * part // _PARTS for part in parts)
        """Sizes that an encoded page may have, in bytes, ascending, each less than a page; at most four, because an
        absent page is looked up in each. They depend only on the codec's label, the identity's document and the length,
        so that all servers look for the same."""
        self.measured: Measured | None = None
        """Cost and savings of encoding, if measured."""

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        """Encode into the leading bytes of ``encoded``, which is as large as the largest room; return how many, or 0 if
        they do not fit. Equal payloads give equal bytes."""
        page, target = np.frombuffer(payload, np.uint8), np.frombuffer(encoded, np.uint8)
        if page.size != self.payload:
            raise ValueError(f"a page of {page.size} bytes in place of {self.payload}")
        numbers = page
        if self._rows is not None:
            scales, numbers = np.empty(self._scales, np.uint16), np.empty(self._bytes, np.uint8)
            if not self._rows.quantise(page.view(np.uint16), scales, numbers):
                return 0
            np.copyto(target[_HEAD.size : self._begin], scales.view(np.uint8))
        top, begin = numbers, self._begin + self._rest
        if self._split is not None:
            top = np.empty(self._top, np.uint8)
            self._split.split(numbers, top, target[self._begin : begin])
        frame = np.frombuffer(_coders().compressor.compress(top), np.uint8)
        method, length = self._method, frame.size
        if self._rows is not None and frame.size >= self._top:
            method, length, frame, begin = _METHOD_AS_THEY_ARE, 0, numbers, self._begin
        if begin + frame.size > target.size:
            return 0
        np.copyto(target[begin : begin + frame.size], frame)
        _HEAD.pack_into(encoded, 0, method, _VERSION, 0, length)
        return begin + frame.size

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        """Decode all of ``encoded`` into all of ``payload``. Whatever ``encoded`` holds, no other memory is read or
        written. Raises FormatError if it is not a page of this length."""
        page, stored = (np.frombuffer(memory, np.uint8) for memory in (payload, encoded))
        begin = self._begin + self._rest
        if page.size != self.payload or stored.size < begin:
            raise FormatError("encoded_length", f"{stored.size} bytes for {page.size}")
        method, version, zeros, length = _HEAD.unpack_from(encoded)
        as_they_are = self._rows is not None and method == _METHOD_AS_THEY_ARE
        if version != _VERSION or zeros or (method != self._method and not as_they_are):
            raise FormatError("encoding", f"method {method}, version {version}")
        if as_they_are:
            numbers = stored[self._begin :][: self._bytes]
            if length or numbers.size < self._bytes:
                raise FormatError("encoding", f"{numbers.size} codes in place of {self._bytes}")
        else:
            if length > stored.size - begin:
                raise FormatError("encoded_length", f"a frame of {length} bytes in {stored.size - begin}")
            numbers = top = np.frombuffer(_plane_in(encoded[begin : begin + length], self._top), np.uint8)
            if self._split is not None:
                numbers = page if self._rows is None else np.empty(self._bytes, np.uint8)
                self._split.join(top, stored[self._begin : begin], numbers)
        if self._rows is not None:
            scales = stored[_HEAD.size : self._begin].copy().view(np.uint16)
            if not self._rows.restore(scales, numbers, page.view(np.uint16)):
                raise FormatError("encoding", "no scales")
        elif self._split is None:
            np.copyto(page, numbers)


# -- quantisation ------------------------------------------------------------------------------------------------------


def rows_of(document: Mapping[str, Any], code: str) -> Rows | str:
    """Return how the pages of this identity are quantised, or words that tell why they are not."""
    pool = document.get("pool")
    if not isinstance(pool, Mapping):
        return "without loss, since its kind is not known"
    kind, dtype, geometry = pool.get("kind"), pool.get("dtype"), pool.get("geometry")
    if kind not in _KINDS_OF_POOLS or not isinstance(geometry, Mapping):
        return f"without loss, since a {kind} has no keys and values by head"
    if dtype not in KINDS:
        return f"without loss, since its numbers are {dtype}"
    facts = dict(geometry)
    # Packed pools have facts per buffer: "head_dim=64,v_head_dim=64,dtype=torch.bfloat16,layout=nhd".
    buffers = [str(fact) for name, fact in facts.items() if re.fullmatch(r"buffer\d+", name)]
    told = [fact.partition("=")[::2] for buffer in buffers for fact in buffer.split(",")]
    allowed = {"dtype": (f"torch.{dtype}",), "layout": ("nhd", "paged_nhd")}
    for name, value in told:
        if name not in _HEADS and value not in allowed.get(name, ()):
            return f"without loss, since its format has {name}={value}"
    told += [(name, str(facts.get(name))) for name in _HEADS]
    lengths = [int(value) for name, value in told if name in _HEADS and value.isdecimal()]
    # Keys and values may have different head sizes; a scale then covers a part of each.
    length = math.gcd(*lengths)
    if length < _SHORTEST_ROW:
        return f"without loss, since its heads have {length} numbers in common"
    return Rows(str(dtype), length, code)


def lossy_fact(compute: str, codecs: Iterable[str]) -> str:
    """Return the ``ModelIdentity.compute`` of a server whose tiers have these lossy codecs."""
    names = sorted(map(_versioned, set(codecs)))
    return json.dumps({**(json.loads(compute) if compute else {}), _FACT: names}, sort_keys=True) if names else compute


def _versioned(codec: str) -> str:
    return f"{codec}-{_VERSION}"


def _declared_codecs(document: Mapping[str, Any]) -> list[str]:
    """Return the lossy codecs that this identity's pages may pass through, according to ``lossy_fact``."""
    model = document.get("model")
    try:
        compute = json_in(model["compute"]) if isinstance(model, Mapping) and model.get("compute") else {}
        declared = compute.get(_FACT, [])
    except (TypeError, ValueError, AttributeError):
        return []
    return [name for name in LOSSY_CODECS if isinstance(declared, list) and _versioned(name) in declared]


# -- whether it pays ---------------------------------------------------------------------------------------------------
#
# ``codec: auto``: pages are encoded if that makes a page's round trip to the medium faster.
#
# A page is written and read. Encoding saves time for each byte that the medium does not move, and costs the time of
# encoding and decoding, which several threads share:
#
#     saved bytes * (seconds per byte of SETs + of GETs) > (encoding + decoding) / threads
#
# The medium's seconds per byte are learnt from its calls, as the pull rule does (runtime/linear_cost.py). The codec's
# cost and savings are measured on one of the caller's pages every ``AGAIN`` seconds. Pages are read in any form.


AGAIN = 20.0
"""Seconds between two measurements of the codec for pages of one identity; a measurement costs as much as two pages."""
_FEWEST = 8
"""Fewest calls of a medium before it is judged, because the first ones open connections."""
_THREADS = 4


class Measured(NamedTuple):
    """A measurement with one page."""

    saved: int
    """Bytes that the medium need not store."""
    seconds: float
    """Duration of encoding and decoding."""
    at: float


class Paying:
    """Decides whether encoding pays off for one medium. ``threads``: how many encode in parallel. Threads: any."""

    def __init__(self, *, threads: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._clock = clock
        self._costs = {"get": LinearCost(), "set": LinearCost()}
        self._calls = 0
        self._measuring = threading.Lock()

    def moved(self, call: str, stored_bytes: int, seconds: float) -> None:
        """Record that the medium moved ``stored_bytes`` in a ``get`` or ``set`` in ``seconds``, excluding encoding."""
        self._calls += 1
        if stored_bytes > 0:
            self._costs[call].observe(stored_bytes, seconds)

    def seconds_per_byte(self) -> float | None:
        """Return the seconds for a byte that is written once and read once. If only one direction was observed, the
        other is assumed to cost the same. None until enough was observed."""
        if self._calls < _FEWEST:
            return None
        known = [cost for line in self._costs.values() if (cost := line.per_unit()) is not None]
        return 2 * sum(known) / len(known) if known else None

    def may_pay(self, codec: PageCodec) -> bool:
        """Return whether to call ``pays``, which needs contiguous pages: if encoding pays off as far as known, or if it
        is time to measure."""
        return self.seconds_per_byte() is not None and (self._is_old(codec.measured) or self._gains(codec.measured))

    def pays(self, codec: PageCodec, payload: memoryview) -> bool:
        """Return whether to encode pages of this codec now; measure with this page if it is time for that."""
        # One thread measures; the others use what is known.
        if self._is_old(codec.measured) and self._measuring.acquire(blocking=False):
            try:
                codec.measured = self._measure(codec, payload)
            finally:
                self._measuring.release()
        return self._gains(codec.measured)

    def _is_old(self, measured: Measured | None) -> bool:
        return measured is None or self._clock() - measured.at > AGAIN

    def _gains(self, measured: Measured | None) -> bool:
        per_byte = self.seconds_per_byte()
        if measured is None or per_byte is None:
            return False
        return measured.saved * per_byte > measured.seconds / self.threads

    def _measure(self, codec: PageCodec, payload: memoryview) -> Measured:
        """Measure encoding as body.py does it, including new memory and copies, which cost a third as much as the
        codec. Twice, because the first run also creates contexts."""
        stored, page = (np.zeros(size, np.uint8).data for size in (codec.rooms[-1], payload.nbytes))
        seconds = float("inf")
        for _ in range(2):
            began = self._clock()
            gather([payload], page)
            encoded = np.empty(codec.rooms[-1], np.uint8).data
            length = codec.encode(page, encoded)
            if not length:
                return Measured(0, 0.0, self._clock())
            gather([encoded[:length]], stored[:length])
            whole = np.empty(payload.nbytes, np.uint8).data
            codec.decode(stored[:length], whole)
            gather([whole], page)
            seconds = min(seconds, self._clock() - began)
        room = min(room for room in codec.rooms if room >= length)
        return Measured(payload.nbytes - room, seconds, self._clock())


# -- Zstandard ---------------------------------------------------------------------------------------------------------


def _plane_in(frame: memoryview, size: int) -> bytes:
    """Return the ``size`` bytes in the Zstandard frame ``frame``. Raises FormatError; allocates no more memory than
    that, whatever the frame claims."""
    zstandard = _zstandard()
    try:
        parameters = zstandard.get_frame_parameters(frame)
        # Zstandard allocates the size that the frame claims before it checks anything else.
        if bytes(frame[:4]) != _FRAME_START or parameters.content_size != size or parameters.dict_id:
            raise FormatError("encoding", f"a frame of {parameters.content_size} bytes for {size}")
        plane: bytes = _coders().decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError("encoding", str(error)) from error
    if len(plane) != size:
        raise FormatError("encoding", f"{len(plane)} bytes for {size}")
    return plane


class _Coders(threading.local):
    """Zstandard's contexts, each of which only one thread at a time may use."""

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
    """Import zstandard, only when a codec is used. Raises MissingPackageError."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_package("zstandard") from error
    return zstandard
