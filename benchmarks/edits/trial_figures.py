"""How near edits are to exact ones, and what that costs: judged, tabulated, plotted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks.plots import save_figure, with_pyplot
from benchmarks.report import print_sections
from benchmarks.stats import paired_ratio
from ray_cluster.quality.calibration import as_pictures
from ray_cluster.quality.classifier import AttributeClassifier, read_pictures
from ray_cluster.quality.distances import similarity_map
from ray_cluster.quality.scenes import SceneObject

Images = npt.NDArray[np.uint8]
Judged = dict[str, npt.NDArray[np.float64]]
"""By measure, a figure of every edit."""
# around a mask, as a share of the image's side
_RING = 1 / 16


@dataclass(frozen=True, slots=True)
class Way:
    """How edits are made: exact without a cut, else over what is named of a companion.

    A ring is of patches around the mask's, which are computed too.
    """

    steps: int
    cut: int | None = None
    companion: str = "none"
    ring: int = 0

    @property
    def name(self) -> str:
        """Its name in results."""
        if self.cut is None:
            return f"{self.steps} steps"
        ring = f", ring {self.ring}" if self.ring else ""
        return f"{self.steps} steps, cut {self.cut}{ring}, {self.companion}"


@dataclass(frozen=True, slots=True)
class Cell:
    """What edits have in common."""

    ratio: float
    scale: float


def judge(
    classifier: AttributeClassifier,
    made: Images,
    exact: Images,
    edits: Sequence[tuple[Images, npt.NDArray[np.bool_], SceneObject]],
) -> Judged:
    """Compare edits with exact ones, as the model makes them; of pasted ones, whether they show it.

    Args:
        made: ``[B, px, px, 3]``.
        edits: template, mask and what is asked for, of each.
    """
    masks = torch.from_numpy(np.stack([mask for _, mask, _ in edits]))
    reach = round(masks.shape[-1] * _RING)
    grown = F.max_pool2d(masks[:, None].float(), 2 * reach + 1, stride=1, padding=reach)[:, 0] > 0
    pair = as_pictures(made), as_pictures(exact)
    similar, far = similarity_map(*pair), perceptual_map(classifier, *pair)
    found: Judged = {}
    for name, where in (("inside", masks), ("ring", grown & ~masks)):
        found[f"ssim_{name}"] = _mean_in(similar, where)
        found[f"perceptual_{name}"] = _mean_in(far, where)
    pasted = [
        np.where(mask[..., None], one, own) for one, (own, mask, _) in zip(made, edits, strict=True)
    ]
    readings = read_pictures(classifier, as_pictures(np.stack(pasted)))
    found["is_shown"] = np.array(
        [
            any(
                (o.position, o.shape, o.colour) == (w.position, w.shape, w.colour)
                for o in r.objects
            )
            for r, (_, _, w) in zip(readings, edits, strict=True)
        ],
        float,
    )
    return found


def perceptual_map(classifier: AttributeClassifier, pictures: Tensor, wanted: Tensor) -> Tensor:
    """Distances [B, H, W] of the classifier's features: LPIPS without weights."""
    maps = []
    for pair in zip(
        classifier.feature_maps(pictures), classifier.feature_maps(wanted), strict=True
    ):
        one, other = (F.normalize(each, dim=1) for each in pair)
        apart = (one - other).square().sum(1, keepdim=True)
        maps.append(F.interpolate(apart, pictures.shape[-2:], mode="bilinear"))
    return torch.cat(maps, 1).mean(1).double()


def _mean_in(values: Tensor, where: Tensor) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = ((values * where).sum((1, 2)) / where.sum((1, 2))).numpy()
    return found


def rows_of(
    judged: Mapping[tuple[Cell, Way], Sequence[Judged]],
    costs: Mapping[tuple[Cell, int], Mapping[Way, Sequence[float]]],
) -> list[dict[str, Any]]:
    """Return a row for every cell and way; time in exact edits of all steps.

    ``gain`` is what a cached way's SSIM within the mask, and perceptual distance, are better by
    than those of exact edits of so many steps that they take as long: mean and standard error.
    """
    joined = {
        key: {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for key, parts in judged.items()
    }
    rows = []
    for (cell, way), own in joined.items():
        rivals = {w.steps: one for (c, w), one in joined.items() if c == cell and w.cut is None}
        row: dict[str, Any] = {"mask_ratio": cell.ratio, "guidance": cell.scale, "way": way.name}
        row |= {"steps": way.steps, "cut": way.cut, "companion": way.companion, "ring": way.ring}
        for name, values in own.items():
            row[name] = _short(values.mean())
            if name.startswith("ssim"):
                row[f"{name}_worst"] = _short(values.min())
        for batch in (batch for c, batch in costs if c == cell):
            timed = {(w.cut, w.companion, w.ring): one for w, one in costs[cell, batch].items()}
            exact = timed[None, "none", 0]
            cached = timed.get((way.cut, way.companion, way.ring))
            share = 1.0 if cached is None else paired_ratio(cached, exact).median
            if way.cut is not None and cached is None:
                continue
            row[f"step_b{batch}"] = _short(share)
            row[f"time_b{batch}"] = _short(share * way.steps / max(rivals))
            if way.cut is None and way.steps == max(rivals):
                row[f"step_ms_b{batch}"] = _short(1e3 * float(np.median(exact)))
            if way.cut is not None:
                row |= _gains(own, rivals, share * way.steps, f"b{batch}")
        rows.append(row)
    return rows


def _gains(own: Judged, rivals: Mapping[int, Judged], steps: float, suffix: str) -> dict[str, Any]:
    """Return by how much a way is better than exact edits of so many steps, in between linear."""
    counts, found = sorted(rivals), {}
    for name, sign in (("ssim_inside", 1), ("perceptual_inside", -1)):
        curves = np.stack([rivals[one][name] for one in counts])
        equal = np.array([np.interp(steps, counts, curve) for curve in curves.T])
        better = sign * (own[name] - equal)
        error = better.std(ddof=1) / len(better) ** 0.5
        found[f"gain_{name}_{suffix}"] = [_short(better.mean()), _short(error)]
    return found


def least_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each cell and bound, the least time of batch 4 whose worst SSIM holds it.

    In exact edits of all steps, by exact edits of fewer steps and over each kind of companion.
    """
    found, named = [], {"none": "exact, fewer steps"}
    cells = product(dict.fromkeys((r["mask_ratio"], r["guidance"]) for r in rows), (0.95, 0.85))
    for (ratio, guidance), bound in cells:
        row = {"mask_ratio": ratio, "guidance": guidance, "worst_ssim_at_least": bound}
        own = [r for r in rows if (r["mask_ratio"], r["guidance"]) == (ratio, guidance)]
        for kind in dict.fromkeys(r["companion"] for r in own if "time_b4" in r):
            good = [r for r in own if r["companion"] == kind and r["ssim_inside_worst"] >= bound]
            best = min(good, key=lambda r: r["time_b4"], default=None)
            what = None if best is None else f"{best['time_b4']:.2f} ({best['way']})"
            row[named.get(kind, kind)] = what and what.replace(f", {kind}", "")
        found.append(row)
    return found


def print_verdict(result: dict[str, Any], console: Console) -> None:
    """Print the least times."""
    tables = {key: least_times(one["rows"]) for key, one in result["cells"].items()}
    what = "least time, in exact edits of all steps, whose worst SSIM within the mask holds a bound"
    section = {"what": what, "tables": tables}
    print_sections(console, {"edits-trial": section}, quick=result["quick"])


def _short(figure: float) -> float:
    return float(f"{figure:.4g}")


def plot_trial(result: dict[str, Any], path: Path) -> None:
    """Draw what is lost within the mask against time, a panel for every cell."""
    plt = with_pyplot()
    if plt is None:
        return
    models = result["cells"]
    cells = sorted(
        {(r["guidance"], r["mask_ratio"]) for one in models.values() for r in one["rows"]}
    )
    size = (3 * len(cells), 2.8 * len(models))
    figure, panels = plt.subplots(
        len(models), len(cells), figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    for axes, ((name, one), cell) in zip(panels.flat, product(models.items(), cells), strict=True):
        rows = [r for r in one["rows"] if (r["guidance"], r["mask_ratio"]) == cell]
        kinds = dict.fromkeys((r["companion"], r["ring"]) for r in rows if "time_b4" in r)
        for kind, ring in kinds:
            # a loss of nothing has no place on a logarithmic axis
            some = [r for r in rows if "time_b4" in r and r["ssim_inside_worst"] < 1]
            own = [r for r in some if (r["companion"], r["ring"]) == (kind, ring)]
            own.sort(key=lambda r: (r["steps"], r["cut"] or 0))
            x, y = [r["time_b4"] for r in own], [1 - r["ssim_inside"] for r in own]
            label = kind + (f", ring {ring}" if ring else "")
            label, style = ("exact, fewer steps", "ko-") if kind == "none" else (label, "s:")
            axes.plot(x, y, style, label=label, markersize=4)
        guided = "guided" if cell[0] > 1 else "plain"
        axes.set(yscale="log", ylim=(3e-3, 1), title=f"{name} px, {guided}, m = {cell[1]}")
        axes.title.set_fontsize(8)
    panels.flat[0].legend(fontsize=7)
    figure.supxlabel(
        "CPU time in exact edits of 20 steps, batch 4; along a line the blocks that reuse"
    )
    figure.supylabel("1 - SSIM to the exact edit, within the mask")
    save_figure(figure, result, path)
