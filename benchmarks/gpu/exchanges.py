"""What ranks exchange around attention: ``all_to_all_single`` alone, of the sizes of a step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.figures import summarise
from ray_cluster.engine.groups.rank_sets import RankSets

# the ranks import this file and do without the models' libraries
if TYPE_CHECKING:
    from benchmarks.gpu.families import Family
    from benchmarks.gpu.record import Section
    from benchmarks.gpu.settings import Settings

_TOKEN_PX = 16
# exchanges that are timed together
_TOGETHER = 10


@dataclass(frozen=True, slots=True)
class Exchange:
    """What ranks of a set exchange around an attention: queries, keys and values, then results.

    Attributes:
        rows: model rows of the image.
        layers: attentions of a step.
        bytes_back: that a rank sends at the end; three times as many there.
    """

    family: str
    side_px: int
    degree: int
    rows: int
    layers: int
    bytes_back: int


def exchanges_of(settings: Settings, families: Sequence[Family]) -> list[Exchange]:
    """Return those of a step with all rows together, by family, size and degree."""
    found, powers = [], [2**power for power in range(1, settings.num_ranks.bit_length())]
    for family in families:
        config, rows = family.config, 2 if family.is_guided else 1
        heads = int(config["num_attention_heads"])
        layers = config["num_layers"] + config.get("num_single_layers", 0)
        for side in settings.group_px:
            tokens = (side // _TOKEN_PX) ** 2 + family.prompt_tokens
            for degree in (one for one in powers if heads % one == 0):
                own = -(-tokens // degree) * heads * int(config["attention_head_dim"])
                sent = rows * own * settings.dtype.itemsize
                found.append(Exchange(family.name, side, degree, rows, layers, sent))
    return found


def measure_exchanges(settings: Settings, families: Sequence[Family], section: Section) -> None:
    """Time ``all_to_all_single`` of the sizes of a step, on the first ranks of the group."""
    backend = "nccl" if settings.device.type == "cuda" else "gloo"
    section.found["what"] = f"all_to_all_single by {backend}, ms of one of {_TOGETHER} in a row"
    cells = exchanges_of(settings, families)
    with tempfile.TemporaryDirectory(prefix="exchanges-") as folder:
        shared = (settings.num_ranks, backend, Path(folder), cells, settings.group_rounds)
        spawn(_exchange, shared, nprocs=settings.num_ranks)
        samples = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    for cell, (there_ms, back_ms) in zip(cells, samples, strict=True):
        row = asdict(cell) | {"there_ms": summarise(there_ms)}
        row |= {"back_ms": summarise(back_ms)}
        row["step_ms"] = cell.layers * (median(there_ms) + median(back_ms))
        section.table("exchanges").append(row)


def _exchange(
    rank: int, num: int, backend: str, folder: Path, cells: Sequence[Exchange], rounds: int
) -> None:
    """Take part in every exchange of the first ranks; the first one writes what they took."""
    from ray_cluster.config.loading import set_environment

    set_environment({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=num
    )
    degrees = sorted({one.degree for one in cells})
    groups = RankSets.build(rank, num, degrees, device).groups
    found = []
    for cell in cells:
        if rank < cell.degree:
            group = groups[range(cell.degree)]
            sizes = (3 * cell.bytes_back, cell.bytes_back)
            found.append([_exchange_ms(one, device, group, rounds) for one in sizes])
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _exchange_ms(
    size: int, device: torch.device, group: dist.ProcessGroup, rounds: int
) -> list[float]:
    sent = torch.ones(size, dtype=torch.uint8, device=device)
    received, found = torch.empty_like(sent), []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        for _ in range(_TOGETHER):
            dist.all_to_all_single(received, sent, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - began_s) / _TOGETHER)
    return found[1:]
