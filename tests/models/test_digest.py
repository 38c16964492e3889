"""The digest of a model's files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.local import model_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a model that comes with the project."""
    source = builtin_folder("shapes-sd-light")
    assert source is not None
    return Path(shutil.copytree(source, tmp_path / "model"))


def test_a_copy_is_the_same_model(folder: Path) -> None:
    source = builtin_folder("shapes-sd-light")
    assert source is not None
    assert model_digest(folder) == model_digest(source)
    assert len(model_digest(folder)) == 64


def test_one_bit_of_any_weight_or_number_makes_another_model(folder: Path) -> None:
    before = model_digest(folder)
    for name in ("unet/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json"):
        path = folder / name
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert model_digest(folder) != before
        path.write_bytes(data)
    assert model_digest(folder) == before


def test_where_a_file_stands_counts_and_what_is_no_part_of_the_model_does_not(
    folder: Path,
) -> None:
    before = model_digest(folder)
    (folder / "README.md").write_text("another card")
    (folder / "evaluation.json").write_text("{}")
    (folder / "vae" / "notes.md").write_text("no weights")
    assert model_digest(folder) == before
    (folder / "vae" / "config.json").rename(folder / "vae" / "config2.json")
    assert model_digest(folder) != before
