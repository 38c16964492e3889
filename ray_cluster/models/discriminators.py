"""The networks of the built-in discriminators, and their folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from ray_cluster.errors import ConfigError
from ray_cluster.models.json_files import INCOMPLETE, head_of, read_object
from ray_cluster.models.picture_reader import NUM_POSITIONS, PictureReader
from ray_cluster.models.weight_files import header_shapes

WEIGHTS_FILE = "model.safetensors"
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TEXT_CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# what a prompt is read for: each position, an object that it does not place, and the background
NUM_SLOTS = NUM_POSITIONS + 2


class PromptReader(nn.Module):
    """Reads what a prompt asks for at each position, of an object without one, and behind them."""

    def __init__(self, encoder: CLIPTextModel, heads: int) -> None:
        super().__init__()
        self.encoder = encoder
        width = int(encoder.config.hidden_size)
        self.queries = nn.Parameter(torch.randn(NUM_SLOTS, width) * 0.5)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())

    def read(self, hidden: Tensor) -> Tensor:
        """Return what is asked for, [B, 11, 2 width], of encoded prompts [B, tokens, width]."""
        queries = self.queries.expand(hidden.shape[0], -1, -1)
        found: Tensor = self.mix(
            queries + self.attention(queries, hidden, hidden, need_weights=False)[0]
        )
        return found


class PromptDiscriminator(nn.Module):
    """Compares what pictures show with what their prompts ask for.

    A picture is right if it is right at each of the nine positions and as a whole, so its odds of
    being wrong are about the sum of theirs.
    """

    def __init__(self, picture: PictureReader, prompt: PromptReader, width: int) -> None:
        super().__init__()
        self.picture = picture
        self.prompt = prompt
        seen = picture.channels
        asked = int(prompt.encoder.config.hidden_size) * 2
        self.seen = nn.Linear(2 * seen, width)
        self.asked = nn.Linear(2 * asked, width)
        self.compare = _mlp(4 * width, width)
        self.at_position = nn.Linear(width, 1)
        self.seen_behind = nn.Linear(seen, width)
        self.asked_behind = nn.Linear(2 * asked, width)
        self.compare_whole = nn.Sequential(_mlp(6 * width, width), nn.Linear(width, 1))

    def parts(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the scores of the parts [B, 10], and what they rest on.

        That is what is seen at positions [B, 9, .] and as a whole [B, .], and what is asked for
        [B, 11, .].

        Args:
            pixels: [B, 3, H, W] in 0..1.
            ids: [B, tokens].
        """
        places, whole = self.picture.describe(pixels)
        asked = self.prompt.read(self.prompt.encoder(ids).last_hidden_state)
        unplaced, behind = asked[:, NUM_POSITIONS], asked[:, NUM_POSITIONS + 1]
        wanted = [asked[:, :NUM_POSITIONS], unplaced[:, None].expand(-1, NUM_POSITIONS, -1)]
        at_place = self.compare(_pairs(self.seen(places), self.asked(torch.cat(wanted, 2))))
        overall = _pairs(
            self.seen_behind(whole), self.asked_behind(torch.cat([unplaced, behind], 1))
        )
        pooled = torch.cat([at_place.mean(1), at_place.amax(1), overall], 1)
        scores = torch.cat([self.at_position(at_place)[..., 0], self.compare_whole(pooled)], 1)
        return scores, places, whole, asked

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Return scores [B], the higher the better; arguments as of :meth:`parts`."""
        return joint_score(self.parts(pixels, ids)[0])


class PictureDiscriminator(nn.Module):
    """Tells rendered pictures from generated ones, whatever the prompt."""

    def __init__(self, picture: PictureReader) -> None:
        super().__init__()
        self.picture = picture
        seen = picture.channels
        self.at_position = nn.Sequential(_mlp(2 * seen, seen), nn.Linear(seen, 1))
        self.whole = nn.Linear(seen, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores [B] of pictures [B, 3, H, W] in 0..1, the higher the more like renders."""
        places, whole = self.picture.describe(pixels)
        return joint_score(torch.cat([self.at_position(places)[..., 0], self.whole(whole)], 1))


def joint_score(parts: Tensor) -> Tensor:
    """Return the scores [B] of wholes that are right where all their parts [B, N] are."""
    return -torch.logsumexp(-parts, 1)


def _mlp(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def _pairs(one: Tensor, other: Tensor) -> Tensor:
    return torch.cat([one, other, one * other, (one - other).abs()], -1)


class PromptIds:
    """Turns prompts into ids as the pipelines do: cut and padded to a fixed length."""

    def __init__(self, tokenizer: Tokenizer, length: int, pad: int) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length, pad_id=pad)

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """Return [B, length]."""
        return torch.tensor([one.ids for one in self._tokenizer.encode_batch(list(prompts))])

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))


Discriminator = PromptDiscriminator | PictureDiscriminator


class LoadedDiscriminator:
    """A discriminator on its device, and what reads its prompts, if it takes them."""

    def __init__(self, model: Discriminator, prompt_ids: PromptIds | None) -> None:
        self.model = model
        self._prompt_ids = prompt_ids

    @torch.inference_mode()
    def scores(self, prompts: Sequence[str], pixels: Tensor) -> Tensor:
        """Return scores [B] of pictures [B, 3, H, W] in 0..1 with a prompt each."""
        found: Tensor
        if self._prompt_ids is None:
            found = self.model(pixels)
        else:
            found = self.model(pixels, self._prompt_ids(prompts).to(pixels.device))
        return found


def save_discriminator(
    model: Discriminator, folder: Path, prompt_ids: PromptIds | None = None
) -> None:
    """Write a discriminator in float16; what only its training needs is left out.

    Args:
        prompt_ids: of the prompts, if it takes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"channels": model.picture.channels}
    if isinstance(model, PromptDiscriminator):
        text = model.prompt.encoder.config
        config["width"] = model.seen.out_features
        config["heads"] = model.prompt.attention.num_heads
        config["text"] = {name: getattr(text, name) for name in _TEXT_CONFIG}
    wanted = _build(config).state_dict().keys()
    state = {name: one.half().contiguous() for name, one in model.state_dict().items()}
    save_file({name: one for name, one in state.items() if name in wanted}, folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).chmod(0o644)
    (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    if prompt_ids is not None:
        prompt_ids.save(folder / _TOKENIZER)


def load_discriminator(folder: Path, device: torch.device) -> LoadedDiscriminator:
    """Return a discriminator in float32, ready to score.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    config = read_object(folder / _CONFIG)
    stored = header_shapes(folder / WEIGHTS_FILE)
    try:
        model = _build(config)
        length, pad = (
            (config["text"]["max_position_embeddings"], config["text"]["pad_token_id"])
            if "text" in config
            else (0, 0)
        )
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / _CONFIG} is not a built-in discriminator's ({error!r}); download it again"
        ) from error
    wanted = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    if unsuited := sorted(name for name, shape in wanted.items() if stored.get(name) != shape):
        raise ConfigError(
            f"{folder / WEIGHTS_FILE} lacks {unsuited[0]}, or has it in another shape: {INCOMPLETE}"
        )
    tensors = load_file(folder / WEIGHTS_FILE)
    model.load_state_dict({name: tensors[name].float() for name in wanted})
    model.requires_grad_(False).eval().to(device)
    if isinstance(model, PictureDiscriminator):
        return LoadedDiscriminator(model, None)
    head_of(folder / _TOKENIZER)
    try:
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    # the library raises Exception itself
    except Exception as error:
        raise ConfigError(
            f"{folder / _TOKENIZER} cannot be loaded ({error}): {INCOMPLETE}"
        ) from error
    return LoadedDiscriminator(model, PromptIds(tokenizer, length, pad))


def _build(config: dict[str, Any]) -> Discriminator:
    picture = PictureReader(int(config["channels"]))
    if "text" not in config:
        return PictureDiscriminator(picture)
    encoder = CLIPTextModel(CLIPTextConfig(**config["text"]))
    prompt = PromptReader(encoder, int(config["heads"]))
    return PromptDiscriminator(picture, prompt, int(config["width"]))
