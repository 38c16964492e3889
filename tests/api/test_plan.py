"""The controller's plan over HTTP."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx

from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.protocol.controller import (
    HeldPool,
    PlannedPool,
    PlanReport,
    RoundRecord,
    ServiceDemand,
)
from tests.api.checks import check_error
from tests.fakes import FakeDispatcherClient

PLAN = "/v1/plan"


def a_round(at_s: float, *actions: str) -> RoundRecord:
    pool = PlannedPool("sd", 1, 1, 2, 4, 1.5, 0.8, 12.0, "the load")
    auto = CascadePlan("auto", 0.4, 0.3, idle_threshold=0.75)
    cascades = auto, CascadePlan("other", math.inf, 1.0), CascadePlan("before", 0.5, 0.5)
    demand = (ServiceDemand("sd", 1.25, 3),)
    return RoundRecord(at_s, 7, 0.1, "applied", (pool,), cascades, demand, actions)


async def test_a_service_without_a_controller_has_no_plan(http: httpx.AsyncClient) -> None:
    for method, path in (("GET", PLAN), ("POST", f"{PLAN}/pause"), ("POST", f"{PLAN}/resume")):
        reply = await http.request(method, path)
        check_error(reply, 404, code="no_controller")
        assert "control.enabled" in reply.json()["error"]["message"]


async def test_a_plan_says_what_why_and_what_was_before(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    first, last = a_round(1.0, "sd: 1 to 2 replicas"), a_round(2.0)
    seats = {"head": {f"img-{32 * '1'}": (2, 3)}}
    fake.plan = PlanReport(True, heard_s=2.0, latest=last, history=(first,), seats=seats)
    found = (await http.get(PLAN)).json()
    assert found["object"] == "plan"
    assert found["heard_at"] == 2.0
    assert found["latest"]["pools"] == [
        {
            "pool": "sd",
            "num_before": 1,
            "num_ready": 1,
            "num_planned": 2,
            "max_batch": 4,
            "load_per_s": 1.5,
            "replica_per_s": 0.8,
            "load_s": 12.0,
            "reason": "the load",
        }
    ]
    assert found["latest"]["demand"] == [{"service": "sd", "per_s": 1.25, "num_waiting": 3}]
    # JSON has no infinity
    planned = found["latest"]["cascades"]
    assert [one["threshold"] for one in planned] == [0.4, None, 0.5]
    assert [one["idle_threshold"] for one in planned] == [0.75, None, 0.5]
    assert [one["actions"] for one in found["history"]] == [["sd: 1 to 2 replicas"]]
    # whoever knows a whole id can fetch its image
    assert found["groups"] == [{"replica": "head", "ranks": {"img-11111111": [2, 3]}}]


async def test_a_rollback_is_shown_and_until_when_its_pool_is_held(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    late = replace(a_round(2.0), rollbacks=("sd: back",), held=(HeldPool("sd", 1, 182.0, 3),))
    fake.plan = PlanReport(True, heard_s=2.0, latest=late)
    found = (await http.get(PLAN)).json()["latest"]
    assert found["rollbacks"] == ["sd: back"]
    assert found["held"] == [{"pool": "sd", "num_replicas": 1, "until": 182.0, "num_failures": 3}]


async def test_planning_is_paused_and_resumed(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.plan = PlanReport(True)
    assert (await http.get(PLAN)).json()["state"] == "starting"
    fake.plan = PlanReport(True, heard_s=1e12, latest=a_round(1e12))
    assert (await http.get(PLAN)).json()["state"] == "applied"
    assert (await http.post(f"{PLAN}/pause")).json()["state"] == "paused"
    assert fake.plan.mode == "paused"
    assert (await http.post(f"{PLAN}/resume")).json()["state"] == "applied"
    fake.plan = PlanReport(True, heard_s=0.0, silent_s=20.0, latest=a_round(0.0))
    assert (await http.get(PLAN)).json()["state"] == "silent"
