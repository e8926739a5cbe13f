"""``type: mooncake``: the memory of a Mooncake Store cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from hicache_ext.config.problems import quoted, refuse, shown
from hicache_ext.config.schema import Allowed
from hicache_ext.config.tier import RemoteTierConfig
from hicache_ext.config.values import (
    SIZE_ALLOWED,
    expand_templates,
    format_size,
    or_word,
    parse_size,
    text,
    whole_number,
)
from hicache_ext.errors import ConfigError

_ADDRESS_ALLOWED = "host:port, such as 10.0.0.1:50051"
_MASTER_ALLOWED = "host:port, such as 10.0.0.1:50051, or etcd://host:port;host:port of masters with a standby"
_DEVICES_ALLOWED = (
    "device names in one text such as 'mlx5_0,mlx5_1', a list with one text per tp rank, or {'0': text, '1': text}"
)
ETCD = "etcd://"
_HOST = re.compile(r"[^\s,;/:]+|\[[^\s,;/]+\]")
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$"), Allowed("letters, digits, '_', '-' and '.'")]

Devices = str | dict[int, str]


def _address(value: object, allowed: str = _ADDRESS_ALLOWED) -> str:
    """Validate host:port and expand templates."""
    if not isinstance(value, str):
        raise refuse(value, allowed)
    address = expand_templates(value)
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError("", f"{quoted(value)} is not an address with a port", allowed)
    return address


def _master(value: object) -> str:
    if not isinstance(value, str) or "://" not in (written := expand_templates(value)):
        return _address(value, _MASTER_ALLOWED)
    if not written.startswith(ETCD):
        raise ConfigError("", f"{quoted(value)}: the library finds masters through etcd alone", _MASTER_ALLOWED)
    return ETCD + ";".join(_address(address, _MASTER_ALLOWED) for address in written.removeprefix(ETCD).split(";"))


def parse_devices(value: object) -> Devices:
    """Parse device names for all ranks, or per tp rank."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        raise refuse(value, _DEVICES_ALLOWED)
    devices: dict[int, str] = {}
    for rank, names in value.items():
        number = int(rank) if isinstance(rank, str) and rank.isascii() and rank.isdigit() else rank
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError("", f"{shown(rank)} is not a tp rank", _DEVICES_ALLOWED)
        if not isinstance(names, str) or not names:
            raise refuse(names, "device names in one text", f"[{number}]")
        devices[number] = names
    return devices


class MooncakeTierConfig(RemoteTierConfig):
    """A Mooncake Store cluster."""

    keeps_timeout: ClassVar[bool] = True
    removed: ClassVar[Mapping[str, str]] = {
        "group": "the master evicts each object by itself",
        "local_buffer_size": "pages travel through memory of the tier, and the library's own buffer has 16MiB",
        "preferred_segments": "the master chooses; the library gives segments names that nobody knows before they run",
        "soft_pin": "the master evicts what was used least lately",
    }

    type: Literal["mooncake"] = "mooncake"
    master: Annotated[str, Allowed(_MASTER_ALLOWED, _master)]
    """address of mooncake_master, or of the etcd that knows which one leads"""
    metadata_server: Annotated[
        str, Allowed("P2PHANDSHAKE, or an address such as http://10.0.0.1:8080/metadata", text)
    ] = "P2PHANDSHAKE"
    """of the transfer engine; P2PHANDSHAKE needs none"""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """how pages travel"""
    devices: Annotated[Devices, Allowed(_DEVICES_ALLOWED, parse_devices)] = ""
    """RDMA devices, for all ranks or per tp rank; empty: the library chooses"""
    local_hostname: Annotated[str, Allowed("a host name or address; {hostname} and {env:NAME} are replaced", text)] = (
        Field(default="{hostname}", validate_default=True)
    )
    """under which the cluster reaches this node"""
    segment_size: Annotated[int, Allowed(SIZE_ALLOWED, parse_size)] = 0
    """memory each rank of this server contributes; 0: none, a client of a standalone pool"""
    replica_num: Annotated[int, Allowed("1 to 16", whole_number(1, 16))] = 1
    """copies of each page"""
    hard_pin: bool = False
    """never evict these pages"""
    prefix: _Name = "hicache_ext"
    """first part of every object's name"""
    tenant: _Name = "default"
    """of a master with tenants"""
    metrics: Annotated[str | None, Allowed(_ADDRESS_ALLOWED, or_word(None, None, _address))] = None
    """address of the master's metrics, for hicache-ext doctor"""

    def for_rank(self, tp_rank: int) -> Self:
        """Return the configuration for rank ``tp_rank``. Raises ConfigError if ``devices`` omits the rank."""
        if isinstance(self.devices, str):
            return self
        if tp_rank not in self.devices:
            raise ConfigError("devices", f"there are none for tp rank {tp_rank}", _DEVICES_ALLOWED)
        return self.model_copy(update={"devices": self.devices[tp_rank]})

    def device_names(self) -> str:
        """Return the devices of the rank; those of rank 0 if ranks differ and none was chosen."""
        return self.devices if isinstance(self.devices, str) else self.devices.get(0, "")

    def master_addresses(self) -> list[str]:
        """Return host:port of the master, or of each etcd."""
        return self.master.removeprefix(ETCD).split(";")

    def summary(self) -> str:
        contributed = f", contributes {format_size(self.segment_size)}" if self.segment_size else ""
        return f"mooncake, master {self.master}, {self.protocol}{contributed}"
