"""``ray-cluster plan history --plot``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from ray_cluster.api.routes.plan import PlanResponse, plan_reply
from ray_cluster.cli.simulation.plan_plot import draw_history, history_plot
from ray_cluster.errors import ConfigError
from ray_cluster.protocol.controller import PlanReport
from tests.api.test_plan import a_round

FIRST = a_round(1e9, "sd: 1 to 2 replicas")
NEXT = replace(
    a_round(1e9 + 20, "sd: 2 to 5 replicas"),
    pools=tuple(replace(one, num_planned=5) for one in FIRST.pools),
)
LAST = a_round(1e9 + 30)


def plan(*history: object) -> PlanResponse:
    report = PlanReport(True, heard_s=1e9 + 30, latest=LAST, history=history)  # type: ignore[arg-type]
    return plan_reply(report, 1e9 + 31)


def test_a_value_stays_until_the_next_round() -> None:
    found = plan(FIRST, NEXT)
    assert found.latest is not None
    drawn = history_plot([*reversed(found.history), found.latest])
    assert set(drawn.panels) >= {"replicas planned", "replicas ready", "called for, images/s"}
    line = drawn.panels["replicas planned"]["sd"]
    assert list(zip(line.x, line.y, strict=True)) == [
        *((0, 2), (20, 2), (20, 5)),
        *((30, 5), (30, 2)),
    ]


def test_the_history_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plans.png"
    draw_history(plan(FIRST, NEXT), 20, path)
    with Image.open(path) as image:
        assert image.width > 500


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "plans.svg", tmp_path / "no" / "plans.png"):
        with pytest.raises(ConfigError, match="existing folder"):
            draw_history(plan(FIRST), 20, path)
    with pytest.raises(ConfigError, match="no plan was made"):
        draw_history(plan_reply(PlanReport(True), 0.0), 20, tmp_path / "plans.png")
