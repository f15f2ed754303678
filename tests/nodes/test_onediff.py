"""Workflows made with OneDiff's nodes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from comfy_server import PromptFailed
from safetensors.torch import save_file

SOCKETS = {
    "ModelSpeedup": (["model", "custom_booster", "inplace"], ["MODEL"]),
    "VaeSpeedup": (["vae", "custom_booster", "inplace"], ["VAE"]),
    "ControlnetSpeedup": (["control_net", "inplace", "custom_booster"], ["CONTROL_NET"]),
    "ControlNetSpeedup": (["control_net", "static_mode"], ["CONTROL_NET"]),
    "SVDSpeedup": (["model", "inplace", "cache_name", "custom_booster"], ["MODEL"]),
    "ModuleDeepCacheSpeedup": (
        ["model", "static_mode", "cache_interval", "cache_layer_id", "cache_block_id", "start_step", "end_step"],
        ["MODEL"],
    ),
    "BatchSizePatcher": (["model", "latent_image"], ["MODEL"]),
    "OneDiffCheckpointLoaderSimple": (["ckpt_name", "vae_speedup", "custom_booster"], ["MODEL", "CLIP", "VAE"]),
    "OneDiffDeepCacheCheckpointLoaderSimple": (
        [
            *("ckpt_name", "vae_speedup", "static_mode", "cache_interval", "cache_layer_id", "cache_block_id"),
            *("start_step", "end_step"),
        ],
        ["MODEL", "CLIP", "VAE"],
    ),
    "OneDiffControlNetLoader": (["control_net_name", "custom_booster"], ["CONTROL_NET"]),
    "ModelGraphSaver": (["samples", "model", "filename_prefix"], []),
    "ModelGraphLoader": (["model", "graph"], ["MODEL"]),
    "VaeGraphSaver": (["images", "vae", "filename_prefix"], []),
    "VaeGraphLoader": (["vae", "graph"], ["VAE"]),
    "OneDiffModelBooster": (
        ["quantization_booster", "deepcache_booster", "torchcompile_booster"],
        ["CUSTOM_BOOSTER"],
    ),
    "OneFlowDeepcacheBooster": (
        ["cache_interval", "cache_layer_id", "cache_block_id", "start_step", "end_step"],
        ["DeepCacheBooster"],
    ),
    "OneDiffOnlineQuantizationBooster": (
        [
            *("quantized_conv_percentage", "quantized_linear_percentage"),
            *("conv_compute_density_threshold", "linear_compute_density_threshold"),
        ],
        ["QuantizationBooster"],
    ),
    "OneDiffTorchCompileBooster": (
        ["fullgraph", "dynamic", "backend", "mode", "disable", "docs_link"],
        ["TorchCompileBooster"],
    ),
    "OneDiffNexfortBooster": (["fullgraph", "dynamic", "mode", "docs_link"], ["TorchCompileBooster"]),
    "OneDiffQuantCheckpointLoaderSimple": (["ckpt_name", "vae_speedup"], ["MODEL", "CLIP", "VAE"]),
    "OneDiffQuantCheckpointLoaderSimpleAdvanced": (
        ["ckpt_name", "model_path", "compile", "vae_speedup"],
        ["MODEL", "CLIP", "VAE"],
    ),
    "ImageOnlyOneDiffQuantCheckpointLoaderAdvanced": (
        ["ckpt_name", "model_path", "compile", "vae_speedup"],
        ["MODEL", "CLIP_VISION", "VAE"],
    ),
    "UNETLoaderInt8": (["model_path"], ["MODEL"]),
    "Quant8Model": (["model", "output_dir", "conv", "linear"], ["MODEL"]),
    "CLIPTextEncodePromptStyle": (
        ["text_positive", "text_negative", "style", "clip", "log_prompt", "style_positive", "style_negative"],
        ["CONDITIONING", "CONDITIONING"],
    ),
    "ResolutionSpeedupChecker": (["samples"], ["LATENT"]),
    "CompareModel": (["torch_model", "oneflow_model", "check"], []),
    "ShowImageDiff": (["images1", "images2", "ssim_threshold", "raise_if_diff", "image_id"], []),
}
"""The inputs in order, because a workflow saves widget values by their order, and the outputs."""
WORKFLOWS = Path(__file__).with_name("onediff_workflows")
PLAIN = "neither quantised nor compiled"
SAID = {
    "quantised_checkpoints": {"1": f"{PLAIN}.*The VAE is not", "2": PLAIN, "9": "as they are"},
    "quantised_diffusion_models": {"1": PLAIN, "2": PLAIN, "10": r"\d+ weights are the same"},
    "prompt_style": {"2": "watercolour.*ships", "5": "Latent of 8 x 8, batch 1", "10": "differ by at most"},
    "comparisons": {
        "3": r"\d+ of \d+ weights differ",
        "4": "Not compared",
        "7": r"at most 51 of 255, by 17 on average",
        "8": r"at most 0 of 255.*: 1\.0000",
        "10": "every size",
        "16": r"\d+ of \d+ weights differ",
        "17": r"\d+ weights are the same",
    },
    "old_switches": {
        **dict.fromkeys("234569", "^Ready"),
        "1": PLAIN,
        "17": "tolerances have no effect",
        "18": "at most 0 of 255",
        "19": "weights are the same",
    },
}
"""What nodes of the workflow files say. `old_switches` has what versions until June 2024 wrote."""
NAMES_OF_FILES = {"ckpt_name", "control_net_name", "graph", "model_path"}
SAYS_WHEN = bool(os.environ.get("COMFYUI_PATH"))
"""The index's build is from 2024 and does not say when a sampling begins."""


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


@pytest.mark.parametrize("name", SOCKETS)
def test_sockets_and_widgets_fit_old_workflows(server, name):
    info = server.get(f"/object_info/{name}")[name]
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    assert ([*inputs], info["output"]) == SOCKETS[name]
    assert all(spec[1]["tooltip"] for spec in inputs.values())
    assert all(info.get("output_tooltips", info["output"])), "an output without a tooltip"
    assert "OneDiff" in info["description"]
    assert info["category"].startswith("compiled graphs/")


def test_an_old_workflow_runs_and_its_file_loads(server, workflow, pixels):
    theirs = pixels(server, server.run(workflow(64, 64, seed=41, compiled=False)))
    prompt = workflow(64, 64, seed=41)
    prompt["30"] = {
        "class_type": "OneFlowDeepcacheBooster",
        "inputs": dict.fromkeys(SOCKETS["OneFlowDeepcacheBooster"][0], 1),
    }
    prompt["31"] = {"class_type": "OneDiffModelBooster", "inputs": {"deepcache_booster": ["30", 0]}}
    prompt["32"] = {"class_type": "BatchSizePatcher", "inputs": {"model": ["1", 0], "latent_image": ["5", 0]}}
    prompt["2"] = {
        "class_type": "ModelSpeedup",
        "inputs": {"model": ["32", 0], "custom_booster": ["31", 0], "inplace": True},
    }
    save = {"samples": ["6", 0], "model": ["2", 0], "filename_prefix": "old_unet"}
    prompt["33"] = {"class_type": "ModelGraphSaver", "inputs": save}
    outputs = server.run(prompt)
    assert abs(pixels(server, outputs)[0] - theirs[0]).max() <= 1
    text = "\n".join(outputs["2"]["text"])
    assert "3 block types compiled" in text or "Ready (loaded from" in text
    assert (
        "DeepCache: a shallow step computes" if SAYS_WHEN else "Without DeepCache: this ComfyUI does not say"
    ) in text
    assert "every batch size" in outputs["32"]["text"][0]
    (name,) = re.findall(r"old_unet_\d{5}_\.graph\.safetensors", outputs["33"]["text"][0])
    before = totals(server)["compiles"]
    for graph, said in ((name, "3 of 3 block types"), ("unet_made_by_onediff.graph", "There is no file ")):
        prompt = workflow(64, 64, seed=41)
        prompt["2"] = {"class_type": "ModelGraphLoader", "inputs": {"model": ["1", 0], "graph": graph}}
        outputs = server.run(prompt)
        assert said in outputs["2"]["text"][0]
        assert abs(pixels(server, outputs)[0] - theirs[0]).max() <= 1
    assert totals(server)["compiles"] == before


@pytest.mark.skipif(not SAYS_WHEN, reason="this ComfyUI does not say when a sampling begins")
def test_deep_cache_is_that_of_our_own_node(server, workflow, pixels):
    steps = {"cache_interval": 3, "cache_layer_id": 0, "cache_block_id": 0, "start_step": 0, "end_step": 1000}
    prompts = [workflow(64, 64, seed=43, steps=9, compiled=False), workflow(64, 64, seed=43, steps=9)]
    prompts[1]["30"] = {"class_type": "CG_DeepCache", "inputs": {"model": ["2", 0], **steps}}
    prompts[1]["6"]["inputs"]["model"] = ["30", 0]
    for static_mode in ("enable", "disable"):
        prompts.append(workflow(64, 64, seed=43, steps=9))
        inputs = {"model": ["1", 0], "static_mode": static_mode, **steps}
        prompts[-1]["2"] = {"class_type": "ModuleDeepCacheSpeedup", "inputs": inputs}
    answers = [server.run(prompt) for prompt in prompts]
    whole, ours, *old = [pixels(server, outputs)[0] for outputs in answers]
    assert "Ready" in answers[2]["2"]["text"][0]
    assert "DeepCache: a shallow step computes" in answers[1]["30"]["text"][0]
    assert all(abs(image - ours).max() <= 1 for image in old)
    assert abs(whole - ours).max() > 1, "no step was shallow"


@pytest.mark.skipif(not SAYS_WHEN, reason="this ComfyUI does not say when a sampling begins")
def test_what_a_combined_node_says_of_its_parts_stays(server, workflow):
    prompt = workflow(64, 64, seed=44, steps=9)
    inputs = {"ckpt_name": prompt["1"]["inputs"]["ckpt_name"], "vae_speedup": "enable", "static_mode": "enable"}
    steps = {"cache_interval": 3, "cache_layer_id": 0, "cache_block_id": 0, "start_step": 0, "end_step": 1000}
    prompt["1"] = {"class_type": "OneDiffDeepCacheCheckpointLoaderSimple", "inputs": inputs | steps}
    del prompt["2"]
    prompt["6"]["inputs"]["model"] = ["1", 0]
    first = server.run(prompt)["1"]["text"][0]
    workflows = server.get("/compiled_graphs/registry")["workflows"]
    texts = [server.get(f"/compiled_graphs/texts?workflow={each}").get("1") for each in workflows]
    (last,) = (each["text"] for each in texts if each and "VAE: " in each["text"])
    for text in (first, last):
        assert re.match(r"Ready.*\nVAE: Ready.*\nDeepCache: a shallow step", text, re.DOTALL), text
    assert "steps were shallow" in last


@pytest.fixture(scope="module")
def old_server(server, home, make_home):
    """The server with what the workflow files name besides its checkpoints."""
    models, more = home / "models", make_home("tiny_canny", "tiny_lora") / "models"
    links = {models / path.relative_to(more): path for path in more.rglob("*.ckpt")}
    links[models / "diffusion_models" / "tiny_sd15.ckpt"] = models / "checkpoints" / "tiny_sd15.ckpt"
    for place, path in links.items():
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(path.resolve())
    return server


def read(name):
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def failure(server, prompt):
    """Return what the node says that stops a prompt."""
    prompt_id = server.queue(prompt)
    with pytest.raises(PromptFailed):
        server.wait(prompt_id)
    messages = server.get(f"/history/{prompt_id}")[prompt_id]["status"]["messages"]
    return next(data["exception_message"] for kind, data in messages if kind == "execution_error")


@pytest.mark.parametrize("name", SAID)
def test_a_workflow_file_runs(old_server, name):
    prompt = read(name)
    outputs = old_server.run(prompt)
    for node, said in SAID[name].items():
        assert re.search(said, "\n".join(outputs[node]["text"]), re.DOTALL), (node, outputs[node])
    pictures = [node for node, part in prompt.items() if part["class_type"] in ("PreviewImage", "ShowImageDiff")]
    assert all(outputs[node]["images"] for node in pictures)


def test_every_workflow_file_is_run():
    assert {path.stem for path in WORKFLOWS.iterdir()} == SAID.keys()
    used = {node["class_type"] for name in SAID for node in read(name).values()}
    assert {name for name in SOCKETS if re.search("Quant.*Loader|8|Prompt|Checker|Compare|Diff$|Net", name)} - used == {
        "OneDiffControlNetLoader"
    }


def test_any_value_of_a_switch_is_accepted(described_nodes):
    """Versions of OneDiff have other switches in the same place, and widgets are saved by their order."""
    refused = []
    for name in SOCKETS:
        groups = described_nodes["definitions"][name]["inputs"]
        fields = [*groups.get("required", []), *groups.get("optional", [])]
        choices = {field for field, kind in fields if isinstance(kind[0], list)} - NAMES_OF_FILES
        refused += sorted((name, field) for field in choices - {*described_nodes["left_to_validator"][name]})
    assert refused == []


@pytest.mark.parametrize("dynamic", [None, "auto", True])
def test_what_onediff_wrote_for_dynamic_runs(old_server, dynamic):
    """OneDiff's first choice was None, which the frontend draws red: ours is "auto"."""
    switches = {"fullgraph": False, "backend": "inductor", "mode": "default", "disable": False, "docs_link": ""}
    nodes = (
        ("CheckpointLoaderSimple", {"ckpt_name": "tiny_sd15.ckpt"}),
        ("OneDiffTorchCompileBooster", {**switches, "dynamic": dynamic}),
        ("OneDiffModelBooster", {"torchcompile_booster": ["2", 0]}),
        ("ModelSpeedup", {"model": ["1", 0], "custom_booster": ["3", 0]}),
        ("CompareModel", {"torch_model": ["1", 0], "oneflow_model": ["4", 0], "check": "enable"}),
    )
    prompt = {str(number): {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in enumerate(nodes, 1)}
    assert "Boosters have no effect" in old_server.run(prompt)["4"]["text"][0]


def test_the_picture_is_the_difference(old_server, pixels):
    prompt = {node: part for node, part in read("comparisons").items() if node in "567"}
    for image in pixels(old_server, old_server.run(prompt)):
        assert image.shape == (48, 64, 3)
        assert (image == [0, 0, 51]).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, "not alike: similarity 0.66"), ({"images2": ["9", 0]}, "2 x 64 x 48 and 1 x 32 x 48")],
)
def test_images_that_are_not_alike_stop_the_workflow(old_server, changes, said):
    prompt = {node: part for node, part in read("comparisons").items() if node in "567"}
    prompt["9"] = {"class_type": "EmptyImage", "inputs": {"width": 32, "height": 48, "batch_size": 1, "color": 0}}
    prompt["7"]["inputs"] |= {"raise_if_diff": "enable", **changes}
    assert said in failure(old_server, prompt)


@pytest.mark.parametrize(
    ("style", "negative", "said"),
    [
        ("Watercolor_1", "photo, realistic skin, camera noise, ships", "Negative prompt: photo"),
        ("Style of a file that I wrote", "ships", "There is no style Style of a file that I wrote"),
    ],
)
def test_a_style_is_a_text_around_the_prompt(old_server, style, negative, said):
    prompt = read("prompt_style")
    prompt["2"]["inputs"] |= {"style": style, "style_positive": False}
    for node, text in (("20", "a lighthouse"), ("21", negative)):
        prompt[node] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": text}}
    prompt["7"]["inputs"] |= {"positive": ["20", 0], "negative": ["21", 0]}
    outputs = old_server.run(prompt)
    assert said in outputs["2"]["text"][0]
    assert "at most 0 of 255" in outputs["10"]["text"][0]


def test_what_onediff_wrote_in_int8_is_refused_and_the_rest_loads(old_server, home):
    weights = torch.load(home / "models" / "checkpoints" / "tiny_sd15.ckpt", weights_only=True)["state_dict"]
    unet = {name: weight.contiguous() for name, weight in weights.items() if name.startswith("model.diffusion_model.")}
    for name, content in (("plain", unet), ("whole", {"out.2.weight": torch.zeros(4, 320, dtype=torch.int8)})):
        folder = home / "models" / "unet_int8" / name
        folder.mkdir(parents=True)
        save_file(content, folder / "unet_int8.safetensors")
    prompt = read("quantised_diffusion_models")
    prompt["1"]["inputs"]["model_path"] = "plain"
    assert "weights are the same" in old_server.run(prompt)["10"]["text"][0]
    prompt["1"]["inputs"]["model_path"] = "whole"
    assert "Only OneDiff reads the weights in whole" in failure(old_server, prompt)


OTHER = """
class Other:
    CATEGORY, FUNCTION, RETURN_TYPES = "somebody else's", "run", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"model": ("MODEL",)}}}}

    def run(self, model):
        return (model,)


NODE_CLASS_MAPPINGS = {{"{name}": Other}}
"""


def test_an_id_of_another_extension_stays_its_own(start_server, home, tmp_path):
    (tmp_path / "models").symlink_to(home / "models", target_is_directory=True)
    taken = {"zzz_loaded_after": "ModelSpeedup"}
    if os.environ.get("COMFYUI_PATH"):  # the index's build tells no extension what the others have
        taken["aaa_loaded_before"] = "ShowImageDiff"
    for folder, name in taken.items():
        (tmp_path / "custom_nodes" / folder).mkdir(parents=True)
        (tmp_path / "custom_nodes" / folder / "__init__.py").write_text(OTHER.format(name=name))
    with start_server(tmp_path) as server:
        for name in taken.values():
            assert server.get(f"/object_info/{name}")[name]["category"] == "somebody else's"
        assert server.get("/object_info/VaeSpeedup")["VaeSpeedup"]["category"].startswith("compiled graphs/")
