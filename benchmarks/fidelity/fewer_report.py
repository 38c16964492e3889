"""Writes how few steps will do: tables for the models, a report, a plot, and sheets of images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.fidelity.fewer_plan import (
    BARS,
    SHARE_OF_LOSS,
    Check,
    Mode,
    ModelGrid,
    held_out_runs,
    tuning_runs,
)
from benchmarks.fidelity.fewer_steps import FewerStepsOutcome, Study
from benchmarks.fidelity.plan import FidelityRun
from benchmarks.fidelity.work import Made, load_made
from benchmarks.plots import save_figure, with_pyplot
from ray_cluster.models.builtin import builtin_folder, builtin_sampling
from ray_cluster.training.card import folder_hashes
from ray_cluster.training.evaluate import contact_sheet

_MAIN = Check(64)
_COLUMNS = (
    "| mode | asked | steps | images | SSIM worst | mean | worst of the tuning half "
    "| all right, exact | CPU time (wall) |\n|---|---|---|---|---|---|---|---|---|"
)


def write_fewer_steps(
    grids: Sequence[ModelGrid], work: Path, folder: Path, header: dict[str, Any]
) -> None:
    """Write ``results.json``, ``report.md`` and figures on the runs that are there.

    Beside them is ``<model>.json`` for each model of which something may be promised: what the
    package has of it in ``ray_cluster/models/fewer_steps``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    studies = [_study(grid, work) for grid in grids]
    models: dict[str, Any] = {}
    for study in studies:
        found = study.outcomes()
        models[study.grid.model] = {
            "tuning_worst": {base: study.tuning_worst(base) for base in study.grid.base_steps},
            "chosen": study.chosen(),
            "outcomes": [one.as_dict() for one in found],
        }
        table = step_table(study, found)
        if table is not None:
            name = folder / f"{study.grid.model}.json"
            name.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    result = header | {"share_of_loss": SHARE_OF_LOSS, "models": models}
    (folder / "results.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    text = "\n".join(_lines(result, studies))
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    if with_pyplot() is not None:
        save_figure(_plot(studies), result, folder / "fewer-steps.png")
    for study in studies:
        sheet = _sheet(study, load_made(_all_runs(study), work))
        if sheet is not None:
            # few colours: a third of the bytes
            name = folder / f"images-{study.grid.model}.png"
            sheet.quantize(128).save(name, optimize=True)


def _study(grid: ModelGrid, work: Path) -> Study:
    tuning = load_made(tuning_runs(grid), work)
    chosen = Study(grid, tuning).chosen()
    return Study(grid, tuning | load_made(held_out_runs(grid, chosen), work))


def _all_runs(study: Study) -> Iterator[FidelityRun]:
    yield from tuning_runs(study.grid)
    yield from held_out_runs(study.grid, study.chosen())


def step_table(study: Study, outcomes: Sequence[FewerStepsOutcome]) -> dict[str, Any] | None:
    """Return a model's table for the package; None if nothing may be promised of it.

    A mode that the held-out images break at a number of steps has all of these there, and no fewer
    where more are asked for. The worst image of both halves, and of other sizes, stands beside it.
    """
    model = study.grid.model
    folder, sampling = builtin_folder(model), builtin_sampling(model)
    assert folder is not None
    assert sampling is not None
    rows = []
    least: dict[Mode, int] = dict.fromkeys(BARS, 0)
    for asked, modes in study.chosen().items():
        row: dict[str, Any] = {"asked": asked}
        for mode, steps in modes.items():
            own = [one for one in outcomes if (one.mode, one.asked) == (mode, asked)]
            # at the model's own guidance scale
            own = [one for one in own if one.check.guidance is None]
            least[mode] = max(steps, least[mode])
            if own and least[mode] < asked and all(one.is_kept for one in own):
                worst = [one.worst for one in own]
                worst += [one.tuning_worst for one in own if one.tuning_worst is not None]
                row |= {mode: least[mode], f"{mode}_ssim": math.floor(1000 * min(worst)) / 1000}
            else:
                least[mode] = asked
                row |= {mode: asked, f"{mode}_ssim": 1.0}
        rows.append(row)
    if all(row[mode] == row["asked"] for row in rows for mode in BARS):
        return None
    is_flow = (folder / "transformer").is_dir()
    return {
        "weights_sha256": denoiser_hash(folder),
        "fidelity": {
            "sampler": "flow_match_euler" if is_flow else "ddim",
            "max_guidance_scale": sampling.guidance_scale,
            "steps": rows,
        },
    }


def denoiser_hash(folder: Path) -> str:
    """Return the hash of the weights that a table was measured with."""
    [name] = [
        name
        for name in folder_hashes(folder)
        if name.startswith(("unet/", "transformer/")) and name.endswith(".safetensors")
    ]
    return folder_hashes(folder)[name]


def _lines(result: dict[str, Any], studies: Sequence[Study]) -> Iterator[str]:
    machine = result["machine"]
    yield "# How few steps will do"
    yield ""
    yield (
        f"{machine['cpu']}, one thread, float32, {result['started'][:10]}, commit "
        f"{result['commit'][:12]}; batches of 8 images. `python -m benchmarks.fidelity "
        "--fewer-steps --work FOLDER --report FOLDER` makes this page."
    )
    yield ""
    yield (
        "`balanced` shall have no image below SSIM 0.95 to the image with all its steps, `fast` "
        "none below 0.85. With the images of one half of the prompts and seeds the fewest steps "
        f"were chosen that give away at most {SHARE_OF_LOSS:.0%} of that loss (0.967 and 0.9): the "
        "worst of many is worse than that of few. Only then were the images of the other half "
        "made, which the figures are of. All right: share of images that show all that the "
        "prompt says, as the classifier reads them, and of those with all steps. CPU time: of the "
        "thread, from prompts to pixels, over the exact images' (medians of batches); in brackets "
        "wall time, on a machine that others used too. Rows in bold are below their bar: with more "
        "guidance than a model's own, for which its table is not offered. Numbers of steps that "
        "are asked for themselves (20 instead of 50) were among those to choose from."
    )
    for study in studies:
        yield from _section(study)


def _section(study: Study) -> Iterator[str]:
    grid, found = study.grid, study.outcomes()
    sampling = builtin_sampling(grid.model)
    assert sampling is not None
    yield from ("", f"## {grid.model}", "")
    yield (
        f"Guidance scale {sampling.guidance_scale:g} unless another stands there, "
        f"{grid.num_tuning * 8} images to choose by, of each number of steps, 64 px."
    )
    if not found:
        tried = {base: study.tuning_worst(base) for base in grid.base_steps}
        text = "; ".join(
            f"{steps} instead of {base}: {worst:.3f}"
            for base, some in tried.items()
            for steps, worst in some.items()
        )
        yield ""
        yield f"No number of steps will do; the worst images: {text}. There is no table for it."
        return
    kept = [one for one in found if one.is_kept]
    yield ""
    yield f"Held out, {len(kept)} of {len(found)} rows keep their bar."
    for check, some in groupby(found, key=lambda one: one.check):
        guided = "" if check.guidance is None else f", guidance scale {check.guidance:g}"
        yield from ("", f"{check.px} px{guided}, held out:", "", _COLUMNS)
        yield from (_row(one) for one in some)


def _row(one: FewerStepsOutcome) -> str:
    tuning = "" if one.tuning_worst is None else f"{one.tuning_worst:.3f}"
    worst = f"{one.worst:.3f}" if one.is_kept else f"**{one.worst:.3f}**"
    return (
        f"| {one.mode} | {one.asked} | {one.steps} | {one.num_images} | {worst} | {one.mean:.3f} "
        f"| {tuning} | {one.right:.3f}, {one.exact_right:.3f} "
        f"| {one.cpu_share:.2f} ({one.wall_share:.2f}) |"
    )


def _plot(studies: Sequence[Study]) -> Any:
    plt = with_pyplot()
    shown = [study for study in studies if study.outcomes()]
    figure, axes = plt.subplots(1, len(shown), figsize=(5.2 * len(shown), 4), squeeze=False)
    for axis, study in zip(axes[0], shown, strict=True):
        for index, base in enumerate(sorted(study.grid.base_steps)):
            lost = {steps: 1 - worst for steps, worst in study.tuning_worst(base).items()}
            axis.plot(list(lost), list(lost.values()), ".-", color=f"C{index}", label=f"{base}")
            held = [one for one in study.outcomes() if (one.asked, one.check) == (base, _MAIN)]
            worst = [1 - one.worst for one in held]
            axis.plot([one.steps for one in held], worst, "v", color=f"C{index}")
        for mode, bar in BARS.items():
            axis.axhline(1 - bar, color="k", linestyle="--", linewidth=0.8)
            axis.text(2, 1 - bar, mode, fontsize=7, va="bottom")
        axis.set(xlabel="steps", yscale="log", title=study.grid.model)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("1 - SSIM of the worst image")
    axes[0][-1].legend(fontsize=6, title="asked; v: held out")
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


def _sheet(study: Study, made: dict[FidelityRun, Made]) -> Any:
    """Return held-out images: exact ones, and below them the same balanced and fast."""
    modes = study.chosen().get(study.grid.main_base)
    if modes is None:
        return None
    rows = []
    for batch in (1, 3, 5):
        for steps in (study.grid.main_base, *modes.values()):
            run = FidelityRun(study.grid.model, 64, batch, steps)
            if run in made:
                rows += list(made[run].images)
    if not rows:
        return None
    pictures = [torch.from_numpy(image).permute(2, 0, 1).float() / 255 for image in rows]
    return contact_sheet(pictures, columns=8)
