"""Codecs: pages as fewer bytes, for media whose bytes are dear.

A medium knows one length for each key, and takes a page of another one for damage. So encoded pages do not have any
length: a codec says beforehand which few lengths (*rooms*) those of an identity may have. An encoded page lies in the
smallest room that it fits into, with zeros behind it, and each room has keys of its own (forms.py). A page that fits
into none is stored as it is.

An encoded page is ``head || scales || rest || frame``, then zeros up to the room. The head has 8 bytes, little-endian:
method (1), version (1), zeros (2), bytes of the frame (4). ``frame`` is one Zstandard frame with the plane ``top`` of
numbers.py; ``rest`` is the other plane. Numbers that have no planes have no ``rest``, and all their bytes in the frame.

``lossless`` is exact: what repeats in the numbers of the KV (exponents) is coded, all else kept as it is. There are no
scales; the method is the bits of a number, 1 of a page that is taken as bytes.

``int8`` and ``fp8`` are not: every row of a page, the numbers of one head of one token in one layer, is quantised
(numbers.py), and the planes are those of the codes. Those of int8 have none. The method is 1; with method 0 the codes
as they are stand behind the scales, where a frame makes them no shorter.

Only pools of keys and values are quantised. States of linear attention, latents of MLA, indexes and numbers of 8 bits
are encoded without loss; so are pages with an infinity, a NaN or a number of 2**100 or more stored as they are. What
was restored is not what was computed, and all that is computed from it differs a little, too. So a server with a lossy
tier has identities of its own (``lossy_fact``): no exact server meets its pages, in whatever tier. And pages of
identities that do not say so are not quantised, whoever brings them to a lossy tier: a command that copies them there
and back leaves them exact.

Zstandard's matches find next to nothing in a plane of exponents, and cost most of the time. So it is told to look for
seven equal bytes in a table of 64 places: what is left is its Huffman code, for each 128 KiB its own. Measurements:
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
"""Bytes of a page; of smaller ones a medium stores as many blocks, and a header, too."""
_SHORTEST_ROW = 16
"""Numbers; a scale takes as many bytes as two of their codes."""
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
_ROOMS_OF_CODES = {"int8": (104, 110, 115, 128), "fp8": (109, 112, 114, 128)}
"""In 128ths of the codes; the last one takes every page. Real pages: docs/codecs.md."""
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float8_e4m3": 8, "float8_e5m2": 8}

_KINDS_OF_POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
_HEADS = ("head_dim", "v_head_dim")
_FACT = "codecs"


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec as it is configured for a tier: ``lossless``, ``int8`` or ``fp8``. Threads: any.

    Raises MissingPackageError without the package ``zstandard``."""

    name: str
    paying: Paying | None = None
    """What says whether pages are to be encoded; None: they are."""

    def __post_init__(self) -> None:
        _zstandard()

    @property
    def label(self) -> bytes:
        """Names the codec and everything that changes ``rooms`` or what encoded bytes mean. Part of the keys: servers
        find each other's pages only if their labels are equal."""
        return _said(self.name).encode()

    def for_pages(self, document: Mapping[str, Any], payload: int) -> PageCodec | None:
        """For pages of ``payload`` bytes of the identity with this document; None where they are stored as they are.

        Without loss for what is not quantised, and for identities that do not say that they are lossy: whoever asks for
        their pages wants them exact, wherever they were in between."""
        if payload < _SMALLEST:
            return None
        if self.name in _said_codecs(document):
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
        """``split``: of the page's numbers, or of its codes where it is quantised (``rows``). ``parts``: the rooms, in
        128ths of what is split."""
        self.payload = payload
        """Bytes of a page."""
        self._split = split
        self._rows = rows
        self._bytes = payload if rows is None else payload // (2 * rows.words)
        """Of what is split."""
        self._scales = 0 if rows is None else self._bytes // rows.length
        self._begin = _HEAD.size + 2 * self._scales
        """Where what is split begins in an encoded page."""
        self._top, self._rest = (self._bytes, 0) if split is None else split.planes(self._bytes)
        self._method = _METHOD_OF_BYTES if split is None or rows is not None else split.bits
        self.code = CODEC_NUMBERS["lossless" if rows is None else rows.code]
        """1 to 255: which codec, in the header of the page."""
        self.rooms = tuple((0 if rows is None else self._begin) + self._bytes * part // _PARTS for part in parts)
        """Bytes that an encoded page may take, ascending, each less than a page; four at most, since a page that is
        absent is asked for in each. They follow from the codec's label, the identity's document and the length alone,
        so that all servers ask for the same."""
        self.measured: Measured | None = None
        """What encoding costs and saves, where that was asked for."""

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        """Encode into the leading bytes of ``encoded``, which has as many as the largest room; returns how many, 0
        where they do not fit. Equal payloads give equal bytes."""
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
        """Decode all of ``encoded`` into all of ``payload``. Whatever ``encoded`` holds, nothing else is read or
        written. Raises FormatError where it is no page of this length."""
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


# -- what is quantised -------------------------------------------------------------------------------------------------


def rows_of(document: Mapping[str, Any], code: str) -> Rows | str:
    """How the pages of this identity are quantised; a sentence that says why they are not."""
    pool = document.get("pool")
    if not isinstance(pool, Mapping):
        return "without loss, since its kind is not known"
    kind, dtype, geometry = pool.get("kind"), pool.get("dtype"), pool.get("geometry")
    if kind not in _KINDS_OF_POOLS or not isinstance(geometry, Mapping):
        return f"without loss, since a {kind} has no keys and values by head"
    if dtype not in KINDS:
        return f"without loss, since its numbers are {dtype}"
    facts = dict(geometry)
    # Of packed pools, those of each buffer: "head_dim=64,v_head_dim=64,dtype=torch.bfloat16,layout=nhd".
    buffers = [str(fact) for name, fact in facts.items() if re.fullmatch(r"buffer\d+", name)]
    told = [fact.partition("=")[::2] for buffer in buffers for fact in buffer.split(",")]
    allowed = {"dtype": (f"torch.{dtype}",), "layout": ("nhd", "paged_nhd")}
    for name, value in told:
        if name not in _HEADS and value not in allowed.get(name, ()):
            return f"without loss, since its format has {name}={value}"
    told += [(name, str(facts.get(name))) for name in _HEADS]
    lengths = [int(value) for name, value in told if name in _HEADS and value.isdecimal()]
    # Keys and values may have unlike heads: a scale then is of a part of each.
    length = math.gcd(*lengths)
    if length < _SHORTEST_ROW:
        return f"without loss, since its heads have {length} numbers in common"
    return Rows(str(dtype), length, code)


def lossy_fact(compute: str, codecs: Iterable[str]) -> str:
    """``ModelIdentity.compute`` of a server with tiers that have these lossy codecs."""
    names = sorted(map(_said, set(codecs)))
    return json.dumps({**(json.loads(compute) if compute else {}), _FACT: names}, sort_keys=True) if names else compute


def _said(codec: str) -> str:
    return f"{codec}-{_VERSION}"


def _said_codecs(document: Mapping[str, Any]) -> list[str]:
    """The lossy codecs that may be in the way of this identity's pages, by ``lossy_fact``."""
    model = document.get("model")
    try:
        compute = json_in(model["compute"]) if isinstance(model, Mapping) and model.get("compute") else {}
        said = compute.get(_FACT, [])
    except (TypeError, ValueError, AttributeError):
        return []
    return [name for name in LOSSY_CODECS if isinstance(said, list) and _said(name) in said]


# -- whether it pays ---------------------------------------------------------------------------------------------------
#
# ``codec: auto``: pages are encoded where that makes a page's way to the medium and back shorter.
#
# A page is written and read. Encoded, it saves seconds for each byte that the medium does not move, and costs those of
# encoding and decoding, which some threads share:
#
#     saved bytes * (seconds per byte of SETs + of GETs) > (encoding + decoding) / threads
#
# The medium's seconds per byte are learnt from its calls, as the pull rule learns them (runtime/linear_cost.py). What
# the codec costs, and saves, is measured on a page of the caller's every ``AGAIN`` seconds. Pages are read in any form.


AGAIN = 20.0
"""Seconds between two measurements of the codec for pages of one identity: one costs what two pages do."""
_FEWEST = 8
"""Calls of a medium before it is judged: the first ones open connections."""
_THREADS = 4


class Measured(NamedTuple):
    """What was measured with one page."""

    saved: int
    """Bytes that the medium need not store."""
    seconds: float
    """Of encoding and decoding."""
    at: float


class Paying:
    """Whether it pays to encode pages for one medium. ``threads``: how many encode at once. Threads: any."""

    def __init__(self, *, threads: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._clock = clock
        self._costs = {"get": LinearCost(), "set": LinearCost()}
        self._calls = 0
        self._measuring = threading.Lock()

    def moved(self, call: str, stored_bytes: int, seconds: float) -> None:
        """The medium has moved so many bytes in a ``get`` or ``set`` that took so long, without encoding."""
        self._calls += 1
        if stored_bytes > 0:
            self._costs[call].observe(stored_bytes, seconds)

    def seconds_per_byte(self) -> float | None:
        """Of a byte that is written once and read once. While only one of them was seen, the other is taken to cost as
        much. None as long as too little was seen."""
        if self._calls < _FEWEST:
            return None
        known = [cost for line in self._costs.values() if (cost := line.per_unit()) is not None]
        return 2 * sum(known) / len(known) if known else None

    def may_pay(self, codec: PageCodec) -> bool:
        """Whether ``pays`` is to be asked, for which pages are brought into one piece: also where it is time to
        measure."""
        return self.seconds_per_byte() is not None and (self._is_old(codec.measured) or self._gains(codec.measured))

    def pays(self, codec: PageCodec, payload: memoryview) -> bool:
        """Whether pages of this codec are to be encoded now; measured with this one where it is time for that."""
        # One thread measures; the others go by what is known.
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
        """As body.py does it, with new memory and copies: they cost a third as much as the codec. Twice, since the
        first time pays for contexts."""
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
