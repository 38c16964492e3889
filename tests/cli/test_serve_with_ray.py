"""``serve`` as a user runs it: a process that starts, serves, stops, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from PIL import Image

from ray_cluster.imaging.encoder import read_recipe
from tests.cli.conftest import Cli

ROOT = Path(__file__).parents[2]
START_S = 300.0
STOP_S = 120.0

pytestmark = [pytest.mark.ray, pytest.mark.timeout(START_S + STOP_S + 60)]


class Served:
    """A ``serve`` process with its output in files."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray_cluster.cli", "serve", str(config)],
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while "Ctrl-C stops the service" not in self.out:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline_s, self.err
            time.sleep(0.5)

    def stop(self, kind: signal.Signals) -> int:
        """Stop it as a terminal or `timeout` does: they signal the whole process group."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, kind)
        return self.process.wait(STOP_S)

    def end(self) -> None:
        """Take everything down, also after a failed test."""
        if self.process.poll() is None:
            self.family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
        for process in self.family:
            if process.is_running():
                process.kill()


def _call(url: str, *, num_steps: int) -> int:
    """Ask for an image; returns the status of the answer."""
    body = {"prompt": "x", "num_inference_steps": num_steps}
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=30).status_code


def _wait_until_leased(url: str, call: Future[int]) -> None:
    """Wait until a replica has the image of a call, or has made it already."""
    leased = re.compile(r"^ray_cluster_leased_images\{.*\} [1-9]", re.MULTILINE)
    while not (call.done() or leased.search(httpx.get(f"{url}/metrics", timeout=30).text)):
        time.sleep(0.05)


class CallsMeanwhile:
    """Asks for images again and again while the service stops, and notes the answers."""

    def __init__(self, url: str) -> None:
        self.statuses: set[int] = set()
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> CallsMeanwhile:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _call(self) -> None:
        while not self._ends.is_set():
            with suppress(httpx.HTTPError):
                self.statuses.add(_call(self._url, num_steps=1))
            time.sleep(0.05)


@pytest.mark.parametrize(
    "kind",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_serve_makes_images_and_stops_cleanly(
    cli: Cli,
    tiny_config: Path,
    tiny_model: Path,
    tmp_path: Path,
    ray_folder: Path,
    kind: signal.Signals,
) -> None:
    if kind is signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, and so would the service")
    content = yaml.safe_load(tiny_config.read_text())
    content["ray"] |= {"temp_dir": str(ray_folder), "num_cpus": 2}
    # the service makes images of the one pool, whatever is wrong with the others
    broken = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    weights = broken / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    content["pools"].append(content["pools"][0] | {"name": "broken", "model": str(broken)})
    lone = tmp_path / "lone.ckpt"
    lone.write_bytes(b"pickled")
    content["pools"].append({"name": "lone", "model": str(lone)})
    tiny_config.write_text(yaml.safe_dump(content))
    url = f"http://127.0.0.1:{content['http']['port']}"
    served = Served(tiny_config, tmp_path)
    try:
        served.wait_until_ready()
        image = tmp_path / "image.png"
        result = cli("generate", "a red circle", "--seed", 4, "--url", url, "-o", image)
        assert result.exit_code == 0, result.output
        assert read_recipe(image.read_bytes())["seed"] == "4"
        here = tmp_path / "here.png"
        result = cli("generate", "--like", image, "--config", tiny_config, "-o", here)
        assert result.exit_code == 0, result.output
        assert here.read_bytes() == image.read_bytes(), "the service and this process differ"
        _check_report(served.out, url, tmp_path)
        [warning, other] = [line for line in served.err.splitlines() if "NOT SERVED" in line]
        assert "pool lone is NOT SERVED" in other
        assert "is a file in an older format" in other
        assert "pool broken is NOT SERVED" in warning
        assert f"{weights} is a Git LFS pointer" in warning
        assert served.err.count("Git LFS pointer") == 1
        _check_absent(url, "broken")
        with ThreadPoolExecutor() as threads:
            begun = threads.submit(_call, url, num_steps=40)
            _wait_until_leased(url, begun)
            with CallsMeanwhile(url) as calls:
                assert served.stop(kind) == 0
            assert begun.result() == 200
        # images until admission is closed, then the reason; never a proxy without an application
        assert calls.statuses <= {200, 503}
        assert 503 in calls.statuses
        told = served.err.partition("closing admission")[2]
        states = ("none in flight", "tiny: its replicas", "tiny: stopped", "Ray: stopped")
        places = [told.find(state) for state in states]
        assert places == sorted(places)
        assert min(places) >= 0, told
        assert not [word for word in ("raylet", "INFO", "Traceback") if word in served.err]
        assert not [process for process in served.family if process.is_running()]
    finally:
        served.end()


def _check_absent(url: str, model: str) -> None:
    ready = httpx.get(f"{url}/readyz")
    assert ready.status_code == 200
    assert f"pool {model} is in the settings but not deployed" in ready.text
    body = {"model": model, "prompt": "x"}
    refused = httpx.post(f"{url}/v1/images/generations", json=body, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
    assert "settings apply" in refused.text


def _check_report(report: str, url: str, folder: Path) -> None:
    """The report says what runs, and its example works as it is printed."""
    for part in ("BaseModel", "Dispatcher", "Gateway", "memory fits", f"{url}/docs", "dashboard"):
        assert part in report
    example = report.partition("Or with the openai client\n")[2].partition("\n\n")[0]
    subprocess.run(
        [sys.executable, "-c", example], cwd=folder, timeout=120, check=True, capture_output=True
    )
    with Image.open(folder / "red.png") as image:
        assert image.size == (64, 64)
