"""Which releases of SGLang are served, and what each costs: the gate, the list of used names, the self-check."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.errors import UnsupportedError  # noqa: E402
from hicache_ext.sglang import lifecycle, plugin, process, releases, used_names  # noqa: E402
from hicache_ext.sglang.host_pool import HostPages  # noqa: E402
from hicache_ext.sglang.launch_arguments import LaunchFacts, longest_prompt  # noqa: E402
from hicache_ext.sglang.used_names import (  # noqa: E402
    ADAPTERS,
    COPIES,
    DECODE_WRITER,
    FEATURES,
    KV_HINTS,
    LINKER,
    MODEL_WEIGHTS,
    STORAGE,
    USED,
    WEIGHTS_UPDATES,
    Checked,
    Sources,
    Use,
    check,
    features_off,
)
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys  # noqa: E402
from hicache_ext.testing.host_pools import mha_pools, page_indices  # noqa: E402
from tests.releases.wheels import ROOT, package_of  # noqa: E402
from tests.rigs.host_pool_kinds import mla_pools  # noqa: E402

MANAGER = "srt/disaggregation/decode_kvcache_offload_manager.py"
STORAGE_ABC = "srt/mem_cache/hicache_storage.py"


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["0.5.9", "0.5.20", "0.5.20.post3", "0.4.21"])
def test_a_release_that_is_too_old_is_refused_with_one_sentence(release: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"SGLang {release} cannot be served: this package needs 0\.5\.21 or newer"
    ):
        releases.refuse_old_release(release)


@pytest.mark.parametrize("release", ["0.5.24", "0.5.23.post1", "0.6.0rc1", "0.5.24.dev12+gabc", "1.0", "0.5.21rc1"])
def test_a_release_that_was_not_tested_is_served_with_a_warning(release: str) -> None:
    releases.refuse_old_release(release)
    assert f"this is {release}." in (releases.untested(release) or "")


@pytest.mark.parametrize("release", [*releases.TESTED, "0.5.23+cu130"])
def test_a_tested_release_is_served_without_a_word(release: str) -> None:
    releases.refuse_old_release(release)
    assert releases.untested(release) is None


# -- the list and the check --------------------------------------------------------------------------------------------


@cache
def sources_of(release: str) -> Sources:
    """Parsed once for all tests: they take seconds."""
    return Sources(package_of(release))


@pytest.mark.thorough
@pytest.mark.parametrize("release", releases.TESTED)
def test_every_tested_release_has_all_that_its_features_need(release: str) -> None:
    found = list(check(sources_of(release), release))
    off = features_off(found)
    assert set(off) == ({LINKER} if release != "0.5.23" else set())


def test_names_that_came_later_are_marked_with_the_release_they_came_with() -> None:
    """A mark that is too new hides that an older release lacks the name; one too old, that it need not have it."""
    for use in (use for use in USED if use.since):
        first = next(release for release in releases.TESTED if not used_names._missing(sources_of(release), use))
        assert use.since == first, use


def test_nothing_of_sglang_is_used_that_the_list_does_not_name() -> None:
    """Every module of SGLang that this package imports from, and every name that it imports, is on the list."""
    listed = {use.owner for use in USED} | {f"{use.owner}.{name}" for use in USED for name in use.names}
    unlisted = set()
    for file in (ROOT / "hicache_ext" / "sglang").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                unlisted |= {f"{node.module}.{alias.name}" for alias in node.names} - listed
    assert not unlisted


@pytest.mark.parametrize(
    "text",
    [
        "class C:\n    def f(self, a): ...\n    f = wrapped(f)",
        "class B:\n    def f(self, a): ...\nclass C(B):\n    f: object\n    def g(self): self.f = 1",
        "try:\n    class C:\n        def f(self, a): ...\nexcept ImportError:\n    C = None",
        "class C:\n    if wide:\n        def f(self, a): ...",
        "class C:\n    try:\n        def f(self, a): ...\n    except ImportError:\n        def f(self, *all): ...",
    ],
)
def test_a_function_is_found_that_is_wrapped_replaced_or_defined_under_a_condition(tmp_path: Path, text: str) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "m.py").write_text(text)
    (one,) = Sources(tmp_path).parameters("sglang.srt.m.C", "f") or ()
    assert one.name == "a"


def test_what_a_class_within_a_class_sets_is_not_the_outer_ones(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "m.py").write_text("class C:\n    class D:\n        def g(self): self.f = 1")
    assert set(Sources(tmp_path).members("sglang.srt.m.C") or ()) == {"D"}


class OneFileChanged(Sources):
    """The sources of a release as they would be with other text in one file; the rest is parsed once for all tests."""

    def __init__(self, release: Sources, package: Path, file: str, old: str, new: str) -> None:
        super().__init__(package)
        self._release = release
        self._file = package / file
        text = self._file.read_text()
        assert old in text
        self._changed = ast.parse(text.replace(old, new))

    def _module(self, name: str) -> ast.Module | None:
        return self._changed if self._path(name).with_suffix(".py") == self._file else self._release._module(name)


@pytest.fixture(scope="module")
def next_release() -> Callable[..., list[Checked]]:
    """``next_release(file, old, new)``: what is found in a release in which a file was changed so."""
    package = package_of(releases.TESTED[-1])
    newest = sources_of(releases.TESTED[-1])
    assert not features_off(list(check(newest, "0.5.99")))
    return lambda *change: list(check(OneFileChanged(newest, package, *change), "0.5.99"))


@pytest.mark.parametrize(
    ("file", "old", "new", "feature", "words"),
    [
        (STORAGE_ABC, "    is_mla_model:", "    replicated:", STORAGE, "HiCacheStorageConfig.is_mla_model"),
        (STORAGE_ABC, "dcp_rank: int = 0", "dcp: int = 0", STORAGE, "HiCacheStorageConfig.dcp_rank"),
        (STORAGE_ABC, "TRAILING_PAGES =", "LAST_PAGES =", STORAGE, "PoolHitPolicy.TRAILING_PAGES"),
        (
            STORAGE_ABC,
            "    @abstractmethod\n    def exists(",
            "    @abstractmethod\n    def touch(self, key: str) -> bool: ...\n\n    @abstractmethod\n    def exists(",
            STORAGE,
            "touch, which this package does not answer",
        ),
        (
            STORAGE_ABC,
            "    def batch_set_v2(\n        self,\n",
            "    def batch_set_v2(\n        self,\n        priority: int,\n",
            STORAGE,
            "HiCacheStorage.batch_set_v2 as it is used (it is with priority)",
        ),
        # A caller's second argument would be taken for something else.
        (
            STORAGE_ABC,
            "key: str,\n        target_location: Optional",
            "key: str,\n        tag: Any = None,\n        target_location: Optional",
            STORAGE,
            "HiCacheStorage.get as it is used (it is with tag)",
        ),
        (
            STORAGE_ABC,
            "        keys: List[str],\n        host_indices: torch.Tensor,\n",
            "        host_indices: torch.Tensor,\n        keys: List[str],\n",
            STORAGE,
            "HiCacheStorage.batch_get_v1 as it is used (it is in another order) and 1 more",
        ),
        (
            STORAGE_ABC,
            "    extra_pool_hit_pages: dict[str, int]\n",
            "    extra_pool_hit_pages: dict[str, int]\n    epoch: int\n",
            STORAGE,
            "PoolTransferResult.__init__ as it is used (it is with epoch)",
        ),
        (
            "srt/mem_cache/pool_host/group.py",
            "        need_size: int,\n        *,",
            "        need_size: int,\n        owner: int,\n        *,",
            (DECODE_WRITER, LINKER),
            "HostPoolGroup.alloc as it is used (it is with owner)",
        ),
        ("srt/arg_groups/fields/lora.py", "enable_lora:", "lora:", STORAGE, "ServerArgs.enable_lora"),
        (MANAGER, "self.ongoing_offload", "self.offloads", DECODE_WRITER, "ongoing_offload"),
        (MANAGER, "def offload_kv_cache(self, req)", "def offload_kv_cache(self, req, now)", DECODE_WRITER, "with now"),
        ("srt/mem_cache/pool_host/mha.py", "_buffer_infos", "_infos", COPIES, "MHATokenToKVPoolHost._buffer_infos"),
        (
            "srt/managers/scheduler_components/weight_updater.py",
            "def begin_weight_update",
            "def open_weight_update",
            WEIGHTS_UPDATES,
            "begin_weight_update",
        ),
        ("srt/lora/lora_manager.py", "def load_lora_weights(", "def load_adapter(", ADAPTERS, "load_lora_weights"),
    ],
)
def test_a_name_that_goes_costs_the_feature_that_needs_it_and_no_other(
    next_release: Callable[..., list[Checked]], file: str, old: str, new: str, feature: Any, words: str
) -> None:
    off = features_off(next_release(file, old, new))
    assert list(off) == (list(feature) if isinstance(feature, tuple) else [feature])
    assert all(words in text for text in off.values())


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            STORAGE_ABC,
            "target_sizes: Optional[Any] = None,\n    ) -> torch.Tensor | None:",
            "target_sizes: Optional[Any] = None,\n        tag=None,\n        *,\n        hint=0,\n    ):",
        ),
        (MANAGER, "offload_kv_cache(self, req)", "offload_kv_cache(self, req, now=None)"),
        # Ours construct nothing here that they are not told of, and call nothing with it.
        ("srt/mem_cache/pool_host/group.py", "start_owner: int | None = None", "owner: Any = None"),
        # What SGLang has announced.
        (STORAGE_ABC, "    is_mla_model:", "    is_rank_replicated:"),
        (STORAGE_ABC, "    # TODO: Deprecate\n    @abstractmethod\n    def batch_get(", "    def batch_read("),
        (STORAGE_ABC, 'DEEPSEEK_V4_C4 = "deepseek_v4_c4"', 'COMPRESSED_KV = "compressed_kv"'),
    ],
)
def test_what_is_added_or_renamed_as_announced_costs_nothing(
    next_release: Callable[..., list[Checked]], file: str, old: str, new: str
) -> None:
    assert not features_off(next_release(file, old, new))


def test_a_release_that_lacks_what_storage_needs_is_refused_with_one_sentence(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Use("sglang.srt.mem_cache.hicache_storage.PoolTransfer", ("a_name", "another"), (STORAGE,))
    checked = tuple(check(sources_of(releases.installed_release()), releases.installed_release(), [*USED, gone]))
    monkeypatch.setattr(lifecycle, "check_installed", lambda: checked)
    with pytest.raises(UnsupportedError) as refused:
        open_backend()
    assert "it lacks sglang.srt.mem_cache.hicache_storage.PoolTransfer.a_name and 1 more, which storage needs" in str(
        refused.value
    )


def test_where_there_is_no_sglang_nothing_is_found() -> None:
    assert set(features_off(list(check(Sources(Path("/nonexistent")), "0.5.23")))) == set(FEATURES)


# -- the identity of pages ---------------------------------------------------------------------------------------------


def described(make: Callable[..., Any], layout: str) -> Any:
    return HostPages(make(layout=layout).host, "kv").describe("bfloat16")


PAGES = {
    (mha_pools, "layer_first"): "8ddde3de7a2a9257",
    (mha_pools, "page_first"): "a9141bea9dc9b885",
    (mha_pools, "page_first_direct"): "37746462c40e0b13",
    (mha_pools, "page_head"): "f887398d8b11fd2e",
    (mla_pools, "layer_first"): "3456074636a6f02c",
    (mla_pools, "page_first"): "5ec8232c14a95c32",
    (mla_pools, "page_first_direct"): "9b5af76da68c7746",
}
"""Pool and layout -> the digest of a page's identity and bytes."""


@pytest.mark.parametrize(("make", "layout"), PAGES, ids=[f"{make.__name__} {layout}" for make, layout in PAGES])
def test_a_page_has_one_identity_and_equal_bytes_in_all_tested_releases(make: Callable[..., Any], layout: str) -> None:
    """This test runs with each of them, and the digest stands here. The content goes in through SGLang's own code."""
    pool = make(layout=layout).host
    content = pool.get_data_page(0)
    pool.set_from_flat_data_page(3 * pool.page_size, torch.arange(content.numel(), dtype=torch.int16).view(pool.dtype))
    pages = HostPages(pool, "kv")
    digest = hashlib.sha256(repr(pages.describe("bfloat16")).encode())
    for segment in pages.buffers_of([3])[0]:
        digest.update(segment)
    assert digest.hexdigest()[:16] == PAGES[make, layout], pages.describe("bfloat16")


def test_pages_of_an_untested_release_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha_pools().host
    assert releases.format_facts(pool, "0.5.24") == [*releases.format_facts(pool, "0.5.23"), ("sglang", "0.5.24")]
    tested = described(mha_pools, "page_first")
    monkeypatch.setattr(releases, "installed_release", lambda: "0.5.24")
    assert described(mha_pools, "page_first") != tested


def test_formats_that_only_the_device_pool_tells_are_told_apart() -> None:
    """Until 0.5.22 the host pool of a quantised or head-major device pool is of the plain class."""

    def host(**facts: Any) -> Any:
        plain = {"head_num": 2, "head_dim": 32, "v_head_dim": 32, "store_dtype": "torch.bfloat16"}
        device_pool = type("MHATokenToKVPool", (), {**plain, "kv_cache_layout": "nhd", **facts})()
        return type("MHATokenToKVPoolHost", (), {"device_pool": device_pool})()

    seen = [
        releases.format_facts(host(**facts), "0.5.22")
        for facts in (
            {},
            {"kv_cache_layout": "hnd"},
            {"is_quantized_kv_cache": lambda self: True},
            {"v_head_dim": 64},
        )
    ]
    assert seen[0] == [("buffer0", "head_dim=32,v_head_dim=32,dtype=torch.bfloat16,layout=nhd")]
    assert len({str(facts) for facts in seen}) == len(seen)


def test_a_policy_of_a_release_to_come_is_not_taken_for_one_of_today() -> None:
    policies = [releases.hit_policy(SimpleNamespace(value=name)) for name in ("block_groups", "every_other_page")]
    assert policies == ["none", "unknown"]


def test_the_shard_under_dcp_comes_from_the_pool_where_the_config_lacks_it() -> None:
    pool = SimpleNamespace(dcp_rank=1, dcp_size=2)
    assert releases.dcp_shard(SimpleNamespace(), pool) == (1, 2)
    assert releases.dcp_shard(SimpleNamespace(dcp_rank=0, dcp_size=4), pool) == (0, 4)
    assert releases.dcp_shard(SimpleNamespace(), None) == (0, 1)


# -- what a server says ------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A backend in a process that is told it is a server."""

    def serve_(role: str = "both", page_size: int = PAGE_SIZE, **ranks: Any) -> Any:
        facts = LaunchFacts(model_path="/model", role=role)  # type: ignore[arg-type]
        monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: facts)
        ours: dict[str, Any] = {"model": {"fingerprint": "these weights"}, "role": role}
        return open_backend(mha_pools(page_size=page_size).host, ours=ours, **ranks)

    return serve_


@pytest.mark.parametrize(("page_size", "keys"), [(1, "4,000"), (8, "500"), (16, None), (64, None)])
def test_pages_of_a_few_tokens_are_warned_about_once_with_the_keys_they_make(
    page_size: int, keys: str | None, serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(2):
        serve(page_size=page_size, tp_rank=rank, tp_size=2)
    warned = f"--page-size {page_size}: a prompt of 4,000 tokens makes {keys} keys"
    assert [caplog.text.count("--page-size"), caplog.text.count(warned)] == ([0, 0] if keys is None else [2, 1])


def test_page_hashes_are_built_at_the_start_and_what_keeps_them_from_it_is_told(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.mem_cache import utils

    hashed: list[Sequence[int]] = []
    monkeypatch.setattr(utils, "get_hash_str", hashed.append)
    serve()
    assert hashed == [[1]]

    def fails(tokens: Sequence[int]) -> None:
        raise RuntimeError("Failed to load") from OSError("Ninja is required")

    monkeypatch.setattr(utils, "get_hash_str", fails)
    serve()
    assert caplog.text.count("(hicache-ext doctor says what to install): Ninja is required") == 1


def test_host_memory_smaller_than_the_longest_prompt_is_warned_about_with_both_numbers(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = serve().mem_pool_host.size
    for longest in (None, tokens):
        monkeypatch.setattr(lifecycle, "longest_prompt", lambda longest=longest: longest)
        serve()
    assert "tokens of a prompt" not in caplog.text
    monkeypatch.setattr(lifecycle, "longest_prompt", lambda: 131072)
    serve(role="decode")  # reads nothing back
    assert "tokens of a prompt" not in caplog.text
    serve()
    assert f"host memory holds {tokens:,} tokens of a prompt, which may have 131,072" in caplog.text
    assert "--hicache-ratio" in caplog.text


def test_the_longest_prompt_is_the_context_or_what_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(**runner: Any) -> int | None:
        loaded = [process.LoadedModel(SimpleNamespace(**runner), False, None)]  # type: ignore[arg-type]
        monkeypatch.setattr(process, "loaded", loaded)
        return longest_prompt()

    context = SimpleNamespace(context_len=131072)
    assert longest(model_config=context, max_total_num_tokens=500_000) == 131072
    assert longest(model_config=context, max_total_num_tokens=50_000) == 50_000
    assert longest(model_config=context) == 131072
    assert longest() is None
    monkeypatch.setattr(process, "loaded", [])
    assert longest_prompt() is None


def test_launch_arguments_that_nobody_knows_are_named_once_and_without_their_values(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = LaunchFacts(model_path="m", unknown_arguments=("new_key", "new_knob"), compute='{"new_key": "sha256:0"}')
    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: facts)
    for rank in (0, 1):
        ours = {"model": {"fingerprint": "off"}}
        open_backend(mha_pools(page_size=PAGE_SIZE).host, ours=ours, tp_rank=rank, tp_size=2)
    assert [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()] == [
        "hicache_ext does not know --new-key, --new-knob: pages are shared with servers that were given the same"
    ]


def test_an_untested_release_is_warned_about_once(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "installed_release", lambda: "0.5.99")
    for rank in range(2):
        serve(tp_rank=rank, tp_size=2)
    assert caplog.text.count("this is 0.5.99. It has all that storage needs") == 1


@pytest.mark.parametrize(
    ("role", "off"),
    [
        ("both", {WEIGHTS_UPDATES, MODEL_WEIGHTS, COPIES, KV_HINTS}),
        ("prefill", {WEIGHTS_UPDATES, MODEL_WEIGHTS, COPIES, KV_HINTS}),
        ("decode", {WEIGHTS_UPDATES, MODEL_WEIGHTS, COPIES, KV_HINTS, DECODE_WRITER}),
    ],
)
def test_without_plug_ins_pages_are_stored_and_what_is_off_is_said_once(
    serve: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: str,
    off: set[Any],
) -> None:
    monkeypatch.setattr(plugin, "_is_hooked", lambda target: False)
    backend = serve(role)
    keys, indices = page_keys(2, "plug-ins"), page_indices(PAGE_SIZE, [1, 2])
    assert backend.batch_set_v1(keys, indices) == [True, True]
    assert backend.batch_get_v1(keys, page_indices(PAGE_SIZE, [4, 5])) == [True, True]
    said = {feature for feature in FEATURES if f": {feature.loss}" in caplog.text}
    assert said == off
    assert all(caplog.text.count(f": {feature.loss}") == 1 for feature in off)
