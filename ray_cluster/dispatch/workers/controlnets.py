"""The ControlNets of a cell: which there are, and whether anyone serves them.

No step of a ControlNet goes through the dispatcher: it tells replicas of models where ControlNets
are. A request whose ControlNet nobody serves waits here, not in a replica's place, as long as its
deadline allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.protocol.leases import Registration, lane_of
from ray_cluster.requests import Failure, ImageRequest

# seconds that the first replica of one is expected to take while none has been seen
_FIRST_LOAD_S = 10.0
# that a request waits at least, however near its deadline is
_LEAST_WAIT_S = 5.0


class ControlNets:
    """Knows the ControlNets of a cell; decides nothing.

    Args:
        replicas: all live workers.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._by_name: dict[str, ControlNetConfig] = {}
        self._load_s: dict[str, float] = {}

    def apply(self, controlnets: Sequence[ControlNetConfig]) -> None:
        """Know these from now on."""
        self._by_name = {one.name: one for one in controlnets}

    def note(self, registration: Registration) -> None:
        """Note a worker that has joined."""
        if registration.kind == "control":
            self._load_s[registration.model] = registration.load_s

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._by_name)

    @property
    def missing(self) -> tuple[str, ...]:
        """Those that nobody serves at present, though somebody should."""
        return tuple(name for name in self._by_name if self._is_missing(name))

    def _is_missing(self, name: str) -> bool:
        one = self._by_name.get(name)
        if one is None or not one.is_service:
            return False
        return not self._replicas.ids(lane_of("control", name))

    def holds_back(self, request: ImageRequest) -> bool:
        """Whether a request has to wait until somebody serves what it needs."""
        return any(True for _ in self._lacked(request))

    def _lacked(self, request: ImageRequest) -> Iterator[str]:
        for use in request.add_ons.controls:
            if use.name not in self._by_name or self._is_missing(use.name):
                yield use.name

    def failure(self, record: RequestRecord, now_s: float) -> Failure | None:
        """Return how a request ends that waits for what is not to be had; None if it may be."""
        for name in self._lacked(record.request):
            if name not in self._by_name:
                message = f"the ControlNet {name!r} was removed"
            elif now_s >= self.gives_up_s(record):
                message = (
                    f"the ControlNet {name!r} has had no replica until the image was due; send "
                    "the call again when /readyz does not warn of it any more"
                )
            else:
                continue
            return Failure(record.view.request_id, "error", message, "control")
        return None

    def gives_up_s(self, record: RequestRecord) -> float:
        """Return the instant until which a request waits."""
        return max(record.deadline_s, record.since_s + _LEAST_WAIT_S)

    def wait_s(self, requests: Sequence[ImageRequest]) -> float:
        """Return the seconds that requests will probably wait for their ControlNets."""
        names = {name for request in requests for name in self._lacked(request)}
        return max((self._load_s.get(name, _FIRST_LOAD_S) for name in names), default=0.0)
