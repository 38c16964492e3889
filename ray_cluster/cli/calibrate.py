"""``ray-cluster models calibrate``: measures the fidelity table of a user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.output import plain_errors

_Model = Annotated[
    str,
    typer.Argument(
        help="A pool of the configuration, a built-in model, a diffusers folder or a hub id."
    ),
]
_Config = Annotated[
    Path | None, typer.Option(help="YAML file; without it the built-in configs/local.yaml.")
]
_Prompts = Annotated[
    Path | None,
    typer.Option(help="Text file, a prompt on each line; ours for such a model if absent."),
]
_Size = Annotated[
    list[str] | None,
    typer.Option(help="WIDTHxHEIGHT; may be given several times. The pool's if absent."),
]
_Sampler = Annotated[str | None, typer.Option(help="The pool's if absent.")]
_Guidance = Annotated[
    float | None, typer.Option(min=0.0, help="Guidance scale; the pool's if absent.")
]
_Steps = Annotated[
    str, typer.Option(help="Numbers of steps that calls ask for, with commas between.")
]
_Images = Annotated[
    int, typer.Option(min=1, help="Images to choose by, and as many others to report on.")
]
_Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Folder of images and report; .runs/calibrate-NAME if absent."
    ),
]
_Write = Annotated[
    Path | None, typer.Option(help="Configuration file into whose pool the table is written.")
]
_Quick = Annotated[
    bool, typer.Option("--quick", help="Few images and ways: to see that all works.")
]


def calibrate(  # noqa: PLR0913, PLR0917 - one argument per option is how typer declares them
    model: _Model,
    config: _Config = None,
    prompts: _Prompts = None,
    size: _Size = None,
    sampler: _Sampler = None,
    guidance: _Guidance = None,
    steps: _Steps = "10,20,30,50",
    images: _Images = 48,
    out: _Out = None,
    write: _Write = None,
    quick: _Quick = False,
) -> None:
    """Measure with how few or reused steps a model keeps its images; write its fidelity table.

    Images with fewer steps, and with steps that reuse activations of earlier ones, are compared
    with those made with all steps. For each number of steps and mode (balanced: no image below
    SSIM 0.95; fast: 0.85) the table names whichever is cheapest. An interrupted run goes on where
    it was. Leave the machine alone meanwhile.

    [bold]Examples[/bold]

      ray-cluster models calibrate shapes-sd --quick

      ray-cluster models calibrate my-pool --write service.yaml --prompts prompts.txt

      ray-cluster models calibrate /models/sdxl --size 1024x1024 --steps 30 --images 24
    """
    with plain_errors():
        from ray_cluster.cli.calibrate_run import CalibrateOptions, run_calibration

        run_calibration(
            CalibrateOptions(
                model=model,
                config=config or write,
                prompts=prompts,
                sizes=tuple(size or ()),
                sampler=sampler,
                guidance=guidance,
                steps=steps,
                num_images=images,
                out=out,
                write=write,
                is_quick=quick,
            )
        )
