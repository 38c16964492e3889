"""ControlNets: an edge map or a layout of coloured blocks sets where the objects are."""

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import Tensor

from ray_cluster.quality.distances import find_edges
from ray_cluster.quality.render import COLOUR_RGB, Placed, pixel_grid
from ray_cluster.quality.scenes import COLOURS
from recipes.networks.codec import load_basis
from recipes.networks.denoiser import (
    base_unet,
    build_scheduler,
    draw_step,
    draw_timesteps,
    weighted_error,
)
from recipes.networks.text_encoder import encode_captions, trained_text_encoder
from recipes.networks.tokenizer import build_tokenizer
from recipes.recipe import ControlNetRecipe
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed


def edge_map(pixels: Tensor) -> Tensor:
    """Canny's edges of pictures, white on black, [B, 3, H, W] in 0..1."""
    edges = find_edges(pixels)[:, None].to(pixels)
    return edges.expand(-1, 3, -1, -1)


def layout_map(placed: Placed, *, width: int, height: int) -> Tensor:
    """Each object's bounding square in its colour on black, [B, 3, H, W] in 0..1."""
    device = placed.radius.device
    grid = pixel_grid(width, height, device)
    palette = torch.tensor([COLOUR_RGB[name] for name in COLOURS], device=device)
    picture = torch.zeros(len(placed.radius), 3, height, width, device=device)
    for index in range(placed.radius.shape[1]):
        offset = (grid - placed.centre[:, index, None, None, :]).abs().amax(-1)
        inside = (offset < placed.radius[:, index, None, None])[:, None]
        colour = palette[placed.colour[:, index]][:, :, None, None]
        picture = torch.where(inside, colour, picture)
    return picture


def hint_pictures(kind: str, pixels: Tensor, placed: Placed) -> Tensor:
    """The control pictures, of kind "edges" or "layout", of pictures and what is placed in them."""
    if kind == "edges":
        return edge_map(pixels)
    return layout_map(placed, width=pixels.shape[-1], height=pixels.shape[-2])


def build_controlnet(recipe: ControlNetRecipe, unet: UNet2DConditionModel) -> ControlNetModel:
    """Build an untrained ControlNet that begins with what fits of the UNet's weights.

    It has no cross attention: the hint says where things stand, the UNet reads what they are.
    """
    config = unet.config
    control = ControlNetModel(
        in_channels=config.in_channels,
        conditioning_channels=3,
        down_block_types=("DownBlock2D",) * len(config.block_out_channels),
        mid_block_type="UNetMidBlock2D",
        block_out_channels=tuple(config.block_out_channels),
        layers_per_block=config.layers_per_block,
        cross_attention_dim=config.cross_attention_dim,
        attention_head_dim=config.attention_head_dim,
        norm_num_groups=config.norm_num_groups,
        conditioning_embedding_out_channels=recipe.hint_channels,
    )
    mine, theirs = control.state_dict(), unet.state_dict()
    shared = {
        name: theirs[name]
        for name, value in mine.items()
        if name in theirs and theirs[name].shape == value.shape
    }
    control.load_state_dict(shared, strict=False)
    return control


def controlnet_trainer(run: TrainingRun, recipe: ControlNetRecipe) -> Trainer:
    """The stage that trains a ControlNet on the frozen UNet."""
    unet = base_unet(run).to(run.device).requires_grad_(False).eval()
    encoder, basis = trained_text_encoder(run), load_basis(run, run.recipe.codec)
    torch.manual_seed(step_seed(run.recipe.seed, recipe.kind, -1))
    control = build_controlnet(recipe, unet).to(run.device).train()
    tokenizer, scheduler = build_tokenizer(), build_scheduler()

    def loss(index: int) -> Tensor:
        drawn = draw_step(recipe.kind, run, recipe.phase, index, jitter=recipe.jitter)
        pictures = drawn.pictures
        with torch.no_grad():
            hidden = encode_captions(encoder, tokenizer, drawn.captions)
            clean = basis.encode(pictures.pixels)
            hints = hint_pictures(recipe.kind, pictures.pixels, pictures.placed)
        noise = run.draw_noise(clean.shape, drawn.generator)
        steps = draw_timesteps(len(clean), recipe.phase, drawn.generator).to(run.device)
        noisy = scheduler.add_noise(clean, noise, steps)
        down, middle = control(noisy, steps, hidden, hints, return_dict=False)
        predicted: Tensor = unet(
            noisy,
            steps,
            encoder_hidden_states=hidden,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        ).sample
        target = scheduler.get_velocity(clean, noise, steps)
        # the hint shows every place
        known = torch.ones_like(drawn.is_stated)
        return weighted_error(predicted, target, pictures.placed, known, recipe.phase)

    return Trainer(recipe.kind, control, loss, recipe.phase.optimisation)
