"""Pods of a rendered RayService on this machine, as KubeRay would start them.

Each is a network namespace with an address of its own, and has its own mounts: a ConfigMap and
Secrets as Kubernetes mounts them, by links that are swapped. Their command is KubeRay's, from the
chart's start parameters; their environment is the chart's.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.helm.chart import pod_templates, service_of, settings_of

# of this process alone: two runs on one machine would reach each other's pods
_NETWORK = f"10.213.{os.getpid() % 256}"
ROOT_ADDRESS = f"{_NETWORK}.1"
_MOUNTED = ("/scratch", "/etc/ray-cluster", "/var/lib/ray-cluster")
# what pods run; it stays where it is, though each has a /tmp of its own (`.ci/run` clones there)
_PROGRAM = {Path(sys.prefix).resolve(), Path(__file__).resolve().parents[2]}
_PROGRAM_IN_TMP = sorted(one for one in _PROGRAM if one.is_relative_to("/tmp"))
_PATIENCE_S = 240.0
# of workers, where Ray's state outlives the head
_RECONNECTING = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


def can_be_made() -> bool:
    """Whether this user may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def ip(*words: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = _PATIENCE_S) -> Any:
    """Return what the condition returns once that is true."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            if found := condition():
                return found
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.5)


class MountedFiles:
    """A folder as Kubernetes mounts a ConfigMap or Secret: all files change at once."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self._folder = folder
        self._versions = itertools.count()
        folder.mkdir(parents=True)
        self.put(files)

    def put(self, files: Mapping[str, str]) -> None:
        """Replace all files."""
        version = f"..{next(self._versions)}"
        (self._folder / version).mkdir()
        for name, text in files.items():
            (self._folder / version / name).write_text(text)
            link = self._folder / name
            if not link.is_symlink():
                link.symlink_to(Path("..data") / name)
        fresh = self._folder / "..data_tmp"
        fresh.symlink_to(version)
        fresh.rename(self._folder / "..data")


class Network:
    """A bridge in a namespace of its own, which this process reaches, too."""

    def __init__(self) -> None:
        self.hub = f"rc{os.getpid() % 100000}"
        self._hosts = itertools.count(2)
        self._names = [self.hub]
        self._made = [path for path in _MOUNTED if not Path(path).exists()]

    def __enter__(self) -> Network:
        for path in self._made:
            Path(path).mkdir(parents=True)
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        ip("-n", self.hub, "link", "set", "br0", "up")
        ip("link", "add", self.hub, "type", "veth", "peer", "name", "root", "netns", self.hub)
        ip("addr", "add", f"{ROOT_ADDRESS}/24", "dev", self.hub)
        ip("link", "set", self.hub, "up")
        ip("-n", self.hub, "link", "set", "root", "master", "br0", "up")
        return self

    def add(self) -> tuple[str, str]:
        """Return the name and the address of another namespace."""
        number = next(self._hosts)
        name, address = f"{self.hub}-{number}", f"{_NETWORK}.{number}"
        ip("netns", "add", name)
        self._names.append(name)
        port = f"v{number}"
        ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", port, "netns", self.hub)
        ip("-n", self.hub, "link", "set", port, "master", "br0", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")
        return name, address

    def __exit__(self, *_: object) -> None:
        # a namespace's own links go some time after it, and the next network has the same name
        subprocess.run(["ip", "link", "del", self.hub], check=False, capture_output=True)
        for name in reversed(self._names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for path in reversed(self._made):
            Path(path).rmdir()


class Pod:
    """One Ray node."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        template: Mapping[str, Any],
        command: str,
        mounts: Mapping[str, Path],
        environment: Mapping[str, str],
    ) -> None:
        self.namespace, self.address = network.add()
        self.folder = folder
        self.log = folder / "pod.log"
        [container] = template["spec"]["containers"]
        given = {one["name"]: one["value"] for one in container["env"]}
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
        base = {"PATH": path, "LANG": "C.UTF-8", "KUBERAY": "1"}
        base |= {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}
        binds = {"/scratch": folder / "scratch", "/tmp": folder / "tmp", **mounts}
        for program in _PROGRAM_IN_TMP:
            binds[f"{folder}{program}"] = program
        mounting = [
            f"mkdir -p '{target}' && mount --rbind '{source}' '{target}'"
            for target, source in binds.items()
        ]
        # /tmp last: what is mounted may be below it
        mounting.sort(key=lambda line: line.endswith("'/tmp'"))
        script = " && ".join(
            [
                "mount --make-rprivate /",
                *mounting,
                "mount -t tmpfs tmpfs /dev/shm",
                "{ ulimit -n 65536 2>/dev/null || true; }",
                f"exec {command.replace('ADDRESS', self.address)}",
            ]
        )
        # it ends with these tests, also when something kills them
        self._command = [
            *("setpriv", "--pdeathsig", "TERM", "ip", "netns", "exec", self.namespace),
            *("unshare", "--mount", "bash", "-c", script),
        ]
        self._environment = {**base, **given, **environment}
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it with an empty disk of its own, as another pod in its place has."""
        for name in ("scratch", "tmp"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(parents=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_up(self) -> bool:
        """Whether its command runs."""
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """Return the processes in its namespace."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], check=False, capture_output=True, text=True
        )
        return [int(one) for one in found.stdout.split()]

    def stop(self, number: int = signal.SIGTERM, grace_s: float = 20.0) -> None:
        """End it as a kubelet does."""
        if self.is_up():
            self._process.send_signal(number)
        end_s = time.monotonic() + grace_s
        while self.is_up() and time.monotonic() < end_s:
            time.sleep(0.1)
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        self._process.wait()


class RayService:
    """The pods of a rendered RayService, and its applications once they are deployed."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        objects: dict[tuple[str, str], dict[str, Any]],
        *,
        data: Path,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._spec = service_of(objects)
        self._token = secrets.token_hex(32)
        self.settings = MountedFiles(
            folder / "etc" / "settings", {"config.yaml": settings_of(objects)}
        )
        self.keys = MountedFiles(folder / "etc" / "keys", keys or {})
        data.mkdir(parents=True, exist_ok=True)
        cluster, templates = self._spec["rayClusterConfig"], pod_templates(self._spec)
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        if redis := cluster.get("gcsFaultToleranceOptions", {}).get("redisAddress"):
            environment |= {"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": "uid"}
        mounts = {"/etc/ray-cluster": folder / "etc", "/var/lib/ray-cluster": data}
        params = cluster["headGroupSpec"]["rayStartParams"]
        self.head = Pod(
            network,
            folder / "head",
            templates["head"],
            f"ray start --head --block --node-ip-address=ADDRESS {_options(params)}",
            mounts,
            environment,
        )
        self.pods = {"head": self.head}
        time.sleep(3)
        if "RAY_REDIS_ADDRESS" in environment:
            environment = {**environment, **_RECONNECTING}
        for group in cluster["workerGroupSpecs"]:
            name, given = group["groupName"], group["rayStartParams"]
            [container] = group["template"]["spec"]["containers"]
            limits = container["resources"].get("limits", {})
            if "num-cpus" not in given and "cpu" in limits:
                given = {**given, "num-cpus": str(limits["cpu"])}
            for number in range(group["replicas"]):
                pod = f"{name}-{number}"
                self.pods[pod] = Pod(
                    network,
                    folder / pod,
                    templates[name],
                    f"ray start --address={self.head.address}:6379 --block "
                    f"--node-ip-address=ADDRESS {_options(given)}",
                    mounts,
                    environment,
                )
        self.url = f"http://{self.pods['front-0'].address}:{port_of(objects)}"
        self._dashboard = httpx.Client(
            base_url=f"http://{self.head.address}:8265",
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=60,
            trust_env=False,
        )

    def deploy(self, content: str | None = None) -> None:
        """Send the applications as the operator does."""
        body = yaml.safe_load(content or self._spec["serveConfigV2"])
        wait_for(self._all_joined, "the nodes")
        reply = self._dashboard.put("/api/serve/applications/", json=body)
        assert reply.status_code == 200, reply.text

    def _all_joined(self) -> bool:
        for name, pod in self.pods.items():
            assert pod.is_up(), f"pod {name} has ended: {pod.log.read_text()[-2000:]}"
        return len(self.nodes()) == len(self.pods)

    def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's nodes that live."""
        reply = self._dashboard.get("/nodes?view=summary").json()
        return [one for one in reply["data"]["summary"] if one["raylet"].get("state") == "ALIVE"]

    def applications(self) -> dict[str, Any]:
        """Return the applications as Serve tells of them."""
        found: dict[str, Any] = self._dashboard.get("/api/serve/applications/").json()[
            "applications"
        ]
        return found

    def all_run(self) -> bool:
        """Whether the operator would take it for healthy."""
        found = self.applications()
        return bool(found) and all(one["status"] == "RUNNING" for one in found.values())

    def replicas(self) -> dict[str, set[str]]:
        """Return the ids of running replicas by application and deployment."""
        return {
            f"{name}/{deployment}": {
                replica["actor_id"] for replica in one["replicas"] if replica["state"] == "RUNNING"
            }
            for name, application in self.applications().items()
            for deployment, one in application["deployments"].items()
        }

    def scale(self, application: str, deployment: str, count: int) -> None:
        """Set a count as an operator may."""
        path = f"/api/v1/applications/{application}/deployments/{deployment}/scale"
        reply = self._dashboard.post(path, json={"target_num_replicas": count})
        assert reply.status_code == 200, reply.text

    def is_ready(self) -> bool:
        """Whether its front's pod passes its readiness probe."""
        return httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False).status_code == 200

    def stop(self) -> None:
        """End all pods, the head last."""
        self._dashboard.close()
        for name, pod in reversed(self.pods.items()):
            pod.stop(grace_s=20.0 if name != "head" else 5.0)


def port_of(objects: dict[tuple[str, str], dict[str, Any]]) -> int:
    """Return the API's port in the pods."""
    port: int = yaml.safe_load(settings_of(objects))["http"]["port"]
    return port


def _options(params: Mapping[str, str]) -> str:
    """Return start parameters as KubeRay writes them into a shell command."""
    return " ".join(f"--{name}={value}" for name, value in params.items())


def scaled_down(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with which an example's pods fit a machine of two cores."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    found.setdefault("groups", {})["cpu"] = {
        "replicas": 1,
        "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4"}},
    }
    return found
