"""Small experiments with a control loop, as their files have them."""

from __future__ import annotations

from typing import Any

CASCADE: dict[str, Any] = {
    "kind": "cascade",
    "name": "small",
    "what": "Sixteen GPUs.",
    "policies": ["allocation", "diffserve", "all-light"],
    "duration_s": 10,
    "first_seed": 0,
    "num_seeds": 2,
}
DAY: dict[str, Any] = {
    "kind": "autoscaling",
    "name": "day",
    "what": "Two services.",
    "workloads": [
        {
            "service": "sd15",
            "profile": "sd15-a100",
            "low_per_s": 1,
            "high_per_s": 4,
            "slo_s": 10,
            "num_gpus": 8,
            "num_initial": 3,
            "max_batch": 8,
            "price": 3,
        },
        {
            "service": "sdxl",
            "profile": "sdxl-h100",
            "steps": 50,
            "low_per_s": 0.3,
            "high_per_s": 1,
            "slo_s": 15,
            "num_gpus": 4,
            "num_initial": 2,
            "price": 7,
        },
    ],
    "policies": ["allocation", "ongoing-requests", "clairvoyant"],
    "duration_s": 150,
    "first_seed": 0,
    "num_seeds": 2,
}
