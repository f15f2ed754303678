"""Metrics in Prometheus' text format, read back by a parser of their grammar."""

from __future__ import annotations

import re

from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.registry.metrics import Metric, exposition, metrics

SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z_]+)="((?:[^"\\\n]|\\[\\"n])*)"\})? (\S+)')


def parsed(text):
    """Return the value of each sample by its name and its label, and the kind of each metric."""
    assert text.endswith("\n")
    values, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# "):
            word, name, rest = line[2:].split(" ", 2)
            if word == "TYPE":
                kinds[name] = rest
            continue
        name, _, label, value = SAMPLE.fullmatch(line).groups()
        assert (name, label) not in values, "twice"
        values[name.removeprefix("compiled_graphs_"), label] = float(value)
    return values, kinds


def counters():
    found = Counters(compiles=3, from_disk=2, calls=40, seconds=1.25, replays=7)
    for detail in ("attn1_patch", "attn2_patch"):
        found.eager_calls[Reason(ReasonCode.PATCH, detail)] += 5
    found.eager_calls[Reason(ReasonCode.GRADIENTS)] += 1
    return found


def test_counts_are_there_and_reasons_are_few():
    values, kinds = parsed(exposition(metrics(counters(), [100, 20], {"graphs": 2, "bytes": 50, "limit": 1000})))
    assert values["compiles_total", None] == 3
    assert values["loads_total", "disk"] == 2
    assert values["loads_total", "memory"] == 0
    assert values["seconds_total", None] == 1.25
    assert values["uncompiled_block_calls_total", "patch"] == 10
    assert values["uncompiled_block_calls_total", "gradients"] == 1
    assert (values["memory_graphs", None], values["memory_bytes", None]) == (2, 120)
    assert values["store_limit_bytes", None] == 1000
    assert kinds["compiled_graphs_compiles_total"] == "counter"
    assert kinds["compiled_graphs_memory_bytes"] == "gauge"


def test_a_store_that_cannot_be_listed_has_no_figures():
    values, _ = parsed(exposition(metrics(Counters(), [], None)))
    assert not [name for name, _ in values if name.startswith("store")]


def test_labels_are_escaped():
    text = exposition([Metric("a", "gauge", "b", (((("c", 'x"\\\ny'),), 1.0),))])
    assert text.splitlines()[-1] == 'compiled_graphs_a{c="x\\"\\\\\\ny"} 1'
