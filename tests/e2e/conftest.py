"""One service for all end-to-end tests of a worker that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service import CONTROLNETS, Service, running, shared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the shared service first: it is stopped when another one is started."""
    here = [
        number for number, item in enumerate(items) if Path(__file__).parent in item.path.parents
    ]
    ours = sorted((items[number] for number in here), key=_has_its_own)
    for number, item in zip(here, ours, strict=True):
        items[number] = item


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the shared service behind the last test of this folder: it would slow all others."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        shared.close()


def _has_its_own(item: pytest.Item) -> bool:
    names, module = getattr(item, "fixturenames", ()), getattr(item, "module", None)
    return "service" not in names or hasattr(module, "service")


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with shared:
        yield shared.enter_context(running(tmp_path_factory.mktemp("service"), **CONTROLNETS))
