"""The dispatcher as its controller sees it: what there is to observe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.observing import InForce
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.control import Observation
from ray_cluster.protocol.leases import Registration


class ControlService:
    """Answers the controller.

    Implements :class:`~ray_cluster.protocol.control.ControlCalls`.

    Args:
        wall_clock: Unix time in seconds.
    """

    def __init__(self, dispatch: DispatchService, wall_clock: Callable[[], float]) -> None:
        self._dispatch = dispatch
        self._wall_clock = wall_clock
        self._started_s = wall_clock()
        self._settings: Settings | None = None
        # the last registration of each pool's workers
        self._known: dict[str, Registration] = {}

    def apply(self, settings: Settings) -> None:
        """Plan within other settings from now on."""
        self._settings = settings

    def remember(self, workers: Iterable[Registration]) -> None:
        """Know the workers of an earlier dispatcher, until others register."""
        for one in workers:
            self._known.setdefault(one.pool, one)

    def note_worker(self, registration: Registration) -> None:
        """Know a worker that has registered."""
        self._known[registration.pool] = registration

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Return the state of the cell; see :class:`ControlCalls`."""
        if self._settings is None:
            raise DispatcherUnavailable("the dispatcher has no settings yet; it is starting")
        in_force = InForce(self._settings, self._started_s)
        return self._dispatch.observe(in_force, self._known, cursors, self._wall_clock())
