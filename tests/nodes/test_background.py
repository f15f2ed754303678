"""The choice "in background" in a real server: it makes images at once, and answers while it compiles."""

from __future__ import annotations

import signal
import time

import pytest

PATIENCE = 300.0
"""Seconds that a worker process may take to start and to compile three regions on a busy machine."""


@pytest.fixture
def server(make_home, start_server):
    """A new server for each test, which has compiled nothing yet."""
    with start_server(make_home("tiny_sd15")) as server:
        yield server


@pytest.fixture
def later(workflow):
    def make(**options):
        prompt = workflow(**options)
        prompt["2"]["inputs"]["when"] = "in background"
        return prompt

    return make


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


def processes(server):
    """Return the processes that compile for a server."""
    psutil = pytest.importorskip("psutil", reason="ComfyUI brings it")
    return psutil.Process(server._process.pid).children(recursive=True)


def largest(ones, others):
    return max(abs(one - other).max() for one, other in zip(ones, others, strict=True))


def test_prompts_run_while_graphs_compile(server, workflow, later, pixels):
    plain = pixels(server, server.run(workflow(compiled=False, seed=1)))
    waiting = [server.queue(later(seed=seed)) for seed in (1, 2, 3)]
    answers_meanwhile, deadline = 0, time.monotonic() + PATIENCE
    while (compiles := totals(server)["compiles"]) < 3 and time.monotonic() < deadline:
        answers_meanwhile += bool(processes(server))
    assert compiles == 3
    assert answers_meanwhile > 0, "the server answered only before or after"
    first, *_ = [server.wait(prompt)["outputs"] for prompt in waiting]
    assert first["2"]["text"][0].startswith("Compiling in the background: 0 of 3 block types done.")
    assert largest(pixels(server, first), plain) <= 1

    before = totals(server)
    ours = pixels(server, server.run(later(seed=4)))
    theirs = pixels(server, server.run(workflow(compiled=False, seed=4)))
    assert largest(ours, theirs) <= 1
    after = totals(server)
    assert after["compiles"] == 3
    assert after["reasons"] == before["reasons"]
    assert after["calls"] > before["calls"]


def test_saving_waits_for_background_compiles(server, later):
    prompt = later(seed=5)
    prompt["20"] = {"class_type": "CG_SaveGraph", "inputs": {"filename_prefix": "behind", "model": ["2", 0]}}
    (text,) = server.run(prompt)["20"]["text"]
    assert text.startswith("3 graphs saved to behind_00001_")


def test_the_server_ends_while_a_worker_compiles(server, later):
    server.run(later(seed=6))
    server.stop()
    assert server._process.returncode != -signal.SIGKILL, "it did not end when it was asked to"
