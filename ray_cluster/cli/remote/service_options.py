"""The options of commands that call a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

URL_VARIABLE = "RAY_CLUSTER_URL"
"""Environment: address of the service that commands call."""

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Address of the service.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="API key. Default: that in RAY_CLUSTER_API_KEY, or the configuration's first plain "
        "one, for a service on this machine."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="Configuration file with the key. Default: the built-in configs/local.yaml."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's reply as JSON.")]
