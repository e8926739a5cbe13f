"""A real server: KV of other weights is never served, whether an adapter was retrained or a few rows edited.

Seen before: an adapter trained again into its directory was answered with the old one's KV from storage (SGLang names
adapters by name and path); a model of which 384 rows were permuted in place was answered with the old model's (4 KiB of
each tensor were looked at).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import file_tier_config
from tests.e2e.modes import saw
from tests.rigs.tiny_adapter import make_tiny_adapter
from tests.rigs.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = [(11 * position * position + 5 * position) % 250 for position in range(640)]
REUSABLE = len(PROMPT) - PAGE_SIZE


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "hicache.yaml"
    path.write_text(yaml.safe_dump(file_tier_config(tmp_path / "l3")))
    return path


def serve(model: Path, config_file: Path, name: str, arguments: Sequence[str] = ()) -> SglangServer:
    return SglangServer(
        model,
        log_file=config_file.with_name(f"{name}.log"),
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{config_file}",
        extra_arguments=arguments,
    )


def test_pages_of_different_adapter_weights_never_meet_and_those_of_equal_ones_do(
    tiny_model: Path, tmp_path: Path, config_file: Path
) -> None:
    adapter = make_tiny_adapter(tmp_path / "adapter", seed=1)
    copy = tmp_path / "elsewhere"
    shutil.copytree(adapter, copy)
    lora = ("--lora-paths", f"a={adapter}", "--lora-backend", "torch_native", "--max-loras-per-batch", "2")

    def ask(server: SglangServer, name: str | None) -> Generation:
        server.flush_cache()
        return server.generate(PROMPT, lora_path=name)

    with serve(tiny_model, config_file, "first", lora) as server:
        old = ask(server, "a")
        assert old.cached_tokens == 0
        restored = ask(server, "a")
        assert (restored.cached.storage, restored.output_ids) == (REUSABLE, old.output_ids)
        saw("`--lora-paths`, a request with `lora_path`", restored)
        base = ask(server, None)
        assert base.cached_tokens == 0
        assert base.output_ids != old.output_ids
        # Whoever sends the adapter's digest by hand gets nothing that an adapter has shaped.
        digest = server.log_file.read_text().partition("have the adapter digest ")[2][:32]
        assert server.generate(PROMPT, extra_key=digest).output_ids == base.output_ids
        # What a server holds is what it loaded, also when the file is overwritten under it.
        overwritten = (adapter / "adapter_model.safetensors").read_bytes()
        with (adapter / "adapter_model.safetensors").open("r+b") as file:
            file.seek(len(overwritten) // 2)
            file.write(b"\x11" * (len(overwritten) // 4))
        server.request("POST", "/load_lora_adapter", {"lora_name": "c", "lora_path": str(copy)})
        server.request("POST", "/load_lora_adapter", {"lora_name": "d", "lora_path": str(copy)})
        for name in ("c", "d", "a"):  # of two places on the device, so that "a" is brought there again
            assert ask(server, name).output_ids == old.output_ids

    make_tiny_adapter(adapter, seed=2)
    with serve(tiny_model, config_file, "second", lora) as server:
        new = ask(server, "a")
        assert new.cached_tokens == 0
        assert new.output_ids != old.output_ids
        assert ask(server, "a").output_ids == new.output_ids
        for _ in range(2):  # over HTTP SGLang's own name for it is another one each time
            server.request("POST", "/load_lora_adapter", {"lora_name": "b", "lora_path": str(copy)})
            equal = ask(server, "b")
            assert (equal.cached.storage, equal.output_ids) == (REUSABLE, old.output_ids)
            server.request("POST", "/unload_lora_adapter", {"lora_name": "b"})


def edit_a_few_rows(model: Path) -> None:
    """In place, without changing the file's size."""
    file = model / "model.safetensors"
    size = file.stat().st_size
    weights = load_file(file)
    rows = weights["model.embed_tokens.weight"]
    # Past the first 4 KiB and away from the middle, where a sample would look.
    rows[40:100] = rows[40:100][torch.randperm(60, generator=torch.Generator().manual_seed(1))]
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size == size


def test_a_model_of_which_a_few_rows_were_edited_gets_nothing_of_the_old_ones_online_or_offline(
    tmp_path: Path, config_file: Path
) -> None:
    model, edited = make_tiny_model(tmp_path / "model", seed=5), tmp_path / "edited"
    shutil.copytree(model, edited)
    edit_a_few_rows(edited)
    same_name = ("--served-model-name", "same-name")
    with serve(model, config_file, "first", same_name) as server:
        old = server.generate(PROMPT)
        server.flush_cache()
        assert server.generate(PROMPT).cached.storage == REUSABLE
        # Online: the same server takes the other weights.
        server.request("POST", "/update_weights_from_disk", {"model_path": str(edited)})
        updated = server.generate(PROMPT)
        assert updated.cached_tokens == 0
        assert updated.output_ids != old.output_ids
        server.flush_cache()
        restored = server.generate(PROMPT)
        assert (restored.cached.storage, restored.output_ids) == (REUSABLE, updated.output_ids)
    # Offline: another server over the same directory, whose files were edited in place.
    edit_a_few_rows(model)
    with serve(model, config_file, "second", same_name) as server:
        new = server.generate(PROMPT)
        assert new.cached_tokens == 0
        assert new.output_ids == updated.output_ids
        server.flush_cache()
        again = server.generate(PROMPT)
        assert (again.cached.storage, again.output_ids) == (REUSABLE, new.output_ids)
