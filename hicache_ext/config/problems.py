"""The wording of configuration errors: safe echoes of values, nearest names, key paths.

Nothing here repeats a value that could be a secret: values are shown only where a key of ours takes a word, a number or
a path, never for a key that is not known, and passwords inside addresses are masked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from hicache_ext.errors import ConfigError

_LONGEST_ECHO = 200
_LARGEST_ECHOED_NUMBER = 10**30
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ADDRESS_PASSWORD = re.compile(r"://[^/\s]*@")
_SECRET_KEY = re.compile(
    r"(^|[_-])(password|passwd|passphrase|pwd|secret|token|credentials?|auth|(access|api|private|secret)_?key)(s|$|[_-])",
    re.IGNORECASE,
)

_OTHER_NAMES = {
    **dict.fromkeys(("s3", "gcs", "gs", "azure", "minio", "ceph", "r2", "blob"), "object"),
    **dict.fromkeys(("nvme", "ssd", "disk", "local", "posix", "filesystem", "nfs", "lustre", "hf3fs"), "file"),
    **dict.fromkeys(("valkey", "keydb", "dragonfly", "elasticache"), "redis"),
    **dict.fromkeys(("ram", "dram", "host"), "memory"),
    **dict.fromkeys(("path_style", "force_path_style", "s3_addressing_style", "addressing_style"), "addressing"),
    **dict.fromkeys(("master_server_address", "master_server_addr", "master_address"), "master"),
    **dict.fromkeys(("endpoint_url", "s3_endpoint", "url_endpoint"), "endpoint"),
    **dict.fromkeys(("bucket", "uri", "address", "host", "hostname", "addr", "servers"), "url"),
    **dict.fromkeys(("aws_access_key_id", "access_key_id", "key_id"), "access_key"),
    **dict.fromkeys(("aws_secret_access_key", "secret_access_key"), "secret_key"),
    **dict.fromkeys(("user", "login", "acl_user"), "username"),
    **dict.fromkeys(("passwd", "password_env", "password_file", "auth", "requirepass"), "password"),
    **dict.fromkeys(("directory", "directories", "dir", "folder", "storage_path", "file_path", "paths"), "path"),
    **dict.fromkeys(("size", "max_size", "quota", "limit", "max_bytes", "storage_size"), "capacity"),
    **dict.fromkeys(("expire", "expiry", "expiration", "max_age", "lifetime"), "ttl"),
    **dict.fromkeys(("global_segment_size",), "segment_size"),
    **dict.fromkeys(("device_name", "ib_device", "rdma_devices"), "devices"),
    **dict.fromkeys(("db",), "database"),
    **dict.fromkeys(("read_locations", "load_locations", "read_from", "retrieve_from"), "retrieve_locations"),
    **dict.fromkeys(("write_locations", "save_locations", "write_to", "store_to"), "store_locations"),
}
"""Names from other products or the field that people try -> our names."""


def config_error(errors: Sequence[ConfigError]) -> ConfigError:
    """Return a single error that represents all of ``errors``."""
    first = errors[0]
    return first if len(errors) == 1 else ConfigError(first.key, first.problem, first.allowed, errors)


def looks_secret(key: str) -> bool:
    """Return whether a key of this name usually holds a password, token or access key and must never be shown."""
    return _SECRET_KEY.search(key) is not None


def shown(value: object, key: str = "") -> str:
    """Describe ``value`` briefly on one line; only its kind if it is not a word or number, or may be secret."""
    if value is None:
        return "an empty value"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple | set | frozenset):
        return "a list"
    if looks_secret(key):
        return "the value (not shown)"
    if isinstance(value, bool):
        return f"the value {str(value).lower()}"
    if isinstance(value, int):
        return f"the number {value}" if abs(value) < _LARGEST_ECHOED_NUMBER else "a number of more than 30 digits"
    if isinstance(value, float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    return f"a {type(value).__name__}"


def kind_of(value: object) -> str:
    """Describe the kind of ``value`` without its contents, for places where a whole mapping belongs."""
    if value is None or isinstance(value, Mapping | list | tuple | set | frozenset):
        return shown(value)
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else f"a {type(value).__name__}"


def quoted(text: str) -> str:
    """Quote ``text``, escaped to one line, shortened, and without the user part of an address."""
    masked = _ADDRESS_PASSWORD.sub("://***@", text)
    return repr(masked if len(masked) <= _LONGEST_ECHO else masked[: _LONGEST_ECHO - 3] + "...")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'capacity'?"`` for the known name nearest to ``word``, or "" if none is near."""
    by_lower_case = {name.lower(): name for name in known}
    if (ours := _OTHER_NAMES.get(word.lower())) in by_lower_case:
        return f"; did you mean {ours!r}?"
    nearest = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""


def listed(names: Iterable[str]) -> str:
    """Join ``names`` for the "allowed" part of a sentence."""
    return ", ".join(names)


def key_path(location: Iterable[str | int]) -> str:
    """Format ``("hicache_ext", "tiers", "nvme", "path", 1)`` as ``hicache_ext.tiers.nvme.path[1]``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":  # pydantic's mark for "the key itself, not its value"
            path += ("." if path else "") + (step if _PLAIN_KEY.fullmatch(step) else quoted(step))
    return path


def refuse(value: object, allowed: str = "", key: str = "") -> ConfigError:
    """Return the error for a value of the wrong kind; "" stands for the text of the field's ``Allowed``."""
    return ConfigError(key, f"{shown(value, key)} is not accepted", allowed)
