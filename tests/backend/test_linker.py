"""The external linker over SGLang's real device pools: what goes out comes back, byte for byte, and nothing is left."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.errors import ConfigError, UnsupportedError
from hicache_ext.sglang.releases import comes_with, installed_release
from tests.backend import linker_rig as rig

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

Open = Callable[..., Any]


@pytest.fixture
def open_linker(tmp_path: Path) -> Iterator[Open]:
    """``open_linker(device, **ours)``: a linker over ``tmp_path / "l3"``, closed at the end."""
    opened: list[Any] = []
    with rig.server_context():

        def open_(device: rig.Device, directory: str = "l3", **ours: Any) -> Any:
            opened.append(rig.linker_of(device, rig.extra_config(tmp_path / directory, **ours)))
            return opened[-1]

        yield open_
        for linker in opened:
            linker.close()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_come_back_to_other_slots_byte_for_byte(kind: str, open_linker: Open) -> None:
    device = rig.DEVICES[kind]()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(20)
    sources, targets = list(range(3, 23)), list(range(60, 80))
    before = device.content("kv", sources)
    assert linker.offload([rig.pages(device, "kv", keys, sources)])
    assert rig.stored(linker)
    assert rig.waited(linker, "r", [rig.transfer("kv", [*keys, *rig.hashes(1, 999)])]) == list(range(1, 21))
    assert rig.loaded(linker, "r", [rig.pages(device, "kv", keys, targets)])
    assert device.content("kv", targets) == before
    assert device.content("kv", sources) == before
    assert rig.staging_in_use(linker) == 0


def test_only_the_slots_of_the_load_are_written(open_linker: Open) -> None:
    device = rig.mha_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(4)
    assert linker.offload([rig.pages(device, "kv", keys, [5, 6, 7, 8])])
    assert rig.stored(linker)
    others = [page for page in range(rig.PAGES) if page not in (40, 41, 42, 43)]
    before = device.content("kv", others)
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)])
    assert rig.loaded(linker, "r", [rig.pages(device, "kv", keys, [40, 41, 42, 43])])
    assert device.content("kv", others) == before


@pytest.mark.parametrize(("longest", "warned"), [(1 << 20, True), (16, False)])
def test_staging_memory_smaller_than_the_longest_prompt_is_warned_about(
    longest: int,
    warned: bool,
    open_linker: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from hicache_ext.sglang import lifecycle

    facts = lifecycle.read_launch_facts
    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: dataclasses.replace(facts(), model_path="/model"))
    monkeypatch.setattr(lifecycle, "longest_prompt", lambda: longest)
    linker = open_linker(rig.mha_device(), model={"fingerprint": "these weights"}, linker={"staging": "1MiB"})
    tokens = linker._staging.limits["kv"] * rig.PAGE
    assert (f"staging memory holds {tokens:,} tokens of a prompt, which may have 1,048,576" in caplog.text) is warned
    assert caplog.text.count("tokens of a prompt") == int(warned)
    assert "raise hicache_ext.linker.staging" in caplog.text or not warned


@pytest.mark.parametrize(("kind", "beside"), [("swa", "swa"), ("mamba", "mamba")])
def test_hybrid_models_come_back_with_the_pool_beside(kind: str, beside: str, open_linker: Open) -> None:
    device = rig.DEVICES[kind]()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(6)
    last = keys[-1:]
    kv, states = device.content("kv", [1, 2, 3, 4, 5, 6]), device.content(beside, [9])
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3, 4, 5, 6]), rig.pages(device, beside, last, [9])])
    assert rig.stored(linker)
    # A state, or a window of one page, is stored where the node ends, and nowhere before.
    assert rig.waited(linker, "r", [rig.transfer("kv", keys), rig.transfer(beside, last, trailing=True)]) == [6]
    targets = [rig.pages(device, "kv", keys, list(range(20, 26))), rig.pages(device, beside, last, [30])]
    assert rig.loaded(linker, "r", targets)
    assert (device.content("kv", list(range(20, 26))), device.content(beside, [30])) == (kv, states)
    assert rig.staging_in_use(linker) == 0


def test_a_prefix_without_its_window_is_not_restorable(open_linker: Open) -> None:
    device = rig.swa_device()
    linker, keys = open_linker(device), rig.hashes(6)
    assert linker.offload(
        [rig.pages(device, "kv", keys, [1, 2, 3, 4, 5, 6]), rig.pages(device, "swa", keys[2:4], [3, 4])]
    )
    assert rig.stored(linker)
    asked = [rig.transfer("kv", keys), rig.transfer("swa", keys[-2:], trailing=True)]
    assert rig.waited(linker, "r", asked) == [4]
    assert linker.lookup("r", [rig.transfer("kv", keys)]) == []


def test_requests_of_one_batch_share_staging_memory(open_linker: Open) -> None:
    device = rig.mha_device()
    device.fill()
    linker = open_linker(device)
    each = linker._staging.limits["kv"] // 4
    count = 4 * each
    keys, targets = rig.hashes(count), list(range(50, 50 + count))
    assert linker.offload([rig.pages(device, "kv", keys, list(range(count)))])
    assert rig.stored(linker)
    before = device.content("kv", list(range(count)))
    parts = {f"r{number}": slice(each * number, each * (number + 1)) for number in range(4)}
    requests = [rig.Waiting(linker, rid, rig.transfer("kv", keys[part])) for rid, part in parts.items()]
    rig.wait_for(linker, requests)
    for rid, part in parts.items():
        assert linker.lookup(rid, [rig.transfer("kv", keys[part])])[-1] == each
        assert linker.load(rid, [rig.pages(device, "kv", keys[part], targets[part])])
    assert rig.staging_in_use(linker) == count
    assert rig.forward(linker, linker.start_layer_wise_loading())
    assert device.content("kv", targets) == before
    assert rig.staging_in_use(linker) == 0


@pytest.mark.parametrize("writes", [True, False])
def test_no_more_states_are_handed_over_than_there_is_memory_for(
    open_linker: Open, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """SGLang locks them on the device until they are written; alike on ranks that write none."""
    from hicache_ext.sglang.model_pools import Pages

    linker = open_linker(rig.mha_device())
    offloads = linker._offloads
    monkeypatch.setattr(offloads._staging, "limits", {"kv": 340, "mamba": 4})
    node = [Pages("kv", ["a"], torch.empty(0), 1), Pages("mamba", ["a"], torch.empty(0), 1)]
    assert offloads.has_room([Pages("mamba", ["a"] * 9, torch.empty(0), 1)])
    monkeypatch.setattr(offloads, "_to_gather", queue.SimpleQueue())
    for _ in range(4):
        assert offloads.has_room(node)
        offloads.offload(node, {"kv": None, "mamba": None} if writes else None, [])
    assert not offloads.has_room(node)
    assert offloads.has_room(node[:1])
    offloads._handed_over.clear()
    offloads._on_device = offloads._in_flight = 0


def test_a_missing_page_is_told_before_the_batch_starts(open_linker: Open) -> None:
    device = rig.mha_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(3)
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3])])
    assert rig.stored(linker)
    before = device.content("kv", list(range(rig.PAGES)))
    rig.wait_for(linker, [rig.Waiting(linker, rid, rig.transfer("kv", keys)) for rid in ("lost", "found")])
    assert not linker.load("lost", [rig.pages(device, "kv", [*keys, *rig.hashes(1, 99)], [20, 21, 22, 23])])
    assert linker._metrics.value("load", "missing") == 1
    assert linker.load("found", [rig.pages(device, "kv", keys, [30, 31, 32])])
    assert rig.forward(linker, linker.start_layer_wise_loading())
    after = device.content("kv", list(range(rig.PAGES)))
    assert after[30:33] == before[1:4]
    assert (after[:30], after[33:]) == (before[:30], before[33:])
    assert linker.start_layer_wise_loading() == -1


def test_a_cancelled_load_writes_nothing_and_holds_nothing(open_linker: Open) -> None:
    device = rig.mha_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(3)
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3])])
    assert rig.stored(linker)
    before = device.content("kv", list(range(rig.PAGES)))
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)])
    assert linker.load("r", [rig.pages(device, "kv", keys, [20, 21, 22])])
    assert linker.cancel_queued_load("r")
    assert not linker.cancel_queued_load("r")
    assert linker.start_layer_wise_loading() == -1
    assert device.content("kv", list(range(rig.PAGES))) == before
    assert rig.staging_in_use(linker) == 0


def test_a_flush_keeps_the_store_and_drops_what_is_under_way(open_linker: Open) -> None:
    device = rig.mha_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(3)
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3])])
    assert rig.stored(linker)
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)])
    assert linker.load("r", [rig.pages(device, "kv", keys, [20, 21, 22])])
    linker.reset()
    assert rig.staging_in_use(linker) == 0
    assert (linker.num_completed_offloads(), linker.start_layer_wise_loading()) == (0, -1)
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)]) == [1, 2, 3]
    assert rig.loaded(linker, "r", [rig.pages(device, "kv", keys, [20, 21, 22])])


def test_pages_of_a_closed_linker_are_found_by_the_next(open_linker: Open) -> None:
    device = rig.mha_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(3)
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3])])
    assert rig.stored(linker)
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)]) == [1, 2, 3]
    linker.close()
    assert linker.lookup("r", [rig.transfer("kv", keys)]) == []
    assert not linker.load("r", [rig.pages(device, "kv", keys, [20, 21, 22])])
    again = open_linker(device)
    assert rig.waited(again, "r", [rig.transfer("kv", keys)]) == [1, 2, 3]
    assert rig.loaded(again, "r", [rig.pages(device, "kv", keys, [20, 21, 22])])
    assert device.content("kv", [20, 21, 22]) == device.content("kv", [1, 2, 3])


def test_closing_leaves_no_thread(open_linker: Open) -> None:
    device = rig.mha_device()
    before = set(threading.enumerate())
    linker, keys = open_linker(device), rig.hashes(3)
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3])])
    assert rig.stored(linker)
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)])
    assert rig.loaded(linker, "r", [rig.pages(device, "kv", keys, [20, 21, 22])])
    assert linker.offload([rig.pages(device, "kv", rig.hashes(3, 50), [4, 5, 6])])
    linker.close()
    assert [thread.name for thread in set(threading.enumerate()) - before if "hicache-link" in thread.name] == []


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({}, "linker_extra_config: holds nothing"),
        (None, "linker_extra_config: holds nothing"),
        ({"hicache-ext": {}}, "linker_extra_config.hicache-ext: unknown key; did you mean 'hicache_ext'?"),
        ({"hicache_ext": {}, "config_file": "/x"}, "linker_extra_config: holds both hicache_ext and config_file"),
        ({"config_file": 3}, "linker_extra_config.config_file: is no path"),
        ({"hicache_ext": 3}, "linker_extra_config.hicache_ext: is no mapping"),
        ({"hicache_ext": {"tiers": {}}}, "hicache_ext.tiers: at least one tier is needed"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(extra: Any, sentence: str) -> None:
    with rig.server_context(), pytest.raises(ConfigError, match=r"^[^\n]*$") as raised:
        rig.linker_of(rig.mha_device(), extra)
    assert str(raised.value).startswith(sentence)


def test_staging_memory_too_small_for_the_model_is_one_sentence(tmp_path: Path) -> None:
    device = rig.mamba_device()
    device.params.token_to_kv_pool_allocator.get_kvcache().full_kv_pool.get_kv_size_bytes = lambda: (1, 1)
    with rig.server_context(), pytest.raises(UnsupportedError, match=r"hicache_ext\.linker\.staging"):
        rig.linker_of(device, rig.extra_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pp_size": 2}, "--pp-size cannot be served: the stages of a pipeline do not agree"),
        ({"sidecar_draft_device_pools": (object(),)}, "this draft model cannot be served: it has pools of its own"),
    ],
)
def test_what_a_linker_cannot_serve_is_refused_at_the_start(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    device = rig.mha_device()
    device.params = dataclasses.replace(device.params, **changes)
    with rig.server_context(), pytest.raises(UnsupportedError, match=f"^{sentence}[^\n]*$"):
        rig.linker_of(device, rig.extra_config(tmp_path))


def test_a_start_without_the_plug_in_is_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would read pages before SGLang admits their request, and its scheduler waits for no store."""
    from hicache_ext.sglang import plugin

    device = rig.mha_device()
    with rig.server_context(), monkeypatch.context() as without:
        without.setattr(plugin, "_is_hooked", lambda target: False)
        with pytest.raises(UnsupportedError, match=r"^the external linker cannot be served: [^\n]*$") as refused:
            rig.linker_of(device, rig.extra_config(tmp_path))
    assert all(words in str(refused.value) for words in ("plug-in", "SGLANG_PLUGINS", "--enable-hierarchical-cache"))


def test_a_pool_that_hicache_does_not_know_is_refused_at_the_start(tmp_path: Path) -> None:
    device = rig.swa_device()
    device.components = rig.mamba_device().components
    with rig.server_context(), pytest.raises(UnsupportedError, match=r"^the KV pool SWAKVPool cannot be served"):
        rig.linker_of(device, rig.extra_config(tmp_path))


def test_the_configuration_file_of_hicache_serves_the_linker(tmp_path: Path) -> None:
    import yaml

    from hicache_ext.config import ExtraConfig

    file = tmp_path / "hicache.yaml"
    section = rig.extra_config(tmp_path / "l3")["hicache_ext"]
    file.write_text(yaml.safe_dump({**ExtraConfig.around(section), "prefetch_threshold": 64}))
    with rig.server_context():
        linker = rig.linker_of(rig.mha_device(), {"config_file": str(file)})
        try:
            assert linker._backend._config_file is not None
            assert linker._backend._config_file.reload() == []
        finally:
            linker.close()
