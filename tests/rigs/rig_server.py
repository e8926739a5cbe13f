"""A real SGLang server that campaigns can freeze, measure, and run in a network of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.testing.server import SglangServer, session_members, signal_process
from tests.rigs.network_namespace import NetworkNamespace


class RigServer(SglangServer):
    """``namespace``: the network to run in; this machine's own if not given. ``tp``, ``dp``: tensor- and data-parallel
    size. ``linker_config``: ``--unified-cache-external-linker-config``, which names a class: SGLang's other door to
    storage (docs/linker.md), with which HiCache is off. The rest as for SglangServer."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        namespace: NetworkNamespace | None = None,
        tp: int = 1,
        dp: int = 1,
        linker_config: Mapping[str, Any] | None = None,
        hierarchical_cache: bool = True,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        more = ["--tp-size", str(tp), "--dp-size", str(dp)]
        if linker_config is not None:
            more += ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"]
            more += ["--unified-cache-external-linker-config", json.dumps(dict(linker_config))]
        # Under DP attention the replicas are among the tensor-parallel ranks.
        ranks = tp * (1 if "--enable-dp-attention" in extra_arguments else dp)
        super().__init__(
            model,
            hierarchical_cache=hierarchical_cache and linker_config is None,
            extra_arguments=[*more, *extra_arguments],
            environment={**_a_core_for_each(ranks), **(environment or {})},
            **settings,
        )
        if dp > 1:
            # Each replica needs one of its own, which SGLang then chooses.
            at = self.arguments.index("--nccl-port")
            del self.arguments[at : at + 2]
        self._namespace = namespace

    def start(self) -> None:
        if self._namespace is not None:
            self.command_prefix = self._namespace.command_prefix
        super().start()

    def stop(self) -> None:
        if self._process is not None:
            self.thaw()
        super().stop()

    def freeze(self) -> None:
        """Stop all its processes where they are, so that an idle server takes nothing from one that is measured."""
        for pid in session_members(self.pid):
            signal_process(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on; does nothing to a server that is not frozen."""
        for pid in session_members(self.pid):
            signal_process(pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """What all its processes have used so far, user and system; of threads that have ended, too."""
        ticks = 0
        for pid in session_members(self.pid):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _opener(self) -> urllib.request.OpenerDirector:
        if self._namespace is None:
            return super()._opener()
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NamespaceHandler(self._namespace))


class _NamespaceHandler(urllib.request.HTTPHandler):
    """Opens HTTP connections inside a network namespace."""

    def __init__(self, namespace: NetworkNamespace) -> None:
        super().__init__()
        self._namespace = namespace

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)

    def _connection(self, host: str, *, timeout: float | None = None, **_: Any) -> http.client.HTTPConnection:
        namespace = self._namespace

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = namespace.connect((self.host, self.port), self.timeout)

        return Connection(host, timeout=timeout)


def _a_core_for_each(ranks: int) -> dict[str, str]:
    """Without a GPU SGLang would give each rank a NUMA node, and refuses where there are fewer."""
    if ranks == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))}
