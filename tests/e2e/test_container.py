"""A real server with what a pod of examples/kubernetes has: an account without a name or rights, a root file system
that it cannot write, one volume for all the rest, and a ConfigMap that is exchanged while it runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.server_commands import read_samples
from hicache_ext.config import ExtraConfig
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import FIRST_PROMPT
from tests.rigs.container import namespaces_missing
from tests.rigs.kubelet import ConfigMapVolume
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ACCOUNT = 54321
"""With no name: images seldom know the number that a manifest gives. In a namespace of users, where it is this account
without its rights: another one could not read every checkout and every Python."""
PAGE_SIZE = 16
PROMPT = FIRST_PROMPT
REUSABLE = len(PROMPT) - PAGE_SIZE
NAME = "hicache.yaml"

_RESTRICTED = """
mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,bind,ro / || exit 1
exec unshare --user --map-user={account} --map-group={account} -- "$@"
"""


class RestrictedServer(SglangServer):
    """Can write below ``volume`` and nowhere else."""

    def __init__(self, volume: Path, **settings: object) -> None:
        self.command_prefix = ["unshare", "--mount", "sh", "-c", _RESTRICTED.format(account=ACCOUNT), str(volume)]
        environment = {
            "HOME": str(volume / "home"),
            "USER": "sglang",
            "TORCHINDUCTOR_CACHE_DIR": str(volume / "home" / "inductor"),
            "TMPDIR": str(volume / "tmp"),
            "HICACHE_EXT_RUNTIME_DIR": "",
        }
        super().__init__(volume / "model", environment=environment, page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]


@pytest.fixture
def volume(tiny_model: Path) -> Iterator[Path]:
    """The one directory that the server can write; its model is in it, as on a node's disk."""
    if (missing := namespaces_missing("--user")) is not None:
        pytest.skip(f"missing: {missing}")
    volume = Path(tempfile.mkdtemp(prefix="hce-pod-"))
    shutil.copytree(tiny_model, volume / "model")
    (volume / "tmp").mkdir()
    yield volume
    shutil.rmtree(volume)


def text_of(volume: Path, *names: str) -> str:
    tiers = {
        name: {"type": "file", "path": str(volume / name), "capacity": "64MiB", "io": "buffered"} for name in names
    }
    return yaml.safe_dump(ExtraConfig.around({"tiers": tiers, "watch_config": True}))


def test_a_server_without_rights_on_a_read_only_root_restores_and_follows_its_config_map(
    volume: Path, tmp_path: Path, cold_answer: Callable[[Sequence[int]], Generation]
) -> None:
    config = ConfigMapVolume(volume / "etc", {NAME: text_of(volume, "nvme")})
    cold = cold_answer(PROMPT)

    def serve(name: str) -> RestrictedServer:
        return RestrictedServer(
            volume,
            log_file=tmp_path / f"{name}.log",
            storage_backend="dynamic",
            extra_config=f"@{config.directory / NAME}",
            extra_arguments=["--enable-metrics"],
        )

    with serve("first") as server:
        assert server.generate(PROMPT).output_ids == cold.output_ids
        log = server.log_file

        def in_force() -> float:
            return read_samples(server.get("/metrics")).total("hicache_ext_config_in_force")

        wait_until(lambda: in_force() == 1, "the configuration is in force")
        config.update({NAME: text_of(volume, "nvme", "more").replace("capacity", "capasity")})
        wait_until(lambda: in_force() == 0, "the typo is in the metrics")
        assert "is not taken over, what was in force stays" in log.read_text()
        config.update({NAME: text_of(volume, "nvme", "more")})
        wait_until(lambda: in_force() == 1, "the mended file is taken over")
        assert "tier more is used" in log.read_text()
        # The end of a pod: SIGTERM, and no flush before it.

    with serve("second") as server:
        restored = server.generate(PROMPT)
    assert restored.cached.storage == REUSABLE
    assert restored.output_ids == cold.output_ids
    assert "Read-only file system" not in log.read_text()
