"""``ray-cluster models``: list, calibrate, train, publish and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_cluster.cli.calibrate import calibrate
from ray_cluster.cli.output import fail, plain_errors, print_table, stdout

models = typer.Typer(
    help="The models: list and calibrate them; train a built-in one, publish and measure it."
)
models.command()(calibrate)

_Name = Annotated[str, typer.Argument(help="A built-in model, such as shapes-sd.")]


@models.command("list")
def list_models(
    url: Annotated[
        str | None, typer.Option(help="Also list what a running service serves.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="For --url.")] = None,
) -> None:
    """List the built-in models, and those that a service at --url has ready.

    [bold]Examples[/bold]

      ray-cluster models list

      ray-cluster models list --url http://127.0.0.1:8000
    """
    from ray_cluster.cli.model_tables import builtin_table, served_table

    with plain_errors():
        if api_key is not None and url is None:
            fail("--api-key changes nothing without --url; leave it out")
        print_table(stdout(), builtin_table())
        if url is not None:
            print_table(stdout(), served_table(url, api_key))


@models.command()
def train(  # noqa: PLR0913, PLR0917 - one argument per option is how typer declares them
    name: _Name,
    out: Annotated[Path | None, typer.Option(help="Working folder; .runs/NAME if absent.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Begin each stage's final decay after this time."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Another seed than the recipe's, for a new run.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help="Only this stage; may be given several times.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="A finished model to take from what this run has not trained itself."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1.")] = "cpu",
    export: Annotated[
        Path | None, typer.Option(help="When done, write a diffusers folder here.")
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause", help="Make the run that works in --out wait.")
    ] = False,
    resume_run: Annotated[
        bool, typer.Option("--resume-run", help="Let a run that waits go on.")
    ] = False,
) -> None:
    """Train a built-in model; an interrupted run goes on where it was.

    Ctrl-C writes a checkpoint and stops.

    [bold]Examples[/bold]

      ray-cluster models train shapes-sd --minutes 5 --out /tmp/run --export /tmp/shapes

      ray-cluster models train shapes-sd --stage codec --base published/shapes-sd

      ray-cluster models train shapes-sd --pause
    """
    from ray_cluster.cli.model_training import TrainingOptions, steer, train_model

    with plain_errors():
        if pause and resume_run:
            fail("--pause and --resume-run contradict each other; give one of them")
        if pause or resume_run:
            stdout().print(steer(name, out, wait=pause), markup=False)
            return
        options = TrainingOptions(
            name, out, minutes, seed, tuple(stage or ()), base, device, export
        )
        stdout().print(train_model(options), markup=False)


@models.command()
def publish(
    name: _Name,
    run: Annotated[
        Path | None, typer.Option(help="Folder of a finished run; .runs/NAME if absent.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; the package's own if absent.")
    ] = None,
) -> None:
    """Replace a built-in model by a run: export it, measure it, and write the model cards.

    [bold]Examples[/bold]

      ray-cluster models publish shapes-sd

      ray-cluster models publish shapes-sd --run /tmp/run
    """
    from ray_cluster.cli.model_training import publish_model

    with plain_errors():
        publish_model(name, run, out)


@models.command()
def evaluate(  # noqa: PLR0913, PLR0917 - as above
    name: Annotated[
        str, typer.Argument(help="Anything that is built in, or a model's diffusers folder.")
    ],
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Easy and hard prompts at 64 x 64, each so many.")
    ] = None,
    other_prompts: Annotated[
        int | None, typer.Option(min=0, help="Prompts at 128 x 128, and at sizes not square.")
    ] = None,
    bare_prompts: Annotated[
        int | None, typer.Option(min=0, help='Prompts such as "a red circle".')
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Pictures of each prompt at 64 x 64.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of prompts and noise.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0.0, help="Guidance scale.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for evaluation.json and contact-sheet.png.")
    ] = None,
) -> None:
    """Measure how often a model draws what the prompt says, with a classifier of our own.

    What is not given is what the card of what is built in was measured with; for a folder, what
    that of shapes-sd was.

    [bold]Examples[/bold]

      ray-cluster models evaluate shapes-sd

      ray-cluster models evaluate shapes-sd --prompts 50 --repeats 1 --out /tmp/report
    """
    from ray_cluster.cli.model_training import evaluate_model

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
