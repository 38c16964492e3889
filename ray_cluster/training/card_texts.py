"""The words of the model cards; `card.py` fills in figures at the names in braces."""

_FOLDER = "ray_cluster/models/weights"


def card_text(name: str) -> str:
    """Return the card of a built-in model or part, with names in braces for its figures.

    Raises:
        KeyError: there is none of this name.
    """
    if name == "attribute-classifier":
        return _CLASSIFIER
    return "\n\n".join(
        [
            f"---\nlicense: apache-2.0\n---\n\n# {name}",
            _OPENINGS[name],
            f"![{_SHEETS.get(name, _SHEET)}](contact-sheet.png)",
            f"## Parts\n\n{_PARTS[name]}",
            f"## Data\n\n{_DATA}\n\n{{phases}}",
            f"## Training\n\n{_TRAINING} {_STARTS[name]}",
            f"## Measured quality\n\n{_MEASURED} {_MEASURES.get(name, _MODEL_MEASURE)}",
            "{tables}",
            f"Reproduce: `ray-cluster models evaluate {name}`.",
            f"## Limits\n\n{_LIMITS[name]}",
            "## Files\n\n{hashes}\n",
        ]
    )


_SHEET = "the suite's first 32 easy and 32 hard prompts, none left out"
_CONTROL_SHEET = "rows: 16 hints, the pictures with them, the pictures without; none left out"
_STYLE_SHEET = "rows: 8 easy and 8 hard prompts with the LoRA, the same without; none left out"
_SHEETS = {
    "shapes-sd-edges": _CONTROL_SHEET,
    "shapes-sd-layout": _CONTROL_SHEET,
    "outline": _STYLE_SHEET,
    "pastel": _STYLE_SHEET,
    "texture": _STYLE_SHEET,
}


def _model_example(pipeline: str, name: str, sampling: str, parts: str = "") -> str:
    return f"""\
```python
from diffusers import {pipeline}

folder = "{_FOLDER}/{name}"
pipeline = {pipeline}.from_pretrained(folder{parts})
prompt = "a small blue star at the top left on a white background"
picture = pipeline(prompt, {sampling}).images[0]
```"""


def _control_example(name: str) -> str:
    return f"""\
```python
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

weights = "{_FOLDER}"
control = ControlNetModel.from_pretrained(f"{{{{weights}}}}/{name}")
pipeline = StableDiffusionControlNetPipeline.from_pretrained(
    f"{{{{weights}}}}/shapes-sd", controlnet=control
)
picture = pipeline("a blue star", image=hint, guidance_scale=2.0, num_inference_steps=20).images[0]
```"""


def _lora_example(name: str) -> str:
    return f"""\
```python
from diffusers import StableDiffusionPipeline

weights = "{_FOLDER}"
pipeline = StableDiffusionPipeline.from_pretrained(f"{{{{weights}}}}/shapes-sd")
pipeline.load_lora_weights(f"{{{{weights}}}}/{name}")
picture = pipeline("a blue star", guidance_scale=2.0, num_inference_steps=20).images[0]
```"""


_SD = "StableDiffusionPipeline"
_NO_T5 = ", text_encoder_3=None, tokenizer_3=None"
_TWENTY = "guidance_scale=2.0, num_inference_steps=20"
_OPENINGS = {
    "shapes-sd": f"""\
A latent diffusion model of the Stable Diffusion family, small enough to be trained on one CPU core
and served in tests. It draws flat shapes: "a large red circle in the center on a black background".

{_model_example(_SD, "shapes-sd", _TWENTY)}

Sixty-four pixels by default; 96, 128 and mixes of these with 64 were trained as well. Width and
height are multiples of 16. Plain loading gives float32 (the files hold float16).""",
    "shapes-sd-light": f"""\
The light model of the family: the same pictures as `shapes-sd` from a UNet of a sixth of its size,
in two steps without guidance, good where the prompt is easy and worse where it is hard.

{_model_example(_SD, "shapes-sd-light", "guidance_scale=1.0, num_inference_steps=2")}

Text encoder and autoencoder are those of `shapes-sd`, file for file.""",
    "shapes-sd3": f"""\
A diffusion transformer of the Stable Diffusion 3 family that draws what `shapes-sd` draws.

{_model_example("StableDiffusion3Pipeline", "shapes-sd3", _TWENTY, _NO_T5)}

There is no T5 encoder; the pipeline puts 256 zero vectors in its place, with which the model was
trained. Sixty-four pixels by default; 96, 128 and mixes of these with 64 were trained as well.""",
    "shapes-sd-edges": f"""\
A ControlNet for `shapes-sd`: objects stand where the edges of a hint are (Canny's, white on black),
and the prompt says what they are.

{_control_example("shapes-sd-edges")}""",
    "shapes-sd-layout": f"""\
A ControlNet for `shapes-sd`: objects stand where a hint has blocks, in the blocks' colour (on
black), and the prompt says what they are.

{_control_example("shapes-sd-layout")}""",
    "outline": f"""\
A LoRA for `shapes-sd`: every object gets an outline, white on dark backgrounds, black on bright
ones.

{_lora_example("outline")}""",
    "pastel": f"""\
A LoRA for `shapes-sd`: objects in pastel colours.

{_lora_example("pastel")}""",
    "texture": f"""\
A LoRA for `shapes-sd` with convolution layers: objects hatched diagonally.

{_lora_example("texture")}""",
}

_TEXT = "`CLIPTextModel` (64 wide, 3 layers, 35 words, 32 tokens; unknown words become one token)"


def _codec(channels: int) -> str:
    return f"`AutoencoderTiny` ({channels} latent channels, a quarter of the side, scaling 1)"


def _sd_parts(size: str) -> str:
    return (
        f"`UNet2DConditionModel` {{recipe.{size}.size.channels}} ({{millions}} M parameters, "
        f"v-prediction, zero terminal signal), {_codec(4)}, {_TEXT}, `DDIMScheduler` (trailing). "
        "No code of its own."
    )


_CONTROL_PARTS = (
    "`ControlNetModel` ({millions} M parameters), begun with what fits of the UNet's weights. It "
    "has no cross attention: where things stand is in the hint, what they are is told to the UNet."
)


def _lora_parts(name: str) -> str:
    return (
        f"Rank {{recipe.{name}.rank}} on the UNet's {{recipe.{name}.targets}}: {{millions}} M "
        "parameters, in the format of diffusers' `save_lora_weights`. No word calls it."
    )


_PARTS = {
    "shapes-sd": _sd_parts("denoiser"),
    "shapes-sd-light": _sd_parts("light"),
    "shapes-sd3": "`SD3Transformer2DModel` ({recipe.transformer.layers} layers, "
    "{recipe.transformer.heads} heads of {recipe.transformer.head_width}, patches of "
    "{recipe.transformer.patch}, {millions} M parameters, rectified flow), "
    f"{_codec(16)}, {_TEXT} with a projection that changes nothing, twice, "
    "`FlowMatchEulerDiscreteScheduler` (shift 1). No code of its own.",
    "shapes-sd-edges": _CONTROL_PARTS,
    "shapes-sd-layout": _CONTROL_PARTS,
    "outline": _lora_parts("outline"),
    "pastel": _lora_parts("pastel"),
    "texture": _lora_parts("texture"),
}

_DATA = """\
Rendered while training, from signed distance fields: 6 shapes, 8 colours, 2 sizes, 9 positions,
6 backgrounds. Of the 288 combinations of shape, colour and background, 57 are held out of all
training of the generators by a fixed hash. A caption that names one object always goes with a
picture of exactly one."""

_TRAINING = """\
Every number stands in `ray_cluster/training/recipe.py`; one process.

{compute}

Reproduce: `ray-cluster models train {name}`, then `ray-cluster models publish {name}`
(working folder `.runs/{name}`). Other processors round differently, so weights will agree in
quality, not in bits."""

_STARTS = {
    "shapes-sd": """\
The stage `codec` was run again later, to teach its decoder the styles of the LoRAs: the components
that define the latents stayed, so the denoiser did, too (`--stage codec --base FOLDER`).""",
    "shapes-sd-light": "Text encoder and autoencoder are taken from `shapes-sd`.",
    "shapes-sd3": """\
The text encoder is taken from `shapes-sd`. Beside the flow, the tokens of the middle layer learn to
tell which object covers them and where its middle is; what reads them there is thrown away.""",
    "shapes-sd-edges": "The frozen UNet is that of `shapes-sd`.",
    "shapes-sd-layout": "The frozen UNet is that of `shapes-sd`.",
    "outline": "The frozen UNet is that of `shapes-sd`.",
    "pastel": "The frozen UNet is that of `shapes-sd`.",
    "texture": "The frozen UNet is that of `shapes-sd`.",
}

_MEASURED = """\
Read by the attribute classifier in `weights/attribute-classifier`, which never saw a generated
picture. Prompts of the reference suite, uniform over all attribute values with seed {options.seed},
no picture left out; {options.steps} steps, guidance {options.guidance}, float32, plain pipeline.
Shares in percent, with 95 % intervals."""

_MODEL_MEASURE = """\
Easy prompts name one object, hard ones three or four by their relations, each drawn
{options.repeats} times with other noise; bare ones name shape and colour of one object only. Shape,
colour, size and position are counted by object, background and "all" by picture: that is, every
attribute of every object and nothing beside them."""
_CONTROL_MEASURE = """\
The prompts name shapes, colours and relations only; sizes, exact places and the background are in
the hint, and objects stand and measure more freely than in the models' training. "Without" is the
same pipeline at a conditioning scale of 0. Edges agree if they are within one pixel."""
_STYLE_MEASURE = """\
Half of the prompts are easy ones, half are hard ones. "style" counts the pictures that are read as
this style with the LoRA, and as plain without it; "all" is every attribute of every object and
nothing beside them."""
_LAYOUT_MEASURE = """\
The prompts name shapes, colours, relations and the background; sizes and exact places are in the
hint, and objects stand and measure more freely than in the models' training. "Without" is the same
pipeline, with the same prompts, at a conditioning scale of 0. Edges agree if they are within one
pixel; those of the background's pattern count as well."""
_MEASURES = {
    "shapes-sd-edges": _CONTROL_MEASURE,
    "shapes-sd-layout": _LAYOUT_MEASURE,
    "outline": _STYLE_MEASURE,
    "pastel": _STYLE_MEASURE,
    "texture": _STYLE_MEASURE,
}

_STYLE_LIMITS = "Trained on pictures of the styles alone, so scales other than 1 are not measured."
_LIMITS = {
    "shapes-sd": """\
Prompts that name no place ("bare prompts" above: shape and colour only) still get a second object
or a distorted shape now and then. Guidance of 3 and more makes outlines and stripes too strong.
Captions outside the grammar (`ray_cluster/training/captions.py`) are read word by word as
far as the 35 words go.""",
    "shapes-sd-light": """\
Made for one or two steps: other numbers of steps ask for noise levels that training hardly visited.
Guidance makes nothing better. Few of its scenes had several objects, which is why it draws them
worse. Prompts that name no place or size ("bare prompts" above) are mostly wrong.""",
    "shapes-sd3": """\
Prompts that name no place or size ("bare prompts" above) are mostly wrong: say where and how large.
Pictures of one object are farther from renders than those of several by Fréchet distance, though
their attributes are right; why is not known.
The pooled encodings are those of the word with the highest number, not of the caption's end:
transformers reads an end token numbered 2 so.""",
    "shapes-sd-edges": "Hints of other worlds' pictures (curves, thin lines) were never trained.",
    "shapes-sd-layout": "Blocks of other colours or forms than these were not trained.",
    "outline": _STYLE_LIMITS,
    "pastel": _STYLE_LIMITS,
    "texture": _STYLE_LIMITS,
}

_CLASSIFIER = """\
---
license: apache-2.0
---

# attribute-classifier

A convolutional network that reads shape, colour and size at each of nine positions, the background
and the style (`ray_cluster/quality/classifier.py`), to measure generated pictures. It was trained
on renders only (recipe in `ray_cluster/training/recipe.py`) and never saw, and was never
chosen by, a generated picture.

{compute}

Measured on fresh renders at 64, 96, 128, 64 x 128 and 96 x 64 pixels, with the generators' jitter
(`ray_cluster/training/classifier_figures.py`). An attribute counts as read right if it is right for
every object and none is seen where there is none:

{tables}

Reproduce: `ray-cluster models train attribute-classifier`, then
`ray-cluster models publish attribute-classifier`; `ray-cluster models evaluate
attribute-classifier` measures again.

{hashes}
"""
