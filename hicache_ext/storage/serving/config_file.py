"""The configuration file of a running server: re-read when a command asks for it or when it changes.

The backend has one when SGLang was started with ``@FILE``. A server with an inline configuration has no file to
re-read, and logs so at start.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_document
from hicache_ext.config.problems import config_error
from hicache_ext.errors import ConfigError, ControlError, HicacheExtError
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_systems import read_mounts
from hicache_ext.runtime.whole_file import file_signature
from hicache_ext.storage.serving.control import ControlSocket
from hicache_ext.storage.tiering.reload import ReloadableStore

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 2.0
"""Seconds between two checks of the file."""
_CLOSE_WAIT = 10.0

View = Callable[[HicacheExtConfig], HicacheExtConfig]


class ConfigFile:
    """Reloads a store from its file, on its own threads. SGLang's threads only run the constructor."""

    def __init__(
        self,
        file: str,
        store: ReloadableStore,
        *,
        watch: bool,
        watch_interval: float = WATCH_INTERVAL,
        view: View = lambda config: config,
        distrust: Callable[[str], None] | None = None,
        port: int | None = None,
    ) -> None:
        """``view`` maps the file's configuration to this server's, the same function as at the start. ``distrust`` is
        called with a reason when a command found wrong pages. ``port``: port of the server's API.

        Raises ConfigError if ``file`` does not hold the configuration of ``store``.
        """
        self._view, self._distrust, self._port = view, distrust, port
        self._file = file
        self._store = store
        self._interval = watch_interval
        self._seen = file_signature(file)
        self._document = load_document(file)
        if view(self._document.hicache_ext) != store.config:
            raise ConfigError(file, "does not hold the configuration that this server was started with")
        self._lock = threading.Lock()
        self._refused = self._gone = False
        self._watcher = BackgroundLoop("hicache-config", self._look)
        self._socket: ControlSocket | None = None
        try:
            self._socket = ControlSocket(self._handle)
        except ControlError as error:
            logger.warning("hicache_ext: `hicache-ext reload` will not reach this server: %s", error)
        if watch:
            self._watcher.wake(watch_interval)

    @property
    def in_force(self) -> bool:
        """Whether this server runs the configuration of its file, as last seen: False after a refused file and while a
        watched one is missing. Such a server works, but its next start will fail. Threads: any."""
        return not (self._refused or self._gone)

    def reload(self, *, only_check: bool = False) -> list[str]:
        """Apply the file; return the changes in words. Raises HicacheExtError; then nothing has changed."""
        with self._lock:
            try:
                changes = self._take_over(only_check)
            except Exception:
                self._refused = self._refused or not only_check
                raise
            self._refused = self._refused and only_check
            return changes

    def _take_over(self, only_check: bool) -> list[str]:
        document = load_document(self._file)
        if problems := _unchangeable(self._document, document):
            raise config_error(problems)
        config = self._view(document.hicache_ext)
        if only_check:
            self._store.check(config)
            return []
        changes = self._store.reload(config)
        self._document = document
        return changes

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._watcher.stop(_CLOSE_WAIT)

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("call") == "facts":
            return {
                "ok": True,
                "file": self._file,
                "pid": os.getpid(),
                "port": self._port,
                "exact": self._distrust is not None,
            }
        if request.get("call") == "distrust" and self._distrust is not None:
            self._distrust(str(request.get("why"))[:1000])
            return {"ok": True, "messages": []}
        if request.get("call") != "reload":
            return {"ok": False, "messages": [f"unknown call {str(request.get('call'))[:40]!r}"]}
        try:
            return {"ok": True, "messages": self.reload(only_check=request.get("only_check") is True)}
        except HicacheExtError as error:
            return {"ok": False, "messages": str(error).splitlines()}

    def _look(self) -> float:
        signature = file_signature(self._file)
        self._gone = signature is None
        if signature == self._seen or signature is None:
            return self._interval
        if not self._watcher.rest(self._interval) or file_signature(self._file) != signature:
            return self._interval  # it is being written
        self._seen = signature
        try:
            if not self.reload():
                logger.info("hicache_ext: %s was written and says the same as before", self._file)
        except HicacheExtError as error:
            for line in str(error).splitlines():
                logger.error("hicache_ext: %s is not taken over, what was in force stays: %s", self._file, line)
        except Exception:
            logger.exception("hicache_ext: %s is not taken over, what was in force stays", self._file)
        return self._interval


def _unchangeable(old: ExtraConfig, new: ExtraConfig) -> list[ConfigError]:
    """Return an error for each changed key of SGLang's own."""
    return [
        ConfigError(key, "cannot change while the server runs: SGLang reads it at start")
        for key in ExtraConfig.model_fields
        if key != "hicache_ext" and getattr(old, key) != getattr(new, key)
    ]


def _is_mounted_alone(file: str) -> bool:
    """Return whether the file itself is a mount, which stays the same file even if it is replaced on the host."""
    directory, name = os.path.split(os.path.abspath(file))
    point = os.path.join(os.path.realpath(directory), name)
    try:
        return any(mount.point == point for mount in read_mounts())
    except OSError:
        return False


def config_file_of(
    file: str | None, store: ReloadableStore, config: HicacheExtConfig, **of_server: Any
) -> ConfigFile | None:
    """Return a backend's file, or None if there is none to re-read. ``of_server``: see ``ConfigFile``. Never raises."""
    if file is None:
        if config.watch_config:
            logger.warning("hicache_ext.watch_config: the configuration was given inline, so that no file is watched")
        return None
    if config.watch_config and _is_mounted_alone(file):
        logger.warning(
            "hicache_ext.watch_config: %s is mounted by itself (subPath, or a file given to docker -v), so that a file "
            "that takes its place is never seen here; mount the directory that holds it",
            file,
        )
    try:
        return ConfigFile(file, store, watch=config.watch_config, **of_server)
    except (HicacheExtError, RuntimeError) as error:
        logger.warning("hicache_ext: the configuration cannot be reloaded: %s", error)
        return None
