"""What stages leave in stores has names of its own, and only the last has the public one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster import requests
from ray_cluster.dispatch.stages import (
    Route,
    candidate_name,
    cascade_route,
    direct_route,
    image_name,
    private_names,
    single_route,
    stage_id,
    state_name,
)
from ray_cluster.storage.blob_store import BlobStore
from tests.fakes import image_request

REQUEST = image_request(f"img-{'0' * 31}a")
ID = REQUEST.request_id
CASCADE = cascade_route("l", "s", "h")


@pytest.mark.parametrize("route", [single_route("m"), direct_route("h")])
def test_a_request_with_one_stage_has_the_names_of_before(route: Route) -> None:
    assert stage_id(ID, 0) == ID
    assert state_name(ID, 0) == requests.state_name(ID)
    assert image_name(REQUEST, route, 0) == REQUEST.file_id
    assert private_names(ID, route) == (requests.state_name(ID),)


def test_only_the_last_stage_of_a_cascade_has_the_public_name() -> None:
    assert image_name(REQUEST, CASCADE, 2) == REQUEST.file_id
    assert image_name(REQUEST, CASCADE, 0) == candidate_name(ID, 0)
    assert not set(private_names(ID, CASCADE)) & set(REQUEST.file_ids)
    with pytest.raises(ValueError, match="stage 1 stores no image"):
        image_name(REQUEST, CASCADE, 1)


def test_stages_share_no_name_and_all_private_ones_are_listed() -> None:
    names = private_names(ID, CASCADE)
    assert len(set(names)) == len(names) == 3
    assert set(names) == {state_name(ID, 0), state_name(ID, 2), candidate_name(ID, 0)}
    assert len({stage_id(ID, index) for index in range(3)}) == 3


def test_stores_take_all_names(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    for name in private_names(ID, CASCADE):
        store.put(name, b"x")
    assert {blob.name for blob in store.entries()} == set(private_names(ID, CASCADE))
