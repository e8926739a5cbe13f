"""The PageStore suite against other stores than s3rver: Azure Blob Storage (Azurite) and moto's S3, with the keys that
their users have: endpoints with a path, encryption by the server."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiers.object import client
from hicache_ext.storage.tiers.object.client import make_client
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.storage.tiers.object.tier_type import ObjectTier
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs.azurite import ACCOUNT, ACCOUNT_KEY, Azurite, missing_azurite
from tests.rigs.moto_server import MotoServer, missing_moto
from tests.rigs.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.storage.remote.object.bucket import Objects, ObjectsOnS3, RawBucket, s3_client
from tests.storage.remote.object.fault_proxy import FaultProxy
from tests.waiting import wait_until

# Real servers.
pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    if missing := missing_azurite():
        pytest.skip(f"missing: {missing}")
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    if missing := missing_moto():
        pytest.skip(f"missing: {missing}")
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        yield server


_SECRETS = {"TEST_ACCOUNT_KEY": ACCOUNT_KEY, "TEST_ACCESS_KEY": ACCESS_KEY, "TEST_SECRET_KEY": SECRET_KEY}


def secret(name: str) -> dict[str, str]:
    """A file: other processes may have been forked before an environment was changed."""
    file = Path(tempfile.gettempdir()) / f"hicache-test-{os.getpid()}-{name}"
    file.write_text(_SECRETS[name])
    return {"file": str(file)}


def tier_of(**keys: Any) -> ObjectTierConfig:
    tier = load_config(
        ExtraConfig.around({"tiers": {"cold": {"type": "object", "allow_http": True, "timeout": "60s", **keys}}})
    ).tiers["cold"]
    assert isinstance(tier, ObjectTierConfig)
    return tier


def azure(server: Azurite, port: int | None = None, prefix: str = "", **keys: Any) -> ObjectTierConfig:
    """``keys``: other credentials than the account's key."""
    endpoint = server.endpoint.replace(str(server.port), str(port or server.port))
    keys = keys or {"account_key": secret("TEST_ACCOUNT_KEY")}
    return tier_of(url=f"az://{server.container}/{prefix}", endpoint=endpoint, account=ACCOUNT, **keys)


def s3(server: MotoServer, port: int | None = None, prefix: str = "", **keys: Any) -> ObjectTierConfig:
    reference = {"access_key": secret("TEST_ACCESS_KEY"), "secret_key": secret("TEST_SECRET_KEY")}
    endpoint = f"http://127.0.0.1:{port or server.port}"
    return tier_of(url=f"s3://{server.bucket}/{prefix}", endpoint=endpoint, **reference, **keys)


class _OnServer(ObjectsOnS3):
    """The tier as its configuration has it."""

    def __init__(self, make: Any, damaging: Any) -> None:
        self.tier = make().model_copy(update={"concurrency": 8})
        super().__init__(make_client_of(self.tier), damaging)

    def __reduce__(self) -> tuple[Any, ...]:
        return _elsewhere, (self.tier,)


def make_client_of(tier: ObjectTierConfig) -> Any:
    return partial(make_client, "cold", tier)


def _elsewhere(tier: ObjectTierConfig) -> _OnServer:
    return _OnServer(lambda: tier, None)


def medium_on(server: Any, configured: Any) -> Objects:
    prefix = secrets.token_hex(6)

    def damaging(proxies: ExitStack) -> Any:
        proxy = proxies.enter_context(FaultProxy(server.port).serving())
        proxy.flipped = 0.5
        proxy.break_with("flip")
        proxies.callback(proxy.break_with, "")
        return make_client("cold", configured(server, proxy.port, prefix))

    return _OnServer(lambda: configured(server, None, prefix), damaging)


class TestObjectStoreOnAzure(PageStoreTests):
    """An endpoint with a path."""

    @pytest.fixture
    def medium(self, azurite: Azurite) -> Objects:
        return medium_on(azurite, azure)


class TestObjectStoreOnMoto(PageStoreTests):
    @pytest.fixture
    def medium(self, moto: MotoServer) -> Objects:
        return medium_on(moto, s3)


def round_trip(tier: ObjectTierConfig) -> ObjectPageStore:
    store = ObjectTier().open("cold", tier)
    assert isinstance(store, ObjectPageStore)
    keys = page_keys(5, secrets.token_hex(4))
    assert store_pages(store, keys, [5000]) == [SetResult.STORED] * 5
    assert store.count_leading(keys) == 5
    assert_hits(store, keys, [5000])
    assert store_pages(store, keys[:1], [5000]) == [SetResult.EXISTS]
    return store


@pytest.mark.parametrize(
    "keys",
    [
        {"sse": "s3"},
        {"sse": "kms"},
        {"sse": "kms", "sse_kms_key": "alias/ours"},
    ],
    ids=str,
)
def test_objects_are_encrypted_by_the_server_as_configured(moto: MotoServer, keys: dict[str, Any]) -> None:
    prefix = secrets.token_hex(4)
    round_trip(s3(moto, prefix=prefix, **keys)).close()
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=moto.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    found = client.list_objects_v2(Bucket=moto.bucket, Prefix=f"{prefix}/packs")["Contents"]
    facts = client.head_object(Bucket=moto.bucket, Key=found[0]["Key"])
    assert facts["ServerSideEncryption"] == {"s3": "AES256", "kms": "aws:kms"}[keys["sse"]]
    if "sse_kms_key" in keys:
        assert facts["SSEKMSKeyId"] == "alias/ours"


def test_pages_make_a_round_trip_with_a_key_of_the_customer(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than that: moto does not encrypt, and answers readers with other keys."""
    monkeypatch.setenv("TEST_SSE_KEY", b64encode(bytes(range(32))).decode())
    round_trip(s3(moto, prefix=secrets.token_hex(4), sse="customer", sse_key={"env": "TEST_SSE_KEY"})).close()


def test_who_is_told_a_wrong_size_on_the_way_removes_no_page(azurite: Azurite) -> None:
    """A store whose ETags say nothing about what is in an object."""
    prefix = secrets.token_hex(4)
    store = round_trip(azure(azurite, prefix=prefix))
    keys = page_keys(4)
    store_pages(store, keys, [5000])
    with FaultProxy(azurite.port).serving() as proxy:
        tier = azure(azurite, proxy.port, prefix)
        reader = ObjectPageStore("cold", tier, lambda: make_client("cold", tier))
        assert_hits(reader, keys, [5000])
        proxy.break_with("no size")
        for key in keys:
            reader._bad_pages.suspect(key, 5128, "truncated")
        assert reader.wait_until_examined(30)
        assert reader.metrics.value("suspect", "removed") == 0
        proxy.break_with("")
        reader.close()
    assert_hits(store, keys, [5000])
    store.close()


def test_the_doctor_finds_nothing_wrong_with_azure(azurite: Azurite) -> None:
    store = round_trip(azure(azurite, prefix=secrets.token_hex(4)))
    assert {finding.level for finding in store.diagnose()} <= {Level.OK, Level.NOTE}
    store.close()


@pytest.mark.parametrize("copied_with", ["", "?"])
def test_pages_are_stored_and_removed_with_a_shared_access_signature(
    azurite: Azurite, tmp_path: Path, copied_with: str
) -> None:
    token = tmp_path / "token"
    token.write_text(copied_with + azurite.signature() + "\n")
    prefix = secrets.token_hex(4)
    store = round_trip(azure(azurite, prefix=prefix, sas_token={"file": str(token)}))
    keys = page_keys(3)
    store_pages(store, keys, [5000])
    assert store.remove(keys[:1]) == 1
    assert store.clear(None) == 1
    assert store.wait_until_cleared(30)
    assert store.count_leading(keys) == 0
    store.close()


def test_a_signature_that_was_exchanged_is_used_and_neither_is_ever_shown(
    azurite: Azurite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(client, "KEYS_LAST", timedelta(seconds=0))
    token = tmp_path / "token"
    reading, writing = azurite.signature("rl"), azurite.signature()
    token.write_text(azurite.signature())
    store = ObjectTier().open("cold", azure(azurite, prefix=secrets.token_hex(4), sas_token={"file": str(token)}))
    token.write_text(reading)
    keys = page_keys(2)
    wait_until(lambda: SetResult.STORED not in store_pages(store, page_keys(2, secrets.token_hex(4)), [5000]))
    assert store.metrics.value("error", "denied")
    token.write_text(writing)
    deadline = time.monotonic() + 60
    while not set(store_pages(store, keys, [5000])) <= {SetResult.STORED, SetResult.EXISTS}:
        assert time.monotonic() < deadline, "the new signature is never used"
        time.sleep(0.1)
    assert_hits(store, keys, [5000])
    said = caplog.text + repr(store.diagnose())
    assert "sig=" not in said
    assert not [token for token in (reading, writing) if token.rpartition("sig=")[2] in said]
    store.close()


def test_a_server_without_deletion_of_many_is_asked_to_delete_one_by_one(s3_server: S3Server) -> None:
    prefix = secrets.token_hex(4)
    with FaultProxy(s3_server.port).serving() as proxy:
        proxy.break_with("no bulk delete")
        url, endpoint = f"s3://{s3_server.bucket}/{prefix}", f"http://127.0.0.1:{proxy.port}"
        reference = {"access_key": secret("TEST_ACCESS_KEY"), "secret_key": secret("TEST_SECRET_KEY")}
        store = round_trip(tier_of(url=url, endpoint=endpoint, **reference))
        assert store.clear(None) == 1
        assert store.wait_until_cleared(30)
        assert RawBucket(s3_client(s3_server, prefix)).names("packs") == []
        store.close()
