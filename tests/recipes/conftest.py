"""A finished model of seconds, for what builds on one."""

from pathlib import Path

import pytest

from recipes.export import export
from tests.recipes.tiny import SD_STAGES, tiny_run


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first model of the family, of the tiny recipe."""
    run = tiny_run(tmp_path_factory.mktemp("run"), stages=SD_STAGES)
    return export("shapes-sd", run, tmp_path_factory.mktemp("shapes-sd"))
