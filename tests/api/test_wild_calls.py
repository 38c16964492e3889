"""No call, however strange, is answered with a 5xx, raises, or leaves anything behind."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest

from ray_cluster.api.output.resource_schemas import ErrorResponse
from tests.api.fuzzing import FuzzedService, fuzzed_service
from tests.api.wild_calls import WildCall, WildCalls, WildReply

logger = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for seconds makes a 503, rightly; that is not looked for here."""
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._TURN_S", 20.0)


def check(call: WildCall, reply: WildReply) -> None:
    assert reply.status < 500, reply.body
    if call.leaves and reply.status in {0, 499}:
        return
    assert reply.status >= 200
    if call.is_preflight and "x-request-id" not in reply.headers:
        return
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,100}", reply.headers["x-request-id"])
    if reply.status >= 400:
        ErrorResponse.model_validate_json(reply.body, strict=True, extra="forbid")
        is_retryable = reply.status == 429
        assert ("retry-after" in reply.headers) is is_retryable
    elif reply.headers.get("content-type") == "application/json":
        json.loads(reply.body)


def make(service: FuzzedService, count: int, seed: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    calls = WildCalls(seed)
    for _ in range(count):
        call = calls.next(service.job_ids, service.file_ids)
        try:
            reply = service.wild(call)
            check(call, reply)
        except Exception as error:
            error.add_note(repr(call)[:3000])
            raise
        statuses[reply.status] += 1
    service.settle()
    logger.info("%d calls: %s", count, dict(sorted(statuses.items())))
    return statuses


def test_hundreds_of_strange_calls_are_answered(tmp_path: Path) -> None:
    with fuzzed_service(tmp_path) as service:
        statuses = make(service, 500, seed=7)
    # neither do all fail, nor does nothing
    assert statuses[200] + statuses[202] > 50
    assert statuses.keys() >= {200, 202, 400, 404, 405, 415}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_strange_calls_are_answered(tmp_path: Path, seed: int) -> None:
    with fuzzed_service(tmp_path) as service:
        statuses = make(service, 10_000, seed)
    # 304 and 422 need the very id or key of an earlier call, and have tests of their own
    assert statuses.keys() >= {200, 202, 400, 404, 405, 413, 415, 431}
