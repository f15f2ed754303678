"""What this process did, as metrics for monitoring: the text format of Prometheus, version 0.0.4.

Reasons are counted by their code. A note with a detail could have a new value for every image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..common.counters import Counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "compiled_graphs_"
SOURCES = ("memory", "disk", "file")


@dataclass(frozen=True)
class Metric:
    """One metric and its samples. A sample is the labels and the value."""

    name: str
    kind: str
    """"counter" or "gauge"."""
    help: str
    samples: tuple[tuple[tuple[tuple[str, str], ...], float], ...]


def metrics(counters: Counters, memory: Iterable[int], disk: Mapping[str, Any] | None) -> list[Metric]:
    """Return the metrics of a process.

    `memory` are the bytes of each graph in memory, `disk` what the store holds as `Registry.report` says it, or None.
    """
    reasons = Counter()
    for reason, count in list(counters.eager_calls.items()):
        reasons[reason.code.name.lower()] += count
    sizes = list(memory)
    found = [
        _counter("compiles", "Graphs that were compiled.", counters.compiles),
        _counter_by("loads", "Graphs that were found.", "source", {s: getattr(counters, f"from_{s}") for s in SOURCES}),
        _counter("seconds", "Seconds of tracing, compiling and loading.", counters.seconds),
        _counter("block_calls", "Calls of blocks, compiled or not.", counters.calls),
        _counter_by("uncompiled_block_calls", "Calls of blocks that ran uncompiled.", "reason", reasons),
        _counter("verifications", "Comparisons of a graph with the uncompiled block.", counters.verifications),
        _counter("retired", "Graphs that failed such a comparison.", counters.retired),
        _counter("captures", "Steps that were recorded as CUDA graphs.", counters.captures),
        _counter("replays", "Steps that were replayed.", counters.replays),
        _gauge("memory_graphs", "Graphs in memory.", len(sizes)),
        _gauge("memory_bytes", "Bytes of the graphs in memory.", sum(sizes)),
    ]
    if disk is not None:
        found += [
            _gauge("store_graphs", "Graphs in the store.", disk["graphs"]),
            _gauge("store_bytes", "Bytes of the graphs in the store.", disk["bytes"]),
            _gauge("store_limit_bytes", "Bytes that the store may hold.", disk["limit"]),
        ]
    return found


def exposition(found: Iterable[Metric]) -> str:
    """Return metrics as a server is asked for them."""
    lines: list[str] = []
    for metric in found:
        lines += [f"# HELP {PREFIX}{metric.name} {metric.help}", f"# TYPE {PREFIX}{metric.name} {metric.kind}"]
        lines += [f"{PREFIX}{metric.name}{_labels(labels)} {value:.17g}" for labels, value in metric.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    escaped = (f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{','.join(escaped)}}}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _counter(name: str, text: str, value: float) -> Metric:
    return Metric(f"{name}_total", "counter", text, (((), value),))


def _counter_by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return Metric(f"{name}_total", "counter", text, tuple((((label, key),), values[key]) for key in sorted(values)))


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, "gauge", text, (((), value),))
