"""``hicache-ext pin``, ``unpin``, ``pins``: pages that eviction spares. They may be used while servers run."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from hicache_ext.cli.inputs import (
    add_namespace_arguments,
    add_target,
    directories_of,
    parse_tokens,
    read_input,
    seed_of,
    targets,
)
from hicache_ext.cli.terminal import fitted, rough_span
from hicache_ext.cli.usage import describe, show
from hicache_ext.config import parse_duration, rounded_size
from hicache_ext.errors import ConfigError, HicacheExtError, StoreError
from hicache_ext.page.envelope import PAGE_HASH_LENGTH
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.page.transforms.sealing import SealKey, SealMode
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.manifest import layout_in, load_document
from hicache_ext.storage.tiers.file.names import IDENTITY_NAME
from hicache_ext.storage.tiers.file.pins import Pin, add_pin, read_pins, remove_pin


def configure_pin(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    _add_name(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tokens", metavar="FILE", help="the prompt's token ids: numbers, or a JSON list; - for stdin")
    what.add_argument("--keys", metavar="FILE", help="page hashes, 64 hex digits a line; - for stdin")
    parser.add_argument("--page-size", type=int, help="tokens per page; left out: that of the pages in the directory")
    add_namespace_arguments(parser)
    parser.add_argument("--for", dest="duration", metavar="DURATION", help="such as 7d; left out: until it is unpinned")
    describe(
        parser,
        run=_pin,
        examples=["hicache-ext pin hicache.yaml --name system-prompt --tokens prompt.json --for 30d"],
        problem="the directory is none of a file tier, or cannot be changed",
    )


def configure_unpin(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    _add_name(parser)
    describe(
        parser,
        run=_unpin,
        examples=["hicache-ext unpin hicache.yaml --name system-prompt"],
        problem="there is no such pin",
    )


def configure_pins(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    describe(parser, run=_pins, examples=["hicache-ext pins hicache.yaml"], problem="the directory cannot be read")


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="of the pin: letters, digits, '.', '_' and '-'")


def _pin(arguments: argparse.Namespace) -> int:
    directories = _directories(arguments.target)
    seconds = None if arguments.duration is None else parse_duration(arguments.duration, "--for")
    if arguments.keys is not None:
        hashes = _read_keys(arguments.keys)
    else:
        size = arguments.page_size or _page_size(directories)
        tokens, *others = parse_tokens(read_input(arguments.tokens, "--tokens"), "--tokens")
        if others:
            raise ConfigError("--tokens", f"{1 + len(others)} prompts, and a pin is of one")
        try:
            hashes = page_hashes(tokens, size, seed_of(arguments))
        except HicacheExtError as error:
            raise ConfigError("--tokens", str(error)) from None
        if not hashes:
            raise ConfigError("--tokens", f"{len(tokens)} tokens are no whole page of {size}")
    names = {directory: names_of(hashes) for directory, names_of in _names(arguments.target).items()}
    for directory in directories:
        try:
            add_pin(directory, arguments.name, names[directory], seconds)
        except OSError as error:
            raise StoreError(f"{str(directory)!r}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError("--keys", str(error)) from None
    document = {
        "name": arguments.name,
        "pages": len(hashes),
        "seconds": seconds,
        "directories": [str(directory) for directory in directories],
    }
    show(arguments, document, [f"{arguments.name}: {len(hashes)} pages pinned in {_listed(directories)}"])
    return 0


def _unpin(arguments: argparse.Namespace) -> int:
    directories = _directories(arguments.target)
    removed = [directory for directory in directories if remove_pin(directory, arguments.name)]
    if not removed:
        known = sorted({pin.name for directory in directories for pin in read_pins(directory)})
        print(f"no pin is named {arguments.name!r}; pins here: {', '.join(known) or 'none'}", file=sys.stderr)
        return 1
    document = {"name": arguments.name, "directories": [str(directory) for directory in removed]}
    show(arguments, document, [f"{arguments.name}: unpinned in {_listed(removed)}"])
    return 0


def _pins(arguments: argparse.Namespace) -> int:
    pins: dict[str, Pin] = {}
    present: dict[str, int] = {}
    for directory in _directories(arguments.target):
        with closing(open_inspector(directory)) as inspector:
            for pin in read_pins(directory):
                pins[pin.name] = pin
                present[pin.name] = present.get(pin.name, 0) + sum(inspector.occupied_by(pin.hashes))
    by_age = sorted(pins.values(), key=lambda pin: pin.created)
    document = [
        {
            "name": pin.name,
            "pages": len(pin.hashes),
            "bytes_on_disk": present[pin.name],
            "since": pin.created,
            "until": pin.until,
        }
        for pin in by_age
    ]
    rows = [("name", "pages", "on disk", "since", "for another")]
    for pin in by_age:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(pin.created))
        rows.append(
            (pin.name, str(len(pin.hashes)), rounded_size(present[pin.name]), since, _time_left(pin, time.time()))
        )
    show(arguments, document, fitted(rows))
    return 0


def _directories(target: str) -> list[Path]:
    """The directories of file tiers behind a configuration, or the one directory that was named."""
    directories = directories_of(target)
    for directory in directories:
        if layout_in(directory) is None:
            raise StoreError(f"{str(directory)!r} is no directory of a file tier: it has no hicache_ext.json")
    return directories


def _names(target: str) -> dict[Path, Callable[[Sequence[bytes]], list[bytes]]]:
    """For each directory the names under which pages with these hashes are stored. Raises ConfigError."""
    found: dict[Path, Callable[[Sequence[bytes]], list[bytes]]] = {}
    for one in targets(target, keys=True):
        seal = None if one.transforms is None else one.transforms.seal
        hiding = [] if seal is None or seal.mode is not SealMode.ENCRYPT else seal.keys
        for directory in one.directories:
            if one.tier is None and _holds_hidden_names(directory):
                problem = "pages here are encrypted, and their names hidden"
                raise ConfigError("CONFIG|DIRECTORY", problem, "the configuration file, which names the keys")
            found[directory] = functools.partial(_hidden, hiding) if hiding else list
    return found


def _hidden(keys: Sequence[SealKey], hashes: Sequence[bytes]) -> list[bytes]:
    words = np.frombuffer(b"".join(hashes), np.int64).reshape(len(hashes), -1)
    return [row.tobytes() for key in keys for row in key.hidden_hashes(words)]


def _holds_hidden_names(directory: Path) -> bool:
    for file in (directory / "identities").glob("*.json"):
        if IDENTITY_NAME.fullmatch(file.stem):
            document = load_document(directory, bytes.fromhex(file.stem)) or {}
            if document.get(STORED_AS, {}).get("seal") == SealMode.ENCRYPT.name.lower():
                return True
    return False


def _page_size(directories: Sequence[Path]) -> int:
    """The page size of all pages here, by the documents of their identities."""
    sizes: set[int] = set()
    for directory in directories:
        for file in (directory / "identities").glob("*.json"):
            if not IDENTITY_NAME.fullmatch(file.stem):
                continue
            document = load_document(directory, bytes.fromhex(file.stem)) or {}
            size = document.get("pool", {}).get("page_size")
            if isinstance(size, int) and size > 0:
                sizes.add(size)
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "none"
        raise ConfigError("--page-size", f"required: the directory tells of these page sizes: {found}")
    return sizes.pop()


def _read_keys(file: str) -> list[bytes]:
    hashes: list[bytes] = []
    for number, line in enumerate(read_input(file, "--keys").split(), start=1):
        try:
            page_hash = bytes.fromhex(line)
        except ValueError:
            page_hash = b""
        if len(page_hash) != PAGE_HASH_LENGTH:
            raise ConfigError("--keys", f"number {number} is no page hash", "64 hex digits each")
        hashes.append(page_hash)
    return hashes


def _time_left(pin: Pin, now: float) -> str:
    return "for good" if pin.until is None else rough_span(pin.until - now)


def _listed(directories: Sequence[Path]) -> str:
    return ", ".join(map(str, directories))
