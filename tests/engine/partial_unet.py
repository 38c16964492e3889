"""A partial step in diffusers' own UNet: hooks put what was kept in the place of what is fresh.

The whole image goes through all layers. Before whatever looks beyond a pixel, the pixels that are
not in an active patch are made to seem what they were in an earlier call, and so is what comes out
of the middle of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ray_cluster.engine.step.state import Conditioning
from tests.engine.reference import Reference
from tests.engine.two_steps import SCALE, StepRow, timestep_of

Control = Literal["none", "nothing kept", "norms of active pixels"]


class PartialUNet:
    """One model row of a request in two calls.

    Args:
        row: its ``cut`` counts skip connections from the outside.
        control: what is done wrong on purpose.
    """

    def __init__(self, reference: Reference, row: StepRow, control: Control) -> None:
        self._unet: Any = reference.pipeline.unet
        self._row, self._control = row, control
        self._kept: dict[Any, Tensor] = {}

    def predict(self, step: int, inputs: dict[str, Any]) -> Tensor:
        self._is_first = step == 0
        with self._hooked(), torch.inference_mode():
            time = torch.tensor(timestep_of(step))
            found: Tensor = self._unet(self._row.latents[step][None], time, **inputs).sample[0]
            return found

    def _mask(self, num_pixels: int) -> Tensor:
        """Which pixels of the level that has so many are in an active patch, ``[h, w]``."""
        active = self._row.active
        assert active is not None
        _, height, width = self._row.latents[0].shape
        patches = torch.tensor(active.is_active).view(-1, -(-width // active.patch_size))
        shrink = 1
        while -(-height // shrink) * -(-width // shrink) != num_pixels:
            shrink *= 2
        down, across = (
            torch.arange(-(-side // shrink)) * shrink // active.patch_size
            for side in (height, width)
        )
        return patches[down[:, None], across]

    def _mixed(self, key: Any, fresh: Tensor, *, is_sequence: bool = False) -> Tensor:
        """Return ``[1, C, h, w]``, or ``[1, h * w, C]``, as it is to be seen."""
        if self._is_first:
            self._kept[key] = fresh.clone()
            return fresh
        if self._control == "nothing kept":
            return fresh
        if is_sequence:
            mask = self._mask(fresh.shape[1]).flatten()[:, None]
        else:
            mask = self._mask(fresh.shape[2] * fresh.shape[3])
        return torch.where(mask, fresh, self._kept[key])

    def _before(self, layer: Any, inputs: Any) -> Any:
        return (self._mixed(layer, inputs[0]), *inputs[1:])

    def _after(self, layer: Any, _inputs: Any, output: Tensor) -> Tensor:
        return self._mixed(layer, output, is_sequence=True)

    def _normed(self, norm: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return the control's norm: by the mean and variance of active pixels alone."""
        if self._is_first or self._control != "norms of active pixels":
            return output
        [images] = inputs
        mask = self._mask(images.shape[2] * images.shape[3])
        groups = images.unflatten(1, (norm.num_groups, -1))
        some = groups[..., mask].flatten(2)
        shape = (1, -1, 1, 1, 1)
        mean, variance = some.mean(2).view(shape), some.var(2, unbiased=False).view(shape)
        normed = ((groups - mean) / (variance + norm.eps).sqrt()).flatten(1, 2)
        own: Tensor = normed * norm.weight[:, None, None] + norm.bias[:, None, None]
        return own

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        inside, last, num_channels = self._parts()
        handles = []
        for part in inside:
            for name, layer in part.named_modules():
                end = name.rpartition(".")[2]
                is_norm = isinstance(layer, torch.nn.GroupNorm)
                if is_norm or type(layer).__name__ in ("Downsample2D", "Upsample2D"):
                    handles.append(layer.register_forward_pre_hook(self._before))
                if is_norm:
                    handles.append(layer.register_forward_hook(self._normed))
                if end in ("to_k", "to_v") and ".attn1." in name:
                    handles.append(layer.register_forward_hook(self._after))

        def restored(_resnet: Any, inputs: Any) -> Any:
            made, skip = inputs[0].split([inputs[0].shape[1] - num_channels, num_channels], dim=1)
            return (torch.cat([self._mixed("made", made), skip], dim=1), *inputs[1:])

        handles.append(last.register_forward_pre_hook(restored))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _parts(self) -> tuple[list[Any], Any, int]:
        """Find what is within the cut, the first resnet behind it, and its skip's channels."""
        unet, cut = self._unet, self._row.cut
        inwards, channels = [], [unet.conv_in.out_channels]
        for block in unet.down_blocks:
            for some in _pairs(block):
                inwards.append(some)
                channels.append(some[0].out_channels)
            for one in block.downsamplers or ():
                inwards.append([one])
                channels.append(one.out_channels)
        outwards = []
        for block in unet.up_blocks:
            pairs = _pairs(block)
            pairs[-1] += list(block.upsamplers or ())
            outwards += pairs
        outwards.reverse()
        assert cut is not None
        inside = [*inwards[cut - 1 :], [unet.mid_block], *outwards[cut:]]
        return [part for some in inside for part in some], outwards[cut - 1][0], channels[cut - 1]


def _pairs(block: Any) -> list[list[Any]]:
    attentions = getattr(block, "attentions", None) or []
    pairs = [[resnet] for resnet in block.resnets]
    for pair, attention in zip(pairs, attentions, strict=False):
        pair.append(attention)
    return pairs


def expected_of_unet(
    reference: Reference, row: StepRow, owned: Conditioning, control: Control = "none"
) -> Tensor:
    """What a partial step predicts for a request, ``[C, h, w]``, guided."""
    found = []
    pairs: list[Any] = [(owned.prompt_embeds, owned.pooled_embeds)]
    if owned.is_guided:
        pairs.append((owned.negative_embeds, owned.negative_pooled_embeds))
    for embeds, pooled in pairs:
        inputs: dict[str, Any] = {"encoder_hidden_states": embeds[None]}
        if pooled is not None:
            assert owned.time_ids is not None
            added = {"text_embeds": pooled[None], "time_ids": owned.time_ids[None]}
            inputs["added_cond_kwargs"] = added
        one = PartialUNet(reference, row, control)
        one.predict(0, inputs)
        found.append(one.predict(1, inputs))
    if not owned.is_guided:
        return found[0]
    return found[1] + SCALE * (found[0] - found[1])
