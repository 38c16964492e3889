"""Where ControlNets run, in their base's replicas or as services, and on how many replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ray_cluster.policies.planning.controlnet_placement import (
    ControlNetPlacement,
    ControlNetSteps,
    PlacedControlNet,
    PlacementProblem,
    Shortage,
    evaluated,
    place_controlnets,
)
from ray_cluster.simulator.experiment import validated
from ray_cluster.simulator.reports import Plan, Table

_GIB = 1 << 30
_SHORTAGES: Mapping[Shortage, str] = {
    "memory": "the base's replicas have no memory for what must run there, and there are no more "
    "devices: nothing is placed",
    "time": "steps are too long or the base's replicas too busy, by as little as possible: it "
    "takes more devices, more replicas of the base, or a longer most_step_s",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SizedControlNet(_Part):
    """One that is to be placed."""

    name: str = Field(min_length=1)
    step_s: float = Field(gt=0, le=100, description="of one row of a usual batch")
    memory_gib: float = Field(ge=0, le=1024, description="of a process that has it")
    device_share: float = Field(1.0, gt=0, le=1, description="of a service's replica")


class SizedRequests(_Part):
    """Requests of one kind."""

    controlnets: tuple[str, ...] = Field((), max_length=3)
    per_s: float = Field(gt=0, le=1e5)
    steps: int = Field(ge=1, le=1000)


class ControlNetSizingTask(_Part):
    """What there is, and what is called for; seconds are those of one row of a usual batch."""

    kind: Literal["controlnets"]
    name: str = Field(min_length=1)
    encode_s: float = Field(gt=0, le=100, description="first half of a step of the base")
    decode_s: float = Field(gt=0, le=100, description="second half")
    transport_s: float = Field(0.0, ge=0, le=100, description="to a service and back")
    most_step_s: float = Field(gt=0, le=1000, description="of any request")
    most_busy: float = Field(0.8, gt=0, lt=1, description="share of the time, of any replica")
    num_bases: int = Field(ge=1, le=10_000, description="replicas of the base")
    free_gib: float = Field(ge=0, le=1024, description="memory for ControlNets in each of them")
    num_devices: int = Field(ge=0, le=256, description="that services may hold")
    controlnets: tuple[SizedControlNet, ...] = Field(min_length=1, max_length=64)
    requests: tuple[SizedRequests, ...] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _check_names(self) -> ControlNetSizingTask:
        names = [one.name for one in self.controlnets]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"controlnets has {double[0]!r} twice: give each a name of its own")
        called = {name for one in self.requests for name in one.controlnets}
        if unknown := sorted(called - set(names)):
            raise ValueError(
                f"requests name {unknown[0]!r}, which is not among controlnets: {', '.join(names)}"
            )
        return self

    def problem(self) -> PlacementProblem:
        same = {"encode_s", "decode_s", "transport_s", "most_step_s", "num_bases", "num_devices"}
        return PlacementProblem(
            controlnets=tuple(
                PlacedControlNet(
                    one.name, one.step_s, round(one.memory_gib * _GIB), one.device_share
                )
                for one in self.controlnets
            ),
            steps=tuple(
                ControlNetSteps(one.controlnets, one.per_s * one.steps) for one in self.requests
            ),
            memory_bytes=round(self.free_gib * _GIB),
            most_busy=self.most_busy,
            **self.model_dump(include=same),
        )


def plan_controlnets(content: Mapping[str, Any], path: Path) -> Plan:
    """Place the ControlNets of a file; ConfigError if it says what is not allowed."""
    task = validated(ControlNetSizingTask, content, f"task {path}")
    problem = task.problem()
    placed = place_controlnets(problem)
    locally = evaluated(problem, {one.name: 0 for one in problem.controlnets})
    columns = ["ControlNet", "mode", "replicas", "devices", "busy, %"]
    title = f"{task.name}: steps of at most {task.most_step_s:g} s, {task.num_bases} replicas"
    notes = [f"all local: {_told(locally)}"]
    if placed.shortage != "memory":
        notes.insert(0, f"as planned: {_told(placed)}")
    if placed.shortage is not None:
        notes.append(_SHORTAGES[placed.shortage])
    figures = {
        "task": task.model_dump(mode="json"),
        "replicas": dict(placed.num_replicas),
        "devices": placed.num_devices,
        "base_busy": placed.busy,
        "longest_step_s": placed.longest_step_s,
        "shortage": placed.shortage,
    }
    return Plan(Table(title, columns, list(_rows(problem, placed))), notes, figures)


def _rows(problem: PlacementProblem, placed: ControlNetPlacement) -> Iterator[list[str]]:
    for one in problem.controlnets:
        match placed.num_replicas.get(one.name):
            case None:
                yield [one.name, "", "", "", ""]
            case 0:
                yield [one.name, "local", "", "", ""]
            case number:
                busy = f"{100 * problem.busy(one, number):.0f}"
                yield [one.name, "service", str(number), f"{number * one.device_share:g}", busy]


def _told(placed: ControlNetPlacement) -> str:
    return (
        f"the longest step takes {placed.longest_step_s:.3f} s, the base's replicas are busy for "
        f"{placed.busy:.0%} of the time, services hold {placed.num_devices:g} devices"
    )
