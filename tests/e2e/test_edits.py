"""Edits through the running service: random ones, what they show, kills in between, and sweeps."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from ray_cluster.quality.classifier import Reading, load_classifier, read_pictures
from tests.e2e import drawn_edits
from tests.e2e.drawn_edits import Outcome
from tests.e2e.jobs import (
    create,
    ends_of,
    growth,
    images_in,
    images_of,
    kill_one,
    scrape,
    states_of,
    wait_for_replicas,
    wait_until_whole,
)
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import API_KEY, HEADERS, Service
from tests.e2e.test_service import OLDER_CLIENT

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

COLOURS = ("red", "green", "blue", "yellow", "cyan", "pink", "orange", "purple")
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")


def drawn(service: Service, seeds: range, *, older: bool = False) -> list[Outcome]:
    """Make the edits of these seeds by a client in a process of its own."""
    environment = dict(os.environ)
    if older:
        assert OLDER_CLIENT.is_dir(), "the Makefile installs it: run `make venv`"
        environment["PYTHONPATH"] = str(OLDER_CLIENT)
    arguments = (service.url, API_KEY, str(seeds.start), str(len(seeds)))
    done = subprocess.run(
        [sys.executable, drawn_edits.__file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    assert (found["version"].split(".")[0] == "1") is older
    return [Outcome(**one) for one in found["outcomes"]]


def check(outcomes: Collection[Outcome], least: int) -> None:
    """Nothing outside a mask has changed; and the comparison would have told.

    Args:
        least: pixels outside masks that were compared, for fear of having compared nothing.
    """
    for one in outcomes:
        assert list(one.size_px) == list(one.expected_px), one.kind
        if one.is_pasted:
            assert one.changed_outside == 0, f"seed {one.seed}: {one.kind}"
        elif one.outside > 100:
            # not pasted back: the autoencoder changes nearly everything
            assert one.changed_outside > 0.3 * one.outside, f"seed {one.seed}: {one.kind}"
    pasted = [one for one in outcomes if one.is_pasted]
    assert sum(one.outside for one in pasted) > least
    # the border of a feathered mask may keep its pixels
    inside = sum(one.inside for one in pasted)
    assert sum(one.changed_inside for one in pasted) > 0.8 * inside
    logger.warning(
        "%d edits, %d pasted back: 0 of %d pixels outside masks changed, %d of %d inside",
        *(len(outcomes), len(pasted), sum(one.outside for one in pasted)),
        *(sum(one.changed_inside for one in pasted), inside),
    )


def test_random_edits_change_nothing_outside_their_masks(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(drawn, service, range(1000, 1010), older=True)
        outcomes = drawn(service, range(30))
        outcomes += older.result()
    check(outcomes, least=50_000)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("older", [False, True], ids=["current client", "older client"])
def test_250_random_edits_change_nothing_outside_their_masks(
    service: Service, older: bool
) -> None:
    check(drawn(service, range(2000 + 250 * older, 2250 + 250 * older), older=older), 500_000)
