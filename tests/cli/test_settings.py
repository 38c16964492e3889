"""``settings apply`` compares, writes, adds, removes and waits, on a stand-in for a service."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ray_cluster.cli.remote import settings_run
from ray_cluster.cli.remote.settings_run import NotApplied, apply_file, changes_of, settings_text
from ray_cluster.cli.service.served_file import ServedFile
from ray_cluster.config.sections.keys import key_digest
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_folder
from tests.cli.fake_cell import A, B, FakeCell, applied, config_of
from tests.engine.random_dits import save_flux
from tests.keys import entry


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_run, "_POLL_S", 0.001)


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


def test_a_removed_upscaler_is_called_one(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A, upscalers=[{"name": "big"}]))
    assert applied(cell, tmp_path, A).endswith("upscaler big: stopped")


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
    with pytest.raises(NotApplied, match="b: no such model; mend that and apply"):
        applied(cell, tmp_path, A, B)
    # so that applying the file again starts it anew
    assert cell.done == ["write", "add b", "remove b"]


def test_a_new_pool_that_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    source = builtin_folder("shapes-sd-light")
    assert source is not None
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    (broken / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    cell = FakeCell(config_of(A))
    with pytest.raises(ConfigError, match=r"nothing was changed; pool b: .*safetensors is empty"):
        applied(cell, tmp_path, A, B | {"model": str(broken)})
    absent = B | {"model": str(tmp_path / "absent")}
    with pytest.raises(ConfigError, match=r"pool b: model .*absent' is neither a built-in name"):
        applied(cell, tmp_path, A, absent)
    judges = [{"name": "j", "model": str(tmp_path / "absent")}]
    with pytest.raises(ConfigError, match=r"nothing was changed; discriminator j: there is no"):
        applied(cell, tmp_path, A, discriminators=judges)
    assert cell.done == []
    # on a cluster, another machine may have it
    there = FakeCell(config_of(A, ray={"address": "10.0.0.1:6379"}))
    applied(there, tmp_path, A, absent, ray={"address": "10.0.0.1:6379"})
    assert there.done == ["write", "add b"]


SCHEDULED = "1 replicas that have taken more than 30s to be scheduled"


@pytest.mark.parametrize(
    ("num_cpus", "message", "said"),
    [
        (
            8,
            "",
            "pool b does not run yet (a replica of b needs 8 CPUs, 0.5 of 2 are free); to undo",
        ),
        (1, SCHEDULED, "(a replica of b needs 1 CPU, 0.5 of 2 are free)"),
        # it may have taken what is not free
        (1, "", "(the replicas of b are starting)"),
        (1, "slow\n__init__", "(slow __init__)"),
    ],
)
def test_a_pool_that_does_not_run_in_time_is_said_with_what_it_needs(
    tmp_path: Path, num_cpus: int, message: str, said: str
) -> None:
    cell = FakeCell(config_of(A))
    cell.message, cell.states["next"] = message, "NOT_YET"
    with pytest.raises(NotApplied) as error:
        applied(cell, tmp_path, A, B | {"num_cpus": num_cpus}, timeout_s=0.01)
    assert said in str(error.value)
    assert str(error.value).endswith("to undo it, remove it from the file and apply that again")


def test_nodes_that_are_not_there_are_said(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.message, cell.states["next"] = "", "NOT_YET"
    with pytest.raises(NotApplied, match="b needs a node with the resource h100, which none has"):
        applied(cell, tmp_path, A, B | {"node_resource": "h100"}, timeout_s=0.01)


def test_what_a_pool_lacks_is_said_at_once_and_by_every_apply_until_it_runs(tmp_path: Path) -> None:
    cell, huge = FakeCell(config_of(A)), B | {"num_cpus": 8}
    cell.message, cell.states["next"] = "", "NOT_YET"
    lines: list[tuple[str, str]] = []

    def show(name: str, state: str, *, is_done: bool = False) -> None:
        lines.append((name, state))

    path = tmp_path / "wanted.yaml"
    path.write_text(yaml.safe_dump({"pools": [A, huge]}))
    lacking = "a replica of b needs 8 CPUs, 0.5 of 2 are free"
    for actions in (["write", "add b"], ["write"]):
        cell.done.clear()
        with pytest.raises(NotApplied, match=rf"pool b does not run yet \({lacking}\)"):
            apply_file(cell, path, timeout_s=0.5, show=show, note=print)
        assert cell.done == actions
        assert next(state for name, state in lines if name == "pool b") == f"not_yet; {lacking}"
        lines.clear()
    cell.states["b"] = "RUNNING"
    apply_file(cell, path, timeout_s=10, show=show, note=print)


def test_a_pool_of_the_file_that_fails_later_is_said_and_stays(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A, B))
    cell.states["b"] = "UNHEALTHY"
    with pytest.raises(NotApplied, match="in force, but not every pool runs: b: no such model"):
        applied(cell, tmp_path, A, B, limits={"max_queued_images": 7})
    assert cell.done == ["write"]


def test_several_pools_that_do_not_run_are_several(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.states["next"] = "NOT_YET"
    with pytest.raises(
        NotApplied, match=r"pool b and pool c do not run yet .*; to undo it, remove them"
    ):
        applied(cell, tmp_path, A, B, B | {"name": "c"}, timeout_s=0.01)


def test_what_is_not_changed_is_said(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A, B, http={"port": 8410}))
    cell.counts["b/BaseModel"] = 2
    cell.overridden = ("http.port", "pools.b.replicas")
    said = applied(cell, tmp_path, A | {"replicas": 3}, B, http={"port": 8100, "num_gateways": 2})
    scale = "change it through Serve's scale API or restart the service"
    option = "an option of 'serve' outranks the file"
    assert [line for line in said.splitlines() if line.startswith("not changed")] == [
        f"not changed: http.port (8410 runs, the file has 8100); {option}",
        "not changed: http.num_gateways (1 run, the file has 2); restart the service",
        f"not changed: pool a replicas (1 run, the file has 3); {scale}",
        f"not changed: pool b replicas (2 run, the file has 1); {option}",
    ]
    assert "not changed" not in applied(FakeCell(config_of(A)), tmp_path, A)


def test_options_of_serve_are_those_that_outrank(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"pools": [A, B]}))
    served = ServedFile(path, {"http": {"port": 8410, "host": None}}, replicas=2)
    assert served.front(served.load()).overridden == ("http.port", "pools.a.replicas")


def test_a_batch_that_memory_caps_is_said(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.max_batch = 4
    said = applied(cell, tmp_path, A | {"max_batch": 16})
    assert "capped: pool a max_batch (4 in 1 replica(s), the file has 16)" in said
    assert "capped" not in applied(FakeCell(config_of(A)), tmp_path, A)


@pytest.mark.parametrize("address", [[], ["--address", "127.0.0.1:1"]])
def test_a_file_is_checked_before_the_service_is_looked_for(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: list[str]
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("poolz: []")
    result = cli("settings", "apply", path, *address)
    assert result.exit_code == 1
    assert "poolz: there is no such key" in " ".join(result.stderr.split())


def test_a_process_that_does_not_follow_is_named(tmp_path: Path) -> None:
    cell = FakeCell(config_of(A))
    cell.write = lambda text: FakeCell.write(cell, text) and "another"  # type: ignore[method-assign]
    with pytest.raises(NotApplied, match="took the place of another meanwhile"):
        applied(cell, tmp_path, A, limits={"max_queued_images": 7})


def test_what_is_shown_has_no_key(tmp_path: Path) -> None:
    keys = ["very-secret", entry("ci", "very-secret-2", "use", "operate")]
    cell = FakeCell(config_of(A, http={"api_keys": keys}))
    cell.seats = {"img-1": (2, 3)}
    text = settings_text(cell.report())
    assert "very-secret" not in text
    content = yaml.safe_load(text)
    plain, named = sorted(content["http"]["api_keys"], key=lambda one: isinstance(one, dict))
    assert plain.startswith("sha256:")
    assert (named["name"], named["roles"]) == ("ci", ["use", "operate"])
    assert key_digest("very-secret-2") not in text
    assert content["limits"]["max_queued_images"] == 500
    assert "# g: " in text
    assert "# replica r-a of a: " in text
    assert "#   ranks 2, 3: img-1\n" in text


def test_serves_own_file_has_arguments_only(tmp_path: Path, cli: Any) -> None:
    path = tmp_path / "my.yaml"
    storage = {"jobs": "sqlite:////jobs.db", "results": "/results", "states": "/states"}
    storage["inputs"] = "/inputs"
    content = {"http": {"api_keys": ["very-secret"]}, "storage": storage, "pools": [A, B]}
    path.write_text(yaml.safe_dump(content))
    command = ("config", path, "--serve-deploy", "--settings-path", "/etc/my.yaml")
    result = cli(*command)
    before = result.stdout
    assert "very-secret" not in result.output
    for said in ("http.host is 127.0.0.1", "jobs (sqlite:////jobs.db), results (/results), "):
        assert said in " ".join(result.stderr.split())
    applications = yaml.safe_load(before)["applications"]
    assert [one["name"] for one in applications] == ["front", "loras", "a", "b"]
    assert applications[0]["args"]["front"]["settings"] == "/etc/my.yaml"
    assert "folder" not in applications[0]["args"]["front"]
    content["http"]["api_keys"] = ["another"]
    content["limits"] = {"max_queued_images": 7}
    path.write_text(yaml.safe_dump(content))
    assert cli(*command).stdout == before
    assert cli("config", "--serve-deploy").exit_code == 1
    content["http"]["host"] = "0.0.0.0"
    content["storage"]["is_shared"] = True
    path.write_text(yaml.safe_dump(content))
    assert cli(*command).stderr == ""


def test_both_files_of_a_model_must_be_on_every_node(tmp_path: Path, cli: Any) -> None:
    folder, file = save_flux(tmp_path / "flux"), tmp_path / "one.safetensors"
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").rename(file)
    pool = {"name": "a", "model": str(folder), "transformer": str(file), "max_px": 128}
    (path := tmp_path / "my.yaml").write_text(
        yaml.safe_dump({"pools": [pool | {"defaults": {"size": "64x64"}}]})
    )
    said = " ".join(cli("config", path, "--serve-deploy").stderr.split())
    assert f"pool a: {folder} is a folder of this machine; mount it" in said
    assert f"pool a: {file} is a file of this machine; mount it" in said


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("jobs", "postgresql://rc:hunter2@db/jobs"),
        ("jobs", "postgresql://db/jobs?user=rc&password=hunter2"),
        ("results", "s3://AKIA:hunter2@bucket/folder"),
        ("inputs", "s3://bucket/folder?secret_access_key=hunter2"),
    ],
)
def test_passwords_of_storage_are_neither_shown_nor_deployed(
    key: str, url: str, tmp_path: Path, cli: Any
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({"storage": {key: url}, "pools": [A]}))
    shown = cli("config", path)
    assert shown.exit_code == 0
    assert "hunter2" not in shown.output
    deployed = cli("config", path, "--serve-deploy")
    assert deployed.exit_code == 1
    assert f"storage.{key} holds a password" in deployed.stderr
    assert "hunter2" not in deployed.output
    path.write_text(yaml.safe_dump({"storage": {"jobs": "postgresql://rc@db/jobs"}, "pools": [A]}))
    assert "postgresql://rc@db/jobs" in cli("config", path, "--serve-deploy").stdout


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
    said = " ".join(result.output.split())
    assert "10.0.0.1:6379, 10.0.0.1:7001" in said
    assert "--address or RAY_ADDRESS" in said


def test_several_rays_are_told_apart_by_what_started_them(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"10.0.0.1:6379", "10.0.0.1:7001"}
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: found)
    parent = SimpleNamespace(
        cmdline=lambda: ["/venv/bin/python", "/venv/bin/ray-cluster", "serve", "my.yaml"],
        cwd=lambda: "/work/one",
    )
    raylet = SimpleNamespace(
        info={"cmdline": ["/ray/raylet", "--gcs-address=10.0.0.1:7001"]}, parent=lambda: parent
    )
    other = SimpleNamespace(info={"cmdline": None}, parent=lambda: None)
    monkeypatch.setattr("psutil.process_iter", lambda _names: [raylet, other])
    said = " ".join(cli("settings", "show").output.split())
    assert "10.0.0.1:6379, 10.0.0.1:7001 ('ray-cluster serve my.yaml' in /work/one)" in said


def test_the_address_may_come_from_the_environment(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = cli("settings", "show")
    assert "nothing answers at 127.0.0.1:1" in " ".join(result.stderr.split())
