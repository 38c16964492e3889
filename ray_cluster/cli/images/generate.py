"""``ray-cluster generate``: images into files, from a service or from this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ray_cluster.cli.remote.service_options import URL_VARIABLE
from ray_cluster.policies.fidelity import Fidelity
from ray_cluster.requests import ImageFormat, SamplerName


def _image(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="The image")


def _edit(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="The image to edit")


def _file(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Files")


def _where(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Where it is made")


_Prompt = Annotated[
    str | None, typer.Argument(help="What the image shows. Not needed with --like.")
]
_Output = Annotated[Path, _file("File to write. Several images get -1, -2, ...", "--output", "-o")]
_Force = Annotated[bool, _file("Overwrite existing files.", "--force", "-f")]
_ImageFormat = Annotated[
    ImageFormat | None, _file("File format. Default: by the file's suffix.", "--format")
]
_Compression = Annotated[int | None, _file("Quality of jpeg and webp, 0 to 100.")]
_Metadata = Annotated[
    bool | None,
    _file("Whether a png contains its recipe, for --like.", "--metadata/--no-metadata"),
]
_Previews = Annotated[
    int | None, _file("Write up to 3 previews while the image is made, beside its file.")
]
_Like = Annotated[
    Path | None, _image("Repeat the recipe in a png of this service. Options override it.")
]
_NegativePrompt = Annotated[str | None, _image("What the image must not show.")]
_Seed = Annotated[int | None, _image("Seed; further images take the next ones. Default: random.")]
_NumImages = Annotated[int | None, _image("Number of images. Default: 1.", "--n", "-n")]
_Size = Annotated[str | None, _image("WIDTHxHEIGHT in pixels, or auto.")]
_Steps = Annotated[int | None, _image("Denoising steps.")]
_Fidelity = Annotated[
    Fidelity | None,
    _image(
        "exact (default), or fewer steps: balanced and fast, as measured for the model.",
        "--fidelity",
    ),
]
_Allow = Annotated[
    list[str] | None,
    _image(
        "With --url, what may be reduced to meet the deadline: fidelity, or steps (down to "
        "--min-steps). Repeatable."
    ),
]
_MinSteps = Annotated[int | None, _image("With --allow steps: fewest denoising steps.")]
_Guidance = Annotated[float | None, _image("Guidance scale. 1 or less turns it off.")]
_Sampler = Annotated[SamplerName | None, _image("Sampler.")]
_Lora = Annotated[
    list[str] | None,
    _image("LoRA as NAME or NAME:SCALE; without --url a built-in one or a file. Repeatable."),
]
_LoraStartStep = Annotated[
    int | None, _image("With --lora: how many of the first steps are made without. Default: 0.")
]
_Control = Annotated[
    list[str] | None,
    _image(
        "ControlNet as NAME=FILE, where +DETECTOR may follow the name, :SCALE and :START-END the "
        "file; without --url a built-in one, or one of --config. Repeatable."
    ),
]
_Upscale = Annotated[int | None, _image("2 or 4: enlarge the finished image so many times.")]
_Slo = Annotated[float | None, _image("Deadline in seconds from now.")]
_Priority = Annotated[int | None, _image("With --url: higher priorities are served first.")]
_Edit = Annotated[
    list[Path] | None,
    _edit(
        "Image to change (PNG, JPEG, WebP, AVIF); the prompt says what it shows then. Repeatable, "
        "for models that look at several."
    ),
]
_Mask = Annotated[
    Path | None,
    _edit("Mask of the first one's size (PNG, WebP): what is transparent is edited. Default: all."),
]
_Strength = Annotated[
    float | None,
    _edit("How far it changes, above 0 up to 1. Default: 1 with a mask, 0.8 without."),
]
_Feather = Annotated[
    int | None,
    _edit("With --mask: width in pixels over which the edit is blended in.", "--feather"),
]
_Crop = Annotated[
    Literal["auto"] | None,
    _edit("With --mask: auto works on the part around the mask, at the model's own size."),
]
_PasteBack = Annotated[
    bool | None,
    _edit(
        "With --mask: whether pixels outside the mask stay as they are, bit for bit. Default: yes.",
        "--paste-back/--no-paste-back",
    ),
]
_Model = Annotated[
    str | None,
    _where("Model by its served name; without --url also a built-in one, a folder or a hub id."),
]
_Url = Annotated[
    str | None,
    typer.Option(
        envvar=URL_VARIABLE,
        help="Running service, such as http://127.0.0.1:8000. Default: this process.",
        rich_help_panel="Where it is made",
    ),
]
_ApiKey = Annotated[
    str | None,
    _where(
        "API key for --url. Default: that in RAY_CLUSTER_API_KEY, or the configuration's first "
        "plain one, for a service on this machine."
    ),
]
_Timeout = Annotated[
    float | None,
    _where("With --url: seconds to wait, 600 by default. The job goes on afterwards."),
]
_Config = Annotated[
    Path | None, _where("Configuration file. Default: the built-in configs/local.yaml.")
]
_Pool = Annotated[
    str | None, _where("Without --url: pool of the configuration. Default: by --model.")
]


# options that are parameters of the API, and those of them that have another name there
_PARAMS = (
    *("prompt", "model", "negative_prompt", "seed", "num_images", "size", "steps", "fidelity"),
    *("allow", "min_steps", "guidance", "sampler", "priority", "slo", "compression", "metadata"),
    *("previews", "strength", "feather", "crop", "paste_back", "lora", "lora_start_step"),
    *("control", "upscale"),
)
_API_NAMES: Mapping[str, str] = {
    "compression": "output_compression",
    "control": "controlnets",
    "feather": "feather_px",
    "guidance": "guidance_scale",
    "lora": "loras",
    "min_steps": "min_inference_steps",
    "num_images": "n",
    "previews": "partial_images",
    "slo": "slo_s",
    "steps": "num_inference_steps",
}


def generate(  # noqa: PLR0913, PLR0917 - one argument per option is how typer declares them
    prompt: _Prompt = None,
    output: _Output = Path("out.png"),
    force: _Force = False,
    image_format: _ImageFormat = None,
    compression: _Compression = None,
    metadata: _Metadata = None,
    previews: _Previews = None,
    like: _Like = None,
    negative_prompt: _NegativePrompt = None,
    seed: _Seed = None,
    num_images: _NumImages = None,
    size: _Size = None,
    steps: _Steps = None,
    fidelity: _Fidelity = None,
    allow: _Allow = None,
    min_steps: _MinSteps = None,
    guidance: _Guidance = None,
    sampler: _Sampler = None,
    lora: _Lora = None,
    lora_start_step: _LoraStartStep = None,
    control: _Control = None,
    upscale: _Upscale = None,
    edit: _Edit = None,
    mask: _Mask = None,
    strength: _Strength = None,
    feather: _Feather = None,
    crop: _Crop = None,
    paste_back: _PasteBack = None,
    slo: _Slo = None,
    priority: _Priority = None,
    model: _Model = None,
    url: _Url = None,
    api_key: _ApiKey = None,
    timeout: _Timeout = None,
    config: _Config = None,
    pool: _Pool = None,
) -> None:
    """Make images from a text, or by changing an image, and write them to files.

    With --url they are a job of that service. A lost connection does not end it; Ctrl-C does.

    [bold]Examples[/bold]

      ray-cluster generate "a red circle on a white background" -o red.png

      ray-cluster generate "a blue star" --seed 7 --n 4 --size 96x64 --fidelity fast -o star.png

      ray-cluster generate "a blue star" --lora pastel:0.8 --lora outline -o drawn.png

      ray-cluster generate "a blue star" --control shapes-sd-edges+canny=a.png:0.8 -o steered.png

      ray-cluster generate --like red.png --guidance 5 -o stronger.png

      ray-cluster generate "a blue star" --edit photo.png --mask mask.png -o edited.png

      ray-cluster generate "a red circle" --url http://127.0.0.1:8000 -o red.webp
    """
    _generate(dict(locals()))


def _generate(options: dict[str, Any]) -> None:
    from ray_cluster.cli.output import plain_errors

    # typer gives an empty list for an option that is not there
    options |= {name: options[name] or None for name in ("allow", "lora", "control")}
    values = {_API_NAMES.get(name, name): options[name] for name in _PARAMS}
    with plain_errors():
        from ray_cluster.cli.images.generate_run import Files, Target, run

        files = [options[name] for name in ("output", "image_format", "like", "force")]
        inputs = [tuple(options["edit"] or ()), options["mask"]]
        target = [options[name] for name in ("url", "api_key", "timeout", "config", "pool")]
        run(values, Files(*files, *inputs), Target(*target))
