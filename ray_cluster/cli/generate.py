"""``ray-cluster generate``: images into files, from a service or from this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_cluster.cli import generate_options as option


def generate(  # noqa: PLR0913, PLR0917 - one argument per option is how typer declares them
    prompt: option.Prompt = None,
    output: option.Output = Path("out.png"),
    force: option.Force = False,
    image_format: option.Format = None,
    compression: option.Compression = None,
    metadata: option.Metadata = None,
    previews: option.Previews = None,
    like: option.Like = None,
    negative_prompt: option.NegativePrompt = None,
    seed: option.Seed = None,
    num_images: option.NumImages = None,
    size: option.Size = None,
    steps: option.Steps = None,
    fidelity: option.FidelityMode = None,
    allow: option.Allow = None,
    min_steps: option.MinSteps = None,
    guidance: option.Guidance = None,
    sampler: option.Sampler = None,
    slo: option.Slo = None,
    priority: option.Priority = None,
    model: option.Model = None,
    url: option.Url = None,
    api_key: option.ApiKey = None,
    timeout: option.Timeout = None,
    config: option.Config = None,
    pool: option.Pool = None,
) -> None:
    """Make images from a text, and write them to files.

    With --url they are a job of that service, which a lost connection does not end; Ctrl-C does.

    [bold]Examples[/bold]

      ray-cluster generate "a red circle on a white background" -o red.png

      ray-cluster generate "a blue star" --seed 7 --n 4 --size 96x64 --steps 30 -o star.png

      ray-cluster generate "a blue star" --fidelity fast -o quick.png

      ray-cluster generate --like red.png --guidance 5 -o stronger.png

      ray-cluster generate "a red circle" --url http://127.0.0.1:8000 -o red.webp
    """
    from ray_cluster.cli.output import plain_errors

    values: dict[str, Any] = {"prompt": prompt, "model": model, "negative_prompt": negative_prompt}
    values |= {"seed": seed, "n": num_images, "size": size, "num_inference_steps": steps}
    # typer gives an empty list for an option that is not there
    values |= {"fidelity": fidelity, "allow": allow or None, "min_inference_steps": min_steps}
    values |= {"guidance_scale": guidance, "sampler": sampler, "priority": priority, "slo_s": slo}
    values |= {"output_compression": compression, "metadata": metadata}
    values |= {"partial_images": previews}
    with plain_errors():
        from ray_cluster.cli.generate_run import Files, Place, run

        files = Files(output, image_format, like, force=force)
        run(values, files, Place(url, api_key, timeout, config, pool))
