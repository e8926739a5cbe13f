"""Real servers over a sealed tier: a prompt is restored with its key, and without it computed, and no key is shown."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import FIRST_PROMPT, file_tier_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
REUSABLE = len(FIRST_PROMPT) - PAGE_SIZE
SECRETS = {id: hashlib.sha256(id.encode()).hexdigest() for id in ("old", "new")}


def test_a_prompt_is_restored_from_an_encrypted_tier_through_a_rotation_of_its_keys(
    tiny_model: Path, tmp_path: Path, cold_answer: Callable[[Sequence[int]], Generation]
) -> None:
    cold, file = cold_answer(FIRST_PROMPT), tmp_path / "hicache.yaml"
    for id, secret in SECRETS.items():
        (tmp_path / id).write_text(secret)

    def configure(*ids: str) -> None:
        document = file_tier_config(tmp_path / "l3")
        keys = [{"id": id, "file": str(tmp_path / id)} for id in ids]
        document["hicache_ext"]["tiers"]["disk"] |= {
            "codec": "lossless",
            "seal": {"mode": "encrypt", "keys": keys},
        }
        file.write_text(yaml.safe_dump(document))

    def serve(name: str) -> SglangServer:
        return SglangServer(
            tiny_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{file}",
        )

    configure("old")
    with serve("first") as server:
        assert server.generate(FIRST_PROMPT).cached_tokens == 0
        server.flush_cache()
        restored = server.generate(FIRST_PROMPT)
        assert (restored.cached.storage, restored.output_ids) == (REUSABLE, cold.output_ids)
        server.kill()
    with serve("second") as server:
        # Found by the key that is on its way out, and by neither after it is gone.
        for ids, found in ((("new", "old"), REUSABLE), (("new",), 0), (("new",), REUSABLE)):
            configure(*ids)
            assert main(["reload", str(file)]) == 0
            server.flush_cache()
            answer = server.generate(FIRST_PROMPT)
            assert (answer.cached.storage or 0, answer.output_ids) == (found, cold.output_ids)
        info = server.get("/server_info")
    sizes = {int(slab.stem.split("-")[1]) for slab in (tmp_path / "l3").rglob("*.slab")}
    assert sizes and max(sizes) <= 8192, "a page of 8192 bytes as it is takes a slot of more"
    logs = "".join((tmp_path / f"{name}.log").read_text() for name in ("first", "second"))
    assert not [secret for secret in SECRETS.values() if secret in f"{logs}{info}"]
