"""The manifests under examples/kubernetes: valid, whole in themselves, and such as docs/kubernetes.md says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.config import load_config
from hicache_ext.config.load import check_document, secrets_in
from hicache_ext.storage.tiers.file.config import FileTierConfig

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="missing: the package kubernetes-validate")

PLACE = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = sorted(PLACE.glob("*.yaml"))
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest that docs/kubernetes.md names, and the newest whose schemas the package has."""
SGLANG_ENDS_WITHIN = 5 + 15
"""Seconds that SGLang takes at most from the last answer to its end: the pause of its watch, and what its schedulers
get (``sigterm_watchdog`` in managers/tokenizer_manager.py; 0.5.21 to 0.5.23 alike)."""

Document = dict[str, Any]


def documents(manifest: Path) -> list[Document]:
    return list(yaml.safe_load_all(manifest.read_text()))


def of_kind(manifest: Path, *kinds: str) -> list[Document]:
    return [document for document in documents(manifest) if document["kind"] in kinds]


def workload(manifest: Path) -> Document:
    [found] = of_kind(manifest, "DaemonSet", "StatefulSet", "Deployment")
    return found


def pod(manifest: Path) -> Document:
    spec: Document = workload(manifest)["spec"]["template"]["spec"]
    return spec


def server(manifest: Path) -> Document:
    [container] = pod(manifest)["containers"]
    assert isinstance(container, dict)
    return container


def volumes(manifest: Path) -> dict[str, Document]:
    """By name; those of claims too."""
    claims = workload(manifest)["spec"].get("volumeClaimTemplates", [])
    return {
        **{volume["name"]: volume for volume in pod(manifest)["volumes"]},
        **{claim["metadata"]["name"]: claim for claim in claims},
    }


def mounts(manifest: Path) -> dict[PurePosixPath, Document]:
    """By where they are mounted."""
    return {PurePosixPath(mount["mountPath"]): mount for mount in server(manifest)["volumeMounts"]}


def mount_of(manifest: Path, path: str) -> Document:
    """The mount that a path in the container is on."""
    return mounts(manifest)[next(above for above in PurePosixPath(path).parents if above in mounts(manifest))]


def configuration(manifest: Path) -> str:
    [config_map] = of_kind(manifest, "ConfigMap")
    [text] = config_map["data"].values()
    assert isinstance(text, str)
    return text


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def manifest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the environment that its server gets from the cluster."""
    path: Path = request.param
    for variable in server(path)["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "10.0.0.7"))
    return path


def test_there_are_manifests_of_each_kind_of_workload() -> None:
    assert {workload(path)["kind"] for path in MANIFESTS} == {"DaemonSet", "StatefulSet", "Deployment"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_the_published_schema_without_a_key_too_many(manifest: Path, version: str) -> None:
    for document in documents(manifest):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_looked_at(manifest: Path) -> None:
    """A misspelt key would be found."""
    broken = workload(manifest)
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_its_configuration_loads_and_check_has_nothing_to_remark(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = configuration(manifest)
    for _, secret in secrets_in(check_document(yaml.safe_load(text))):
        # Where the pod has it.
        (tmp_path / secret.name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / secret.name.lstrip("/")).write_text("x")
        text = text.replace(f"file: {secret.name}", f"file: {tmp_path / secret.name.lstrip('/')}")
    file = tmp_path / "hicache.yaml"
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"OK: {file}\n") and "note:" not in said


def test_the_file_that_the_server_is_given_is_in_the_config_map_mounted_as_a_directory_and_watched(
    manifest: Path,
) -> None:
    [argument] = [word for word in server(manifest)["args"] if "extra-config" in word]
    file = PurePosixPath(argument.partition("=@")[2])
    mount = mounts(manifest)[file.parent]
    assert "subPath" not in mount and mount["readOnly"] is True
    [config_map] = of_kind(manifest, "ConfigMap")
    assert volumes(manifest)[mount["name"]]["configMap"]["name"] == config_map["metadata"]["name"]
    assert [*config_map["data"]] == [file.name]
    assert load_config(yaml.safe_load(configuration(manifest))).watch_config
    [check] = pod(manifest)["initContainers"]
    assert check["command"] == ["hicache-ext", "config", "check", str(file)]
    assert file.parent in {PurePosixPath(mount["mountPath"]) for mount in check["volumeMounts"]}


def test_tiers_lie_in_a_directory_of_a_volume_that_outlives_the_pod(manifest: Path) -> None:
    config = load_config(yaml.safe_load(configuration(manifest)))
    for tier in config.tiers.values():
        if isinstance(tier, FileTierConfig):
            for path in tier.path:
                volume = volumes(manifest)[mount_of(manifest, path)["name"]]
                assert "hostPath" in volume or volume.get("kind") == "PersistentVolumeClaim"
                assert volume.get("hostPath", {"type": "Directory"})["type"] == "Directory"
                assert tier.require_mount


def test_secrets_come_from_a_volume_and_none_is_in_the_manifest(manifest: Path) -> None:
    assert of_kind(manifest, "Secret") == []
    for _, secret in secrets_in(load_config(yaml.safe_load(configuration(manifest)))):
        assert secret.kind == "file", "a variable of a running pod never changes"
        mount = mount_of(manifest, secret.name)
        assert "subPath" not in mount
        assert volumes(manifest)[mount["name"]]["secret"]["defaultMode"] == 0o440
        assert pod(manifest)["securityContext"]["fsGroup"], "without it root alone reads the file"


def test_the_pod_has_no_rights_that_it_does_not_need_and_writes_into_volumes_alone(manifest: Path) -> None:
    account = pod(manifest)["securityContext"]
    assert account["runAsNonRoot"] and account["runAsUser"] > 0
    assert pod(manifest)["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod(manifest))
    for container in (server(manifest), *pod(manifest)["initContainers"]):
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
    assert {PurePosixPath("/tmp"), PurePosixPath("/dev/shm")} <= set(mounts(manifest))
    for variable in server(manifest)["env"]:
        if variable["name"] == "HOME" or variable["name"].endswith("_DIR"):
            assert mount_of(manifest, variable["value"])


def test_every_mount_has_a_volume_and_every_volume_a_mount(manifest: Path) -> None:
    assert {mount["name"] for mount in mounts(manifest).values()} == set(volumes(manifest))


def test_a_claim_is_not_gone_through_file_by_file_at_each_start(manifest: Path) -> None:
    if workload(manifest)["spec"].get("volumeClaimTemplates"):
        assert pod(manifest)["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_grace_period_is_longer_than_what_happens_in_it(manifest: Path) -> None:
    config = load_config(yaml.safe_load(configuration(manifest)))
    pause = int(server(manifest)["lifecycle"]["preStop"]["exec"]["command"][1])
    longest_answer = 120
    assert pod(manifest)["terminationGracePeriodSeconds"] >= pause + longest_answer + SGLANG_ENDS_WITHIN
    assert config.background.drain + 1 < 15, "SGLang kills its schedulers before the queues are written"
    assert pod(manifest)["shareProcessNamespace"], "process 1 would not get the SIGTERM while the model is loaded"


def test_probes_wait_longer_than_sglang_looks_for_an_answer(manifest: Path) -> None:
    container = server(manifest)
    ports = {port["name"] for port in container["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"} and "http" in ports
        assert container[name]["timeoutSeconds"] > 20


def test_labels_meet(manifest: Path) -> None:
    labels = workload(manifest)["spec"]["template"]["metadata"]["labels"]
    assert workload(manifest)["spec"]["selector"]["matchLabels"] == labels
    for service in of_kind(manifest, "Service"):
        assert service["spec"]["selector"] == labels
    budgets = of_kind(manifest, "PodDisruptionBudget")
    # Draining a node leaves the pods of a DaemonSet alone.
    assert bool(budgets) is (workload(manifest)["kind"] != "DaemonSet")
    assert [budget["spec"]["selector"]["matchLabels"] for budget in budgets] == [labels] * len(budgets)


@pytest.mark.thorough
def test_what_the_containerfile_copies_can_be_installed(tmp_path: Path) -> None:
    text = (PLACE / "Containerfile").read_text()
    root = PLACE.parents[1]
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *copied, place = line.split()
        directory = tmp_path / place.strip("/")
        for word in copied:
            if (root / word).is_dir():
                shutil.copytree(root / word, directory, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                directory.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / word, directory)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run([*build, str(tmp_path / "src")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.whl"))) == 1
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"/src\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
