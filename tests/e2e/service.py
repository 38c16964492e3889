"""The service as a user starts it: a process of its own, reached over HTTP, stopped by SIGTERM."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import yaml
from safetensors.torch import load_file, save_file

from ray_cluster.config.sections.keys import ROLES
from ray_cluster.models.builtin import builtin_folder
from tests.keys import entry

API_KEY = "key-of-the-tests"
REPLICA_PROCESS = "ray::ServeReplica:shapes-sd:BaseModel"
# a word that the reference model does not know
POISONED_WORD = "zebra"
# at which Ray's processes hand on their metrics; ten seconds unless told otherwise
RAY_METRICS_S = 2.0

# they ship with the package
STYLE_LORAS = ("pastel", "outline", "texture")
LIGHT_POOL = {
    "name": "shapes-sd-light",
    "model": "shapes-sd-light",
    "num_cpus": 0.25,
    "min_px": 32,
    "max_px": 128,
    "defaults": {"size": "64x64", "num_inference_steps": 2, "guidance_scale": 1.0},
}
CASCADE = {
    "discriminators": [{"name": "shapes-judge", "model": "shapes-discriminator", "num_cpus": 0.25}],
    "cascades": [
        {
            "name": "shapes-auto",
            "light": "shapes-sd-light",
            "heavy": "shapes-sd",
            "discriminator": "shapes-judge",
            "threshold": 0.5,
        }
    ],
}


CONTROLNETS = {
    "controlnets": [
        {
            "name": "edges",
            "model": "shapes-sd-edges",
            "bases": ["shapes-sd"],
            "num_cpus": 0.2,
            "replicas": 2,
        }
    ]
}


UPSCALERS = {"upscalers": [{"name": "big", "replicas": 2, "num_cpus": 0.2}]}


def free_ports(count: int) -> list[int]:
    """Return TCP ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def poisoned_model(folder: Path) -> Path:
    """Copy the bundled model, with NaN as the embedding of unknown words: a real model error."""
    source = builtin_folder("shapes-sd")
    assert source is not None
    shutil.copytree(source, folder)
    [weights] = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(weights)
    [name] = [name for name in tensors if name.endswith("token_embedding.weight")]
    unknown = 3  # <pad>, <start>, <end>, <unknown>, then the words
    tensors[name][unknown] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def storage_in(folder: Path) -> dict[str, Any]:
    """Return the configuration of stores in a folder."""
    return {
        "jobs": f"sqlite:///{folder}/store/jobs.db",
        "results": str(folder / "store" / "results"),
        "states": str(folder / "store" / "states"),
        "inputs": str(folder / "store" / "inputs"),
    }


def document(folder: Path, http_port: int, lora_port: int) -> dict[str, Any]:
    """Return a configuration of two models, a cascade of them, and LoRAs.

    Args:
        lora_port: of this machine, where LoRAs may be fetched from.
    """
    return {
        "http": {
            "port": http_port,
            "num_gateways": 2,
            "api_keys": [entry("tests", API_KEY, *ROLES)],
            "keep_alive_s": 3,
            "trusted_proxies": ["127.0.0.1"],
            "cors_origins": ["http://localhost:3000"],
        },
        "limits": {"max_queued_images": 16, "max_body_s": 5.0},
        "logs": {"format": "json"},
        "storage": storage_in(folder),
        "loras": {
            "folder": str(folder / "loras"),
            "sources": ["builtin:", str(folder), f"http://127.0.0.1:{lora_port}"],
            "fetch_timeout_s": 10.0,
            "max_file_bytes": 10_000_000,
            "registered": [
                {"name": name, "base": "shapes-sd", "source": f"builtin:{name}"}
                for name in STYLE_LORAS
            ],
        },
        "pools": [
            {
                "name": "shapes-sd",
                "model": str(poisoned_model(folder / "model")),
                "replicas": 2,
                "num_cpus": 0.5,
                "max_batch": 8,
                "max_in_flight": 8,
                "min_px": 32,
                "max_px": 128,
                "max_num_inference_steps": 400,
                "defaults": {
                    "size": "64x64",
                    "num_inference_steps": 20,
                    "guidance_scale": 2.0,
                    "sampler": "ddim",
                },
                "fidelity": {
                    "sampler": "ddim",
                    "max_guidance_scale": 2.0,
                    "steps": [{"asked": 20, "balanced": 8, "fast": 5}],
                },
            },
            LIGHT_POOL,
        ],
        **CASCADE,
    }


class Reached(Protocol):
    """A service at a URL, whatever it runs in."""

    folder: Path
    lora_port: int

    @property
    def url(self) -> str: ...


class Service:
    """One running service.

    Args:
        folder: where its configuration and log go.
        overrides: sections of the configuration that replace the test's own.
    """

    def __init__(self, folder: Path, **overrides: Any) -> None:
        http_port, dashboard_port, metrics_port, self.lora_port = free_ports(4)
        self.ray_metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.url = f"http://127.0.0.1:{http_port}"
        self.dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        # the path of Ray's sockets must stay short
        self._ray_folder = tempfile.mkdtemp(prefix="rc-", dir="/tmp")
        self.folder = folder
        self._config = folder / "service.yaml"
        self.log = folder / "service.log"
        ray = {
            "dashboard_port": dashboard_port,
            "metrics_port": metrics_port,
            "num_cpus": 2,
            "temp_dir": self._ray_folder,
            "object_store_mib": 100,
        }
        self._config.write_text(
            yaml.safe_dump(document(folder, http_port, self.lora_port) | {"ray": ray} | overrides)
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 300.0) -> None:
        """Start it and wait until each of its workers is there, not only that it can serve."""
        Path(self._ray_folder).mkdir(exist_ok=True)
        command = [str(Path(sys.executable).with_name("ray-cluster")), "serve", str(self._config)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {"RAY_metrics_report_interval_ms": str(round(1000 * RAY_METRICS_S))},
            )
        deadline_s = time.monotonic() + timeout_s
        while not (self.is_ready() and "Ctrl-C stops the service" in self.log.read_text()):
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.5)

    def serve_logs(self) -> dict[str, list[str]]:
        """Return the lines of every log file that Ray Serve keeps, by file name."""
        folder = Path(self._ray_folder) / "session_latest" / "logs" / "serve"
        return {path.name: path.read_text().splitlines() for path in folder.glob("*.log")}

    def is_ready(self) -> bool:
        """Whether it says that it can serve."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def family(self) -> list[psutil.Process]:
        """Return every process of the service."""
        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of the model's replicas."""
        return self.processes(REPLICA_PROCESS)

    def processes(self, name: str, *, may_be_busy: bool = False) -> list[psutil.Process]:
        """Return the processes that Ray has given this name.

        Args:
            may_be_busy: whether those count that have the name of a call behind it, which they have
                while they load a model.
        """
        found = []
        for process in self.family():
            try:
                title = process.cmdline()[:1]
                is_busy = bool(title) and title[0].startswith(f"{name}.")
                if title == [name] or (may_be_busy and is_busy):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def stop(self) -> int:
        """Stop it as an operator would; returns its exit code. Nothing may be left running."""
        assert self._process is not None
        family = self.family() if self._process.poll() is None else []
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()
        shutil.rmtree(self._ray_folder, ignore_errors=True)
        assert not alive, f"left running: {[process.cmdline() for process in alive if process]}"
        return code

    def kill_all(self) -> None:
        """Kill every process at once, as when a machine goes down; it can be started again."""
        assert self._process is not None
        family = self.family()
        for process in [*family, *self._strays()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)
        psutil.wait_procs(family, timeout=15)

    def _strays(self) -> list[psutil.Process]:
        """Return processes of its Ray that were started while it was looked at."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(self._ray_folder in part for part in process.info["cmdline"] or ())
        ]

    def kill(self) -> None:
        """Make sure that nothing is left, whatever happened; for the end of a failed test."""
        if self._process is not None and self._process.poll() is None:
            self.kill_all()
        shutil.rmtree(self._ray_folder, ignore_errors=True)


def image_request(**fields: Any) -> dict[str, Any]:
    """Return the body of a request with a prompt that the model knows."""
    return {"prompt": "a large red circle in the center on a black background"} | fields


HEADERS = {"Authorization": f"Bearer {API_KEY}"}


def post(service: Reached, **fields: Any) -> httpx.Response:
    """Call for images with a prompt that the model knows."""
    url = f"{service.url}/v1/images/generations"
    return httpx.post(url, json=image_request(**fields), headers=HEADERS, timeout=120)


def images(reply: httpx.Response) -> list[bytes]:
    """Return the images of a reply, which has to be one."""
    assert reply.status_code == 200, reply.text
    return [base64.b64decode(item["b64_json"]) for item in reply.json()["data"]]


# holds the service of all tests that need none of their own, while it runs
shared = ExitStack()


@contextmanager
def running(folder: Path, **overrides: Any) -> Iterator[Service]:
    """A service that runs within the block, and of which nothing runs after it.

    The shared one is stopped: two would slow each other down.
    """
    shared.close()
    service = Service(folder, **overrides)
    try:
        service.start()
        yield service
        assert service.stop() == 0
    finally:
        service.kill()
