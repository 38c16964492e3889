"""A rendered RayService on pods of this machine: changes under load fail no call.

Pods are network namespaces, so that this needs root; it is skipped, loudly, without.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.service import free_ports
from tests.helm.chart import render, settings_of, values
from tests.helm.pods import (
    ROOT_ADDRESS,
    Network,
    RayService,
    can_be_made,
    scaled_down,
    wait_for,
)
from tests.keys import entry

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not can_be_made(), reason="network namespaces need root and iproute2"),
]
logger = logging.getLogger(__name__)

KEY, NEXT_KEY = "key-of-the-tests", "the-next-key"
NUM_CLIENTS = 16
# KubeRay deletes the earlier cluster a minute after it has switched
HOLD_S = 60.0
DRAFT = {
    "name": "draft",
    "model": "shapes-sd-light",
    "num_cpus": 0.5,
    "defaults": {"size": "64x64", "num_inference_steps": 2, "guidance_scale": 1.0},
}


def keys_file(*keys: str) -> dict[str, str]:
    entries = [entry(f"client-{number}", key, "use") for number, key in enumerate(keys)]
    return {"api-keys.yaml": yaml.safe_dump({"api_keys": entries})}


def call(url: str, key: str = KEY, **changes: Any) -> httpx.Response:
    body = {"prompt": "a red circle", "num_inference_steps": 2, **changes}
    return httpx.post(
        f"{url}/v1/images/generations",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=180,
        trust_env=False,
    )


class Clients:
    """Call without a pause, each with a connection of its own for every call.

    Args:
        num_retries: of a call that is refused for now, as the official client has two.
    """

    def __init__(self, url: str, model: str, num_retries: int = 0) -> None:
        self.url, self.model, self._num_retries = url, model, num_retries
        self.num_retried = 0
        self.failed: list[str] = []
        self.took_s: list[float] = []
        self._ends = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._call_on) for _ in range(NUM_CLIENTS)]
        for one in threads:
            one.start()
        try:
            yield
        finally:
            self._ends.set()
            for one in threads:
                one.join()

    def _call_on(self) -> None:
        while not self._ends.is_set():
            started_s = time.monotonic()
            said = self._call()
            for _ in range(self._num_retries):
                if not said:
                    break
                self.num_retried += 1
                time.sleep(1.0)
                said = self._call()
            self.failed += [said] if said else []
            self.took_s.append(time.monotonic() - started_s)

    def _call(self) -> str:
        """Call once; return what went wrong."""
        try:
            reply = call(self.url, model=self.model)
        except httpx.HTTPError as error:
            return repr(error)
        return "" if reply.status_code == 200 else f"{reply.status_code} {reply.text[:300]}"


def given(example: str, **config: Any) -> dict[str, Any]:
    found = scaled_down(values(example))
    found["apiKeys"] = {"secret": "keys"}
    found["config"] = {**found.get("config", {}), **config}
    return found


@contextmanager
def redis_at(folder: Path) -> Iterator[str]:
    """Run a Redis that pods can reach; give its address."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian's package of that name)")
    [port] = free_ports(1)
    options = ["--port", str(port), "--bind", ROOT_ADDRESS, "--protected-mode", "no", "--save", ""]
    server = subprocess.Popen([program, *options], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        yield f"{ROOT_ADDRESS}:{port}"
    finally:
        server.terminate()
        server.wait(20)


def test_serving_outlives_the_head_where_redis_keeps_rays_state(tmp_path: Path) -> None:
    content = given("minimal")
    with Network() as network, redis_at(tmp_path) as address:
        content["gcsFaultTolerance"] = {"redis": {"address": address}}
        with served(tmp_path / "pods", content, network) as service:
            before = service.replicas()
            key = {"Authorization": f"Bearer {KEY}"}
            job = {"prompt": "a red circle", "n": 4}
            first = httpx.post(f"{service.url}/v1/jobs", json=job, headers=key, trust_env=False)
            clients = Clients(service.url, "shapes-sd")
            with clients.running():
                service.head.stop(signal.SIGKILL, grace_s=1.0)
                time.sleep(30)
                without_head = len(clients.took_s)
                service.head.start()
                wait_for(service.all_run, "the applications, with another head")
            assert without_head > 0
            assert clients.failed == []
            logger.warning("%d calls without a head", without_head)
            assert service.replicas() == before
            path = f"{service.url}/v1/jobs/{first.json()['id']}"
            wait_for(partial(has_completed, path, key), "the job")


@contextmanager
def served(
    folder: Path, content: dict[str, Any], network: Network, data: Path | None = None
) -> Iterator[RayService]:
    volume = data or folder / "data"
    service = RayService(network, folder, render(content), data=volume, keys=keys_file(KEY))
    try:
        service.deploy()
        wait_for(service.all_run, "the applications")
        wait_for(service.is_ready, "readiness")
        yield service
    finally:
        service.stop()


def test_another_ray_cluster_takes_over_under_load(tmp_path: Path) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "a red circle", "n": 8, "num_inference_steps": 50}
    with Network() as network, ExitStack() as ends:

        def start(name: str) -> RayService:
            pods = served(tmp_path / name, given("minimal"), network, tmp_path / "data")
            return ends.enter_context(pods)

        earlier = start("earlier")
        clients = Clients(earlier.url, "shapes-sd", num_retries=2)
        with clients.running():
            time.sleep(3)
            created = [
                httpx.post(f"{earlier.url}/v1/jobs", json=body, headers=key, trust_env=False)
                for _ in range(4)
            ]
            later = start("later")
            # as the Service does, which looks every two seconds for pods that are ready
            clients.url = later.url
            before = len(clients.took_s)
            wait_for(lambda: not earlier.is_ready(), "the end of the earlier one's readiness")
            time.sleep(HOLD_S)
            earlier.stop()
            time.sleep(5)
            for one in created:
                path = f"{later.url}/v1/jobs/{one.json()['id']}"
                wait_for(partial(has_completed, path, key), "a job")
        assert clients.failed == []
        assert len(clients.took_s) > before
        longest_of(clients, f"a hand-over, {clients.num_retried} retries")


def has_completed(path: str, key: dict[str, str]) -> bool:
    job = httpx.get(path, headers=key, timeout=30, trust_env=False).json()
    return bool(job["state"] == "completed")


def apply(service: RayService, content: dict[str, Any]) -> None:
    """Do what ``helm upgrade`` does with these values: settings, then applications."""
    objects = render(content)
    service.settings.put({"config.yaml": settings_of(objects)})
    [spec] = [one["spec"] for (kind, _), one in objects.items() if kind == "RayService"]
    service.deploy(spec["serveConfigV2"])


def ids_of(service: RayService, deployment: str) -> set[str]:
    """Return the ids of a deployment's running replicas."""
    return service.replicas().get(deployment, set())


def test_changes_under_load_fail_no_call_and_replace_what_they_name(tmp_path: Path) -> None:
    with Network() as network, served(tmp_path, given("minimal"), network) as service:
        assert call(service.url).status_code == 200
        assert call(service.url, "another").status_code == 401
        service.scale("shapes-sd", "BaseModel", 2)
        wait_for(
            lambda: len(ids_of(service, "shapes-sd/BaseModel")) == 2,
            "a second replica",
        )
        before = service.replicas()
        clients = Clients(service.url, "shapes-sd")
        with clients.running():
            service.keys.put(keys_file(KEY, NEXT_KEY))
            wait_for(lambda: call(service.url, NEXT_KEY).status_code == 200, "the next key")
            service.keys.put(keys_file(KEY))
            wait_for(lambda: call(service.url, NEXT_KEY).status_code == 401, "its end")

            apply(service, given("minimal", limits={"max_images_per_request": 1}))
            wait_for(lambda: call(service.url, n=2).status_code == 400, "the limit")
            # nothing but settings: the operator sends nothing new, and sending it changes nothing
            time.sleep(5)
            assert service.replicas() == before

            pools = render(given("minimal"))
            own = yaml.safe_load(settings_of(pools))["pools"]
            added = given(
                "minimal", pools=[*own, DRAFT | {"node_resource": "cpu"}], http={"num_gateways": 2}
            )
            apply(service, added)
            wait_for(lambda: call(service.url, model="draft").status_code == 200, "a pool")
            wait_for(lambda: len(ids_of(service, "front/Gateway")) == 2, "a gateway")
            kept = service.replicas()
            assert all(kept[name] >= ids for name, ids in before.items()), (before, kept)
            assert kept["shapes-sd/BaseModel"] == before["shapes-sd/BaseModel"]

            # a model's key that needs other processes: as many as the values say
            changed = [{**own[0], "max_num_inference_steps": 60}]
            apply(service, given("minimal", pools=changed, http={"num_gateways": 2}))
            earlier = before["shapes-sd/BaseModel"]
            wait_for(
                lambda: (now := ids_of(service, "shapes-sd/BaseModel")) and not now & earlier,
                "other replicas",
            )
            wait_for(lambda: "draft/BaseModel" not in service.replicas(), "the pool's end")
            after = service.replicas()
            for name in ("front/Dispatcher", "front/Gateway", "loras/LoraStore"):
                assert after[name] == kept[name]
            wait_for(service.all_run, "the applications")
        assert clients.failed == []
        longest_of(clients, "with one replica, replaced")


def test_with_surge_a_replica_serves_until_its_successor_has_loaded(tmp_path: Path) -> None:
    with Network() as network, served(tmp_path, given("minimal"), network) as service:
        [pool] = yaml.safe_load(settings_of(render(given("minimal"))))["pools"]
        pool |= {"surge": True, "max_num_inference_steps": 60}
        name = "shapes-sd/BaseModel"
        now = before = service.replicas()[name]
        clients = Clients(service.url, "shapes-sd")
        with clients.running():
            apply(service, given("minimal", pools=[pool]))
            while not now - before:
                time.sleep(0.2)
                # Serve lists none of an application's deployments while it builds it
                now = service.replicas().get(name, before)
                assert now
            wait_for(lambda: not ids_of(service, name) & before, "the end of the earlier one")
            wait_for(service.all_run, "the applications")
        assert clients.failed == []
        longest_of(clients, "with surge, replaced")


def test_the_end_of_a_pod_with_a_model_fails_no_call(tmp_path: Path) -> None:
    content = given("minimal")
    content["groups"]["cpu"] = {"replicas": 2, "resources": {"limits": {"cpu": "1"}}}
    with Network() as network, served(tmp_path, content, network) as service:
        service.scale("shapes-sd", "BaseModel", 2)
        wait_for(lambda: len(ids_of(service, "shapes-sd/BaseModel")) == 2, "a second replica")
        for number in (signal.SIGTERM, signal.SIGKILL):
            pod = service.pods["cpu-1"]
            clients = Clients(service.url, "shapes-sd")
            with clients.running():
                time.sleep(3)
                pod.stop(number)
                wait_for(lambda: len(ids_of(service, "shapes-sd/BaseModel")) == 1, "its end")
                pod.start()
                wait_for(lambda: len(ids_of(service, "shapes-sd/BaseModel")) == 2, "another")
            assert clients.failed == []
            longest_of(clients, f"{number.name} to a pod with a model")


def longest_of(clients: Clients, what: str) -> None:
    """Tell how long the longest call took."""
    longest_s = max(clients.took_s)
    logger.warning("%s: %d calls, the longest took %.1f s", what, len(clients.took_s), longest_s)


def test_a_cascade_under_a_controller(tmp_path: Path) -> None:
    with Network() as network, served(tmp_path, given("cascade"), network) as service:
        replies = [call(service.url, model="shapes-auto") for _ in range(4)]
        assert [one.status_code for one in replies] == [200] * 4
        before = service.replicas()
        assert before["controller/Controller"]
        clients = Clients(service.url, "shapes-auto")
        with clients.running():
            content = given("cascade")
            content["config"]["cascades"][0]["threshold"] = 0.2
            content["config"]["pools"][0]["max_replicas"] = 1
            apply(service, content)
            time.sleep(20)
            after = service.replicas()
        for name in ("front/Dispatcher", "front/Gateway", "controller/Controller"):
            assert after[name] == before[name]
        assert clients.failed == []
        longest_of(clients, "plans")
