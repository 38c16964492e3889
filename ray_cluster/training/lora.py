"""LoRAs: low-rank changes of the UNet that paint the same scenes in another style."""

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor
from transformers import CLIPTextModel

from ray_cluster.training.codec import PatchBasis
from ray_cluster.training.denoiser import unet_trainer
from ray_cluster.training.recipe import LoraRecipe
from ray_cluster.training.runs import TrainingRun
from ray_cluster.training.trainer import Trainer, step_seed


def lora_trainer(
    run: TrainingRun,
    recipe: LoraRecipe,
    *,
    unet: UNet2DConditionModel,
    basis: PatchBasis,
    encoder: CLIPTextModel,
) -> Trainer:
    """The stage that trains one style's LoRA; the UNet's own weights stay as they are."""
    torch.manual_seed(step_seed(run.recipe.seed, recipe.style, -1))
    unet.requires_grad_(False)
    unet.add_adapter(
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.rank,
            init_lora_weights="gaussian",
            target_modules=list(recipe.targets),
        )
    )
    return unet_trainer(
        recipe.style,
        run,
        recipe.phase,
        unet=unet,
        basis=basis,
        encoder=encoder,
        style=recipe.style,
    )


def lora_weights(unet: UNet2DConditionModel) -> dict[str, Tensor]:
    """The LoRA's weights in the names that diffusers' `save_lora_weights` takes."""
    return dict(get_peft_model_state_dict(unet))
