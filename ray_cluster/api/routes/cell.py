"""``GET /v1/cell/events``: what the cell does, for operators, as one stream."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.access.auth import caller_of
from ray_cluster.api.output.event_streams import KEEP_ALIVE, OPENING, EventStream, StreamSlots
from ray_cluster.api.routes.plan import PlanResponse, plan_reply
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.errors import Unavailable
from ray_cluster.process.turns import Shared
from ray_cluster.protocol.cell_view import CellView, ShownReplica
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.leases import split_lane

logger = logging.getLogger(__name__)

# all streams of a gateway look together, and so often at most
_EVERY_S = 1.0
# of the history, which has a point every ten seconds
_LATEST_S = 12.0
# longest silence; proxies close connections that are silent for long
_KEEP_ALIVE_S = 10.0
# a stream ends after so long without an answer
_PATIENCE_S = 60.0


class HeldImageCard(BaseModel):
    """An image that a replica holds."""

    id: str = Field(description="The beginning of its request's id.")
    steps_done: int
    num_steps: int


class ReplicaCard(BaseModel):
    """A live replica."""

    id: str
    pool: str = Field(description="Name of its Serve application.")
    max_batch: int = Field(description="Images that it steps together at most.")
    images: list[HeldImageCard]


class CellModelCard(BaseModel):
    """A model, or another kind of worker that images wait for."""

    id: str
    kind: str = Field(description="`denoise` for a model, `score`, `upscale`, `control`, `lora`.")
    waiting: int = Field(description="Images in its queue.")
    running: int = Field(description="Images that its replicas hold.")
    replicas: list[ReplicaCard]


class WaitingCard(BaseModel):
    """An image that waits."""

    id: str = Field(description="The beginning of its request's id.")
    model: str
    in_s: float = Field(description="Seconds to its deadline; below 0 once that is over.")


class PointCard(BaseModel):
    """Ten seconds of the cell."""

    at: float = Field(description="Unix time in seconds of their end.")
    waiting: int = Field(description="Images in queues then.")
    running: int = Field(description="Images that replicas held then.")
    done: int = Field(description="Images that were made meanwhile.")
    late: int = Field(description="Of these, after their deadline.")
    failed: int
    refused: int


class CellResponse(BaseModel):
    """A cell at one instant."""

    object: str = "cell"
    at: float = Field(description="Unix time in seconds.")
    models: list[CellModelCard]
    queue: list[WaitingCard] = Field(description="The first by their deadlines, 200 at most.")
    loras: list[str] = Field(description="The first by name, 200 at most.")
    controlnets: list[str]
    warnings: list[str]
    history: list[PointCard] | None = Field(
        None, description="The last hour, in the first event alone."
    )
    point: PointCard | None = Field(None, description="A new one, in later events.")
    plan: PlanResponse | None = Field(
        None, description="The controller's, in the first event and beside each new point."
    )


class CellEndpoint:
    """Streams what the dispatcher says of the cell.

    Args:
        slots: of all streams of this gateway.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        client: DispatcherClient,
        settings: CurrentSettings,
        slots: StreamSlots,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._settings = settings
        self._slots = slots
        self._clock = clock
        self._views = Shared(self._look, _EVERY_S)

    async def _look(self) -> CellView:
        return await self._client.view(self._clock() - _LATEST_S)

    async def events(self, request: Request) -> Response:
        """Stream what the cell does (SSE): an event `cell` a second, while something changes.

        The first has the last hour; others a point of it every ten seconds, with the plan.
        """
        events = self._events(request)
        # before there is a slot, errors are replies of their own
        await anext(events)
        return EventStream(events, OPENING)

    async def _events(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield the events, first nothing once there is a slot and the dispatcher answers."""
        limits, loop = self._settings.latest.limits, asyncio.get_running_loop()
        with self._slots.slot(caller_of(request), limits.max_streams_per_client):
            first = cell_reply(await self._client.view(0.0))
            first.history, first.point = first.history or [], None
            yield b""
            end_s = loop.time() + limits.max_stream_s
            first.plan = await self._plan()
            yield _event(first)
            last_at = first.history[-1].at if first.history else 0.0
            seen, spoken_s, heard_s = _changing(first), loop.time(), loop.time()
            while loop.time() < end_s and loop.time() < heard_s + _PATIENCE_S:
                try:
                    found = cell_reply(await self._views.get())
                except Unavailable as error:
                    logger.warning("the stream of the cell waits: %s", error)
                    await asyncio.sleep(_EVERY_S)
                    continue
                heard_s = loop.time()
                new = [one for one in found.history or [] if one.at > last_at]
                found.history = None
                if new:
                    found.point, last_at = new[-1], new[-1].at
                    found.plan = await self._plan()
                if new or _changing(found) != seen:
                    seen, spoken_s = _changing(found), heard_s
                    yield _event(found)
                elif heard_s >= spoken_s + _KEEP_ALIVE_S:
                    spoken_s = heard_s
                    yield KEEP_ALIVE

    async def _plan(self) -> PlanResponse | None:
        try:
            report = await self._client.plan_report()
        except Unavailable:
            return None
        return plan_reply(report, self._clock()) if report.is_enabled else None


def cell_reply(view: CellView) -> CellResponse:
    """Return a view as the API shows it, with all of its history."""
    replicas: dict[str, list[ShownReplica]] = defaultdict(list)
    for one in view.replicas:
        replicas[one.model].append(one)
    return CellResponse(
        at=view.at,
        models=[
            _model(lane, view.waiting.get(lane, 0), replicas[lane])
            for lane in dict.fromkeys([*view.waiting, *replicas])
        ],
        queue=[WaitingCard(**asdict(one)) for one in view.queue],
        loras=list(view.loras),
        controlnets=list(view.controlnets),
        warnings=list(view.warnings),
        history=[PointCard(**asdict(one)) for one in view.history],
    )


def _model(lane: str, waiting: int, replicas: list[ShownReplica]) -> CellModelCard:
    kind, name = split_lane(lane)
    return CellModelCard(
        id=name,
        kind=kind,
        waiting=waiting,
        running=sum(len(one.images) for one in replicas),
        replicas=[ReplicaCard.model_validate(asdict(one)) for one in replicas],
    )


def _changing(cell: CellResponse) -> str:
    """Return what of an event is news if it differs."""
    return cell.model_dump_json(exclude={"at", "history", "point", "plan"})


def _event(cell: CellResponse) -> bytes:
    absent = {name for name in ("history", "point", "plan") if getattr(cell, name) is None}
    return f"event: cell\ndata: {cell.model_dump_json(exclude=absent)}\n\n".encode()
