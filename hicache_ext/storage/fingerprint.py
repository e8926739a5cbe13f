"""A digest of a model's weights that is quick to make and equal wherever equal files lie.

Two models served under one name must not share KV. Hashing 140 GB at every start is out of the question; the headers
of safetensors files plus a block from the start and the middle of every tensor tell fine-tunes, revisions and
quantisations of one architecture apart within a second or so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_SAMPLE = 4096
_SAMPLES_OF_PLAIN_FILE = 64
_MAX_SAFETENSORS_HEADER = 100_000_000
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


def fingerprint_of(model_path: str, revision: str | None = None) -> str:
    """32 hex digits for the model at ``model_path`` (a directory, or a name in the local hub cache); "" if unknown.

    Never raises: what cannot be read is logged and leaves the identity resting on name and revision.
    """
    directory = _directory_of(model_path, revision)
    if directory is None:
        return ""
    digest = hashlib.sha256(b"hicache_ext/fingerprint/1\0")
    try:
        config = directory / "config.json"
        if config.exists():
            digest.update(config.read_bytes())
        weights = sorted(path for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
        if not weights:
            return ""
        for path in weights:
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                for offset in _sample_offsets(path, file.fileno()):
                    digest.update(os.pread(file.fileno(), _SAMPLE, offset))
    except OSError as error:
        logger.warning("no fingerprint of the model in %s: %s", directory, error)
        return ""
    return digest.hexdigest()[:32]


def _sample_offsets(path: Path, fd: int) -> Iterator[int]:
    size = os.fstat(fd).st_size
    if path.suffix == ".safetensors":
        length_field = os.pread(fd, 8, 0)
        length = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else 0
        if 0 < length < min(size, _MAX_SAFETENSORS_HEADER):
            try:
                header = json.loads(os.pread(fd, length, 8))
                spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
            except (ValueError, KeyError, TypeError, AttributeError):
                spans = []
            if spans:
                yield from range(0, 8 + length, _SAMPLE)
                for begin, end in spans:
                    yield 8 + length + begin
                    yield 8 + length + (begin + end) // 2
                return
    step = max(_SAMPLE, size // _SAMPLES_OF_PLAIN_FILE)
    yield from range(0, size, step)


def _directory_of(model_path: str, revision: str | None) -> Path | None:
    directory = Path(model_path)
    if directory.is_dir():
        return directory
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - a missing package, a missing snapshot and a bad name all mean "unknown"
        logger.debug("no local snapshot of %s: %s", model_path, error)
        return None
