"""``/v1/plan``: shows the controller's plan, and pauses the controller."""

from __future__ import annotations

from collections.abc import Callable

from ray_cluster.api.errors import ApiError, not_found
from ray_cluster.api.routes.plan_schema import PlanResponse, plan_reply
from ray_cluster.protocol.controller import PlanCalls, PlanReport


class PlanEndpoint:
    """The plan, for operators.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, client: PlanCalls, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock

    async def show(self) -> PlanResponse:
        """Show the plan: replicas, batch caps and thresholds, why, and what was changed before."""
        return self._reply(await self._client.plan_report())

    async def pause(self) -> PlanResponse:
        """Pause the controller: it plans and changes nothing, until it is resumed."""
        await self.show()
        return self._reply(await self._client.pause_plan(True))

    async def resume(self) -> PlanResponse:
        """Let the controller apply its plans again."""
        await self.show()
        return self._reply(await self._client.pause_plan(False))

    def _reply(self, report: PlanReport) -> PlanResponse:
        if not report.is_enabled:
            raise _no_controller()
        return plan_reply(report, self._clock())


def _no_controller() -> ApiError:
    return not_found(
        "This service has no controller, and so no plan. The operator can set control.enabled in "
        "its configuration.",
        "no_controller",
        "plan",
    )
