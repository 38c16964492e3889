"""The controller: whether it runs, how often it plans, and how much it may change at once."""

from __future__ import annotations

from pydantic import Field

from ray_cluster.config.sections import Section


class ControlArguments(Section):
    """Whether the cell has a controller, which is an application of its own."""

    enabled: bool = Field(
        False,
        description="whether a controller plans replicas, batches and thresholds; it needs Ray's "
        "dashboard, whose port Ray Serve is scaled through",
    )


class ControlSettings(Section):
    """How the controller plans."""

    period_s: float = Field(5.0, ge=0.5, le=3600, description="time from plan to plan")
    dwell_s: float = Field(
        60.0,
        ge=0,
        description="age below which a replica is not stopped, unless demand cannot be met "
        "otherwise; silence after which demand is forgotten",
    )
    max_actions_per_period: int = Field(
        4, ge=1, description="pools that one plan starts or stops replicas of at most"
    )
    apply_timeout_s: float = Field(
        180.0,
        gt=0,
        description="time in which the replicas of a plan must run; after that it is reported as "
        "not applied",
    )
    dry_run: bool = Field(False, description="whether plans are made and shown, and not applied")


class ControlConfig(ControlSettings, ControlArguments):
    """The controller, which starts and stops replicas as demand comes and goes."""
