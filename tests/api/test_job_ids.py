"""What is no job's id is never looked for: not every store could."""

from __future__ import annotations

import httpx
import pytest

from tests.api.checks import check_error
from tests.fakes import FakeDispatcherClient

NO_IDS = ["%00", "%ff%fe", "job-", "job-%00", "job-" + "g" * 32, "job-" + "0" * 33, "a" * 5000]


@pytest.mark.parametrize("job_id", NO_IDS)
@pytest.mark.parametrize(("method", "end"), [("GET", ""), ("DELETE", ""), ("GET", "/events")])
async def test_it_is_not_found_though_nobody_can_be_asked(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, method: str, end: str, job_id: str
) -> None:
    fake.down = True
    reply = await http.request(method, f"/v1/jobs/{job_id}{end}")
    check_error(reply, 404, code="job_not_found", param="id")
    # one that could be an id is asked for
    reply = await http.request(method, f"/v1/jobs/job-{'0' * 32}{end}")
    check_error(reply, 503, code="dispatcher_unavailable")


async def test_there_is_nothing_behind_it(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.down = True
    check_error(await http.get("/v1/jobs?after=%00"), 404, param="after")


async def test_a_call_has_one_idempotency_key(http: httpx.AsyncClient) -> None:
    twice = [("Idempotency-Key", "one"), ("Idempotency-Key", "two")]
    reply = await http.post("/v1/jobs", json={"prompt": "a red circle"}, headers=twice)
    check_error(reply, 400, param="Idempotency-Key")
