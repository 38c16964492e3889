"""Loads a model in this process, measures it, and writes and shows its latency profile."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ray_cluster.cli.output import print_table, stderr, stdout
from ray_cluster.cli.service.model_plans import profile_of
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.device.gpu import number_format_here
from ray_cluster.engine.device.profiling import ProfilingPlan, describe_key, measure_rows
from ray_cluster.engine.device.timing import SizePx
from ray_cluster.engine.models.loading import load_model
from ray_cluster.engine.stages.warmup import device_name, other_size, prepare_threads
from ray_cluster.errors import ConfigError
from ray_cluster.models.latency_profiles import check_name, save_profile
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey
from ray_cluster.requests import ModelProfile

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_MAX_BATCH = 1024


def run_profile(
    out: Path, pool: PoolConfig, *, sizes: str | None, batches: str, repeats: int
) -> None:
    """Measure a pool's model and write its profile; sizes and batches as they were typed.

    Raises:
        ConfigError: an option can't be used, or the model can't be loaded.
    """
    check_name(out)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    numbers = _numbers(batches)
    prepare_threads(pool.num_threads)
    # errors are raised before the weights are loaded
    plan = ProfilingPlan(_sizes(sizes, profile_of(pool)), numbers, repeats)
    profile = _measure(pool, plan)
    save_profile(out, profile)
    table = Table("operation", "ms", "CV, %", "ms an image", title=f"{profile.model}, measured")
    for row in profile.rows:
        milliseconds = 1e3 * row.seconds
        spread = f"{100 * row.cv:.1f}" if row.cv else "-"
        alone = f"{milliseconds / row.key.num_images:.2f}"
        table.add_row(describe_key(row.key), f"{milliseconds:.2f}", spread, alone)
    print_table(stdout(), table)
    stdout().print(f"written: {out}", markup=False)


def _measure(pool: PoolConfig, plan: ProfilingPlan) -> LatencyProfile:
    device = device_name(torch.device(pool.device))
    source = _source(pool, device)
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(f"loading {pool.model}", total=None)
        started_s = time.monotonic()
        model = load_model(pool)
        load_s = time.monotonic() - started_s
        load = LatencyRow(OperationKey("load"), load_s, "measured", f"{source}; once")
        rows = measure_rows(
            model,
            plan,
            source=source,
            clock=time.perf_counter,
            report=lambda done, total, text: progress.update(
                task, completed=done, total=total, description=text
            ),
        )
    return LatencyProfile("here", pool.model_name, device, (*rows, load))


def _source(pool: PoolConfig, device: str) -> str:
    threads = f"{pool.num_threads} thread(s), " if pool.device == "cpu" else ""
    software = ", ".join(f"{name} {version(name)}" for name in ("ray-cluster", "torch"))
    return (
        f"{device}, {threads}{number_format_here(pool)}; {software}; {datetime.now(UTC):%Y-%m-%d}"
    )


def _sizes(text: str | None, known: ModelProfile) -> tuple[SizePx, ...]:
    """The sizes that an option names, checked against what the model accepts."""
    if text is None:
        default = (known.default_width_px, known.default_height_px)
        return tuple(dict.fromkeys((default, other_size(known))))
    sizes = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        sides = tuple(int(side) for side in match.groups()) if match else ()
        if len(sides) != 2 or not all(
            known.min_px <= side <= known.max_px and side % known.size_multiple_px == 0
            for side in sides
        ):
            raise ConfigError(
                f"--sizes {text}: {part.strip()!r} is none; write WIDTHxHEIGHT, sides of this "
                f"model are multiples of {known.size_multiple_px} from {known.min_px} to "
                f"{known.max_px}"
            )
        sizes.append((sides[0], sides[1]))
    return tuple(dict.fromkeys(sizes))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MAX_BATCH for part in parts):
        raise ConfigError(
            f"--batches {text}: write whole numbers from 1 to {_MAX_BATCH} with commas between"
        )
    return tuple(sorted({int(part) for part in parts}))
