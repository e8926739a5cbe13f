"""The file tier as ``hicache-ext bench file`` measures it, against aiofiles besides.

python -m benchmarks.bench_file --directory DIRECTORY --json FILE
"""

import argparse
import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hicache_ext.bench import file
from hicache_ext.bench.pool import Pages
from hicache_ext.cli.main import without_traceback
from hicache_ext.runtime.commands import standard_output_of
from hicache_ext.storage.contract.base import leading


class AiofilesContender:
    """A file per page through aiofiles, the pages of a batch together; no envelope, no atomic publication."""

    def __init__(self, directory: Path, capacity: int, payload: int) -> None:
        import aiofiles

        self._open: Any = aiofiles.open
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(4))
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-aiofiles", daemon=True)
        self._thread.start()

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._run([self._move(key, page, "wb") for key, page in zip(keys, pages.sources, strict=True)])

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._run([self._move(key, page, "rb") for key, page in zip(keys, pages.targets, strict=True)])

    def _run(self, pages: list[Coroutine[Any, Any, bool]]) -> int:
        async def all_pages() -> list[bool]:
            return await asyncio.gather(*pages)

        return leading(asyncio.run_coroutine_threadsafe(all_pages(), self._loop).result())

    async def _move(self, key: bytes, page: Any, mode: str) -> bool:
        async with self._open(self._directory / key.hex(), mode, buffering=0) as opened:
            moved: int = await (opened.write(page.data) if mode == "wb" else opened.readinto(page.data))
            return moved == int(page.nbytes)

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    file.configure(parser)
    arguments = parser.parse_args()
    with standard_output_of(arguments):
        return file.run(arguments, {"aiofiles": AiofilesContender})


if __name__ == "__main__":
    sys.exit(without_traceback(main))
