"""One configuration, a decode and a prefill node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.render import as_yaml
from hicache_ext.errors import ConfigError, UnsupportedError
from hicache_ext.sglang import launch_arguments
from hicache_ext.sglang.launch_arguments import read_launch_facts
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import fill_with_noise, mha_pools, page_indices
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.storage.raw_access import RawFiles

pytestmark = pytest.mark.sglang

KEYS = page_keys(4)


@pytest.fixture
def launched_as(monkeypatch):
    """Make this process a server that was launched in a disaggregation mode."""
    prepare_process()
    # All of SGLang that is needed here, before it is told that it is a server.
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import memory_pool  # noqa: F401

    import hicache_ext.storage.backend  # noqa: F401

    def launch(mode):
        arguments = SimpleNamespace(model_path=None, revision=None, kv_cache_dtype="auto", disaggregation_mode=mode)
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)

    return launch


@pytest.mark.parametrize(("mode", "role"), [("null", "both"), ("prefill", "prefill"), ("decode", "decode")])
def test_the_role_is_what_sglang_was_launched_as(launched_as, mode, role):
    launched_as(mode)
    assert read_launch_facts().role == role


def test_a_server_whose_role_may_change_while_it_runs_is_refused(open_backend, monkeypatch):
    """It kept the tiers of the start, and SGLang cleared a shared pool with each switch."""
    from hicache_ext.sglang import lifecycle

    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: launch_arguments.LaunchFacts(role_may_change=True))
    with pytest.raises(UnsupportedError, match="--enable-pd-role-switch cannot be served: tiers are those of the role"):
        open_backend(mha_pools(page_size=PAGE_SIZE).host)


@pytest.mark.parametrize(
    ("line", "problem"), [("ttl: 010", "YAML reads this number in octal"), ("type: file", "is already set in line")]
)
def test_what_sglangs_yaml_parser_takes_in_silence_stops_the_start(open_backend, monkeypatch, tmp_path, line, problem):
    from hicache_ext.sglang import lifecycle

    facts = launch_arguments.LaunchFacts(config_file=str(tmp_path / "hicache.yaml"))
    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: facts)
    document = ExtraConfig.around({"tiers": {"disk": {"type": "file", "path": str(tmp_path), "capacity": "1GiB"}}})
    (tmp_path / "hicache.yaml").write_text(as_yaml(document) + f"      {line}\n")
    with pytest.raises(ConfigError, match=problem):
        open_backend(mha_pools(page_size=PAGE_SIZE).host)


def test_outside_a_server_the_role_is_both():
    assert launch_arguments.LaunchFacts().role == "both"


def test_a_decode_node_stores_to_the_pool_and_a_prefill_node_reads_it_from_there(
    launched_as, open_backend, tmp_path, caplog
):
    caplog.set_level("INFO")
    ours = {
        "tiers": {
            name: {"type": "file", "path": str(tmp_path / name), "capacity": "64MiB", "layout": "pages"}
            for name in ("nvme", "pool")
        },
        "promote_to": "nvme",
        "roles": {
            "decode": {"retrieve_locations": [], "store_locations": ["pool"], "store_policies": {"pool": "async"}}
        },
    }

    def files(tier):
        return len(RawFiles(tmp_path / tier).keys())

    launched_as("decode")
    written = mha_pools(page_size=PAGE_SIZE).host
    fill_with_noise(written, seed=1)
    decode = open_backend(written, ours=ours)
    pages = page_indices(PAGE_SIZE, [0, 1, 2, 3])
    assert decode.batch_set_v1(KEYS, pages) == [True] * 4
    assert decode.batch_exists(KEYS) == 0
    assert decode.batch_get_v1(KEYS, pages) == [False] * 4
    decode.close()
    assert files("pool") == 4
    # The decode node has no such disk.
    assert not (tmp_path / "nvme").exists()

    launched_as("prefill")
    read = mha_pools(page_size=PAGE_SIZE).host
    fill_with_noise(read, seed=2)
    prefill = open_backend(read, ours=ours)
    assert (
        caplog.text.count("only nodes of TP 1 find each other's pages; for others, --hicache-mem-layout page_head") == 2
    )
    assert prefill.batch_exists(KEYS) == 4
    assert prefill.batch_get_v1(KEYS, pages) == [True] * 4
    # As bytes: some of the noise is no number.
    sent, came = (host.kv_buffer.view(torch.uint8)[:, : 4 * PAGE_SIZE] for host in (written, read))
    assert torch.equal(sent, came)
    prefill.close()
    assert files("nvme") == 4
