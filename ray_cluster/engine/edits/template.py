"""The template of an edit, as the steps need it: clean latents, their noise, and the mask.

What a mask spares follows the template's own path: after every step it is the clean latents with
the noise of that level (as diffusers' inpaint pipelines do). Its noise belongs to the template, so
that two edits of one image spare the same latents; the noise within the mask is the request's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.engine.schedules.sampler_schedules import SamplerTable
from ray_cluster.requests import Edit

# hexadecimal digits of a digest that seed a generator: it takes 63 bits
_SEED_DIGITS = 15


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What the autoencoder makes of an edit's image.

    Attributes:
        latents: ``[C, h, w]`` float32, of the whole image.
        mask: ``[1, h, w]`` bool, the latent pixels of which any image pixel is edited; None for
            all.
        conditions: ``[M + C, h, w]``, what an inpainting model sees beside the latents: the mask,
            and the latents of the image with grey in place of what is edited; None for others.
            FLUX.1 Fill's mask has a channel for each image pixel of a latent one, others' have one.
    """

    latents: Tensor
    mask: Tensor | None = None
    conditions: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return those that are there."""
        all_of_them = (self.latents, self.mask, self.conditions)
        return [tensor for tensor in all_of_them if tensor is not None]


@dataclass(frozen=True, slots=True)
class SentLatents:
    """What the autoencoder makes of the images that a request is made from.

    Attributes:
        edit: None for no edit.
        references: ``[C, h, w]`` float32 each.
    """

    edit: EncodedImage | None = None
    references: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [*(() if self.edit is None else self.edit.tensors()), *self.references]


@dataclass(frozen=True, slots=True)
class Template:
    """A template in a request's state; fixed for the whole run.

    Attributes:
        latents: ``[C, h, w]`` float32, clean.
        noise: ``[C, h, w]`` float32: the template's own outside the mask, the request's within.
        mask: see :class:`EncodedImage`.
        conditions: likewise.
    """

    latents: Tensor
    noise: Tensor
    mask: Tensor | None = None
    conditions: Tensor | None = None

    @classmethod
    def of(cls, edit: Edit, image: EncodedImage, noise: Tensor) -> Template:
        """Return the template of an edit.

        Args:
            noise: ``[C, h, w]`` on the CPU, drawn from the request's seed.
        """
        device = image.latents.device
        if image.mask is not None:
            noise = torch.where(image.mask.cpu(), noise, own_noise(edit, noise.shape))
        return cls(image.latents, noise.to(device), image.mask, image.conditions)

    @property
    def is_blended(self) -> bool:
        """Whether every step puts back what the mask spares; inpainting models see it instead."""
        return self.mask is not None and self.conditions is None

    def start(self, table: SamplerTable, strength: float) -> Tensor:
        """Return the latents before the first step.

        A masked edit of full strength starts from noise alone, as a text-to-image request does.
        """
        if strength == 1.0 and self.mask is not None:
            return self.noise * table.init_noise_sigma
        return self.at(table.levels[0])

    def at(self, level: tuple[float, float]) -> Tensor:
        """Return the template's latents at a level of noise, ``[C, h, w]``."""
        clean, noise = level
        return clean * self.latents + noise * self.noise

    def blended(self, latents: Tensor, level: tuple[float, float]) -> Tensor:
        """Return latents ``[C, h, w]`` in which what the mask spares is the template's."""
        assert self.mask is not None, "without a mask there is nothing to spare"
        return torch.where(self.mask, latents, self.at(level))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by field name."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


def own_noise(edit: Edit, shape: torch.Size) -> Tensor:
    """Return the noise of an edit's template, on the CPU: the same in all edits of that image."""
    seed = int(edit.image.sha256[:_SEED_DIGITS], 16)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((1, *shape), generator=generator)[0]


def latent_mask(mask: npt.NDArray[np.bool_], factor: int) -> Tensor:
    """Return a mask ``[h, w]`` at the latents' grid, ``[1, h / factor, w / factor]`` bool.

    A latent pixel of which any image pixel is edited is edited: thin masks are not lost.
    """
    pooled = F.max_pool2d(torch.from_numpy(mask)[None].float(), factor)
    return pooled > 0


def pixel_mask(mask: npt.NDArray[np.bool_], factor: int) -> Tensor:
    """Return a mask ``[h, w]`` as channels at the latents' grid, ``[factor**2, h', w']`` bool."""
    return F.pixel_unshuffle(torch.from_numpy(mask)[None], factor)
