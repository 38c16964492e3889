"""compose.yaml runs the image for this machine alone, and its services find each other."""

import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_cluster.config.loading import load_config
from ray_cluster.observability.dashboards.alerts import alert_rules
from tests.test_image import ROOT, environment, run, said, tool

SECRETS = {"POSTGRES_PASSWORD": "one", "GRAFANA_PASSWORD": "two"}


@cache
def compose() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_docker_compose_reads_both_files_and_wants_the_secrets() -> None:
    program = tool("docker-compose")
    files = ("-f", "compose.yaml", "-f", "compose.gpu.yaml")
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    for chosen in (files[:2], files):
        done = run(program, *chosen, "config", "--quiet", env=env | SECRETS)
        assert (done.returncode, done.stderr) == (0, "")
    for name in SECRETS:
        others = {other: value for other, value in SECRETS.items() if other != name}
        done = run(program, "--env-file", "/dev/null", "config", "--quiet", env=env | others)
        assert done.returncode != 0
        assert f"required variable {name} is missing" in done.stderr


def test_services_are_reached_from_this_machine_alone() -> None:
    ports = [port for one in compose()["services"].values() for port in one.get("ports", ())]
    assert len(ports) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)
    assert "ports" not in compose()["services"]["postgres"]


def test_images_have_tags_and_come_from_docker_hub() -> None:
    for name, service in compose()["services"].items():
        image, _, tag = service["image"].partition(":")
        assert re.match(r"v?\d+\.\d+|cpu$", tag), name
        # a registry's host would have a dot or a port
        assert "." not in image.split("/")[0], name


def test_volumes_and_configs_are_declared_and_used() -> None:
    services = compose()["services"].values()
    mounts = [one for service in services for one in service.get("volumes", ())]
    named = {one.split(":")[0] for one in mounts if isinstance(one, str)}
    assert named == compose()["volumes"].keys()
    configs = {one["source"] for service in services for one in service.get("configs", ())}
    assert configs == compose()["configs"].keys()
    # docker copies them into a container before it starts, which a read-only one refuses
    assert not [one for one in services if one.get("read_only") and one.get("configs")]


def test_the_service_stops_in_time_and_runs_on_a_read_only_root() -> None:
    server = compose()["services"]["server"]
    assert server["read_only"]
    assert server["tmpfs"] == ["/tmp"]
    unit = (ROOT / "docs/operations.md").read_text()
    (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert server["stop_grace_period"] == f"{limit_s}s"
    mounted = {one.split(":")[1] for one in server["volumes"] if isinstance(one, str)}
    assert mounted == set(yaml.safe_load(said("cpu", "VOLUME")[0]))
    assert "/readyz" in server["healthcheck"]["test"][-1]


def test_its_configuration_is_valid_and_stores_on_the_volumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_CLUSTER_API_KEYS", raising=False)
    config = load_config(ROOT / "configs/compose.yaml")
    server, postgres = (compose()["services"][name] for name in ("server", "postgres"))
    (port,) = server["ports"]
    assert port == f"127.0.0.1:{config.http.port}:{config.http.port}"
    assert config.http.host == "0.0.0.0"
    user = postgres["environment"]["POSTGRES_USER"]
    # the password stands in neither file
    assert config.storage.jobs == f"postgresql://{user}@postgres/{user}"
    password = postgres["environment"]["POSTGRES_PASSWORD"]
    assert server["environment"]["PGPASSWORD"] == password
    assert password.startswith("${POSTGRES_PASSWORD:?")
    home = Path(environment("cpu")["HOME"])
    stored = (config.storage.results, config.storage.states, config.storage.inputs)
    assert all(Path(place).is_relative_to(home) for place in stored)
    (folder,) = (one for one in server["volumes"] if isinstance(one, dict))
    assert Path(server["command"][1]).parent == Path(folder["target"])


def prometheus_config() -> dict[str, Any]:
    found = yaml.safe_load(compose()["configs"]["prometheus"]["content"])
    assert isinstance(found, dict)
    return found


def test_prometheus_scrapes_the_service_and_finds_what_the_release_writes() -> None:
    (job,) = prometheus_config()["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    services = compose()["services"]
    (script,) = services["observe"]["command"]
    (rules,) = prometheus_config()["rule_files"]
    (folder,) = (m for m in services["prometheus"]["volumes"] if m.startswith("observe:"))
    assert f"-o {Path(rules).name}\n" in script
    assert folder == f"observe:{Path(rules).parent}:ro"
    assert services["observe"]["volumes"] == [f"observe:{services['observe']['working_dir']}"]
    provider = yaml.safe_load(compose()["configs"]["grafana-dashboards"]["content"])
    (shown,) = (one["options"]["path"] for one in provider["providers"])
    assert f"observe:{shown}:ro" in services["grafana"]["volumes"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (prometheus) is missing")
def test_promtool_accepts_the_configuration_with_the_rules(tmp_path: Path) -> None:
    config = prometheus_config()
    config["rule_files"] = [str(tmp_path / "alerts.yaml")]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(alert_rules()))
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    done = run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
