"""A store of LoRAs that dies: replicas fetch for themselves."""

from __future__ import annotations

import shutil

import pytest

from ray_cluster.models.builtin import weights_folder
from tests.cell.test_loras import are_equal, image_of, make, post_lora, until
from tests.e2e.service import Service

# what a dispatcher and a replica do without a store: tests/dispatch/test_loras.py and
# tests/replica/test_lora_replica.py
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

STORE_PROCESS = "ray::ServeReplica:loras:LoraStore"


def test_images_are_made_while_the_store_is_dead(service: Service) -> None:
    reference = image_of(make(service, seed=3, loras=[{"name": "pastel"}, {"name": "texture"}]))
    for process in service.processes(STORE_PROCESS, may_be_busy=True):
        process.kill()
    file = service.folder / "while-dead.safetensors"
    shutil.copy(weights_folder() / "pastel" / "pytorch_lora_weights.safetensors", file)
    assert post_lora(service, name="while-dead", source=str(file)).status_code == 201
    fields = {"loras": [{"name": "while-dead"}, {"name": "texture"}]}
    again = image_of(make(service, seed=3, **fields))
    assert are_equal(again, reference)
    until(lambda: service.processes(STORE_PROCESS), "the store to be started again")
