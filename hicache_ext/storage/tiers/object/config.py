"""``type: object``: S3-compatible stores, Google Cloud Storage, Azure Blob Storage, and directories through obstore."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from hicache_ext.config.problems import quoted, refuse
from hicache_ext.config.schema import Allowed
from hicache_ext.config.secrets import SECRET_ALLOWED, SecretOrNone
from hicache_ext.config.tier import RemoteTierConfig
from hicache_ext.config.values import absolute_path, expand_templates, not_empty, or_word, text, whole_number
from hicache_ext.errors import ConfigError

MOST_REQUESTS = 256

_URL_ALLOWED = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
_ENDPOINT_ALLOWED = "http(s)://host[:port][/path]"
_SSE_ALLOWED = "s3, kms, dsse, customer"
_CA_FILE_ALLOWED = "an absolute path to a PEM file"
_SCHEMES = ("s3", "gs", "az", "file")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=/-]*", re.ASCII)

_ENDPOINT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*", re.ASCII)

_S3_ONLY = ("region", "addressing", "access_key", "secret_key", "session_token", "sse", "sse_key", "sse_kms_key")
_AZURE_ONLY = ("account", "account_key", "sas_token")


def parse_url(value: object) -> str:
    """Expand templates in a URL, validate its scheme, bucket and prefix, and strip the trailing slash."""
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


def parse_endpoint(value: object) -> str:
    """Validate a base address without credentials; it may have a path if the store is below one."""
    if not isinstance(value, str):
        raise refuse(value, _ENDPOINT_ALLOWED)
    text = expand_templates(value).rstrip("/")
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound or "@" in text or parts.query or parts.fragment or not _ENDPOINT_PATH.fullmatch(parts.path):
        raise ConfigError("", f"{quoted(value)} is not an endpoint", _ENDPOINT_ALLOWED)
    return text


_Word = Annotated[str | None, Allowed("text", or_word(None, None, text))]


class ObjectTierConfig(RemoteTierConfig):
    """Object stores."""

    keeps_timeout: ClassVar[bool] = True
    keeps_identities: ClassVar[bool] = True

    type: Literal["object"] = "object"
    url: Annotated[str, Allowed(_URL_ALLOWED, parse_url)]
    """the bucket or container, and the prefix that belongs to this package alone"""
    endpoint: Annotated[str | None, Allowed(_ENDPOINT_ALLOWED, or_word(None, None, parse_endpoint))] = None
    """the server's address where it is not the provider's own (MinIO, Ceph, R2, an emulator)"""
    region: _Word = None
    """S3: the bucket's region"""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """S3: bucket in the path or in the host name; auto: path with an endpoint, else virtual"""
    access_key: SecretOrNone = None
    """S3: access key id; left out: the standard chain"""
    secret_key: SecretOrNone = None
    """S3: secret access key"""
    session_token: SecretOrNone = None
    """S3: token of temporary credentials"""
    # Empty is an error: an operator who left the value out still wants encryption.
    sse: Annotated[Literal["s3", "kms", "dsse", "customer"] | None, Allowed(_SSE_ALLOWED, not_empty)] = None
    """S3: how objects are encrypted by the server; left out: as the bucket says"""
    sse_kms_key: _Word = None
    """S3: the key for sse: kms and dsse; left out: the account's own"""
    sse_key: SecretOrNone = None
    """S3: the key for sse: customer, 32 bytes in base64"""
    service_account: SecretOrNone = None
    """Google: the service account's JSON key"""
    account: _Word = None
    """Azure: the storage account"""
    account_key: SecretOrNone = None
    """Azure: the account's key"""
    sas_token: SecretOrNone = None
    """Azure: a shared access signature of the container, in place of account_key"""
    allow_http: bool = False
    """true: an endpoint without TLS is accepted; pages and names travel unencrypted"""
    ca_file: Annotated[str | None, Allowed(_CA_FILE_ALLOWED, or_word(None, None, absolute_path))] = None
    """certificates to trust besides the system's"""
    concurrency: Annotated[
        int | None, Allowed(f"1 to {MOST_REQUESTS}, or auto", or_word("auto", None, whole_number(1, MOST_REQUESTS)))
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
        """The prefix of every name, without outer slashes; for ``file``, the directory without its leading slash."""
        return self.url.partition("://")[2].partition("/")[2].strip("/")

    def directories(self) -> tuple[str, ...]:
        return ("/" + self.prefix,) if self.scheme == "file" else ()

    def summary(self) -> str:
        return f"object, {self.url}" + (f" at {self.endpoint}" if self.endpoint else "")

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        unused = {
            "s3": ("service_account", *_AZURE_ONLY),
            "gs": (*_S3_ONLY, *_AZURE_ONLY),
            "az": (*_S3_ONLY, "service_account"),
            "file": (*_S3_ONLY, *_AZURE_ONLY, "service_account", "endpoint", "ca_file"),
        }[self.scheme]
        for key in unused:
            if getattr(self, key) not in (None, "auto"):
                raise ConfigError(f".{key}", f"has no meaning for {self.scheme}:// addresses", "leave it out")
        if (self.access_key is None) != (self.secret_key is None):
            missing = "access_key" if self.access_key is None else "secret_key"
            raise ConfigError(f".{missing}", "required: access_key and secret_key go together", SECRET_ALLOWED)
        if self.session_token is not None and self.access_key is None:
            raise ConfigError(".access_key", "required with session_token", SECRET_ALLOWED)
        azure = [key for key in ("account_key", "sas_token") if getattr(self, key) is not None]
        if len(azure) > 1:
            raise ConfigError(".sas_token", "account_key is given too", "one of the two")
        if azure and self.account is None:
            raise ConfigError(".account", f"required with {azure[0]}", "the name of the storage account")
        if self.sse_kms_key is not None and self.sse not in ("kms", "dsse"):
            raise ConfigError(".sse", "required with sse_kms_key", "kms or dsse")
        if self.sse_key is not None and self.sse != "customer":
            raise ConfigError(".sse", "required with sse_key", "customer")
        if self.sse == "customer" and self.sse_key is None:
            raise ConfigError(".sse_key", "required with sse: customer", SECRET_ALLOWED)
        if self.endpoint and self.endpoint.startswith("http:") and not self.allow_http:
            problem = "without TLS pages travel unencrypted; say allow_http: true if that is meant"
            raise ConfigError(".endpoint", problem, "https://..., or allow_http: true")
        return self
