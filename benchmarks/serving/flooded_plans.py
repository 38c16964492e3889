"""What the controller plans while one client's calls are refused, another one's come in a burst, or
both: models stay above their floors, and all is as before soon after.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.contenders import Site
from benchmarks.serving.floods import FLOOD_KEY, OTHER_KEY, FloodedContender, png_of
from benchmarks.serving.service_process import running
from benchmarks.settings import Report, Settings
from benchmarks.verdicts import at_least, at_most

_MODEL, _NET = "shapes-sd", "edges"
_PERIOD_S, _ROUNDS = 2.0, 5
_PROMPT = "a large red circle in the center on a white background"


@dataclass(frozen=True, kw_only=True)
class PlannedContender(FloodedContender):
    """A model and its ControlNet that share three CPUs, under a controller."""

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        own = super().config(site, port)
        [pool] = [one for one in own["pools"] if one["name"] == _MODEL]
        [net] = own["controlnets"]
        bounds = {"num_cpus": 1.0, "min_replicas": 1, "max_replicas": 2}
        control = {"enabled": True, "scaling": "policy", "period_s": _PERIOD_S, "dwell_s": 10}
        return own | {
            "ray": {**own["ray"], "num_cpus": 3},
            "pools": [pool | bounds],
            "controlnets": [net | {"num_cpus": 1.0}],
            "control": control,
            "loras": {"num_stores": 0},
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """Replicas of a round."""

    model: int
    net: int


def _call(client: httpx.Client, **changes: Any) -> None:
    control = {"name": _NET, "image": png_of(96), "preprocess": "canny"}
    body = {"prompt": _PROMPT, "model": _MODEL, "controlnets": [control], **changes}
    with suppress(httpx.HTTPError):
        client.post("/v1/images/generations", json=body)


def _honest(client: httpx.Client) -> None:
    _call(client, num_inference_steps=10)
    time.sleep(0.5)


def _refused(client: httpx.Client) -> None:
    _call(client, num_inference_steps=100, n=10, slo_s=0.01, when_late="refuse")


def _burst(client: httpx.Client) -> None:
    _call(client, num_inference_steps=20, n=4)


# what one client does, and by how many threads the other one calls in a burst
PHASES = {"refused": (2, 0), "burst": (0, 3), "both": (2, 3)}


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Run the service, and look at each round's plan through the phases."""
    rows = []
    report(0.0, "starting Ray and Serve")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contender = PlannedContender(what="a controller under floods")
        url = stack.enter_context(
            running(contender, dtype="float32", alone_s={}, log=Path(folder) / "log")
        )
        stack.enter_context(calling(url, OTHER_KEY, _honest, 1))
        before = _plans(url, settings.flood_phase_s)[-1]
        for number, (name, (refused, burst)) in enumerate(PHASES.items()):
            report((1 + number) / (1 + len(PHASES)), name)
            with (
                calling(url, FLOOD_KEY, _refused, refused),
                calling(url, OTHER_KEY, _burst, burst),
            ):
                during = _plans(url, settings.flood_phase_s)
            after = _plans(url, settings.flood_phase_s)
            rows.append(_row(name, before, during, after))
    worst_floor = min(row["fewest of the model"] for row in rows)
    most_rounds = max(row["rounds until as before"] for row in rows)
    return {
        "what": f"a plan each {_PERIOD_S:g} s; a model (1 to 2 replicas) and a ControlNet share 3 "
        f"CPUs; before: {before.model} and {before.net}",
        "tables": {"planned replicas": rows},
        "aims": [
            at_least("planned of the model", 1, worst_floor, (worst_floor,) * 2, "").as_dict(),
            at_most("back after", _ROUNDS, most_rounds, (most_rounds,) * 2, "rounds").as_dict(),
        ],
    }


def _row(
    name: str, before: Planned, during: Sequence[Planned], after: Sequence[Planned]
) -> dict[str, Any]:
    is_back = [one.model >= before.model and one.net == before.net for one in after]
    return {
        "phase": name,
        "rounds": len(during),
        "fewest of the model": min(one.model for one in during),
        "most of the ControlNet": max(one.net for one in during),
        "rounds until as before": is_back.index(True) if True in is_back else len(after),
    }


def _plans(url: str, seconds: float) -> list[Planned]:
    """Return what each round of the next seconds plans."""
    found: dict[float, Planned] = {}
    end_s = time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    while time.monotonic() < end_s or not found:
        reply = httpx.get(f"{url}/v1/plan", headers=headers, timeout=30.0).raise_for_status()
        if (latest := reply.json()["latest"]) is not None:
            counts = {one["pool"]: one["num_planned"] for one in latest["pools"]}
            if {_MODEL, _NET} <= counts.keys():
                found[latest["at"]] = Planned(counts[_MODEL], counts[_NET])
        time.sleep(_PERIOD_S / 4)
    return list(found.values())


@contextmanager
def calling(
    url: str, key: str, act: Callable[[httpx.Client], None], num_threads: int
) -> Iterator[None]:
    """Call again and again within the block."""
    is_over = threading.Event()
    headers = {"Authorization": f"Bearer {key}"}

    def run() -> None:
        with httpx.Client(base_url=url, headers=headers, timeout=60.0) as client:
            while not is_over.is_set():
                act(client)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
