"""The obstore client of a tier, the requests made with it, and the classification of its errors for metrics.

obstore is imported when the first object tier is opened. Its messages repeat entire server replies; only a reason of
one or two words and the HTTP status are extracted, so that no server text gets into a log.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import mmap
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hicache_ext.config import Secret
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.page.pack import PACK_BYTES
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.threads import Call, ThreadPool
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.object.config import ObjectTierConfig

logger = logging.getLogger(__name__)

RETRIES = 3
_FIRST_PAUSE = timedelta(milliseconds=50)
_LONGEST_PAUSE = timedelta(seconds=1)
_CONNECT_TIMEOUT = 2.0
"""Seconds; a reachable store takes less, and an unreachable one must not use up a call's time."""
KEYS_LAST = timedelta(seconds=30)
"""How long the keys of an S3 or Azure tier are used before their files are read again."""
_RENEWED_BEFORE = timedelta(minutes=5)
"""How long before the keys expire obstore requests new ones."""

_SSE = {"s3": "AES256", "kms": "aws:kms", "dsse": "aws:kms:dsse", "customer": "sse-c"}


def make_client(name: str, tier: ObjectTierConfig) -> Any:
    """Create an obstore store whose root is the tier's prefix, without making a request.

    Raises StoreSetupError, and ConfigError for a secret that cannot be read.
    """
    stores: Any = importlib.import_module("obstore.store")
    if tier.scheme == "file":
        directory = Path("/", tier.prefix)
        try:
            # The library creates files with the umask's mode; this directory's mode keeps other users out.
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            return stores.LocalStore(directory)
        except Exception as error:  # noqa: BLE001 - the library may turn an OSError into anything
            raise StoreSetupError(name, f"directory '/{tier.prefix}' cannot be used ({type(error).__name__})") from None
    options: dict[str, Any] = {
        "prefix": tier.prefix or None,
        "client_options": _client_options(name, tier),
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=tier.longest_call),
            "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
        },
    }
    make: Callable[..., Any]
    if tier.scheme == "s3":
        make = stores.S3Store
        virtual = tier.addressing == "virtual" or (tier.addressing == "auto" and tier.endpoint is None)
        options |= _given(
            endpoint=_s3_endpoint(tier, virtual),
            region=tier.region or ("us-east-1" if tier.endpoint else None),
        )
        if tier.access_key is not None:
            keys = {
                "access_key_id": tier.access_key,
                "secret_access_key": tier.secret_key,
                "token": tier.session_token,
            }
            options["credential_provider"] = _keys_of(name, keys)
        options["virtual_hosted_style_request"] = virtual
        options |= _given(
            server_side_encryption=None if tier.sse is None else _SSE[tier.sse],
            sse_kms_key_id=tier.sse_kms_key,
            sse_customer_key_base64=_revealed(tier.sse_key),
        )
        # Saves a request per page: object tags are never used.
        options["disable_tagging"] = True
        # Not every server supports bulk deletion, and obstore sends many requests concurrently.
        options["disable_bulk_delete"] = True
    elif tier.scheme == "gs":
        make = stores.GCSStore
        options |= _given(service_account_key=_revealed(tier.service_account), base_url=tier.endpoint)
    else:
        make = stores.AzureStore
        options |= _given(account_name=tier.account, endpoint=tier.endpoint)
        if tier.account_key is not None:
            options["credential_provider"] = _keys_of(name, {"access_key": tier.account_key})
        elif tier.sas_token is not None:
            options["credential_provider"] = _keys_of(name, {"sas_token": tier.sas_token})
    try:
        return make(tier.bucket, **options)
    except Exception as error:  # noqa: BLE001 - the library may raise anything for wrong settings
        # "from None": the library's message may repeat secrets from the settings.
        raise StoreSetupError(
            name, f"the client of {tier.url} cannot be made ({type(error).__name__})", ["check region and credentials"]
        ) from None


def _keys_of(name: str, secrets: Mapping[str, Secret | None]) -> Callable[[], dict[str, Any]]:
    """Return a credential provider, which obstore calls on its own threads so that changed key files take effect.
    ``secrets`` maps obstore's names to secrets.

    If keys cannot be read while the server runs, the previous ones are kept: a file may be in the middle of a rotation.
    Raises ConfigError for a secret that cannot be read at startup.
    """

    def read() -> dict[str, str | None]:
        found = {key: _revealed(secret) for key, secret in secrets.items()}
        # A signature is usually copied along with the question mark that precedes it in a URL.
        return {key: value.lstrip("?") if key == "sas_token" and value else value for key, value in found.items()}

    latest = read()

    def keys() -> dict[str, Any]:
        nonlocal latest
        try:
            latest = read()
        except ConfigError as error:
            logger.warning("tier %s: %s; going on with the keys that it had", name, error)
        return {**latest, "expires_at": datetime.now(UTC) + _RENEWED_BEFORE + KEYS_LAST}

    return keys


def _s3_endpoint(tier: ObjectTierConfig, virtual: bool) -> str | None:
    """Return the endpoint as obstore expects it: with virtual-hosted addressing it includes the bucket."""
    if tier.endpoint is None or not virtual:
        return tier.endpoint
    scheme, _, host = tier.endpoint.partition("://")
    return f"{scheme}://{tier.bucket}.{host}"


def _client_options(name: str, tier: ObjectTierConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=tier.longest_call),
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT, tier.longest_call)),
        "allow_http": tier.allow_http,
    }
    if tier.ca_file:
        try:
            options["root_certificate"] = Path(tier.ca_file).read_bytes()
        except OSError as error:
            raise StoreSetupError(name, f"ca_file {tier.ca_file!r}: {error.strerror or error}") from error
    return options


def _revealed(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _given(**values: str | None) -> dict[str, str]:
    return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason for a failed request, in words for metrics and findings."""

    reason: str
    """absent, no_bucket, denied, slow_down, timeout, connection, http_5xx, http_4xx, other."""
    status: int | None = None
    kind: str = ""
    """Name of the library's exception class."""

    def __str__(self) -> str:
        words = _SENTENCES.get(self.reason, f"the request failed ({self.kind})")
        return f"{words} (HTTP {self.status})" if self.status else words


_SENTENCES = {
    "absent": "no such object",
    "no_bucket": "the bucket does not exist",
    "denied": "the store refuses these credentials",
    "slow_down": "the store asks for fewer requests",
    "timeout": "no answer in time",
    "connection": "the server cannot be reached",
    "http_5xx": "the server failed",
    "http_4xx": "the server refused the request",
    "cut": "the answer was cut short",
}

_STATUS = re.compile(r"status code: (\d{3})")
_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("timeout", ("timed out", "TimedOut", "operation timed out")),
    ("connection", ("error trying to connect", "Connection refused", "Connect", "dns error", "ConnectionReset")),
    ("cut", ("IncompleteMessage", "end of file before message", "error decoding response body", "UnexpectedEof")),
    ("connection", ("connection closed", "connection reset", "error sending request")),
)


def explain(error: BaseException) -> Failure:
    """Classify an error raised by obstore."""
    kind, text = type(error).__name__, str(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    if isinstance(error, FileNotFoundError):
        return Failure("no_bucket" if "NoSuchBucket" in text else "absent", status, kind)
    if kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError"):
        return Failure("denied", status, kind)
    if "SlowDown" in text or status in (429, 503):
        return Failure("slow_down", status, kind)
    if status is not None:
        return Failure("http_5xx" if status >= 500 else "http_4xx", status, kind)
    for reason, words in _TEXTS:
        if any(word in text for word in words):
            return Failure(reason, None, kind)
    return Failure("other", None, kind)


def begins_behind_the_end(error: BaseException) -> bool:
    """Return whether the requested range starts after the last byte of the object."""
    text = str(error)
    return any(word in text for word in ("status code: 416", "StartTooLarge", "InvalidRange"))


def is_md5_of(data: bytes | memoryview, etag: str | None) -> bool:
    return etag is not None and etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


# -- requests ----------------------------------------------------------------------------------------------------------

_NO_ANSWER = frozenset({"connection", "timeout", "no_bucket"})
"""Failures that mean the store does not answer at all, unlike one that refuses a kind of request."""
_STREAMED = 1 << 18
"""Minimum bytes per chunk of a streamed reply."""
_PROBES = "probe"

Piece = Callable[[Call[Any]], Any]
"""One request of a call."""


class Requests:
    """Makes the requests of one tier on its own threads within a deadline, and counts failures by reason.

    Threads: any. Methods raise obstore's errors unless stated otherwise.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        count: Callable[[Failure], object],
        *,
        at_once: int,
        timeout: float,
    ) -> None:
        """``connect`` creates a client; ``count`` is called with each failure. Raises StoreSetupError if threads cannot
        be started."""
        self.name = name
        self.obstore: Any = importlib.import_module("obstore")
        self._connect = connect
        self.client = connect()
        self.count = count
        self.at_once = at_once
        self.timeout = timeout
        self.reached = False
        """Whether the store answered the last completed request."""
        self.etags_are_md5 = False
        """Whether ETags are MD5 digests of the stored bytes, as in S3 (without SSE-KMS)."""
        self.doing = ""
        """The step that ``find_out`` was performing when it failed, with the permission needed for it."""
        self.clock_ahead = 0.0
        """Seconds by which the store's clock is ahead of this machine's; 0 if they agree within the precision."""
        try:
            self.threads = ThreadPool(f"hicache-{name}", at_once)
        except RuntimeError as error:
            raise StoreSetupError(name, f"no threads for {at_once} requests at once ({error})") from error
        self._thread_local = threading.local()

    def deadline(self) -> float:
        """Return the deadline of the current call, by time.monotonic()."""
        return call_deadline(self.timeout)

    def now(self) -> float:
        """Return seconds since 1970 by the store's clock."""
        return time.time() + self.clock_ahead

    # -- calls and failures ------------------------------------------------------------------------------------------

    def share(self, pieces: Sequence[Piece], deadline: float) -> tuple[list[Any], bool]:
        """Run all pieces, in parallel on all threads; return their results and whether all finished in time."""
        return self.threads.share(
            len(pieces), lambda position, call: pieces[position](call), deadline - time.monotonic()
        )

    def trying(self, request: Callable[[], object], note: Callable[[Any], object] = lambda result: None) -> Piece:
        """Return a piece that returns whether ``request`` succeeded and calls ``note`` with a failure's GetResult."""

        def make(call: Call[Any]) -> bool:
            try:
                request()
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                note(self.failed(error, call, GetResult))
                return False
            return True

        return make

    def within(self, request: Callable[[], Any], timeout: float | None = None) -> Failure | None:
        """Make a request on a thread of the store; return its failure, or None."""

        def make(_: int, call: Call[Failure]) -> Failure | None:
            try:
                request()
            except Exception as error:  # noqa: BLE001 - as above
                return self.explained(error)
            self.reached = True
            return None

        (failure,), done = self.threads.share(1, make, self.timeout if timeout is None else timeout)
        if not done:
            self.reached = False
        return failure if done else Failure("timeout")

    def explained(self, error: BaseException) -> Failure:
        """Classify a request's error and update ``reached``."""
        failure = explain(error)
        self.reached = failure.reason not in _NO_ANSWER
        return failure

    def failed(self, error: BaseException, call: Call[Any], results: type[GetResult] | type[SetResult]) -> Any:
        """Count a failed request; return TIMEOUT or ERROR of ``results``. If the server is unreachable or denies
        access, the call ends: its other requests would fail, too."""
        failure = self.explained(error)
        self.count(failure)
        logger.debug("tier %s: %s", self.name, failure)
        if failure.reason in ("connection", "denied"):
            call.stop()
        return results.TIMEOUT if failure.reason == "timeout" else results.ERROR

    # -- objects -----------------------------------------------------------------------------------------------------

    def body(self, reply: Any, most: int) -> memoryview:
        """Return the body of a reply. Stops once more than ``most`` bytes have come: the length that a server claims is
        not trusted, and obstore aborts the process if it lacks memory for it. Valid until this thread's next request:
        the buffer is reused, because page faults of new memory would cost as much as the rest of a request."""
        if isinstance(self.client, self.obstore.store.LocalStore):
            return memoryview(reply.bytes())
        memory: mmap.mmap | None = getattr(self._thread_local, "memory", None)
        if memory is None or len(memory) <= most:
            memory = mmap.mmap(-1, max(most, _STREAMED) + 1)
            if most <= PACK_BYTES:
                self._thread_local.memory = memory
        whole, filled = memoryview(memory), 0
        # In small chunks, since assembling each one holds the GIL.
        for piece in reply.stream(min_chunk_size=_STREAMED):
            part = memoryview(piece)[: most + 1 - filled]
            whole[filled : filled + len(part)] = part
            filled += len(part)
            if filled > most:
                break
        return whole[:filled]

    def part(self, name: str, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end) of an object."""
        return self.body(self.obstore.get(self.client, name, options={"range": (begin, end)}), end - begin)

    def put(self, name: str, body: bytes | memoryview) -> Any:
        """Write an object; return the store's reply."""
        put = self.obstore.put(self.client, name, body, use_multipart=False)
        self.reached = True
        return put

    def listed(self, prefix: str, **options: Any) -> Any:
        """Iterate over chunks of the names and metadata of the objects below a prefix."""
        return self.obstore.list(self.client, prefix, **options)

    def size_of(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist."""
        try:
            size = int(self.obstore.head(self.client, name)["size"])
        except FileNotFoundError as error:
            if explain(error).reason != "absent":
                raise
            size = None
        self.reached = True
        return size

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, ignoring missing ones."""
        try:
            self.obstore.delete(self.client, list(names))
        except FileNotFoundError:
            # All stores except S3 fail at the first missing object.
            for name in names:
                with suppress(FileNotFoundError):
                    self.obstore.delete(self.client, name)

    # -- what the store can do ---------------------------------------------------------------------------------------

    def find_out(self) -> None:
        """Perform the steps of serving: write an object, look it up, list it, read it through a new client without
        cached state, and remove it. Sets ``clock_ahead`` and ``etags_are_md5``; ``doing`` is the current step.

        If the store refuses writes for now (it is full or busy), the remaining steps are still performed.
        """
        name = f"{_PROBES}/{secrets.token_hex(16)}"
        probe = b"hicache_ext"
        # First, since a user that may write but not delete would leave an object behind each time.
        self.doing = "remove objects (s3:DeleteObject)"
        self.delete([name])
        self.doing = "write objects (s3:PutObject)"
        before, put, unwritten = time.time(), None, None
        try:
            put = self.put(name, probe)
        except Exception as error:
            unwritten = explain(error)
            if unwritten.reason in ("denied", "no_bucket"):
                raise
        after = time.time()
        try:
            self.doing = "look objects up (s3:GetObject)"
            found: Any = self.obstore.head(self.client, name) if put else self.size_of(name)
            self.look_into_listings(name if put else "")
            self.doing = "read objects (s3:GetObject)"
            with nullcontext() if put else suppress(FileNotFoundError):
                if self.body(self.obstore.get(self._connect(), name), len(probe)) != probe:
                    raise OSError("what was written is read otherwise")
        finally:
            # A write without a reply may still have succeeded.
            with nullcontext() if put else suppress(Exception):
                self.delete([name])
        if put:
            # The store's timestamp has a precision of whole seconds.
            stamped = found["last_modified"].timestamp()
            self.clock_ahead = min(0.0, stamped + 1 - before) + max(0.0, stamped - after)
            self.etags_are_md5 = is_md5_of(probe, put["e_tag"])
        else:
            logger.warning("tier %s: it takes no writes now (%s); what it has is read", self.name, unwritten)
        self.doing = ""

    def look_into_listings(self, name: str = "") -> None:
        """List objects. Raises OSError if ``name`` is given but not listed."""
        self.doing = "list objects (s3:ListBucket)"
        for listed in self.listed(_PROBES):
            if not name or any(entry["path"] == name for entry in listed):
                return
        if name:
            raise OSError("a listing does not show what was written")
