"""The workflows that people load, queued in a real server on tiny models of the same architectures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFINER = json.loads((ROOT / "workflows" / "sdxl_base_refiner.api.json").read_text())
BASE_TEXT, REFINER_TEXT = 2048, 1280
BACKEND = "eager"


@pytest.fixture(scope="module")
def refiner_home(make_home):
    home = make_home("tiny_sdxl", "tiny_sdxl_refiner")
    (home / "custom_nodes").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("random_conditioning.py"), home / "custom_nodes")
    return home


def on_tiny_models(prompt):
    """The workflow with checkpoints without text encoders, a small picture and two steps."""
    prompt = json.loads(json.dumps(prompt))
    prompt["1"]["inputs"]["ckpt_name"] = "tiny_sdxl.ckpt"
    prompt["2"]["inputs"]["ckpt_name"] = "tiny_sdxl_refiner.ckpt"
    for number, (node, width) in enumerate(zip("5678", [BASE_TEXT] * 2 + [REFINER_TEXT] * 2, strict=True)):
        prompt[node] = {"class_type": "RandomConditioning", "inputs": {"width": width, "seed": number}}
    prompt["9"]["inputs"] |= {"width": 128, "height": 96}
    for node in ("3", "4"):
        prompt[node]["inputs"]["backend"] = BACKEND
    for node, steps in (("10", (0, 1)), ("11", (1, 2))):
        prompt[node]["inputs"] |= {"steps": 2, "start_at_step": steps[0], "end_at_step": steps[1]}
    return prompt


def compiled_not_loaded(prompt):
    """The workflow as people have it before there are files: Compile Model and VAE Speedup."""
    prompt = dict(prompt)
    for node, checkpoint in (("3", "1"), ("4", "2")):
        inputs = {"model": [checkpoint, 0], "backend": BACKEND}
        prompt[node] = {"class_type": "CG_CompileModel", "inputs": inputs}
        vae = f"{node}0"
        prompt[vae] = {"class_type": "CG_VAESpeedup", "inputs": {"vae": ["1", 2], "backend": BACKEND}}
        for other in prompt.values():
            other["inputs"] = {k: [vae, 0] if v == [node, 1] else v for k, v in other["inputs"].items()}
    return prompt


def uncompiled(prompt):
    """The workflow without this extension's nodes."""
    sources = {("3", 0): ["1", 0], ("3", 1): ["1", 2], ("4", 0): ["2", 0], ("4", 1): ["1", 2]}
    kept = {name: node for name, node in prompt.items() if not node["class_type"].startswith("CG_")}
    for node in kept.values():
        links = {k: tuple(v) if isinstance(v, list) else None for k, v in node["inputs"].items()}
        node["inputs"] = {k: sources.get(links[k], v) for k, v in node["inputs"].items()}
    return kept


def pictures(pixels, server, outputs):
    return [pixels(server, {node: outputs[node]})[0] for node in ("13", "15")]


def test_base_and_refiner_that_share_a_vae_are_saved_and_loaded_after_a_restart(refiner_home, start_server, pixels):
    prompt = on_tiny_models(REFINER)
    with start_server(refiner_home) as first:
        wanted = pictures(pixels, first, first.run(uncompiled(on_tiny_models(REFINER))))
        outputs = first.run(compiled_not_loaded(on_tiny_models(REFINER)))
        made = pictures(pixels, first, outputs)
        assert [outputs[node]["text"][0].split(",")[0] for node in ("16", "17")] == [
            "6 graphs saved to sdxl_base_00001_.graph.safetensors",
            "4 graphs saved to sdxl_refiner_00001_.graph.safetensors",
        ]
    shutil.rmtree(refiner_home / "graphs")
    with start_server(refiner_home) as restarted:
        outputs = restarted.run(prompt)
        loaded = pictures(pixels, restarted, outputs)
        report = restarted.get("/compiled_graphs/registry")
        totals, (workflow,) = report["totals"], report["workflows"].values()
        assert (totals["compiles"], totals["from_disk"], totals["reasons"]) == (0, 0, {})
        roles = {name: (role["from_file"], role["from_memory"]) for name, role in workflow["roles"].items()}
        assert roles == {
            "3:base UNet": (5, 0),
            "3:VAE": (1, 0),
            "4:refiner UNet": (3, 0),
            "4:VAE": (0, 1),
        }
        assert all(role["calls"] > 0 for role in workflow["roles"].values())
        assert outputs["16"]["text"] == ["6 graphs are in sdxl_base_00001_.graph.safetensors already"]
    for images in (made, loaded):
        assert max(abs(a - b).max() for a, b in zip(images, wanted, strict=True)) <= 1
    assert wanted[0].std() > 5
    assert abs(wanted[0] - wanted[1]).max() > 5, "the refiner did nothing"


def test_without_its_files_the_workflow_compiles_and_makes_them(refiner_home, start_server):
    shutil.rmtree(refiner_home / "models" / "compiled_graphs", ignore_errors=True)
    prompt = {node: on_tiny_models(REFINER)[node] for node in ("1", "2", "3", "4", "16", "17")}
    for node in ("16", "17"):
        del prompt[node]["inputs"]["after"]  # the samplers
    with start_server(refiner_home) as server:
        outputs = server.run(prompt)
        for node, name in (("3", "sdxl_base"), ("4", "sdxl_refiner")):
            assert outputs[node]["text"][0].startswith(f"{name}_00001_.graph.safetensors is not in models/")
        assert "graphs saved to sdxl_base_00001_" in outputs["16"]["text"][0]
        assert "graphs saved to sdxl_refiner_00001_" in outputs["17"]["text"][0]
