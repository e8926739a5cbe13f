"""One S3 server for all tests of object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.s3_server import S3Server, missing_s3_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if missing := missing_s3_server():
        pytest.skip(f"missing: {missing}")
    with S3Server(tmp_path_factory.mktemp("s3rver")) as server:
        yield server
