"""How ``serve`` stops: what it waits for, and what it says meanwhile."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from ray import serve
from ray.serve.exceptions import RayServeException
from rich.console import Console

from ray_cluster.cli.progress import StateScreen
from ray_cluster.cli.service import ray_service, service_run
from ray_cluster.cli.service.ray_messages import RayMessages
from ray_cluster.cli.service.ray_service import RayService, ServiceFailed
from ray_cluster.cli.service.served_file import ServedFile
from ray_cluster.cli.service.service_run import drain
from ray_cluster.config.loading import load_config
from ray_cluster.deployments.service import ApplicationState


class FakeService:
    """Answers with the given counts, the last one for ever."""

    def __init__(self, counts: Sequence[int | None], *, has_run: bool = True) -> None:
        self._counts = list(counts)
        self.has_run = has_run
        self.is_closed = False
        self.has_ended_attached = False

    def close_admission(self) -> None:
        self.is_closed = True

    def end_attached(self) -> None:
        self.has_ended_attached = True

    def num_in_flight(self) -> int | None:
        assert self.is_closed, "more could come"
        return self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]


class Shown:
    def __init__(self) -> None:
        self.states: list[str] = []

    def __call__(self, _name: str, state: str, *, is_done: bool = False) -> None:
        self.states.append(state)


def test_draining_goes_on_while_the_dispatcher_is_silent() -> None:
    shown = Shown()
    drain(FakeService([2, None, None, 1, 0]), shown)
    words = [state.partition(" being")[0] for state in shown.states]
    assert words == [
        "closing admission",
        "2",
        "an unknown number",
        "an unknown number",
        "1",
        "none in flight",
    ]


@pytest.mark.parametrize("count", [3, None])
def test_draining_has_a_limit(count: int | None) -> None:
    shown, service = Shown(), FakeService([count])
    drain(service, shown, limit_s=0.3)
    assert shown.states[-1].endswith("left after 0 s: open calls get a 503, jobs go on later")
    assert service.has_ended_attached


def test_who_is_finished_within_the_limit_is_not_cut_off() -> None:
    service = FakeService([2, 1, 0])
    drain(service, Shown())
    assert not service.has_ended_attached


def test_a_second_signal_ends_the_draining() -> None:
    class Impatient(FakeService):
        def num_in_flight(self) -> int | None:
            raise KeyboardInterrupt

    shown = Shown()
    with pytest.raises(KeyboardInterrupt):
        drain(Impatient([1]), shown)
    assert shown.states[-1] == "left as they are: jobs go on later"


def test_a_service_that_never_ran_has_nothing_in_flight() -> None:
    shown, service = Shown(), FakeService([7], has_run=False)
    drain(service, shown)
    assert service.is_closed
    assert shown.states == []


def test_silence_of_the_dispatcher_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_deployment: str, _application: str) -> object:
        raise RayServeException("no answer")

    monkeypatch.setattr(serve, "get_deployment_handle", silent)
    config = load_config({"pools": [{"name": "a", "model": "shapes-sd"}]})
    assert RayService(config).num_in_flight() is None


def test_every_state_is_a_line_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    with StateScreen(Console(file=text), quiet=False) as screen:
        screen.show("images", "2 being finished")
        screen.show("images", "2 being finished")
        screen.show("images", "none in flight", is_done=True)
    lines = [line.split("  ", maxsplit=2)[-1] for line in text.getvalue().splitlines()]
    assert lines == ["images: 2 being finished", "images: none in flight"]


POOL = {"name": "a", "model": "shapes-sd"}


def test_a_refused_file_changes_nothing_for_serve(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"pools": [POOL]}))
    served = ServedFile(path, {})
    service = RayService(served.load(), served)
    # a valid configuration, which the dispatcher refuses: there is no such model
    path.write_text(yaml.safe_dump({"pools": [POOL, {"name": "zz", "model": "no-such-model"}]}))
    service.refresh()
    assert [pool.name for pool in service.config.pools] == ["a"]
    path.write_text(yaml.safe_dump({"pools": [POOL, {"name": "b", "model": "shapes-sd"}]}))
    service.refresh()
    assert [pool.name for pool in service.config.pools] == ["a", "b"]


def test_what_fails_or_recovers_is_said_and_a_new_pool_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched:
        """Shows the states of its applications look by look, then ends with a signal."""

        looks: ClassVar = [
            {"front": "running", "a": "running"},
            # in the file, and not deployed yet
            {"front": "running", "a": "running", "zz": "starting"},
            {"front": "running", "a": "failed", "zz": "running"},
            {"front": "running", "a": "running", "zz": "starting"},
        ]

        def refresh(self) -> None: ...

        def application_states(self) -> list[ApplicationState]:
            if not self.looks:
                raise KeyboardInterrupt
            return [ApplicationState(name, state) for name, state in self.looks.pop(0).items()]

    monkeypatch.setattr(service_run, "_WATCH_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        service_run._watch(Watched())
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: a has failed", "a is running", "zz is starting"]


def test_a_pool_that_fails_on_its_node_is_left_out_and_the_others_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"pools": [POOL, {"name": "bad", "model": "x/y"}]}))
    served = ServedFile(path, {})
    failed = "ray_cluster.errors.ConfigError: /x/unet has no weights"
    looks = [
        [ApplicationState("front"), ApplicationState("a"), ApplicationState("bad")],
        [
            ApplicationState("front", "running"),
            ApplicationState("a"),
            ApplicationState("bad", details=f"Traceback\n{failed}\n"),
        ],
        # what is left of it while Serve deletes it
        [*(ApplicationState(name, "running") for name in ("front", "a")), ApplicationState("bad")],
    ]
    deleted: list[str] = []
    monkeypatch.setattr(ray_service, "_POLL_S", 0.0)
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: deleted.append(name))
    monkeypatch.setattr(ray_service, "deploy", lambda _config, _front: None)
    monkeypatch.setattr(ray_service, "application_states", lambda _config: looks.pop(0))
    monkeypatch.setattr(RayService, "_report_undeployed", lambda _self: None)
    service, shown = RayService(served.load(), served), Shown()
    service.deploy()
    service.wait_ready(shown)
    assert service.left_out == {"bad": "/x/unet has no weights"}
    assert deleted == ["bad"]
    assert shown.states.count("not served") == 1
    with pytest.raises(ServiceFailed, match="bad: /x/unet has no weights; a: gone"):
        service.leave_out("a", "gone", shown)


def test_a_replica_that_dies_while_others_load_costs_its_pool_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"pools": [POOL, {"name": "b", "model": "x/y"}]}))
    served = ServedFile(path, {})
    front = ApplicationState("front", "running")
    killed = ApplicationState("a", "failed", details="its only replica has died")
    looks = [
        [front, ApplicationState("a", "running"), ApplicationState("b")],
        [front, killed, ApplicationState("b")],
        [front, killed, ApplicationState("b", "running")],
    ]
    monkeypatch.setattr(ray_service, "_POLL_S", 0.0)
    monkeypatch.setattr(ray_service, "application_states", lambda _config: looks.pop(0))
    monkeypatch.setattr(RayService, "_report_undeployed", lambda _self: None)
    service = RayService(served.load(), served)
    service.wait_ready(Shown())
    assert looks == []
    assert service.left_out == {}


# as Ray 2.60 writes it
WORKER_DIED = (
    "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected "
    "system error. To troubleshoot the problem, check the logs for the dead worker. Lease ID: 01\n"
    "Worker ID: 5f Node ID: 22 Worker IP address: 10.0.0.1 Worker port: 1 Worker PID: 7\n"
)


def test_a_message_of_ray_is_one_sentence_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print(WORKER_DIED, end="", file=RayMessages())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "warning: Ray: A worker died or was killed while executing a task by an unexpected system "
        "error\n"
    )
