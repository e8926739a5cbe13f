"""The settings of a Mooncake tier: what they become, and the sentence for each wrong one."""

from __future__ import annotations

import pytest

from hicache_ext.config import load_config
from hicache_ext.errors import ConfigError
from hicache_ext.storage.opening import server_view
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig

ADDRESS = "host:port, such as 10.0.0.1:50051"
MASTER = f"{ADDRESS}, or etcd://host:port;host:port of masters with a standby"
DEVICES = (
    "device names in one text such as 'mlx5_0,mlx5_1', a list with one text per tp rank, or {'0': text, '1': text}"
)
SOFT_PIN = "true, false, or a duration such as 30m"
NAME = "letters, digits, '_', '-' and '.'"
SIZE = "whole bytes such as 1048576, or a size such as 512MiB, 2TiB or 1.5GB"


def document(**settings):
    tier = {"type": "mooncake", "master": "10.0.0.1:50051", **settings}
    return {
        "backend_name": "hicache_ext",
        "module_path": "hicache_ext.storage.backend",
        "class_name": "HiCacheExtBackend",
        "interface_v1": 1,
        "hicache_ext": {"tiers": {"pool": {key: value for key, value in tier.items() if value != "-"}}},
    }


def tier(**settings) -> MooncakeTierConfig:
    loaded = load_config(document(**settings)).tiers["pool"]
    assert isinstance(loaded, MooncakeTierConfig)
    return loaded


def test_the_least_one_writes_is_a_client_of_a_standalone_pool():
    import socket

    least = tier()
    assert (least.segment_size, least.protocol, least.replica_num, least.timeout) == (0, "tcp", 1, None)
    assert (least.metadata_server, least.local_hostname) == ("P2PHANDSHAKE", socket.gethostname())
    assert least.summary() == "mooncake, master 10.0.0.1:50051, tcp"


@pytest.mark.parametrize("master", ["host:1", "[::1]:1"])
def test_a_master_is_one_address(master):
    assert tier(master=master).master_addresses() == [master]


def test_masters_with_a_standby_are_found_through_etcd():
    both = tier(master="etcd://10.0.0.1:2379;[::2]:2379")
    assert both.master == "etcd://10.0.0.1:2379;[::2]:2379"
    assert both.master_addresses() == ["10.0.0.1:2379", "[::2]:2379"]


@pytest.mark.parametrize("devices", [["mlx5_0", "mlx5_1"], {"0": "mlx5_0", "1": "mlx5_1"}])
def test_each_rank_has_its_devices(devices):
    both = tier(protocol="rdma", devices=devices)
    assert [both.for_rank(rank).device_names() for rank in (0, 1)] == ["mlx5_0", "mlx5_1"]
    with pytest.raises(ConfigError) as caught:
        server_view("both", tp_rank=2)(load_config(document(devices=devices)))
    assert str(caught.value) == f"hicache_ext.tiers.pool.devices: there are none for tp rank 2; allowed: {DEVICES}"


def test_one_text_of_devices_is_for_all_ranks():
    assert tier(devices="mlx5_0,mlx5_1").for_rank(7).device_names() == "mlx5_0,mlx5_1"


def test_templates_are_replaced(monkeypatch):
    monkeypatch.setenv("POOL", "10.1.1.1:7")
    assert tier(master="{env:POOL}").master == "10.1.1.1:7"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"master": "-"}, f"master: required; allowed: {MASTER}"),
        ({"master": "10.0.0.1"}, f"master: '10.0.0.1' is not an address with a port; allowed: {MASTER}"),
        ({"master": "h:0"}, f"master: 'h:0' is not an address with a port; allowed: {MASTER}"),
        ({"master": 5}, f"master: the number 5 is not accepted; allowed: {MASTER}"),
        ({"master": "a:1,b:2"}, f"master: 'a:1,b:2' is not an address with a port; allowed: {MASTER}"),
        ({"master": "etcd://a:1;b"}, f"master: 'b' is not an address with a port; allowed: {MASTER}"),
        ({"master": "etcd://"}, f"master: '' is not an address with a port; allowed: {MASTER}"),
        (
            {"master": "redis://a:1"},
            f"master: 'redis://a:1': the library finds masters through etcd alone; allowed: {MASTER}",
        ),
        ({"metrics": "etcd://a:1"}, f"metrics: 'etcd://a:1' is not an address with a port; allowed: {ADDRESS}"),
        ({"protocol": "rmda"}, "protocol: the text 'rmda' is not accepted; did you mean 'rdma'?; allowed: tcp, rdma"),
        ({"devices": []}, f"devices: a list is not accepted; allowed: {DEVICES}"),
        ({"devices": {"a": "x"}}, f"devices: the text 'a' is not a tp rank; allowed: {DEVICES}"),
        ({"devices": ["x", 5]}, "devices[1]: the number 5 is not accepted; allowed: device names in one text"),
        (
            {"segment_size": "4G"},
            f"segment_size: the unit 'G' is ambiguous; write GB or GiB; allowed: {SIZE}",
        ),
        (
            {"local_buffer_size": "16MiB"},
            "local_buffer_size: there is no such key any more: pages travel through memory of the tier, and the "
            "library's own buffer has 16MiB; remove it",
        ),
        ({"replica_num": 0}, "replica_num: the number 0 is not accepted; allowed: 1 to 16"),
        (
            {"preferred_segments": ["a"]},
            "preferred_segments: there is no such key any more: the master chooses; the library gives segments names "
            "that nobody knows before they run; remove it",
        ),
        (
            {"soft_pin": True},
            "soft_pin: there is no such key any more: the master evicts what was used least lately; remove it",
        ),
        ({"prefix": "a/b"}, f"prefix: the text 'a/b' is not accepted; allowed: {NAME}"),
        ({"group": "page"}, "group: there is no such key any more: the master evicts each object by itself; remove it"),
        (
            {"timeout": 0},
            "timeout: the number 0 is less than 1ms; allowed: a duration from 1ms to 1h, such as 2s, or auto",
        ),
    ],
)
def test_a_wrong_setting_has_one_sentence(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config(document(**settings))
    assert str(caught.value) == f"hicache_ext.tiers.pool.{sentence}"
