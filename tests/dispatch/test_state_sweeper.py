"""What the dispatcher deletes from the state store, and what it leaves there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import Failure
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from ray_cluster.storage.state_format import StateHeader, header_text, wrapped
from tests.fakes import completed, image_request
from tests.jobs.jobs_cell import until

DAY_S = 86400.0


def put(folder: Path, name: str, age_s: float) -> None:
    (folder / name).write_bytes(b"state")
    changed_s = time.time() - age_s
    os.utime(folder / name, (changed_s, changed_s))


async def until_there_are(folder: Path, names: set[str]) -> None:
    await until(lambda: {path.name for path in folder.iterdir()} == names)


def left_states(
    folder: Path, note_stored: Callable[[Mapping[str, StateHeader]], None] = dict
) -> StateSweeper:
    return StateSweeper(
        BlobStore(str(folder)),
        knows=lambda key: key.startswith("open"),
        note_stored=note_stored,
        wall_clock=time.time,
    )


def state_bytes(steps_done: int) -> bytes:
    request = image_request("a", prompt="x" * 9000)
    text = header_text(StateHeader(request, steps_done, model_digest="d"))
    return wrapped(save({"latents": np.zeros(100_000)}, metadata={"state": text}))


async def test_what_is_done_of_open_requests_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "open-1.state").write_bytes(state_bytes(7))
    (tmp_path / "open-2.state").write_bytes(state_bytes(123)[:100_000])
    (tmp_path / "open-3.state").write_bytes(b"damaged")
    (tmp_path / "open-4.state").write_bytes(state_bytes(5)[:3000])
    (tmp_path / "open-5.state.0123456789abcdef.part").write_bytes(state_bytes(5))
    (tmp_path / "another.state").write_bytes(state_bytes(3))
    told: list[Mapping[str, StateHeader]] = []
    left = left_states(tmp_path, told.append)
    left.start()
    await until(lambda: bool(told))
    await left.close()
    (states,) = told
    found = {name: (one.step_index, one.model_digest) for name, one in states.items()}
    assert found == {"open-1": (7, "d"), "open-2": (123, "d")}


async def test_old_states_go_unless_their_request_is_open(tmp_path: Path) -> None:
    put(tmp_path, "young.state", DAY_S - 100)
    put(tmp_path, "old.state", DAY_S + 100)
    put(tmp_path, "open.state", 9 * DAY_S)
    put(tmp_path, "open.state.0123456789abcdef.part", 3600.0)
    put(tmp_path, "young.state.0123456789abcdef.part", 60.0)
    put(tmp_path, "somebody-elses.txt", 9 * DAY_S)
    left = left_states(tmp_path)
    left.start()
    stays = {"young.state", "open.state", "young.state.0123456789abcdef.part", "somebody-elses.txt"}
    await until_there_are(tmp_path, stays)
    await left.close()


@pytest.mark.parametrize(
    ("outcome", "is_deleted"),
    [
        (Failure("a", "aborted", "by its client", "queue"), True),
        (Failure("a", "aborted", "by its client", "replica"), True),
        (Failure("a", "lost", "too often", "replica"), True),
        # its replica deletes it
        (Failure("a", "error", "out of luck", "denoise"), False),
        (completed(image_request("a")), False),
    ],
)
async def test_what_no_replica_ends_is_deleted_at_once(
    tmp_path: Path, outcome: Outcome, is_deleted: bool
) -> None:
    put(tmp_path, "a.state", 0.0)
    put(tmp_path, "b.state", 0.0)
    left = left_states(tmp_path)
    left.start()
    left.on_outcome(outcome)
    left.on_outcome(Failure("b", "lost", "too often", "replica"))
    await until_there_are(tmp_path, set() if is_deleted else {"a.state"})
    await left.close()


async def test_a_store_that_fails_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_store: BlobStore) -> None:
        raise BlobStoreError("no list")

    monkeypatch.setattr(BlobStore, "entries", fail)
    put(tmp_path, "a.state", 0.0)
    left = left_states(tmp_path)
    left.start()
    left.on_outcome(Failure("a", "lost", "too often", "replica"))
    await until_there_are(tmp_path, set())
    assert "no list" in caplog.text
    await left.close()
