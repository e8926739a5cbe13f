"""A real disaggregated pair on this machine: one prefill node, one decode node, KV sent between them by Mooncake.

::

    with PdPair(model, directory=tmp_path, prefill_config=config, decode_config=config) as pair:
        answer = pair.generate(prompt, max_new_tokens=80)
        pair.prefill.flush_cache()

On the CPU rig the KV travels over Mooncake's TCP transport. Mooncake's engine listens on all interfaces, so the pair
runs in a network namespace of its own (network_namespace.py), which needs root.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.errors import ServerError
from hicache_ext.testing.client import CachedTokens, Generation
from hicache_ext.testing.server import free_port
from tests.rigs.network_namespace import NetworkNamespace
from tests.rigs.rig_server import RigServer

Config = Mapping[str, Any] | str

_ENVIRONMENT = {
    # The namespace has no other interface.
    "SGLANG_HOST_IP": "127.0.0.1",
}


_TRANSFER = ("--disaggregation-transfer-backend", "mooncake_tcp")


@dataclass(frozen=True, slots=True)
class PdGeneration:
    """One answer of the pair: what the decode node said, and what the prefill node reported about its caches."""

    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    cached: CachedTokens
    time_to_first_token: float
    """Seconds until the decode node sent its first token."""
    total_time: float
    prefill: Generation
    decode: Generation


class PdPair:
    """Two servers and their network.

    Args:
        model: directory of the model.
        directory: where the logs go.
        prefill_config, decode_config: extra configuration of each node's storage, as SglangServer takes it. Without
            ``decode_config`` the decode node offloads nothing.
        storage_backend: ``--hicache-storage-backend`` of both nodes; None is a prefill node with L2 only.
        hierarchical_cache: whether the prefill node has HiCache at all.
        decode_arguments, prefill_arguments, environment, decode_environment: added to what this class sets.
        decode_host_ratio: ``--hicache-ratio`` of the decode node: its host memory in units of its device memory.
        prefill_tp, decode_tp: tensor-parallel size of each node.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        directory: str | os.PathLike[str],
        prefill_config: Config | None = None,
        decode_config: Config | None = None,
        storage_backend: str | None = "dynamic",
        hierarchical_cache: bool = True,
        decode_offload: bool = True,
        page_size: int = 16,
        decode_host_ratio: float = 2,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        prefill_arguments: Sequence[str] = (),
        decode_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        decode_environment: Mapping[str, str] | None = None,
        namespace: NetworkNamespace | None = None,
    ) -> None:
        self._own_namespace = namespace is None
        self.namespace = namespace or NetworkNamespace()
        self.bootstrap_port = free_port()
        self._rooms = itertools.count(int(time.time()) % 100_000 * 1000)
        log_directory = Path(directory)
        both = {**_ENVIRONMENT, **(environment or {})}
        self.prefill = RigServer(
            model,
            log_file=log_directory / "prefill.log",
            tp=prefill_tp,
            page_size=page_size,
            hierarchical_cache=hierarchical_cache,
            storage_backend=storage_backend,
            extra_config=prefill_config,
            extra_arguments=(
                *("--disaggregation-mode", "prefill", *_TRANSFER),
                *("--disaggregation-bootstrap-port", str(self.bootstrap_port)),
                *("--disable-overlap-schedule", *prefill_arguments),
            ),
            environment=both,
            namespace=self.namespace,
        )
        self.decode = decode_node(
            model,
            log_file=log_directory / "decode.log",
            namespace=self.namespace,
            config=decode_config,
            storage_backend=storage_backend if decode_offload else None,
            page_size=page_size,
            tp=decode_tp,
            host_ratio=decode_host_ratio,
            arguments=decode_arguments,
            environment={**(environment or {}), **(decode_environment or {})},
        )

    def __enter__(self) -> PdPair:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start both nodes at once. Raises :class:`ServerError` of the first that does not come up."""
        if self._own_namespace:
            self.namespace.start()
        trouble: list[Exception] = []

        def start(server: RigServer) -> None:
            try:
                server.start()
            except (ServerError, OSError) as error:
                trouble.append(error)

        starting = [threading.Thread(target=start, args=(server,)) for server in (self.prefill, self.decode)]
        for thread in starting:
            thread.start()
        try:
            for thread in starting:
                thread.join()
        except BaseException:
            self.stop()
            raise
        if trouble:
            self.stop()
            raise trouble[0]

    def stop(self) -> None:
        try:
            self.decode.stop()
        finally:
            try:
                self.prefill.stop()
            finally:
                if self._own_namespace:
                    self.namespace.stop()

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 16,
        *,
        decode: RigServer | None = None,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = 240,
        **body: Any,
    ) -> PdGeneration:
        """One greedy completion by the pair: both nodes get the same request, with a room of its own to meet in.

        ``decode`` is another decode node than the pair's own (:func:`decode_node`), in the same namespace.
        May be called from several threads. Raises :class:`ServerError` or ``OSError``.
        """
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }
        answers: dict[str, Generation] = {}
        trouble: list[Exception] = []

        def ask(name: str, server: RigServer) -> None:
            try:
                answers[name] = server.generate(
                    prompt, max_new_tokens, sampling=sampling, timeout=timeout, **meeting, **body
                )
            except (ServerError, OSError) as error:
                trouble.append(error)

        prefilling = threading.Thread(target=ask, args=("prefill", self.prefill))
        prefilling.start()
        ask("decode", decode or self.decode)
        prefilling.join()
        if trouble:
            raise trouble[0]
        prefilled, decoded = answers["prefill"], answers["decode"]
        return PdGeneration(
            output_ids=decoded.output_ids,
            prompt_tokens=decoded.prompt_tokens,
            cached_tokens=prefilled.cached_tokens,
            cached=prefilled.cached,
            time_to_first_token=decoded.time_to_first_token,
            total_time=decoded.total_time,
            prefill=prefilled,
            decode=decoded,
        )


def decode_node(
    model: str | os.PathLike[str],
    *,
    log_file: str | os.PathLike[str],
    namespace: NetworkNamespace,
    config: Config | None = None,
    storage_backend: str | None = "dynamic",
    page_size: int = 16,
    tp: int = 1,
    host_ratio: float = 2,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RigServer:
    """A decode node, not started; with a ``storage_backend`` it offloads."""
    offload: list[str] = []
    if storage_backend is not None:
        offload = [
            *("--disaggregation-decode-enable-offload-kvcache", "--hicache-ratio", str(host_ratio)),
            *("--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"),
            *("--hicache-storage-backend", storage_backend),
        ]
        if config is not None:
            offload += ["--hicache-storage-backend-extra-config", as_argument(config)]
    return RigServer(
        model,
        log_file=log_file,
        tp=tp,
        page_size=page_size,
        hierarchical_cache=False,
        extra_arguments=("--disaggregation-mode", "decode", *_TRANSFER, *offload, *arguments),
        environment={**_ENVIRONMENT, **(environment or {})},
        namespace=namespace,
    )


def as_argument(config: Config) -> str:
    """``config`` as ``--hicache-storage-backend-extra-config`` takes it."""
    return config if isinstance(config, str) else json.dumps(dict(config))
