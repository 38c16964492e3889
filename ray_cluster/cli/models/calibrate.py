"""``ray-cluster models calibrate`` and ``calibrate-cascade``: measure a user's own models."""

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
        from ray_cluster.cli.models.calibrate_run import CalibrateOptions, run_calibration

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


def calibrate_cascade(
    config: Annotated[Path, typer.Argument(help="YAML file with the cascade.")],
    cascade: Annotated[
        str | None, typer.Option(help="Its name; not needed where there is one alone.")
    ] = None,
    prompts: _Prompts = None,
    images: Annotated[int, typer.Option(min=1, help="Images of each model.")] = 256,
    label: Annotated[
        str | None,
        typer.Option(help="Of an image classifier: the label that says an image is right."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder to write; the discriminator's `calibration`, or .runs/calibrate-NAME.",
        ),
    ] = None,
) -> None:
    """Calibrate a cascade's discriminator on images of its light and its heavy model.

    Both models make an image of each prompt as calls get it by default; the discriminator scores
    them. Its confidence becomes the chance that the light image scores at least as well as the
    heavy one. calibration.json has that; deferral.json has the share deferred by threshold, and the
    mean score by that share. An interrupted run goes on where it was.

    [bold]Examples[/bold]

      ray-cluster models calibrate-cascade configs/cascade.yaml

      ray-cluster models calibrate-cascade service.yaml --cascade auto --prompts prompts.txt
    """
    with plain_errors():
        from ray_cluster.cli.models.cascade_run import CascadeOptions, run_cascade_calibration

        run_cascade_calibration(CascadeOptions(config, cascade, prompts, images, label, out))
