"""Writes the frontier: tables, a plot for each model and size, and a sheet of images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fidelity.choosing import cheapest_reuse, choose, fewest_steps, num_tests
from benchmarks.fidelity.fewer_plan import BARS
from benchmarks.fidelity.frontier import Frontier, Point, Quality
from benchmarks.fidelity.plan import FidelityRun, Grid, Half, held_out_runs, tuning_runs
from benchmarks.fidelity.work import Made, load_made
from benchmarks.plots import save_figure, with_pyplot
from ray_cluster.training.evaluate import contact_sheet

_SHOWN = 8


def write_report(grid: Grid, work: Path, folder: Path, header: dict[str, Any]) -> None:
    """Write ``results.json``, ``report.md``, plots and sheets on the runs that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    planned = list(tuning_runs(grid))
    planned += held_out_runs(grid, choose(grid, load_made(planned, work)))
    made = load_made(planned, work)
    frontier = Frontier(made)
    points = sorted(
        frontier.points(num_tests(grid)),
        key=lambda one: (one.model, one.px, one.base_steps, one.cost_steps),
    )
    steps = [
        {"model": model, "px": px, "cut": cut or "all", "num_reused": count, **seconds}
        for (model, px, cut, count), seconds in sorted(frontier.step_costs.items())
    ]
    result = header | {"runs": len(made), "runs_planned": len(planned), "steps": steps}
    result["points"] = [one.as_dict() for one in points]
    (folder / "results.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    text = "\n".join(_lines(result, points, frontier))
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    for model, px in sorted({(one.model, one.px) for one in points}):
        some = [one for one in points if (one.model, one.px) == (model, px)]
        if with_pyplot() is not None:
            figure = _plot(some, frontier)
            save_figure(figure, result, folder / f"frontier-{model}-{px}.png")
        # few colours: a third of the bytes
        sheet = _sheet(some, made).quantize(128)
        sheet.save(folder / f"images-{model}-{px}.png", optimize=True)


def _lines(result: dict[str, Any], points: Sequence[Point], frontier: Frontier) -> Iterator[str]:
    machine = result["machine"]
    yield "# Reuse across steps, beside fewer steps at the same time"
    yield ""
    yield (
        f"{machine['cpu']}, one thread, {result['started'][:10]}, commit {result['commit'][:12]}; "
        f"{result['runs']} of {result['runs_planned']} runs of 8 images. "
        "`python -m benchmarks.fidelity` makes the rest, and this page."
    )
    yield ""
    yield (
        "Costs are in exact steps of the same batch, by the CPU time of the thread (medians over "
        "all steps of a kind, which ran in a random order); in brackets by wall time. SSIM is to "
        "the exact image of the same number of steps. The control has fewer steps and the same "
        "CPU time: between two whole numbers of steps, a mixture of both. Intervals are paired "
        "bootstraps over images, at 95 % for all variants and numbers of steps of a model together."
    )
    yield ""
    yield (
        "All variants are made of the tuning half; of the other half those that did best there, at "
        "each number of steps that with the largest gain and the cheapest that keep to the modes."
    )
    for model, px in sorted({(one.model, one.px) for one in points}):
        some = [one for one in points if (one.model, one.px) == (model, px)]
        yield from _section(model, px, some, frontier)


def _section(model: str, px: int, points: Sequence[Point], frontier: Frontier) -> Iterator[str]:
    yield from ("", f"## {model}, {px} px", "")
    yield from _verdict([(one, one.quality.get("held-out")) for one in points])
    for half in ("held-out", "tuning"):
        rows = [(one, one.quality[half]) for one in points if half in one.quality]
        if rows:
            yield from _table(half, rows)
    yield from _modes(model, px, points, frontier)


def _verdict(rows: Sequence[tuple[Point, Quality | None]]) -> Iterator[str]:
    """Which variants are told apart from fewer steps, on images that they were not chosen by."""
    seen = [(one, found) for one, found in rows if found is not None]
    kinds = {
        "nearer to the exact images than fewer steps": [o for o, f in seen if f.gain_low > 0],
        "further from them": [o for o, f in seen if f.gain_high < 0],
    }
    for text, some in kinds.items():
        names = ", ".join(f"{one.variant} of {one.base_steps}" for one in some)
        yield f"Held out, {len(some)} of {len(seen)} are {text}: {names or 'none'}."
        yield ""


def _table(half: str, rows: Sequence[tuple[Point, Quality]]) -> Iterator[str]:
    yield from ("", f"{rows[0][1].num_images} images a row, {half}:", "")
    yield (
        "| steps | variant | costs steps (wall) | SSIM mean, worst | control mean, worst "
        "| gain (interval) | all right: variant, control |"
    )
    yield "|---|---|---|---|---|---|---|"
    for one, found in rows:
        yield (
            f"| {one.base_steps} | {one.variant} | {one.cost_steps:.1f} ({one.wall_steps:.1f}) "
            f"| {found.mean:.3f}, {found.worst:.3f} "
            f"| {found.control_mean:.3f}, {found.control_worst:.3f} "
            f"| {found.gain:+.4f} ({found.gain_low:+.4f} to {found.gain_high:+.4f}) "
            f"| {found.right:.2f}, {found.control_right:.2f} |"
        )


def _modes(model: str, px: int, points: Sequence[Point], frontier: Frontier) -> Iterator[str]:
    """What is cheapest in the one half of what keeps to a mode, and how it does in the other."""
    yield from ("", "Cheapest with a worst image above the mode's on the tuning half:", "")
    yield "| mode | steps | reuse, cost: worst held out | fewer steps: worst held out |"
    yield "|---|---|---|---|"
    for mode, least in BARS.items():
        for base in sorted({one.base_steps for one in points}):
            reuse = _best_reuse([one for one in points if one.base_steps == base], least)
            fewer = _fewest_steps(frontier, (model, px, base), least)
            yield f"| {mode} (>= {least}) | {base} | {reuse} | {fewer} |"


def _best_reuse(points: Sequence[Point], least: float) -> str:
    best = cheapest_reuse(points, least)
    if best is None:
        return "none"
    held_out = best.quality.get("held-out")
    worst = "not run" if held_out is None else f"{held_out.worst:.3f}"
    return f"{best.variant}, {best.cost_steps:.1f}: {worst}"


def _fewest_steps(frontier: Frontier, cell: tuple[str, int, int], least: float) -> str:
    fewest = fewest_steps(frontier, cell, least)
    if fewest is None:
        return "none"
    held_out = frontier.exact_similarity(*cell, "held-out").get(fewest)
    worst = "not run" if held_out is None else f"{held_out.min():.3f}"
    return f"{fewest}: {worst}"


def _plot(points: Sequence[Point], frontier: Frontier) -> Any:
    plt = with_pyplot()
    bases = sorted({one.base_steps for one in points})
    colours = {name: f"C{i}" for i, name in enumerate(sorted({one.variant for one in points}))}
    figure, axes = plt.subplots(1, len(bases), figsize=(4.2 * len(bases), 3.8), squeeze=False)
    for axis, base in zip(axes[0], bases, strict=True):
        some = [one for one in points if one.base_steps == base]
        half: Half = "held-out" if any("held-out" in one.quality for one in some) else "tuning"
        curve = frontier.exact_similarity(some[0].model, some[0].px, base, half)
        for values, style in (("mean", "-"), ("min", ":")):
            lost = {n: 1 - float(getattr(one, values)()) for n, one in curve.items() if n < base}
            label = f"fewer steps, {'mean' if values == 'mean' else 'worst'}"
            axis.plot(list(lost), list(lost.values()), "k" + style, marker=".", label=label)
        for one in sorted(some, key=lambda point: point.variant):
            found, colour = one.quality.get(half), colours[one.variant]
            if found is not None:
                axis.plot(one.cost_steps, 1 - found.mean, "o", color=colour, label=one.variant)
                axis.plot(one.cost_steps, 1 - found.worst, "v", color=colour)
        axis.set(xlabel="cost, exact steps", yscale="log", title=f"{base} steps, {half}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"1 - SSIM ({points[0].model}, {points[0].px} px)")
    # a variant may be in one of the plots alone
    shown = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    axes[0][-1].legend(shown.values(), shown.keys(), fontsize=6)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


def _sheet(points: Sequence[Point], made: dict[FidelityRun, Made]) -> Any:
    """Return images of one batch: exact ones, then every variant and its control, row by row."""
    base = 20 if any(one.base_steps == 20 for one in points) else points[0].base_steps
    some = [one for one in points if one.base_steps == base]
    first = some[0]
    there = [run for run in made if (run.model, run.px) == (first.model, first.px)]
    batches = [run.batch for run in there if run.variant == first.variant]
    batch = max(batches, key=lambda one: (one % 2, -one))
    rows = [FidelityRun(first.model, first.px, batch, base)]
    for one in some:
        exact = [run for run in there if run.is_exact and run.batch == batch]
        nearest = min(exact, key=lambda run: abs(run.num_steps - one.cost_steps))
        rows += [FidelityRun(first.model, first.px, batch, base, one.variant), nearest]
    pictures = [
        torch.from_numpy(image).permute(2, 0, 1).float() / 255
        for run in rows
        if run in made
        for image in made[run].images[:_SHOWN]
    ]
    return contact_sheet(pictures, columns=_SHOWN)
