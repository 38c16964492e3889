"""One local cell for all tests of what a service does that kill none of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cell.local_service import LocalService, running_locally
from tests.e2e.controlled import sections

BOTH = sections()["controlnets"]


class _Ender:
    """Stops the cell before its worker runs other tests: some look at what this process has."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if Path(__file__).parent not in item.path.parents:
            self._stack.close()


@pytest.fixture(scope="session")
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalService]:
    with ExitStack() as stack:
        request.config.pluginmanager.register(_Ender(stack))
        folder = tmp_path_factory.mktemp("local")
        more = {"controlnets": BOTH, "upscalers": [{"name": "big"}]}
        yield stack.enter_context(running_locally(folder, **more))
