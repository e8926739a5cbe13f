"""The page hashes of one request, computed as a prefill node computes them.

A page hash chains: sha256(hash before || token ids of the page), the first one seeded from extra_key and cache_salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HashPages = Callable[[Sequence[int], str | None], list[str]]
"""Hashes of the whole pages of some tokens of a request; the second argument is the hash of the page before them."""


class PageChain:
    """Hashes of the pages 0, 1, 2, ... of a growing sequence of tokens. For one thread at a time."""

    def __init__(self, page_size: int, hash_pages: HashPages) -> None:
        """``hash_pages`` knows what the request's hashes are seeded from."""
        self.page_size = page_size
        self._hash_pages = hash_pages
        self._hashes: list[str] = []

    def __len__(self) -> int:
        """Pages hashed so far."""
        return len(self._hashes)

    def tokens_for(self, first_page: int, end_page: int) -> slice:
        """The tokens that the pages from ``first_page`` up to ``end_page`` are hashed from."""
        return slice(first_page * self.page_size, end_page * self.page_size)

    def pages_in(self, tokens: int) -> int:
        """Whole pages of a prompt of ``tokens`` tokens, as a prefill node stores it."""
        return tokens // self.page_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the next pages from exactly their tokens: ``tokens_for(len(self), ...)``."""
        pages = self.pages_in(len(tokens))
        if pages:
            whole = tokens[self.tokens_for(0, pages)]
            self._hashes += self._hash_pages(whole, self._hashes[-1] if self._hashes else None)

    def hashes(self, first_page: int, end_page: int) -> list[str]:
        """Hashes of pages already hashed."""
        if end_page > len(self._hashes):
            raise IndexError(f"{end_page} pages asked for, {len(self._hashes)} hashed")
        return self._hashes[first_page:end_page]
