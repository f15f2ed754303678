"""Save Graph and Load Graph over HTTP, in servers of their own processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from comfy_fixtures import choices_of
from compiled_graphs.__main__ import main
from compiled_graphs.compiler.storage.graph_file import read_graphs, write_graphs
from compiled_graphs.compiler.storage.trust import Trust


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


@pytest.fixture
def saving(workflow):
    def make(**sampler):
        prompt = workflow(**sampler)
        inputs = {"model": ["2", 0], "vae": ["1", 2], "filename_prefix": "tiny", "after": ["6", 0]}
        prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": inputs}
        return prompt

    return make


@pytest.fixture
def loading(workflow):
    def make(graph, **sampler):
        prompt = workflow(**sampler)
        inputs = {"model": ["1", 0], "vae": ["1", 2], "graph": graph, "backend": "eager"}
        prompt["2"] = {"class_type": "CG_LoadGraph", "inputs": inputs}
        next(node for node in prompt.values() if node["class_type"] == "VAEDecode")["inputs"]["vae"] = ["2", 1]
        return prompt

    return make


@pytest.fixture(scope="module")
def graph_files(home):
    return home / "models" / "compiled_graphs"


def read_header(data):
    """Return the metadata of a safetensors file, and its header and data unchanged."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return header["__metadata__"], (header, data[8 + size :])


def write_header(metadata, rest):
    header, body = rest
    text = json.dumps(header | {"__metadata__": metadata}).encode()
    return len(text).to_bytes(8, "little") + text + body


SUFFIX = ".graph.safetensors"


def saved_name(text):
    return re.search(r"tiny_\d{5}_\.graph\.safetensors", text)[0]


def test_a_saved_file_loads_after_a_restart(home, start_server, saving, loading, pixels):
    shutil.rmtree(home / "graphs", ignore_errors=True)  # what other tests compiled
    with start_server() as first:
        prompt = saving(seed=1)
        prompt["10"] = {"class_type": "CG_CLIPSpeedup", "inputs": {"clip": ["1", 1], "backend": "eager"}}
        prompt["9"]["inputs"]["clip"] = ["10", 0]
        outputs = first.run(prompt)
        text = outputs["9"]["text"][0].splitlines()
        assert re.fullmatch(r"5 graphs saved to tiny_\d{5}_\.graph\.safetensors, \d\.\d MB", text[0]), text
        assert text[1].startswith("Compiled now: Ready: 1 of 1 block types compiled (")
        name, (image,) = saved_name(text[0]), pixels(first, outputs)
    shutil.rmtree(home / "graphs")
    shutil.rmtree(home / "inductor")
    with start_server() as restarted:
        prompt = loading(name, seed=1)
        prompt["2"]["inputs"]["clip"] = ["1", 1]
        for node in prompt.values():
            if node["class_type"] == "CLIPTextEncode":
                node["inputs"]["clip"] = ["2", 3]
        outputs = restarted.run(prompt)
        text = outputs["2"]["text"][0]
        label = name.removesuffix(".graph.safetensors")
        of = rf"block types loaded from {label} \([\d.]+ s\)\."
        assert re.fullmatch(rf"Ready: 3 of 3 {of}\nVAE: Ready: 1 of 1 {of}\nCLIP: Ready: 1 of 1 {of}", text), text
        counts = totals(restarted)
        assert (counts["compiles"], counts["from_file"], counts["from_disk"]) == (0, 5, 0)
        assert counts["reasons"] == {}
        assert abs(pixels(restarted, outputs)[0] - image).max() <= 1
        roles = next(iter(restarted.get("/compiled_graphs/registry")["workflows"].values()))["roles"]
        labels = {"2:base UNet": 3, "2:VAE": 1, "2:text encoder": 1}
        assert {name: role["from_file"] for name, role in roles.items()} == labels
        assert all(role["calls"] > 0 for role in roles.values())


def test_what_a_file_lacks_is_compiled_and_named(fresh, loading, workflow):
    prompt = {"1": workflow()["1"]}
    prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": {"vae": ["1", 2], "filename_prefix": "tiny"}}
    name = saved_name(fresh.run(prompt)["9"]["text"][0])
    outputs = fresh.run(loading(name, seed=21))
    lines = outputs["2"]["text"][0].splitlines()
    label = name.removesuffix(".graph.safetensors")
    assert lines[0].startswith(f"Ready: 0 of 3 block types loaded from {label}, 3 compiled here (")
    assert lines[-1].startswith("VAE: Ready: 1 of 1 block types loaded from ")
    assert outputs["8"]["images"]


def test_a_foreign_file_lists_what_is_compiled(server, loading, graph_files, saving, pixels):
    outputs = server.run(saving(seed=22))
    name = saved_name(outputs["9"]["text"][0])
    data = (graph_files / name).read_bytes()
    metadata, rest = read_header(data)
    metadata["signature"] = "0" * 64
    (graph_files / "theirs.graph.safetensors").write_bytes(write_header(metadata, rest))
    loaded = server.run(loading("theirs.graph.safetensors", seed=22))
    text = loaded["2"]["text"][0]
    assert text.startswith(
        "theirs.graph.safetensors was not made on this machine, so its 4 graphs are compiled here"
    ), text
    assert totals(server)["from_file"] == 0
    assert abs(pixels(server, loaded)[0] - pixels(server, outputs)[0]).max() <= 1


def test_a_file_of_a_signer_names_him_and_the_command_that_trusts_him(
    server, home, loading, graph_files, saving, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("cryptography")
    name = saved_name(server.run(saving(seed=41))["9"]["text"][0])
    theirs = Trust(tmp_path / "theirs")
    fingerprint = theirs.maker.make()
    graphs = read_graphs((graph_files / name).read_bytes(), Trust(home / "trust"))
    (graph_files / "signed.graph.safetensors").write_bytes(write_graphs(graphs, theirs))
    text = server.run(loading("signed", seed=41))["2"]["text"][0]
    assert text.startswith(
        f"signed.graph.safetensors is signed by {fingerprint}, whom the owner of this machine has not"
    )
    (command,) = re.findall(r"python -m \S+ (trust add SHA256:\S+)", text)
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(home / "trust"))
    assert main([*command.split(), "--yes"]) == 0
    try:
        text = server.run(loading("signed.graph.safetensors", seed=42))["2"]["text"][0]
        assert text.startswith("Ready: 3 of 3 block types loaded from signed (")
    finally:
        main(["trust", "remove", fingerprint])


def with_environment(graph, number, **fields):
    return replace(graph, key=f"{number:02}" * 32, environment={**graph.environment, **fields})


def test_a_bundle_gives_what_fits_and_says_what_does_not(fresh, home, tmp_path, loading, graph_files, saving):
    name = saved_name(fresh.run(saving(seed=43))["9"]["text"][0])
    trust = Trust(tmp_path / "trust")
    graphs = read_graphs((graph_files / name).read_bytes(), trust)
    others = [with_environment(graph, number, torch="1.0") for number, graph in enumerate(graphs)]
    (graph_files / "whole.graph.safetensors").write_bytes(write_graphs([*others, *graphs], trust))
    text = fresh.run(loading("whole", seed=44))["2"]["text"][0]
    assert text.startswith("Ready: 3 of 3 block types loaded from whole (")
    assert "1.0" not in text, "what others need is nothing that is missing here"
    unet = [graph for graph in graphs if graph.spec.region != "Decoder"]
    part = [graph for graph in graphs if graph is not unet[0]]
    (graph_files / "part.graph.safetensors").write_bytes(write_graphs([*others, *part], trust))
    lines = fresh.run(loading("part", seed=45))["2"]["text"][0].splitlines()
    assert lines[0].startswith("Ready: 2 of 3 block types loaded from part")
    assert any(line.startswith("1 graphs of the file were made for torch 1.0, and this is ") for line in lines)


def test_a_workflow_names_the_file_it_means_and_where_it_is_had(server, loading, graph_files, saving):
    name = saved_name(server.run(saving(seed=46))["9"]["text"][0])
    digest = hashlib.sha256((graph_files / name).read_bytes()).hexdigest()

    def said(file, **named):
        prompt = loading(file, seed=47)
        prompt["2"]["inputs"] |= named
        return server.run(prompt)["2"]["text"][0]

    where = {"where": "https://example.org/graphs\nor ask"}
    assert said(name, digest=f"SHA256:{digest.upper()}", **where).startswith("Ready: 3 of 3 block types loaded from ")
    another = said(name, digest="0" * 64, **where).splitlines()[0]
    assert another.startswith(f"{name} is not the file that the workflow names")
    assert digest in another
    assert another.endswith("The workflow says where to get it: https://example.org/graphs or ask")
    missing = said("absent", digest=digest, **where).splitlines()[0]
    assert missing.startswith("There is no file absent in models/compiled_graphs yet")
    assert missing.endswith("https://example.org/graphs or ask")


def test_save_with_nothing_connected_writes_nothing(server, graph_files):
    before = sorted(graph_files.rglob("*"))
    prompt = {"9": {"class_type": "CG_SaveGraph", "inputs": {"filename_prefix": "none"}}}
    assert server.run(prompt)["9"]["text"] == ["Nothing was saved.\nConnect a model, a VAE, a ControlNet or a CLIP."]
    assert sorted(graph_files.rglob("*")) == before


def test_an_unwritable_folder_still_gives_an_image(server, saving, graph_files):
    prompt = saving(seed=23)
    prompt["9"]["inputs"]["filename_prefix"] = "blocked/x"
    (graph_files / "blocked").mkdir(parents=True)
    (graph_files / "blocked" / "x_00001_.graph.safetensors").mkdir()
    outputs = server.run(prompt)
    assert "could not be written" in outputs["9"]["text"][0] or "graphs saved to x_00002_" in outputs["9"]["text"][0]
    assert outputs["8"]["images"]


def test_a_prefix_that_is_a_file_still_gives_an_image(server, saving, graph_files):
    prompt = saving(seed=24)
    prompt["9"]["inputs"]["filename_prefix"] = "file/x"
    graph_files.mkdir(parents=True, exist_ok=True)
    (graph_files / "file").write_text("")
    outputs = server.run(prompt)
    assert re.match(r"file/x could not be written \(.+\): make room", outputs["9"]["text"][0])
    assert outputs["8"]["images"]


def test_save_compiles_an_uncompiled_model(server, workflow, graph_files):
    prompt = {"1": workflow()["1"]}
    prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": {"model": ["1", 0], "filename_prefix": "early/graph"}}
    text = server.run(prompt)["9"]["text"][0]
    assert "3 graphs saved to graph_00001_" in text
    assert "Compiled now: Ready" in text
    assert (graph_files / "early" / "graph_00001_.graph.safetensors").stat().st_size > 1000


def test_what_cannot_be_compiled_is_not_said_to_be_compiled(server):
    loader = server.get("/object_info/VAELoader")["VAELoader"]
    if "pixel_space" not in choices_of(loader["input"]["required"]["vae_name"]):
        pytest.skip("this ComfyUI has no VAE without a network")
    prompt = {"1": {"class_type": "VAELoader", "inputs": {"vae_name": "pixel_space"}}}
    prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": {"vae": ["1", 0], "filename_prefix": "none"}}
    assert re.fullmatch(r"Nothing was saved\.\nNot compiled: .+", server.run(prompt)["9"]["text"][0])


def test_a_missing_file_is_named_and_gives_an_image(server, loading):
    outputs = server.run(loading("absent.graph.safetensors", seed=2))
    assert outputs["2"]["text"][0].startswith("There is no file absent in models/compiled_graphs yet")
    assert outputs["8"]["images"]


def test_the_newest_of_a_name_can_be_chosen_and_no_choice_looks_like_a_model(server, saving, loading, graph_files):
    name = saved_name(server.run(saving(seed=33))["9"]["text"][0])
    newest = graph_files / f"tiny_99999_{SUFFIX}"
    shutil.copy(graph_files / name, newest)
    try:
        node = server.get("/object_info/CG_LoadGraph")["CG_LoadGraph"]
        choices = choices_of(node["input"]["required"]["graph"])
        assert choices[0].endswith(" (newest)")
        assert {"tiny (newest)", "tiny_99999_", name.removesuffix(SUFFIX)} <= set(choices)
        assert not [choice for choice in choices if choice.endswith(".safetensors")]
        outputs = server.run(loading("tiny (newest)", seed=34))
        assert outputs["2"]["text"][0].startswith("Ready: 3 of 3 block types loaded from tiny_99999_ (")
        outputs = server.run(loading(name.removesuffix(SUFFIX), seed=35))
        assert f"loaded from {name.removesuffix(SUFFIX)} (" in outputs["2"]["text"][0]
    finally:
        newest.unlink()


def test_without_a_file_to_choose_the_node_says_where_one_comes_from(server, loading):
    text = server.run(loading("none", seed=36))["2"]["text"][0]
    assert text.startswith("No graph file is chosen, so the model is compiled. Save Graph writes one.")


def test_a_folder_deleted_at_run_time_counts_as_empty(server, saving, loading, graph_files):
    name = saved_name(server.run(saving(seed=31))["9"]["text"][0])
    server.get("/object_info/CG_LoadGraph")  # ComfyUI has listed the folder now
    shutil.rmtree(graph_files)
    try:
        outputs = server.run(loading(name, seed=32))
        assert outputs["2"]["text"][0].startswith(
            f"There is no file {name.removesuffix(SUFFIX)} in models/compiled_graphs yet"
        )
    finally:
        graph_files.mkdir(exist_ok=True)


@pytest.mark.parametrize("name", ["../checkpoints/tiny_sd15.ckpt", "/etc/passwd", "C:\\x.graph.safetensors", "a\0b"])
def test_a_name_cannot_leave_the_folder(server, loading, name):
    outputs = server.run(loading(name, seed=3))
    assert outputs["2"]["text"][0].startswith("There is no file ")
    assert "in models/compiled_graphs yet" in outputs["2"]["text"][0]


def test_a_prefix_cannot_leave_the_folder(server, workflow, graph_files):
    prompt = {"1": workflow()["1"]}
    prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": {"model": ["1", 0], "filename_prefix": "../../outside"}}
    assert "outside of the folder of graphs" in server.run(prompt)["9"]["text"][0], "the prompt goes on"
    assert not list(graph_files.parent.parent.glob("outside*"))


@pytest.mark.parametrize("damage", ["cut", "edited"])
def test_a_damaged_file_is_named_and_gives_an_image(server, saving, loading, graph_files, damage):
    name = saved_name(server.run(saving(seed=4 + len(damage)))["9"]["text"][0])
    data = (graph_files / name).read_bytes()
    broken = graph_files / f"{damage}.graph.safetensors"
    broken.write_bytes(data[:5000] if damage == "cut" else data.replace(b"ResBlock", b"ResBlock".swapcase()))
    outputs = server.run(loading(broken.name, seed=5))
    assert outputs["2"]["text"][0].startswith(f"{broken.name} ")
    assert "compiled" in outputs["2"]["text"][0]
    assert outputs["8"]["images"]


def forge(data, how, path):
    """Write a file that a stranger could send, to waste time or to break the reader."""
    metadata, rest = read_header(data)
    if how == "a pipe":
        os.mkfifo(path)
        return
    if how == "half a character":
        metadata["signature"] = "\ud800"
    if how == "numbers for lists":
        manifest = json.loads(metadata["compiled_graphs"])
        for item in manifest["graphs"][0]["spec"]["inputs"]:
            item |= {"hints": 5, "symbolic": 5}
        metadata["compiled_graphs"] = json.dumps(manifest)
    path.write_bytes(write_header(metadata, rest) if how != "lists" else (2**22).to_bytes(8, "little") + b"[]," * 2**21)
    if how == "a giant":
        path.write_bytes(b"")
        os.truncate(path, 6 * 2**30)


@pytest.mark.parametrize("how", ["half a character", "numbers for lists", "lists", "a giant", "a pipe"])
def test_a_forged_file_is_named_and_gives_an_image(server, saving, loading, graph_files, how):
    if how == "a pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("no pipes with names")
    name = saved_name(server.run(saving(seed=31))["9"]["text"][0])
    forged = graph_files / f"{how}.graph.safetensors"
    forge((graph_files / name).read_bytes(), how, forged)
    try:
        outputs = server.run(loading(forged.name, seed=31))
    finally:
        forged.unlink()
    first, *others = outputs["2"]["text"][0].splitlines()
    assert forged.name.removesuffix(SUFFIX) in first
    assert "compiled" in first
    assert len(others) == 2
    assert outputs["8"]["images"]
