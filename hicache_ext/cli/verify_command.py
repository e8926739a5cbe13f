"""``hicache-ext verify``: read and check every page in a directory of the file tier. Servers may be using it."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hicache_ext.cli.directories import Trouble, opened
from hicache_ext.cli.inputs import add_target, targets
from hicache_ext.cli.stored_seals import StoredSeals, Verdict
from hicache_ext.cli.terminal import Progress
from hicache_ext.cli.usage import describe, show
from hicache_ext.page import envelope
from hicache_ext.page.transforms.forms import Transforms
from hicache_ext.storage.tiers.file.inspection import (
    Editor,
    Inspector,
    StoredPage,
    open_editor,
    reason_it_is_bad,
)
from hicache_ext.storage.tiers.file.manifest import load_document

_REMOVE_BATCH = 256
_GONE = "gone"


def configure(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--remove", action="store_true", help="remove the pages that are bad")
    describe(
        parser,
        run=_verify,
        examples=["hicache-ext verify /mnt/nvme0/hicache", "hicache-ext verify /mnt/nvme0/hicache --remove --json"],
        success="no bad page is left",
        problem="bad pages are there, or pages could not be looked at",
    )


@dataclass(slots=True)
class _Verified:
    """What was found in the directories so far."""

    good: int = 0
    evicted: int = 0
    not_looked_at: int = 0
    removed: int = 0
    seals_not_checked: int = 0
    """Of the good ones: sealed pages of which no keys are given, since no tier was named or it has no seal."""
    unsealed: int = 0
    """Whole pages without a seal, in a sealed tier: it does not serve them."""
    sealed_otherwise: int = 0
    """Whole pages in a sealed tier, sealed with another key or in another mode: it does not serve them."""
    bad_pages: list[dict[str, str | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Bad:
    key: bytes
    reason: str
    copy: bytes | None
    """Which copy it is (``envelope.page_seal``), where it is whole but for its seal."""


def _verify(arguments: argparse.Namespace) -> int:
    found = _Verified()
    trouble = Trouble()
    for target in targets(arguments.target, keys=True):
        for directory in target.directories:
            with trouble.noted():
                bad = _verify_directory(directory, found, target.transforms)
                if arguments.remove and bad:
                    with closing(open_editor(directory)) as editor:
                        found.removed += _remove(editor, bad)
    code = trouble.told()
    bad_count = len(found.bad_pages)
    told = f"{found.good} good, {bad_count} bad, {found.evicted} evicted meanwhile"
    reasons = Counter(page["reason"] for page in found.bad_pages).most_common()
    others = {
        "of the good ones are sealed: whole, but their keys are not given": found.seals_not_checked,
        "are whole and have no seal: this tier does not serve them": found.unsealed,
        "are whole and sealed with another key or in another mode: this tier does not serve them": (
            found.sealed_otherwise
        ),
    }
    lines = [
        told + (f", {found.not_looked_at} not looked at" if found.not_looked_at else ""),
        *(f"{count} {what}" for what, count in others.items() if count),
        *(f"  {count} x {reason}" for reason, count in reasons),
        *([f"{found.removed} removed"] if arguments.remove else []),
    ]
    show(arguments, {**asdict(found), "bad": bad_count}, lines)
    return 1 if found.not_looked_at or bad_count > found.removed else code


def _verify_directory(directory: Path, found: _Verified, transforms: Transforms | None) -> list[_Bad]:
    """Adds to ``found``; the bad pages."""
    bad = []
    seals = StoredSeals(directory, transforms)
    with closing(opened(directory)) as inspector, Progress("pages read") as bar:
        pages = list(inspector.pages())
        for number, page in enumerate(pages, start=1):
            bar.show(number, len(pages))
            try:
                seen = _look_at(inspector, page, seals)
            except OSError as error:
                found.not_looked_at += 1
                print(f"not looked at ({error.strerror}): page {page.key[16:].hex()}", file=sys.stderr)
                continue
            if isinstance(seen, _Bad):
                bad.append(seen)
                found.bad_pages.append(_bad_page(directory, page, seen.reason))
                model = found.bad_pages[-1]["model"] or "unknown"
                print(f"bad ({seen.reason}): page {page.key[16:].hex()} of {model}")
                continue
            found.evicted += seen == _GONE
            found.good += seen in (Verdict.GOOD, Verdict.NOT_CHECKED)
            found.seals_not_checked += seen is Verdict.NOT_CHECKED
            found.unsealed += seen is Verdict.UNSEALED
            found.sealed_otherwise += seen is Verdict.SEALED_OTHERWISE
    return bad


def _bad_page(directory: Path, page: StoredPage, reason: str) -> dict[str, str | None]:
    model = (load_document(directory, page.identity) or {}).get("model", {}).get("id")
    return {"hash": page.key[16:].hex(), "identity": page.identity.hex(), "model": model, "reason": reason}


def _look_at(inspector: Inspector, page: StoredPage, seals: StoredSeals) -> Verdict | _Bad | str:
    """What a page is, or ``_GONE``. Raises OSError where that is not known."""
    bad = None
    # Twice: a server may have written there during the first read.
    for _ in range(2):
        stored = inspector.read(page)
        if stored is None:
            return _GONE
        reason = reason_it_is_bad(page.key, stored)
        if reason is not None:
            bad = _Bad(page.key, reason, None)
            continue
        header = envelope.decode_header(stored.content)
        payload = memoryview(stored.content)[header.header_length :]
        seen = seals.verdict(page.key, payload)
        if isinstance(seen, Verdict):
            return seen
        bad = _Bad(page.key, seen, envelope.page_seal(page.key, payload.nbytes, [payload]))
    assert bad is not None
    return bad


def _remove(editor: Editor, bad: list[_Bad]) -> int:
    """How many were there. Of whole pages that copy alone which was seen."""
    removed = editor.remove_copies({page.key: page.copy for page in bad if page.copy is not None})
    others = [page.key for page in bad if page.copy is None]
    for first in range(0, len(others), _REMOVE_BATCH):
        removed += editor.remove(others[first : first + _REMOVE_BATCH])
    return removed
