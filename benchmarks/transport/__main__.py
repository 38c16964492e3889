"""Measures links between processes: ``python -m benchmarks.transport``; see the README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import save_figure, with_pyplot
from benchmarks.sections import run_sections
from benchmarks.transport.trips import TransportSettings, measure


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results; return the exit status."""
    return run_sections("transport", __doc__, arguments, {"trips": (measure, 30.0)}, _of, _plot)


def _of(is_quick: bool) -> TransportSettings:
    return TransportSettings((108, 4096), 3) if is_quick else TransportSettings()


def _plot(result: dict[str, Any], path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    rows = result["sections"]["trips"]["tables"]["round trips"]
    for kind in dict.fromkeys(row["link"] for row in rows):
        own = [row for row in rows if row["link"] == kind]
        middles = [row["ms"]["median"] for row in own]
        spread = [
            [abs(row["ms"][end] - row["ms"]["median"]) for row in own] for end in ("min", "max")
        ]
        axes.errorbar([row["KiB"] for row in own], middles, spread, fmt="o-", capsize=3, label=kind)
    axes.set(xscale="log", yscale="log", xlabel="KiB of the answer", ylabel="ms of a round trip")
    axes.legend()
    save_figure(figure, result, path)


if __name__ == "__main__":
    raise SystemExit(main())
