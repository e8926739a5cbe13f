"""The Mooncake client library: how it is imported and set up, and what its return codes mean.

The library crashes the process on a call before ``setup`` or after ``close``, and its calls cannot be interrupted. So
only attachment.py holds a client, and calls are bounded by the library itself, through environment variables set before
its first import. A variable set by the user is kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from typing import Any

from hicache_ext.errors import StoreSetupError
from hicache_ext.packages import how_to_install
from hicache_ext.runtime.threads import call_within
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig

logger = logging.getLogger(__name__)

OK = 0
NO_SPACE = -200
INVALID_ARGUMENT = -600
"""On a read: the object is larger than the buffers."""
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
"""The holder is dead or frozen; on a read also: the object is smaller than the buffers."""
MASTER_LOST = (-900, -901)
"""No connection to the master; no answer from it in time."""

REASONS = {
    NO_SPACE: "full",
    INVALID_ARGUMENT: "invalid_argument",
    NOT_READY: "not_ready",
    NOT_FOUND: "not_found",
    LEASED: "leased",
    LEASE_EXPIRED: "lease_expired",
    TRANSFER_FAILED: "transfer",
    -900: "master_unreachable",
    -901: "master_timeout",
}

_SETUP_SECONDS = 10.0
_SETUP_SECONDS_PER_BYTE = 1.0 / (1 << 30)
"""Setup allocates a contributed segment and, with RDMA, pins it: a second per GiB."""


def reason_of(code: int) -> str:
    """A return code as a metric label."""
    return REASONS.get(code, f"code_{-code}")


def environment(timeout: float) -> dict[str, str]:
    """The library's variables for calls that end within about ``timeout`` seconds. See docs/mooncake.md."""
    return {
        "MC_LOG_LEVEL": "ERROR",
        # Without these two a frozen master holds every call for 30 s, and setup tries for 90 s.
        "MC_RPC_TIMEOUT_MS": str(max(1, math.ceil(timeout * 1000))),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, math.ceil(min(timeout, 1.0) * 1000))),
        # Per transfer from a frozen holder. Whole seconds; one second fails healthy transfers on a busy machine.
        "MC_TCP_STATUS_TIMEOUT_SEC": "2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    }


class Engine:
    """Makes clients for one tier. Thread-safe."""

    def __init__(self, name: str, tier: MooncakeTierConfig) -> None:
        """Imports the library. Raises StoreSetupError when it is not installed."""
        self._name = name
        self.tier = tier
        for variable, value in environment(tier.longest_call).items():
            os.environ.setdefault(variable, value)
        try:
            from mooncake import store as library
        except ImportError as error:
            raise StoreSetupError(
                name,
                f"the Mooncake client cannot be imported ({error})",
                [f"{how_to_install('mooncake')} (or mooncake-transfer-engine-non-cuda, not both)"],
            ) from error
        self._library = library

    def master_answers(self, seconds: float) -> bool:
        """Whether the master's port, or an etcd's, accepts connections. That of a frozen one does, too."""
        addresses = self.tier.master_addresses()
        for address in addresses:
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port)), timeout=seconds / len(addresses)).close()
                return True
        return False

    def open_client(self) -> Any:
        """A client that is set up. Bounded in time; raises StoreSetupError.

        The port is probed first, because the library's own attempts take seconds. Setup runs on a thread of its own. A
        late one is left behind and closes the client that it still gets.
        """
        if not self.master_answers(self.tier.longest_call):
            raise StoreSetupError(
                self._name, f"no Mooncake master answers at {self.tier.master}", ["start it, or set required: false"]
            )
        client = self._library.MooncakeDistributedStore()
        codes: list[int] = []

        def set_up() -> None:
            codes.append(
                client.setup(
                    self.tier.local_hostname,
                    self.tier.metadata_server,
                    self.tier.segment_size,
                    self.tier.local_buffer_size,
                    self.tier.protocol,
                    self.tier.device_names(),
                    self.tier.master,
                    tenant_id=self.tier.tenant,
                )
            )

        def end_late() -> None:
            if codes == [OK]:
                client.close()

        seconds = self.tier.longest_call + _SETUP_SECONDS + self.tier.segment_size * _SETUP_SECONDS_PER_BYTE
        call = call_within(seconds, f"hicache-{self._name}-setup", set_up, end_late)
        if call is None:
            raise StoreSetupError(self._name, f"setup with the master at {self.tier.master} took over {seconds:.0f} s")
        if codes != [OK]:
            reason = call.error or f"code {codes[0]}"
            raise StoreSetupError(
                self._name,
                f"setup with the master at {self.tier.master} failed ({reason})",
                ["check the master, local_hostname, protocol and devices"],
            )
        return client

    def replicate_config(self, page_hashes: list[str]) -> Any:
        """How the objects of one put are kept; ``page_hashes`` are theirs, in order."""
        config = self._library.ReplicateConfig()
        config.replica_num = self.tier.replica_num
        if self.tier.preferred_segments:
            config.preferred_segments = list(self.tier.preferred_segments)
        if self.tier.soft_pin is not None:
            config.soft_pin_action = self._library.SoftPinAction.ENABLE
            if self.tier.soft_pin > 0:
                config.soft_pin_ttl_ms = math.ceil(self.tier.soft_pin * 1000)
        config.with_hard_pin = self.tier.hard_pin
        if self.tier.group == "page":
            config.group_ids = page_hashes
        return config
