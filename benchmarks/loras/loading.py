"""How long a LoRA takes from its file to a request."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine.subject import Subject, load_subject
from benchmarks.loras.settings import LoraSettings
from benchmarks.loras.subject import STYLES, file_of
from benchmarks.report import Row, Section
from benchmarks.settings import MODEL, Report
from benchmarks.stats import summarise
from benchmarks.stopwatch import in_turns
from ray_cluster.engine.adapters.adapter_set import bind_adapters
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.adapters.lora_files import read_lora
from ray_cluster.engine.files.folders import resolve_folder


def measure(settings: LoraSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject, rows = load_subject(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for index, style in enumerate(STYLES):
            report(index / len(STYLES), style)
            rows.append(_row(subject, style, Path(folder) / style, settings.load_rounds))
    return {
        "what": "one LoRA, wall clock. convert: read by diffusers' converters and checked (in a "
        "process of its own, once a node); write: the node's file of factors; open: that file "
        "mapped; bind: to the model, from opened factors (once a replica); diffusers: load, "
        "activate and unload, in each request",
        "tables": {"ms of one LoRA": rows},
    }


def _row(subject: Subject, style: str, path: Path, rounds: int) -> Row:
    file, base = file_of(style), resolve_folder(MODEL)
    factors = read_lora(file, base)
    write_factors(factors, path)
    opened, pipeline = open_factors(path), subject.pipeline

    def by_diffusers() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipeline.load_lora_weights(file, adapter_name=style)
            pipeline.set_adapters([style], [1.0])
            pipeline.unload_lora_weights()

    parts: dict[str, Callable[[], object]] = {
        "convert": lambda: read_lora(file, base),
        "write": lambda: write_factors(factors, path),
        "open": lambda: open_factors(path),
        "bind": lambda: bind_adapters(subject.model, [(opened, 1.0)]),
        "diffusers": by_diffusers,
    }
    # so that no way is slower for being first
    in_turns(parts, 1)
    costs = in_turns(parts, rounds)
    figures = {
        f"{name}_ms": summarise([1e3 * one.wall_s for one in costs[name]]).as_dict()
        for name in parts
    }
    return {"lora": style, "rank": max(factors.ranks), "kib": factors.num_bytes / 1024} | figures
