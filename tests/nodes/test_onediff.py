"""Workflows made with OneDiff's nodes."""

from __future__ import annotations

import os
import re

import pytest

SOCKETS = {
    "ModelSpeedup": (["model", "custom_booster", "inplace"], ["MODEL"]),
    "VaeSpeedup": (["vae", "custom_booster", "inplace"], ["VAE"]),
    "ControlnetSpeedup": (["control_net", "inplace", "custom_booster"], ["CONTROL_NET"]),
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
}
"""The inputs in order, because a workflow saves widget values by their order, and the outputs."""
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


OTHER = """
class ModelSpeedup:
    CATEGORY, FUNCTION, RETURN_TYPES = "somebody else's", "run", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def run(self, model):
        return (model,)


NODE_CLASS_MAPPINGS = {"ModelSpeedup": ModelSpeedup}
"""


@pytest.mark.parametrize("name", ["aaa_loaded_before", "zzz_loaded_after"])
def test_an_id_of_another_extension_stays_its_own(start_server, home, tmp_path, name):
    if name == "aaa_loaded_before" and not os.environ.get("COMFYUI_PATH"):
        pytest.skip("the index's build tells no extension what the others have")
    (tmp_path / "models").symlink_to(home / "models", target_is_directory=True)
    folder = tmp_path / "custom_nodes" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(OTHER)
    with start_server(tmp_path) as server:
        assert server.get("/object_info/ModelSpeedup")["ModelSpeedup"]["category"] == "somebody else's"
        assert server.get("/object_info/VaeSpeedup")["VaeSpeedup"]["category"].startswith("compiled graphs/")
