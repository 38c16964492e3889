"""Plots as PNG files, one for a section; they need matplotlib, and are left out without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

Figures = dict[str, Any]

_LOOKS = {
    "engine": {"color": "#1b6ca8", "marker": "o", "label": "engine"},
    "static": {"color": "#c98a1b", "marker": "s", "label": "static batches"},
    "bare": {"color": "#888888", "marker": "^", "linestyle": "--", "label": "bare UNet (ceiling)"},
}


def save_plots(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw what there is, a file for each section that has a plot; returns the files."""
    if with_pyplot() is None:
        return []
    sections = result["sections"]
    written = []
    for name, draw in (("engine", _engine), ("dispatcher", _dispatcher), ("load", _load)):
        if name in sections:
            file = path if name == "engine" else path.with_name(f"{path.stem}-{name}.png")
            save_figure(draw(sections[name]), result, file)
            written.append(file)
    return written


def with_pyplot() -> Any:
    """Return pyplot, set up to draw into files; None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: Any, result: dict[str, Any], path: Path) -> None:
    """Write a figure as a small PNG file that names machine, date and commit."""
    from matplotlib import pyplot as plt

    figure.suptitle(
        f"{result['machine']['cpu']}, {result['started'][:10]}, {result['commit'][:12]}",
        fontsize=9,
    )
    # few colours: a third of the bytes
    figure.savefig(path, dpi=70)
    with Image.open(path) as drawn:
        drawn.convert("P", palette=Image.Palette.ADAPTIVE, colors=24).save(path, optimize=True)
    plt.close(figure)


def _dispatcher(section: Figures) -> Any:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for kind, colour in (("attached", "#1b6ca8"), ("durable", "#c98a1b")):
        rows = [row for row in section["rows"] if row["kind"] == kind]
        idle = [row for row in rows if not row["image_s"] and row["clients"] <= 4 * row["replicas"]]
        for axis, key in zip(axes, ("cpu_ms_per_request", "requests_per_s"), strict=True):
            axis.plot(
                [row["replicas"] for row in idle],
                [row[key] for row in idle],
                color=colour,
                marker="o",
                label=kind,
            )
    for axis, title in zip(axes, ("CPU ms per request", "requests per second"), strict=True):
        axis.set_title(f"one dispatcher: {title}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("replicas", fontsize=8)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    return figure


def _load(section: Figures) -> Any:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    colours = ("#1b6ca8", "#c98a1b", "#888888", "#5a9e6f")
    for (role, row), colour in zip(section["memory"].items(), colours, strict=True):
        seconds, sizes = zip(*row["own_mib"], strict=True)
        label = f"{role}, {row['slope_mib_per_min']:+.2f} MiB/min"
        axis.plot(seconds, sizes, color=colour, marker=".", label=label)
    axis.set_title("memory under load (own pages)", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds", fontsize=8)
    axis.set_ylabel("MiB", fontsize=8)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=7)
    return figure


def _engine(section: Figures) -> Any:
    from matplotlib import pyplot as plt

    cells = section["cells"]
    columns = max(1, len({cell["px"] for cell in cells}))
    figure, axes = plt.subplots(
        3, columns, figsize=(4 * columns, 9), squeeze=False, layout="constrained"
    )
    column_by_px = {px: i for i, px in enumerate(sorted({cell["px"] for cell in cells}))}
    for cell in cells:
        column = column_by_px[cell["px"]]
        _draw_speed_up(axes[int(cell["guidance"])][column], cell)
        _draw_step_time(axes[2][column], cell, section["num_steps"])
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({row["in_flight"] for row in cells[0]["contenders"]}))
    axes[0][0].legend(fontsize=7)
    axes[2][0].legend(fontsize=7)
    return figure


def _draw_speed_up(axis: Any, cell: Figures) -> None:
    for kind, look in _LOOKS.items():
        rows = [r for r in cell["contenders"] if r["kind"] == kind and r["images_equal"]]
        rows.sort(key=lambda row: row["in_flight"])
        figures = [row["speed_up_cpu"] for row in rows]
        medians = [one["median"] for one in figures]
        around = [
            [one["median"] - one["min"] for one in figures],
            [one["max"] - one["median"] for one in figures],
        ]
        axis.errorbar([r["in_flight"] for r in rows], medians, yerr=around, capsize=3, **look)
    axis.set_title(f"{cell['px']} px, guidance {'on' if cell['guidance'] else 'off'}", fontsize=9)
    axis.set_ylabel("speed-up over one by one", fontsize=8)
    _count_axis(axis)


def _draw_step_time(axis: Any, cell: Figures, num_steps: int) -> None:
    style = "-" if cell["guidance"] else ":"
    for kind in ("engine", "bare"):
        rows = sorted(
            (row for row in cell["contenders"] if row["kind"] == kind),
            key=lambda row: row["in_flight"],
        )
        step_ms = [
            1e3 * row["seconds_per_image_cpu"]["median"] * row["in_flight"] / num_steps
            for row in rows
        ]
        guidance = "guidance on" if cell["guidance"] else "guidance off"
        axis.plot(
            [row["in_flight"] for row in rows],
            step_ms,
            linestyle=style,
            color=_LOOKS[kind]["color"],
            marker=_LOOKS[kind]["marker"],
            label=f"{_LOOKS[kind]['label']}, {guidance}",
        )
    axis.set_title(f"{cell['px']} px: time per step of the batch", fontsize=9)
    axis.set_ylabel("CPU ms, encode and decode included", fontsize=8)
    _count_axis(axis)


def _count_axis(axis: Any) -> None:
    axis.set_xlabel("in flight", fontsize=8)
    axis.grid(visible=True, alpha=0.3)
