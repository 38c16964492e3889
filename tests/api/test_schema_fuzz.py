"""Whatever the OpenAPI schema allows or forbids is answered as it says, and nothing is left."""

from __future__ import annotations

import logging
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ray_cluster.config.loading import ClusterConfig
from tests.api.fuzzing import CONFIG, FuzzedService, fuzzed_service, own_bytes
from tests.api.wild_calls import POSTED

logger = logging.getLogger(__name__)

MAX_GROWTH_MIB = 4.0


@pytest.fixture(autouse=True)
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for seconds makes a 503, rightly; that is not looked for here."""
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._TURN_S", 20.0)


def run(service: FuzzedService, count: int, *, derandomize: bool) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=derandomize,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    # in nine of ten calls, names and images of what there is are put in
    @given(service.cases(), st.integers(0, 9), st.integers(0, 1000))
    def call(case: Any, chance: int, pick: int) -> None:
        service.call(case, pick + 1 if chance else 0)

    call()


def check_share(service: FuzzedService) -> tuple[int, float]:
    total: Counter[int] = Counter()
    for label, statuses in sorted(service.statuses.items()):
        logger.info("%s: %s", label, dict(sorted(statuses.items())))
        total.update(statuses)
    count = total.total()
    share = sum(n for status, n in total.items() if status < 300) / count
    logger.info("%d calls, %.0f %% of them 2xx", count, 100 * share)
    return count, share


def test_calls_by_the_schema_are_answered_by_the_schema(tmp_path: Path) -> None:
    with fuzzed_service(tmp_path) as service:
        run(service, 220, derandomize=True)
        service.settle()
        _, share = check_share(service)
        assert share >= 0.3
        # the others' successes are of values that are drawn; these are of images put in
        for name in ("edits", "variations"):
            assert service.statuses[f"POST /v1/images/{name}"][200], service.statuses


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_calls_by_the_schema_leave_nothing_behind(tmp_path: Path) -> None:
    with fuzzed_service(tmp_path) as service:
        tracemalloc.start()
        try:
            run(service, 300, derandomize=False)
            service.settle()
            before = own_bytes()
            assert before > 0
            run(service, 2200, derandomize=False)
            service.settle()
            grown_mib = (own_bytes() - before) / 2**20
        finally:
            tracemalloc.stop()
        count, share = check_share(service)
        logger.info("grown by %.2f MiB over the last 2200", grown_mib)
        assert count >= 2000
        assert share >= 0.3
        for label, statuses in service.statuses.items():
            assert any(status < 300 for status in statuses), (label, statuses)
        assert {f"POST {path}" for path in POSTED} <= service.statuses.keys()
        assert len(service.statuses) == 27
        assert grown_mib < MAX_GROWTH_MIB


def test_the_schema_tells_the_bounds_of_this_service(tmp_path: Path) -> None:
    def field(config: ClusterConfig, name: str) -> dict[str, Any]:
        with fuzzed_service(tmp_path) as service:
            operation = service.app.openapi()["paths"]["/v1/jobs"]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        found: list[dict[str, Any]] = [one["properties"][name] for one in body["anyOf"]]
        # of images from text, and of edits
        assert found[0] == found[1]
        return next(iter(found[0].get("anyOf", found)))

    assert field(CONFIG, "n")["maximum"] == 3
    assert field(CONFIG, "prompt")["maxLength"] == 60
    assert field(CONFIG, "negative_prompt")["maxLength"] == 60
    assert field(CONFIG, "num_inference_steps")["maximum"] == 50
    assert field(CONFIG, "partial_images")["maximum"] == 3
