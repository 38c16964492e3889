"""The residuals of a step's requests, asked of ControlNets wherever they run.

Only the request decides what is added: its maps, scales and ranges. When an answer comes decides
nothing but when the step is taken: a request whose answer is late sits out, and takes the same step
with it later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_cluster.engine.batch.token_layout import TokenLayout
from ray_cluster.engine.controlnets.asks import ControlNetAsk, ControlNetBackend, RowResiduals
from ray_cluster.engine.controlnets.residuals import Arrived, StepPart
from ray_cluster.engine.step.executor import Residuals
from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import RequestFailed
from ray_cluster.policies.leasing.controlnet_peers import patience_s


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """One use of a ControlNet in a request's present step."""

    name: str
    scale: float
    future: Future[RowResiduals]


class ControlNetResiduals:
    """The source of an engine whose requests may have ControlNets.

    Args:
        controls: where they run.
        clock: monotonic seconds, the engine's.
    """

    def __init__(self, controls: ControlNetBackend, clock: Callable[[], float]) -> None:
        self._controls = controls
        self._clock = clock
        # by request, what was asked for the step that it is to take
        self._asked: dict[str, tuple[_Asked, ...]] = {}

    def adds_to(self, state: RequestState) -> bool:
        """Whether a request names ControlNets."""
        return bool(state.request.add_ons.controls)

    def is_ready(self, state: RequestState) -> bool:
        """Whether nothing is outstanding that a request has waited for."""
        asked = self._asked.get(state.request.request_id, ())
        return all(one.future.done() for one in asked)

    def begin(self, parts: Sequence[StepPart]) -> _Pending | None:
        """Ask for what the requests of a step need and have not been given yet."""
        needs: dict[str, list[tuple[ControlNetAsk, float]]] = {}
        for part in parts:
            for request, state in enumerate(part.states):
                name = state.request.request_id
                if self.adds_to(state) and name not in self._asked:
                    needs[name] = _asks(part, request)
        began_s = self._clock()
        futures = iter(self._controls.ask([ask for need in needs.values() for ask, _ in need]))
        # not before: of a step that fails here, nothing was asked, and it is tried again in halves
        for name, need in needs.items():
            self._asked[name] = tuple(_Asked(ask.name, scale, next(futures)) for ask, scale in need)
        asked = [
            [self._asked.get(state.request.request_id, ()) for state in part.states]
            for part in parts
        ]
        if not any(any(ones) for ones in asked):
            return None
        usual_s = max(self._controls.usual_s(one.name) for p in asked for ones in p for one in ones)
        return _Pending(parts, asked, self._clock, began_s, usual_s)

    def took_step(self, state: RequestState) -> None:
        """Forget what was asked for the step that a request has taken."""
        self._asked.pop(state.request.request_id, None)

    def drop(self, state: RequestState) -> None:
        """Forget a request; answers that are outstanding are not needed any more."""
        for one in self._asked.pop(state.request.request_id, ()):
            one.future.cancel()
        for index in range(len(state.request.add_ons.controls)):
            for lacks_loras in {False, state.request.add_ons.lora_start_step > 0}:
                self._controls.forget(_key(state, index, lacks_loras=lacks_loras))


@dataclass(frozen=True, slots=True)
class _Pending:
    """What was asked at the beginning of a step.

    Attributes:
        asked: by part and request, its uses of ControlNets.
    """

    parts: Sequence[StepPart]
    asked: Sequence[Sequence[Sequence[_Asked]]]
    clock: Callable[[], float]
    began_s: float
    usual_s: float

    def of(self, index: int) -> Arrived:
        """Return what is there for a part, waiting for some time."""
        part, asked = self.parts[index], self.asked[index]
        futures = [one.future for ones in asked for one in ones]
        until_s = self.began_s + patience_s(self.usual_s, all_wait=all(asked))
        wait(futures, max(0.0, until_s - self.clock()))
        late, failed = set(), {}
        for request, ones in enumerate(asked):
            if any(not one.future.done() for one in ones):
                late.add(request)
            elif (error := _error(ones)) is not None:
                failed[request] = error
        missing = late | failed.keys()
        keeps = [request not in missing for request in range(len(asked))]
        kept = [ones for ones, is_kept in zip(asked, keeps, strict=True) if is_kept]
        if not any(kept):
            return Arrived(frozenset(late), failed)
        layout = part.batch.layout if all(keeps) else part.only(keeps).batch.layout
        return Arrived(frozenset(late), failed, _residuals(layout, kept))


def _asks(part: StepPart, request: int) -> list[tuple[ControlNetAsk, float]]:
    """Return what a request needs in its present step, with the scale of each."""
    state, batch = part.states[request], part.batch
    height, width = state.latents.shape[1:]
    channels = state.latents.shape[0]
    found = []
    for index, use in enumerate(state.request.add_ons.controls):
        if not use.is_active(state.step_index, part.num_calls[request]):
            continue
        # inpainting models see more than the latents, ControlNets do not
        flat = batch.latents.split(batch.layout.request_tokens)[request][:, :channels]
        ask = ControlNetAsk(
            name=use.name,
            key=_key(state, index, lacks_loras=state.lacks_loras),
            conditioning=state.conditioning,
            map=state.maps[index],
            latents=flat.T.unflatten(1, (height, width)).contiguous(),
            timestep=float(batch.timesteps[request]),
            deadline_s=state.deadline_s,
        )
        found.append((ask, use.scale))
    return found


def _key(state: RequestState, index: int, *, lacks_loras: bool) -> str:
    """Return the key of a use of a ControlNet; with LoRAs a request's prompts become others."""
    return f"{state.request.request_id}/{index}{'-' if lacks_loras else ''}"


def _error(asked: Sequence[_Asked]) -> RequestFailed | None:
    """Return why a request will have no residuals; None if it has all."""
    for one in asked:
        if one.future.cancelled():
            return RequestFailed(f"ControlNet {one.name!r} was given up", "control")
        error = one.future.exception()
        if isinstance(error, RequestFailed):
            return error
        if error is not None:
            return RequestFailed(f"{type(error).__name__}: {error}", "control")
    return None


def _residuals(layout: TokenLayout, asked: Sequence[Sequence[_Asked]]) -> Residuals:
    """Return the sums of what the requests of a layout have, as matrices of its levels."""
    found = [_sum([(one.future.result(), one.scale) for one in ones]) for ones in asked]
    images: list[list[int]] = [[] for _ in found]
    for image, request in enumerate(layout.row_request):
        images[request].append(image)
    tokens = [level.image_tokens for level in layout.levels]
    # at no two levels has the largest image the same number of pixels
    given = [request for request, own in enumerate(found) if own]
    template = max(given, key=lambda request: tokens[0][images[request][0]])
    outputs, level = [], 0
    for output, like in enumerate(found[template]):
        if len(like) != len(images[template]) * tokens[level][images[template][0]]:
            level += 1
        parts = [like] * len(layout.row_request)
        for own, rows in zip(found, images, strict=True):
            pieces = own[output].chunk(len(rows)) if own else ()
            for place, image in enumerate(rows):
                nothing = (tokens[level][image], like.shape[1])
                parts[image] = pieces[place] if own else like.new_zeros(nothing)
        outputs.append(torch.cat(parts))
    return Residuals(tuple(outputs[:-1]), outputs[-1])


def _sum(terms: Sequence[tuple[RowResiduals, float]]) -> list[Tensor]:
    """Return the weighted sums of a request's residuals, outermost first; none of none."""
    sums: list[Tensor] = []
    for row, scale in terms:
        scaled = [one if scale == 1 else one * scale for one in (*row.down, row.mid)]
        sums = [a + b for a, b in zip(sums, scaled, strict=True)] if sums else scaled
    return sums
