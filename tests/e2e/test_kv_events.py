"""A real server: what it publishes of storage, beside what SGLang publishes of the device and host memory."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest
import requests

from hicache_ext.testing.server import SglangServer, free_port
from tests.e2e.conftest import file_tier_config
from tests.e2e.test_cpu_rig import PAGE_SIZE, PROMPT, REUSABLE
from tests.rigs.kv_events import LONG, follow_until, subscriber_class

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_router_finds_the_pages_on_disk_by_the_block_hashes_of_sglangs_own_events(
    tiny_model: Path, tmp_path: Path
) -> None:
    import msgspec
    import zmq

    theirs, ours, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    config = file_tier_config(tmp_path / "l3", events={"endpoint": ours, "replay_endpoint": replay})
    sglangs = json.dumps({"publisher": "zmq", "endpoint": theirs.replace("127.0.0.1", "*")})
    with (
        zmq.Context.instance().socket(zmq.SUB) as live,
        closing(subscriber_class()(ours, replay)) as following,
    ):
        live.subscribe("")
        live.connect(theirs)
        with SglangServer(
            tiny_model,
            log_file=tmp_path / "server.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=config,
            extra_arguments=("--kv-events-config", sglangs),
        ) as server:
            assert follow_until(following, {}) == {}
            following.catch_up()
            cold = server.generate(PROMPT)
            published: dict[str, set[int]] = {}
            while live.poll(2000):
                for event in msgspec.msgpack.decode(live.recv_multipart()[2])[1]:
                    if event["type"] == "BlockStored":
                        published.setdefault(event["medium"], set()).update(event["block_hashes"])
            of_prompt = published["GPU"] | published["CPU_PINNED"]
            deadline = time.monotonic() + LONG
            while len(following.index["DISK"]) < REUSABLE // PAGE_SIZE and time.monotonic() < deadline:
                following.follow(0.1)
            assert len(following.index["DISK"]) >= REUSABLE // PAGE_SIZE
            assert set(following.index["DISK"]) <= of_prompt
            # SGLang forgets, storage does not.
            server.flush_cache()
            assert server.generate(PROMPT).cached.storage == REUSABLE
            assert server.generate(PROMPT).output_ids == cold.output_ids
            answer = requests.get(f"{server.url}/get_hicache_l3_cache_layout", timeout=30)
            if answer.status_code != 404:  # Releases before 0.5.23 do not have it.
                layout = answer.json()
                assert (layout["enabled"], layout["backend"]) == (False, "dynamic")
            requests.post(f"{server.url}/hicache/storage-backend/clear", timeout=30)
            assert follow_until(following, {}) == {}
