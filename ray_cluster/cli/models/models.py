"""``ray-cluster models``: list, calibrate, train, publish and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.models.calibrate import calibrate, calibrate_cascade
from ray_cluster.cli.output import fail, plain_errors, stdout
from ray_cluster.cli.remote.service_options import URL_VARIABLE

models = typer.Typer(
    help="List and calibrate models; train, publish and measure the built-in ones."
)
models.command()(calibrate)
models.command()(calibrate_cascade)

_Name = Annotated[str, typer.Argument(help="A built-in model, such as shapes-sd.")]


@models.command("list")
def list_models(
    url: Annotated[
        str | None,
        typer.Option(envvar=URL_VARIABLE, help="Also list the models of a running service."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key for --url; RAY_CLUSTER_API_KEY is another way.")
    ] = None,
) -> None:
    """List the built-in models, and those that a service at --url has ready.

    [bold]Examples[/bold]

      ray-cluster models list

      ray-cluster models list --url http://127.0.0.1:8000
    """
    from ray_cluster.cli.models.model_list import print_builtin, print_served

    with plain_errors():
        if api_key is not None and url is None:
            fail("--api-key changes nothing without --url; leave it out")
        print_builtin(stdout())
        if url is not None:
            print_served(stdout(), url, api_key)


@models.command()
def fetch(path: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration.")]) -> None:
    """Download the models that a configuration names, so that no replica has to.

    They are kept where all programs keep models of the hub (HF_HOME); what is there stays.

    [bold]Example[/bold]

      ray-cluster models fetch my.yaml
    """
    from ray_cluster.cli.models.model_list import fetch_models

    with plain_errors():
        fetch_models(stdout(), path)


@models.command()
def train(  # noqa: PLR0913, PLR0917 - one argument per option is how typer declares them
    name: _Name,
    out: Annotated[Path | None, typer.Option(help="Working folder. Default: .runs/NAME.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Begin the final decay of each stage after this time."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of a new run. Default: the recipe's.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage. Repeatable.")] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Finished model, for the parts that this run has not trained."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1.")] = "cpu",
    export: Annotated[
        Path | None, typer.Option(help="Folder to write in diffusers' layout at the end.")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Pause the run in --out.")] = False,
    resume_run: Annotated[
        bool, typer.Option("--resume-run", help="Let a paused run go on.")
    ] = False,
) -> None:
    """Train a built-in model, or continue an interrupted run.

    Ctrl-C writes a checkpoint and stops.

    [bold]Examples[/bold]

      ray-cluster models train shapes-sd --minutes 5 --out /tmp/run --export /tmp/shapes

      ray-cluster models train shapes-sd --stage codec --base published/shapes-sd

      ray-cluster models train shapes-sd --pause
    """
    from ray_cluster.cli.models.model_training import pause_run, train_model

    with plain_errors():
        if pause and resume_run:
            fail("--pause and --resume-run contradict each other; give one of them")
        if pause or resume_run:
            said = pause_run(name, out, wait=pause)
        else:
            said = train_model(
                name,
                out,
                minutes=minutes,
                seed=seed,
                only=stage or (),
                base=base,
                device=device,
                export_to=export,
            )
        stdout().print(said, markup=False)


@models.command()
def publish(
    name: _Name,
    run: Annotated[
        Path | None, typer.Option(help="Folder of a finished run. Default: .runs/NAME.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: the package's own.")
    ] = None,
) -> None:
    """Replace a built-in model by a finished run, measure it, and write its model card.

    [bold]Examples[/bold]

      ray-cluster models publish shapes-sd

      ray-cluster models publish shapes-sd --run /tmp/run
    """
    from ray_cluster.cli.models.model_training import publish_model

    with plain_errors():
        publish_model(name, run, out)


@models.command()
def evaluate(  # noqa: PLR0913, PLR0917 - as above
    name: Annotated[str, typer.Argument(help="A built-in model or part, or a diffusers folder.")],
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of easy, and of hard prompts at 64 x 64.")
    ] = None,
    other_prompts: Annotated[
        int | None, typer.Option(min=0, help="Number of prompts at 128 x 128, and at other ratios.")
    ] = None,
    bare_prompts: Annotated[
        int | None, typer.Option(min=0, help='Number of prompts such as "a red circle".')
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Images of each prompt at 64 x 64.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of prompts and noise.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0.0, help="Guidance scale.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for evaluation.json and contact-sheet.png.")
    ] = None,
) -> None:
    """Measure how often a model draws what the prompt says, with the built-in classifier.

    The defaults are those that the model's card was measured with; for a folder, shapes-sd's.

    [bold]Examples[/bold]

      ray-cluster models evaluate shapes-sd

      ray-cluster models evaluate shapes-sd --prompts 50 --repeats 1 --out /tmp/report
    """
    from ray_cluster.cli.models.model_training import evaluate_model

    given = {
        "prompts": prompts,
        "prompts_elsewhere": other_prompts,
        "prompts_bare": bare_prompts,
        "repeats": repeats,
        "seed": seed,
        "steps": steps,
        "guidance": guidance,
    }
    with plain_errors():
        changes = {key: value for key, value in given.items() if value is not None}
        evaluate_model(name, changes, out)
