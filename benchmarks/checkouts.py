"""Two checkouts of this repository measured in turns, round by round, each in a process of its own.

The script that measures runs in every process, with the ``hicache_ext`` of that checkout: so it uses only what is the
same in both. It answers questions, one line of JSON each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def roots(against: Path | None) -> dict[str, Path]:
    """The checkouts by name: the other one first, so that a ratio of the last to the first is this one's."""
    named = {} if against is None else {f"{against.resolve().name}": against.resolve()}
    return {**named, "here" if HERE.name in named else HERE.name: HERE}


def open_backend(pools: Any, ours: Mapping[str, Any]) -> Any:
    """The backend of the checkout that this process measures, as SGLang opens it over ``mha_pools``; ``ours`` is the
    section ``hicache_ext``."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

    from hicache_ext.storage.backend import HiCacheExtBackend

    facts = {f"{kind}_{fact}": int(fact == "size") for kind in ("tp", "pp", "attn_cp") for fact in ("rank", "size")}
    backend = HiCacheExtBackend(
        HiCacheStorageConfig(
            **facts,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
            extra_config={
                "backend_name": "hicache_ext",
                "module_path": "hicache_ext.storage.backend",
                "class_name": "HiCacheExtBackend",
                "interface_v1": 1,
                "hicache_ext": ours,
            },
        ),
        {},
    )
    backend.register_mem_pool_host(pools.host)
    backend.register_mem_host_pool_v2(pools.host, PoolName.KV)
    backend.on_host_pools_registered()
    return backend


def let_code_compile() -> None:
    """In a checkout from before the native core: numba."""
    for module in list(sys.modules.values()):
        if "wait_for_compiled_code" in getattr(module, "__dict__", {}):
            module.wait_for_compiled_code()
            return


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the questions of ``Checkout.ask``; what else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


class Checkout:
    """The process of one checkout that runs ``script`` with ``words``, which ends in ``serve``."""

    def __init__(self, root: Path, script: str, words: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root)}
        command = [sys.executable, str(Path(script).resolve()), *words]
        self._process = subprocess.Popen(
            command, env=environment, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a checkout's process ended: {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def in_turns(checkouts: Mapping[str, Checkout], question: Any, rounds: int) -> dict[str, list[Any]]:
    """The answers of ``rounds`` rounds; who is asked first changes from round to round."""
    answers: dict[str, list[Any]] = {name: [] for name in checkouts}
    for number in range(rounds):
        order = list(checkouts.items())
        for name, checkout in order if number % 2 == 0 else reversed(order):
            answers[name].append(checkout.ask(question))
    return answers
