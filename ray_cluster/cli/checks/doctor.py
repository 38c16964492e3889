"""``ray-cluster doctor``: what this machine can run, and what to do about each problem."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ray_cluster.cli.checks import Finding
    from ray_cluster.policies.costs.gpu_shares import Card


def doctor(  # noqa: PLR0917 - one argument per option is how typer declares them
    config: Annotated[
        Path | None,
        typer.Argument(help="Configuration file. Default: the built-in configs/local.yaml."),
    ] = None,
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(min=1, help="Plan pools with `device: cuda` for GPUs of this memory."),
    ] = None,
    gpu_capability: Annotated[
        str,
        typer.Option(
            metavar="MAJOR.MINOR", help="CUDA compute capability of these GPUs; 8.9 is an L40S."
        ),
    ] = "8.0",
    host: Annotated[
        str | None, typer.Option(help="Check this address, as of `serve --host`.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Check this port, as of `serve --port`.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Check this port, as of `serve --dashboard-port`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether this machine can run a configuration; nothing is started or downloaded.

    With --gpu-memory-gib it says what fits on a GPU that need not be here, from the headers of the
    models' files. Exits with 1 when something cannot run.

    [bold]Examples[/bold]

      ray-cluster doctor

      ray-cluster doctor my.yaml --port 8100 --json

      ray-cluster doctor my.yaml --gpu-memory-gib 24 --gpu-capability 8.9
    """
    from rich.markup import escape

    from ray_cluster.cli.output import stderr

    overrides: dict[str, dict[str, object]] = {
        "http": {"host": host, "port": port},
        "ray": {"dashboard_port": dashboard_port},
    }
    findings = []
    with stderr().status("checking") as status:
        for finding in _findings(config, _named_card(gpu_memory_gib, gpu_capability), overrides):
            findings.append(finding)
            status.update(escape(f"checking, after {finding.subject}"))
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def _named_card(memory_gib: float | None, capability: str) -> Card | None:
    """Return the GPU that the options name, with all of its memory free."""
    from ray_cluster.policies.costs.gpu_shares import Card

    found = re.fullmatch(r"(\d{1,2})\.(\d)", capability)
    if found is None:
        raise typer.BadParameter(
            f"{capability!r} is no compute capability such as 8.0 or 9.0",
            param_hint="--gpu-capability",
        )
    if memory_gib is None:
        return None
    total_bytes = int(memory_gib * 2**30)
    return Card(total_bytes, total_bytes, (int(found[1]), int(found[2])))


def _findings(
    path: Path | None, card: Card | None, overrides: Mapping[str, Mapping[str, object]]
) -> Iterator[Finding]:
    """Make all checks, one after another; without a usable configuration, those that need none."""
    from ray_cluster.cli.checks import machine, ok, problem
    from ray_cluster.cli.checks.service import check_service
    from ray_cluster.cli.checks.software import check_software
    from ray_cluster.cli.service.served_file import with_options
    from ray_cluster.config.loading import default_config_path, load_config
    from ray_cluster.config.sections.cell_wide import RayConfig
    from ray_cluster.errors import ConfigError

    yield from check_software()
    try:
        config = with_options(load_config(path), overrides)
    except ConfigError as error:
        yield problem("configuration", str(error))
        yield from machine.check_machine(RayConfig())
        yield from (*machine.check_gpus(()), *machine.check_model_cache())
        return
    yield ok("configuration", str(path or default_config_path()))
    yield from machine.check_machine(config.ray)
    pools = config.pools if config.ray.address is None else ()
    yield from (*machine.check_processor(pools), *machine.check_gpus(pools, card))
    yield from machine.check_model_cache()
    # without a name it is this machine's
    yield from check_service(config, card or machine.first_card(pools))


def _print(findings: list[Finding]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ray_cluster.cli.output import print_table, stdout

    styles = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    table = Table("", "what", "found", box=box.SIMPLE)
    for finding in findings:
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n→ {finding.advice}", style="bold")
        level = Text(finding.level, style=styles[finding.level])
        table.add_row(level, Text(finding.subject), found)
    console = stdout()
    print_table(console, table)
    counts = {level: sum(item.level == level for item in findings) for level in styles}
    if counts["problem"]:
        console.print(f"{counts['problem']} problem(s): this cannot run here", style="bold red")
    elif counts["warning"]:
        console.print(f"runs, with {counts['warning']} warning(s)", style="yellow")
    else:
        console.print("ready", style="green")
