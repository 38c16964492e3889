"""The dashboard and the alert rules name metrics that there are, and their tools accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ray_cluster.cli.app import app
from ray_cluster.observability.dashboards.alerts import alert_rules
from ray_cluster.observability.dashboards.grafana import dashboard

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"ray_cluster_[a-z_]+")
# of histograms and summaries
_PARTS = ("_bucket", "_sum", "_count")


def documented() -> set[str]:
    """Names of the metrics in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(ray_cluster_[a-z_]+)`", text, re.MULTILINE))


def is_documented(name: str) -> bool:
    known = documented()
    return name in known or any(name.removesuffix(part) in known for part in _PARTS)


def expressions() -> list[str]:
    panels = [one for one in dashboard()["panels"] if one["type"] != "row"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return found + [rule["expr"] for rule in alert_rules()["groups"][0]["rules"]]


def test_all_metrics_that_are_asked_for_are_documented() -> None:
    names = {name for expr in expressions() for name in _NAME.findall(expr)}
    assert len(names) > 20
    assert [name for name in sorted(names) if not is_documented(name)] == []


def test_an_unknown_metric_would_be_seen() -> None:
    assert not is_documented("ray_cluster_nothing_total")
    assert is_documented("ray_cluster_step_seconds_bucket")


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for one in panels:
        grid = one["gridPos"]
        assert 0 <= grid["x"] <= grid["x"] + grid["w"] <= 24
        cells = {
            (grid["x"] + across, grid["y"] + down)
            for across in range(grid["w"])
            for down in range(grid["h"])
        }
        assert not cells & taken, one["title"]
        taken |= cells
    rows = [one["title"] for one in panels if one["type"] == "row"]
    assert [row.split(":")[0] for row in rows[1:]] == ["Round loop", "Step loop", "Plan loop"]


# what Grafana reads of a dashboard and its panels, and of which type (its schema, 39)
_DASHBOARD: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("uid", "title", "description", "refresh", "timezone"), str),
    **dict.fromkeys(("schemaVersion", "graphTooltip"), int),
    **dict.fromkeys(("tags", "panels"), list),
    **dict.fromkeys(("time", "templating", "annotations"), dict),
    "editable": bool,
}
_PANEL: dict[str, type] = {
    **dict.fromkeys(("type", "title"), str),
    **dict.fromkeys(("gridPos",), dict),
    "id": int,
}
_SERIES: dict[str, type] = {
    **dict.fromkeys(("fieldConfig", "options", "datasource"), dict),
    "targets": list,
    "description": str,
}


def test_the_dashboard_is_of_grafana_s_model() -> None:
    made = json.loads(json.dumps(dashboard()))
    _check(made, _DASHBOARD)
    for one in made["panels"]:
        _check({key: one[key] for key in _PANEL}, _PANEL)
        if one["type"] == "timeseries":
            _check({key: one[key] for key in _SERIES}, _SERIES)
            references = [target["refId"] for target in one["targets"]]
            assert len(set(references)) == len(references) > 0


def _check(found: dict[str, Any], kinds: dict[str, Any]) -> None:
    assert found.keys() == kinds.keys()
    assert [key for key, kind in kinds.items() if not isinstance(found[key], kind)] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (prometheus) is missing")
def test_prometheus_reads_the_rules_and_all_queries(tmp_path: Path) -> None:
    rules = alert_rules()
    # a query of the dashboard as a recording rule: promtool parses both
    rules["groups"].append(
        {
            "name": "dashboard",
            "rules": [
                {"record": f"panel:{index}", "expr": expr.replace("$__rate_interval", "5m")}
                for index, expr in enumerate(expressions())
            ],
        }
    )
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    broken = path.read_text(encoding="utf-8").replace("rate(", "rat(")
    path.write_text(broken, encoding="utf-8")
    assert subprocess.run(["promtool", "check", "rules", str(path)], check=False).returncode != 0


def test_the_commands_write_both(tmp_path: Path) -> None:
    out = tmp_path / "board.json"
    assert CliRunner().invoke(app, ["observe", "dashboard", "-o", str(out)]).exit_code == 0
    assert json.loads(out.read_text(encoding="utf-8")) == dashboard()
    printed = CliRunner().invoke(app, ["observe", "alerts"])
    assert yaml.safe_load(printed.stdout) == alert_rules()
