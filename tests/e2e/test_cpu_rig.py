"""The rig itself: a real SGLang server whose cache goes from L1 to L2 to SGLang's own file backend and back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ext.storage.serving.control import DIRECTORY_VARIABLE
from hicache_ext.testing.server import SglangServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = [(7 * position * position + 3 * position) % 250 for position in range(640)]
# The last token of a prompt is always computed, so a hit ends one page before a prompt of whole pages does.
REUSABLE = len(PROMPT) - PAGE_SIZE


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hce-") as directory:  # a socket's path must be short
        yield Path(directory)


def test_a_prompt_comes_back_from_storage_the_answer_stays_the_same_and_the_server_leaves_no_file_behind(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "sockets"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    storage = tmp_path / "l3"
    with SglangServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="file",
        environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)},
    ) as server:
        cold = server.generate(PROMPT)
        assert (cold.prompt_tokens, cold.cached_tokens) == (len(PROMPT), 0)
        assert server.generate(PROMPT).cached.device == REUSABLE

        server.flush_cache()
        stored = len(list(storage.iterdir()))
        warm = server.generate(PROMPT)
        # Same tail, other prefix: were the answer a matter of the tail alone, equal answers would prove nothing.
        other = server.generate(PROMPT[:320][::-1] + PROMPT[320:])

    assert list(place.iterdir()) == []
    assert stored >= REUSABLE // PAGE_SIZE
    assert warm.cached.storage == warm.cached_tokens == REUSABLE
    assert warm.output_ids == cold.output_ids
    assert other.output_ids != cold.output_ids
