"""What a dispatcher learns of the requests of its former life: how far their states are."""

from __future__ import annotations

from collections.abc import Mapping

from ray_cluster.dispatch.ledger import Ledger


def note_kept(ledger: Ledger, steps_by_id: Mapping[str, int]) -> None:
    """Take in how many steps of requests are in the state store.

    Only of those that nobody has had since: of others a replica has told, or will.
    """
    for request_id, steps_done in steps_by_id.items():
        record = ledger.get(request_id)
        if record is None or record.num_leases or record.holder is not None:
            continue
        ledger.queue.remove(request_id)
        record.kept_steps = steps_done
        record.make_progress(steps_done)
        ledger.queue.add(record.view)
