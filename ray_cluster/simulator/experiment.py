"""What all experiments have in common: their files' keys, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.reports import Report

_M = TypeVar("_M", bound=BaseModel)
_T = TypeVar("_T")

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9-]+$")]
PrintedName = Annotated[
    str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
]
"""A name as tables show it: without control characters."""
IN_TRACE = "a trace says that itself: leave it out, or the trace"
# a simulation of so many takes some minutes
MOST_REQUESTS = 2_000_000


@dataclass(frozen=True)
class ExperimentTask:
    """An experiment as independent parts, and what makes a report of their results.

    Attributes:
        parts: functions without arguments that can be sent to other processes.
        sum_up: takes the results in the parts' order.
    """

    name: str
    parts: Sequence[Callable[[], Any]]
    sum_up: Callable[[Sequence[Any]], Report]


class Experiment(BaseModel):
    """What every experiment's file says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: Name
    what: str = Field(min_length=1, description="for readers of the report")
    policies: tuple[str, ...] = Field(min_length=1)
    first_seed: int = Field(1000, ge=0, lt=2**63)
    num_seeds: int = Field(30, ge=1, le=1000)

    @field_validator(
        *("policies", "rates_per_s", "speeds", "mixes", "rates_per_min", "scales"),
        check_fields=False,
    )
    @classmethod
    def _check_repeats(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        repeated = sorted({str(one) for one in values if values.count(one) > 1})
        if repeated:
            raise ValueError(f"each is allowed once; given twice: {', '.join(repeated)}")
        return values

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Refuse keys that the file has, for a reason; ValueError."""
        for name in names:
            if name in self.model_fields_set:
                given = self.model_dump(mode="json")[name]
                raise ValueError(f"{name}: given {given!r:.60}; {why}")

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.num_seeds)


def validated(model: type[_M], content: Mapping[str, Any], name: str) -> _M:
    """Return a file's content as a model; errors call the file by the name.

    Raises:
        ConfigError: it is none; the message names the key, what was given and what is allowed.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"the {name}: {describe(error, model)}") from None


def load_choices(path: Path, choice: type[_T]) -> list[_T]:
    """Return a JSON list of what tuning chose, of a dataclass.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        read: list[_T] = TypeAdapter(list[choice]).validate_json(path.read_bytes())  # type: ignore[valid-type]
    except OSError as error:
        raise ConfigError(f"cannot read the choices {path}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the choices {path}: {place}: {first['msg']}; those in benchmarks/policies show "
            "what such a file holds"
        ) from None
    return read
