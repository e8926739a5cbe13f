"""The forms of the pages of each identity, and in which of them pages were seen. Threads: any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms.forms import Form, Forms, Transforms
from hicache_ext.storage.contract.store import PageKeys, identities_of

_MOST_REMEMBERED = 1 << 16
_IDENTITY_WORDS = IDENTITY_LENGTH // 8


class KnownForms:
    """Replaced as a whole where keys change."""

    def __init__(self, transforms: Transforms, documents: Mapping[bytes, Mapping[str, Any]]) -> None:
        """``documents``: of the identities, by digest; grows."""
        self.transforms = transforms
        self._documents = documents
        self._forms: dict[bytes, Forms] = {}
        self._seen: dict[bytes, int] = {}

    def forms(self, identity: bytes) -> Forms:
        known = self._forms.get(identity)
        if known is None:
            known = self.transforms.forms(identity, self._documents.get(identity))
            if len(self._forms) >= _MOST_REMEMBERED:
                self._forms.clear()
            self._forms[identity] = known
        return known

    def forget(self, identity: bytes) -> None:
        """Its document has come."""
        self._forms.pop(identity, None)

    def remember(self, keys: PageKeys, found: Sequence[int | None]) -> None:
        """In which form, a place among all, each page is there."""
        if len(self._seen) + len(keys) > _MOST_REMEMBERED:
            self._seen.clear()
        self._seen.update((key, form) for key, form in zip(keys, found, strict=True) if form is not None)

    def remembered(self, keys: PageKeys) -> list[int | None]:
        """Each is told once: what was seen may be gone."""
        return [self._seen.pop(key, None) for key in keys]


def stored_keys(form: Form, keys: PageKeys) -> PageKeys:
    """The keys under which these pages are stored in this form."""
    stored = keys.under(form.identity)
    if not form.hides:
        return stored
    assert form.key is not None
    words = stored.words.copy()
    words[:, _IDENTITY_WORDS:] = form.key.hidden_hashes(keys.words[:, _IDENTITY_WORDS:])
    return PageKeys(form.identity, words)


def by_identity(keys: Sequence[bytes]) -> Iterator[tuple[Sequence[int], PageKeys]]:
    """The pages of each identity: their positions, and their keys."""
    if isinstance(keys, PageKeys):
        if len(keys):
            yield range(len(keys)), keys
        return
    identities = identities_of(keys)
    for identity in identities:
        positions: Sequence[int] = range(len(keys))
        if len(identities) > 1:
            positions = [position for position in positions if keys[position].startswith(identity)]
        hashes = b"".join([keys[position][IDENTITY_LENGTH:] for position in positions])
        yield positions, PageKeys.of_joined(identity, hashes)
