"""A release of SGLang to come, made of the installed one: what was added to it, or renamed as announced, costs nothing.

The copy differs in what SGLang's sources announce, and in one more optional parameter of everything that SGLang calls.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.sglang.releases import TESTED, comes_with, installed_release
from tests.releases.wheels import ROOT, environment_of, package_of

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), TESTED[-1]), reason="the next release follows the newest"),
]

RELEASE = "0.5.99"
_STORAGE = "srt/mem_cache/hicache_storage.py"
_LINKER = "srt/mem_cache/unified_cache/unified_cache_linker.py"
_ASSEMBLER = "srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py"
_CONTROLLER = "srt/managers/cache_controller.py"
_BACKEND_FACTORY = "srt/mem_cache/storage/backend_factory.py"
_LINKER_FACTORY = "srt/mem_cache/unified_cache/linker_factory.py"


def _with_a_later_parameter(text: str, *owners: str) -> str:
    """One more optional keyword for each method of these classes."""
    tree = ast.parse(text)
    for owner in ast.walk(tree):
        for method in owner.body if isinstance(owner, ast.ClassDef) and owner.name in owners else ():
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                method.args.kwonlyargs.append(ast.arg("later"))
                method.args.kw_defaults.append(ast.Constant(None))
    return ast.unparse(tree)


def _without_methods(text: str, *names: str) -> str:
    tree = ast.parse(text)
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and owner.name == "HiCacheStorage":
            owner.body = [one for one in owner.body if getattr(one, "name", "") not in names]
    return ast.unparse(tree)


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def _pools_renamed(text: str) -> str:
    return _replaced(text, "DEEPSEEK_V4_C", "COMPRESSED_C").replace('"deepseek_v4_c', '"compressed_c')


def _storage_renamed(text: str) -> str:
    return _pools_renamed(_replaced(text, "is_mla_model", "is_rank_replicated"))


CHANGES: Mapping[str, Callable[[str], str]] = {
    _STORAGE: lambda text: _with_a_later_parameter(
        _without_methods(_storage_renamed(text), "batch_get", "batch_set"), "HiCacheStorage"
    ),
    _LINKER: lambda text: _with_a_later_parameter(text, "UnifiedCacheLinker"),
    _ASSEMBLER: _pools_renamed,
    _CONTROLLER: lambda text: _replaced(text, "is_mla_model=", "is_rank_replicated="),
    _BACKEND_FACTORY: lambda text: _replaced(
        text, "backend_class(storage_config, kwargs)", "backend_class(storage_config, kwargs, later=1)"
    ),
    _LINKER_FACTORY: lambda text: _replaced(
        text, "forward_stream=forward_stream,\n        )", "forward_stream=forward_stream, later=1)"
    ),
}


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH: the installed ``sglang`` by symbolic links, but for the files of ``CHANGES``."""
    place = tmp_path_factory.mktemp("next")
    installed = package_of(installed_release())
    own = {parent for file in CHANGES for parent in Path(file).parents}
    for directory in own:
        (place / "sglang" / directory).mkdir(parents=True, exist_ok=True)
        for entry in (installed / directory).iterdir():
            here = directory / entry.name
            if str(here) in CHANGES:
                (place / "sglang" / here).write_text(CHANGES[str(here)](entry.read_text()))
            # Links to byte code would let the copy overwrite that of the installed package.
            elif here not in own and entry.name != "__pycache__":
                (place / "sglang" / here).symlink_to(entry)
    facts = place / f"sglang-{RELEASE}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {RELEASE}\n")
    return place


def run_in(place: Path, script: str, *arguments: str) -> Any:
    """What the script prints as JSON at its end, and what it logged."""
    environment = environment_of(installed_release())
    environment["PYTHONPATH"] = f"{place}:{environment['PYTHONPATH']}"
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


_AS_A_SERVER_DOES = """
import json, logging, sys
from pathlib import Path
logging.basicConfig(level=logging.WARNING)
from hicache_ext.testing.sglang_cpu import prepare_process
prepare_process()
from hicache_ext.sglang import lifecycle
from hicache_ext.sglang.launch_arguments import LaunchFacts
from hicache_ext.testing.conformance.storage_backend import page_keys
from tests.rigs.host_pool_kinds import v4_paged_host
from tests.rigs.host_pool_kinds import fill_pools_with_noise, page_content
from hicache_ext.testing.host_pools import make_storage_config, mha_pools, page_indices
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from tests.backend.test_conformance import extra_config

lifecycle.read_launch_facts = lambda: LaunchFacts(model_path="/model", kv_cache_dtype="bfloat16")
kv = mha_pools(page_size=16, pages=24).host
compressed = v4_paged_host("page_first", PoolName.COMPRESSED_C4.value)
fill_pools_with_noise({"compressed": compressed})
ours = extra_config(Path(sys.argv[1]), model={"fingerprint": "these weights"})
config = make_storage_config(is_mla_model=False, tp_size=2, extra_config=ours)
seen = {"replicated": config.is_rank_replicated, "gone": not hasattr(HiCacheStorage, "batch_get")}
backend = StorageBackendFactory.create_backend("dynamic", config, kv)
later = {"later": 1}
backend.register_mem_pool_host(kv, **later)
backend.register_mem_host_pool_v2(kv, PoolName.KV, **later)
backend.register_mem_host_pool_v2(compressed, PoolName.COMPRESSED_C4, **later)
backend.on_host_pools_registered(**later)
keys = page_keys(4)
def beside(pages):
    return PoolTransfer(PoolName.COMPRESSED_C4, host_indices=page_indices(compressed.page_size, pages), keys=keys)
def content(first):
    return [page_content(pool, page) for pool in (kv, compressed) for page in range(first, first + 4)]
was = content(0)
seen["set"] = backend.batch_set_v1(keys, page_indices(16, [0, 1, 2, 3]), None, **later)
(seen["set beside"],) = backend.batch_set_v2([beside([0, 1, 2, 3])], **later).values()
seen["exists"] = backend.batch_exists(keys, **later), backend.exists(keys[0], **later)
asked = [PoolTransfer(PoolName.COMPRESSED_C4)]
seen["restorable"] = backend.batch_exists_v2(keys, asked, None, **later).restorable_prefix_pages
seen["get"] = backend.batch_get_v1(keys, page_indices(16, [8, 9, 10, 11]), **later)
(seen["get beside"],) = backend.batch_get_v2([beside([8, 9, 10, 11])], **later).values()
seen["same"] = content(8) == was != content(4)
flat = kv.get_data_page(0)
seen["flat"] = backend.set(keys[0], flat, **later), backend.get(keys[0], flat, **later)
seen["stats"] = backend.get_stats(**later) is not None
seen["cleared"] = backend.clear(**later), backend.batch_exists(keys, **later)
seen["failures"] = sum(backend._failures.snapshot().values())
backend.close()

from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from tests.backend import linker_rig as rig

lifecycle.read_launch_facts = LaunchFacts
config = {
    "linker_module_path": "hicache_ext.sglang.linker",
    "linker": "HiCacheExtLinker",
    "linker_extra_config": rig.extra_config(Path(sys.argv[1])),
}
device, keys = rig.mha_device(), rig.hashes(4)
with rig.server_context():
    rig.put_hooks_in_force()
    linker = create_unified_cache_linker(
        None, device.params, backend="dynamic", config=config, components=device.components
    )
    device.fill()
    was = device.content("kv", [3, 4, 5, 6])
    taken = linker.offload([rig.pages(device, "kv", keys, [3, 4, 5, 6])], None, **later)
    seen["offload"] = taken and rig.stored(linker)
    rig.wait_for(linker, [rig.Waiting(linker, "r", rig.transfer("kv", keys))])
    seen["lookup"] = linker.lookup("r", [rig.transfer("kv", keys)], **later)
    seen["load"] = linker.load("r", [rig.pages(device, "kv", keys, [60, 61, 62, 63])], **later)
    index = linker.start_layer_wise_loading(**later)
    seen["landed"] = linker.finish_layer_wise_loading(index, **later)
    seen["same on the device"] = device.content("kv", [60, 61, 62, 63]) == was
    seen["no more"] = linker.num_completed_offloads(**later), linker.cancel_queued_load("r", **later)
    linker.reset(**later)
    linker.close(**later)
    seen["failures of the linker"] = sum(linker._backend._failures.snapshot().values())
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_pages_are_stored_and_restored_through_both_doors_of_the_next_release(
    next_release: Path, tmp_path: Path
) -> None:
    seen, log = run_in(next_release, _AS_A_SERVER_DOES, str(tmp_path / "l3"))
    assert seen == {
        "replicated": False,
        "gone": True,
        "set": [True] * 4,
        "set beside": [True] * 4,
        "exists": [4, True],
        "restorable": [1, 2, 3, 4],
        "get": [True] * 4,
        "get beside": [True] * 4,
        "same": True,
        "flat": [False, None],
        "stats": True,
        "cleared": [True, 0],
        "failures": 0,
        "offload": True,
        "lookup": [1, 2, 3, 4],
        "load": True,
        "landed": True,
        "same on the device": True,
        "no more": [0, False],
        "failures of the linker": 0,
    }
    assert log.count("Parameters that are new in it are ignored") == 1
