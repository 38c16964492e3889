"""The text encoder: a small CLIP text model, trained alone on reading the grammar's captions."""

import random
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from ray_cluster.models.discriminators import PromptReader
from ray_cluster.quality.scenes import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, SIZES, Scene
from recipes.batches import draw_captioned
from recipes.networks.tokenizer import (
    END,
    MAX_TOKENS,
    PAD,
    START,
    build_tokenizer,
    tokenise,
    vocabulary,
)
from recipes.recipe import TextRecipe
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed

# one slot per position, one for an object that the caption does not place
_SLOTS = len(POSITIONS) + 1
_ABSENT = 0


def build_text_encoder(recipe: TextRecipe) -> CLIPTextModel:
    """Build the untrained text encoder."""
    words = vocabulary()
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=recipe.width,
            intermediate_size=4 * recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            max_position_embeddings=MAX_TOKENS,
            projection_dim=recipe.width,
            bos_token_id=words[START],
            eos_token_id=words[END],
            pad_token_id=words[PAD],
        )
    )


def encode_captions(
    encoder: CLIPTextModel, tokenizer: PreTrainedTokenizerFast, captions: Sequence[str]
) -> Tensor:
    """Encode captions as the pipelines do: [B, 32, width], padded, without attention mask."""
    ids = tokenise(tokenizer, captions).to(encoder.device)
    return cast(Tensor, encoder(ids).last_hidden_state)


class SceneReader(PromptReader):
    """Reads what a caption states from its encoding; used in training only."""

    def __init__(self, encoder: CLIPTextModel, heads: int) -> None:
        super().__init__(encoder, heads)
        width = int(encoder.config.hidden_size)
        # absent first; sizes have "open" as well
        self.shape = nn.Linear(2 * width, 1 + len(SHAPES))
        self.colour = nn.Linear(2 * width, 1 + len(COLOURS))
        self.size = nn.Linear(2 * width, 2 + len(SIZES))
        self.background = nn.Linear(2 * width, 1 + len(BACKGROUNDS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits of shape, colour and size per slot [B, 10, .], and of the background [B, 7]."""
        return self.stated(self.read(hidden))

    def stated(self, read: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits as of `forward`, of what was read."""
        slots = read[:, :_SLOTS]
        return self.shape(slots), self.colour(slots), self.size(slots), self.background(read[:, -1])


def reading_loss(logits: Sequence[Tensor], stated: Sequence[Scene]) -> Tensor:
    """Cross-entropy of a `SceneReader`'s logits with what captions state, a scene each."""
    parts = [
        F.cross_entropy(a.flatten(0, -2), b.flatten().to(a.device))
        for a, b in zip(logits, _read_targets(stated), strict=True)
    ]
    return torch.stack(parts).sum()


def _read_targets(stated: Sequence[Scene]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Class indices that `SceneReader` is trained on: three of [B, 10] and one of [B]."""
    shape, colour, size = (torch.full((len(stated), _SLOTS), _ABSENT) for _ in range(3))
    background = torch.full((len(stated),), _ABSENT)
    for row, scene in enumerate(stated):
        if scene.background is not None:
            background[row] = 1 + BACKGROUNDS.index(scene.background)
        for thing in scene.objects:
            slot = _SLOTS - 1 if thing.position is None else POSITIONS.index(thing.position)
            shape[row, slot] = 1 + SHAPES.index(thing.shape)
            colour[row, slot] = 1 + COLOURS.index(thing.colour)
            size[row, slot] = 1 if thing.size is None else 2 + SIZES.index(thing.size)
    return shape, colour, size, background


def text_trainer(run: TrainingRun) -> Trainer:
    """The stage that trains the text encoder; the trainer's model is a `SceneReader`."""
    recipe = run.recipe
    torch.manual_seed(step_seed(recipe.seed, "text", -1))
    reader = SceneReader(build_text_encoder(recipe.text), recipe.text.heads).to(run.device)
    tokenizer = build_tokenizer()

    def loss(index: int) -> Tensor:
        rng = random.Random(step_seed(recipe.seed, "text", index))
        options = recipe.text
        drawn = [draw_captioned(rng, options.captions) for _ in range(options.optimisation.batch)]
        hidden = encode_captions(reader.encoder, tokenizer, [one.caption for one in drawn])
        return reading_loss(reader(hidden), [one.stated for one in drawn])

    return Trainer("text", reader, loss, recipe.text.optimisation)


def trained_text_encoder(run: TrainingRun) -> CLIPTextModel:
    """The run's text encoder or else its base's, frozen.

    Raises:
        FileNotFoundError: its stage has not been run, and there is no base.
    """
    trainer = text_trainer(run)
    if run.folder.restore(trainer):
        encoder = cast(SceneReader, trainer.model).encoder
    elif run.base is not None:
        encoder = CLIPTextModel.from_pretrained(run.base / "text_encoder", dtype=torch.float32)
    else:
        raise FileNotFoundError(
            f"no text encoder in {run.folder.path}; train the stage 'text' first"
        )
    return encoder.to(run.device).requires_grad_(False).eval()
