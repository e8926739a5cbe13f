"""Pull or recompute with a tier slowed step by step: how long until a prefix is there, against computing it.

``python -m tests.campaigns.slow_tier_pull``: a real backend over a real directory; computing is a sleep at a given
rate, and a prefix takes what batch_exists and batch_get_v1 take, plus the computing of what was not pulled.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.storage.backend import HiCacheExtBackend  # noqa: E402
from hicache_ext.testing.conformance.storage_backend import make_storage_config, page_keys  # noqa: E402
from hicache_ext.testing.faults import SlowStore  # noqa: E402
from hicache_ext.testing.host_pools import mha_pools, page_indices  # noqa: E402
from tests.backend.test_conformance import extra_config  # noqa: E402

PAGE_SIZE = 16
PAGES = 64
RATE = 10_000.0
DELAYS_MS = (0, 10, 25, 50, 75, 90, 110, 150, 300, 1000)
REQUESTS = 12


def main() -> None:
    tokens = PAGES * PAGE_SIZE
    recompute = tokens / RATE
    print(
        f"{tokens} tokens; computing them takes {recompute * 1e3:.0f} ms. Milliseconds, median (worst) of {REQUESTS}."
    )
    print(f"{'tier delay':>10}  {'always pull':>16}  {'adaptive':>16}  adaptive / recompute")
    for delay in DELAYS_MS:
        always, adaptive = (_run(mode, delay / 1000) for mode in ("off", "adaptive"))
        print(
            f"{delay:>7} ms  {_cell(always):>16}  {_cell(adaptive):>16}  {statistics.median(adaptive) / recompute:.2f}"
        )


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ({max(seconds) * 1e3:.0f})"


def _run(mode: str, delay: float) -> list[float]:
    pull = {"mode": "off"} if mode == "off" else {"mode": mode, "prefill_rate": RATE, "probe_interval": 1}
    keys, indices = page_keys(PAGES), page_indices(PAGE_SIZE, list(range(PAGES)))
    with tempfile.TemporaryDirectory() as directory:
        config = make_storage_config(extra_config=extra_config(Path(directory), pd={"pull": pull}))
        backend = HiCacheExtBackend(config, {})
        try:
            backend.register_mem_pool_host(mha_pools(page_size=PAGE_SIZE, pages=PAGES).host)
            assert all(backend.batch_set_v1(keys, indices))
            # Only reads are slow: look-ups are small.
            (tier,) = backend._store.tiers
            holder = backend._store._retrieve if mode == "off" else None
            slow = SlowStore(tier if holder is not None else tier.inner, delay)
            slow.count_leading = slow.inner.count_leading  # type: ignore[method-assign]
            if holder is not None:
                holder[:] = [slow]
            else:
                tier.inner = slow
            backend.batch_get_v1(keys, indices)
            seconds = []
            for _ in range(REQUESTS):
                started = time.perf_counter()
                hit = backend.batch_exists(keys)
                if hit and not all(backend.batch_get_v1(keys[:hit], indices[: hit * PAGE_SIZE])):
                    hit = 0
                time.sleep((PAGES - hit) * PAGE_SIZE / RATE)
                seconds.append(time.perf_counter() - started)
            return seconds
        finally:
            backend.close()


if __name__ == "__main__":
    main()
