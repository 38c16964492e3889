"""One cell and one browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.cell.local_service import LocalService, running_locally
from tests.page.browsing import browsing
from tests.page.cell import OVERRIDES


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as one:
        yield one


@pytest.fixture(scope="module")
def service(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    # not without a browser
    with running_locally(tmp_path_factory.mktemp("page"), **OVERRIDES) as one:
        yield one
