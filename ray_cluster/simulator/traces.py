"""Workloads in files: one request per line, as CSV with a header or as JSON lines.

Columns are those of :class:`TraceRow`; who needs instants alone reads :class:`ArrivalRow`. In CSV
an empty cell means the default, and several names stand in one cell with ``|`` between them.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.experiment import PrintedName
from ray_cluster.simulator.workload import Arrival

_SEPARATOR = "|"
# thirty days
MOST_SPAN_S = 30 * 86400.0
# columns that workloads call otherwise
_FIELDS = {
    "width": "width_px",
    "height": "height_px",
    "steps": "num_steps",
    "guidance": "uses_guidance",
}


def _split(value: Any) -> Any:
    return tuple(filter(None, value.split(_SEPARATOR))) if isinstance(value, str) else value


_Name = Annotated[str, Field(min_length=1, pattern=r"^[^|]*$")]
Names = Annotated[tuple[_Name, ...], BeforeValidator(_split)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class ArrivalRow(BaseModel):
    """When a request of a trace comes; other columns count nothing."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    arrival_s: _Finite = Field(
        ge=0, le=MOST_SPAN_S, description="seconds from the trace's beginning, no date"
    )


class TraceRow(ArrivalRow):
    """One request of a trace."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: PrintedName
    width: int = Field(ge=8, le=16384, description="pixels")
    height: int = Field(ge=8, le=16384, description="pixels")
    steps: int = Field(ge=1, le=1000, description="denoising steps")
    guidance: bool = Field(True, description="whether each step calls the model twice")
    slo_s: _Finite | None = Field(None, gt=0, description="seconds to the deadline; none if absent")
    slo_class: PrintedName = Field("default", description="under which it is counted")
    priority: int = Field(0, ge=-100, le=100)
    fewest_steps: int | None = Field(None, ge=1, description="if that brings it in time; all")
    controlnets: Names = ()
    loras: Names = ()
    mask_ratio: _Finite | None = Field(None, ge=0, le=1, description="of an edit")
    template: str | None = Field(None, min_length=1, description="of an edit: its image")
    reference_px: int = Field(0, ge=0, le=1 << 32, description="of pictures that are looked at")

    @model_validator(mode="after")
    def _check_steps(self) -> TraceRow:
        if (self.fewest_steps or 1) > self.steps:
            raise ValueError(
                f"fewest_steps must be at most steps, {self.steps}; given {self.fewest_steps}"
            )
        return self

    def arrival(self) -> Arrival:
        content = {_FIELDS.get(name, name): value for name, value in self}
        content["slo_s"] = math.inf if self.slo_s is None else self.slo_s
        return Arrival(**content)

    @classmethod
    def of(cls, arrival: Arrival) -> TraceRow:
        content = {name: getattr(arrival, _FIELDS.get(name, name)) for name in cls.model_fields}
        content["slo_s"] = None if math.isinf(arrival.slo_s) else arrival.slo_s
        return cls(**content)


_R = TypeVar("_R", bound=ArrivalRow)


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace, in the order of arrival.

    Raises:
        ConfigError: the file can't be read; the message has the line and what is wrong with it.
    """
    arrivals = [row.arrival() for row in _read_rows(path, TraceRow)]
    return sorted(arrivals, key=lambda one: one.arrival_s)


def read_instants(path: Path) -> list[float]:
    """Read the arrivals of a trace, rising; errors as of :func:`read_trace`."""
    return sorted(row.arrival_s for row in _read_rows(path, ArrivalRow))


def _read_rows(path: Path, kind: type[_R]) -> list[_R]:
    is_csv = _is_csv(path)
    rows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, fields in _csv_rows(file) if is_csv else _json_rows(file):
                try:
                    rows.append(kind.model_validate(fields))
                except ValidationError as error:
                    problem = describe(error, kind)
                    raise ConfigError(f"{path}, line {line}: {problem}") from None
    except (OSError, UnicodeDecodeError, csv.Error, _BadLine) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    if not rows:
        raise ConfigError(f"the trace {path} has no requests; a line holds one each")
    return rows


def write_trace(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a workload so that `read_trace` gives it back.

    Raises:
        ConfigError: the file's name ends in neither .csv nor .jsonl.
    """
    is_csv = _is_csv(path)
    rows = [TraceRow.of(one).model_dump(mode="json", exclude_defaults=True) for one in arrivals]
    with path.open("w", encoding="utf-8", newline="") as file:
        if not is_csv:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            return
        used = [name for name in TraceRow.model_fields if any(name in row for row in rows)]
        writer = csv.DictWriter(file, used)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})


class _BadLine(Exception):
    """A line that is not even a row."""


def _is_csv(path: Path) -> bool:
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"a trace's name ends in .csv or .jsonl; given {path.name!r}")
    return path.suffix == ".csv"


def _csv_rows(file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(file)
    names = reader.fieldnames or ()
    if len(set(names)) < len(names):
        raise _BadLine(f"the header has a column twice: {', '.join(names)}")
    for row in reader:
        if None in row:
            raise _BadLine(f"line {reader.line_num} has more cells than the header")
        yield reader.line_num, {name: cell for name, cell in row.items() if cell not in ("", None)}


def _json_rows(file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_once)
        except RecursionError:
            raise _BadLine(f"line {number} is nested too deeply") from None
        except ValueError as error:
            raise _BadLine(f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise _BadLine(f"line {number} is not an object but {line.strip()[:40]!r}")
        yield number, row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("it has a key twice")
    return row


def _cell(value: Any) -> Any:
    return _SEPARATOR.join(value) if isinstance(value, list) else value
