"""One local cell for all tests of what a service does that kill none of its processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cell.local_service import LocalService, running_locally
from tests.e2e.controlled import sections

BOTH = sections()["controlnets"]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with running_locally(tmp_path_factory.mktemp("local"), controlnets=BOTH) as one:
        yield one
