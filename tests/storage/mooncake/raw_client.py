"""A second way to what a Mooncake cluster holds: the library itself, with names and format from the documents."""

from __future__ import annotations

import os
import urllib.request

from tests.rigs.mooncake_servers import MooncakeServers


class RawClient:
    """RawAccess of the conformance suite."""

    def __init__(self, servers: MooncakeServers, prefix: str = "hicache_ext") -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.store import MooncakeDistributedStore

        self._prefix = prefix
        self._metrics = servers.metrics
        self.client = MooncakeDistributedStore()
        assert self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", servers.master) == 0

    def name(self, key: bytes) -> str:
        return f"{self._prefix}/{key[:16].hex()}/{key[16:].hex()}"

    def read(self, key: bytes) -> bytes | None:
        return self.client.get(self.name(key)) or None

    def write(self, key: bytes, stored: bytes) -> None:
        self.client.remove(self.name(key), True)
        # The engine holds no empty objects; one byte is as far from a page.
        assert self.client.put(self.name(key), stored or b"\0") == 0

    def names(self) -> list[str]:
        with urllib.request.urlopen(f"http://{self._metrics}/get_all_keys", timeout=60) as response:
            return response.read().decode().split()

    def keys(self) -> list[bytes]:
        ours = [name.split("/") for name in self.names() if name.startswith(self._prefix + "/")]
        return [bytes.fromhex(identity + page_hash) for _, identity, page_hash in ours]

    def empty(self) -> None:
        self.client.remove_by_regex(".*", True)

    def close(self) -> None:
        self.client.close()
