"""What tools make of the seal of a stored page, beside the tier that stored it.

What a page says of its seal counts for nothing: who writes into a directory also writes that. Which seal a page is to
have follows from its name. Names follow from the tier's keys (page/transforms/forms.py); where no keys are given, from
the documents of the directory, which others may have written, too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_ext.errors import FormatError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms import header as headers
from hicache_ext.page.transforms.body import is_sealed_with, reason_it_is_not_sealed
from hicache_ext.page.transforms.forms import STORED_AS, Form, Transforms
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.tiers.file.manifest import load_document
from hicache_ext.storage.tiers.file.names import IDENTITY_NAME


class Verdict(enum.Enum):
    """On a page that is whole."""

    GOOD = enum.auto()
    NOT_CHECKED = enum.auto()
    """It is sealed, and no keys are given."""
    UNSEALED = enum.auto()
    """It has no seal, and is in a sealed tier."""
    SEALED_OTHERWISE = enum.auto()
    """With another key or in another mode than those of its tier."""


class StoredSeals:
    """Those in one directory. ``transforms``: of the tier that it belongs to; None without one, or without any."""

    def __init__(self, directory: Path, transforms: Transforms | None) -> None:
        self._directory = directory
        self._transforms = transforms
        self._seal = None if transforms is None else transforms.seal
        self._forms: dict[bytes, Form] = {}
        if transforms is not None and transforms.seal is not None:
            for identity, document in self._identities().items():
                self._forms |= {form.identity: form for form in transforms.forms(identity, document).all}

    def verdict(self, key: bytes, payload: memoryview) -> Verdict | str:
        """What the page ``key`` is, whose checksum fits, or the reason why it is bad."""
        if self._seal is None:
            return self._by_its_document(key, payload)
        form = self._forms.get(key[:IDENTITY_LENGTH])
        if form is not None:
            return reason_it_is_not_sealed(payload, key, form) or Verdict.GOOD
        # A name that no known identity has: of another key, mode or codec; or its document is lost.
        if any(is_sealed_with(payload, key, of_tier, self._seal.mode) for of_tier in self._seal.keys):
            return Verdict.GOOD
        return Verdict.SEALED_OTHERWISE if _says_that_it_is_sealed(payload) else Verdict.UNSEALED

    def _by_its_document(self, key: bytes, payload: memoryview) -> Verdict | str:
        stored_as = (load_document(self._directory, key[:IDENTITY_LENGTH]) or {}).get(STORED_AS)
        if not isinstance(stored_as, dict):
            return Verdict.GOOD
        try:
            header = headers.decode(payload)
        except FormatError as error:
            return error.reason
        if stored_as.get("seal") is None and not header.seal:
            return Verdict.GOOD
        if not header.seal:
            return "unsealed"
        mode = SealMode(header.seal).name.lower() if header.seal in tuple(SealMode) else ""
        if stored_as.get("seal") != mode:
            return "seal_form"
        return Verdict.NOT_CHECKED if stored_as.get("key") == header.key_id.decode("ascii", "replace") else "seal_key"

    def _identities(self) -> dict[bytes, Mapping[str, Any]]:
        """Those of which the directory may have pages in any form, with their documents."""
        found: dict[bytes, Mapping[str, Any]] = {}
        for file in (self._directory / "identities").glob("*.json"):
            if not IDENTITY_NAME.fullmatch(file.stem):
                continue
            digest = bytes.fromhex(file.stem)
            document = load_document(self._directory, digest)
            if document is None:
                continue
            stored_as = document.get(STORED_AS)
            of = stored_as.get("of") if isinstance(stored_as, dict) else None
            if isinstance(of, str) and IDENTITY_NAME.fullmatch(of):
                found.setdefault(bytes.fromhex(of), document)
            found[digest] = document
        return found


def _says_that_it_is_sealed(payload: memoryview) -> bool:
    try:
        return headers.decode(payload).seal != 0
    except FormatError:
        return False
