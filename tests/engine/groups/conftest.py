"""Four ranks, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.groups.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(tmp_path_factory.mktemp("ranks") / "store") as ranks:
        yield ranks
