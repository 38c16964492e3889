"""``GET /v1/cell/events``: what the cell does, for operators, as one stream."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass

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
# age of a point that is sent still
_NEW_S = 4.0
# of a stream: seconds, and bytes after its first event, until clients come again
_MOST_S, _MOST_BYTES = 300.0, 2 << 20
# of one client
_MOST_STREAMS = 4
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
    kind: str = Field(description="`denoise` for a model; of others what they do.")
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


@dataclass(frozen=True, slots=True)
class _Look:
    """What streams send of a moment.

    Attributes:
        content: what is news if it differs.
        plain: the event.
        point: the same with a new point and the plan; None where the latest point is older.
        point_at: Unix time of the latest point; 0 without any.
    """

    content: str
    plain: bytes
    point: bytes | None
    point_at: float


class CellEndpoint:
    """Streams what the dispatcher says of the cell.

    All streams of a gateway send the same bytes, which are made once. A stream ends after minutes,
    and clients come again: what an unread one leaves in a proxy in front is bounded so.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(
        self, client: DispatcherClient, settings: CurrentSettings, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._settings = settings
        self._slots = StreamSlots()
        self._clock = clock
        self._firsts = Shared(self._look_first, _EVERY_S)
        self._looks = Shared(self._look, _EVERY_S)

    async def _look_first(self) -> _Look:
        """Return the whole history, with the plan."""
        found = cell_reply(await self._client.view(0.0))
        history = found.history or []
        found.plan = await self._plan()
        return _Look(_content(found), _event(found), None, history[-1].at if history else 0.0)

    async def _look(self) -> _Look:
        found = cell_reply(await self._client.view(self._clock() - _LATEST_S))
        latest = found.history[-1] if found.history else None
        found.history, point = None, None
        plain, content = _event(found), _content(found)
        # whoever was sending when it came gets it with one of the next looks
        if latest is not None and found.at < latest.at + _NEW_S:
            found.point, found.plan = latest, await self._plan()
            point = _event(found)
        return _Look(content, plain, point, 0.0 if latest is None else latest.at)

    async def _plan(self) -> PlanResponse | None:
        try:
            report = await self._client.plan_report()
        except Unavailable:
            return None
        return plan_reply(report, self._clock()) if report.is_enabled else None

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
        most = min(_MOST_STREAMS, limits.max_streams_per_client)
        with self._slots.slot(caller_of(request), most):
            look = await self._firsts.get()
            yield b""
            end_s = loop.time() + min(limits.max_stream_s, _MOST_S)
            yield look.plain
            seen, last_at, num_bytes = look.content, look.point_at, 0
            spoken_s = heard_s = loop.time()
            while loop.time() < min(end_s, heard_s + _PATIENCE_S) and num_bytes < _MOST_BYTES:
                try:
                    look = await self._looks.get()
                except Unavailable as error:
                    logger.warning("the stream of the cell waits: %s", error)
                    await asyncio.sleep(_EVERY_S)
                    continue
                heard_s, is_new = loop.time(), look.point is not None and look.point_at > last_at
                if is_new or look.content != seen:
                    event = look.point if is_new and look.point is not None else look.plain
                    last_at = look.point_at if is_new else last_at
                    seen, spoken_s, num_bytes = look.content, heard_s, num_bytes + len(event)
                    yield event
                elif heard_s >= spoken_s + _KEEP_ALIVE_S:
                    spoken_s = heard_s
                    yield KEEP_ALIVE


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


def _content(cell: CellResponse) -> str:
    """Return what of an event is news if it differs."""
    return cell.model_dump_json(exclude={"at", "history", "point", "plan"})


def _event(cell: CellResponse) -> bytes:
    absent = {name for name in ("history", "point", "plan") if getattr(cell, name) is None}
    return f"event: cell\ndata: {cell.model_dump_json(exclude=absent)}\n\n".encode()
