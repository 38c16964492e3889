"""``settings apply`` compares, writes, adds, removes and waits, on a stand-in for a service."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from ray_cluster.cli import settings_run
from ray_cluster.cli.progress import StateScreen
from ray_cluster.cli.settings_run import NotApplied, apply_file, changes_of, settings_text
from ray_cluster.config.arguments import front_arguments, worker_arguments
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.settings import settings_of
from ray_cluster.deployments.live_settings import ReplicaReport, SettingsReport
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
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.done: list[str] = []
        self.num_left = [0]
        self.obstacle = ""
        self.states = {"front": "RUNNING"} | {pool.name: "RUNNING" for pool in config.pools}
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
            front=front_arguments(self._running, "/x.yaml"),
            pools={
                p.name: worker_arguments(self._running, p.name).pool for p in self._running.pools
            },
            version_by_gateway={"g": self._has},
            replicas=tuple(
                ReplicaReport(f"r-{p.name}", p.name, self._has, 8, 16) for p in self._running.pools
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
        return "no such model"

    def add(self, config: ClusterConfig, names: Collection[str]) -> None:
        self.done.append(f"add {', '.join(names)}")
        self.states.update(dict.fromkeys(names, self.states.pop("next", "DEPLOYING")))

    def remove(self, names: Collection[str], on_change: Callable[[str, str], None]) -> None:
        self.done.append(f"remove {', '.join(names)}")
        for name in names:
            # as at every look
            for state in ("stopping", "stopping", "stopping", "stopped"):
                on_change(name, state)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_run, "_POLL_S", 0.001)


def applied(
    cell: FakeCell, folder: Path, *pools: dict[str, Any], timeout_s: float = 10, **sections: Any
) -> str:
    path = folder / "wanted.yaml"
    path.write_text(yaml.safe_dump({"pools": list(pools), **sections}))
    text = io.StringIO()
    with StateScreen(Console(file=text, soft_wrap=True)) as screen:
        apply_file(cell, path, timeout_s=timeout_s, show=screen.show)
    # without the seconds in front
    return "\n".join(
        line.split("  ", maxsplit=2)[-1].strip() for line in text.getvalue().splitlines()
    )


def test_a_setting_is_written_and_waited_for(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    said = applied(cell, tmp_path, A, limits={"max_queued_images": 7})
    assert cell.done == ["write"]
    assert "applied by 1 gateway(s) and 1 replica(s)" in said


def test_a_new_pool_is_added_after_the_document_names_it(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    said = applied(cell, tmp_path, A, B)
    assert cell.done == ["write", "add b"]
    assert "pool b: running" in said


def test_a_removed_pool_goes_once_its_images_are_made(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A, B))
    cell.num_left = [3, 3, 3, 2, 1, 0]
    said = applied(cell, tmp_path, A)
    assert cell.done == ["write", "remove b"]
    assert "b: 1 image(s) left" in said
    lines = said.splitlines()
    assert len(set(lines)) == len(lines), "each state once"
    assert said.endswith("pool b: stopped")


def test_a_file_that_names_the_pools_already_still_adds_and_removes(tmp_path: Path) -> None:
    # as after an edit of the watched file by hand
    cell = FakeCell(config_of(A, B))
    cell.states.pop("a")
    changes = changes_of(replace(cell.report()), cell.states, config_of(A))
    assert (changes.added, changes.removed) == (("a",), ("b",))
    assert changes.ended_models == {"b"}


def test_a_model_that_another_pool_makes_does_not_end(tmp_path: Path) -> None:
    twin = B | {"served_as": "a"}
    cell = FakeCell(config_of(A, twin))
    changes = changes_of(cell.report(), cell.states, config_of(A))
    assert (changes.removed, changes.ended_models) == (("b",), frozenset())


@pytest.mark.parametrize(
    ("pools", "sections", "named"),
    [
        ([A], {"http": {"port": 8123}}, "front http.port (8000 runs, the file has 8123)"),
        ([A | {"num_threads": 2}, B], {}, "pool a num_threads (1 runs, the file has 2)"),
    ],
)
def test_what_needs_a_redeploy_is_named_and_nothing_is_changed(
    tmp_path: Path, pools: list[dict[str, Any]], sections: dict[str, Any], named: str
) -> None:
    cell = FakeCell(config_of(A))
    with pytest.raises(ConfigError, match="nothing was changed; this needs a redeploy") as error:
        applied(cell, tmp_path, *pools, **sections)
    assert named in str(error.value)
    assert cell.done == []


@pytest.mark.parametrize("wrong", [{"name": "c", "model": "no-such-model"}, {"name": "c"}])
def test_a_wrong_file_changes_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    cell = FakeCell(config_of(A))
    with pytest.raises(ConfigError, match=r"wanted\.yaml"):
        applied(cell, tmp_path, A, wrong)
    assert cell.done == []


def test_a_file_that_cannot_be_written_adds_no_pool(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.obstacle = "it is mounted from a ConfigMap: edit that"
    with pytest.raises(ConfigError, match="ConfigMap"):
        applied(cell, tmp_path, A, B)
    assert cell.done == []


def test_a_pool_that_does_not_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.states["next"] = "DEPLOY_FAILED"
    with pytest.raises(NotApplied, match="b: no such model"):
        applied(cell, tmp_path, A, B)


def test_a_process_that_does_not_follow_is_named(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.write = lambda text: FakeCell.write(cell, text) and "another"  # type: ignore[method-assign]
    with pytest.raises(NotApplied, match="took the place of another meanwhile"):
        applied(cell, tmp_path, A, limits={"max_queued_images": 7})


def test_what_is_shown_has_no_key(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A, http={"api_keys": ["very-secret"]}))
    text = settings_text(cell.report())
    assert "very-secret" not in text
    content = yaml.safe_load(text)
    assert content["http"]["api_keys"][0].startswith("sha256:")
    assert content["limits"]["max_queued_images"] == 64
    assert "# g: " in text
    assert "# replica r-a of a: " in text


def test_serves_own_file_has_arguments_only(tmp_path: Path, cli: Any) -> None:
    path = tmp_path / "my.yaml"
    storage = {"jobs": "sqlite:////jobs.db", "results": "/results", "states": "/states"}
    storage["inputs"] = "/inputs"
    content = {"http": {"api_keys": ["very-secret"]}, "storage": storage, "pools": [A, B]}
    path.write_text(yaml.safe_dump(content))
    command = ("config", path, "--serve-deploy", "--settings-path", "/etc/my.yaml")
    before = cli(*command).output
    assert "very-secret" not in before
    applications = yaml.safe_load(before)["applications"]
    assert [one["name"] for one in applications] == ["front", "a", "b"]
    assert applications[0]["args"]["front"]["settings"] == "/etc/my.yaml"
    assert applications[0]["args"]["front"]["folder"] is None
    content["http"]["api_keys"] = ["another"]
    content["limits"] = {"max_queued_images": 7}
    path.write_text(yaml.safe_dump(content))
    assert cli(*command).output == before
    assert cli("config", "--serve-deploy").exit_code == 1


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_an_address_without_a_service_is_said_at_once(cli: Any, address: str) -> None:
    result = cli("settings", "show", "--address", address)
    assert result.exit_code == 1
    assert f"nothing answers at {address}" in " ".join(result.stderr.split())


def test_several_rays_on_one_machine_are_no_choice(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"10.0.0.1:6379", "10.0.0.1:7001"}
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: found)
    result = cli("settings", "show")
    assert result.exit_code != 0
    assert "10.0.0.1:6379, 10.0.0.1:7001" in " ".join(result.output.split())
