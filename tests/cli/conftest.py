"""The command line in this process, small models, and a gateway on a fake dispatcher."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
import yaml
from typer.testing import CliRunner, Result

from ray_cluster.api.app import create_app
from ray_cluster.cli.app import app
from ray_cluster.config import ClusterConfig
from tests.engine.random_models import save_sd
from tests.fakes import FakeDispatcherClient, model_profile

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
def dispatcher() -> FakeDispatcherClient:
    return FakeDispatcherClient(replace(model_profile("shapes"), max_px=128))


@pytest.fixture
def service_url(dispatcher: FakeDispatcherClient) -> Iterator[str]:
    """The real HTTP application on a socket; its images come from the fake dispatcher."""
    config = ClusterConfig.model_validate(
        {"http": {"api_keys": ["secret"]}, "pools": [{"name": "shapes", "model": "shapes-sd"}]}
    )
    settings = uvicorn.Config(
        create_app(dispatcher, config), port=0, log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(settings)
    listener = settings.bind_socket()
    listener.listen()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join()
    listener.close()
