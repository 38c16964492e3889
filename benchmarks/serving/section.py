"""The service and memory sections share one start of the service for each number of replicas."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.subject import Subject
from benchmarks.serving.overhead import SequentialClient, probe_parts
from benchmarks.serving.processes import memory_by_role
from benchmarks.serving.running import running_service
from benchmarks.serving.throughput import measure_throughput
from benchmarks.settings import Report, Settings


def measure_service(
    subject: Subject, settings: Settings, report: Report, *, wanted: frozenset[str]
) -> dict[str, Any]:
    """Return the sections that are wanted of ``service`` and ``memory``."""
    counts = settings.replica_counts if "service" in wanted else settings.replica_counts[-1:]
    runs: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for index, replicas in enumerate(counts):

        def part(done: float, text: str, index: int = index, replicas: int = replicas) -> None:
            report((index + done) / len(counts), f"{replicas} replica(s): {text}")

        part(0.0, "starting Ray and Serve")
        with running_service(replicas) as (config, started_s):
            row: dict[str, Any] = {"replicas": replicas, "start_s": round(started_s, 1)}
            client = SequentialClient(config, settings)
            row["sequential"] = client.run(lambda done, text: part(0.3 + done * 0.4, text))
            if "service" in wanted:
                part(0.7, "parts of a request")
                row["parts"] = probe_parts(config, settings.short_requests)
                row["throughput"] = measure_throughput(
                    subject, config, settings, lambda done, text: part(0.75 + done * 0.2, text)
                )
                runs.append(row)
            memory.append({"replicas": replicas, "processes": memory_by_role()})
    sections: dict[str, Any] = {}
    if "service" in wanted:
        sections["service"] = {
            "what": "http total - encode - denoise - decode of the same request, 64 px, "
            "guidance on, wall time",
            "runs": runs,
        }
    if "memory" in wanted:
        sections["memory"] = {
            "what": "proportional set size (shared pages are shared out), MiB, after load",
            "runs": memory,
        }
    return sections
