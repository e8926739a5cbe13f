"""``type: object``: S3-compatible stores, Google Cloud Storage, Azure Blob Storage, and directories through obstore."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from hicache_ext.config.problems import quoted, refuse, shown
from hicache_ext.config.schema import Allowed, as_pydantic_error
from hicache_ext.config.secrets import SECRET_ALLOWED, Secret
from hicache_ext.config.tier import RemoteTierConfig
from hicache_ext.config.values import expand_templates, or_auto, whole_number
from hicache_ext.errors import ConfigError

MOST_REQUESTS = 256

_URL_ALLOWED = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
_SCHEMES = ("s3", "gs", "az", "file")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=/-]*", re.ASCII)

_ENDPOINT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*", re.ASCII)

_S3_ONLY = ("region", "addressing", "access_key", "secret_key", "session_token", "sse", "sse_key", "sse_kms_key")
_AZURE_ONLY = ("account", "account_key", "sas_token")


def parse_url(value: object) -> str:
    """A URL whose scheme, bucket and prefix are sound, templates expanded, without a trailing slash."""
    if not isinstance(value, str):
        raise refuse(value, _URL_ALLOWED)
    text = expand_templates(value)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError("", f"{quoted(value)} is not the address of an object store", _URL_ALLOWED)
    place, _, prefix = rest.partition("/")
    if "@" in rest:
        raise ConfigError("", "credentials do not belong in the address", "access_key and secret_key by reference")
    if scheme == "file":
        if place or not prefix.strip("/"):
            raise ConfigError("", f"{quoted(value)} names no absolute directory", _URL_ALLOWED)
    elif not _BUCKET.fullmatch(place):
        raise ConfigError("", f"{quoted(value)} names no bucket", _URL_ALLOWED)
    if not _PREFIX.fullmatch(prefix) or any(part in ("", ".", "..") for part in prefix.strip("/").split("/") if prefix):
        raise ConfigError("", f"the prefix of {quoted(value)} has parts that not every store keeps apart", _URL_ALLOWED)
    return text.rstrip("/")


def parse_endpoint(value: object) -> str | None:
    """A base address, with a path where the store is below one, and without credentials."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise refuse(value, "")
    text = expand_templates(value).rstrip("/")
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound or "@" in text or parts.query or parts.fragment or not _ENDPOINT_PATH.fullmatch(parts.path):
        raise ConfigError("", f"{quoted(value)} is not an endpoint", "")
    return text


def _word(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise refuse(value, "")
    return expand_templates(value)


def _ca_file(value: object) -> str | None:
    text = _word(value)
    if text is not None and not text.startswith("/"):
        raise ConfigError("", f"{shown(value)} is not an absolute path", "")
    return text


_Word = Annotated[str | None, Allowed("text", _word)]
_Secret = Annotated[Secret | None, Allowed(SECRET_ALLOWED)]


class ObjectTierConfig(RemoteTierConfig):
    """Object stores."""

    keeps_timeout: ClassVar[bool] = True
    keeps_identities: ClassVar[bool] = True

    type: Literal["object"] = "object"
    url: Annotated[str, Allowed(_URL_ALLOWED, parse_url)]
    """the bucket or container, and the prefix that belongs to this package alone"""
    endpoint: Annotated[str | None, Allowed("http(s)://host[:port][/path]", parse_endpoint)] = None
    """the server's address where it is not the provider's own (MinIO, Ceph, R2, an emulator)"""
    region: _Word = None
    """S3: the bucket's region"""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """S3: bucket in the path or in the host name; auto: path with an endpoint, else virtual"""
    access_key: _Secret = None
    """S3: access key id; left out: the standard chain"""
    secret_key: _Secret = None
    """S3: secret access key"""
    session_token: _Secret = None
    """S3: token of temporary credentials"""
    sse: Literal["s3", "kms", "dsse", "customer"] | None = None
    """S3: how objects are encrypted by the server; left out: as the bucket says"""
    sse_kms_key: _Word = None
    """S3: the key for sse: kms and dsse; left out: the account's own"""
    sse_key: _Secret = None
    """S3: the key for sse: customer, 32 bytes in base64"""
    service_account: _Secret = None
    """Google: the service account's JSON key"""
    account: _Word = None
    """Azure: the storage account"""
    account_key: _Secret = None
    """Azure: the account's key"""
    sas_token: _Secret = None
    """Azure: a shared access signature of the container, in place of account_key"""
    allow_http: bool = False
    """true: an endpoint without TLS is accepted; pages and names travel unencrypted"""
    ca_file: Annotated[str | None, Allowed("an absolute path to a PEM file", _ca_file)] = None
    """certificates to trust besides the system's"""
    concurrency: Annotated[
        int | None,
        Field(json_schema_extra={"default": "auto"}),
        Allowed(
            f"1 to {MOST_REQUESTS}, or auto",
            or_auto(whole_number(1, MOST_REQUESTS)),
            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_REQUESTS}, {"const": "auto"}]},
        ),
    ] = None
    """requests at once per rank; auto: 32"""

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def bucket(self) -> str:
        """Bucket or container; "" for a directory."""
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def prefix(self) -> str:
        """What every name begins with, without slashes at its ends; for ``file`` the directory without its first."""
        return self.url.partition("://")[2].partition("/")[2].strip("/")

    def directories(self) -> tuple[str, ...]:
        return ("/" + self.prefix,) if self.scheme == "file" else ()

    def summary(self) -> str:
        return f"object, {self.url}" + (f" at {self.endpoint}" if self.endpoint else "")

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        for rule in _RULES:
            if error := rule(self):
                raise as_pydantic_error(error)
        return self


def _only_keys_of_the_scheme(tier: ObjectTierConfig) -> ConfigError | None:
    unused = {
        "s3": ("service_account", *_AZURE_ONLY),
        "gs": (*_S3_ONLY, *_AZURE_ONLY),
        "az": (*_S3_ONLY, "service_account"),
        "file": (*_S3_ONLY, *_AZURE_ONLY, "service_account", "endpoint", "ca_file"),
    }[tier.scheme]
    for key in unused:
        if getattr(tier, key) not in (None, "auto"):
            return ConfigError(f".{key}", f"has no meaning for {tier.scheme}:// addresses", "leave it out")
    return None


def _credentials_are_whole(tier: ObjectTierConfig) -> ConfigError | None:
    if (tier.access_key is None) != (tier.secret_key is None):
        missing = "access_key" if tier.access_key is None else "secret_key"
        return ConfigError(f".{missing}", "required: access_key and secret_key go together", SECRET_ALLOWED)
    if tier.session_token is not None and tier.access_key is None:
        return ConfigError(".access_key", "required with session_token", SECRET_ALLOWED)
    azure = [key for key in ("account_key", "sas_token") if getattr(tier, key) is not None]
    if len(azure) > 1:
        return ConfigError(".sas_token", "account_key is given too", "one of the two")
    if azure and tier.account is None:
        return ConfigError(".account", f"required with {azure[0]}", "the name of the storage account")
    return None


def _encryption_is_whole(tier: ObjectTierConfig) -> ConfigError | None:
    if tier.sse_kms_key is not None and tier.sse not in ("kms", "dsse"):
        return ConfigError(".sse", "required with sse_kms_key", "kms or dsse")
    if tier.sse_key is not None and tier.sse != "customer":
        return ConfigError(".sse", "required with sse_key", "customer")
    if tier.sse == "customer" and tier.sse_key is None:
        return ConfigError(".sse_key", "required with sse: customer", SECRET_ALLOWED)
    return None


def _http_is_meant(tier: ObjectTierConfig) -> ConfigError | None:
    if tier.endpoint and tier.endpoint.startswith("http:") and not tier.allow_http:
        problem = "without TLS pages travel unencrypted; say allow_http: true if that is meant"
        return ConfigError(".endpoint", problem, "https://..., or allow_http: true")
    return None


_RULES: tuple[Callable[[ObjectTierConfig], ConfigError | None], ...] = (
    _only_keys_of_the_scheme,
    _credentials_are_whole,
    _encryption_is_whole,
    _http_is_meant,
)
