"""Which addresses of a network are public, and which others may be reached all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

# what is routed between networks; and IPv4 behind a translator, in its last four bytes (RFC 6052)
_UNICAST, _NAT64 = IPv6Network("2000::/3"), IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, through every form that holds another.

    Private, shared, loopback, link-local (with the metadata of clouds), multicast, unspecified and
    reserved ones are not.
    """
    found = plain_address(address)
    if isinstance(found, IPv4Address):
        return found.is_global and not found.is_multicast
    return found in _UNICAST and found.is_global and found.teredo is None


def plain_address(address: str) -> IPv4Address | IPv6Address:
    """Return an address, or the IPv4 address that an IPv6 one stands for; ValueError for none."""
    found = ip_address(address)
    if isinstance(found, IPv4Address):
        return found
    if found in _NAT64:
        return IPv4Address(int(found) & 0xFFFFFFFF)
    return found.ipv4_mapped or found.sixtofour or found


def is_address(host: str) -> bool:
    """Whether a host is an address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PrivateHosts:
    """What may be reached though it is not public.

    Attributes:
        entries: names of hosts, addresses and networks such as ``10.0.0.0/8``.
    """

    entries: Sequence[str] = ()

    def allow(self, host: str, address: str) -> bool:
        """Whether a host of that name may be reached at an address that is not public."""
        found = plain_address(address)
        for entry in self.entries:
            try:
                if found in ip_network(entry, strict=False):
                    return True
            except ValueError:
                if entry.lower() == host.lower().rstrip("."):
                    return True
        return False
