"""Baking in real servers: what it makes is what a server then asks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import comfy_server
import pytest
import torch
from comfy_fixtures import COMFYUI
from compiled_graphs.__main__ import main
from compiled_graphs.baking.stand_in import copy_headers
from compiled_graphs.compiler.hosts.comfy.known_networks import NETWORKS
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "workflows" / "01 Text to image.json"


@pytest.fixture
def place(make_home, tmp_path, monkeypatch):
    """A base folder with the tiny model and nothing compiled, and this process set up like its servers."""
    home = make_home("tiny_sd15")
    monkeypatch.setenv("COMPILED_GRAPHS_STORE", str(home / "graphs"))
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(home / "trust"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
    return home


@pytest.fixture
def bake(place, capsys):
    """Run `bake` with ComfyUI's options for a base folder. Return its status and what it says."""

    def run(*arguments, home=place):
        config = comfy_server.ComfyServer(COMFYUI, home)._folder_arguments() if COMFYUI else ["--cwd", str(home)]
        where = ["--comfyui", COMFYUI] if COMFYUI else []
        status = main(["bake", *where, *map(str, arguments), "--", *config])
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def written(tmp_path, workflow):
    """Write the tiny model's prompt to a file."""

    def write(**changes):
        prompt = workflow()
        prompt["2"]["inputs"] |= changes
        (tmp_path / "prompt.json").write_text(json.dumps(prompt))
        return tmp_path / "prompt.json"

    return write


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


def saved_from_the_frontend(tmp_path, checkpoint):
    """Return the path of the example that the frontend saved, with another checkpoint."""
    text = EXAMPLE.read_text(encoding="utf-8").replace("v1-5-pruned-emaonly.safetensors", checkpoint)
    path = tmp_path / "saved.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_baked_is_what_a_server_asks_for(bake, place, written, workflow, start_server, tmp_path):
    status, said = bake(written(), "--verify", "--arch", "8.9")
    assert status == 1, said
    assert "3 of 3 block types, 3 graphs" in said
    assert "3 of them compiled now" in said
    assert "3 of 3 graphs agree with eager on random weights" in said
    assert "Not had for compute capability 8.9" in said
    assert "3 graphs compiled, 0 found" in said
    with start_server(place) as server:
        server.run(workflow())
        counts = totals(server)
        assert (counts["compiles"], counts["from_disk"]) == (0, 3)
    # The same by a header, from the form that the frontend saves, in a folder without any model.
    state = torch.load(place / "models" / "checkpoints" / "tiny_sd15.ckpt", weights_only=True)["state_dict"]
    weights = tmp_path / "models" / "checkpoints"
    weights.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights / "tiny_copy.safetensors")
    copy_headers(tmp_path / "models", tmp_path / "headers")
    (weights / "tiny_copy.safetensors").unlink()
    path, bundle = saved_from_the_frontend(tmp_path, "tiny_copy.safetensors"), tmp_path / "all"
    (tmp_path / "empty").mkdir()
    status, said = bake(
        path, "--headers", tmp_path / "headers", "--backend", "eager", "--bundle", bundle, home=tmp_path / "empty"
    )
    assert "0 graphs compiled, 3 found" in said, said
    assert "all.graph.safetensors: 3 graphs" in said
    assert status == 0


def test_a_missing_model_is_named(bake, written, tmp_path):
    (tmp_path / "empty").mkdir()
    status, said = bake(written(), home=tmp_path / "empty")
    assert status == 1
    assert "CheckpointLoaderSimple (node 1)" in said
    assert "tiny_sd15.ckpt" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "it is not JSON"), ("{}", "neither a workflow nor a prompt"), (None, "it cannot be read")],
)
def test_a_file_that_is_no_workflow_is_named(text, sentence, tmp_path, capsys, monkeypatch):
    from compiled_graphs.baking import command

    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(command.WorkflowError, match=sentence):
        command.to_prompt(command._read(path), {})


def test_nothing_to_bake_is_one_sentence(capsys):
    assert main(["bake"]) == 2
    assert "name workflows, or networks with --model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"), [("SDXXL", "The sizes of SDXXL|sizes of SDXXL"), ("SDXL:fp4", "no dtype fp4")]
)
def test_an_unknown_network_is_refused(name, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["bake", "--model", name])
    assert re.search(sentence, capsys.readouterr().err)


def test_a_network_by_name_needs_no_weights(bake):
    """The smallest of those that are known, in the ComfyUIs that have it."""
    name = "WAN21_T2V_1.3B" if COMFYUI else "SD15"
    status, said = bake("--model", name, "--backend", "eager")
    assert status == 0, said
    kinds = {"WAN21_T2V_1.3B": 1, "SD15": 15}[name]
    assert f"{kinds} graphs compiled, 0 found" in said
    assert NETWORKS[name].dtype in said


@pytest.fixture
def recipe(tmp_path, place):
    """Return what the page about fleets runs at build and in the image, with this test's folders and this Python."""
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8").partition("## Bake graphs into an image")[2]
    blocks = re.findall(r"(?:^    .+\n)+", page.partition("\n## ")[0], re.MULTILINE)
    (tmp_path / "build").mkdir()
    config = comfy_server.ComfyServer(COMFYUI, place)._folder_arguments() if COMFYUI else ["--cwd", str(place)]

    def localised(line):
        changes = {"python -m compiled-graphs": f"{sys.executable} -m compiled_graphs", "/opt/image": str(place)}
        for theirs, ours in {**changes, "/opt/build": str(tmp_path / "build")}.items():
            line = line.replace(theirs, ours)
        return f"{line} -- {' '.join(config)}" if " bake " in line else line

    return ["\n".join(["set -e", *map(localised, block.splitlines())]) for block in blocks[:2]]


@pytest.mark.skipif(os.name == "nt", reason="the page's commands are a shell's")
@pytest.mark.usefixtures("cpp_compiler")
def test_the_recipe_for_an_image_gives_a_first_prompt_that_compiles_nothing(
    recipe, place, workflow, start_server, tmp_path, monkeypatch
):
    """As the page says, with Inductor and a key that stays with the builder; where no compiler starts."""
    pytest.importorskip("cryptography")
    prompt = workflow()
    prompt["2"]["inputs"]["backend"] = "inductor"
    (tmp_path / "build" / "workflow.json").write_text(json.dumps(prompt))
    for block in recipe:
        done = subprocess.run(["bash", "-c", block], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    before = {path.name: path.stat().st_size for path in (place / "graphs").iterdir()}
    shutil.rmtree(place / "inductor")  # the recipe's; on a CPU the graphs do without it
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path / "build"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("COMPILED_GRAPHS_LISTEN", "warm")
    seconds = {}
    for name, asked in (("eager", workflow(compiled=False)), ("baked", prompt)):
        with start_server(place) as server:
            start = time.perf_counter()
            server.run(asked)
            seconds[name] = time.perf_counter() - start
            counts = totals(server)
    print("first prompt: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    assert (counts["compiles"], counts["from_disk"], counts["retired"], counts["reasons"]) == (0, 3, 0, {})
    assert {path.name: path.stat().st_size for path in (place / "graphs").iterdir()} == before
