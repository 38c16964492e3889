"""A dispatch core with a cascade, and the moves of its workers, for the tests beside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.cascade import DeferralCurve
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Finished, Lease, Registration, Scored
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import (
    CascadeUse,
    ImageRequest,
    ImageResult,
    LightStage,
    SmallImage,
    Timing,
)
from tests.fakes import image_request, poll_of, registration

CONFIG = DispatchConfig(
    default_slo_s=30.0, poll_s=1.0, replica_timeout_s=6.0, attached_timeout_s=15.0, max_attempts=2
)
SMALL = SmallImage(1, 1, b"rgb")
STAGE = LightStage("light", "judge", num_steps=2, guidance_scale=1.0, sampler="ddim")
QUICK = StepCost(fixed_s=0.001, per_megapixel_s=0.01)


def cascade(**changes: Any) -> dict[str, Any]:
    """A cascade's section."""
    given = {"name": "auto", "light": "light", "heavy": "heavy", "discriminator": "judge"}
    return {**given, "threshold": 0.6, "reserve_s": 0.5, **changes}


def make_core(*, scorers: int = 1, max_queued: int = 8, **changes: Any) -> DispatchCore:
    """A core with a light replica, a heavy one and a discriminator, none of which has polled."""
    pools = [{"name": name, "model": "shapes-sd", "served_as": name} for name in ("light", "heavy")]
    config = ClusterConfig.model_validate(
        {
            "pools": pools,
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [cascade(**changes)],
            "limits": {"max_queued_images": max_queued},
            "dispatch": CONFIG.model_dump(),
        }
    )
    core = DispatchCore(
        config=CONFIG,
        limits=LimitsConfig(max_queued_images=max_queued),
        epoch=1,
        configured=("light", "heavy"),
        curve_of=lambda _config: DeferralCurve((0.0, 1.0), (0.0, 1.0)),
    )
    core.apply(settings_of(config), 0.0)
    core.register(registration("l", "light"), 0.0)
    core.register(registration("h", "heavy"), 0.0)
    for number in range(scorers):
        core.register(scorer(f"s{number}"), 0.0)
    return core


def scorer(replica_id: str = "s0") -> Registration:
    """The registration of a discriminator."""
    return Registration(replica_id, None, 64, 16, QUICK, kind="score", served_as="judge")


def routed(request_id: str = "a", **changes: Any) -> ImageRequest:
    """A request that the cascade routes, with 10 heavy steps of about 0.1 s."""
    return image_request(request_id, "heavy", cascade=CascadeUse("auto", STAGE), **changes)


def lease(core: DispatchCore, replica_id: str, now_s: float) -> Lease:
    (found,) = core.poll(poll_of(replica_id), now_s).leases
    return found


def made(lease: Lease, data: bytes = b"pixels") -> Finished:
    """The end of a lease with an image; of a candidate with its small form."""
    request = lease.request
    data = b"" if request.output.is_stored else data
    result = ImageResult(request.request_id, data, "png", Timing(denoise_s=0.1), 6)
    return Finished(request.request_id, lease.fence, result, SMALL if lease.is_candidate else None)


def scored(lease: Lease, confidence: float) -> Scored:
    return Scored(lease.request.request_id, lease.fence, confidence)


def only(outcomes: Iterable[Outcome]) -> Completed:
    (outcome,) = outcomes
    assert isinstance(outcome, Completed)
    return outcome


def up_to_score(core: DispatchCore, request: ImageRequest, now_s: float = 0.0) -> Lease:
    """Offer a request, have its light image made in a second; return the lease on its score."""
    assert core.offer([request], now_s).accepted
    light = lease(core, "l", now_s)
    assert (light.request, light.is_candidate) == (request.light, True)
    assert core.report("l", [made(light, b"light")], now_s + 1.0) == ((), ())
    return lease(core, "s0", now_s + 1.0)


def score_of(
    core: DispatchCore, request: ImageRequest, confidence: float, now_s: float = 5.0
) -> tuple[Completed, ...]:
    """Have a request's light image made and scored; return the outcomes."""
    score = up_to_score(core, request, now_s)
    outcomes, _ = core.report("s0", [scored(score, confidence)], now_s + 1.5)
    return tuple(one for one in outcomes if isinstance(one, Completed))


def deferred(core: DispatchCore, request: ImageRequest, now_s: float = 0.0) -> None:
    """Bring a request to its heavy stage, a second and a half after its arrival."""
    score = up_to_score(core, request, now_s)
    assert core.report("s0", [scored(score, 0.1)], now_s + 1.5) == ((), ())
