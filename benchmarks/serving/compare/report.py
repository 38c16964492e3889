"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.serving.compare.outcomes import FATES
from benchmarks.serving.compare.summary import aims_of

Figures = dict[str, Any]


def write_markdown(result: Figures) -> str:
    """Return the report of :func:`benchmarks.serving.compare.__main__.collect`'s result."""
    parts = [*_head(result), *_aims(result)]
    for name, group in result["groups"].items():
        parts += _group(name, group, result)
    parts += [*_runs(result), *_images(result), *_alone(result)]
    return "\n".join(parts) + "\n"


def _head(result: Figures) -> Iterator[str]:
    settings, calibration, machine = result["settings"], result["calibration"], result["machine"]
    capacities = ", ".join(
        f"{name} {rate:.2f}" for name, rate in calibration["capacity_per_s"].items()
    )
    commits = sorted({cell["commit"][:12] for cell in result["cells"]})
    yield "# The service beside the common practice"
    yield ""
    if result["quick"]:
        yield "A quick run: it shows that everything works, not who is better."
        yield ""
    yield (
        f"- {machine['cpu']}, {_cores(machine)}, {result['started'][:10]}, runs of commit "
        f"{', '.join(commits)}; one model replica, one torch thread, {settings['dtype']}, "
        f"{settings['sampler']}, guidance {_list(settings['guidance_scales'])}"
    )
    yield (
        f"- {result['num_traces']} traces of {settings['num_requests']} requests, paired; sizes "
        f"{_sizes(settings)}, steps {_list(settings['steps'])}"
    )
    yield (
        f"- load 1 is {calibration['rate_per_s']:.3f} requests per second, the capacity of the "
        f"better baseline (images per second with all there at once: {capacities})"
    )
    yield (
        f"- deadlines: {settings['slo_times']:g} times what the pipeline takes for the image "
        "alone, in the replica of the idle baseline one-by-one, from prompt to pixels"
    )
    yield (
        "- in time: an image with all its steps, by the deadline, from the planned arrival on; "
        "refused, dropped, late, degraded, failed and lost ones are misses"
    )
    yield "- intervals: 95 %, bootstrap over traces"
    for name, pace in result["paces"].items():
        yield (
            f"- {name}, simulated at the pace seen: everything takes {pace['factor']:.2f} times as "
            f"long as in the profile, by which images take as long as live at load "
            f"{pace['load']:g}"
        )
    yield ""


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _sizes(settings: Figures) -> str:
    return ", ".join(f"{width}x{height}" for width, height in settings["sizes"])


def _aims(result: Figures) -> Iterator[str]:
    aims = aims_of(result)
    if not aims:
        return
    rows = [
        [
            aim.name,
            aim.wanted,
            f"{aim.measured:.2f} {aim.unit}",
            f"{aim.interval[0]:.2f} to {aim.interval[1]:.2f}",
            aim.verdict,
        ]
        for aim in aims
    ]
    yield "## Aims"
    yield ""
    yield from _table(("aim", "wanted", "measured", "95 %", "met"), rows)


def _group(name: str, group: Figures, result: Figures) -> Iterator[str]:
    rate_per_s = result["calibration"]["rate_per_s"]
    yield f"## In time, traces: {name} ({len(group['traces'])})"
    yield ""
    rows = []
    for row in group["rows"]:
        gain = row.get("gain")
        rows.append(
            [
                f"{row['load']:g}",
                f"{row['load'] * rate_per_s:.2f}",
                row["contender"],
                _points(row["attainment"]),
                f"{_points(gain)} over {row['over']}" if gain else "",
                f"{100 * row['simulated']:.1f}" if "simulated" in row else "",
                f"{100 * row['simulated_at_pace']:.1f}" if "simulated_at_pace" in row else "",
            ]
        )
    columns = (
        "load",
        "per s",
        "contender",
        "in time, %",
        "gain, points",
        "predicted (simulated), %",
        "at the pace seen (simulated), %",
    )
    yield from _table(columns, rows)
    goodput = [
        [contender, _crossing(found), _crossing(found, rate_per_s)]
        for contender, found in group["goodput"].items()
    ]
    yield from _table(("goodput at 90 % in time", "load", "per s"), goodput)
    if "headline" in group:
        yield from _headline(group["headline"])


def _headline(headline: Figures) -> Iterator[str]:
    theirs, ours = headline["goodput_theirs"], headline["goodput_ours"]
    if ours["bound"] == "below":
        yield "- goodput: ours has less than 90 % in time at every load that was tried"
    else:
        ratio = headline["goodput_ratio"]
        yield (
            f"- goodput: {ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) times "
            f"that of {headline['goodput_of']}{_bound_words(theirs['bound'], ours['bound'])}"
        )
    where, there = headline["strained_load"], headline["ours_there"]
    if where["bound"]:
        side = "less" if where["bound"] == "below" else "more"
        yield f"- {headline['strained']} has {side} than 60 % in time at every load"
    else:
        yield (
            f"- {headline['strained']} has 60 % in time at load {_crossing(where)}; ours has "
            f"{_points(there)} % there"
        )
    yield ""


def _bound_words(theirs: str, ours: str) -> str:
    """Say what a ratio of loads is worth of which one was not reached."""
    if theirs == "above":
        return "; says nothing: theirs has 90 % at every load that was tried"
    is_least = theirs == "below" or ours == "above"
    return ", or more: the level was not reached at the loads that were tried" if is_least else ""


def _runs(result: Figures) -> Iterator[str]:
    yield "## What became of requests, all traces together"
    yield ""
    yield "What is said of the client and of others (processes that have nothing to do with it) is"
    yield "that of the worst run."
    yield ""
    columns = ("load", "contender", *FATES, "p50, s", "p95, s", "p99, s", "nothing lost")
    columns = (*columns, "client's core, %", "client late, ms", "others' cores")
    rows = []
    for run in result["runs"]:
        seconds = [run["latency_s"][key] for key in ("p50", "p95", "p99")]
        rows.append(
            [
                f"{run['load']:g}",
                run["contender"],
                *(str(run["fates"][fate]) for fate in FATES),
                *("-" if one is None else f"{one:.2f}" for one in seconds),
                "yes" if run["nothing_lost"] else "NO",
                f"{100 * run['client_cpu_share']:.1f}",
                f"{1e3 * run['client_late_send_max_s']:.1f}",
                f"{run['cores_of_others']:.2f}",
            ]
        )
    yield from _table(columns, rows)


def _images(result: Figures) -> Iterator[str]:
    if not result["images"]:
        return
    reference = result["images"][0]["reference"]
    yield f"## Images beside those of {reference}, from the busiest run of the first traces"
    yield ""
    rows = [
        [
            one["contender"],
            one["trace"],
            str(one["num_images"]),
            "-" if one["most"] is None else f"{one['most']}/255",
            "-" if one["most"] is None else f"{one['least_similar']:.4f}",
        ]
        for one in result["images"]
    ]
    yield from _table(("contender", "trace", "images", "largest difference", "least SSIM"), rows)


def _alone(result: Figures) -> Iterator[str]:
    calibration = result["calibration"]
    yield "## Images alone, seconds"
    yield ""
    rows = [
        [name, f"{seconds:.3f}", f"{calibration['alone_http_s'][name]:.3f}"]
        for name, seconds in calibration["alone_s"].items()
    ]
    yield from _table(("size/steps/guidance", "pipeline", "with HTTP"), rows)


def _points(estimate: Figures) -> str:
    low, value, high = (100 * estimate[key] for key in ("low", "value", "high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def _crossing(found: Figures, times: float = 1.0) -> str:
    sign = {"below": "below ", "above": "above ", "": ""}[found["bound"]]
    return f"{sign}{times * found['load']:.2f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cores(machine: Mapping[str, Any]) -> str:
    """What the runs had of the machine; they may have been bound to a part of it."""
    usable, cores = machine["usable_cores"], machine["cores"]
    return f"{cores} cores" if usable == cores else f"bound to {usable} of {cores} cores"
