"""A plan moves within what settings allow, and replicas hear of it only if it is about them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.dispatch.planned import document_version, within
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.protocol.settings import worker_settings
from tests.dispatch.cascade_core import cascade, deferred, make_core, routed, score_of


def document(**changes: Any) -> Settings:
    pools = [{"name": name, "model": "shapes-sd", "max_batch": 6} for name in ("light", "heavy")]
    return settings_of(
        ClusterConfig.model_validate(
            {
                "pools": pools,
                "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
                "cascades": [cascade(**changes)],
            }
        )
    )


def plan(
    caps: dict[str, int],
    threshold: float = 0.3,
    rate: float = 0.2,
    idle: float | None = None,
) -> PlannedSettings:
    cascades = (CascadePlan("auto", threshold, deferral_rate=rate, idle_threshold=idle),)
    return PlannedSettings(3, tuple(caps.items()), cascades)


def test_caps_are_lowered_and_never_raised() -> None:
    settings = document()
    found = within(settings, plan({"light": 2, "heavy": 99, "nobody's": 1}))
    assert [one.max_batch for one in found.pools] == [2, 6]
    worker = worker_settings(found, "light")
    assert worker is not None
    assert (worker.max_batch, worker.version) == (2, found.version)
    # a pool of which the plan knows no cap keeps the document's
    assert within(settings, plan({"light": 0})).pools == settings.pools


def test_a_threshold_is_lowered_and_never_raised() -> None:
    settings = document(threshold=0.6)
    assert within(settings, plan({}, 0.3)).cascades[0].threshold == 0.3
    assert within(settings, plan({}, math.inf)).cascades[0].threshold == 0.6
    by_rate = document(threshold=None, deferral_rate=0.5)
    assert within(by_rate, plan({}, rate=0.2)).cascades[0].deferral_rate == 0.2
    assert within(by_rate, plan({}, rate=0.9)).cascades[0].deferral_rate == 0.5


def test_only_caps_are_news_for_replicas() -> None:
    settings = document()
    assert within(settings, None) is settings
    assert within(settings, plan({"light": 6}, 0.1)).version == settings.version
    few, fewer = (within(settings, plan({"light": cap})) for cap in (4, 2))
    assert len({settings.version, few.version, fewer.version}) == 3
    assert {document_version(one.version) for one in (settings, few)} == {settings.version}
    # another plan with the same caps says nothing new
    assert within(settings, plan({"light": 4}, 0.5)).version == few.version


def test_a_cascade_decides_by_the_planned_threshold_and_forgets_no_confidence() -> None:
    core = make_core()
    settings = document(threshold=0.6)
    deferred(core, routed("a"))
    core.apply(within(settings, plan({}, 0.2)), 2.0)
    (view,) = core.snapshot(2.0).cascades
    assert (view.threshold, view.num_scored) == (0.2, 1)
    # between the two thresholds: published as it is
    (outcome,) = score_of(core, routed("b"), 0.4)
    assert outcome.cascade is not None
    assert outcome.cascade.stage == "light"


def test_idle_models_get_no_more_than_the_settings_allow() -> None:
    settings, planned = document(threshold=0.6), plan({}, 0.2, idle=0.5)
    assert within(settings, planned).cascades[0].idle_threshold == 0.5
    assert within(settings, plan({}, 0.2, idle=math.inf)).cascades[0].idle_threshold == 0.6
    # the document's own have none, and neither has a plan of before
    assert settings.cascades[0].idle_threshold is None
    assert within(settings, plan({}, 0.2)).cascades[0].idle_threshold is None


@pytest.mark.parametrize("given", [{"threshold": 0.6}, {"threshold": None, "deferral_rate": 0.6}])
def test_an_idle_heavy_model_takes_what_a_plan_would_not_defer(given: dict[str, Any]) -> None:
    core = make_core()
    # confidences are equally likely, so that rates and thresholds are about the same
    core.apply(within(document(**given), plan({}, 0.2, rate=0.2, idle=math.inf)), 0.0)
    assert score_of(core, routed("taken"), 0.5) == ()
    (sure,) = score_of(core, routed("sure"), 0.7)
    assert sure.cascade is not None
    assert (sure.cascade.stage, sure.cascade.reason) == ("light", "confident")
    for number in range(8):
        score_of(core, routed(f"more-{number}"), 0.1)
    (left,) = score_of(core, routed("left", slo_s=8.0), 0.5)
    assert left.cascade is not None
    assert (left.cascade.stage, left.cascade.reason) == ("light", "no_time")
    # eight of them are ahead, which leaves it a part of the rise
    assert left.cascade.threshold is not None
    assert 0.2 < left.cascade.threshold < 0.5
