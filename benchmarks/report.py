"""The results as tables in the terminal, and the aims beside what was measured."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.aims import check_aims

Figures = dict[str, Any]


def print_report(console: Console, result: dict[str, Any]) -> None:
    """Print every section that was measured, then the aims."""
    sections = result["sections"]
    for name, show in (
        ("engine", _engine),
        ("mixed_steps", _mixed_steps),
        ("sizes", _sizes),
        ("overhead", _overhead),
        ("exports", _exports),
        ("family", _family),
        ("kernels", _kernels),
        ("dispatcher", _dispatcher),
        ("service", _service),
        ("memory", _memory),
        ("load", _load),
    ):
        if name in sections:
            console.print()
            show(console, sections[name])
    console.print()
    _aims(console, result)


def spread(figures: Figures | None, *, factor: float = 1.0, digits: int = 2) -> str:
    """Return median and range, like ``2.41 (2.30-2.55)``; a dash where there is nothing."""
    if figures is None:
        return "-"
    median, low, high = (f"{figures[key] * factor:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}-{high})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _engine(console: Console, section: Figures) -> None:
    table = _table(
        "Speed-up over the pipeline one by one (CPU time, one thread; median and range)",
        *("case", "in flight", "engine", "static batches", "bare UNet (ceiling)", "engine, wall"),
    )
    for cell in section["cells"]:
        by_key = {(row["kind"], row["in_flight"]): row for row in cell["contenders"]}
        for in_flight in sorted({row["in_flight"] for row in cell["contenders"]}):
            rows = [by_key.get((kind, in_flight)) for kind in ("engine", "static", "bare")]
            table.add_row(
                f"{cell['px']} px, guidance {'on' if cell['guidance'] else 'off'}",
                str(in_flight),
                *(_speed_up(row) for row in rows),
                spread((rows[0] or {}).get("speed_up_wall")),
            )
    console.print(table)


def _speed_up(row: Figures | None) -> str:
    if row is None:
        return "-"
    if not row["images_equal"]:
        return f"images differ by {row['max_difference_255']}/255"
    return spread(row["speed_up_cpu"])


def _sizes(console: Console, section: Figures) -> None:
    table = _table(
        "Steps of mixed sizes over diffusers row by row in float32 (CPU time, median and range)",
        *("rows", "dtype", "guidance", "static", "ours by size", "ours mixed", "mixed / by size"),
    )
    for cell in section["cells"]:
        over = cell["over_one_by_one"]
        table.add_row(
            *(cell["batch"], cell["dtype"], "on" if cell["guidance"] else "off"),
            *(spread(over[name]) for name in ("static", "grouped", "mixed")),
            spread(cell["mixed_over_grouped"]),
        )
    console.print(table)
    for stream in section["streams"]:
        console.print(
            f"{stream['requests']} requests of three sizes and 15 to 25 steps, prompts to pixels, "
            f"{stream['dtype']}: {spread(stream['over_one_by_one'])} x the pipeline one by one; "
            f"images differ by at most {stream['max_difference_255']}/255"
        )
    right = sum(cell["layout_is_faster"] for cell in section["cells"])
    console.print(f"the faster layout was chosen in {right} of {len(section['cells'])} cells")


def _mixed_steps(console: Console, section: Figures) -> None:
    table = _table(
        section["what"],
        *("guidance", "how", "over one by one", "over static", "mean batch", "latency, CPU s"),
    )
    for stream in section["streams"]:
        for row in stream["contenders"]:
            latencies = row["mean_latency_cpu_s_by_steps"].items()
            table.add_row(
                "on" if stream["guidance"] else "off",
                row["kind"],
                spread(row.get("speed_up_over_one_by_one_cpu")),
                spread(row.get("speed_up_over_static_cpu")),
                f"{row['mean_batch']:.1f}",
                ", ".join(f"{steps}: {latency:.2f}" for steps, latency in latencies),
            )
    console.print(table)


def _overhead(console: Console, section: Figures) -> None:
    parts = list(section["cases"][0]["mean_parts_s"])[1:]
    table = _table(
        "One engine step over a plain UNet call (CPU ms, 64 px)",
        *("batch", "guidance", "plain", "step", "overhead", "95 % interval", *parts),
    )
    for case in section["cases"]:
        low, high = (100 * (end - 1) for end in case["ratio"]["ci95"])
        table.add_row(
            str(case["batch"]),
            "on" if case["guidance"] else "off",
            f"{1e3 * case['plain_s']['median']:.2f}",
            f"{1e3 * case['step_s']['median']:.2f}",
            f"{100 * case['share']:+.1f} %",
            f"{low:+.1f} to {high:+.1f} %",
            *(f"{1e3 * case['mean_parts_s'][part]:.2f}" for part in parts),
        )
    console.print(table)


def _exports(console: Console, section: Figures) -> None:
    table = _table(
        "Steps with exports over steps without (CPU of the process, batch 8, 64 px)",
        *(
            "interval",
            "guidance",
            "steps",
            "step, ms",
            "export, ms",
            "share",
            "95 % interval",
            "at the policy's",
        ),
    )
    for case in section["cases"]:
        low, high = (100 * (end - 1) for end in case["ratio"]["ci95"])
        table.add_row(
            case["interval"],
            "on" if case["guidance"] else "off",
            str(case["num_steps"]),
            f"{1e3 * case['without_s']['median']:.2f}",
            f"{1e3 * case['export_s']:.2f}",
            f"{100 * case['share']:+.2f} %",
            f"{low:+.2f} to {high:+.2f} %",
            "{:.2f} % ({:.2f} to {:.2f})".format(*(100 * x for x in case["share_at_policy"])),
        )
    console.print(table)


def _family(console: Console, section: Figures) -> None:
    table = _table(section["what"], "light, ms", "heavy, ms", "light / heavy, %")
    cells = [spread(section[name], factor=1e3, digits=1) for name in ("light_s", "heavy_s")]
    table.add_row(*cells, spread(section["ratio"], factor=100, digits=1))
    console.print(table)


def _kernels(console: Console, section: Figures) -> None:
    table = _table(section["what"], "op", "rows", "by", "us", "GB/s", "of copy, %", "over naive")
    for case in section["rows"]:
        for row in case["contenders"]:
            is_equal = "speed_up" in row
            table.add_row(
                case["op"],
                case["shape"],
                row["kind"],
                spread(row["seconds"], factor=1e6, digits=1),
                f"{row['bytes_per_s'] / 1e9:.1f}" if is_equal else "-",
                spread(row.get("share_of_copy"), factor=100, digits=0),
                spread(row["speed_up"]) if is_equal else f"differs by {row['max_difference']:.1g}",
            )
    console.print(table)


def _dispatcher(console: Console, section: Figures) -> None:
    table = _table(
        "One dispatcher (CPU of its services and its store; Ray and Serve left out)",
        *("requests", "replicas", "image, s", "queue", "per s", "per CPU s", "CPU ms each"),
        *("polls each", "of a core"),
    )
    for row in section["rows"]:
        table.add_row(
            row["kind"],
            str(row["replicas"]),
            f"{row['image_s']:g}",
            f"{row['mean_queue']:.0f}",
            f"{row['requests_per_s']:.0f}",
            f"{row['requests_per_cpu_s']:.0f}",
            f"{row['cpu_ms_per_request']:.3f}",
            f"{row['polls_per_request']:.1f}",
            f"{100 * row['share_of_a_core']:.0f} %",
        )
    console.print(table)
    for row in section["capacity"]:
        console.print(
            f"  {row['kind']}: up to {row['gpus']} GPUs in a cell, bound by its {row['by']} "
            f"({row['assumption']})"
        )


def _service(console: Console, section: Figures) -> None:
    table = _table(
        "Service over the engine, one client, wall ms: p50 / p95",
        *("replicas", "steps", "total", "engine", "overhead", "http", "lease", "code+report"),
    )
    names = ("total", "engine", "overhead", "http", "lease", "code_and_report")
    for run in section["runs"]:
        for case in run["sequential"]:
            cells = [f"{1e3 * case[n]['median']:.1f} / {1e3 * case[n]['p95']:.1f}" for n in names]
            table.add_row(str(run["replicas"]), str(case["num_steps"]), *cells)
    console.print(table)
    for run in section["runs"]:
        _service_details(console, run)


def _service_details(console: Console, run: Figures) -> None:
    console.print(f"[bold]{run['replicas']} replica(s)[/bold], ready after {run['start_s']} s")
    for name, figures in run["parts"].items():
        console.print(f"  {name}: {1e3 * figures['median']:.2f} / {1e3 * figures['p95']:.2f} ms")
    for case in run["sequential"]:
        used = ", ".join(f"{role} {ms}" for role, ms in case["cpu_ms_per_request_by_role"].items())
        console.print(f"  CPU ms per request of {case['num_steps']} steps: {used}")
    flow = run["throughput"]
    console.print(
        f"  {flow['clients']} clients: {spread(flow['service_images_per_s'])} images/s, "
        f"in-process runner {spread(flow['runner_images_per_s'])}, "
        f"ratio {spread(flow['service_over_runner'])}"
    )


def _memory(console: Console, section: Figures) -> None:
    for run in section["runs"]:
        table = _table(
            f"Memory with {run['replicas']} replica(s), PSS in MiB", "process", "number", "sum"
        )
        for row in run["processes"]:
            table.add_row(row["role"], str(row["processes"]), f"{row['sum_mib']:.0f}")
        console.print(table)


def _load(console: Console, section: Figures) -> None:
    table = _table(section["what"], "calls", "done", "p50, s", "p99, s", "errors")
    for kind, row in section["kinds"].items():
        times = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("p50_s", "p99_s"))
        table.add_row(kind, str(row["requests"]), *times, str(sum(row["errors"].values())))
    console.print(table)
    console.print(f"  together {section['per_s']:.1f} per s; CPU ms per request: ", end="")
    used = section["cpu_ms_per_request_by_role"].items()
    console.print(", ".join(f"{role} {ms}" for role, ms in used if ms >= 0.1))
    for role, row in section["memory"].items():
        sizes = [size for _, size in row["pss_mib"]]
        low, high = row["slope_ci95"]
        console.print(
            f"  {role}: {sizes[0]:.0f} MiB at first, {sizes[-1]:.0f} at last (PSS); own after "
            f"a minute {row['slope_mib_per_min']:+.2f} MiB/min ({low:+.2f} to {high:+.2f}), "
            f"in the second half {row['late_slope_mib_per_min']:+.2f}"
        )
    for kind, row in section["kinds"].items():
        for what, count in row["errors"].items():
            console.print(f"  [red]{kind}, {count} times: {what}[/red]")


def _aims(console: Console, result: dict[str, Any]) -> None:
    table = _table("Aims", "aim", "wanted", "measured", "95 % interval", "met")
    for aim in check_aims(result["sections"]):
        low, high = aim.interval
        table.add_row(
            aim.name,
            aim.wanted,
            f"{aim.measured:.2f} {aim.unit}",
            f"{low:.2f} to {high:.2f}",
            aim.verdict,
        )
    console.print(table)
    if result["quick"]:
        console.print("[yellow]a quick run: it shows that everything works, not how fast[/yellow]")
