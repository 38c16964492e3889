"""Writes the model card of the exported folder, with its measured quality and file hashes."""

import hashlib
import json
from pathlib import Path

from ray_cluster.quality.measure import ClassifierFigures
from ray_cluster.reference_models.evaluate import ATTRIBUTES, Evaluation
from ray_cluster.reference_models.export import SHAPES_SD
from ray_cluster.reference_models.recipe import DenoiserRecipe, Recipe, SizeBucket
from ray_cluster.reference_models.trainer import RunFolder

CARD = "README.md"
_HASHED = (".json", ".safetensors")
_STAGES = ("text", "codec", "denoiser", "refinement", "classifier")


def folder_hashes(folder: Path = SHAPES_SD) -> dict[str, str]:
    """SHA-256 of every configuration and weight file, by path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _HASHED)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def card_hashes(folder: Path = SHAPES_SD) -> dict[str, str]:
    """Read back the hashes that the card states."""
    text = (folder / CARD).read_text(encoding="utf-8")
    table = text.partition("| file | SHA-256 |")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| `")]
    return {name.strip("`"): digest.strip("`") for name, digest in rows}


def cpu_seconds(run: Path, stage: str) -> float:
    """Add up a stage's CPU time from its log, whose clock starts anew with every process."""
    total, last = 0.0, 0.0
    for line in (run / f"{stage}.jsonl").read_text(encoding="utf-8").splitlines():
        clock = float(json.loads(line)["cpu_seconds"])
        total += clock - last if clock >= last else clock
        last = clock
    return total


def mean_batch(buckets: tuple[SizeBucket, ...]) -> float:
    """Pictures per step, averaged over the buckets' shares."""
    return sum(b.batch * b.share for b in buckets) / sum(b.share for b in buckets)


def write_card(
    run: Path,
    evaluation: Evaluation,
    folder: Path = SHAPES_SD,
    recipe: Recipe | None = None,
) -> Path:
    """Write the card beside the weights and return its path."""
    recipe = recipe or Recipe()
    card = _CARD.format(
        seed=recipe.seed,
        compute=_compute_table(RunFolder(run), recipe),
        quality=_quality_table(evaluation),
        options=evaluation.options,
        channels=recipe.denoiser.channels,
        phases=_phase_table(recipe.denoiser),
        hashes=_hash_table(folder),
    )
    path = folder / CARD
    path.write_text(card, encoding="utf-8")
    return path


def write_classifier_card(
    run: Path, figures: ClassifierFigures, file: Path, recipe: Recipe | None = None
) -> Path:
    """Write the attribute classifier's card beside its file and return the card's path."""
    recipe, folder = recipe or Recipe(), RunFolder(run)
    steps = folder.index("classifier")
    card = _CLASSIFIER_CARD.format(
        seed=recipe.seed,
        steps=steps,
        pictures=steps * mean_batch(recipe.classifier.buckets) / 1000,
        minutes=cpu_seconds(run, "classifier") / 60,
        right=_percent_table("attribute | read right", figures.right),
        confident=_percent_table("pictures of | a shape is stated", figures.confident),
        hashes=_hash_table(file.parent),
    )
    path = file.parent / CARD
    path.write_text(card, encoding="utf-8")
    return path


def _percent_table(head: str, shares: dict[str, float]) -> str:
    rows = [f"| {name} | {share:.2%} |" for name, share in shares.items()]
    return "\n".join([f"| {head} |", "|---|---|", *rows])


def _other_share(buckets: tuple[SizeBucket, ...]) -> float:
    other = sum(b.batch * b.share for b in buckets if (b.width, b.height) != (64, 64))
    return other / sum(b.batch * b.share for b in buckets)


def _phase_table(recipe: DenoiserRecipe) -> str:
    phases = (recipe.first, recipe.second)
    mixes = [phase.captions for phase in phases]
    shares = {
        "scenes of one object, the rest two to four": [mix.single_share for mix in mixes],
        'captions without any detail, like "a red circle"': [mix.bare_share for mix in mixes],
        "other captions that may leave out details": [mix.omit_share for mix in mixes],
        "empty captions": [phase.caption_drop for phase in phases],
        "pictures that are not 64 x 64": [_other_share(phase.buckets) for phase in phases],
    }
    rows = [f"| {name} | {first:.0%} | {second:.0%} |" for name, (first, second) in shares.items()]
    return "\n".join(["| share of | denoiser | refinement |", "|---|---|---|", *rows])


def _compute_table(folder: RunFolder, recipe: Recipe) -> str:
    batches = {
        "text": float(recipe.text.optimisation.batch),
        "codec": mean_batch(recipe.codec.buckets),
        "denoiser": mean_batch(recipe.denoiser.first.buckets),
        "refinement": mean_batch(recipe.denoiser.second.buckets),
        "classifier": mean_batch(recipe.classifier.buckets),
    }
    rows = ["| stage | steps | examples | CPU minutes |", "|---|---|---|---|"]
    for stage in _STAGES:
        steps, minutes = folder.index(stage), cpu_seconds(folder.path, stage) / 60
        rows.append(
            f"| {stage} | {steps} | {steps * batches[stage] / 1000:.0f} k | {minutes:.0f} |"
        )
    return "\n".join(rows)


def _quality_table(evaluation: Evaluation) -> str:
    columns = (*ATTRIBUTES, "all five")
    rows = [f"| pictures | n | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for group, shares in evaluation.groups.items():
        values = " | ".join(str(shares[name]) for name in columns)
        rows.append(f"| {group} | {shares['shape'].total} | {values} |")
    return "\n".join(rows)


def _hash_table(folder: Path) -> str:
    rows = [f"| `{name}` | `{digest}` |" for name, digest in folder_hashes(folder).items()]
    return "\n".join(["| file | SHA-256 |", "|---|---|", *rows])


_CARD = """\
---
license: apache-2.0
---

# shapes-sd

A latent diffusion model of the Stable Diffusion family, small enough to be trained on one CPU core
and served in tests. It draws flat shapes: "a large red circle in the center on a black background".

```python
from diffusers import StableDiffusionPipeline

folder = "ray_cluster/reference_models/weights/shapes-sd"
pipeline = StableDiffusionPipeline.from_pretrained(folder)
prompt = "a small blue star at the top left on a white background"
picture = pipeline(prompt, guidance_scale=2.0, num_inference_steps=20).images[0]
```

Sixty-four pixels by default; 96, 128 and mixes of these with 64 were trained as well. Width and
height are multiples of 16. Plain loading gives float32 (the files hold float16).

![64 pictures, the first prompts of the evaluation, none left out](contact-sheet.png)

## Parts

`UNet2DConditionModel` {channels} (4.1 M parameters, v-prediction, zero terminal signal),
`AutoencoderTiny` (4 latent channels, a quarter of the side, scaling 1), `CLIPTextModel` (64 wide,
3 layers, 35 words, 32 tokens; unknown words become one token), `DDIMScheduler` (trailing). No code
of its own.

## Data

Rendered while training, from signed distance fields: 6 shapes, 8 colours, 2 sizes, 9 positions,
6 backgrounds. Of the 288 combinations of shape, colour and background, 57 are held out of all
training of the generator by a fixed hash. The denoiser is trained in two phases, `denoiser` and
`refinement`; a caption that names one object always goes with a picture of exactly one.

{phases}

## Training

Seed {seed}; every number stands in `ray_cluster/reference_models/recipe.py`. One thread, CPU only.

{compute}

Reproduce: `ray-cluster models train shapes-sd`, then `ray-cluster models publish shapes-sd`
(working folder `.runs/shapes-sd`).
Other processors round differently, so weights will agree in quality, not in bits.

## Measured quality

Read by the attribute classifier in `weights/attribute-classifier`, which never saw a generated
picture. Prompts uniform over all attribute values with seed {options.seed}, no picture left out,
DDIM {options.steps} steps, guidance {options.guidance}, float32, plain pipeline. Shares in percent,
with 95 % intervals.

{quality}

Reproduce: `ray-cluster models evaluate shapes-sd`.

## Limits

Prompts that name no place ("bare prompts" above: shape and colour only) still get a second object
or a distorted shape now and then, more often at 128 x 128 than at 64 x 64. Guidance of 3 and more
makes outlines and stripes too strong. Two to four objects were one scene in seven and are not
measured here. Captions outside the grammar (`ray_cluster/reference_models/captions.py`) are read
word by word as far as the 35 words go.

## Files

{hashes}
"""

_CLASSIFIER_CARD = """\
# attribute-classifier

A convolutional network that reads shape, colour, size, position and background of a picture with
one object (`ray_cluster/quality/classifier.py`), to measure generated pictures. It was trained on
renders only (seed {seed}, {steps} steps, {pictures:.0f} k pictures, {minutes:.0f} CPU minutes,
recipe in `ray_cluster/reference_models/recipe.py`) and never saw, and was never chosen by, a
generated picture. The position is the nearest of the nine to the place found.

Measured on fresh renders at 64, 96, 128, 64 x 128 and 96 x 64 pixels, with the generator's jitter
(`ray_cluster/quality/measure.py`):

{right}

{confident}

Two equal objects that coincide blend into one, so a few blends do show a shape.

{hashes}
"""
