"""New weights under a running job: its image is one of the new model, from its first step on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.jobs import (
    create,
    ends_of,
    images_in,
    images_of,
    scrape,
    states_of,
    steps_now,
    wait_for_replicas,
)
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service, running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 240
SEED = 5


def upgrade(service: Service) -> None:
    """Change a layer of the UNet a little, as a fine-tuned model's are."""
    [path] = (service.folder / "model" / "unet").glob("*.safetensors")
    tensors = load_file(path)
    name = "conv_out.weight"
    tensors[name] = 0.9 * tensors[name]
    # in place of the old file at once: a replica that starts reads the one or the other
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.rename(path)


def test_an_image_starts_over_on_other_weights_and_never_mixes_them(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        wait_for_replicas(service)
        [old] = images_of(service, [create(service, SEED, num_inference_steps=STEPS)]).values()
        job_id = create(service, SEED, num_inference_steps=STEPS)
        deadline_s = time.monotonic() + 120
        while not (states_of(service) and steps_now(service, [job_id])[job_id] > STEPS // 3):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        upgrade(service)
        for replica in service.replicas():
            replica.kill()
        [job] = ends_of(service, [job_id])
        assert job["attempts"] == 2
        [image] = images_in(service, [job]).values()
        assert scrape(service).total("resumed_images_total") == 0
        [new] = images_of(service, [create(service, SEED, num_inference_steps=STEPS)]).values()
        assert pixels_differ(image, new) <= 1
        assert pixels_differ(old, new) > 10
        logs = [line for lines in service.serve_logs().values() for line in lines]
        assert any("made with other files of the model" in line for line in logs)
