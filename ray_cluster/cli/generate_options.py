"""The options of ``generate`` as types: parameters of the API, files, and where to make it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.policies.fidelity import Fidelity
from ray_cluster.requests import ImageFormat, SamplerName

_REQUEST = "What to make"
_FILES = "Files"
_WHERE = "Where to make it"

Prompt = Annotated[
    str | None, typer.Argument(help="What the image shows; needed unless --like has it.")
]

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="File; several images get -1, -2, ...", rich_help_panel=_FILES
    ),
]
Force = Annotated[
    bool, typer.Option("--force", "-f", help="Overwrite files.", rich_help_panel=_FILES)
]
Format = Annotated[
    ImageFormat | None,
    typer.Option("--format", help="As the file is named if absent.", rich_help_panel=_FILES),
]
Compression = Annotated[
    int | None,
    typer.Option(help="Quality of jpeg and webp, 0 to 100.", rich_help_panel=_FILES),
]
Metadata = Annotated[
    bool | None,
    typer.Option(
        "--metadata/--no-metadata",
        help="Whether a png carries its recipe.",
        rich_help_panel=_FILES,
    ),
]
Previews = Annotated[
    int | None,
    typer.Option(
        help="Show an image up to 3 times on the way, in a file beside it.", rich_help_panel=_FILES
    ),
]

Like = Annotated[
    Path | None,
    typer.Option(
        help="A png of this service: repeat its recipe; other options change it.",
        rich_help_panel=_REQUEST,
    ),
]
NegativePrompt = Annotated[
    str | None, typer.Option(help="What the image shall not show.", rich_help_panel=_REQUEST)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Random if absent; image i takes seed + i.", rich_help_panel=_REQUEST),
]
NumImages = Annotated[
    int | None, typer.Option("--n", "-n", help="Images, 1 if absent.", rich_help_panel=_REQUEST)
]
Size = Annotated[
    str | None, typer.Option(help="WIDTHxHEIGHT in pixels, or auto.", rich_help_panel=_REQUEST)
]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.", rich_help_panel=_REQUEST)]
FidelityMode = Annotated[
    Fidelity | None,
    typer.Option(
        "--fidelity",
        help="exact if absent; balanced and fast: as few steps as were measured to do.",
        rich_help_panel=_REQUEST,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        help="What may be given up to be in time, with --url: fidelity, or steps down to "
        "--min-steps. May be repeated.",
        rich_help_panel=_REQUEST,
    ),
]
MinSteps = Annotated[
    int | None,
    typer.Option(
        help="Fewer steps down to this to be in time, with --url.", rich_help_panel=_REQUEST
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(help="Guidance scale; off at 1 and below.", rich_help_panel=_REQUEST),
]
Sampler = Annotated[SamplerName | None, typer.Option(help="Sampler.", rich_help_panel=_REQUEST)]
Slo = Annotated[
    float | None,
    typer.Option(help="Seconds from arrival to the deadline.", rich_help_panel=_REQUEST),
]
Priority = Annotated[
    int | None,
    typer.Option(help="Higher is served first; with --url.", rich_help_panel=_REQUEST),
]

Model = Annotated[
    str | None,
    typer.Option(
        help="A served model; without --url also a built-in one, a folder or a hub id.",
        rich_help_panel=_WHERE,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="A running service, like http://127.0.0.1:8000; without it the model is loaded here.",
        rich_help_panel=_WHERE,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="For --url; if absent and the service is on this machine, the configuration's.",
        rich_help_panel=_WHERE,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds to wait for --url, over lost connections; 600 if absent. The job goes on.",
        rich_help_panel=_WHERE,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with pools; without it the built-in configs/local.yaml.",
        rich_help_panel=_WHERE,
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(help="Pool of the configuration, without --url.", rich_help_panel=_WHERE),
]
