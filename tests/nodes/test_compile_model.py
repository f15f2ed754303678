"""The Compile Model node over HTTP, in a server of its own process."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from comfy_fixtures import choices_of
from comfy_server import PromptFailed

ROOT = Path(__file__).resolve().parents[2]


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


def test_images_match_eager_and_only_one_compiles(fresh, workflow, pixels):
    shapes = [(128, 128, 1), (192, 96, 1), (96, 160, 2)]
    for number, (width, height, batch) in enumerate(shapes):
        before = totals(fresh)["compiles"]
        ours = pixels(fresh, fresh.run(workflow(width, height, batch)))
        assert totals(fresh)["compiles"] - before == (0 if number else 3)
        theirs = pixels(fresh, fresh.run(workflow(width, height, batch, compiled=False)))
        assert len(ours) == len(theirs) == batch
        assert max(abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) <= 1
        assert ours[0].std() > 5, "an image without content compares nothing"


def test_the_node_shows_what_it_did(server, workflow):
    outputs = server.run(workflow(seed=11))
    assert re.match(r"Ready(: 3 of 3 block types compiled \(| \(loaded from memory, )", outputs["2"]["text"][0]), (
        outputs["2"]["text"]
    )


def test_a_node_that_chooses_the_attention_keeps_the_model_compiled(server, workflow, pixels):
    if "ModelAttentionBackend" not in server.get("/object_info"):
        pytest.skip("this ComfyUI has no such node")

    def prompt(**settings):
        made = workflow(seed=13, **settings)
        sampler = next(node for node in made.values() if node["class_type"] == "KSampler")
        inputs = {"model": sampler["inputs"]["model"], "attention": "pytorch attention"}
        sampler["inputs"]["model"] = ["50", 0]
        return made | {"50": {"class_type": "ModelAttentionBackend", "inputs": inputs}}

    server.run(workflow(seed=14))
    before = totals(server)
    (ours,), (theirs,) = (pixels(server, server.run(prompt(compiled=compiled))) for compiled in (True, False))
    assert abs(ours - theirs).max() <= 1
    after = totals(server)
    assert after["calls"] > before["calls"]
    assert {name: after[name] - before[name] for name in ("compiles", "retired")} == {"compiles": 0, "retired": 0}
    assert after["reasons"] == before["reasons"]


def test_the_registry_knows_workflow_and_role(server, workflow):
    identity = "11111111-2222-3333-4444-555555555555"
    prompt = workflow(seed=12)
    prompt["2"]["inputs"]["verify"] = False  # so ComfyUI has not cached the node
    server.run(prompt, workflow={"id": identity})
    report = server.get("/compiled_graphs/registry")
    role = report["workflows"][identity]["roles"]["2:base UNet"]
    assert role["regions"] == role["compiled"] == role["variants"] == 3
    assert role["calls"] > 0
    assert role["reasons"] == {}
    assert set(role) == {*report["totals"], "graphs", "speed_up", "paces"}
    assert str(ROOT) not in json.dumps(report)


def test_every_input_and_output_is_explained(server):
    info = server.get("/object_info/CG_CompileModel")["CG_CompileModel"]
    assert info["display_name"] == "Compile Model"
    assert info["input"]["required"]["model"][0] == "MODEL"
    assert info["output"] == ["MODEL"]
    assert choices_of(info["input"]["optional"]["backend"]) == ["auto", "inductor", "inductor_fp8", "eager", "oneflow"]
    inputs = {**info["input"]["required"], **info["input"]["optional"]}
    assert all(spec[1]["tooltip"] for spec in inputs.values())
    assert info["description"]


def test_a_bypassed_node_passes_its_input_on(server):
    """ComfyUI's frontend replaces each output of a bypassed node by the first input of its type."""
    for name, node in server.get("/object_info").items():
        if name.startswith("CG_") and not node["output_node"]:
            inputs = [kind for group in ("required", "optional") for kind, *_ in node["input"].get(group, {}).values()]
            assert set(node["output"]) <= {kind for kind in inputs if isinstance(kind, str)}, name


def test_a_backend_that_does_not_exist_is_named(server, workflow):
    prompt = workflow()
    prompt["2"]["inputs"]["backend"] = "nonsense"
    try:
        said = server.run(prompt)["2"]["text"][0]
    except PromptFailed as refused:  # newer versions check optional inputs themselves
        said = str(refused)
    assert "nonsense" in said


def test_interrupting_a_prompt_leaves_the_queue_going(server, workflow, pixels):
    running = server.queue(workflow(256, 256, 2, steps=200, seed=14))
    deadline = time.monotonic() + 30
    while not server.get("/queue")["queue_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    while server.get("/queue")["queue_running"]:  # an interruption that comes before the first node is lost
        server.post("/interrupt")
        time.sleep(0.1)
    with contextlib.suppress(PromptFailed):  # older versions report an interrupted prompt as done
        server.wait(running)
    assert pixels(server, server.run(workflow(seed=15)))


def test_the_frontend_module_is_served(server):
    extensions = server.get("/extensions")
    module = next((path for path in extensions if path.endswith("compiled_graphs.js")), None)
    assert module
    with urllib.request.urlopen(server.address + module) as answer:
        assert b"registerExtension" in answer.read()


def test_installed_twice_it_works_once(home, start_server, workflow):
    second = home / "custom_nodes" / "compiled-graphs-copy"
    second.parent.mkdir(exist_ok=True)
    second.symlink_to(ROOT, target_is_directory=True)
    try:
        with start_server() as both:
            assert "Ready" in both.run(workflow(seed=18))["2"]["text"][0]
            assert totals(both)["calls"] > 0
            assert "installed twice" in both.log.read_text()
    finally:
        second.unlink()


def test_a_restart_compiles_nothing(server, start_server, workflow):
    server.run(workflow(seed=16))
    with start_server() as restarted:
        outputs = restarted.run(workflow(seed=17))
        assert "Ready (loaded from disk, " in outputs["2"]["text"][0]
        assert totals(restarted)["compiles"] == 0
