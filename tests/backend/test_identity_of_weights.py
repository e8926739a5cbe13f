"""What decides whose KV a page is: the files that SGLang loaded, drafts and adapters, and resolved settings."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import UnsupportedError
from hicache_ext.page import fingerprint
from hicache_ext.page.fingerprint import ModelFingerprint
from hicache_ext.page.hashes import namespaced_extra_key
from hicache_ext.sglang import launch_arguments, model_weights, plugin, process
from hicache_ext.sglang.launch_arguments import LaunchFacts, logical_dtype
from hicache_ext.sglang.process import LoadedModel
from hicache_ext.sglang.releases import installed_release
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices
from tests.rigs.tiny_adapter import make_tiny_adapter
from tests.rigs.tiny_model import make_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.sglang

KEYS = page_keys(2)
INDICES = page_indices(PAGE_SIZE, [0, 1])


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "loaded", [])
    monkeypatch.setattr(model_weights, "_digests", {})


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What SGLang does with a model: our AROUND hook around its load."""
    monkeypatch.setattr(model_weights, "_configured", lambda: None)
    monkeypatch.setattr(model_weights, "resolved", {"load_format": "auto"}.get)

    def load_(path: Path, *, draft: bool = False, meanwhile: Callable[[], None] = lambda: None) -> Any:
        config = SimpleNamespace(model_path=str(path), revision=None)
        runner = SimpleNamespace(model_config=config, is_draft_worker=draft)
        model_weights.around_load(lambda runner: meanwhile(), runner)
        return runner

    return load_


@pytest.fixture
def serve(open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A backend in a process that is told it is the server of a model."""

    def serve_(model: Path, *, wait: bool = True, ours: dict[str, Any] | None = None, **facts: Any) -> Any:
        from hicache_ext.sglang import lifecycle as module

        monkeypatch.setattr(module, "read_launch_facts", lambda: LaunchFacts(model_path=str(model), **facts))
        backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours=ours)
        if wait and backend.served.weights:
            for model_fingerprint in backend.served.weights:
                assert model_fingerprint.done.wait(30)
            wait_until(lambda: backend.served.identified or model_weights.problem_of(backend.served.weights))
        return backend

    return serve_


def serving(backend: Any) -> float:
    """The gauge that says it."""
    levels: dict[tuple[str, str], float] = {}
    for source in backend._export_sources():
        levels |= source.levels()
    return levels["serving", ""]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are not read before this is set."""
    go = threading.Event()
    read = fingerprint.digest_of_file

    def wait_and_read(fd: int, size: int) -> bytes:
        go.wait(30)
        return read(fd, size)

    monkeypatch.setattr(fingerprint, "digest_of_file", wait_and_read)
    yield go
    go.set()


def test_until_the_weights_are_identified_nothing_is_stored_or_served(
    tmp_path: Path, serve: Callable[..., Any], held: threading.Event
) -> None:
    backend = serve(make_tiny_model(tmp_path / "model"), wait=False)
    assert backend.batch_set_v1(KEYS, INDICES) == [False, False]
    assert backend.batch_exists(KEYS) == 0
    assert list((tmp_path / "l3" / "identities").glob("*")) == []
    assert serving(backend) == 0
    held.set()
    wait_until(lambda: backend.served.identified)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    assert backend.batch_exists(KEYS) == 2
    assert serving(backend) == 1
    wait_until(lambda: len(list((tmp_path / "l3" / "identities").glob("*"))) == 1)


def test_servers_of_equal_weights_share_pages_and_those_of_others_do_not(
    tmp_path: Path, serve: Callable[..., Any]
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert serve(model).batch_set_v1(KEYS, INDICES) == [True, True]
    assert serve(copy).batch_exists(KEYS) == 2
    assert serve(make_tiny_model(tmp_path / "other", seed=2)).batch_exists(KEYS) == 0


def test_a_model_that_changed_while_it_was_loaded_is_never_served(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    other = make_tiny_model(tmp_path / "other", seed=2)
    load(model, meanwhile=lambda: shutil.copy(other / "model.safetensors", model / "model.safetensors"))
    with pytest.raises(UnsupportedError, match=r"model\.safetensors changed while the model was loaded"):
        serve(model)


def test_weights_that_are_loaded_late_and_changed_until_then_end_the_service(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any]
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    runner = load(model)
    backend = serve(model)
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    shutil.copy(make_tiny_model(tmp_path / "other", seed=2) / "model.safetensors", model / "model.safetensors")
    model_weights.after_late_load(None, runner)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(page_keys(2, "more"), INDICES) == [False, False]


def test_files_that_sglang_fetches_during_the_load_are_noted_after_it(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any]
) -> None:
    model = tmp_path / "model"
    load(model, meanwhile=lambda: make_tiny_model(model, seed=1))
    backend = serve(model)
    assert backend.served.identified


@pytest.mark.parametrize("there", [True, False])
def test_weights_are_read_during_the_load_only_where_their_digests_can_be_remembered(
    tmp_path: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Later, the backend has the tier's directory, and the ranks share the work."""
    model, place = tmp_path / "model", tmp_path / "l3"
    make_tiny_model(model, seed=1)
    tiers = {"disk": {"type": "file", "path": str(place), "capacity": "64MiB"}}
    monkeypatch.setattr(model_weights, "_configured", lambda: load_config(ExtraConfig.around({"tiers": tiers})))
    if there:
        place.mkdir()
    load(model)
    (of_model,) = [loaded.fingerprint for loaded in process.loaded]
    assert of_model.done.wait(30 if there else 0.2) == there and place.exists() == there
    if not there:
        place.mkdir()
        of_model.start(place / model_weights.RECORDS)
    assert of_model.done.wait(30) and of_model.digest is not None


def test_other_draft_weights_are_another_identity(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any]
) -> None:
    target = make_tiny_model(tmp_path / "target", seed=1)
    load(target)
    load(make_tiny_model(tmp_path / "draft", seed=2), draft=True)
    assert serve(target).batch_set_v1(KEYS, INDICES) == [True, True]
    assert serve(target).batch_exists(KEYS) == 2
    process.loaded[1].fingerprint = ModelFingerprint(str(make_tiny_model(tmp_path / "other draft", seed=3)))
    assert serve(target).batch_exists(KEYS) == 0


def test_the_draft_of_the_launch_arguments_counts_where_no_load_was_seen(
    tmp_path: Path, serve: Callable[..., Any]
) -> None:
    target = make_tiny_model(tmp_path / "target", seed=1)
    draft, other = (str(make_tiny_model(tmp_path / f"draft{seed}", seed=seed)) for seed in (2, 3))
    assert serve(target, drafts=((draft, None),)).batch_set_v1(KEYS, INDICES) == [True, True]
    assert serve(target, drafts=((other, None),)).batch_exists(KEYS) == 0
    assert serve(target, drafts=((draft, None),)).batch_exists(KEYS) == 2


def test_a_draft_in_the_targets_own_files_adds_nothing(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any]
) -> None:
    target = make_tiny_model(tmp_path / "target", seed=1)
    load(target)
    load(target, draft=True)
    assert serve(target).served.model.draft == ""


def test_a_call_at_the_moment_when_the_weights_become_known_has_the_right_identity(
    tmp_path: Path, serve: Callable[..., Any], held: threading.Event
) -> None:
    """It had fetched its pool before, asked whether it may be used after, and stored under no weights at all."""
    backend = serve(make_tiny_model(tmp_path / "model"), wait=False)

    class Pools(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            pool = super().get(name, default)
            held.set()
            wait_until(lambda: backend.served.identified)
            return pool

    backend.served.bound = Pools(backend.served.bound)
    backend.batch_set_v1(KEYS, INDICES)
    files = [file for end in ("page", "pack") for file in (tmp_path / "l3").rglob(f"*.{end}")]
    stored = {file.parent.parent.name for file in files}
    known = {digest.hex() for digest in dict(backend.served.bound)["kv"].digests}
    assert stored <= known


def test_what_is_cleared_before_the_weights_are_identified_is_cleared_then(
    tmp_path: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    first = serve(model)
    assert first.batch_set_v1(KEYS, INDICES) == [True, True]
    first.close()
    go = threading.Event()
    read = fingerprint.digest_of_file
    monkeypatch.setattr(fingerprint, "digest_of_file", lambda fd, size: go.wait(30) and read(fd, size))
    backend = serve(model, wait=False)
    assert backend.clear()
    go.set()
    wait_until(lambda: backend.served.identified)
    wait_until(lambda: backend.batch_exists(KEYS) == 0)


def test_a_closed_backend_is_not_kept_alive(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    load(model)
    gone = weakref.ref(serve(model).served)
    for callback in process.loaded[0].fingerprint._callbacks:
        assert all(cell.cell_contents is not gone() for cell in callback.__closure__ or ())


def test_an_incomplete_model_that_sglang_completes_is_identified_by_what_is_there_then(
    tmp_path: Path, serve: Callable[..., Any], load: Callable[..., Any]
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=1)
    load(model, meanwhile=lambda: shutil.copy(model / "model.safetensors", model / "more.safetensors"))
    assert serve(model).batch_set_v1(KEYS, INDICES) == [True, True]
    process.loaded.clear()
    (model / "more.safetensors").unlink()
    assert serve(model).batch_exists(KEYS) == 0


@pytest.mark.parametrize("argument", ["weight-cache-mode", "modelopt-checkpoint-restore-path"])
def test_arguments_that_put_other_weights_in_place_are_refused(
    tmp_path: Path, serve: Callable[..., Any], argument: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"--{argument}"):
        serve(make_tiny_model(tmp_path / "model"), weights_from_elsewhere=(argument,))
    with pytest.raises(UnsupportedError, match="--speculative-draft-load-format remote"):
        serve(make_tiny_model(tmp_path / "model"), draft_load_format="remote")


@pytest.mark.parametrize("load_format", ["remote", "remote_instance", "presharded", "flash_rl", "something new"])
def test_weights_from_elsewhere_than_the_models_files_are_refused_unless_named(
    tmp_path: Path, serve: Callable[..., Any], load_format: str
) -> None:
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(UnsupportedError, match=f"--load-format {load_format}.*hicache_ext.model.fingerprint"):
        serve(model, load_format=load_format)
    backend = serve(model, load_format=load_format, ours={"model": {"fingerprint": "run 17"}})
    assert backend.served.model.fingerprint == "run 17"
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]


def test_a_model_without_files_is_refused_with_one_sentence(tmp_path: Path, serve: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be identified.*set hicache_ext\.model\.fingerprint"):
        serve(tmp_path / "nowhere")


def test_a_model_at_a_path_that_is_no_utf8_is_served(
    tmp_path: Path, open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang names a model by its path, and Python keeps such bytes as halves of surrogates, which no encoder takes."""
    from hicache_ext.sglang import lifecycle

    model = make_tiny_model(tmp_path / "model").rename(tmp_path / os.fsdecode(b"mod\xe9l"))
    (model / "model.safetensors").rename(model / os.fsdecode(b"mod\xe9l.safetensors"))
    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: LaunchFacts(model_path=str(model)))
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, model_name=str(model))
    wait_until(lambda: backend.served.identified or model_weights.problem_of(backend.served.weights))
    assert model_weights.problem_of(backend.served.weights) is None
    assert backend.served.model.id == f"{tmp_path}/mod\\udce9l"
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    assert backend.batch_exists(KEYS) == 2
    document = backend.served.bound["kv"].identities[0].document()
    assert json.dumps(document, ensure_ascii=False).encode()
    assert lifecycle._process_labels(SimpleNamespace(model_name=str(model)))["model_name"].encode()


@pytest.mark.parametrize("name", ["org/model", "/models/Modèle", "\\udce9", ""])
def test_a_name_that_is_unicode_stays_as_it_is(name: str) -> None:
    assert launch_arguments.unicode_text(name) == name


def test_an_epoch_that_comes_before_the_weights_are_identified_is_kept(
    tmp_path: Path, serve: Callable[..., Any], held: threading.Event
) -> None:
    backend = serve(make_tiny_model(tmp_path / "model"), wait=False)
    backend.served.advance_weights_epoch("nonce")
    assert not backend.served.identified
    held.set()
    wait_until(lambda: backend.served.identified)
    assert (backend.served.model.weights_epoch, len(backend.served.model.fingerprint)) == ("0+nonce", 32)
    assert backend.served.bound["kv"].identities[0].model == backend.served.model


def test_adapters_that_cannot_be_told_apart_stop_the_start(
    tmp_path: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_is_hooked", lambda target: False)
    with pytest.raises(UnsupportedError, match=r"LoRAManager\.init_state is not in force .* cannot be told apart"):
        serve(make_tiny_model(tmp_path / "model"), lora=True)


# -- resolved settings -------------------------------------------------------------------------------------------------


def runner_with(kv: str, dtype: torch.dtype, quantization: str | None = None) -> Any:
    config = SimpleNamespace(dtype=torch.bfloat16, quantization=quantization)
    return SimpleNamespace(kv_cache_dtype_str=kv, kv_cache_dtype=dtype, model_config=config)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchFacts]:
    """The facts of a server that was launched with these arguments and resolved them to what its runner has."""

    def launched_(runner: Any, draft: Any = None, **arguments: Any) -> LaunchFacts:
        from sglang.srt import runtime_context
        from sglang.srt.server_args import ServerArgs

        arguments = {"model_path": "m", **arguments}
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: ServerArgs(**arguments))
        monkeypatch.setattr(launch_arguments, "resolved", arguments.get)
        files = ModelFingerprint("m", None)
        models = [LoadedModel(runner, False, files)] + ([LoadedModel(draft, True, files)] if draft else [])
        monkeypatch.setattr(process, "loaded", models)
        return launch_arguments.read_launch_facts()

    return launched_


def test_auto_and_the_name_it_stands_for_are_one_identity(launched: Callable[..., LaunchFacts]) -> None:
    """A checkpoint with an FP8 cache: SGLang resolves auto to fp8_e4m3, and says so in the runner alone."""
    typed = launched(runner_with("fp8_e4m3", torch.float8_e4m3fn), kv_cache_dtype="fp8_e4m3", dtype="bfloat16")
    auto = launched(runner_with("fp8_e4m3", torch.float8_e4m3fn), kv_cache_dtype="auto", dtype="auto")
    assert typed == auto
    assert logical_dtype("uint8", auto.kv_cache_dtype, None) == "float8_e4m3fn/uint8"


def test_encodings_of_one_width_are_different_identities(launched: Callable[..., LaunchFacts]) -> None:
    kinds = [
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fnuz),  # what ROCm calls by the same name
        ("fp8_e5m2", torch.float8_e5m2),
        ("mxfp8", torch.float8_e4m3fn),
    ]
    assert len({launched(runner_with(*kind)).kv_cache_dtype for kind in kinds}) == len(kinds)


def test_what_changes_kv_without_changing_weights_counts(launched: Callable[..., LaunchFacts], tmp_path: Path) -> None:
    plain = runner_with("auto", torch.bfloat16)
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    seen = [
        launched(plain).compute,
        launched(plain, json_model_override_args='{"rope_theta": 1}').compute,
        launched(runner_with("auto", torch.bfloat16, "fp8")).compute,
        launched(plain, quantization_param_path=str(scales)).compute,
        launched(plain, runner_with("fp8_e4m3", torch.float8_e4m3fn)).compute,
        launched(plain, runner_with("fp8_e5m2", torch.float8_e5m2)).compute,
        launched(plain, load_format="dummy").compute,
    ]
    scales.write_text("2")
    seen.append(launched(plain, quantization_param_path=str(scales)).compute)
    assert len(set(seen)) == len(seen)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text("2")
    assert launched(plain, quantization_param_path=str(elsewhere)).compute == seen[-1]


def test_the_golden_texts_of_what_counts_beside_the_weights(launched: Callable[..., LaunchFacts]) -> None:
    """They are in every identity: a change of one character is a cold cache for every server."""
    plain = runner_with("auto", torch.bfloat16)
    usual = {"attention_backend": "fa3", "tp_size": 4, "page_size": 64, "api_key": "secret", "host": "0.0.0.0"}
    assert launched(plain).compute == launched(plain, **usual).compute == '{"dtype": "bfloat16", "kv": "bfloat16"}'
    seen = launched(
        runner_with("fp8_e4m3", torch.float8_e4m3fn, "fp8"),
        plain,
        json_model_override_args='{"rope_theta": 1}',
        load_format="dummy",
        rl_quant_profile="/a",
        forward_hooks=[{"name": "h"}],
        modelopt_quant="fp8",
        model_loader_extra_config='{"a": 1}',
        quantization_param_path="/nonexistent",
    )
    assert seen.compute == (
        '{"drafts": "{\\"dtype\\": \\"bfloat16\\", \\"kv\\": \\"bfloat16\\", \\"quantization\\": null}", '
        '"dtype": "bfloat16", "forward_hooks": "[{\'name\': \'h\'}]", "json_model_override_args": '
        '"{\\"rope_theta\\": 1}", "kv": "float8_e4m3fn", "load_format": "dummy", "model_loader_extra_config": '
        '"{\\"a\\": 1}", "modelopt_quant": "fp8", "quantization": "fp8", '
        '"quantization_param_path": "/nonexistent", "rl_quant_profile": "/a"}'
    )


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kt_method", "AMXINT8"),
        ("kt_max_deferred_experts_per_token", 2),
        ("rl_on_policy_target", "fsdp"),
        ("enable_w4a4_mxfp4_megamoe", True),
        ("flashinfer_mxfp4_moe_precision", "bf16"),
        ("enable_precise_embedding_interpolation", True),
        ("enable_tf32_matmul", True),
        ("ep_dispatch_algorithm", "fake"),
        ("disaggregation_transfer_backend", "fake"),
    ],
)
def test_an_argument_that_shapes_kv_is_another_identity(
    launched: Callable[..., LaunchFacts], argument: str, value: Any
) -> None:
    plain = runner_with("auto", torch.bfloat16)
    assert launched(plain, **{argument: value}).compute != launched(plain).compute


def test_the_configuration_of_a_diffusion_model_counts_by_its_content(
    launched: Callable[..., LaunchFacts], tmp_path: Path
) -> None:
    plain, here, there = runner_with("auto", torch.bfloat16), tmp_path / "here", tmp_path / "there"
    here.write_text("threshold: 0.5")
    there.write_text("threshold: 0.5")
    first = launched(plain, dllm_algorithm_config=str(here)).compute
    assert launched(plain, dllm_algorithm_config=str(there)).compute == first != launched(plain).compute
    here.write_text("threshold: 0.9")
    assert launched(plain, dllm_algorithm_config=str(here)).compute != first


@pytest.mark.parametrize("argument", ["enable_dsa_cache_layer_split", "enable_kv_cache_sharding"])
def test_ranks_that_hold_parts_of_pages_are_told_from_those_that_hold_them_whole(
    launched: Callable[..., LaunchFacts], argument: str
) -> None:
    """The host pool has the same layers and sizes, of which a rank fills its own."""
    if installed_release() == "0.5.21" and argument == "enable_kv_cache_sharding":
        pytest.skip("since 0.5.22")
    whole, parts = (launched(runner_with("auto", torch.bfloat16), **given) for given in ({}, {argument: True}))
    assert (whole.parts_of_pages, parts.parts_of_pages) == (False, True)
    assert whole.compute != parts.compute


@pytest.mark.parametrize("argument", ["kt_weight_path", "uno_lora_path", "download_dir", "weight_cache_mode"])
def test_weights_that_an_argument_names_are_refused(
    launched: Callable[..., LaunchFacts], tmp_path: Path, argument: str
) -> None:
    assert launched(runner_with("auto", torch.bfloat16)).weights_from_elsewhere == ()
    named = launched(runner_with("auto", torch.bfloat16), **{argument: str(tmp_path)})
    assert named.weights_from_elsewhere == (argument.replace("_", "-"),)
    with pytest.raises(UnsupportedError, match=f"--{named.weights_from_elsewhere[0]} cannot be served"):
        model_weights.weights_of_server(named)


def test_a_directory_for_downloads_is_none_where_the_model_is_one(
    launched: Callable[..., LaunchFacts], tmp_path: Path
) -> None:
    here = {"model_path": str(tmp_path), "download_dir": str(tmp_path)}
    assert launched(runner_with("auto", torch.bfloat16), **here).weights_from_elsewhere == ()
    draft = {"speculative_draft_model_path": "org/draft"}
    assert launched(runner_with("auto", torch.bfloat16), **here, **draft).weights_from_elsewhere == ("download-dir",)


def test_a_real_servers_namespaces_hold_what_was_resolved() -> None:
    """``get_server_args()`` is what was typed; the namespaces are published from what it was resolved to."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    asked = {"model_path", "revision", "load_format", "dtype", "quantization", "kv_cache_dtype", "enable_lora"}
    asked |= {
        "disaggregation_mode",
        "enable_metrics",
        "hicache_storage_backend_extra_config",
        "quantization_param_path",
    }
    asked |= {"speculative_draft_model_path", "speculative_draft_model_revision", "json_model_override_args"}
    asked |= {*launch_arguments.WEIGHTS, *launch_arguments._STORAGE_ARGUMENTS, *launch_arguments.SHAPING_FILES}
    asked |= {"enable_weights_cpu_backup", "speculative_draft_load_format"}
    assert asked <= set(namespace_of(ServerArgs))


def test_a_server_whose_arguments_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed for no server, and its pages had no weights in their identity."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace())
    monkeypatch.setattr(launch_arguments, "resolved", lambda name: 1 / 0)
    with pytest.raises(UnsupportedError, match="its launch arguments cannot be read"):
        launch_arguments.read_launch_facts()


def test_a_server_without_storage_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in is in force in every SGLang server of an environment."""
    monkeypatch.setattr(model_weights, "uses_storage", lambda: False)
    adapter = loaded_adapter(make_tiny_adapter(tmp_path / "a", seed=1))
    tensors = dict(adapter.layers[0].weights)
    model_weights.after_lora_start(None, manager_of(id1=adapter))
    assert all(adapter.layers[0].weights[name] is tensor for name, tensor in tensors.items())
    assert request("id1", "tenant").extra_key == "tenantid1"


# -- adapters ----------------------------------------------------------------------------------------------------------


def loaded_adapter(path: Path) -> Any:
    """An adapter as SGLang holds it, but for its stacking of projections."""
    from safetensors.torch import load_file

    config = SimpleNamespace(hf_config=json.loads((path / "adapter_config.json").read_text()), added_tokens_config=None)
    layers: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in load_file(path / "adapter_model.safetensors").items():
        layers[int(name.split(".layers.")[1].split(".")[0])][name] = tensor
    return SimpleNamespace(
        config=config,
        layers=[SimpleNamespace(weights=weights) for weights in layers],
        embedding_layers={},
        added_tokens_embeddings={},
    )


def test_adapters_of_equal_content_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    here, there = (loaded_adapter(make_tiny_adapter(tmp_path / name, seed=1)) for name in ("here", "there"))
    assert here.config.hf_config != there.config.hf_config  # the path of the base model
    assert model_weights.adapter_digest(here, ()) == model_weights.adapter_digest(there, ())


def test_every_value_and_every_setting_of_an_adapter_counts(tmp_path: Path) -> None:
    path = make_tiny_adapter(tmp_path / "adapter", seed=1)
    seen = {model_weights.adapter_digest(loaded_adapter(path), ())}

    def also(change: Callable[[Any], None], modules: tuple[str, ...] = ()) -> None:
        adapter = loaded_adapter(path)
        change(adapter)
        seen.add(model_weights.adapter_digest(adapter, modules))

    def one_value(adapter: Any) -> None:
        next(iter(adapter.layers[1].weights.values())).view(-1)[7] += 1

    def swapped_layers(adapter: Any) -> None:
        adapter.layers[0].weights, adapter.layers[1].weights = adapter.layers[1].weights, adapter.layers[0].weights

    def all_linear(adapter: Any) -> None:
        adapter.config.hf_config["target_modules"] = "all-linear"

    also(one_value)
    also(swapped_layers)
    also(lambda adapter: adapter.config.hf_config.update(lora_alpha=9))
    also(lambda adapter: adapter.config.hf_config.update(use_rslora=True))
    also(lambda adapter: adapter.embedding_layers.update(embed_tokens=torch.ones(2)))
    also(lambda adapter: setattr(adapter.config, "added_tokens_config", {"<x>": 512}))
    also(all_linear)
    # A server leaves out what it does not apply adapters to.
    also(lambda adapter: None, ("k_proj",))
    also(lambda adapter: None, ("k_proj", "o_proj"))
    assert len(seen) == 10


def manager_of(**loras: Any) -> Any:
    refs = {lora_id: SimpleNamespace(lora_id=lora_id, lora_name="some name") for lora_id in loras}
    return SimpleNamespace(loras=loras, lora_refs=refs, target_modules=set(), memory_pool=None)


def request(lora_id: str | None, extra_key: str | None = None) -> Any:
    """As SGLang's constructor leaves it."""
    made = SimpleNamespace(lora_id=lora_id, extra_key=extra_key)
    if lora_id is not None:
        made.extra_key = (extra_key or "") + lora_id
    model_weights.after_request(None, made)
    return made


def test_the_content_of_an_adapter_takes_the_place_of_sglangs_name_for_it(tmp_path: Path) -> None:
    old = loaded_adapter(make_tiny_adapter(tmp_path / "a", seed=1))
    equal = loaded_adapter(make_tiny_adapter(tmp_path / "b", seed=1))
    new = loaded_adapter(make_tiny_adapter(tmp_path / "a", seed=2))
    model_weights.after_lora_start(None, manager_of(id1=old))
    for lora_id, adapter in (("id2", equal), ("id3", new)):
        model_weights.after_lora_load(
            None, manager_of(**{lora_id: adapter}), SimpleNamespace(lora_id=lora_id, lora_name="x")
        )
    assert request("id1").extra_key == request("id2").extra_key != request("id3").extra_key
    assert request("id1", "tenant").extra_key == "tenant" + request("id2").extra_key
    assert request(None).extra_key is None


def test_what_an_adapter_is_does_not_change_with_its_file(tmp_path: Path) -> None:
    mapped = torch.ones(64)
    adapter = loaded_adapter(make_tiny_adapter(tmp_path / "a", seed=1))
    adapter.layers[0].weights["o_proj"] = mapped
    model_weights.after_lora_start(None, manager_of(id1=adapter))
    mapped.zero_()
    assert adapter.layers[0].weights["o_proj"].sum() == 64


def test_an_adapter_that_cannot_be_identified_shares_pages_with_nobody() -> None:
    broken = SimpleNamespace(config=None, layers=[], embedding_layers={}, added_tokens_embeddings={})
    model_weights.after_lora_start(None, manager_of(id1=broken, id2=broken))
    assert request("id1").extra_key == request("id1").extra_key
    assert len({request(name).extra_key for name in ("id1", "id2", "never loaded")}) == 3


def test_no_request_without_an_adapter_can_ask_for_an_adapters_pages() -> None:
    digest = "0123456789abcdef" * 2
    keys = [None, "", "tenant", digest, digest + "-", "tenant" + digest, digest.upper(), digest[:-1]]
    without = [namespaced_extra_key(key) for key in keys]
    with_adapter = [namespaced_extra_key(key, digest) for key in keys if key is not None]
    assert len(set(without)) == len(keys)
    assert not set(without) & set(with_adapter)
    assert without[:3] == keys[:3]


def test_a_request_of_sglang_has_what_the_hook_on_it_reads() -> None:
    import inspect

    from sglang.srt.managers.schedule_batch import Req

    assert {"lora_id", "extra_key"} <= set(inspect.signature(Req.__init__).parameters)
    assert dataclasses.is_dataclass(LaunchFacts)
