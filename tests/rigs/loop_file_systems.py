"""File systems that can be cut off: ext4 or XFS in an image file, mounted by a loop device.

::

    with LoopFileSystem("xfs") as disk:
        ...  # use disk.path
        disk.shut_down()  # from now on every call to it fails with EIO, as when the device has died
        disk.remount()  # the log is recovered, as at the first mount after a power loss

``shut_down`` is the ioctl that file systems are tested with. What reached the image before it stays; what was only in
memory is gone with the mount. A device that loses what it has acknowledged is not imitated.

A guard, a small process of its own, unmounts and removes everything once this process lets go of it, however it ends.
Needs root; ``missing_for`` says what lacks.
"""

from __future__ import annotations

import enum
import fcntl
import functools
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SHUT_DOWN = 0x8004587D
"""XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)."""
_SIZES = {"ext4": 128 << 20, "xfs": 320 << 20}
"""Bytes of an image. They are sparse; mkfs.xfs makes none below 300 MiB."""
_MAKERS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""Where accounts other than root do not look."""
FILE_SYSTEMS = tuple(_MAKERS)


class Flush(enum.IntEnum):
    """What a shut-down brings to the disk before it."""

    EVERYTHING = 0
    """Files and log, as a ``sync`` does."""
    LOG = 1
    """What the file system noted in its log; not the bytes of files."""
    NOTHING = 2
    """As a power loss."""


class StillInUseError(OSError):
    """The file system cannot be unmounted; the message names who has files of it open."""


@functools.cache
def missing_for(file_system: str) -> str | None:
    """What this machine lacks for a :class:`LoopFileSystem`, or None; for ``pytest.skip("missing: ...")``."""
    for program in (_MAKERS[file_system][0], "mount", "umount", "losetup"):
        if shutil.which(program, path=_PATH) is None:
            return f"the program {program}"
    if os.geteuid() != 0:
        return "the right to mount a file system (root)"
    try:
        with LoopFileSystem(file_system):
            return None
    except OSError as error:
        return f"the right to mount {file_system} by a loop device ({error})"


class LoopFileSystem:
    """One file system, mounted at ``path`` between ``start`` and ``stop``. Threads: one."""

    def __init__(self, file_system: str, directory: Path | None = None) -> None:
        """``file_system``: one of FILE_SYSTEMS. ``directory``: where the image is made; left out: among temporary
        files."""
        self.type = file_system
        self._directory = directory
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LoopFileSystem:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Make and mount it. Raises OSError where that does not work."""
        root = Path(tempfile.mkdtemp(prefix="hicache-loop-", dir=self._directory)).resolve()
        self.path = root / "mounted"
        self._image = root / "image"
        # A session of its own: Ctrl-C is for the campaign, and the guard then cleans up behind it.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", __file__, str(root), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.path.mkdir()
            with open(self._image, "wb") as image:
                image.truncate(_SIZES[self.type])
            _run([*_MAKERS[self.type], str(self._image)])
            self._mount()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Unmount and remove it. Processes that still use it are killed."""
        guard, self._guard = self._guard, None
        if guard is not None:
            said = guard.communicate()[0].decode(errors="replace")
            if said:
                sys.stderr.write(said)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        _run(["sync", "--file-system", str(self.path)])

    def shut_down(self, flush: Flush = Flush.NOTHING) -> None:
        """The file system answers every call with EIO from now on."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _SHUT_DOWN, struct.pack("I", flush))
        finally:
            os.close(fd)

    def remount(self, within: float = 30.0) -> None:
        """Unmount it, and mount it again, which recovers the log.

        Raises StillInUseError where somebody has files of it open after ``within`` seconds.
        """
        deadline = time.monotonic() + within
        while True:
            try:
                _run(["umount", str(self.path)])
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    users = [f"process {user}: {', '.join(files)}" for user, files in _users(self.path).items()]
                    raise StillInUseError(f"{error}; in use by {'; '.join(users)}") from error
                time.sleep(0.05)
        # Until the loop device has let go of the image, a second one would have the same file system.
        while _run(["losetup", "--associated", str(self._image)]):
            if time.monotonic() > deadline:
                raise StillInUseError(f"{self._image} still belongs to a loop device")
            time.sleep(0.05)
        self._mount()

    def _mount(self) -> None:
        _run(["mount", "-t", self.type, "-o", "loop", str(self._image), str(self.path)])


def _run(command: list[str]) -> str:
    """What it printed. Raises OSError with what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": _PATH})
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _users(mount_point: Path) -> dict[int, list[str]]:
    """Process -> what it has open, mapped, or as its working directory."""
    users = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            files = {text for text in _opened(process) if f"{text}/".startswith(f"{mount_point}/")}
            if files:
                users[int(process.name)] = sorted(os.path.relpath(file, mount_point) for file in files)
    return users


def _opened(process: Path) -> Iterator[str]:
    # It may end meanwhile.
    with suppress(OSError):
        yield os.readlink(process / "cwd")
        for fd in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(fd)
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield "/" + line.partition("/")[2]


# -- the guard ---------------------------------------------------------------------------------------------------------


def _guard(root: Path, owner: int) -> None:
    """Wait until the owner lets go, then take everything away."""
    sys.stdin.buffer.read()
    mount_point = root / "mounted"
    for attempt in range(50):
        if not os.path.ismount(mount_point):
            break
        try:
            _run(["umount", str(mount_point)])
        except OSError as error:
            # The first time somebody may just be closing his files.
            for user in _users(mount_point) if attempt else ():
                if user not in (owner, os.getpid()):
                    print(f"{mount_point} is in use by process {user}, which is killed", flush=True)
                    with suppress(ProcessLookupError):
                        os.kill(user, signal.SIGKILL)
            if attempt == 49:
                print(f"{mount_point} is unmounted once its last user ends: {error}", flush=True)
                with suppress(OSError):
                    _run(["umount", "--lazy", str(mount_point)])
            time.sleep(0.1)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), int(sys.argv[2]))
