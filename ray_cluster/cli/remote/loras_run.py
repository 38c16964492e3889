"""What the commands of ``loras`` do with their options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ray_cluster.api.output.resource_schemas import LoraResponse
from ray_cluster.cli.output import print_table, stderr, stdout
from ray_cluster.cli.remote.job_view import one_line
from ray_cluster.cli.remote.remote_service import RemoteService, do_each


def list_all(service: RemoteService, limit: int | None, *, as_json: bool) -> None:
    """Print LoRAs by name: a line each, or as JSON."""
    found, console = service.loras(limit), stdout()
    if as_json:
        typer.echo(json.dumps([one.model_dump() for one in found], indent=2))
    elif found:
        print_table(console, _table(found, console))
    else:
        stderr().print("no LoRAs")


def add_one(service: RemoteService, body: Mapping[str, Any]) -> None:
    """Register a LoRA and print it."""
    added = service.add_lora({name: value for name, value in body.items() if value is not None})
    stdout().print(
        f"{added.name}  {added.state}  for {added.base} from {added.source}", markup=False
    )


def remove_all(service: RemoteService, names: Sequence[str]) -> None:
    """Remove LoRAs; leave with code 1 if there is one that there is not."""

    def remove(name: str) -> str:
        removed = service.remove_lora(name)
        return f"{removed.name}  {removed.state}"

    do_each(names, remove)


def _table(loras: Sequence[LoraResponse], console: Console) -> Table:
    """Return a line per LoRA; a heading on a terminal only."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.show_header = console.is_terminal
    for name in ("lora", "state", "base", "size", "rank", "uses", "nodes"):
        table.add_column(name)
    for one in loras:
        state = f"{one.state}: {one_line(one.error)}" if one.error else one.state
        table.add_row(
            one.name,
            Text(f"{state} (pinned)" if one.pinned else state),
            Text(one.base),
            "-" if one.num_bytes is None else f"{one.num_bytes / 1e6:.1f} MB",
            "-" if one.ranks is None else ", ".join(map(str, one.ranks)),
            str(one.num_uses),
            Text(", ".join(one.nodes) or "-"),
        )
    return table
