"""Files as storage in a cluster of several nodes: refused at the start, told of when one joins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions

from ray_cluster.config.loading import load_config
from ray_cluster.deployments.app import build_app
from ray_cluster.deployments.dispatcher_handle import FRONT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

PATIENCE_S = 120.0


@pytest.fixture
def cluster(free_port: int) -> Iterator[tuple[Cluster, int]]:
    """A cluster of one node, with Serve; and the port of Serve's proxy."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=free_port))
    try:
        yield cluster, free_port
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def config_of(folder: Path, **storage: Any) -> Any:
    return load_config(
        {
            "storage": {"jobs": f"sqlite:///{folder}/jobs.db", "results": str(folder), **storage},
            "pools": [{"name": "shapes-sd", "model": "shapes-sd"}],
        }
    )


def start(config: Any) -> None:
    serve.run(build_app(config), name=FRONT, route_prefix="/", blocking=False)


def wait_until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.5)


def test_files_are_refused_on_two_nodes_unless_they_are_shared(
    cluster: tuple[Cluster, int], tmp_path: Path
) -> None:
    nodes, port = cluster
    # one node: taken
    start(config_of(tmp_path))
    ready = f"http://127.0.0.1:{port}/readyz"
    assert "warnings" not in httpx.get(ready, timeout=30).text
    # a second one joins: whoever looks is told
    nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    nodes.wait_for_nodes()
    wait_until(
        lambda: "storage.is_shared" in httpx.get(ready, timeout=30).text, "readyz to tell of it"
    )
    serve.delete(FRONT)
    # two nodes: refused, with what to change
    with pytest.raises(RuntimeError):
        start(config_of(tmp_path))
    message = str(serve.status().applications[FRONT])
    assert "2 nodes" in message
    assert "storage.is_shared" in message
    serve.delete(FRONT)
    start(config_of(tmp_path, is_shared=True))
    assert "storage.is_shared" not in httpx.get(ready, timeout=30).text
