"""What is compared on which requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.baselines.settings import shape_name
from benchmarks.serving.contenders import COMPARED

Process = Literal["poisson", "bursty"]
# coefficient of variation of the gaps between arrivals
CV_BY_PROCESS: dict[Process, float] = {"poisson": 1.0, "bursty": 2.0}
SAMPLER = "ddim"
GUIDANCE = 2.0
# a later run into the same folder may have more of these; all else must be the same
_EXTENSIBLE = ("contenders", "loads", "processes", "num_traces")


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides how much work an image is; its guidance is always the same."""

    width_px: int
    height_px: int
    num_steps: int

    @property
    def name(self) -> str:
        """Its name in tables and files."""
        return shape_name(self.width_px, self.height_px, self.num_steps)

    @property
    def size(self) -> str:
        """Its size as the API spells it."""
        return f"{self.width_px}x{self.height_px}"


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison.

    Attributes:
        contenders: their names; see ``contenders.py``.
        loads: in shares of the capacity of the better baseline.
        processes: of arrivals.
        num_traces: of each process.
        num_requests: of a trace.
        slo_times: the deadline, in durations of the request alone on the baseline.
        alone_repeats: images of each shape that are made alone to measure that.
        capacity_requests: concurrent requests with which a baseline's capacity is measured.
        profile_repeats: measurements of each operation for the simulator.
        first_seed: of the traces.
    """

    contenders: tuple[str, ...] = tuple(COMPARED)
    loads: tuple[float, ...] = (0.3, 0.6, 1.0, 1.4)
    processes: tuple[Process, ...] = ("poisson", "bursty")
    num_traces: int = 5
    num_requests: int = 150
    sizes: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (64, 128), (128, 64))
    steps: tuple[int, ...] = (10, 20, 30)
    dtype: str = "float32"
    slo_times: float = 5.0
    alone_repeats: int = 5
    capacity_requests: int = 60
    profile_repeats: int = 10
    first_seed: int = 7000

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every kind of request; all are as frequent."""
        return tuple(Shape(*size, steps) for size in self.sizes for steps in self.steps)

    def identity(self) -> dict[str, Any]:
        """Return what must be equal in all runs into one folder."""
        return {name: value for name, value in asdict(self).items() if name not in _EXTENSIBLE}


def quick(settings: Settings) -> Settings:
    """Return settings of some minutes that only show that everything works."""
    return replace(
        settings,
        loads=settings.loads[-1:],
        processes=settings.processes[:1],
        num_traces=1,
        num_requests=30,
        alone_repeats=2,
        capacity_requests=15,
        profile_repeats=3,
    )
