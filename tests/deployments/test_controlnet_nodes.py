"""A model on one node and its ControlNet on another: the images are diffusers'."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from ray import serve
from ray.cluster_utils import Cluster

from ray_cluster.config.loading import load_config
from ray_cluster.config.slices import front_arguments
from ray_cluster.deployments.service import deploy
from tests.deployments.conftest import NODE
from tests.e2e.controlled import base64_of, hinted, sections, truth
from tests.e2e.edit_templates import pixels_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

PATIENCE_S = 200.0
# more than half of a node's: no two of the workers fit on one
NUM_CPUS = 0.6


def test_a_controlnet_on_another_node_steers_the_same_images(
    cluster: Cluster, free_port: int, tmp_path: Path
) -> None:
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    given = sections(num_bases=1)
    given["controlnets"] = given["controlnets"][:1]
    for one in (*given["pools"], *given["controlnets"]):
        one["num_cpus"] = NUM_CPUS
    storage = {
        "jobs": f"sqlite:///{tmp_path}/jobs.db",
        "is_shared": True,
        **{name: str(tmp_path / name) for name in ("results", "states", "inputs")},
    }
    config = load_config(
        given
        | {"storage": storage, "http": {"port": free_port}, "loras": {"folder": str(tmp_path)}}
    )
    deploy(config, front_arguments(config))
    url, end_s = f"http://127.0.0.1:{free_port}", time.monotonic() + PATIENCE_S
    while not _is_ready(url):
        assert time.monotonic() < end_s, str(serve.status())
        time.sleep(1)
    texts, maps = hinted(8)
    for number in range(3):
        uses = [{"name": "edges", "image": base64_of(maps["edges"][number])}]
        body = {"prompt": texts[number], "seed": number, "controlnets": uses, "slo_s": 120}
        reply = httpx.post(f"{url}/v1/images/generations", json=body, timeout=180)
        assert reply.status_code == 200, reply.text
        image = base64.b64decode(reply.json()["data"][0]["b64_json"])
        expected = truth(texts[number], number, {"edges": maps["edges"][number]})
        assert np.abs(pixels_of(image) - expected).max() <= 1


def _is_ready(url: str) -> bool:
    try:
        reply = httpx.get(f"{url}/readyz", timeout=10)
    except httpx.HTTPError:
        return False
    return reply.status_code == httpx.codes.OK and "ControlNet" not in reply.text
