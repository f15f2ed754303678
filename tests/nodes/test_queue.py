"""A queue of many prompts over HTTP: what it compiles, how much memory it takes, and which workflow it counts for."""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

import pytest

CHECKPOINTS = ("tiny_sd15.ckpt", "tiny_sd15_other.ckpt")
SIZES = ((64, 64), (96, 64), (128, 96))
WORKFLOWS = {"left": "2", "right": "12"}
"""Two workflows, with the number of the Compile Model node in each."""
PROMPTS = 200
FIRST_SWITCH, WARM_UP, SWITCH = 4, 10, 20
"""Prompts before the first switch of checkpoints, before memory must be flat, and between later switches."""
FLAT = 2**20 / 5
"""Bytes that each prompt may keep."""
HALF_A_UNET = 80 * 2**20
"""The tiny model's UNet is 169 MiB in memory."""


@pytest.fixture
def variant(workflow):
    """Make the workflow with a given checkpoint, size, and node number of Compile Model."""

    def make(node="2", checkpoint=CHECKPOINTS[0], size=SIZES[0], **sampler):
        prompt = workflow(*size, **{"steps": 1, **sampler})
        prompt["1"]["inputs"]["ckpt_name"] = checkpoint
        if node != "2":
            prompt[node] = prompt.pop("2")
            prompt["6"]["inputs"]["model"] = [node, 0]
        return prompt

    return make


@pytest.fixture
def forgetful(start_server, home, tmp_path):
    """A server without graphs that keeps only the prompt's own models. By default, since 2026, others may stay."""
    (tmp_path / "models").symlink_to(home / "models", target_is_directory=True)
    options = Path(os.environ.get("COMFYUI_PATH", ""), "comfy", "cli_args.py")
    knows = options.is_file() and "--cache-classic" in options.read_text()
    with start_server(tmp_path, *["--cache-classic"] * knows) as server:
        yield server


@pytest.fixture
def memory():
    """Return the bytes of memory that a server's process has."""
    psutil = pytest.importorskip("psutil", reason="memory is measured with psutil, which ComfyUI brings")
    return lambda server: psutil.Process(server._process.pid).memory_info().rss


def registry(server):
    return server.get("/compiled_graphs/registry")


def roles(server, workflow):
    return registry(server)["workflows"][workflow]["roles"]


def calls(server, workflow):
    return sum(role["calls"] for role in roles(server, workflow).values())


def mebibytes(sizes):
    return [size // 2**20 for size in sizes]


def gained(sizes):
    """Return the bytes that each prompt keeps: the smaller of two measures, growth per turn and growth overall.

    C's allocator sometimes takes 20 MiB once and keeps it, which growth per turn does not show. Levels go up and down
    by 10 MiB, which growth overall does not show. A leak shows in both.
    """
    few, apart = SWITCH // 2, 2 * SWITCH
    levels = [statistics.median(sizes[start : start + few]) for start in range(0, len(sizes), few)]
    by_turn = statistics.median(later - before for before, later in zip(levels, levels[apart // few :], strict=False))
    in_all = statistics.median(sizes[-apart:]) - statistics.median(sizes[:apart])
    return min(by_turn / apart, in_all / (len(sizes) - apart))


def cached_nodes(entry):
    """Return the nodes of a finished prompt whose outputs ComfyUI took from its cache."""
    said = [content for event, content in entry["status"]["messages"] if event == "execution_cached"]
    return {node for content in said for node in content["nodes"]}


def turn(number):
    """Return the workflow and settings of the n-th prompt. The workflows alternate after all three sizes.

    The warm-up switches to the other checkpoint and back, as the later prompts do repeatedly.
    """
    checkpoint = CHECKPOINTS[number // (FIRST_SWITCH if number < WARM_UP else SWITCH) % 2]
    return list(WORKFLOWS)[number // 3 % 2], {"size": SIZES[number % 3], "checkpoint": checkpoint, "seed": number}


def test_two_hundred_prompts_compile_once_and_stay_flat(forgetful, variant, memory):
    turns = [turn(number) for number in range(PROMPTS)]
    queued = [forgetful.queue(variant(WORKFLOWS[name], **changes), {"id": name}) for name, changes in turns]
    texts, sizes = [], []
    for prompt_id, (name, _) in zip(queued, turns, strict=True):
        entry, node = forgetful.wait(prompt_id), WORKFLOWS[name]
        sizes.append(memory(forgetful))
        if node in entry["outputs"]:
            texts.append(entry["outputs"][node]["text"][0])
        else:  # since 2026, ComfyUI does not show a cached node again
            assert node in cached_nodes(entry)
    report = registry(forgetful)
    first, *others = dict.fromkeys(texts)
    assert first.startswith("Ready: 3 of 3 block types compiled (")
    assert others
    assert all(text.startswith("Ready (loaded from memory, ") for text in others)
    assert report["totals"]["compiles"] == 3, "some prompt after the first compiled"
    assert (report["totals"]["reasons"], report["totals"]["retired"]) == ({}, 0)
    assert {name: [*workflow["roles"]] for name, workflow in report["workflows"].items()} == {
        name: [f"{node}:base UNet"] for name, node in WORKFLOWS.items()
    }
    assert gained(sizes[WARM_UP:]) < FLAT, mebibytes(sizes)
    assert statistics.median(sizes[-SWITCH:]) - max(sizes[:FIRST_SWITCH]) < HALF_A_UNET, mebibytes(sizes)


def test_the_memory_measure_tells_a_leak_from_chance():
    chance = random.Random(0)
    sizes = [2**30 + chance.randrange(8 * 2**20) for _ in range(WARM_UP, PROMPTS)]
    once = [size + 20 * 2**20 * (number > 60) for number, size in enumerate(sizes)]
    assert gained(sizes) < FLAT
    assert gained(once) < FLAT
    assert gained([size + number * 2**20 // 3 for number, size in enumerate(sizes)]) > FLAT
    assert gained([size + number // SWITCH * 6 * 2**20 for number, size in enumerate(sizes)]) > FLAT


def test_another_checkpoint_uses_the_same_graphs(server, variant, pixels):
    images = []
    for checkpoint in CHECKPOINTS:
        same = {"checkpoint": checkpoint, "size": (128, 128), "seed": 101, "steps": 2}
        ours = pixels(server, server.run(variant("20", **same)))[0]
        compiles = registry(server)["totals"]["compiles"]
        theirs = pixels(server, server.run(variant(**same, compiled=False)))[0]
        assert abs(ours - theirs).max() <= 1
        images.append((ours, compiles))
    (one, before), (other, after) = images
    assert before == after, "the second checkpoint compiled"
    assert abs(one - other).max() > 5


def test_a_checkpoint_is_freed_after_a_switch(server, variant, memory):
    """The checkpoint is freed with Compile Model in the workflow, and after its removal, when ComfyUI undoes patches.

    Python or C's allocator sometimes frees an earlier prompt's memory late, but leaked memory stays in every turn.
    ComfyUI itself keeps some of a checkpoint, so the test compares memory with turns that compile nothing.
    """
    plain = [(CHECKPOINTS[number % 2], number == 0) for number in range(4)]
    turns = [(CHECKPOINTS[number // 2 % 2], number % 4 in (0, 3)) for number in range(12)]
    sizes = []
    for number, (checkpoint, compiled) in enumerate([*plain, *turns]):
        server.run(variant(checkpoint=checkpoint, compiled=compiled, seed=110 + number))
        sizes.append(memory(server))
    before, sizes = max(sizes[1:4]), sizes[4:]
    settled = [min(both) for both in zip(sizes[::2], sizes[1::2], strict=True)]
    assert statistics.median(settled) - before < HALF_A_UNET, mebibytes([before, *sizes])
    assert "memory leak" not in server.log.read_text()


def test_a_cached_node_serves_the_next_workflow(server, variant):
    server.run(variant("21", seed=121), {"id": "cached, first"})
    alone = calls(server, "cached, first")
    entry = server.wait(server.queue(variant("21", seed=122), {"id": "cached, second"}))
    assert "21" in cached_nodes(entry), "ComfyUI ran the node again, so this shows nothing"
    first, second = (roles(server, f"cached, {name}") for name in ("first", "second"))
    assert first == second, "one compiled model serves both, and counts for both"
    assert second["21:base UNet"]["regions"] == 3
    assert second["21:base UNet"]["calls"] == 2 * alone > 0


def test_counters_grow_only_for_the_workflow_that_runs(server, variant):
    for seed in (131, 132):
        server.run(variant("22", seed=seed), {"id": "one"})
    before = calls(server, "one")
    server.run(variant("23", seed=133), {"id": "two"})
    once = calls(server, "two")
    server.run(variant("23", seed=134), {"id": "two"})
    assert calls(server, "two") == 2 * once == before > 0
    assert calls(server, "one") == before
    assert [*roles(server, "one"), *roles(server, "two")] == ["22:base UNet", "23:base UNet"]


def test_prompts_without_an_id_differ_by_topology(server, variant):
    before = registry(server)["workflows"]
    for seed, node in enumerate(["24", "24", "25"], 141):
        server.run(variant(node, seed=seed, size=SIZES[seed % 3], checkpoint=CHECKPOINTS[seed % 2]))
    added = [workflow["roles"] for name, workflow in registry(server)["workflows"].items() if name not in before]
    assert sorted([*names] for names in added) == [["24:base UNet"], ["25:base UNet"]]
