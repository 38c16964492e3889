"""Settings of LoRAs: what one client may have of them, and which hosts may be private."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ray_cluster.config.sections.loras import LorasConfig


@pytest.mark.parametrize(
    ("share", "most", "expected"),
    [(0.25, 10_000, 2_500), (0.25, 100, 25), (0.25, 3, 1), (0.25, 1, 1), (0.25, 0, 0), (1, 7, 7)],
)
def test_a_client_has_a_share_and_at_least_one(share: float, most: int, expected: int) -> None:
    assert LorasConfig(client_share=share).share_of(most) == expected


@pytest.mark.parametrize(
    "entry", ["models.internal", "a_b", "10.1.2.3", "10.0.0.0/8", "fd00::/8", "::1"]
)
def test_private_hosts_are_names_and_networks(entry: str) -> None:
    assert LorasConfig(private_hosts=(entry,)).private_hosts == (entry,)


@pytest.mark.parametrize(
    "entry",
    ["", "http://host", "host:80", "*.internal", "me@host", "host/loras", "10.0.0.0/33", "a" * 254],
)
def test_what_is_neither_is_refused(entry: str) -> None:
    with pytest.raises(ValidationError, match=r"neither the name of a host nor a network"):
        LorasConfig(private_hosts=(entry,))
