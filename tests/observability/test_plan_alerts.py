"""Alerts of plans and lost models fire on what they are for and not before, says promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ray_cluster.observability.dashboards.alerts import alert_rules

# series of a controller that works, a sample a minute; ready and planned are of one pool
QUIET = {
    "ray_cluster_plan_paused": "0x300",
    "ray_cluster_plan_age_seconds": "3x300",
    "ray_cluster_plan_overdue_pools": "0x300",
    "ray_cluster_plan_infeasible": "0x300",
    "ray_cluster_plan_actions_total": "0+0.1x300",
    "ray_cluster_plan_failures_total": "0x300",
    "ray_cluster_plan_rollbacks_total": "0x100 1x200",
    'ray_cluster_plan_replicas{pool="sd",kind="planned"}': "1x60 2x60 1x60 2x120",
    'ray_cluster_ready_replicas{model="sd"}': "2x100 1x200",
    'ray_cluster_cascade_images_total{cascade="b",reason="no_time"}': "0+1x300",
    'ray_cluster_cascade_images_total{cascade="b",reason="confidence"}': "0+20x300",
}
FLAPPING = " ".join(["1", "2"] * 150)
CASES = [
    ("ControllerSilent", {"ray_cluster_plan_age_seconds": "0+60x300"}, 13, 9),
    ("ControllerSilent", {"ray_cluster_plan_age_seconds": "_x300"}, 6, 4),
    ("PlanNotApplied", {"ray_cluster_plan_overdue_pools": "1x300"}, 6, 4),
    ("PlanRolledBack", {"ray_cluster_plan_rollbacks_total": "0x60 1x60 2x180"}, 125, 119),
    ("PlanFails", {"ray_cluster_plan_failures_total": "0+1x300"}, 18, 14),
    (
        "PoolFlaps",
        {'ray_cluster_plan_replicas{pool="sd",kind="planned"}': FLAPPING},
        100,
        20,
    ),
    ("DemandInfeasible", {"ray_cluster_plan_infeasible": "1x300"}, 31, 29),
    ("NoReplica", {'ray_cluster_ready_replicas{model="sd"}': "2x60 0x300"}, 64, 61),
    (
        "CascadeUnfinished",
        {
            'ray_cluster_cascade_images_total{cascade="a",reason="no_time"}': "0+2x300",
            'ray_cluster_cascade_images_total{cascade="a",reason="confidence"}': "0+9x300",
        },
        12,
        4,
    ),
]


def firing(folder: Path, series: Mapping[str, str], at_min: int) -> set[str]:
    """Names of the alerts that fire, of those that `CASES` has."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(alert_rules()), encoding="utf-8")
    given = [{"series": one, "values": values} for one, values in series.items()]
    # none is expected, so promtool names all that there are
    asked = [
        {"eval_time": f"{at_min}m", "alertname": f"RayCluster{name}"}
        for name in sorted({case[0] for case in CASES})
    ]
    case = {"interval": "1m", "input_series": given, "alert_rule_test": asked}
    document = {"rule_files": ["rules.yaml"], "tests": [case]}
    (folder / "test.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(folder / "test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    found = set(re.findall(r'alertname="RayCluster(\w+)"', done.stdout + done.stderr))
    assert (done.returncode == 0) == (not found), done.stderr
    return found


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (prometheus) is missing")
@pytest.mark.parametrize(("name", "changed", "fires_min", "silent_min"), CASES)
def test_an_alert_fires_on_what_it_is_for(
    tmp_path: Path, name: str, changed: dict[str, str], fires_min: int, silent_min: int
) -> None:
    series = {**QUIET, **changed}
    assert firing(tmp_path, series, silent_min) == set()
    assert firing(tmp_path, series, fires_min) == {name}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (prometheus) is missing")
def test_a_controller_that_works_wakes_nobody(tmp_path: Path) -> None:
    assert firing(tmp_path, QUIET, 250) == set()
    # nor does a service without one
    assert firing(tmp_path, {"up": "1x300"}, 250) == set()
