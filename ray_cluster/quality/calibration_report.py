"""Writes what a calibration found: a table, a plot of cost against error, and images."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from PIL import Image

from ray_cluster.policies.fidelity import LEAST_SSIM
from ray_cluster.quality.calibration import Choice, Option, Run, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_SHOWN = 8


def write_report(study: Study, title: str, table: dict[str, object] | None, folder: Path) -> None:
    """Write ``report.md``, ``images.png`` and, where matplotlib is installed, ``frontier.png``.

    Args:
        title: model, machine and settings.
        table: what goes into the pool; None if nothing saves anything.
    """
    text = "\n".join(_lines(study, title, table)) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    if find_spec("matplotlib") is not None:
        _plot(study).savefig(folder / "frontier.png", dpi=110)
    _sheet(study).save(folder / "images.png", optimize=True)


def _lines(study: Study, title: str, table: dict[str, object] | None) -> Iterator[str]:
    plan = study.plan
    first = (plan.asked[-1], plan.sizes_px[0], "choosing", None)
    num_images = sum(
        len(made.images)
        for run, made in study.made.items()
        if (run.num_steps, run.size_px, run.half, run.schedule) == first
    )
    yield from (f"# Fewer and reused steps of {title}", "")
    yield (
        f"`balanced` has no image below SSIM {LEAST_SSIM['balanced']} to the one with all steps, "
        f"`fast` none below {LEAST_SSIM['fast']}. Chosen by {num_images} images of a kind, with a "
        "margin; the right half of the table is of others, made afterwards. Costs are in whole "
        "steps; a mode takes the cheapest way that keeps its bar in both halves."
    )
    yield from ("", "| asked | mode | made with | cost | worst, mean | held out: worst, mean |")
    yield "|---|---|---|---|---|---|"
    for choice in study.choices():
        for option in (choice.fewer, choice.reused):
            if option is not None:
                yield _row(study, choice, option)
        if choice.fewer is None and choice.reused is None:
            yield f"| {choice.asked} | {choice.mode} | all steps | {choice.asked} | 1, 1 | |"
    costs = ", ".join(f"{outer}: {cost:.2f}" for outer, cost in study.reused_cost.items())
    sizes = ", ".join(f"{width}x{height}" for width, height in plan.sizes_px)
    yield from ("", f"Sizes: {sizes}. A step that reuses costs, by outer blocks: {costs}.", "")
    if table is None:
        yield "Nothing keeps a bar at a lower cost: there is no table for this model."
        return
    yield from ("For the pool:", "", "```yaml")
    yield yaml.safe_dump({"fidelity": table}, sort_keys=False).rstrip()
    yield "```"


def _row(study: Study, choice: Choice, option: Option) -> str:
    outcome = study.outcome(choice, option)
    held_out = "not made"
    if outcome is not None:
        is_kept = outcome.worst >= LEAST_SSIM[choice.mode]
        held_out = f"{outcome.worst:.3f}, {outcome.mean:.3f}" + ("" if is_kept else " (broken)")
    return (
        f"| {choice.asked} | {choice.mode} | {_words(option.run)} | {option.cost:.1f} "
        f"| {option.worst:.3f}, {option.mean:.3f} | {held_out} |"
    )


def _words(run: Run) -> str:
    steps = f"{run.num_steps} steps"
    return steps if run.schedule is None else f"{steps}, {run.schedule}"


def _plot(study: Study) -> Figure:
    from matplotlib.figure import Figure

    asked = study.plan.asked
    figure = Figure(figsize=(4.2 * len(asked), 3.8), layout="constrained")
    for axes, steps in zip(figure.subplots(1, len(asked), squeeze=False)[0], asked, strict=True):
        options = study.options(steps)
        plain = [one for one in options if one.run.schedule is None]
        axes.plot([o.cost for o in plain], [1 - o.worst for o in plain], "k.-", label="fewer steps")
        reused = [one for one in options if one.run.schedule is not None]
        axes.plot(
            [o.cost for o in reused], [1 - o.worst for o in reused], "o", label="reused steps"
        )
        for mode in ("balanced", "fast"):
            axes.axhline(1 - LEAST_SSIM[mode], color="grey", linestyle="--", linewidth=0.8)
        axes.set(xlabel="cost, whole steps", yscale="log", title=f"{steps} steps asked for")
        axes.set(ylabel="1 - SSIM of the worst image")
        axes.legend(fontsize=7)
    return figure


def _sheet(study: Study) -> Image.Image:
    """Return images of the largest number of steps: exact ones, and below them the modes'."""
    asked, size = study.plan.asked[-1], study.plan.sizes_px[0]
    runs = [Run(0, size, asked)]
    for choice in study.choices():
        best = choice.reused or choice.fewer
        if choice.asked == asked and best is not None:
            runs.append(Run(0, size, best.run.num_steps, best.run.schedule))
    rows = [np.hstack(list(study.made[run].images[:_MOST_SHOWN])) for run in runs]
    return Image.fromarray(np.vstack(rows))
