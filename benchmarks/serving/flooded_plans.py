"""What the controller plans while one client's calls are refused, another one's come in a burst, or
both: models stay above their floors, and all is as before soon after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import httpx

from benchmarks.harness import Study
from benchmarks.serving.floods import FLOOD_KEY, OTHER_KEY, flooded_of, png_of
from benchmarks.serving.services import Act, Config, Contender, Running, calling, running

_MODEL, _NET = "shapes-sd", "edges"
_PERIOD_S, _ROUNDS = 2.0, 5
_PROMPT = "a large red circle in the center on a white background"


def planned_of(usual: Config) -> Config:
    """Return a model and its ControlNet that share three CPUs, under a controller."""
    own = flooded_of(usual)
    [pool] = [one for one in own["pools"] if one["name"] == _MODEL]
    [net] = own["controlnets"]
    bounds = {"num_cpus": 1.0, "min_replicas": 1, "max_replicas": 2}
    return own | {
        "ray": {**own["ray"], "num_cpus": 3},
        "pools": [pool | bounds],
        "controlnets": [net | {"num_cpus": 1.0}],
        "control": {"enabled": True, "scaling": "policy", "period_s": _PERIOD_S, "dwell_s": 10},
        "loras": {"num_stores": 0},
    }


class Planned(NamedTuple):
    """Replicas of a round."""

    model: int
    net: int


def _call(client: httpx.Client, **changes: Any) -> None:
    control = {"name": _NET, "image": png_of(96), "preprocess": "canny"}
    body = {"prompt": _PROMPT, "model": _MODEL, "controlnets": [control], **changes}
    with suppress(httpx.HTTPError):
        client.post("/v1/images/generations", json=body)


def _honest(client: httpx.Client, _number: int, _call_number: int) -> None:
    _call(client, num_inference_steps=10)
    time.sleep(0.5)


def _refused(client: httpx.Client, _number: int, _call_number: int) -> None:
    _call(client, num_inference_steps=100, n=10, slo_s=0.01, when_late="refuse")


def _burst(client: httpx.Client, _number: int, _call_number: int) -> None:
    _call(client, num_inference_steps=20, n=4)


# by how many threads one client's calls are refused, and the other one's come in a burst
PHASES = {"refused": (2, 0), "burst": (0, 3), "both": (2, 3)}


def measure(study: Study) -> None:
    """Run the service, and look at each round's plan through the phases."""
    phase_s, rows = study.pick(30.0, 10.0), []
    with (
        running(Contender(what="a controller under floods", change=planned_of)) as service,
        calling(service, 1, _honest, key=OTHER_KEY),
    ):
        before = _plans(service, phase_s)[-1]
        for name in study.each(PHASES):
            during = _flooded(service, PHASES[name], phase_s)
            after = _plans(service, phase_s)
            is_back = [one.model >= before.model and one.net == before.net for one in after]
            columns = {
                "phase": name,
                "rounds": len(during),
                "fewest of the model": min(one.model for one in during),
                "most of the ControlNet": max(one.net for one in during),
                "rounds until as before": is_back.index(True) if True in is_back else len(after),
            }
            rows.append(study.row("planned replicas", **columns))
    study.found["what"] = (
        f"a plan each {_PERIOD_S:g} s; a model (1 to 2 replicas) and a ControlNet share 3 CPUs; "
        f"before: {before.model} and {before.net}"
    )
    fewest = min(row["fewest of the model"] for row in rows)
    study.at_least("planned of the model", 1, fewest, "")
    most = max(row["rounds until as before"] for row in rows)
    study.at_most("back after", _ROUNDS, most, "rounds")


def _flooded(service: Running, threads: tuple[int, int], phase_s: float) -> Sequence[Planned]:
    """Return what is planned while calls are refused, and come in a burst, by so many threads."""
    acts: tuple[tuple[str, Act], ...] = ((FLOOD_KEY, _refused), (OTHER_KEY, _burst))
    flood, burst = (
        calling(service, count, act, key=key)
        for count, (key, act) in zip(threads, acts, strict=True)
    )
    with flood, burst:
        return _plans(service, phase_s)


def _plans(service: Running, seconds: float) -> Sequence[Planned]:
    """Return what each round of the next seconds plans."""
    found: dict[float, Planned] = {}
    end_s = time.monotonic() + seconds
    with service.client(OTHER_KEY) as client:
        while time.monotonic() < end_s or not found:
            reply = client.get("/v1/plan").raise_for_status()
            if (latest := reply.json()["latest"]) is not None:
                counts = {one["pool"]: one["num_planned"] for one in latest["pools"]}
                if {_MODEL, _NET} <= counts.keys():
                    found[latest["at"]] = Planned(counts[_MODEL], counts[_NET])
            time.sleep(_PERIOD_S / 4)
    return list(found.values())
