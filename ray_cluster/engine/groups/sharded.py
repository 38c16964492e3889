"""A diffusion transformer whose tokens lie on several ranks (Ulysses).

Each rank has a part of the image's tokens and of the prompt's. Attention alone looks at others':
for it, ranks exchange tokens for heads, so that each has all tokens of some heads (Jacobs et al.
2023, DeepSpeed Ulysses). All else is each token's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_cluster.engine.batch.spans import Spans, spans_of
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.dit.attention import Attend, AttentionKind, start_attention
from ray_cluster.engine.dit.executor import DiTExecutor, PreparedPrompt
from ray_cluster.engine.dit.packing import Packing, Parted, Streams, packing_of, shard_of
from ray_cluster.engine.dit.parts import Conditions, TokenDeltas
from ray_cluster.engine.dit.rotary import Rotary
from ray_cluster.engine.groups.rank_sets import RankSets
from ray_cluster.engine.groups.ranks import GuidanceRows
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.model_rows import guide
from ray_cluster.engine.step.rings import Rings
from ray_cluster.errors import ModelUnsupported

# sizes and places whose positions are kept
_KEPT_POSITIONS = 64
# torch 2.13 has another name for it
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cuts(length: int, num_parts: int) -> list[slice]:
    """Cut a sequence into parts that differ by one at most.

    Raises:
        ValueError: some part would be empty.
    """
    if length < num_parts:
        raise ValueError(f"{length} tokens cannot be on {num_parts} ranks; take a smaller degree")
    counts = [(length + part) // num_parts for part in range(num_parts)]
    return [slice(*pair) for pair in pairwise(accumulate(counts, initial=0))]


@dataclass(frozen=True, slots=True)
class Shards:
    """How the tokens of equally large model rows lie on the ranks of a set.

    Attributes:
        whole: all of them.
        index: of this rank in the set.
        images: by rank, which of an image's tokens it has.
        prompts: likewise of a prompt's.
        packings: by rank.
    """

    whole: Packing
    index: int
    images: Sequence[slice]
    prompts: Sequence[slice]
    packings: Sequence[Packing]

    @classmethod
    def of(cls, whole: Packing, num_ranks: int, index: int) -> Shards:
        """Cut the tokens of images and prompts, each for itself."""
        images = cuts(whole.image[0].length, num_ranks)
        prompts = cuts(whole.num_prompt, num_ranks)
        packings = [
            shard_of(whole, image.stop - image.start, prompt.stop - prompt.start)
            for image, prompt in zip(images, prompts, strict=True)
        ]
        return cls(whole, index, images, prompts, packings)

    @property
    def num_rows(self) -> int:
        """Model rows."""
        images = self.whole.image[0].images
        return int(images.stop - images.start)

    @property
    def own(self) -> Packing:
        """The packing of this rank."""
        return self.packings[self.index]

    def image(self, rows: Tensor) -> Tensor:
        """Return this rank's part of all images' tokens ``[N, D]``."""
        return _part(rows, self.num_rows, self.images[self.index])

    def prompt(self, rows: Tensor) -> Tensor:
        """Return likewise that of all prompts' tokens."""
        return _part(rows, self.num_rows, self.prompts[self.index])

    def joint_places(self, device: torch.device) -> Tensor:
        """Return where this rank's joint tokens are in the joint matrix of all."""
        num_image, length = self.whole.image[0].length, self.whole.joint[0].length
        image, prompt = self.images[self.index], self.prompts[self.index]
        of_row = torch.cat(
            [
                torch.arange(image.start, image.stop, device=device),
                torch.arange(num_image + prompt.start, num_image + prompt.stop, device=device),
            ]
        )
        starts = torch.arange(self.num_rows, device=device) * length
        return (starts[:, None] + of_row).flatten()


def _part(rows: Tensor, num_rows: int, part: slice) -> Tensor:
    found: Tensor = rows.unflatten(0, (num_rows, -1))[:, part].flatten(0, 1)
    return found


class UlyssesAttend:
    """Attends over the tokens of all ranks of a set; an object is for one step.

    Args:
        inner: attends over some heads of all tokens.
    """

    def __init__(self, shards: Shards, group: dist.ProcessGroup, inner: Attend) -> None:
        self._shards, self._group, self._inner = shards, group, inner
        images = [slice(0, shards.num_rows)]
        joint = [sum(one.joint[0].length for one in shards.packings)]
        image = [sum(one.image[0].length for one in shards.packings)]
        # of one object each: an inner attention keeps what it works out for these
        self._joint, self._image = spans_of(images, joint), spans_of(images, image)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, _key_spans: Spans
    ) -> Tensor:
        shards = self._shards
        is_joint = spans is shards.own.joint
        lengths = [(one.joint if is_joint else one.image)[0].length for one in shards.packings]
        num_ranks, num_rows, whole = len(lengths), shards.num_rows, sum(lengths)
        num_own, num_heads, width = query.shape
        heads = num_heads // num_ranks
        # [to rank, 3, own tokens, heads of that rank, d]
        sent = torch.stack([query, key, value]).unflatten(2, (num_ranks, heads)).movedim(2, 0)
        sizes = [3 * num_rows * length * heads * width for length in lengths]
        given = self._exchanged(sent, [3 * num_own * heads * width] * num_ranks, sizes)
        parts = [
            part.view(3, num_rows, length, heads, width)
            for part, length in zip(given.split(sizes), lengths, strict=True)
        ]
        joined = torch.cat(parts, dim=2).flatten(1, 2)
        full = self._joint if is_joint else self._image
        attended = self._inner(joined[0], joined[1], joined[2], full, full)
        back = attended.view(num_rows, whole, heads * width).split(lengths, dim=1)
        sizes = [num_rows * length * heads * width for length in lengths]
        own = self._exchanged(
            torch.cat([one.flatten() for one in back]),
            sizes,
            [num_own * heads * width] * num_ranks,
        )
        return own.view(num_ranks, num_own, heads * width).movedim(0, 1).flatten(1)

    def _exchanged(self, sent: Tensor, counts: list[int], received: list[int]) -> Tensor:
        """Give every rank its part of a tensor; return what they give, one after the other."""
        # bytes cross: gloo does not know every number format
        each = sent.dtype.itemsize
        given = sent.new_empty(sum(received))
        dist.all_to_all_single(
            given.view(torch.uint8),
            sent.contiguous().flatten().view(torch.uint8),
            [each * count for count in received],
            [each * count for count in counts],
            group=self._group,
        )
        return given


class ShardedDiT(DiTExecutor):
    """Calls a model for one request on a set of ranks; see :class:`DiTExecutor` for the rest.

    All ranks of the set call :meth:`predict` alike.

    Args:
        sets: that this rank belongs to.
    """

    def __init__(
        self,
        model: Any,
        *,
        vae_scale_factor: int,
        device: torch.device,
        sets: RankSets,
        attention: AttentionKind | None = None,
    ) -> None:
        super().__init__(
            model, vae_scale_factor=vae_scale_factor, device=device, attention=attention
        )
        self._sets = sets
        self._rotary: dict[tuple[object, ...], Rotary] = {}

    def predict(
        self, batch: StepBatch[PreparedPrompt], ranks: range, rows: GuidanceRows = "together"
    ) -> Tensor | None:
        """Return the guided prediction ``[M, C]`` float32 on the first rank, None on the others.

        Args:
            batch: of one request.
            rows: whether a guided request's model rows are on all ranks, or one on either half.

        Raises:
            ModelUnsupported: there are several requests, something is reused, or one rank has no
                halves for the rows.
            ValueError: the image or the prompt has fewer tokens than there are ranks.
        """
        if batch.layout.num_requests != 1 or batch.reuse:
            raise ModelUnsupported("a set of ranks steps one request, of which nothing is reused")
        is_apart = rows == "apart" and bool(batch.layout.num_guided)
        own, index = ranks, self._sets.rank - ranks.start
        part = batch
        if is_apart:
            if len(ranks) == 1:
                raise ModelUnsupported("model rows lie apart on two ranks or more; given one")
            half = len(ranks) // 2
            row, index = divmod(index, half)
            own, part = ranks[row * half : (row + 1) * half], _row_of(batch, row, self.num_levels)
        patches, shards = self._patches(part, own, index)
        found = self._gathered(patches, shards, ranks, num_rows=2 if is_apart else 1)
        if found is None:
            return None
        found = torch.cat([shards.whole.own_rows(one) for one in found.chunk(1 + is_apart)])
        return guide(self._lean.pixels(found, batch.layout.levels).float(), batch)

    def _patches(
        self, batch: StepBatch[PreparedPrompt], ranks: range, index: int
    ) -> tuple[Tensor, Shards]:
        """Run the model; return the prediction for this rank's tokens, ``[N, patch**2 * C]``."""
        lean, layout = self._lean, batch.layout
        self._deltas.begin(batch)
        ring = Rings(batch, 1)[0]
        prompts = self._stacked.of(batch, ring)
        whole = packing_of(layout.levels[-1], prompts.length, prompts.references)
        shards = Shards.of(whole, len(ranks), index)
        attend = start_attention(self._attention)
        if len(ranks) > 1:
            attend = UlyssesAttend(shards, self._sets.groups[ranks], attend)
        rotary = self._positions(shards)
        conditions = Conditions(
            embedding=self._embedding(batch, prompts),
            packing=shards.own,
            attend=attend,
            rotary=rotary,
            key_rotary=rotary,
            deltas=TokenDeltas.of(self._deltas.of(batch, ring), shards.own),
        )
        image, prompt = self._embedded(batch, prompts, whole, conditions.row_deltas)
        streams: Streams = Parted(shards.image(image), shards.prompt(prompt))
        for block in range(lean.num_blocks):
            streams = lean.run(block, streams, conditions)
        return lean.project(streams.parted(shards.own).image, conditions), shards

    def _positions(self, shards: Shards) -> Rotary | None:
        """Return the positions of this rank's joint tokens."""
        whole = shards.whole
        key = (whole.grids, whole.num_prompt, shards.num_rows, len(shards.packings), shards.index)
        if key not in self._rotary:
            rotary = self._lean.rotary(whole, self._device)
            if rotary is None:
                return None
            while len(self._rotary) >= _KEPT_POSITIONS:
                del self._rotary[next(iter(self._rotary))]
            self._rotary[key] = rotary.at(shards.joint_places(self._device))
        return self._rotary[key]

    def _gathered(
        self, patches: Tensor, shards: Shards, ranks: range, *, num_rows: int
    ) -> Tensor | None:
        """Return the patches of all ranks on the first of them, model row by model row.

        Args:
            num_rows: that lie on as many parts of the set, one each.
        """
        if len(ranks) == 1:
            return patches
        counts = [one.image[0].length for one in shards.packings]
        own = patches.unflatten(0, (shards.num_rows, -1))
        padded = own.new_zeros(shards.num_rows, max(counts), own.shape[2])
        padded[:, : own.shape[1]] = own
        all_of_them = padded.new_empty(len(ranks), *padded.shape)
        _gather(
            all_of_them.view(-1).view(torch.uint8),
            padded.view(-1).view(torch.uint8),
            group=self._sets.groups[ranks],
        )
        if self._sets.rank != ranks.start:
            return None
        parts = all_of_them.unflatten(0, (num_rows, -1))
        rows = [
            torch.cat([one[:, :count] for one, count in zip(part, counts, strict=True)], dim=1)
            for part in parts
        ]
        return torch.cat(rows).flatten(0, 1)


def _row_of(
    batch: StepBatch[PreparedPrompt], row: int, num_levels: int
) -> StepBatch[PreparedPrompt]:
    """Return a guided request's unconditional or conditional model row as a request of its own."""
    (group,) = batch.layout.composition
    composition, _ = composition_of([(group.height, group.width, False)])
    (prepared,) = batch.prepared
    alone = replace(prepared, tokens=prepared.tokens[row, None], pooled=prepared.pooled[row, None])
    return replace(batch, layout=layout_of(composition, num_levels), prepared=(alone,))
