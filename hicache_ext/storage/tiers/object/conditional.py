"""Whether a store creates an object only if there is none (``If-None-Match: *``), found out by trying.

The same trial shows whether its ETags are MD5 digests of the stored bytes, as those of S3 are (without SSE-KMS), and
what its clock says.

Some S3-compatible servers ignore the header. There a page is looked up before it is written, and two writers that look
at the same moment both write. That is harmless: both copies are the same page, whole, with a checksum.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from hicache_ext.storage.tiers.object.client import Failure, explain, is_md5_of
from hicache_ext.storage.tiers.object.requests import Requests

_ASK_AGAIN = 30.0
"""Seconds between trials while the store cannot be reached."""


class ConditionalCreate:
    """What is known about one store. Thread-safe."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._obstore = requests.obstore
        self._client = requests.client
        self._lock = threading.Lock()
        self._next_attempt = 0.0
        self.supported: bool | None = None
        """None while unknown: pages are then looked up before they are written, too."""
        self.etags_are_md5 = False
        self.clock_ahead = 0.0
        """Seconds by which the store's clock is ahead of this machine's; 0 where they agree as far as can be told."""

    def find_out(self) -> None:
        """Write an object twice and remove it. Raises what obstore raises."""
        name = f"probe/{secrets.token_hex(16)}"
        self._next_attempt = time.monotonic() + _ASK_AGAIN
        probe = b"hicache_ext"
        before = time.time()
        put = self._obstore.put(self._client, name, probe, mode="create", use_multipart=False)
        after = time.time()
        stamped = self._obstore.head(self._client, name)["last_modified"].timestamp()
        # The store's stamp has whole seconds.
        self.clock_ahead = min(0.0, stamped + 1 - before) + max(0.0, stamped - after)
        self.etags_are_md5 = is_md5_of(probe, put["e_tag"])
        supported = False
        try:
            self._obstore.put(self._client, name, b"hicache_ext, again", mode="create", use_multipart=False)
        except Exception as error:
            if explain(error).reason != "exists":
                raise
            supported = True
        finally:
            self._requests.delete([name])
        self.supported = supported

    def find_out_again(
        self, within: Callable[[Callable[[], Any], float], tuple[bool, Failure | None]], timeout: float
    ) -> None:
        """Try again now and then, for ``timeout`` seconds each, if the store could not be reached at start."""
        if self.supported is not None:
            return
        with self._lock:
            if time.monotonic() < self._next_attempt:
                return
            self._next_attempt = time.monotonic() + _ASK_AGAIN
        within(self.find_out, timeout)
