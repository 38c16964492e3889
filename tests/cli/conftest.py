"""The command line in this process, small models, and a service that makes images of nothing."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from ray_cluster.cli.app import app
from ray_cluster.cli.remote import remote_jobs, remote_service
from tests.cli.served import Served
from tests.engine.random_models import save_sd

Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Undo what a command does to the logging of its process."""
    ours = logging.getLogger("ray_cluster")
    before = ours.level
    yield
    ours.setLevel(before)


@pytest.fixture
def cli() -> Cli:
    """Runs a command; its standard error is in ``stderr``."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sd(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny_config(tiny_model: Path, tmp_path: Path, ports: list[int]) -> Path:
    """A configuration of one pool with few steps, as a file."""
    content = {
        "http": {"port": ports[0]},
        "ray": {"dashboard_port": ports[1], "auth": "disabled"},
        "pools": [
            {
                "name": "tiny",
                "model": str(tiny_model),
                "num_cpus": 0.5,
                "max_px": 96,
                "defaults": {
                    "size": "64x64",
                    "num_inference_steps": 3,
                    "guidance_scale": 2.0,
                    "sampler": "ddim",
                },
            }
        ],
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture
def ports() -> list[int]:
    """Two ports that nothing listens on."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The real HTTP application on a socket; its jobs are made of nothing.

    Commands look at them more often: these jobs take a tenth of a second.
    """
    monkeypatch.setattr(remote_jobs, "_POLL_S", 0.05)
    monkeypatch.setattr(remote_jobs.generate_there, "__defaults__", (0.05,))
    monkeypatch.setattr(remote_service, "_AGAIN_S", 0.1)
    one = Served(tmp_path / "served")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def service_url(served: Served) -> str:
    return served.url


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Ray's folder: pytest's own temporary folders are too long for its sockets."""
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
