"""One service for all end-to-end tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.service import Service, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as one:
        yield one
