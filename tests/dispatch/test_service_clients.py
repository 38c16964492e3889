"""The dispatch service in virtual time: clients that submit, wait, and go away."""

from __future__ import annotations

import asyncio

import pytest

from ray_cluster.protocol.calling import sizes
from ray_cluster.requests import Failure
from tests.dispatch.virtual_service import lease_one, make_service, now
from tests.fakes import finished, image_request, poll_of, run_virtually


def test_one_call_submits_and_waits() -> None:
    async def main() -> None:
        service = await make_service("r")
        client = asyncio.create_task(service.submit([image_request("a")], "", 3.0))
        lease = await lease_one(service)
        await asyncio.sleep(1.0)
        await service.report("r", [finished(lease)])
        submission = await client
        assert submission.offer.accepted
        assert submission.outcomes.keys() == {"a"}
        assert now() == pytest.approx(1.0)
        refused = await service.submit([image_request("b", model="what")], "", 3.0)
        assert (refused.offer.reason, refused.outcomes) == ("unknown_model", {})
        assert now() == pytest.approx(1.0)
        assert (await service.submit([image_request("c")], "", 2.0)).outcomes == {}
        assert now() == pytest.approx(3.0)
        await service.close()

    run_virtually(main())


def test_a_client_hears_of_each_image_as_it_is_done() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("a"), image_request("b")])
        leases = (await service.poll(poll_of())).leases
        for lease in leases:
            client = asyncio.create_task(service.wait(["a", "b"], 10.0))
            await asyncio.sleep(0.2)
            await service.report("r", [finished(lease)])
            if lease is leases[0]:
                assert (await client).keys() == {"a"}
            else:
                # what was handed out before is not known any more
                assert isinstance((await client)["a"], Failure)
        await service.close()

    run_virtually(main())


def test_images_that_are_large_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one message they would not arrive, and be dropped as fetched."""
    monkeypatch.setattr(sizes, "_MOST_BYTES", 1)

    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("a"), image_request("b")])
        leases = (await service.poll(poll_of())).leases
        await service.report("r", [finished(lease) for lease in leases])
        first = await service.wait(["a", "b", "c"], 10.0)
        assert first.keys() == {"a", "c"}
        assert (await service.wait(["b"], 10.0)).keys() == {"b"}
        assert now() == 0.0
        await service.close()

    run_virtually(main())


def test_waiting_returns_empty_after_its_time_and_unknown_ids_as_lost() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("a")])
        assert await service.wait(["a"], 0.5) == {}
        assert now() == pytest.approx(0.5)
        assert await service.wait(["a"], 1000.0) == {}
        assert now() == pytest.approx(5.5)
        (outcome,) = (await service.wait(["nobody"], 1.0)).values()
        assert isinstance(outcome, Failure)
        assert outcome.kind == "lost"
        assert await service.wait([], 1.0) == {}
        await service.close()

    run_virtually(main())


def test_a_client_that_waits_is_kept_and_one_that_went_away_is_not() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("waits"), image_request("gone")])
        while now() < 40.0:
            assert await service.wait(["waits"], 3.0) == {}
        assert (await service.snapshot()).num_waiting == 1
        assert (await service.snapshot()).totals["aborted"] == 1
        await service.close()

    run_virtually(main())


def test_outcomes_that_nobody_fetches_are_forgotten() -> None:
    async def main() -> None:
        service = await make_service("r")
        await service.offer([image_request("a")])
        await service.report("r", [finished(await lease_one(service))])
        assert (await service.offer([image_request("a")])).reason == "duplicate_id"
        await asyncio.sleep(17.0)
        assert (await service.offer([image_request("a")])).accepted
        await service.close()

    run_virtually(main())
