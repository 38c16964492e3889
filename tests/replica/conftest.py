"""What the tests of the replica share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.imaging.processes.image_coder import ImageCoder
from tests.engine.harness import load, pool
from tests.engine.random_models import save_sd
from tests.engine.staged import StagedModel
from tests.replica.lora_files import Converter
from tests.replica.setup import (
    REQUESTS,
)


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> StagedModel:
    prepare_threads(1)
    folder = save_sd(tmp_path_factory.mktemp("replica") / "sd")
    return StagedModel(load(pool(folder)), REQUESTS)


@pytest.fixture(scope="session")
def pixels(staged: StagedModel) -> dict[str, Any]:
    return dict(staged.pixels())


@pytest.fixture(scope="module")
def coder() -> Iterator[ImageCoder]:
    with ImageCoder() as coder:
        yield coder


@pytest.fixture(scope="session")
def converter() -> Iterator[Converter]:
    found = Converter()
    yield found
    found.close()


@pytest.fixture
def model(staged: StagedModel) -> Iterator[StagedModel]:
    yield from staged.lent()
