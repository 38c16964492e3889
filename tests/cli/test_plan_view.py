"""``ray-cluster plan show``, ``history`` and ``explain``, on what a service might answer."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ray_cluster.api.routes.plan import PlanResponse, plan_reply
from ray_cluster.cli.simulation.plan_view import explain_plan, list_rounds, show_plan
from ray_cluster.errors import ConfigError
from ray_cluster.protocol.controller import CascadeInForce, HeldPool, PlanReport
from tests.api.test_plan import a_round
from tests.cli.conftest import Cli

FIRST = a_round(1e9, "sd: 1 to 2 replicas")
LAST = replace(a_round(1e9 + 5), version=8, infeasible="sd lacks capacity for 2/s")
PLAN = plan_reply(PlanReport(True, heard_s=1e9 + 5, latest=LAST, history=(FIRST,)), 1e9 + 6)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_is_shown_a_line_per_pool(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(PLAN, as_json=False)
    text = said(capsys)
    assert "plans are applied" in text
    assert "sd 2 1 4 1.5 0.8 the load" in text
    assert "the demand cannot be met: sd lacks capacity for 2/s" in text
    show_plan(PLAN, as_json=True)
    assert PlanResponse.model_validate_json(capsys.readouterr().out) == PLAN


def test_what_cascades_really_do_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cascades = (
        CascadeInForce("auto", 0.8, 0.25, {"deferred": 3, "confident": 9}),
        CascadeInForce("other", math.nextafter(1, 2), None, {}),
    )
    report = PlanReport(True, heard_s=1e9, latest=FIRST, cascades=cascades)
    show_plan(plan_reply(report, 1e9), as_json=False)
    text = said(capsys)
    assert (
        "auto: now confidences below 0.8 are made anew, 25% of late; so far 9 confident, 3 defe"
        in text
    )
    assert "other: now all images are made anew, no confidence is known; so far no image" in text


def test_a_rollback_is_shown_with_the_end_of_its_hold(capsys: pytest.CaptureFixture[str]) -> None:
    late = replace(FIRST, rollbacks=("sd: back",), held=(HeldPool("sd", 1, 1e9 + 90, 2),))
    show_plan(plan_reply(PlanReport(True, heard_s=1e9, latest=late), 1e9), as_json=False)
    text = said(capsys)
    assert "rolled back: sd: back" in text
    assert "sd is held at 1 replica until 2001-09-" in text
    assert "(rollbacks in a row: 2)" in text


def test_history_lists_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    list_rounds(PLAN, 20, as_json=False)
    assert "7 applied sd: 1 to 2 replicas" in said(capsys)
    failed = replace(FIRST, failures=("sd: the head does not answer",))
    list_rounds(plan_reply(PlanReport(True, history=(failed,)), 0.0), 20, as_json=False)
    assert "7 applied in part sd: 1 to 2 replicas; failed, tried again: sd:" in said(capsys)
    list_rounds(plan_reply(PlanReport(True), 0.0), 20, as_json=False)
    assert "no plan has changed anything yet" in capsys.readouterr().err


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    explain_plan(PLAN, 7)
    text = said(capsys)
    assert "sd: 1.25 images/s are called for, 3 wait" in text
    assert "sd: 2 replicas instead of 1, 1 ready, because of the load" in text
    assert "a started one serves after some 12 s" in text
    assert "auto: defers confidences below 0.4, planned as 30 % of images; while" in text
    assert "while the heavy model stands idle, confidences below 0.75" in text
    assert "other: defers what the settings allow, planned as 100 % of images before:" in text
    assert "changes: sd: 1 to 2 replicas" in text
    explain_plan(PLAN, None)
    assert "plan 8, round of" in said(capsys)


def test_each_round_of_a_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    healed = replace(FIRST, at_s=1e9 + 60, actions=("sd: 4 to 2 replicas",))
    report = PlanReport(True, latest=LAST, history=(FIRST, healed))
    explain_plan(plan_reply(report, 1e9 + 61), 7)
    text = said(capsys)
    assert text.index("changes: sd: 4 to 2 replicas") < text.index("changes: sd: 1 to 2 replicas")


def test_a_version_that_changed_nothing_is_not_known() -> None:
    with pytest.raises(ConfigError, match="no plan of version 3; those that changed: 7"):
        explain_plan(PLAN, 3)


def test_a_controller_that_starts_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (lambda one: show_plan(one, as_json=False), lambda one: explain_plan(one, None)):
        show(plan_reply(PlanReport(True), 0.0))
        assert "it has made no plan yet" in said(capsys)


@pytest.mark.parametrize(
    ("mode", "words"), [("applied", "resumed"), ("dry_run", "control.dry_run still holds")]
)
def test_resuming_says_whether_plans_are_applied_then(cli: Cli, mode: Any, words: str) -> None:
    report = PlanReport(True, heard_s=1e9, latest=replace(LAST, mode="paused"), mode=mode)
    reply = plan_reply(report, 1e9).model_dump_json().encode()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = cli("plan", "resume", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.exit_code == 0, result.output
    assert words in result.stdout
