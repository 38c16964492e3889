"""The service of ``configs/add-ons.yaml`` under images with 0, 1 and 2 ControlNets, and simulated.

Steps of each kind are measured through HTTP, alone and together. Then calls with deadlines come at
random instants, at a share of the capacity, and steps are measured again. The simulator gets the
means of both measurements and the same calls. Wanted is that both have equally many in time; of
a machine whose speed has changed meanwhile, nothing can be said.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from functools import partial

import httpx
import numpy as np
from PIL import Image, ImageDraw

from benchmarks.figures import absolute, mean_figure
from benchmarks.harness import Study
from benchmarks.machine import ROOT
from benchmarks.serving.services import (
    OPEN_LIMITS,
    Config,
    Contender,
    Reply,
    Running,
    image_body,
    open_loop,
    post_image,
    rate_per_s,
    running,
    samples,
    until,
)
from benchmarks.serving.simulated_controlnets import (
    MeasuredService,
    MeasuredSteps,
    PlannedCall,
    simulate,
    slowdown,
)
from ray_cluster.config.loading import load_config
from ray_cluster.config.yaml_files import read_mapping

FILE = ROOT / "ray_cluster" / "configs" / "add-ons.yaml"
NETS = ("edges", "layout")
# by number of ControlNets, of equal shares
KINDS: tuple[tuple[str, ...], ...] = ((), ("edges",), ("layout",), NETS)
_SIDE_PX = 64
_NUM_STEPS = 20
_LOAD = 0.8
_SLO_TIMES_ALONE = 5.0
_CLIENTS = 16
_NUM_ALONE = 12
_START_S = 120.0
# longer than a replica is silent
_POLL_S = 3.0
_SEED = 5
# of the speed of the machine
_MOST_DRIFT = 1.15
# points between live and simulated attainment
AIM = 5.0
_METRICS = {
    "ray_cluster_step_seconds_count": "steps",
    "ray_cluster_step_seconds_sum": "seconds",
    "ray_cluster_step_batch_images_sum": "images",
}


def add_ons_of(usual: Config) -> Config:
    """Return the built-in configuration with ControlNets as services, on this machine."""
    del usual["pools"]
    return read_mapping(FILE, "configuration") | usual | {"limits": OPEN_LIMITS}


def measure(study: Study) -> None:
    """Run the service, measure it, and simulate it."""
    warm_s = study.pick(12.0, 1.0)
    with running(Contender(what="ControlNets", change=add_ons_of)) as service:
        if not until(lambda: all(_is_made(service, (name,)) for name in NETS), most_s=_START_S):
            raise TimeoutError(f"no ControlNets after {_START_S:.0f} s")
        study.say(0.1, "steps of each kind")
        before = _measured(service, warm_s)
        study.say(0.3, "capacity")
        per_s = rate_per_s(service, _CLIENTS, partial(_take_turns, KINDS), warm_s)
        planned = plan(study.pick(600, 16), _LOAD * per_s, _SLO_TIMES_ALONE * before.alone_s)
        study.say(0.4, f"{len(planned)} calls")
        ended = _send(service, planned)
        study.say(0.8, "steps of each kind again")
        after = _measured(service, warm_s)
    max_batch = load_config(read_mapping(FILE, "configuration")).pools[0].max_batch
    measured = before.between(after)
    on_two = partial(simulate, num_services=len(NETS), max_batch=max_batch)
    times = slowdown(partial(on_two, measured), KINDS, per_s)
    result = on_two(measured.slowed(times), planned)
    tabulate(study, measured, planned, ended, [fate.is_met for fate in result.fates], per_s)
    study.note(
        f"in the mix everything takes {times:.2f} times as long as kind by kind, as its throughput "
        "tells: the processes share cores; it is simulated like that"
    )
    study.note(drift_note(before.drift(after)))


def drift_note(drift: float) -> str:
    """Say whether the machine was equally fast before and after the calls."""
    doubt = "" if 1 / _MOST_DRIFT <= drift <= _MOST_DRIFT else ": the aim says nothing of this run"
    return f"steps took {drift:.2f} times as long after the calls as before{doubt}"


def tabulate(
    study: Study,
    measured: MeasuredService,
    planned: Sequence[PlannedCall],
    ended: Sequence[float | None],
    simulated: Sequence[bool],
    per_s: float,
) -> None:
    """Add the tables and the aim.

    Args:
        ended: seconds that live calls took; None for one that was refused.
        simulated: whether each was in time there.
        per_s: the capacity.
    """
    add_ons = measured.add_ons()
    study.found["what"] = (
        f"{len(planned)} calls of {_SIDE_PX} px and {_NUM_STEPS} steps at {_LOAD:g} of the "
        f"capacity of {per_s:.2f} images a second; deadlines of {planned[0].slo_s:.3f} s, "
        f"{_SLO_TIMES_ALONE:g} times an image alone. Simulated with the steps below: a ControlNet "
        f"takes {add_ons.controlnet_share:.2f} of a step and "
        f"{1e3 * (add_ons.way.transport_s if add_ons.way else 0):.1f} ms on its way"
    )
    live = np.array(
        [s is not None and s <= one.slo_s for one, s in zip(planned, ended, strict=True)]
    )
    numbers, gaps = np.array([len(one.controls) for one in planned]), 100.0 * np.array(simulated)
    gaps -= 100.0 * live
    for name in ("all", 0, 1, 2):
        chosen = numbers == name if name != "all" else numbers >= 0
        shares = [100 * float(np.mean(np.array(one)[chosen])) for one in (live, simulated)]
        study.row(
            "in time, by ControlNets of an image",
            **{
                "ControlNets": f"{name}",
                "calls": int(chosen.sum()),
                "live, %": round(shares[0], 1),
                "simulated, %": round(shares[1], 1),
                "simulated less live, points": round(shares[1] - shares[0], 1),
            },
        )
    for number, steps in measured.together.items():
        study.row(
            "steps by ControlNets of an image",
            **{
                "ControlNets": number,
                "alone, ms": round(1e3 * measured.alone[number].step_s, 2),
                "together, ms": round(1e3 * steps.step_s, 2),
                "images of a step": round(steps.mean_batch, 2),
            },
        )
    # an interval as if no call delayed another
    study.at_most(
        "simulated beside live, in time", AIM, absolute(mean_figure(gaps.tolist())), "points"
    )


def plan(count: int, per_s: float, slo_s: float) -> list[PlannedCall]:
    """Return calls at random instants (Poisson), of kinds in equal shares."""
    rng = np.random.default_rng(_SEED)
    instants_s = np.cumsum(rng.exponential(1 / per_s, count))
    kinds = rng.integers(len(KINDS), size=count)
    return [
        PlannedCall(float(at_s), KINDS[kind], slo_s)
        for at_s, kind in zip(instants_s, kinds, strict=True)
    ]


def _is_made(service: Running, controls: tuple[str, ...]) -> bool:
    with service.client() as client:
        _post(client, 0, controls, slo_s=60.0)
    return True


def _map() -> str:
    """Return a map for either ControlNet, coded: the outline of a disc."""
    image = Image.new("RGB", (_SIDE_PX, _SIDE_PX))
    ImageDraw.Draw(image).ellipse((16, 16, 48, 48), outline="white")
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def _post(
    client: httpx.Client, number: int, controls: Sequence[str], *, slo_s: float = 600.0
) -> Reply:
    body = image_body(number, _NUM_STEPS, size=f"{_SIDE_PX}x{_SIDE_PX}")
    body |= {"slo_s": slo_s, "when_late": "refuse", "metadata": False}
    if controls:
        body["controlnets"] = [{"name": name, "image": _MAP} for name in controls]
    return post_image(client, body)


_MAP = _map()


def _take_turns(
    kinds: Sequence[tuple[str, ...]], client: httpx.Client, number: int, call: int
) -> None:
    _post(client, call, kinds[(number + call) % len(kinds)])


def _measured(service: Running, seconds: float) -> MeasuredService:
    """Measure steps of each kind: by one client, and by many."""
    # by number of ControlNets; those with one have either
    kinds = {0: KINDS[:1], 1: KINDS[1:3], 2: KINDS[3:]}
    alone, together = {}, {}
    replies: list[Reply] = []
    for number, uses in kinds.items():
        begin = _steps(service)
        with service.client() as client:
            made = [_post(client, seed, uses[seed % len(uses)]) for seed in range(_NUM_ALONE)]
        alone[number] = _steps_since(begin, _steps(service))
        replies += made if number == 0 else []
        begin = _steps(service)
        rate_per_s(service, _CLIENTS, partial(_take_turns, uses), seconds)
        together[number] = _steps_since(begin, _steps(service))
    decode_s = float(np.median([one.timing["decode_s"] for one in replies]))
    others_s = float(np.median([one.total_s - one.timing["denoise_s"] for one in replies]))
    return MeasuredService(
        side_px=_SIDE_PX,
        num_steps=_NUM_STEPS,
        alone=alone,
        together=together,
        decode_s=decode_s,
        other_s=others_s - decode_s,
    )


def _send(service: Running, planned: Sequence[PlannedCall]) -> list[float | None]:
    """Send calls; return the seconds that each took, None for one that was refused."""
    with service.client() as client:

        def one(number: int) -> float:
            call = planned[number]
            return _post(client, number, call.controls, slo_s=call.slo_s).total_s

        return open_loop([call.at_s for call in planned], one)


def _steps(service: Running) -> Mapping[str, float]:
    """Return how many steps there were, their seconds, and the images' own steps.

    Replicas send them with their polls: those of the last steps must have come.
    """
    time.sleep(_POLL_S)
    found = dict.fromkeys(_METRICS.values(), 0.0)
    for sample in samples(service.url, *_METRICS):
        found[_METRICS[sample.name]] += sample.value
    return found


def _steps_since(begin: Mapping[str, float], end: Mapping[str, float]) -> MeasuredSteps:
    steps, seconds, images = (end[key] - begin[key] for key in ("steps", "seconds", "images"))
    return MeasuredSteps(images / max(1.0, steps), seconds / max(1.0, steps))
