"""Ceph's S3 server on this machine, run by this user: one monitor, one object store daemon in memory, one gateway.

For ``make test-radosgw``: the real thing beside the s3rver of the routine suite. Needs Debian's packages ceph-mon,
ceph-osd, ceph-common and radosgw; nothing of theirs is started or configured system-wide.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import uuid
from pathlib import Path

from hicache_ext.testing.server import free_port
from tests.waiting import wait_until

ACCESS_KEY = SECRET_KEY = "hicache"
"""Of a gateway that lives as long as a test."""

_PROGRAMS = ("ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "ceph", "radosgw", "radosgw-admin")
_HOST = "127.0.0.1"
_STEP_TIMEOUT = 120


class RadosgwError(RuntimeError):
    """The gateway did not start; the message says which step failed and ends with what it printed."""


def missing_radosgw() -> str | None:
    """What this machine lacks, or None."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(lacking)} (apt-get install ceph-mon ceph-osd ceph-common radosgw)" if lacking else None


class Radosgw:
    """A cluster of one, in a directory of its own. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).resolve()
        self.port = free_port()
        self._monitor_port = free_port()
        self._conf = self.directory / "ceph.conf"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def start(self) -> None:
        """Takes about 15 seconds. Raises RadosgwError."""
        place = self.directory
        for name in ("mon", "osd", "rgw", "run"):
            (place / name).mkdir(parents=True, exist_ok=True)
        cluster = str(uuid.uuid4())
        self._write_conf(cluster)
        keyring = str(place / "keyring")
        monmap = str(place / "monmap")
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._run(
            *("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", "--cap", "mon", "allow *"),
            *("--cap", "osd", "allow *", "--cap", "mgr", "allow *"),
        )
        self._run("monmaptool", "--create", "--clobber", "--addv", "a", f"[v2:{_HOST}:{self._monitor_port}]",
                  "--fsid", cluster, monmap)  # fmt: skip
        self._run("ceph-mon", "-c", str(self._conf), "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._serve("ceph-mon", "-i", "a")
        daemon = str(uuid.uuid4())
        self._ceph("osd", "new", daemon)
        # The monitor ignores a daemon that does not come with the id it was told.
        self._run("ceph-osd", "-c", str(self._conf), "-i", "0", "--mkfs", "--osd-uuid", daemon)
        self._serve("ceph-osd", "-i", "0")
        wait_until(lambda: "1 up" in self._ceph("osd", "stat"), "the object store daemon", _STEP_TIMEOUT)
        self._serve("radosgw", "-n", "client.admin", "-k", keyring)
        wait_until(self._answers, "radosgw", _STEP_TIMEOUT)
        self._run(
            *("radosgw-admin", "-c", str(self._conf), "-k", keyring, "user", "create", "--uid", "test"),
            *("--display-name", "test", "--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY),
        )

    def _write_conf(self, cluster: str) -> None:
        place = self.directory
        # crc: the gateway wants an encrypted way to the monitor, for which there is no key without a login.
        self._conf.write_text(
            f"""[global]
fsid = {cluster}
mon_host = [v2:{_HOST}:{self._monitor_port}]
public_network = 127.0.0.0/8
ms_bind_ipv4 = true
keyring = {place}/keyring
run_dir = {place}/run
admin_socket = {place}/run/$name.asok
log_file = {place}/$name.log
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 2147483648
mon_data = {place}/mon
osd_data = {place}/osd
rgw_data = {place}/rgw
rgw_frontends = beast endpoint={_HOST}:{self.port}
rgw_thread_pool_size = 64
"""
        )

    def _run(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_STEP_TIMEOUT, check=False)
        if done.returncode:
            raise RadosgwError(f"{words[0]} failed ({done.returncode})\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def _ceph(self, *words: str) -> str:
        return self._run("ceph", "-c", str(self._conf), "--connect-timeout", "30", *words)

    def _serve(self, program: str, *words: str) -> None:
        with (self.directory / f"{program}.out").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [program, "-c", str(self._conf), "-f", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _answers(self) -> bool:
        if self._processes[-1].poll() is not None:
            said = (self.directory / "radosgw.out").read_text(errors="replace")[-2000:]
            raise RadosgwError(f"radosgw did not come up\n{said}")
        with contextlib.suppress(OSError), socket.create_connection((_HOST, self.port), timeout=1):
            return True
        return False

    def make_bucket(self, name: str) -> None:
        """A PUT signed the old way, which every S3 server takes."""
        import base64
        import email.utils
        import hashlib
        import hmac
        import urllib.request

        date = email.utils.formatdate(usegmt=True)
        text = f"PUT\n\n\n{date}\n/{name}"
        signature = base64.b64encode(hmac.new(SECRET_KEY.encode(), text.encode(), hashlib.sha1).digest()).decode()
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        request.add_header("Date", date)
        request.add_header("Authorization", f"AWS {ACCESS_KEY}:{signature}")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60):
            pass

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()

    def __enter__(self) -> Radosgw:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
