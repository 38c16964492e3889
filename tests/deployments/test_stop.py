"""In which order a service is taken down, on a stand-in for Serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.deployments.service import Owned, stop

CONFIG = {"pools": [{"name": name, "model": "shapes-sd"} for name in ("a", "b")]}


class FakeServe:
    """Applications that take two looks to go, and what was asked in which order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._looks_left = {"a": 2, "b": 1, "loras": 1, "front": 2}
        self._is_going: set[str] = set()

    def delete(self, name: str, *, _blocking: bool) -> None:
        assert not _blocking, "one would be waited for before the next is told"
        self.asked.append(name)
        self._is_going.add(name)

    def status(self) -> Any:
        for name in self._is_going:
            self._looks_left[name] -= 1
        alive = {name: None for name, looks in self._looks_left.items() if looks > 0}
        return SimpleNamespace(applications=alive)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe()
    monkeypatch.setattr(serve, "delete", fake.delete)
    monkeypatch.setattr(serve, "status", fake.status)
    monkeypatch.setattr(serve, "shutdown", lambda: fake.asked.append("serve ends"))
    monkeypatch.setattr(ray, "shutdown", lambda: fake.asked.append("ray ends"))
    return fake


@pytest.fixture
def config() -> ClusterConfig:
    return load_config(CONFIG)


@pytest.mark.parametrize(
    ("owned", "order"),
    [
        # the API answers until Ray ends
        ("ray", ["a", "b", "loras", "ray ends"]),
        ("serve", ["a", "b", "loras", "front", "serve ends"]),
        ("applications", ["a", "b", "loras", "front"]),
    ],
)
def test_pools_go_first_and_the_front_last(
    fake: FakeServe, config: ClusterConfig, owned: Owned, order: list[str]
) -> None:
    stop(config, owned=owned)
    assert fake.asked == order


def test_what_stops_is_told(fake: FakeServe, config: ClusterConfig) -> None:
    told: list[str] = []
    stop(config, owned="ray", on_change=lambda name, state: told.append(f"{name}: {state}"))
    assert told[0].startswith("a: its replicas")
    assert sorted(told[-4:-1]) == ["a: stopped", "b: stopped", "loras: stopped"]
    assert told[-1] == "Ray: stopping"
