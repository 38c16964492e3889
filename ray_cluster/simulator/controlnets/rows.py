"""What one simulated replica has asked ControlNets on other devices for, row by row.

As the live engine does it (:mod:`ray_cluster.engine.controlnets.source`): a row asks once for each
step; the step goes on without a row whose answer is late, and that row sits out until it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ray_cluster.policies.leasing.controlnet_peers import patience_s
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.controlnets.services import Ask, ControlNetServices

# of the mean of what answers take, as live replicas have it
_NEWEST_SHARE = 0.2


class ControlNetRows:
    """The rows of a replica that wait for residuals, or have them.

    Args:
        services: who computes them.
        on_answer: called when one of them has arrived.
    """

    def __init__(self, services: ControlNetServices, on_answer: Callable[[], None]) -> None:
        self._services = services
        self._on_answer = on_answer
        self._asked: dict[str, tuple[Ask, ...]] = {}
        self._usual_s: dict[str, float] = {}

    @property
    def half_share(self) -> float:
        """The part of a step before residuals are needed."""
        return self._services.spec.way.half_share

    def is_ready(self, request_id: str) -> bool:
        """Whether nothing is outstanding that a row has waited for."""
        return all(ask.took_s is not None for ask in self._asked.get(request_id, ()))

    def ask(self, views: Iterable[RequestView]) -> None:
        """Ask for what the rows of a step need and have not been given yet."""
        for view in views:
            if view.controls and view.request_id not in self._asked:
                self._asked[view.request_id] = tuple(
                    self._services.ask(name, view, self._on_answer) for name in view.controls
                )

    def patience_s(self, views: Sequence[RequestView]) -> float:
        """Return the seconds after which a step goes on without the rows whose answer is late."""
        names = {name for view in views for name in view.controls}
        usual_s = max((self._usual_s.get(name, 0.0) for name in names), default=0.0)
        return patience_s(usual_s, all_wait=all(view.controls for view in views))

    def took_step(self, request_id: str) -> None:
        """A row has taken its step: what was asked for has served."""
        for ask in self._asked.pop(request_id, ()):
            assert ask.took_s is not None
            usual_s = self._usual_s.get(ask.name, ask.took_s)
            self._usual_s[ask.name] = usual_s + _NEWEST_SHARE * (ask.took_s - usual_s)

    def drop(self, view: RequestView) -> None:
        """A row has left."""
        for ask in self._asked.pop(view.request_id, ()):
            ask.is_dropped = True
        self._services.forget(view.request_id, view.controls)
