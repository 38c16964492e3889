"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

# of each node
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head node of one CPU, to which tests add others."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
