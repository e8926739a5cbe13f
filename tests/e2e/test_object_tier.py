"""Two real SGLang servers that share nothing but a bucket: what one computed, the other restores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.config.model import ExtraConfig
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import FIRST_PROMPT, SECOND_PROMPT, restored_by
from tests.rigs.s3_server import S3Server, missing_s3_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT, SECOND = FIRST_PROMPT, SECOND_PROMPT
REUSABLE = len(PROMPT) - PAGE_SIZE
"""The last token of a prompt is always computed, so a hit ends one page before a prompt of whole pages does."""


@pytest.fixture
def s3_server(tmp_path: Path) -> Iterator[S3Server]:
    if missing := missing_s3_server():
        pytest.skip(f"missing: {missing}")
    with S3Server(tmp_path) as server:
        yield server


def serve(model: Path, directory: Path, name: str, tier: dict[str, Any]) -> SglangServer:
    config = directory / f"{name}.yaml"
    config.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"pool": tier}})))
    return SglangServer(
        model,
        log_file=directory / f"{name}.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{config}",
        environment={**os.environ, **S3Server.environment()},
    )


def test_two_servers_share_a_bucket_which_dies_and_comes_back(
    tiny_model: Path, tmp_path: Path, s3_server: S3Server, cold_answer: Callable[[Sequence[int]], Generation]
) -> None:
    tier = s3_server.tier("pool", timeout="2s")
    cold = [cold_answer(PROMPT), cold_answer(SECOND)]
    with serve(tiny_model, tmp_path, "first", tier) as first, serve(tiny_model, tmp_path, "second", tier) as second:
        computed = first.generate(PROMPT)
        assert computed.cached_tokens == 0
        assert computed.output_ids == cold[0].output_ids
        restored_by(second, first, PROMPT, cold[0], REUSABLE)

        s3_server.kill()
        second.flush_cache()
        without: Generation = second.generate(PROMPT)
        assert without.cached_tokens == 0
        assert without.output_ids == cold[0].output_ids
        second.flush_cache()

        s3_server.start()
        restored_by(first, second, SECOND, cold[1], REUSABLE)
    # Secrets stay where they are.
    assert "HICACHE_TEST_S3_KEY" in (tmp_path / "first.yaml").read_text()
