"""One server of S3 for all tests of stores."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.storage.s3_server import S3Server, running_s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, which s3:// URLs are of until the test ends."""
    s3_server.use(monkeypatch)
    return s3_server


@pytest.fixture
def s3_bucket(s3: S3Server) -> str:
    """The URL of an empty bucket."""
    return s3.make_bucket(f"test-{secrets.token_hex(4)}")
