"""The controller: whether it runs, how often it plans, and how much it may change at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ray_cluster.config.section import REDEPLOY, Section

Scaling = Literal["endpoint", "policy"]


class ControlConfig(Section):
    """The controller, which starts and stops replicas as demand comes and goes."""

    APPLIED = "live"

    enabled: bool = Field(
        False,
        description="whether a controller plans replicas, batches and thresholds",
        json_schema_extra=REDEPLOY,
    )
    scaling: Scaling = Field(
        "endpoint",
        description="how planned replicas reach Ray Serve: `endpoint` calls the scale endpoint of "
        "Ray's dashboard; `policy` needs no dashboard: workers get an autoscaling policy that "
        "reads the plan from Ray's key-value store",
        json_schema_extra=REDEPLOY,
    )
    period_s: float = Field(5.0, ge=0.5, le=60, description="time from plan to plan")
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
        "not applied, and what a pool has grown by is rolled back for a while",
    )
    dry_run: bool = Field(False, description="whether plans are made and shown, and not applied")

    @property
    def scales_by_policy(self) -> bool:
        """Whether an autoscaling policy sets the replicas of workers."""
        return self.enabled and self.scaling == "policy"
