"""The benchmark of ControlNets compares equal work, and would tell if it were not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.controlnets.__main__ import main
from benchmarks.controlnets.images import DIFFUSERS, LOCAL, REMOTE
from benchmarks.controlnets.services import MODELS, arguments_of
from benchmarks.controlnets.subject import by_diffusers, controlled_requests, maps_of
from benchmarks.engine.streams import TOLERANCE, Images, by_engine
from benchmarks.engine.subject import Subject, largest_difference, load_subject
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.requests import AddOns, ImageRequest


def made(subject: Subject, requests: list[ImageRequest]) -> Images:
    device = torch.device("cpu")
    banks = {name: load_bank(arguments_of(name), device) for name in MODELS}
    return by_engine(
        subject,
        requests,
        2,
        controls=LocalControlNets(banks),
        maps_of=lambda one: tuple(map(torch.from_numpy, maps_of(one))),
    )


@pytest.mark.slow
def test_both_sides_make_the_same_images_and_maps_change_them() -> None:
    subject = load_subject()
    requests = controlled_requests(2, 3, px=64, num_steps=4)
    expected = by_diffusers(subject, requests, {one.request_id: {} for one in requests})
    assert largest_difference(expected, made(subject, requests)) <= TOLERANCE
    bare = [replace(one, add_ons=AddOns()) for one in requests]
    assert largest_difference(expected, made(subject, bare)) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_has_no_problem_and_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "controlnets.json"
    assert main(["--quick", "--out", str(path)]) == 0
    sections = json.loads(path.read_text())["sections"]
    rows = sections["images"]["tables"]["images with ControlNets"]
    assert {row["way"] for row in rows} == {DIFFUSERS, LOCAL, REMOTE}
    assert {row["link"] for row in sections["steps"]["tables"]["a step's residuals"]} == {
        "shared memory",
        "tcp",
    }
