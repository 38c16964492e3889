"""Starts the whole service on ports of its own and stops it again."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import ROOT
from benchmarks.settings import GUIDANCE, MODEL
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.deployments.ray_environment import apply_ray_environment

_FIRST_PORT = 18700
_START_TIMEOUT_S = 600.0


@contextmanager
def running_service(
    replicas: int, *, storage: Path | None = None
) -> Iterator[tuple[ClusterConfig, float]]:
    """Run the service with the default pool; yields its configuration and the start-up seconds.

    Imported late and run once per process at a time: Ray is started here and stopped at the end.

    Args:
        storage: where jobs and results go; None for where ``serve`` would put them.
    """
    config = _config(replicas, storage)
    apply_ray_environment(config.ray)
    # Ray's workers import this package from the working tree
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    from ray_cluster.config.arguments import front_arguments
    from ray_cluster.deployments import service

    started_s = time.monotonic()
    owned: service.Owned = "ray" if service.start_ray(config.ray) else "serve"
    try:
        service.deploy(config, front_arguments(config))
        service.wait_running(config, timeout_s=_START_TIMEOUT_S)
        wait_for_replicas(replicas)
        yield config, time.monotonic() - started_s
    finally:
        service.stop(config, owned=owned)


def wait_for_replicas(replicas: int) -> None:
    """Wait until that many model replicas have registered with the dispatcher."""
    from ray import serve

    from ray_cluster.deployments.deploy_file import FRONT
    from ray_cluster.deployments.links import DISPATCHER

    handle: Any = serve.get_deployment_handle(DISPATCHER, FRONT)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while len(handle.snapshot.remote().result(timeout_s=60).replicas) < replicas:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{replicas} replicas did not register in {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def base_url(config: ClusterConfig) -> str:
    """Return where the service listens."""
    return f"http://{config.http.host}:{config.http.port}"


def image_body(seed: int, *, num_steps: int, guidance_scale: float = GUIDANCE) -> dict[str, Any]:
    """Return the body of a generation call of one 64 px image."""
    return {
        "prompt": "a large red circle in the center on a black background",
        "size": "64x64",
        "seed": seed,
        "num_inference_steps": num_steps,
        "guidance_scale": guidance_scale,
    }


def post_image(client: httpx.Client, body: dict[str, Any]) -> tuple[float, dict[str, float], bytes]:
    """Return the seconds a call took, the reply's ``timing`` and the reply.

    Raises:
        httpx.HTTPStatusError: the service refused or failed.
    """
    started_s = time.perf_counter()
    reply = client.post("/v1/images/generations", json=body)
    total_s = time.perf_counter() - started_s
    reply.raise_for_status()
    return total_s, reply.json()["data"][0]["timing"], reply.content


def _config(replicas: int, storage: Path | None) -> ClusterConfig:
    default = load_config().model_dump()
    pool = {**default["pools"][0], "model": MODEL, "replicas": replicas}
    port, dashboard_port = free_port(_FIRST_PORT), free_port(_FIRST_PORT + 50)
    return load_config(
        {
            "http": {"port": port},
            "ray": {
                "auth": "disabled",
                "dashboard_port": dashboard_port,
                "num_cpus": max(2, os.cpu_count() or 2),
            },
            "storage": {}
            if storage is None
            else {"jobs": f"sqlite:///{storage}/jobs.db", "results": str(storage / "results")},
            "pools": [pool],
        }
    )


def free_port(first: int) -> int:
    """Return the first port from there on that nothing listens on."""
    for port in range(first, first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    sys.exit(f"no free port from {first} on")
