"""Images with ControlNets: diffusers one by one, all in one process, and with services.

And what it costs a step that its ControlNet runs in another process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.controlnets.services import MODELS, Services, arguments_of, services
from benchmarks.controlnets.subject import by_diffusers, controlled_requests, maps_of
from benchmarks.engine.subject import Subject, by_engine, load_subject
from benchmarks.figures import summarise
from benchmarks.harness import NUM_STEPS, Case, Cost, Plot, Row, Study, Ways, in_turns
from benchmarks.loras.subject import chosen, read_styles
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.controlnets.asks import ControlNetAsk, ControlNetBackend
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.requests import ImageRequest

DIFFUSERS, LOCAL, REMOTE = "diffusers, one by one", "in one process", "services"
_PX = 64
# requests of the baseline
_ALONE = 3
# of the first steps, which open requests, and make kernels
_WARM_UP = 5


def measure(study: Study) -> None:
    """Measure images with none to three ControlNets, with LoRAs and without."""
    num_steps, title = study.pick(NUM_STEPS, 3), "images with ControlNets"
    study.found["what"] = (
        f"images of {_PX} px and {num_steps} steps with guidance; diffusers loads each request's "
        "LoRAs, makes its image and unloads them. Milliseconds of an image: of CPU in all "
        "processes, and on the wall clock; 2 cores, one thread a process"
    )
    subject = load_subject()
    todo = product(
        study.pick((0, 1, 2, 3), (0, 3)), study.pick((0, 2), (0,)), study.pick((1, 4), (4,))
    )
    local = LocalControlNets(
        {name: load_bank(arguments_of(name), torch.device("cpu")) for name in MODELS}
    )
    with tempfile.TemporaryDirectory() as name, services() as remote:
        for style, factors in read_styles().items():
            write_factors(factors, Path(name) / style)
        for num_controls, num_loras, in_flight in study.each(todo):
            requests = controlled_requests(
                max(_ALONE, in_flight), num_controls, px=_PX, num_steps=num_steps
            )
            loras = dict(zip(_ids(requests), chosen(num_loras, len(requests)), strict=True))
            sets = {key: _bound(subject, Path(name), one) for key, one in loras.items()}
            engine = partial(_by_engine, subject, requests, in_flight, sets)
            ways: Ways = {
                DIFFUSERS: partial(by_diffusers, subject, requests[:_ALONE], loras),
                LOCAL: partial(engine, local),
                REMOTE: partial(engine, remote.controls),
            }
            about = {"controlnets": num_controls, "loras": num_loras, "in_flight": in_flight}
            shares = dict.fromkeys(ways, len(requests)) | {DIFFUSERS: _ALONE}
            now = partial(_all_processes, remote)
            case = Case(about, ways, study.pick(5, 1), shares, "process", now=now)
            study.compare(title, case)
    study.plots.append(Plot(title, "controlnets", ("speed_up",), ("by", "loras", "in_flight")))


def _all_processes(remote: Services) -> Cost:
    """Read the clocks, CPU seconds of the services with those of this process."""
    found = Cost.now()
    return found._replace(process_s=found.process_s + remote.cpu_s())


def _ids(requests: Sequence[ImageRequest]) -> list[str]:
    return [one.request_id for one in requests]


def _bound(subject: Subject, folder: Path, choice: Mapping[str, float]) -> AdapterSet | None:
    pairs = [(open_factors(folder / one), scale) for one, scale in choice.items()]
    return bind_adapters(subject.model, pairs) if pairs else None


def _by_engine(
    subject: Subject,
    requests: Sequence[ImageRequest],
    in_flight: int,
    sets: Mapping[str, AdapterSet | None],
    controls: ControlNetBackend,
) -> object:
    return by_engine(
        subject,
        requests,
        in_flight,
        sets_of=lambda name: sets[name],
        controls=controls,
        maps_of=lambda one: tuple(map(torch.from_numpy, maps_of(one))),
    )


def measure_steps(study: Study) -> None:
    """Measure a step's residuals: computed in the process, and by a service."""
    study.found["what"] = (
        f"ms until the residuals of a step of requests of {_PX} px with guidance are there: "
        "computed in the process, and asked of a service that is otherwise idle; in turns, wall "
        "clock"
    )
    subject = load_subject()
    local = LocalControlNets({"edges": load_bank(arguments_of("edges"), torch.device("cpu"))})
    for link in study.each(("shared memory", "tcp")):
        with services(shares_memory=link == "shared memory") as remote:
            for batch in (1, 4):
                backends: dict[str, ControlNetBackend] = {"here": local, "there": remote.controls}
                figures = _residuals(backends, _asks(subject, batch), study.pick(200, 5))
                study.row("a step's residuals", link=link, batch=batch, **figures)


def _residuals(
    backends: Mapping[str, ControlNetBackend], asks: Sequence[ControlNetAsk], rounds: int
) -> Row:
    ways = {name: partial(_answered, one, asks) for name, one in backends.items()}
    in_turns(ways, _WARM_UP)
    costs = in_turns(ways, rounds)
    for controls in backends.values():
        for one in asks:
            controls.forget(one.key)
    here, there = ([1e3 * one.wall_s for one in costs[name]] for name in ways)
    more = [second - first for first, second in zip(here, there, strict=True)]
    columns = {"here_ms": here, "there_ms": there, "overhead_ms": more}
    return {name: summarise(own) for name, own in columns.items()}


def _asks(subject: Subject, count: int) -> list[ControlNetAsk]:
    requests = controlled_requests(count, 1, px=_PX, num_steps=NUM_STEPS)
    with torch.inference_mode():
        states = subject.start(requests)
    return [
        ControlNetAsk(
            name="edges",
            key=f"{state.request.request_id}/0",
            conditioning=state.conditioning,
            map=torch.from_numpy(maps_of(state.request)[0]),
            latents=state.latents,
            timestep=500.0,
            deadline_s=time.monotonic() + 1e6,
        )
        for state in states
    ]


@torch.inference_mode()
def _answered(controls: ControlNetBackend, asks: Sequence[ControlNetAsk]) -> None:
    futures = controls.ask(asks)
    wait(futures)
    for one in futures:
        one.result()
