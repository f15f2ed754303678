"""Disturbances of a queue: after each one, the next prompt is correct and compiles nothing again."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
import urllib.request
from pathlib import Path

import pytest
from comfy_server import ComfyServer, PromptFailed

SEEDS = itertools.count(1000)


@pytest.fixture(scope="module")
def own_home(make_home):
    home = make_home("tiny_sd15", "tiny_sd15_other")
    (home / "custom_nodes").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("disturbing_nodes.py"), home / "custom_nodes")
    return home


@pytest.fixture(scope="module")
def server(own_home, start_server):
    with start_server(own_home) as server:
        yield server


def compiles(server):
    return server.get("/compiled_graphs/registry")["totals"]["compiles"]


def put_between(prompt, kind, **inputs):
    """Put a node between KSampler and the source of its model."""
    number = f"9{len(prompt)}"
    prompt[number] = {"class_type": kind, "inputs": {"model": prompt["6"]["inputs"]["model"], **inputs}}
    prompt["6"]["inputs"]["model"] = [number, 0]
    return prompt


@pytest.fixture
def check(workflow, pixels):
    """Assert that a new image matches eager, and that nothing is compiled for it."""

    def run(server, change=lambda prompt: prompt, **sampler):
        seed = next(SEEDS)
        before = compiles(server)
        ours = pixels(server, server.run(change(workflow(seed=seed, **sampler))))
        assert compiles(server) == before
        theirs = pixels(server, server.run(change(workflow(seed=seed, compiled=False, **sampler))))
        assert max(abs(one - other).max() for one, other in zip(ours, theirs, strict=True)) <= 1
        assert ours[0].std() > 5
        return ours[0]

    return run


@pytest.fixture
def warm(server, workflow):
    server.run(workflow(seed=next(SEEDS)))


@pytest.mark.parametrize("memory", [True, False], ids=["out of memory", "an error"])
def test_a_step_that_fails_in_the_middle(memory, server, warm, workflow, check):
    with contextlib.suppress(PromptFailed):
        server.run(put_between(workflow(seed=next(SEEDS), steps=4), "StopInStep", step=2, memory=memory))
        pytest.fail("the step did not fail")
    check(server)


def test_a_node_that_raises_after_compile_model(server, warm, workflow, check):
    with pytest.raises(PromptFailed):
        server.run(put_between(workflow(seed=next(SEEDS)), "Fail", number=next(SEEDS)))
    assert "this node always fails" in server.log.read_text()
    check(server)


def test_interrupted_while_sampling(server, warm, workflow, check):
    running = server.queue(workflow(256, 256, 2, steps=300, seed=next(SEEDS)))
    before = server.get("/compiled_graphs/registry")["totals"]["calls"]
    deadline = time.monotonic() + 60
    while server.get("/compiled_graphs/registry")["totals"]["calls"] == before and time.monotonic() < deadline:
        time.sleep(0.02)
    server.post("/interrupt")
    with contextlib.suppress(PromptFailed):  # older versions report an interrupted prompt as done
        server.wait(running)
    check(server)


def test_models_unloaded_by_hand(server, warm, check):
    body = json.dumps({"unload_models": True, "free_memory": True}).encode()
    request = urllib.request.Request(
        server.address + "/free", body, {"Content-Type": "application/json"}, method="POST"
    )
    with contextlib.suppress(urllib.error.HTTPError):  # not in every version
        urllib.request.urlopen(request, timeout=60).close()
    time.sleep(1)
    check(server)


def test_a_checkpoint_file_that_changes_on_disk(server, own_home, warm, workflow, pixels):
    def image(name, seed):
        prompt = workflow(seed=seed)
        prompt["1"]["inputs"]["ckpt_name"] = name
        return pixels(server, server.run(prompt))[0]

    path, other = (own_home / "models" / "checkpoints" / f"{name}.ckpt" for name in ("tiny_sd15", "tiny_sd15_other"))
    kept, new = path.with_suffix(".kept"), path.with_suffix(".new")
    seed = next(SEEDS)
    before, theirs = image(path.name, seed), image(other.name, seed)
    compiled = compiles(server)
    shutil.copy(path, kept)
    shutil.copy(other, new)
    new.replace(path)
    try:
        after = image(path.name, seed)
    finally:
        kept.replace(path)
    assert compiles(server) == compiled
    assert abs(after - theirs).max() <= 1
    assert abs(after - before).max() > 5


def test_two_prompts_with_other_patches_queued_at_once(server, warm, workflow, pixels):
    server.run(put_between(workflow(seed=next(SEEDS)), "ScaleAttention", factor=0.5))
    before, seed = compiles(server), next(SEEDS)
    changes = [("ScaleAttention", {"factor": 0.5}), None, ("ScaleAttention", {"factor": -1.0}), None]

    def queue(compiled):
        prompts = [workflow(seed=seed, compiled=compiled) for _ in changes]
        changed = [p if c is None else put_between(p, c[0], **c[1]) for p, c in zip(prompts, changes, strict=True)]
        waiting = [server.queue(prompt) for prompt in changed]
        return [pixels(server, server.wait(number)["outputs"])[0] for number in waiting]

    def sees(images):
        return abs(images[0] - images[1]).max() > 1

    ours = queue(True)
    assert compiles(server) == before
    theirs = queue(False)
    assert sees(theirs)
    assert all(abs(one - other).max() <= 1 for one, other in zip(ours, theirs, strict=True))


def test_one_model_in_two_samplers_with_other_patches(server, warm, workflow, pixels):
    def both(compiled, seed):
        prompt = workflow(seed=seed, compiled=compiled)
        source = prompt["6"]["inputs"]["model"]
        prompt["90"] = {"class_type": "ScaleAttention", "inputs": {"model": source, "factor": 0.3}}
        prompt["91"] = {
            "class_type": "KSampler",
            "inputs": {**prompt["6"]["inputs"], "model": ["90", 0], "seed": seed + 1},
        }
        decode, save = (
            next(name for name, node in prompt.items() if node["class_type"] == kind)
            for kind in ("VAEDecode", "SaveImage")
        )
        prompt["92"] = {"class_type": "VAEDecode", "inputs": {**prompt[decode]["inputs"], "samples": ["91", 0]}}
        prompt["93"] = {"class_type": "SaveImage", "inputs": {**prompt[save]["inputs"], "images": ["92", 0]}}
        outputs = server.run(prompt)
        return [pixels(server, {name: outputs[name]})[0] for name in (save, "93")]

    both(True, next(SEEDS))
    before, seed = compiles(server), next(SEEDS)
    ours = both(True, seed)
    assert compiles(server) == before
    assert all(abs(one - other).max() <= 1 for one, other in zip(ours, both(False, seed), strict=True))


def test_workflows_that_take_turns(server, warm, workflow, check):
    for _ in range(2):
        check(server)
        check(server, lambda prompt: put_between(prompt, "ScaleAttention", factor=0.7))
        check(server, lambda prompt: prompt | {"1": {"class_type": "CheckpointLoaderSimple",
                                                     "inputs": {"ckpt_name": "tiny_sd15_other.ckpt"}}})  # fmt: skip


@pytest.mark.parametrize("arguments", [("--cache-none",), ("--cache-lru", "5"), ("--cache-classic",)], ids=" ".join)
def test_every_execution_cache(arguments, server, warm, own_home, workflow, check):
    if not server._comfyui or arguments[0] not in Path(server._comfyui, "comfy", "cli_args.py").read_text():
        pytest.skip(f"this ComfyUI has no {arguments[0]}")
    with ComfyServer(server._comfyui, own_home, arguments) as other:
        text = other.run(workflow(seed=next(SEEDS)))["2"]["text"][0]
        assert "Ready (loaded from disk, " in text
        for _ in range(3):
            check(other)
        assert compiles(other) == 0
