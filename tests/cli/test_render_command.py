"""``hicache-ext config render``: every tier type and combination is a file that loads, with no secret in it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.config import load_config, load_document
from hicache_ext.config.render import example_config
from hicache_ext.runtime import file_systems
from hicache_ext.runtime.file_systems import Mount

DISK = ["--path", "/mnt/nvme0", "--capacity", "512GiB"]
POOLS = {
    "redis": ["--redis", "rediss://pool:6379"],
    "mooncake": ["--mooncake", "10.0.0.1:50051"],
    "object": ["--s3", "s3://bucket/hicache"],
}
COMBINATIONS = [
    DISK,
    *POOLS.values(),
    *([*DISK, *pool] for pool in POOLS.values()),
    [*DISK, *(word for pool in POOLS.values() for word in pool)],
    ["--redis", "redis://a:6379", "--redis", "redis://b:6379"],
    ["--s3", "gs://bucket/hicache"],
    ["--s3", "az://container/hicache"],
    *([*DISK, *pool, "--pd", "prefill"] for pool in POOLS.values()),
    *([*pool, "--pd", "decode"] for pool in POOLS.values()),
    [*DISK, "--pd", "decode"],
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hicache.yaml"
    path.write_text(example_config())
    return path


@pytest.fixture(autouse=True)
def _local_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [Mount("/", "ext4", "/dev/root")]
    monkeypatch.setattr(file_systems, "read_mounts", lambda _: table)


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", "render", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMBINATIONS, ids=" ".join)
def test_every_combination_passes_config_check(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = rendered(capsys, *words)
    file = tmp_path / "hicache.yaml"
    file.write_text(text)
    config = load_config(file)
    assert main(["config", "check", str(file)]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    private_decode = words == [*DISK, "--pd", "decode"]
    assert len(notes) == private_decode, notes
    types = [tier.type for tier in config.tiers.values()]
    assert types == [
        *(["file"] if "--path" in words else []),
        *(kind for kind, option in (("mooncake", "--mooncake"), ("redis", "--redis")) if option in words),
        *(["object"] if "--s3" in words else []),
    ]
    assert all(tier.required == (tier.type == "file") for tier in config.tiers.values())
    assert list(config.store_locations) == list(config.tiers)
    assert list(config.retrieve_locations) == ([] if "decode" in words else list(config.tiers))


def test_without_anything_it_prints_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert rendered(capsys) == example_config()


@pytest.mark.parametrize("words", [DISK, [*DISK, "--inline"]])
def test_standard_output_is_the_configuration_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Notes, if any, are on standard error: the output goes into a file."""
    assert yaml.safe_load(rendered(capsys, *words))["hicache_ext"]["tiers"]["disk"]["capacity"] == "512GiB"


def test_the_launch_line_is_one_command_with_every_flag_that_matters(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, *DISK)
    lines = text[text.index("#   python -m") :].splitlines()
    last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
    command = "".join(line.removeprefix("#").removesuffix("\\") for line in lines[: last + 1])
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[-1] == "@hicache.yaml"
    flags = {word for word in words if word.startswith("--")}
    assert flags > {
        "--page-size",
        "--enable-hierarchical-cache",
        "--hicache-mem-layout",
        "--hicache-io-backend",
        "--hicache-ratio",
        "--hicache-write-policy",
        "--hicache-storage-prefetch-policy",
    }


@pytest.mark.sglang
@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_sglang_knows_every_flag_of_the_launch_line_and_its_value(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    from hicache_ext.testing.sglang_cpu import prepare_process

    prepare_process()
    from sglang.srt.server_args import ServerArgs

    document = json.loads(rendered(capsys, *DISK, "--pd", role, "--json"))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(shlex.split(" ".join(document["launch"]))[3:])
    assert parsed.page_size == 64 and parsed.hicache_mem_layout == "page_first"
    assert parsed.disaggregation_mode == ("null" if role == "both" else role)


def test_a_decode_node_gets_the_layout_of_its_prefill_node_and_nothing_of_its_prefetching(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill = json.loads(rendered(capsys, *POOLS["redis"], "--pd", "prefill", "--json"))["launch"]
    decode = json.loads(rendered(capsys, *POOLS["redis"], "--pd", "decode", "--json"))["launch"]
    for flag in ("--page-size", "--hicache-mem-layout", "--hicache-io-backend"):
        assert (
            [part for part in prefill if part.startswith(flag)]
            == [part for part in decode if part.startswith(flag)]
            != []
        )
    assert not any("prefetch" in part for part in decode)
    assert "--disaggregation-decode-enable-offload-kvcache" in decode


@pytest.mark.parametrize(
    "words",
    [
        ["--redis", "redis://:geheim@pool:6379"],
        ["--redis", "redis://pool:6379?password=geheim"],
        ["--redis", "redis://a:6379", "--redis", "redis://user:geheim@b:6379"],
        ["--mooncake", "user:geheim@10.0.0.1:50051"],
        ["--s3", "s3://key:geheim@bucket/prefix"],
        ["--s3", "s3://bucket/prefix?secret=geheim"],
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"], ["--inline"]])
def test_a_secret_in_an_option_is_refused_with_what_to_do_and_not_repeated(
    words: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "render", *words, *more]) == 2
    printed = capsys.readouterr()
    assert "geheim" not in printed.out + printed.err
    assert printed.out == ""
    assert "allowed: " in printed.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--path", "/a"], "--path and --capacity are both needed to make a file tier; allowed: --path PATH"),
        (["--capacity", "1GiB", *POOLS["redis"]], "--path and --capacity are both needed"),
        (["--pd", "decode"], "--path and --capacity are both needed to make a file tier; allowed: "),
        ([*DISK, *POOLS["redis"], "--pd", "decode"], "--path: a decode node reads nothing back"),
        ([*DISK, "--pd", "prefil"], "hicache_ext.role: "),
        (["x.yaml", "--pd", "both"], "FILE cannot be combined with --pd; allowed: "),
        (["x.yaml", *POOLS["redis"]], "FILE cannot be combined with --redis; allowed: "),
        (["none.yaml"], "none.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_what_would_not_start_is_refused(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "render", *options]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def launch_words(text: str) -> list[str]:
    """The words of the launch line in the head of a configuration."""
    lines = text[text.index("#   python -m") :].splitlines()
    last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
    return shlex.split("".join(line.removeprefix("#").removesuffix("\\") for line in lines[: last + 1]))


@pytest.mark.parametrize("options", [[], DISK])
def test_the_launch_line_of_the_linker_names_our_class_and_the_file(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = rendered(capsys, *options, "--linker")
    words = launch_words(text)
    assert json.loads(words[-1]) == {
        "linker": "HiCacheExtLinker",
        "linker_module_path": "hicache_ext.sglang.linker",
        "linker_extra_config": {"config_file": "hicache.yaml"},
    }
    assert "--enable-unified-cache-external-linker" in words
    assert not any("hierarchical" in word or word.startswith("--hicache") for word in words)
    assert "without --enable-hierarchical-cache" in text
    load_document(yaml.safe_load(text))


def test_the_linker_inline_is_what_its_flag_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = json.loads(rendered(capsys, *DISK, "--linker", "--inline"))
    assert given["linker_extra_config"]["hicache_ext"]["tiers"]["disk"]["capacity"] == "512GiB"
    assert set(given) == {"linker", "linker_module_path", "linker_extra_config"}


def test_a_decode_node_has_no_linker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "render", "--mooncake", "10.0.0.1:50051", "--pd", "decode", "--linker"]) == 2
    assert capsys.readouterr().err.startswith("--linker: a decode node stores what it generates through HiCache")


def test_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "render", *DISK, "--pd", "decode"]) == 0
    assert "note: store_locations: a decode node that stores in private tiers alone" in capsys.readouterr().err


def test_it_takes_a_capacity_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "render", "--path", "/a", "--capacity", "1073741824", "--inline"]) == 0
    assert load_config(capsys.readouterr().out).tiers["disk"].summary() == "file, capacity 1GiB, /a"


def test_it_inline_is_one_line_that_sglang_reads_in_place_of_a_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "render", "--inline", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == yaml.safe_load(file.read_text())


def test_it_keeps_templates_for_the_node_that_reads_them(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(example_config().replace("/mnt/nvme0/hicache ", "'/mnt/{hostname}'"))
    assert main(["config", "render", str(file)]) == 0
    assert "/mnt/{hostname}" in capsys.readouterr().out


def test_it_takes_a_relative_path_as_below_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISK", "/mnt/disk")
    assert main(["config", "render", "--path", "kv", "--path", "{env:DISK}/kv", "--capacity", "1GiB"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["hicache_ext"]["tiers"]["disk"]["path"] == [str(tmp_path / "kv"), "{env:DISK}/kv"]
