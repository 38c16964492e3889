"""A small cell behind a socket, for a browser: a model, a cascade's parts left out, add-ons."""

from __future__ import annotations

from typing import Any

from tests.e2e.service import API_KEY
from tests.keys import entry

USE_KEY = "key-that-may-use"

OVERRIDES: dict[str, Any] = {
    "http": {
        "api_keys": [
            entry("tests", API_KEY, "use", "loras", "operate"),
            entry("users", USE_KEY, "use"),
        ],
        "trusted_proxies": ["127.0.0.1"],
    },
    "limits": {"max_queued_images": 64},
    "pools": [
        {
            "name": "shapes-sd",
            "model": "shapes-sd",
            "num_cpus": 0.5,
            "max_batch": 8,
            "max_in_flight": 8,
            "min_px": 32,
            "max_px": 128,
            "max_num_inference_steps": 400,
            "defaults": {
                "size": "64x64",
                "num_inference_steps": 20,
                "guidance_scale": 2.0,
                "sampler": "ddim",
            },
            "fidelity": {
                "sampler": "ddim",
                "max_guidance_scale": 2.0,
                "steps": [{"asked": 20, "balanced": 8, "fast": 5}],
            },
        },
    ],
    "controlnets": [
        {
            "name": "edges",
            "description": "objects stand where the map's edges are",
            "model": "shapes-sd-edges",
            "bases": ["shapes-sd"],
            "num_cpus": 0.2,
        }
    ],
    "discriminators": [],
    "cascades": [],
}
