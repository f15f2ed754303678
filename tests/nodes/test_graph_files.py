"""Save Graph and Load Graph over HTTP, in servers of their own processes."""

from __future__ import annotations

import re

import pytest
from comfy_server import PromptFailed


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


@pytest.fixture
def saving(workflow):
    def make(**sampler):
        prompt = workflow(**sampler)
        inputs = {"model": ["2", 0], "filename_prefix": "tiny", "after": ["6", 0]}
        prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": inputs}
        return prompt

    return make


@pytest.fixture
def loading(workflow):
    def make(graph, **sampler):
        prompt = workflow(**sampler)
        prompt["2"] = {"class_type": "CG_LoadGraph", "inputs": {"model": ["1", 0], "graph": graph}}
        return prompt

    return make


@pytest.fixture(scope="module")
def graph_files(home):
    return home / "models" / "compiled_graphs"


def saved_name(text):
    return re.search(r"tiny_\d{5}_\.graph\.safetensors", text)[0]


def test_what_was_saved_loads_after_a_restart_without_tracing_or_compiling(home, start_server, saving, loading, pixels):
    with start_server() as first:
        outputs = first.run(saving(seed=1))
        text = outputs["9"]["text"][0]
        assert re.fullmatch(r"3 graphs saved to tiny_\d{5}_\.graph\.safetensors, 0\.\d MB", text), text
        name, (image,) = saved_name(text), pixels(first, outputs)
    for stored in (home / "graphs").iterdir():
        stored.unlink()
    with start_server() as restarted:
        outputs = restarted.run(loading(name, seed=1))
        text = outputs["2"]["text"][0]
        label = name.removesuffix(".graph.safetensors")
        assert re.fullmatch(rf"3 of 3 regions from {label}, 0 compiled, [\d.]+ s", text), text
        counts = totals(restarted)
        assert (counts["compiles"], counts["from_file"], counts["from_disk"]) == (0, 3, 0)
        assert counts["reasons"] == {}
        assert abs(pixels(restarted, outputs)[0] - image).max() <= 1


def test_a_model_that_was_never_compiled_is_compiled_and_saved(server, workflow, graph_files):
    prompt = {"1": workflow()["1"]}
    prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": {"model": ["1", 0], "filename_prefix": "early/graph"}}
    text = server.run(prompt)["9"]["text"][0]
    assert "3 graphs saved to graph_00001_" in text
    assert "compiled now: 3 regions" in text
    assert (graph_files / "early" / "graph_00001_.graph.safetensors").stat().st_size > 1000


def test_a_file_that_is_missing_is_named_and_the_image_still_comes(server, loading):
    outputs = server.run(loading("absent.graph.safetensors", seed=2))
    assert outputs["2"]["text"][0].startswith("absent.graph.safetensors is not in models/compiled_graphs")
    assert outputs["8"]["images"]


@pytest.mark.parametrize("name", ["../checkpoints/tiny_sd15.ckpt", "/etc/passwd", "C:\\x.graph.safetensors", "a\0b"])
def test_a_name_cannot_leave_the_folder(server, loading, name):
    outputs = server.run(loading(name, seed=3))
    assert "is not in models/compiled_graphs" in outputs["2"]["text"][0]


def test_a_prefix_cannot_leave_the_folder(server, workflow, graph_files):
    prompt = {"1": workflow()["1"]}
    prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": {"model": ["1", 0], "filename_prefix": "../../outside"}}
    with pytest.raises(PromptFailed, match="outside"):
        server.run(prompt)
    assert not list(graph_files.parent.parent.glob("outside*"))


@pytest.mark.parametrize("damage", ["cut", "edited"])
def test_a_damaged_file_is_named_and_the_image_still_comes(server, saving, loading, graph_files, damage):
    name = saved_name(server.run(saving(seed=4 + len(damage)))["9"]["text"][0])
    data = (graph_files / name).read_bytes()
    broken = graph_files / f"{damage}.graph.safetensors"
    broken.write_bytes(data[:5000] if damage == "cut" else data.replace(b"ResBlock", b"ResBlock".swapcase()))
    outputs = server.run(loading(broken.name, seed=5))
    assert outputs["2"]["text"][0].startswith(f"{broken.name} ")
    assert "compiled" in outputs["2"]["text"][0]
    assert outputs["8"]["images"]
