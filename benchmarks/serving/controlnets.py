"""The service of ``configs/add-ons.yaml`` under images with 0, 1 and 2 ControlNets, and simulated.

Steps of each kind are measured through HTTP, alone and together. Then calls with deadlines come at
random instants, at a share of the capacity, and steps are measured again. The simulator gets the
means of both measurements and the same calls. Wanted is that both have equally many in time; of
a machine whose speed has changed meanwhile, nothing can be said.
"""

from __future__ import annotations

import base64
import io
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.calls import Reply, image_body, open_loop, post_image
from benchmarks.serving.contenders import OwnContender, Site
from benchmarks.serving.service_process import running
from benchmarks.serving.simulated_controlnets import (
    MeasuredService,
    MeasuredSteps,
    PlannedCall,
    simulate,
    slowdown,
)
from benchmarks.settings import Report, Settings
from benchmarks.verdicts import Aim, at_most
from ray_cluster.config.loading import load_config
from ray_cluster.config.yaml_files import read_mapping

FILE = Path(__file__).resolve().parents[2] / "ray_cluster" / "configs" / "add-ons.yaml"
NETS = ("edges", "layout")
# by number of ControlNets, of equal shares
KINDS: tuple[tuple[str, ...], ...] = ((), ("edges",), ("layout",), NETS)
_SIDE_PX = 64
_NUM_STEPS = 20
_LOAD = 0.8
_SLO_TIMES_ALONE = 5.0
_CLIENTS = 16
_NUM_ALONE = 12
_TIMEOUT_S = 300.0
_START_S = 120.0
# longer than a replica is silent
_POLL_S = 3.0
_SEED = 5
# of the speed of the machine
_MOST_DRIFT = 1.15
# points between live and simulated attainment
AIM = 5.0


@dataclass(frozen=True, kw_only=True)
class ControlContender(OwnContender):
    """The built-in configuration with ControlNets as services, on a machine of its own."""

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        own = super().config(site, port)
        del own["pools"]
        return {
            **read_mapping(FILE, "configuration"),
            **own,
            "loras": {"folder": str(site.folder / "loras")},
            "limits": {"max_queued_images": 10_000, "max_queue_s": 1e6},
        }


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Run the service, measure it, and simulate it."""
    report(0.0, "starting Ray and Serve")
    with _service() as url:
        report(0.1, "steps of each kind")
        before = _measured(url, settings.control_warm_s)
        report(0.3, "capacity")
        per_s = _throughput(url, KINDS, settings.control_warm_s)
        planned = plan(settings.control_calls, _LOAD * per_s, _SLO_TIMES_ALONE * before.alone_s)
        report(0.4, f"{len(planned)} calls")
        ended = _send(url, planned)
        report(0.8, "steps of each kind again")
        after = _measured(url, settings.control_warm_s)
    max_batch = load_config(read_mapping(FILE, "configuration")).pools[0].max_batch
    measured = before.between(after)
    on_two = partial(simulate, num_services=len(NETS), max_batch=max_batch)
    times = slowdown(partial(on_two, measured), KINDS, per_s)
    result = on_two(measured.slowed(times), planned)
    found = sections(measured, planned, ended, [fate.is_met for fate in result.fates], per_s)
    in_mix = f"in the mix everything takes {times:.2f} times as long as kind by kind, as its "
    in_mix += "throughput tells: the processes share cores; it is simulated like that"
    return found | {"notes": [in_mix, drift_note(before.drift(after))]}


def drift_note(drift: float) -> str:
    """Say whether the machine was equally fast before and after the calls."""
    doubt = "" if 1 / _MOST_DRIFT <= drift <= _MOST_DRIFT else ": the aim says nothing of this run"
    return f"steps took {drift:.2f} times as long after the calls as before{doubt}"


def sections(
    measured: MeasuredService,
    planned: Sequence[PlannedCall],
    ended: Sequence[float | None],
    simulated: Sequence[bool],
    per_s: float,
) -> dict[str, Any]:
    """Return the tables.

    Args:
        ended: seconds that live calls took; None for one that was refused.
        simulated: whether each was in time there.
        per_s: the capacity.
    """
    live = [
        took_s is not None and took_s <= one.slo_s
        for one, took_s in zip(planned, ended, strict=True)
    ]
    rows = []
    for number in (None, 0, 1, 2):
        chosen = [
            place
            for place, one in enumerate(planned)
            if number is None or len(one.controls) == number
        ]
        rows.append(_row("all" if number is None else f"{number}", chosen, live, simulated))
    add_ons = measured.add_ons()
    return {
        "what": f"{len(planned)} calls of {_SIDE_PX} px and {_NUM_STEPS} steps at {_LOAD:g} of the "
        f"capacity of {per_s:.2f} images a second; deadlines of {planned[0].slo_s:.3f} s, "
        f"{_SLO_TIMES_ALONE:g} times an image alone. Simulated with the steps below: a ControlNet "
        f"takes {add_ons.controlnet_share:.2f} of a step and "
        f"{1e3 * (add_ons.way.transport_s if add_ons.way else 0):.1f} ms on its way",
        "tables": {
            "in time, by ControlNets of an image": rows,
            "steps by ControlNets of an image": [
                {
                    "ControlNets": number,
                    "alone, ms": round(1e3 * measured.alone[number].step_s, 2),
                    "together, ms": round(1e3 * steps.step_s, 2),
                    "images of a step": round(steps.mean_batch, 2),
                }
                for number, steps in measured.together.items()
            ],
        },
        "aims": [_aim(live, simulated).as_dict()],
    }


def _aim(live: Sequence[bool], simulated: Sequence[bool]) -> Aim:
    """Return the aim, with an interval as if no call delayed another."""
    gaps = 100 * (np.array(simulated, float) - np.array(live, float))
    mean = float(gaps.mean())
    spread = 1.96 * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
    ends = sorted((abs(mean - spread), abs(mean + spread)))
    interval = (0.0 if abs(mean) <= spread else ends[0], ends[1])
    return at_most("simulated beside live, in time", AIM, abs(mean), interval, "points")


def _row(
    name: str, chosen: Sequence[int], live: Sequence[bool], simulated: Sequence[bool]
) -> dict[str, Any]:
    shares = [100 * float(np.mean([one[place] for place in chosen])) for one in (live, simulated)]
    return {
        "ControlNets": name,
        "calls": len(chosen),
        "live, %": round(shares[0], 1),
        "simulated, %": round(shares[1], 1),
        "simulated less live, points": round(shares[1] - shares[0], 1),
    }


def plan(count: int, per_s: float, slo_s: float) -> list[PlannedCall]:
    """Return calls at random instants (Poisson), of kinds in equal shares."""
    rng = np.random.default_rng(_SEED)
    instants_s = np.cumsum(rng.exponential(1 / per_s, count))
    kinds = rng.integers(len(KINDS), size=count)
    return [
        PlannedCall(float(at_s), KINDS[kind], slo_s)
        for at_s, kind in zip(instants_s, kinds, strict=True)
    ]


@contextmanager
def _service() -> Iterator[str]:
    """The service, once its ControlNets are there."""
    with tempfile.TemporaryDirectory() as folder:
        contender = ControlContender(what="ControlNets")
        with running(contender, dtype="float32", alone_s={}, log=Path(folder) / "log") as url:
            deadline_s = time.monotonic() + _START_S
            while not all(_is_made(url, (name,)) for name in NETS):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"no ControlNets after {_START_S:.0f} s")
                time.sleep(0.5)
            yield url


def _is_made(url: str, controls: tuple[str, ...]) -> bool:
    with _client(url) as client:
        try:
            _post(client, 0, controls, slo_s=60.0)
        except httpx.HTTPError:
            return False
        return True


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None))


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
    body = image_body(number, num_steps=_NUM_STEPS, size=f"{_SIDE_PX}x{_SIDE_PX}")
    body |= {"slo_s": slo_s, "when_late": "refuse", "metadata": False}
    if controls:
        body["controlnets"] = [{"name": name, "image": _MAP} for name in controls]
    return post_image(client, body)


_MAP = _map()


def _measured(url: str, seconds: float) -> MeasuredService:
    """Measure steps of each kind: by one client, and by many."""
    # by number of ControlNets; those with one have either
    kinds = {0: KINDS[:1], 1: KINDS[1:3], 2: KINDS[3:]}
    alone, together = {}, {}
    replies: list[Reply] = []
    for number, uses in kinds.items():
        begin = _steps(url)
        with _client(url) as client:
            made = [_post(client, seed, uses[seed % len(uses)]) for seed in range(_NUM_ALONE)]
        alone[number] = _steps_since(begin, _steps(url))
        replies += made if number == 0 else []
        begin = _steps(url)
        _throughput(url, uses, seconds)
        together[number] = _steps_since(begin, _steps(url))
    totals_s, decodes_s, others_s = (
        float(np.median(one))
        for one in (
            [reply.total_s for reply in replies],
            [reply.timing["decode_s"] for reply in replies],
            [reply.total_s - reply.timing["denoise_s"] for reply in replies],
        )
    )
    assert totals_s > others_s, "steps take time"
    return MeasuredService(
        side_px=_SIDE_PX,
        num_steps=_NUM_STEPS,
        alone=alone,
        together=together,
        decode_s=decodes_s,
        other_s=others_s - decodes_s,
    )


def _throughput(url: str, kinds: Sequence[tuple[str, ...]], seconds: float) -> float:
    """Return images per second by many clients, who take the kinds in turns."""
    stop = threading.Event()

    def work(client_number: int) -> int:
        made = 0
        with _client(url) as client:
            while not stop.is_set():
                _post(client, made, kinds[(client_number + made) % len(kinds)])
                made += 1
        return made

    started_s = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        calls = [pool.submit(work, number) for number in range(_CLIENTS)]
        time.sleep(seconds)
        stop.set()
        made = sum(call.result() for call in calls)
        return made / (time.perf_counter() - started_s)


def _send(url: str, planned: Sequence[PlannedCall]) -> list[float | None]:
    """Send calls; return the seconds that each took, None for one that was refused."""
    with _client(url) as client:

        def one(number: int) -> float:
            call = planned[number]
            return _post(client, number, call.controls, slo_s=call.slo_s).total_s

        return open_loop([call.at_s for call in planned], one)


def _steps(url: str) -> Mapping[str, float]:
    """Return how many steps there were, their seconds, and the images' own steps.

    Replicas send them with their polls: those of the last steps must have come.
    """
    time.sleep(_POLL_S)
    wanted = {
        "ray_cluster_step_seconds_count": "steps",
        "ray_cluster_step_seconds_sum": "seconds",
        "ray_cluster_step_batch_images_sum": "images",
    }
    found = dict.fromkeys(wanted.values(), 0.0)
    text = httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S).raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                found[wanted[sample.name]] += sample.value
    return found


def _steps_since(begin: Mapping[str, float], end: Mapping[str, float]) -> MeasuredSteps:
    steps, seconds, images = (end[key] - begin[key] for key in ("steps", "seconds", "images"))
    return MeasuredSteps(images / max(1.0, steps), seconds / max(1.0, steps))
