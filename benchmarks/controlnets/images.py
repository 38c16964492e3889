"""Images with ControlNets: diffusers one by one, all in one process, and with services."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.controlnets.services import MODELS, Services, arguments_of, services
from benchmarks.controlnets.settings import ControlSettings
from benchmarks.controlnets.subject import by_diffusers, controlled_requests, maps_of
from benchmarks.engine.streams import TOLERANCE, Images, by_engine
from benchmarks.engine.subject import Subject, largest_difference, load_subject
from benchmarks.loras.subject import chosen, read_styles
from benchmarks.report import Section
from benchmarks.settings import Report
from benchmarks.stats import paired_ratio, summarise
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.controlnets.asks import ControlNetBackend
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.requests import ImageRequest

DIFFUSERS, LOCAL, REMOTE = "diffusers, one by one", "in one process", "services"
# requests of the baseline
_ALONE = 3


@dataclass(frozen=True, slots=True)
class _Taken:
    """What the images of a call took, each.

    Attributes:
        cpu_s: of all processes.
    """

    wall_s: float
    cpu_s: float


def measure(settings: ControlSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject = load_subject()
    todo = list(product(settings.controls, settings.loras, settings.in_flight))
    cells: list[dict[str, Any]] = []
    problems: list[str] = []
    local = LocalControlNets(
        {name: load_bank(arguments_of(name), torch.device("cpu")) for name in MODELS}
    )
    with tempfile.TemporaryDirectory() as name, services() as remote:
        for style, factors in read_styles().items():
            write_factors(factors, Path(name) / style)
        for index, (controls, loras, in_flight) in enumerate(todo):
            cell = {"controlnets": controls, "loras": loras, "in_flight": in_flight}
            words = f"{controls} ControlNets, {loras} LoRAs, {in_flight} in flight"
            report(index / len(todo), words)
            maker = _Maker(subject, Path(name), settings, local, remote)
            rows, wrong = maker.compare(controls, loras, in_flight)
            cells += [cell | row for row in rows]
            problems += [f"{words}: {one}" for one in wrong]
    return {
        "what": f"images of {settings.px} px and {settings.num_steps} steps with guidance; "
        "diffusers loads each request's LoRAs, makes its image and unloads them. Seconds an image: "
        "on the wall clock, and of CPU in all processes; 2 cores, one thread a process",
        "tables": {"images with ControlNets": cells},
        "problems": problems,
    }


class _Maker:
    """Makes the same images in each way, in turns.

    Args:
        folder: of files of LoRAs' factors, by style.
    """

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        settings: ControlSettings,
        local: ControlNetBackend,
        remote: Services,
    ) -> None:
        self._subject, self._settings = subject, settings
        self._folder = folder
        self._local, self._remote = local, remote

    def compare(
        self, num_controls: int, num_loras: int, in_flight: int
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return a row for each way, and what is wrong."""
        settings, count = self._settings, max(_ALONE, in_flight)
        requests = controlled_requests(
            count, num_controls, px=settings.px, num_steps=settings.num_steps
        )
        names = [one.request_id for one in requests]
        loras = dict(zip(names, chosen(num_loras, count), strict=True))
        sets = {name: self._bound(choice) for name, choice in loras.items()}
        ways: dict[str, tuple[Callable[[], Images], int]] = {
            DIFFUSERS: (lambda: by_diffusers(self._subject, requests[:_ALONE], loras), _ALONE),
            LOCAL: (lambda: self._engine(requests, in_flight, sets, self._local), count),
            REMOTE: (lambda: self._engine(requests, in_flight, sets, self._remote.controls), count),
        }
        taken: dict[str, list[_Taken]] = {name: [] for name in ways}
        images: dict[str, Images] = {}
        # the first time is not counted: no way is slower for being first
        for number in range(1 + settings.rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                call, made = ways[name]
                images[name], cost = self._timed(call, made)
                if number:
                    taken[name].append(cost)
        return _rows(taken, images)

    def _bound(self, choice: Mapping[str, float]) -> AdapterSet | None:
        pairs = [(open_factors(self._folder / one), scale) for one, scale in choice.items()]
        return bind_adapters(self._subject.model, pairs) if pairs else None

    def _engine(
        self,
        requests: Sequence[ImageRequest],
        in_flight: int,
        sets: Mapping[str, AdapterSet | None],
        controls: ControlNetBackend,
    ) -> Images:
        return by_engine(
            self._subject,
            requests,
            in_flight,
            sets_of=lambda name: sets[name],
            controls=controls,
            maps_of=lambda one: tuple(map(torch.from_numpy, maps_of(one))),
        )

    def _timed(self, call: Callable[[], Images], count: int) -> tuple[Images, _Taken]:
        began_s, cpu_s = time.perf_counter(), self._cpu_s()
        images = call()
        wall_s = time.perf_counter() - began_s
        return images, _Taken(wall_s / count, (self._cpu_s() - cpu_s) / count)

    def _cpu_s(self) -> float:
        return time.process_time() + self._remote.cpu_s()


def _rows(
    taken: Mapping[str, Sequence[_Taken]], images: Mapping[str, Images]
) -> tuple[list[dict[str, Any]], list[str]]:
    rows, problems = [], []
    baseline = taken[DIFFUSERS]
    for name, own in taken.items():
        row: dict[str, Any] = {
            "way": name,
            "wall_s": summarise([one.wall_s for one in own]).as_dict(),
            "cpu_s": summarise([one.cpu_s for one in own]).as_dict(),
            "images_per_core_minute": 60 / min(one.cpu_s for one in own),
        }
        if name != DIFFUSERS:
            difference = largest_difference(images[DIFFUSERS], images[name])
            row["largest_difference_255"] = difference
            if difference > TOLERANCE:
                problems.append(f"{name}: images differ by {difference}/255, allowed {TOLERANCE}")
            for clock in ("wall_s", "cpu_s"):
                pair = [[getattr(one, clock) for one in side] for side in (baseline, own)]
                row[f"speed_up_{clock.removesuffix('_s')}"] = paired_ratio(*pair).as_dict()
        rows.append(row)
    return rows, problems
