"""The workflows that people load, queued in a real server on tiny models of the same architectures."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import workflow_pictures
from PIL import Image, ImageSequence

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "workflows"
REFINER = json.loads((WORKFLOWS / "api" / "sdxl_base_and_refiner.json").read_text())
BASE_TEXT, REFINER_TEXT = 2048, 1280
BACKEND = "eager"


@pytest.fixture(scope="module")
def refiner_home(make_home):
    home = make_home("tiny_sdxl", "tiny_sdxl_refiner")
    (home / "custom_nodes").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("random_conditioning.py"), home / "custom_nodes")
    return home


def on_tiny_models(prompt):
    """Return the workflow with checkpoints that have no text encoders, a small image and two steps."""
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
    """Return the workflow of people who have no files yet, with Compile Model and VAE Speedup."""
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
    """Return the workflow without this extension's nodes."""
    sources = {("3", 0): ["1", 0], ("3", 1): ["1", 2], ("4", 0): ["2", 0], ("4", 1): ["1", 2]}
    kept = {name: node for name, node in prompt.items() if not node["class_type"].startswith("CG_")}
    for node in kept.values():
        links = {k: tuple(v) if isinstance(v, list) else None for k, v in node["inputs"].items()}
        node["inputs"] = {k: sources.get(links[k], v) for k, v in node["inputs"].items()}
    return kept


def pictures(pixels, server, outputs):
    return [pixels(server, {node: outputs[node]})[0] for node in ("13", "15")]


def test_base_and_refiner_load_after_a_restart(refiner_home, start_server, pixels):
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


def test_a_workflow_without_its_files_makes_them(refiner_home, start_server):
    shutil.rmtree(refiner_home / "models" / "compiled_graphs", ignore_errors=True)
    prompt = {node: on_tiny_models(REFINER)[node] for node in ("1", "2", "3", "4", "16", "17")}
    for node in ("16", "17"):
        del prompt[node]["inputs"]["after"]  # it links to the samplers, which this prompt lacks
    with start_server(refiner_home) as server:
        outputs = server.run(prompt)
        for node, name in (("3", "sdxl_base"), ("4", "sdxl_refiner")):
            assert outputs[node]["text"][0].startswith(f"There is no file {name} in models/compiled_graphs yet")
        assert "graphs saved to sdxl_base_00001_" in outputs["16"]["text"][0]
        assert "graphs saved to sdxl_refiner_00001_" in outputs["17"]["text"][0]


@dataclass(frozen=True)
class Tiny:
    """How a workflow becomes small: tiny models by the real names, widths of random text, and a factor for images."""

    models: dict[str, str]
    text: dict[str, int] | None = None
    shrink: int = 8


SD15 = {"v1-5-pruned-emaonly.safetensors": "tiny_sd15"}
TINY = {
    "text_to_image": Tiny(SD15),
    "lora_swap": Tiny(
        SD15 | {"add_detail.safetensors": "tiny_lora", "epiNoiseoffset_v2.safetensors": "tiny_lora_other"}
    ),
    "controlnet": Tiny(SD15 | {"control_v11p_sd15_canny_fp16.safetensors": "tiny_canny"}),
    "image_to_image_at_three_sizes": Tiny(SD15),
    "save_and_load": Tiny(SD15),
    "batch_queue": Tiny(SD15),
    "stable_diffusion_3": Tiny(
        {"sd3_medium_incl_clips.safetensors": "tiny_sd3_with_vae"}, {"width": 4096, "pooled_width": 2048}, 16
    ),
    "stable_video_diffusion": Tiny({"svd_xt.safetensors": "tiny_svd_with_vae"}),
    "flux": Tiny(
        {"flux1-dev.safetensors": "tiny_flux_unet", "ae.safetensors": "tiny_ae"},
        {"width": 4096, "pooled_width": 768},
        16,
    ),
}
PASSED_ON = {
    "CG_CompileModel": ["model"],
    "CG_VAESpeedup": ["vae"],
    "CG_ControlNetSpeedup": ["control_net"],
    "CG_CLIPSpeedup": ["clip"],
    "CG_LoadGraph": ["model", "vae", "control_net", "clip"],
}
"""For each of our nodes, the input that each of its outputs passes on."""
CHUNKED = {
    "sizes outside of what the graph was traced for",
    "what it computes depends on values (aten._local_scalar_dense.default)",
}
"""Why SVD's transformer blocks run uncompiled on a CPU: the index's build computes attention in chunks there."""


def read(name):
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())


def small(name, seed):
    """Return the workflow with tiny models, smaller images, two steps, and random conditioning if it needs that."""
    prompt = read(name)
    for number, node in prompt.items():
        inputs = node["inputs"]
        changes = {"seed": seed, "steps": 2, "video_frames": 3, "backend": BACKEND}
        changes |= {size: inputs[size] // TINY[name].shrink for size in ("width", "height") if size in inputs}
        changes |= {key: f"{TINY[name].models[value]}.ckpt" for key, value in inputs.items() if is_model(name, value)}
        inputs |= {key: value for key, value in changes.items() if key in inputs}
        if node["class_type"] == "CLIPTextEncode" and TINY[name].text:
            node |= {"class_type": "RandomConditioning", "inputs": {**TINY[name].text, "seed": int(number)}}
        elif node["class_type"] == "SVD_img2vid_Conditioning":
            node["class_type"] = "RandomVideoConditioning"
            del inputs["clip_vision"]
    return prompt


def is_model(name, value):
    return isinstance(value, str) and value in TINY[name].models


def without_ours(prompt):
    """Return the workflow with this extension's nodes bypassed."""

    def source(value):
        while isinstance(value, list) and (outputs := PASSED_ON.get(prompt[value[0]]["class_type"])):
            value = prompt[value[0]]["inputs"][outputs[value[1]]]
        return value

    kept = {name: node for name, node in prompt.items() if not node["class_type"].startswith("CG_")}
    return {
        name: {**node, "inputs": {key: source(value) for key, value in node["inputs"].items()}}
        for name, node in kept.items()
    }


def frames(server, outputs):
    """Return all images and all frames of animations, as one array [images, height, width, 3] per node."""

    def read_frames(references):
        for reference in references:
            with Image.open(io.BytesIO(server.image(reference))) as image:
                yield from (numpy.asarray(frame.convert("RGB"), dtype=int) for frame in ImageSequence.Iterator(image))

    shown = {node: output["images"] for node, output in outputs.items() if "images" in output}
    return {node: numpy.stack([*read_frames(references)]) for node, references in shown.items()}


def largest_difference(ones, others):
    assert ones.keys() == others.keys()
    return max(abs(ones[node] - others[node]).max() for node in ones)


def missing_nodes(server, name):
    return sorted({node["class_type"] for node in read(name).values()} - server.nodes)


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory, start_server):
    """A server that all these workflows share, with the tiny models of each workflow whose nodes it has."""
    home = tmp_path_factory.mktemp("workflows")
    server = start_server(home)
    shutil.copy(Path(__file__).with_name("random_conditioning.py"), home / "custom_nodes")
    picture = numpy.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype="uint8")
    Image.fromarray(picture).resize((128, 96)).save(home / "input" / "example.png")
    with server:
        server.nodes = server.get("/object_info").keys()
        models = {model for name in TINY if not missing_nodes(server, name) for model in TINY[name].models.values()}
        script = ROOT / "scripts" / "tiny_models.py"
        command = [sys.executable, str(script), "--comfyui", server._comfyui, "--out", str(home / "models")]
        subprocess.run([*command, *models], check=True, capture_output=True)
        yield server


@pytest.mark.parametrize("name", TINY)
def test_images_match_eager_and_new_seeds_compile_none(tiny_server, name):
    if missing := missing_nodes(tiny_server, name):
        pytest.skip(f"this ComfyUI has no {' and no '.join(missing)}")
    made = frames(tiny_server, tiny_server.run(small(name, seed=1)))
    wanted = frames(tiny_server, tiny_server.run(without_ours(small(name, seed=1))))
    assert largest_difference(made, wanted) <= 1
    assert all(images.std() > 5 for images in wanted.values())
    before = tiny_server.get("/compiled_graphs/registry")["totals"]
    again = frames(tiny_server, tiny_server.run(small(name, seed=2)))
    after = tiny_server.get("/compiled_graphs/registry")["totals"]
    assert largest_difference(made, again) > 1
    assert after["calls"] > before["calls"]
    assert after["compiles"] == before["compiles"]
    assert set(after["reasons"]) <= (
        CHUNKED if name == "stable_video_diffusion" and not tiny_server._comfyui else set()
    )


def test_save_and_load_compiles_then_takes_the_file(tiny_server):
    for path in (tiny_server.home / "models" / "compiled_graphs").glob("sd15_*"):
        path.unlink()
    texts = [tiny_server.run(small("save_and_load", seed))["2"]["text"][0] for seed in (3, 4)]
    assert texts[0].startswith("There is no file sd15 in models/compiled_graphs yet, so the model is compiled.")
    assert "Ready: 3 of 3 block types loaded from sd15_00001_ (" in texts[1]
    assert "VAE: Ready: 1 of 1 block types loaded from sd15_00001_ (" in texts[1]


def test_every_workflow_is_queued_by_a_test():
    named = {*TINY, "sdxl_base_and_refiner"}
    assert {workflow_pictures.api_name(path.stem) for path in WORKFLOWS.glob("*.json")} == named
    assert {path.stem for path in (WORKFLOWS / "api").glob("*.json")} == named
