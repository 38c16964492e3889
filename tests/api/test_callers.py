"""Whose calls are counted together."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from ray_cluster.api.access.auth import Caller, caller_of, owner_of


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("10.1.2.3", "address 10.1.2.3"),
        # one client has a whole network of 64 bits
        ("2001:db8:1:2:3:4:5:6", "address 2001:db8:1:2::/64"),
        ("2001:db8:1:2::9%eth0", "address 2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "address ::ffff:10.1.2.3"),
        ("a socket", "address a socket"),
    ],
)
def test_without_keys_an_address_is_a_client(address: str, caller: str) -> None:
    assert caller_of(Request({"type": "http", "client": (address, 9), "headers": []})) == caller


def test_who_has_no_address_is_a_client_too() -> None:
    assert caller_of(Request({"type": "http", "client": None, "headers": []})) == "address "


def test_calls_and_jobs_of_a_client_take_one_share() -> None:
    request = Request({"type": "http", "client": ("10.1.2.3", 9), "headers": []})
    request.state.caller = Caller("shop.eu", ("use",))
    assert caller_of(request) == owner_of(request)
