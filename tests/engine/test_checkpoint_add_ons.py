"""LoRAs and ControlNets of a checkpoint in one file: as of the folder that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_cluster.engine.controlnets.checks import check_base, controlnet_config
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.engine.files.folders import component_config, resolve_folder
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.models.local import vae_scale_factor
from tests.engine import controlled, test_lora_runs
from tests.engine.checkpoints import KINDS, save_kind
from tests.engine.conftest import Zoo
from tests.engine.harness import CONTROL_FACTOR, RUN_TOLERANCE, load, pool
from tests.engine.reference import Reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]
KIND_OF = {"sd15": "sd15", "sdxl": "sdxl-fp16"}


class OfFiles(Zoo):
    """Models from files, and diffusers' pipelines of the folders that they were made from."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._files: dict[str, Path] = {}

    def model(self, name: str) -> LoadedModel:
        self.reference(name)
        if name not in self._models:
            given = pool(self._files[name], defaults={"size": "64x64"})
            self._models[name] = load(given)
        return self._models[name]

    def reference(self, name: str) -> Reference:
        found = super().reference(name)
        # of a file it is the published one, which says more than the folder's
        made = resolve_folder(str(self._files[name]))
        config = json.loads((made / "scheduler" / "scheduler_config.json").read_text())
        assert config.items() >= {"beta_start": 0.00085, "beta_end": 0.012}.items()
        found.scheduler_config = config
        return found

    def folder(self, name: str) -> Path:
        """The folder that diffusers reads, and what stands for the file once that is loaded."""
        return (
            resolve_folder(str(self._files[name])) if name in self._models else super().folder(name)
        )

    def file(self, name: str) -> Path:
        """The checkpoint of a model."""
        return self._files[name]

    def _make(self, name: str) -> Path:
        (root := self._root / name).mkdir()
        folder, self._files[name] = save_kind(root, KINDS[KIND_OF[name]])
        return folder


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = str(tmp_path_factory.mktemp("home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", home)


@pytest.mark.parametrize("name", KIND_OF)
def test_loras(name: str, tmp_path: Path) -> None:
    zoo = OfFiles(tmp_path)
    subject = test_lora_runs.Subject(zoo, name, tmp_path)
    sets = [subject.adapters(case) for case in test_lora_runs.CASES]
    assert max(subject.errors(sets)) <= RUN_TOLERANCE
    bare = subject.errors([None] * len(sets))
    assert all(
        error >= CONTROL_FACTOR * RUN_TOLERANCE
        for error, one in zip(bare, sets, strict=True)
        if one is not None
    )


@pytest.mark.parametrize("name", KIND_OF)
def test_controlnets_and_a_lora(name: str, tmp_path: Path) -> None:
    zoo = OfFiles(tmp_path)
    subject = controlled.Subject(zoo, name, tmp_path)
    made = resolve_folder(str(zoo.file(name)))
    unet, factor = component_config(made, "unet"), vae_scale_factor(component_config(made, "vae"))
    for path in subject.paths:
        check_base("net", controlnet_config(path), name, unet, factor)
    errors = subject.errors(LocalControlNets(subject.banks()))
    assert max(errors) <= RUN_TOLERANCE, errors
