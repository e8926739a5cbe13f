"""Redis servers of one's own, for tests, demos and benchmarks: one server, TLS, users, a cluster, Sentinels.

::

    with RedisServer(directory) as server:
        client = redis.Redis(port=server.port)

Loopback and free ports only; nothing is persisted. Needs the program ``redis-server`` (or ``valkey-server``).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Self

from hicache_ext.testing.server import free_port
from tests.rigs.local_server import HOST, LocalServer
from tests.waiting import wait_until


def redis_program() -> str | None:
    """The server program, or None where there is none; HICACHE_EXT_REDIS_SERVER names another one."""
    if named := os.environ.get("HICACHE_EXT_REDIS_SERVER"):
        return named
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer(LocalServer):
    """One server process. ``options`` are lines of redis.conf as (name, value)."""

    def __init__(
        self, directory: Path, options: Sequence[tuple[str, str]] = (), *, port: int | None = None, tls: bool = False
    ) -> None:
        """``tls``: the port speaks TLS only; the options name its files."""
        super().__init__(directory / "redis.log", port=port)
        self.directory = directory
        self._options = list(options)
        self._tls = tls

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def program(self) -> Sequence[str]:
        program = redis_program()
        if program is None:
            raise RuntimeError("redis-server is not installed")
        self.directory.mkdir(parents=True, exist_ok=True)
        ports = [("port", "0"), ("tls-port", str(self.port))] if self._tls else [("port", str(self.port))]
        lines = [
            ("bind", HOST),
            *ports,
            ("dir", str(self.directory)),
            ("save", '""'),
            ("appendonly", "no"),
            ("daemonize", "no"),
            *self._options,
        ]
        config = self.directory / "redis.conf"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines))
        return [program, str(config)]

    def is_ready(self) -> bool:
        for path in (value for name, value in self._options if name == "unixsocket"):
            # Listened at after the port.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        return super().is_ready()

    def command(self, *words: str) -> str:
        """The reply to one command, sent in the clear over a connection of its own, as the server wrote it."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
        with socket.create_connection((HOST, self.port), timeout=60) as connection:
            connection.sendall(request.encode())
            return connection.recv(1 << 20).decode()


class RedisCluster:
    """Masters without replicas, the slots spread evenly; a lost node costs its own slots only."""

    def __init__(self, directory: Path, nodes: int = 3, options: Sequence[tuple[str, str]] = ()) -> None:
        self._options = [
            ("cluster-enabled", "yes"),
            ("cluster-node-timeout", "5000"),
            ("cluster-require-full-coverage", "no"),
            ("cluster-allow-reads-when-down", "yes"),
            *options,
        ]
        self._directory = directory
        self.servers = [self.new_server(f"node{number}") for number in range(nodes)]

    def new_server(self, name: str) -> RedisServer:
        """Another server with the cluster's options, not started and not part of the cluster."""
        port, bus_port = free_port(), free_port()
        return RedisServer(self._directory / name, [*self._options, ("cluster-port", str(bus_port))], port=port)

    @property
    def url(self) -> list[str]:
        return [server.url for server in self.servers]

    def start(self) -> None:
        try:
            for server in self.servers:
                server.start()
            count = len(self.servers)
            for number, server in enumerate(self.servers):
                begin, end = 16384 * number // count, 16384 * (number + 1) // count - 1
                _expect_ok(server.command("CLUSTER", "ADDSLOTSRANGE", str(begin), str(end)))
                _expect_ok(server.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)))
            for server in self.servers[1:]:
                self.meet(self.servers[0], server)
            self.wait_until_ok()
        except BaseException:
            self.stop()
            raise

    def meet(self, known: RedisServer, newcomer: RedisServer) -> None:
        bus_port = next(value for name, value in newcomer._options if name == "cluster-port")
        _expect_ok(known.command("CLUSTER", "MEET", HOST, str(newcomer.port), bus_port))

    def wait_until_ok(self) -> None:
        count = len(self.servers)

        def agreed() -> bool:
            facts = ("cluster_state:ok", f"cluster_known_nodes:{count}", "cluster_slots_ok:16384")
            answers = [server.command("CLUSTER", "INFO") for server in self.servers]
            return all(fact in answer for answer in answers for fact in facts)

        wait_until(agreed, "the cluster")

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class SentinelPair:
    """A primary with a replica, and three Sentinels that agree on which is which, each with a login of its own.

    ``SERVICE`` is what the Sentinels are asked for; the password of the servers is ``PASSWORD``, that of the Sentinels
    ``SENTINEL_PASSWORD``.
    """

    SERVICE = "pages"
    PASSWORD = "of the servers"
    SENTINEL_PASSWORD = "of the sentinels"

    def __init__(self, directory: Path, sentinels: int = 3, *, down_after_ms: int = 500) -> None:
        """``down_after_ms``: until the Sentinels take a server for dead."""
        self._down_after_ms = down_after_ms
        options = [("requirepass", f'"{self.PASSWORD}"'), ("masterauth", f'"{self.PASSWORD}"')]
        # A failover that no Sentinel began must not make the data of the new primary wait for a fork of a second.
        options.append(("repl-diskless-sync-delay", "0"))
        self.primary = RedisServer(directory / "one", options)
        self.replica = RedisServer(directory / "other", [*options, ("replicaof", f"{HOST} {self.primary.port}")])
        self._directory = directory
        self._ports = [free_port() for _ in range(sentinels)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> list[str]:
        return [f"redis+sentinel://{HOST}:{port}/{self.SERVICE}" for port in self._ports]

    def start(self) -> None:
        try:
            self.primary.start()
            self.replica.start()
            wait_until(lambda: "master_link_status:up" in self.ask(self.replica, "INFO", "replication"), "the replica")
            for number, port in enumerate(self._ports):
                self._sentinels.append(self._start_sentinel(number, port))
            wait_until(self._agree, "the Sentinels")
        except BaseException:
            self.stop()
            raise

    def _start_sentinel(self, number: int, port: int) -> subprocess.Popen[bytes]:
        program = redis_program()
        assert program is not None
        directory = self._directory / f"sentinel{number}"
        directory.mkdir(parents=True, exist_ok=True)
        lines = [
            f"bind {HOST}",
            f"port {port}",
            f"dir {directory}",
            f"logfile {directory}/sentinel.log",
            f'requirepass "{self.SENTINEL_PASSWORD}"',
            f'sentinel sentinel-pass "{self.SENTINEL_PASSWORD}"',
            f"sentinel monitor {self.SERVICE} {HOST} {self.primary.port} 2",
            f'sentinel auth-pass {self.SERVICE} "{self.PASSWORD}"',
            f"sentinel down-after-milliseconds {self.SERVICE} {self._down_after_ms}",
            f"sentinel failover-timeout {self.SERVICE} 5000",
        ]
        config = directory / "sentinel.conf"
        config.write_text("\n".join(lines) + "\n")
        return subprocess.Popen(
            [program, str(config), "--sentinel"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _agree(self) -> bool:
        others, replicas = f"num-other-sentinels\r\n${1}\r\n{len(self._ports) - 1}\r\n", "num-slaves\r\n$1\r\n1\r\n"
        try:
            answers = [self._sentinel(port, "SENTINEL", "MASTER", self.SERVICE) for port in self._ports]
        except OSError:
            return False
        return all(others in answer and replicas in answer for answer in answers)

    def _sentinel(self, port: int, *words: str) -> str:
        return _asked(port, [("AUTH", self.SENTINEL_PASSWORD), words])

    def ask(self, server: RedisServer, *words: str) -> str:
        """The reply of a server of the pair to one command."""
        return _asked(server.port, [("AUTH", self.PASSWORD), words])

    def fail_over(self) -> None:
        """Have the Sentinels make the replica the primary, while the primary lives; and wait for it."""
        before, after = self.primary, self.replica

        def is_said(server: RedisServer, words: str) -> bool:
            # A server whose role changes ends its clients' connections.
            try:
                return words in self.ask(server, "INFO", "replication")
            except OSError:
                return False

        wait_until(
            lambda: self._sentinel(self._ports[0], "SENTINEL", "FAILOVER", self.SERVICE).endswith("+OK\r\n"),
            "the failover to begin",
        )
        wait_until(lambda: is_said(after, "role:master"), "the new primary")
        wait_until(lambda: is_said(before, "master_link_status:up"), "the new replica")
        self.primary, self.replica = after, before

    def stop(self) -> None:
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait()
        self._sentinels = []
        self.replica.stop()
        self.primary.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _asked(port: int, commands: Sequence[Sequence[str]]) -> str:
    """What a server answers to these commands, all of it together."""
    with socket.create_connection((HOST, port), timeout=60) as connection, connection.makefile("rb") as file:
        said = ""
        for words in commands:
            request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(request.encode())
            said = _reply(file)
    return said


def _reply(file: BinaryIO) -> str:
    line = file.readline().decode()
    count = int(line[1:]) if line[:1] in ("$", "*") else 0
    if line[:1] == "$" and count >= 0:
        return line + file.read(count + 2).decode()
    if line[:1] == "*":
        return line + "".join(_reply(file) for _ in range(count))
    return line


def make_certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A CA certificate, and a certificate with its key for the loopback address, good for server and client."""
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, ca, key, request, certificate, names = (
        directory / name for name in ("ca.key", "ca.crt", "server.key", "server.csr", "server.crt", "names.txt")
    )
    names.write_text(f"subjectAltName=IP:{HOST},DNS:localhost\n")

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    new_key = ["-newkey", "rsa:2048", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test CA")
    openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=localhost")
    signed_by: list[str | Path] = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial"]
    openssl("x509", "-req", "-in", request, *signed_by, "-out", certificate, "-days", "2", "-extfile", names)
    return ca, certificate, key


def tls_options(ca: Path, certificate: Path, key: Path, *, client_certificates: bool) -> list[tuple[str, str]]:
    """Lines of redis.conf for a server of ``RedisServer(..., tls=True)``."""
    return [
        ("tls-ca-cert-file", str(ca)),
        ("tls-cert-file", str(certificate)),
        ("tls-key-file", str(key)),
        ("tls-auth-clients", "yes" if client_certificates else "no"),
    ]


def _expect_ok(answer: str) -> None:
    if not answer.startswith("+OK"):
        raise RuntimeError(answer.strip())
