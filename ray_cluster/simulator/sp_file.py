"""Experiment files about requests on one group of GPUs, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ray_cluster.models.profiles import load_profile
from ray_cluster.simulator.sp_experiment import (
    BOUND,
    REPORTING_SEEDS,
    Choices,
    SpExperiment,
    Unit,
    units_of,
)
from ray_cluster.simulator.sp_policies import planner_of
from ray_cluster.simulator.sp_tuning import FAMILIES, load_choices
from ray_cluster.simulator.sp_workload import FLUX_CLASSES, MixName, menus_of

_USUAL = SpExperiment()
_Rate = Annotated[float, Field(gt=0, le=1e6)]
_Scale = Annotated[float, Field(gt=0, le=1000)]


class SpFile(BaseModel):
    """What an experiment file of this kind may say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["sequence-parallel"]
    name: str = Field(min_length=1, pattern=r"^[a-z0-9-]+$")
    what: str = Field(min_length=1, description="for readers of the report")
    profile: str = Field(description="a latency profile, by its name or path")
    mixes: tuple[MixName, ...] = Field(_USUAL.mixes, min_length=1)
    rates_per_min: tuple[_Rate, ...] = Field(min_length=1)
    scales: tuple[_Scale, ...] = Field(min_length=1, description="of the deadlines")
    policies: tuple[str, ...] = Field(min_length=1)
    choices: Path | None = Field(None, description="tuned policies by cell, beside the file")
    num_arrivals: int = Field(_USUAL.num_arrivals, ge=1, le=100_000)
    num_gpus: int = Field(_USUAL.num_gpus, ge=1, le=64)
    switch_s: float = Field(_USUAL.switch_s, ge=0, le=60)
    step_noise: float = Field(_USUAL.step_noise, ge=0, le=1, description="CV of equal steps")
    time_error: float = Field(_USUAL.time_error, ge=0, le=1)
    # above 2 a seed now and then has too few arrivals
    cv: float = Field(_USUAL.cv, ge=0, le=2, description="of the gaps between arrivals")
    first_seed: int = Field(REPORTING_SEEDS[0], ge=0)
    num_seeds: int = Field(len(REPORTING_SEEDS), ge=1, le=1000)

    @field_validator("mixes", "rates_per_min", "scales", "policies")
    @classmethod
    def _check_repeats(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        repeated = sorted({str(one) for one in values if values.count(one) > 1})
        if repeated:
            raise ValueError(f"each may be there once; given twice: {', '.join(repeated)}")
        return values

    @field_validator("policies")
    @classmethod
    def _check_first(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        if policies[0] == BOUND:
            raise ValueError(
                f"the first is the policy that others are compared with; {BOUND!r} is none: put "
                "it behind one"
            )
        return policies

    def experiment(self) -> SpExperiment:
        """What is simulated."""
        return SpExperiment(
            profile=self.profile,
            mixes=self.mixes,
            rates_per_min=self.rates_per_min,
            scales=self.scales,
            policies=self.policies,
            seeds=tuple(range(self.first_seed, self.first_seed + self.num_seeds)),
            num_arrivals=self.num_arrivals,
            num_gpus=self.num_gpus,
            switch_s=self.switch_s,
            step_noise=self.step_noise,
            time_error=self.time_error,
            cv=self.cv,
        )

    def read_choices(self, folder: Path) -> Choices:
        """Return the tuned policies that the file names, seen from its folder."""
        return {} if self.choices is None else load_choices(folder / self.choices, self.profile)


def checked_units(experiment: SpExperiment, choices: Choices) -> list[Unit]:
    """Return an experiment's workloads, if all of them can be run.

    Raises:
        ConfigError: there is no such profile.
        ValueError: it lacks images of the experiment's sizes, or there is no such policy.
    """
    profile = load_profile(experiment.profile)
    sides_px = {
        row.key.width_px for row in profile.of("image") if row.key.sp_degree <= experiment.num_gpus
    }
    lacking = [one.side_px for one in FLUX_CLASSES if one.side_px not in sides_px]
    if lacking:
        raise ValueError(
            f"profile: given {experiment.profile!r}, which has no whole images of "
            f"{', '.join(map(str, lacking))} px on up to {experiment.num_gpus} GPUs; allowed: "
            "profiles that have them, such as flux-h100-a"
        )
    units = units_of(experiment, choices)
    menus = menus_of(profile, experiment.classes, num_gpus=experiment.num_gpus)
    names = {name for unit in units for name in _standing_for(unit)}
    for name in sorted(names - {BOUND}):
        try:
            planner_of(name, menus)
        except ValueError as error:
            raise ValueError(f"policies: {error}") from None
    return units


def _standing_for(unit: Unit) -> Sequence[str]:
    """The policies of a unit; a family that nothing was chosen of can't be run."""
    for label, name in unit.policies:
        if label == name and label in FAMILIES:
            cell = unit.cell
            raise ValueError(
                f"policies: given {label!r}, of which nothing was chosen for "
                f"{unit.experiment.profile}, {cell.mix}, {cell.rate_per_min:g} per minute at a "
                f"scale of {cell.scale:g}; allowed: the cells of the file that "
                "`choices` names"
            )
    return [name for _, name in unit.policies]
