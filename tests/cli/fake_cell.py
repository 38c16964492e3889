"""A stand-in for a running service, and ``settings apply`` on it."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from ray_cluster.cell.live_settings import ReplicaReport, SettingsReport
from ray_cluster.cli.progress import StateScreen
from ray_cluster.cli.remote.settings_run import apply_file
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.settings import settings_of
from ray_cluster.config.slices import front_arguments, worker_arguments
from ray_cluster.errors import ConfigError

A = {"name": "a", "model": "shapes-sd"}
B = {"name": "b", "model": "shapes-sd-light"}


def config_of(*pools: dict[str, Any], **sections: Any) -> ClusterConfig:
    return load_config({"pools": list(pools), **sections})


class FakeCell:
    """A service whose processes go by new settings two looks later.

    Attributes:
        done: what was asked of it, in order.
        num_left: images left of the model that is removed, by look.
        counts: replicas by application and deployment.
        max_batch: of every replica.
        seats: of every replica.
        overridden: as of the front's arguments.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.done: list[str] = []
        self.num_left = [0]
        self.obstacle = ""
        self.message = "no such model"
        self.counts = {"front/Gateway": 1, "a/BaseModel": 1, "b/BaseModel": 1}
        self.max_batch = 8
        self.seats: dict[str, tuple[int, ...]] = {}
        self.overridden: tuple[str, ...] = ()
        self.states = {"front": "RUNNING"} | {one.name: "RUNNING" for one in config.workers}
        self._running = config
        self._config = config
        self._has = settings_of(config).version
        self._num_looks = 0

    def report(self) -> SettingsReport:
        settings = settings_of(self._config)
        self._num_looks += 1
        if self._num_looks > 2:
            self._has = settings.version
        left = self.num_left.pop(0) if len(self.num_left) > 1 else self.num_left[0]
        return SettingsReport(
            version=settings.version,
            settings=settings,
            path="/x.yaml",
            problem="",
            front=front_arguments(self._running, "/x.yaml", overridden=self.overridden),
            workers={
                p.name: worker_arguments(self._running, p.name).own for p in self._running.workers
            },
            version_by_gateway={"g": self._has},
            replicas=tuple(
                ReplicaReport(f"r-{p.name}", p.name, self._has, self.max_batch, 16, self.seats)
                for p in self._running.pools
            ),
            num_images_by_model={"b": left} if left else {},
        )

    def write(self, text: str) -> str:
        if self.obstacle:
            raise ConfigError(self.obstacle)
        self._config = load_config(yaml.safe_load(text))
        self._num_looks = 0
        self.done.append("write")
        return settings_of(self._config).version

    def state_by_application(self) -> dict[str, str]:
        found = dict(self.states)
        self.states = {
            name: "RUNNING" if state == "DEPLOYING" else state for name, state in found.items()
        }
        return found

    def message_of(self, application: str) -> str:
        return self.message

    def num_replicas(self, application: str, deployment: str) -> int | None:
        return self.counts.get(f"{application}/{deployment}")

    def resources(self) -> dict[str, tuple[float, float]]:
        return {"CPU": (0.5, 2.0), "GPU": (0.0, 0.0)}

    def add(self, config: ClusterConfig, names: Collection[str]) -> None:
        self.done.append(f"add {', '.join(names)}")
        self.states.update(dict.fromkeys(names, self.states.pop("next", "DEPLOYING")))

    def remove(self, names: Collection[str], on_change: Callable[[str, str], None]) -> None:
        self.done.append(f"remove {', '.join(names)}")
        for name in names:
            # as at every look
            for state in ("stopping", "stopping", "stopping", "stopped"):
                on_change(name, state)


def applied(
    cell: FakeCell, folder: Path, *pools: dict[str, Any], timeout_s: float = 10, **sections: Any
) -> str:
    path = folder / "wanted.yaml"
    path.write_text(yaml.safe_dump({"pools": list(pools), **sections}))
    text = io.StringIO()
    console = Console(file=text, soft_wrap=True)
    with StateScreen(console) as screen:
        apply_file(cell, path, timeout_s=timeout_s, show=screen.show, note=console.print)
    # without the seconds in front
    return "\n".join(
        line.split("  ", maxsplit=2)[-1].strip() for line in text.getvalue().splitlines()
    )
