"""The stages of a request as data, and a pure state machine: which comes next, what is published.

A request is a list of stages by kind and model; what the last one makes is published. After some
stages it is decided whether the image is good enough: then it goes on to a later stage, or is
published, and else the next stage makes it anew. So a cascade (DiffServe, section 3.1) is the list
``light, score, heavy``::

    light ──finish──▶ score ──decide──▶ heavy ──finish──▶ published
      │                 └──decide, or the heavy model fails──▶ published: the light image
      └──fail──▶ failed

Nothing is decided here: :mod:`ray_cluster.policies.cascade` says whether an image is deferred, and
whether the light one answers for a heavy one that failed. A state is plain data. Every function
returns the next state, and raises ValueError for what cannot happen in the present one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from ray_cluster.errors import LastStage
from ray_cluster.policies.cascade import CascadeDecision
from ray_cluster.policies.types import CascadeReason, RequestView
from ray_cluster.protocol.leases import lane_of
from ray_cluster.protocol.outcomes import CascadeStage
from ray_cluster.requests import SMALL_SIDE_PX, ImageRequest

StageKind = Literal["denoise", "score", LastStage]
FailureKind = Literal["error", "invalid", "aborted", "lost", "too_late"]
PublishReason = Literal[CascadeReason, "heavy_failed"]
StageEnd = FailureKind | float
"""What a stage ends with that makes no image: why it does not, or a confidence."""
# lists of different models that are made once, and ends of their stages
_MOST_LISTS = 1000


@dataclass(frozen=True, slots=True)
class KindRules:
    """How stages of a kind differ from those of others.

    Attributes:
        takes: what it works on: nothing, if it makes the image anew, or the image so far, or a
            small copy of it.
        decides: whether it makes no image, and a decision over the one so far follows; also if it
            has failed.
        falls_back: whether the image so far answers for one that it fails to make.
    """

    takes: Literal["nothing", "image", "small"]
    decides: bool = False
    falls_back: bool = False


RULES: Mapping[StageKind, KindRules] = {
    "denoise": KindRules(takes="nothing", falls_back=True),
    "score": KindRules(takes="small", decides=True),
    "upscale": KindRules(takes="image"),
}


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage.

    Attributes:
        model: what its workers serve.
        name: in replies and metrics of cascades.
        skips_to: index of the stage that an image goes on to if it is good enough, or the number of
            stages if it is published then; only of kinds that decide.
    """

    kind: StageKind
    model: str
    name: CascadeStage | None = None
    skips_to: int | None = None

    @property
    def rules(self) -> KindRules:
        """What is different about its kind."""
        return RULES[self.kind]

    @property
    def is_vital(self) -> bool:
        """Whether there is no image if nobody does it, whatever was made before."""
        return not self.rules.decides and not self.rules.falls_back

    @property
    def lane(self) -> str:
        """Name of the queue that its workers lease from."""
        return lane_of(self.kind, self.model)


Specs = tuple[StageSpec, ...]


@dataclass(frozen=True, slots=True)
class RequestStages:
    """Where a request is in its list of stages.

    Attributes:
        index: of the present stage; after the end, of the last one that began.
        made: indices of the stages that have made an image; the last one's is the image so far.
        confidence: of the image last decided on; None if it was not scored, or there is none.
        threshold: that this was compared with, if it was.
        reason: why the image so far, or the one to come, is the answer; None without a decision.
        is_published: whether the request has ended with the image so far.
        failure: why it has ended without one, if it has.
    """

    specs: Specs
    index: int = 0
    made: tuple[int, ...] = ()
    confidence: float | None = None
    threshold: float | None = None
    reason: PublishReason | None = None
    is_published: bool = False
    failure: FailureKind | None = None

    @property
    def present(self) -> StageSpec:
        """The present stage."""
        return self.specs[self.index]

    @property
    def is_last(self) -> bool:
        """Whether the present stage publishes what it makes."""
        return self.index + 1 == len(self.specs)

    @property
    def has_ended(self) -> bool:
        """Whether there is an image or a failure; nothing changes after that."""
        return self.is_published or self.failure is not None

    @property
    def can_fall_back(self) -> bool:
        """Whether an image can be the answer for one that the present stage fails to make."""
        return bool(self.made) and self.present.rules.falls_back

    @property
    def author(self) -> StageSpec:
        """The stage whose image it is so far, whatever later ones have done to it."""
        index = len(self.made) - 1
        while (spec := self.specs[self.made[index]]).rules.takes != "nothing":
            index -= 1
        return spec


@lru_cache(_MOST_LISTS)
def begin(specs: Specs) -> RequestStages:
    """Return where a request begins; raises ValueError for a list that makes no sense."""
    if not specs or specs[0].rules.takes != "nothing" or specs[-1].rules.decides:
        raise ValueError(f"the first stage takes no image, and the last makes one; given {specs}")
    for before, spec in pairwise(specs):
        if spec.rules.takes == "nothing" and not before.rules.decides:
            raise ValueError(f"an image is made anew after a decision alone; given {specs}")
    for index, spec in enumerate(specs):
        ends: set[int | None] = {None}
        if spec.rules.decides:
            later = range(index + 2, len(specs))
            ends = {len(specs), *(one for one in later if specs[one].rules.takes == "image")}
        if spec.skips_to not in ends:
            raise ValueError(f"no image goes on from stage {index} like that; given {specs}")
    return RequestStages(specs)


@lru_cache(_MOST_LISTS)
def single(model: str, name: CascadeStage | None = None) -> RequestStages:
    """Return the beginning of a request that one model makes."""
    return begin((StageSpec("denoise", model, name),))


@lru_cache(_MOST_LISTS)
def cascade(light_model: str, scorer: str, heavy_model: str) -> RequestStages:
    """Return the beginning of a request that a cascade routes."""
    return begin(
        (
            StageSpec("denoise", light_model, "light"),
            StageSpec("score", scorer, "score", skips_to=3),
            StageSpec("denoise", heavy_model, "heavy"),
        )
    )


def stages_of(request: ImageRequest) -> RequestStages:
    """Return where a request begins."""
    use = request.cascade
    if use is None:
        found = single(request.model)
    elif use.light is None:
        found = single(request.model, use.entry)
    else:
        found = cascade(use.light.model, use.light.discriminator, request.model)
    last = tuple(StageSpec(kind, name) for kind, name in request.last_stages.items())
    # what is published by a decision goes on to them, whoever has made it
    return begin((*found.specs, *last)) if last else found


def request_in(request: ImageRequest, spec: StageSpec) -> ImageRequest:
    """Return a request as a stage makes its image."""
    return (request.light if spec.name == "light" else None) or request


def view_in(
    request: ImageRequest, spec: StageSpec, *, arrival_s: float, deadline_s: float
) -> RequestView:
    """Return what policies know of a request in a stage: one step, unless it makes the image."""
    takes = spec.rules.takes
    if takes == "nothing":
        return request_in(request, spec).view(arrival_s=arrival_s, deadline_s=deadline_s)
    # what scoring costs does not depend on the image's size: it is made small before
    small = (SMALL_SIDE_PX, SMALL_SIDE_PX)
    width_px, height_px = small if takes == "small" else request.output_px
    return RequestView(
        request_id=request.request_id,
        model=spec.lane,
        width_px=width_px,
        height_px=height_px,
        num_steps=1,
        uses_guidance=False,
        priority=request.priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


def least_left(specs: Specs, index: int) -> Iterator[StageSpec]:
    """Yield the stages after one that follow in any case, however it is decided."""
    while (index := specs[index].skips_to or index + 1) < len(specs):
        yield specs[index]


@lru_cache(_MOST_LISTS)
def finish(stages: RequestStages, index: int) -> RequestStages:
    """Note that a stage has made an image: go on to the next, or publish the image of the last."""
    _check(stages, index, decides=False)
    return _go_on(stages, index + 1, made=(*stages.made, index))


def decide(
    stages: RequestStages,
    index: int,
    decision: CascadeDecision,
    confidence: float | None,
    threshold: float | None = None,
) -> RequestStages:
    """Apply the decision over the image so far: have it made anew, or let it go on.

    Args:
        confidence: in [0, 1]; None if it could not be scored.
        threshold: that this was compared with, if it was.
    """
    _check(stages, index, decides=True)
    if confidence is not None and not 0 <= confidence <= 1:
        raise ValueError(f"a confidence lies in [0, 1]; given {confidence}")
    following = index + 1 if decision.is_deferred else stages.present.skips_to
    assert following is not None, "checked before it began"
    found = {"confidence": confidence, "threshold": threshold, "reason": decision.reason}
    return _go_on(stages, following, **found)


def fail(
    stages: RequestStages, index: int, kind: FailureKind, *, keeps_image: bool
) -> RequestStages:
    """Note that a stage makes no image: the one so far is the answer, or the request ends.

    One that fails and decides is no failure of the request: see :func:`decide` without a
    confidence.

    Args:
        keeps_image: whether the image so far is the answer, where it can be; an aborted request
            gets none.
    """
    _check(stages, index, decides=None if kind == "aborted" else False)
    if not keeps_image or kind == "aborted" or not stages.can_fall_back:
        return replace(stages, failure=kind)
    reason: PublishReason = "no_time" if kind == "too_late" else "heavy_failed"
    ends = (spec.skips_to for spec in reversed(stages.specs[:index]))
    return _go_on(stages, next(end for end in ends if end is not None), reason=reason)


def _go_on(stages: RequestStages, index: int, **found: Any) -> RequestStages:
    """Begin a stage, or publish the image so far where there is none."""
    if index == len(stages.specs):
        return replace(stages, is_published=True, **found)
    return replace(stages, index=index, **found)


def _check(stages: RequestStages, index: int, *, decides: bool | None) -> None:
    """Raise ValueError unless the event is one of the present stage; None allows every kind."""
    if stages.has_ended:
        ended = stages.failure or f"stage {stages.made[-1]} is published"
        raise ValueError(f"the request has ended ({ended}); stage {index} has nothing to report")
    if index != stages.index:
        raise ValueError(f"only the present stage, {stages.index}, can report; given {index}")
    if decides is not None and decides != stages.present.rules.decides:
        wanted = "decide" if decides else "make an image"
        raise ValueError(f"stage {index} must {wanted} for that; it is {stages.present}")
