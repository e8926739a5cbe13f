"""The obstore client of a tier: made from its configuration; its errors as reasons that can be counted.

obstore is imported when the first object tier is opened. Its messages repeat whole answers of servers. Only a reason of
one or two words and an HTTP status are taken from them, so that no text of a server gets into a log.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hicache_ext.config import Secret
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.packages import how_to_install
from hicache_ext.storage.tiers.object.config import ObjectTierConfig

logger = logging.getLogger(__name__)

RETRIES = 3
_FIRST_PAUSE = timedelta(milliseconds=50)
_LONGEST_PAUSE = timedelta(seconds=1)
_CONNECT_TIMEOUT = 2.0
"""Seconds; a store in reach takes less, and one that is gone must not use up a call's time."""
KEYS_LAST = timedelta(seconds=30)
"""How long the keys of an S3 or Azure tier are used before their files are read again."""
_RENEWED_BEFORE = timedelta(minutes=5)
"""obstore asks for other keys so long before those that it has expire."""

_SSE = {"s3": "AES256", "kms": "aws:kms", "dsse": "aws:kms:dsse", "customer": "sse-c"}


def import_obstore(name: str) -> Any:
    """The module. Raises StoreSetupError with the way to install it."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        problem = f"the package obstore cannot be imported ({error})"
        raise StoreSetupError(name, problem, [how_to_install("obstore")]) from error
    return obstore


def make_client(name: str, tier: ObjectTierConfig, *, deletes_many: bool = True) -> Any:
    """An obstore store whose root is the tier's prefix. Makes no request. ``deletes_many``: S3, by one request.

    Raises StoreSetupError, ConfigError for a secret that cannot be read.
    """
    stores = import_obstore(name).store
    if tier.scheme == "file":
        directory = Path("/", tier.prefix)
        try:
            # The library's files have the mode of the umask; this directory keeps others out.
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            return stores.LocalStore(directory)
        except Exception as error:  # noqa: BLE001 - whatever the library makes of an OSError
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
            options["credential_provider"] = _Keys(name, keys)
        options["virtual_hosted_style_request"] = virtual
        options |= _given(
            server_side_encryption=None if tier.sse is None else _SSE[tier.sse],
            sse_kms_key_id=tier.sse_kms_key,
            sse_customer_key_base64=_revealed(tier.sse_key),
        )
        # Saves a request per page: object tags are never used.
        options["disable_tagging"] = True
        options["disable_bulk_delete"] = not deletes_many
    elif tier.scheme == "gs":
        make = stores.GCSStore
        options |= _given(service_account_key=_revealed(tier.service_account), base_url=tier.endpoint)
    else:
        make = stores.AzureStore
        options |= _given(account_name=tier.account, endpoint=tier.endpoint)
        if tier.account_key is not None:
            options["credential_provider"] = _Keys(name, {"access_key": tier.account_key})
        elif tier.sas_token is not None:
            options["credential_provider"] = _Keys(name, {"sas_token": tier.sas_token})
    try:
        return make(tier.bucket, **options)
    except Exception as error:  # noqa: BLE001 - whatever the library makes of wrong settings
        # "from None": the library's message may repeat what it was given.
        raise StoreSetupError(
            name, f"the client of {tier.url} cannot be made ({type(error).__name__})", ["check region and credentials"]
        ) from None


class _Keys:
    """The keys of a tier, for obstore to ask for, on threads of its own: those of a file may be others tomorrow.

    Keys that cannot be read while a server runs are those that it had: a file may be being exchanged.
    """

    def __init__(self, name: str, secrets: Mapping[str, Secret | None]) -> None:
        """``secrets`` by obstore's names. Raises ConfigError for a secret that cannot be read."""
        self._name = name
        self._secrets = secrets
        self._keys = self._read()

    def __call__(self) -> dict[str, Any]:
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.warning("tier %s: %s; going on with the keys that it had", self._name, error)
        return {**self._keys, "expires_at": datetime.now(UTC) + _RENEWED_BEFORE + KEYS_LAST}

    def _read(self) -> dict[str, str | None]:
        # A signature is mostly copied with the question mark of the address that it stood in.
        return {
            key: value.lstrip("?") if key == "sas_token" and value else value
            for key, value in ((key, _revealed(secret)) for key, secret in self._secrets.items())
        }


def _s3_endpoint(tier: ObjectTierConfig, virtual: bool) -> str | None:
    """What obstore calls the endpoint: with virtual-hosted addressing it includes the bucket."""
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
    """Why a request failed, in words for metrics and findings."""

    reason: str
    """absent, no_bucket, exists, denied, slow_down, timeout, connection, http_5xx, http_4xx, other."""
    status: int | None = None
    kind: str = ""
    """The library's class of error."""

    def __str__(self) -> str:
        words = _SENTENCES.get(self.reason, f"the request failed ({self.kind})")
        return f"{words} (HTTP {self.status})" if self.status else words


_SENTENCES = {
    "absent": "no such object",
    "no_bucket": "the bucket does not exist",
    "exists": "the object exists already",
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
    """The reason of an error that obstore raised."""
    kind, text = type(error).__name__, str(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    if isinstance(error, FileNotFoundError):
        return Failure("no_bucket" if "NoSuchBucket" in text else "absent", status, kind)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return Failure("exists", status, kind)
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
    """Whether a range was asked for that begins behind the last byte of the object."""
    text = str(error)
    return any(word in text for word in ("status code: 416", "StartTooLarge", "InvalidRange"))


def delete_objects(obstore: Any, client: Any, names: Sequence[str]) -> None:
    """Delete objects, many by one request where the store can; missing ones are no error."""
    try:
        obstore.delete(client, list(names))
        return
    except FileNotFoundError:
        pass
    # All but S3 fail at the first missing one.
    for name in names:
        try:
            obstore.delete(client, name)
        except FileNotFoundError:
            continue


def lacks_deletion_of_many(error: Exception) -> bool:
    """Whether a server says that it cannot delete many objects by one request, which is how one is deleted, too."""
    text = str(error)
    return explain(error).status in (405, 501) or "NotImplemented" in text or "MethodNotAllowed" in text


def is_md5_of(data: bytes | memoryview, etag: str | None) -> bool:
    return etag is not None and etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()
