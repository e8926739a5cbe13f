"""The configuration file of a running server as a Kubernetes ConfigMap: exchanged by a link, or never (subPath)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.serving.config_file import ConfigFile, config_file_of
from hicache_ext.storage.tiering.reload import ReloadableStore
from tests.rigs.container import REPOSITORY, namespaces_missing
from tests.rigs.kubelet import ConfigMapVolume
from tests.waiting import wait_until

NAME = "hicache.yaml"


def text_of(directory: Path, *names: str) -> str:
    tiers = {
        name: {"type": "file", "path": str(directory / name), "capacity": "64MiB", "layout": "pages"} for name in names
    }
    return yaml.safe_dump(ExtraConfig.around({"tiers": tiers, "watch_config": True}))


@pytest.fixture(autouse=True)
def _runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path_factory.mktemp("r")
    directory.chmod(0o700)
    monkeypatch.setenv("HICACHE_EXT_RUNTIME_DIR", str(directory))


@pytest.fixture
def volume(tmp_path: Path) -> ConfigMapVolume:
    return ConfigMapVolume(tmp_path / "etc", {NAME: text_of(tmp_path, "disk")})


@pytest.fixture
def store(volume: ConfigMapVolume) -> Iterator[ReloadableStore]:
    store = open_tiers(load_config(volume.directory / NAME))
    yield store
    store.close()


@pytest.fixture
def watched(volume: ConfigMapVolume, store: ReloadableStore) -> Iterator[ConfigFile]:
    watched = ConfigFile(str(volume.directory / NAME), store, watch=True, watch_interval=0.01)
    yield watched
    watched.close()


def tiers_of(store: ReloadableStore) -> list[str]:
    return [tier.name for tier in store.tiers]


def test_a_config_map_that_changes_is_taken_over_each_time(
    volume: ConfigMapVolume, store: ReloadableStore, watched: ConfigFile, tmp_path: Path
) -> None:
    for names in (["disk", "one"], ["disk"], ["disk", "two"]):
        volume.update({NAME: text_of(tmp_path, *names)})
        wait_until(lambda wanted=names: tiers_of(store) == wanted)


def test_a_config_map_with_a_typo_changes_nothing_and_is_said_in_log_and_metrics_until_it_is_mended(
    volume: ConfigMapVolume,
    store: ReloadableStore,
    watched: ConfigFile,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert watched.in_force
    good = text_of(tmp_path, "disk", "more")
    volume.update({NAME: good.replace("capacity", "capasity")})
    wait_until(lambda: "unknown key; did you mean 'capacity'?" in caplog.text)
    assert not watched.in_force
    assert f"{volume.directory / NAME} is not taken over, what was in force stays: " in caplog.text
    assert tiers_of(store) == ["disk"]
    volume.update({NAME: good})
    wait_until(lambda: tiers_of(store) == ["disk", "more"])
    wait_until(lambda: watched.in_force)


def test_a_config_map_that_is_gone_changes_nothing_and_is_said_by_the_metrics(
    volume: ConfigMapVolume, store: ReloadableStore, watched: ConfigFile
) -> None:
    (volume.directory / "..data").unlink()
    wait_until(lambda: not watched.in_force)
    assert tiers_of(store) == ["disk"]


_LOOK = """
import logging, subprocess, sys, time
from pathlib import Path
from hicache_ext.config import load_config
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.serving.config_file import config_file_of
volume, mounted = Path(sys.argv[1]), Path(sys.argv[2])
logging.basicConfig(format="%(message)s", stream=sys.stdout)
subprocess.run(["mount", "--bind", (volume / "hicache.yaml").resolve(), mounted], check=True)
before = mounted.read_text()
config = load_config(mounted)
store = open_tiers(config)
found = config_file_of(str(mounted), store, config)
print("ready", flush=True)
sys.stdin.readline()
print("changed" if mounted.read_text() != before else "as before", flush=True)
found.close()
store.close()
"""


@pytest.mark.slow
def test_a_file_that_is_mounted_alone_never_changes_and_the_start_says_so(
    volume: ConfigMapVolume, tmp_path: Path
) -> None:
    """What ``subPath`` makes of a ConfigMap, and ``docker run -v FILE:FILE`` of an editor that renames."""
    if missing := namespaces_missing():
        pytest.skip(f"missing: {missing}")
    mounted = tmp_path / NAME
    mounted.touch()
    with subprocess.Popen(
        ["unshare", "--mount", sys.executable, "-c", _LOOK, volume.directory, mounted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        said = list(iter(lambda: server.stdout.readline().strip(), "ready"))  # type: ignore[union-attr]
        volume.update({NAME: text_of(tmp_path, "disk", "more")})
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline().strip() == "as before"
    [warning] = [line for line in said if "mounted by itself" in line]
    assert f"{mounted} is mounted by itself (subPath, or a file given to docker -v)" in warning
    assert "mount the directory" in warning


def test_nothing_is_said_of_a_directory_that_is_mounted(
    volume: ConfigMapVolume, store: ReloadableStore, caplog: pytest.LogCaptureFixture
) -> None:
    found = config_file_of(str(volume.directory / NAME), store, store.config)
    assert found is not None
    found.close()
    assert "mounted by itself" not in caplog.text
