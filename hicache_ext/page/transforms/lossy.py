"""Pages as half of their bytes and less, not exactly: ``codec: int8`` and ``codec: fp8``.

Every row of a page, the numbers of one head of one token in one layer, is quantised (numbers.py). An encoded page is
``head || scales || rest || frame``, then zeros up to the room. The head has 8 bytes, little-endian: method (1), version
(1), zeros (2), bytes of the frame (4). The codes of int8 are one Zstandard frame. Those of fp8 are two planes
(numbers.py), of which the frame has ``top``. Method 0 has the codes as they are, where a frame makes them no shorter.

Only pools of keys and values are quantised. States of linear attention, latents of MLA, indexes and numbers of 8 bits
are encoded without loss; so are pages with an infinity, a NaN or a number of 2**100 or more stored as they are.

What was restored is not what was computed, and all that is computed from it differs a little, too. So a server with a
lossy tier has identities of its own (``lossy_fact``): no exact server meets its pages, in whatever tier. And pages of
identities that do not say so are not quantised, whoever brings them to a lossy tier: a command that copies them there
and back leaves them exact.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache_ext.errors import FormatError
from hicache_ext.page.transforms.codec import PageCodec
from hicache_ext.page.transforms.lossless import LosslessCodec, frame_of, plane_in
from hicache_ext.page.transforms.numbers import KINDS, SPLITS, Code, Rows
from hicache_ext.runtime.whole_file import json_in

_HEAD = struct.Struct("<BBHI")
_VERSION = 1
_PLAIN, _FRAMED = 0, 1

CODES = {Code.INT8: 2, Code.FP8: 3}
"""In the header of a page (codec.py)."""
_NAMES = {number: code.value for code, number in CODES.items()}
_SMALLEST = 2048
"""Bytes of a page; see lossless.py."""
_SHORTEST_ROW = 16
"""Numbers; a scale takes as many bytes as two of their codes."""
_PARTS = 128
_ROOMS = {Code.INT8: (104, 110, 115, 128), Code.FP8: (109, 112, 114, 128)}
"""In 128ths of the codes; the last one takes every page. Real pages: docs/codecs.md."""

_KINDS_OF_POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
_HEADS = ("head_dim", "v_head_dim")
_FACT = "codecs"


@dataclass(frozen=True, slots=True)
class LossyCodec:
    """``codec: int8`` or ``fp8``. Raises MissingPackageError without the package ``zstandard``."""

    code: Code

    def __post_init__(self) -> None:
        LosslessCodec()

    @property
    def label(self) -> bytes:
        return b"%s-%d" % (self.code.value.encode(), _VERSION)

    def for_pages(self, document: Mapping[str, Any], payload: int) -> PageCodec | None:
        """Without loss for what is not quantised, and for identities that do not say that they are lossy: whoever asks
        for their pages wants them exact, wherever they were in between. None for pages that are too small."""
        rows = rows_of(document, self.code)
        if (
            self.code.value not in _said_codecs(document)
            or isinstance(rows, str)
            or payload < _SMALLEST
            or payload % (2 * rows.words * rows.length)
        ):
            return LosslessCodec().for_pages(document, payload)
        return LossyPages(payload, rows)


def lossy_name(pages: PageCodec | None) -> str | None:
    """Of the codec of which pages come back otherwise than they were; None for others."""
    return None if pages is None else _NAMES.get(pages.code)


def rows_of(document: Mapping[str, Any], code: Code) -> Rows | str:
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
    return [name for name in _NAMES.values() if isinstance(said, list) and _said(name) in said]


class LossyPages:
    """The codec for pages of one length (codec.py)."""

    def __init__(self, payload: int, rows: Rows) -> None:
        self._payload = payload
        self._rows = rows
        self._codes = payload // (2 * rows.words)
        self._scales = self._codes // rows.length
        self._begin = _HEAD.size + 2 * self._scales
        self._split = SPLITS[8] if rows.code is Code.FP8 else None
        self._top, self._rest = (self._codes, 0) if self._split is None else self._split.planes(self._codes)
        self.rooms = tuple(self._begin + self._codes * part // _PARTS for part in _ROOMS[rows.code])
        self.code = CODES[rows.code]

    def pays(self) -> bool:
        return True

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        page, target = np.frombuffer(payload, np.uint8), np.frombuffer(encoded, np.uint8)
        if page.size != self._payload:
            raise ValueError(f"a page of {page.size} bytes in place of {self._payload}")
        scales, codes = np.empty(self._scales, np.uint16), np.empty(self._codes, np.uint8)
        if not self._rows.quantise(page.view(np.uint16), scales, codes):
            return 0
        np.copyto(target[_HEAD.size : self._begin], scales.view(np.uint8))
        begin = self._begin + self._rest
        top = codes
        if self._split is not None:
            top = np.empty(self._top, np.uint8)
            self._split.split(codes, top, target[self._begin : begin])
        frame = np.frombuffer(frame_of(top), np.uint8)
        if frame.size < self._top:
            np.copyto(target[begin : begin + frame.size], frame)
            _HEAD.pack_into(encoded, 0, _FRAMED, _VERSION, 0, frame.size)
            return begin + frame.size
        np.copyto(target[self._begin : self._begin + codes.size], codes)
        _HEAD.pack_into(encoded, 0, _PLAIN, _VERSION, 0, 0)
        return self._begin + codes.size

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        page = np.frombuffer(payload, np.uint8)
        if page.size != self._payload or len(encoded) < self._begin + self._rest:
            raise FormatError("encoded_length", f"{len(encoded)} bytes for {page.size}")
        method, version, zeros, length = _HEAD.unpack_from(encoded)
        if version != _VERSION or zeros:
            raise FormatError("encoding", f"version {version}")
        stored = np.frombuffer(encoded, np.uint8)
        scales = stored[_HEAD.size : self._begin].copy().view(np.uint16)
        codes = self._codes_in(stored, encoded, method, length)
        if not self._rows.restore(scales, codes, page.view(np.uint16)):
            raise FormatError("encoding", "no scales")

    def _codes_in(self, stored: Any, encoded: memoryview, method: int, length: int) -> Any:
        begin = self._begin + self._rest
        if method == _PLAIN and not length and stored.size >= self._begin + self._codes:
            return stored[self._begin : self._begin + self._codes]
        if method != _FRAMED or length > stored.size - begin:
            raise FormatError("encoding", f"method {method}, a frame of {length} bytes")
        top = np.frombuffer(plane_in(encoded[begin : begin + length], self._top), np.uint8)
        if self._split is None:
            return top
        codes = np.empty(self._codes, np.uint8)
        self._split.join(top, stored[self._begin : begin], codes)
        return codes
