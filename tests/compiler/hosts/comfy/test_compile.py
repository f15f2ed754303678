"""Compile Model on real models of ComfyUI, sampled with ComfyUI's samplers."""

from __future__ import annotations

import gc
import re
import weakref

import comfy.model_management
import comfy.model_patcher
import pytest
import torch
from compiled_graphs.compiler.backends import BACKENDS
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from garbage import no_tensors_in_cycles

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 1e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""
MODELS = ["tiny_sd15", "tiny_sdxl", "tiny_sd3", "tiny_flux"]


def compile_eager(model, **options):
    return host.compile_model(model, host.Request("eager", **options))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, bound: float = BOUND) -> None:
    assert ours.isfinite().all()
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= bound, f"relative error {error:.1e}"


def lora(model, strength: float = 1.0, seed: int = 3):
    """The model as a LoRA loader returns it: a clone with low-rank weight patches."""
    generator = torch.Generator().manual_seed(seed)
    keys = [key for key in model.model_state_dict() if key.endswith(("to_q.weight", "proj.weight", "qkv.weight"))]
    shapes = {key: model.model_state_dict()[key].shape for key in keys}
    patches = {
        key: ("diff", (torch.randn(shape, generator=generator) * 0.01,))
        for key, shape in shapes.items()
        if len(shape) == 2
    }
    patched = model.clone()
    assert patched.add_patches(patches, strength)
    return patched


@pytest.mark.parametrize("name", MODELS)
def test_the_image_is_eagers_from_compiled_regions(name, load, sample, registry):
    model = load(name)
    before = totals.eager_calls.total()
    compiled, text = compile_eager(model)
    assert re.fullmatch(r"Ready: (\d+) of \1 block types compiled \([\d.]+ s, once per model type\)\.", text), text
    calls = totals.calls
    assert_same(sample(compiled, name), sample(model, name))
    assert totals.calls > calls
    assert totals.eager_calls.total() == before


@pytest.mark.parametrize("name", MODELS)
def test_a_steps_maps_are_freed_before_the_garbage_collector_runs(name, load, sample, registry):
    compiled, _ = compile_eager(load(name))
    sample(compiled, name)
    with no_tensors_in_cycles(), totals.expect(compiles=0):
        sample(compiled, name)


@pytest.mark.parametrize("name", MODELS)
def test_after_the_first_prompt_nothing_compiles(name, load, sample, registry):
    model = load(name)
    compiled, _ = compile_eager(model)
    sample(compiled, name)
    changes = [
        {"height": 16, "width": 16},
        {"height": 9, "width": 5},
        {"batch": 2},
        {"batch": 4, "height": 6, "width": 4},
        {"tokens": 154},
        {"tokens": 231},
        {"seed": 5},
        {"sampler": "dpmpp_2m"},
        {"cfg": 1.0},
    ]
    if name in ("tiny_sdxl", "tiny_flux"):  # their blocks are many, or wide
        changes = [changes[1], changes[3], {"tokens": 154, "cfg": 1.0}]
    with totals.expect(compiles=0):
        for change in changes:
            assert_same(sample(compiled, name, **change), sample(model, name, **change))
    assert registry.report()["workflows"][""]["roles"].popitem()[1]["reasons"] == {}


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_lora_needs_no_compile_and_is_applied(order, load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    plain = sample(compiled, "tiny_sd15")
    with totals.expect(compiles=0):
        for strength in (1.0, 0.5):
            patched = lora(model, strength)
            theirs = sample(patched, "tiny_sd15")
            ours = sample(lora(compiled, strength) if order == "after" else compile_eager(patched)[0], "tiny_sd15")
            assert_same(ours, theirs)
            assert (ours - plain).norm() > 1e-3 * plain.norm()
        assert_same(sample(compiled, "tiny_sd15"), plain, BOUND / 100)


def test_the_original_and_other_clones_stay_eager(load, sample, registry):
    model = load("tiny_sd15")
    sibling = model.clone()
    compiled, _ = compile_eager(model)
    sample(compiled, "tiny_sd15")
    with totals.expect(calls=0):
        sample(model, "tiny_sd15")
        sample(sibling, "tiny_sd15")


def test_keys_for_weights_and_loras_do_not_change(load, sample, registry):
    model = load("tiny_sd15")
    keys = list(model.model_state_dict())
    compiled, _ = compile_eager(model)
    sample(compiled, "tiny_sd15")
    assert list(compiled.model_state_dict()) == keys
    assert list(model.model_state_dict()) == keys


def test_removing_the_node_restores_every_forward(load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    sample(compiled, "tiny_sd15")
    comfy.model_management.unload_all_models()
    for module in model.model.modules():
        replaced = module.__dict__.get("forward")
        assert replaced is None or replaced.__func__ is type(module).forward


def test_two_compiled_models_in_one_prompt_never_mix(load, sample, registry):
    first, second = load("tiny_sd15"), lora(load("tiny_sd15"), 1.0)
    compiled = [compile_eager(model)[0] for model in (first, second)]
    for _ in range(2):
        for ours, theirs in zip(compiled, (first, second), strict=True):
            assert_same(sample(ours, "tiny_sd15"), sample(theirs, "tiny_sd15"))


def test_a_second_checkpoint_of_the_architecture_compiles_nothing(load, registry):
    compile_eager(load("tiny_sd15"))
    with totals.expect(compiles=0):
        _, text = compile_eager(load("tiny_sd15"))
    assert text.startswith("Ready (loaded from memory, ")


def test_compiling_twice_in_a_chain_is_compiling_once(load, sample, registry):
    model = load("tiny_sd15")
    once, _ = compile_eager(model)
    twice, text = compile_eager(once)
    assert "another node" not in text
    assert_same(sample(twice, "tiny_sd15"), sample(model, "tiny_sd15"))


def attn1_patch(q, k, v, options):
    return q * 0.9, k, v


def test_a_patch_that_reaches_into_a_region_runs_there_and_nowhere_else_eagerly(load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    sample(compiled, "tiny_sd15")
    ours, theirs = compiled.clone(), model.clone()
    for patched in (ours, theirs):
        patched.set_model_attn1_patch(attn1_patch)
    assert_same(sample(ours, "tiny_sd15"), sample(theirs, "tiny_sd15"))
    reasons = registry.report()["workflows"][""]["roles"][":base UNet"]["reasons"]
    assert list(reasons) == ["patch attn1_patch"]
    with totals.expect(compiles=0):
        assert_same(sample(compiled, "tiny_sd15"), sample(model, "tiny_sd15"))
    assert registry.report()["workflows"][""]["roles"][":base UNet"]["reasons"] == reasons


def test_a_replacement_patch_has_a_graph_of_its_own_and_takes_part_in_it(load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    sample(compiled, "tiny_sd15")

    def scaled(patcher, factor):
        patched = patcher.clone()
        patched.set_model_attn2_replace(lambda q, k, v, options: q * factor, "middle", 0)
        return patched

    before = totals.eager_calls.copy()
    with totals.expect(compiles=1, retired=0):
        for factor in (0.5, 0.5, -2.0):  # one function: the first call of its graph is checked, later ones are not
            assert_same(sample(scaled(compiled, factor), "tiny_sd15"), sample(scaled(model, factor), "tiny_sd15"))
        assert_same(sample(compiled, "tiny_sd15"), sample(model, "tiny_sd15"))
    assert totals.eager_calls == before


def test_patches_between_regions_leave_every_region_compiled(load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    ours, theirs = compiled.clone(), model.clone()
    for patched in (ours, theirs):
        patched.set_model_output_block_patch(lambda h, skip, options: (h * 1.1, skip))
    assert_same(sample(ours, "tiny_sd15"), sample(theirs, "tiny_sd15"))
    assert registry.report()["workflows"][""]["roles"].popitem()[1]["reasons"] == {}


def step_with_little_memory(model) -> torch.Tensor:
    """One step of a model of which ComfyUI has loaded next to nothing."""
    device, cpu = model.load_device, torch.device("cpu")
    if hasattr(model, "patch_model_lowvram"):
        pytest.skip("this ComfyUI adds the LoRA to its own weights at each call when it streams on a CPU")
    model.patch_model(device, lowvram_model_memory=1)
    generator = torch.Generator().manual_seed(4)
    x, context = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 4, 8, 12), (2, 77, 768)))
    with torch.inference_mode():
        out = model.model.apply_model(x, torch.ones(2, device=device), c_crossattn=context, transformer_options={})
    model.unpatch_model(cpu)
    return out


def test_weights_that_comfyui_patches_on_the_fly_run_compiled(load, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    for change in (lora, lambda patcher: patcher):
        assert_same(step_with_little_memory(change(compiled)), step_with_little_memory(change(model)))
        assert not registry.report()["workflows"][""]["roles"][":base UNet"]["reasons"]


def test_cancel_works_between_regions_and_keeps_what_is_done(load, registry, monkeypatch):
    model = load("tiny_sdxl")
    provide = registry.cache.get_or_compile

    def cancel_after_two(*arguments):
        result = provide(*arguments)
        if totals.compiles - before == 2:
            comfy.model_management.interrupt_current_processing()
        return result

    before = totals.compiles
    monkeypatch.setattr(registry.cache, "get_or_compile", cancel_after_two)
    with pytest.raises(BaseException, match=r"^$") as cancelled:  # since 2026 it is no Exception
        compile_eager(model)
    assert type(cancelled.value).__name__ == "InterruptProcessingException"
    comfy.model_management.interrupt_current_processing(False)
    monkeypatch.setattr(registry.cache, "get_or_compile", provide)
    _, text = compile_eager(model)
    assert text.startswith("Ready: 5 of 5 block types compiled (2 loaded from memory; ")


def test_progress_names_each_region(load, registry, caplog):
    caplog.set_level("INFO")
    compile_eager(load("tiny_sd15"))
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("hosts.comfy.progress")]
    assert re.fullmatch(r"\[1/3\] ResBlock \(input_blocks\.1\.0\): compiled, [\d.]+ s", lines[0])
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("reason", "backend"), [("Compiling needs a C++ compiler: install g++.", "inductor"), (None, "nonsense")]
)
def test_without_a_usable_compiler_the_model_passes_through(reason, backend, load, sample, registry, monkeypatch):
    model = load("tiny_sd15")
    monkeypatch.setattr(type(BACKENDS["inductor"]), "available", lambda self, device: reason)
    passed, text = host.compile_model(model, host.Request(backend))
    assert passed is model
    assert text.startswith("Not compiled: ")
    assert (reason or "There is no backend named 'nonsense'") in text


def test_a_network_without_repeating_blocks_passes_through(load, registry):
    model = load("tiny_sd15").clone()
    network = model.model.diffusion_model
    model.model.diffusion_model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1))
    try:
        passed, text = compile_eager(model)
    finally:
        model.model.diffusion_model = network
    assert passed is model
    assert text == "Not compiled: Sequential has no block that can be compiled"


def test_a_forward_that_another_extension_replaced_is_left_alone(load, sample, registry):
    model = load("tiny_sd15").clone()
    block = model.model.diffusion_model.input_blocks[1][0]
    model.add_object_patch(
        "diffusion_model.input_blocks.1.0.forward", lambda x, emb: type(block).forward(block, x, emb) * 0.5
    )
    compiled, text = compile_eager(model)
    assert "1 block is left to another node" in text
    assert_same(sample(compiled, "tiny_sd15"), sample(model, "tiny_sd15"))


def test_a_network_forward_that_another_extension_replaced_keeps_running(load, sample, registry):
    model = load("tiny_sd15")
    network = model.model.diffusion_model
    network.forward = lambda *args, **kwargs: type(network).forward(network, *args, **kwargs) * 0.5
    theirs = sample(model, "tiny_sd15")
    compiled, _ = compile_eager(model)
    assert_same(sample(compiled, "tiny_sd15"), theirs)
    again, _ = compile_eager(model)  # while the first one is loaded
    assert_same(sample(again, "tiny_sd15"), theirs)
    chained, _ = compile_eager(again)
    assert_same(sample(chained, "tiny_sd15"), theirs)
    comfy.model_management.unload_all_models()
    del network.forward


def test_a_model_that_cannot_be_called_ahead_compiles_at_its_first_step(load, sample, registry, monkeypatch):
    model = load("tiny_sd15")
    monkeypatch.setattr(type(model.model), "extra_conds", lambda self, **kwargs: {}, raising=True)
    told = []
    compiled, text = compile_eager(model, on_change=told.append)
    monkeypatch.undo()
    assert text == "Compiled when the model first runs: 3 block types."
    with totals.expect(compiles=3):
        assert_same(sample(compiled, "tiny_sd15"), sample(model, "tiny_sd15"))
        assert_same(sample(compiled, "tiny_sd15", height=4, batch=3), sample(model, "tiny_sd15", height=4, batch=3))
    assert told[0].startswith("Ready: 3 of 3 block types compiled (")
    assert not any("normal speed" in text for text in told)


def test_nan_in_the_weights_is_eagers_business(load, sample, registry):
    model = load("tiny_sd15")
    block = model.model.diffusion_model.middle_block[0]
    with torch.no_grad():
        block.out_layers[3].weight[0, 0, 0, 0] = float("nan")
    compiled, _ = compile_eager(model)
    with totals.expect(retired=0):
        ours = sample(compiled, "tiny_sd15")
    assert torch.equal(ours.isnan(), sample(model, "tiny_sd15").isnan())


def test_a_freed_model_is_not_kept_by_anything_of_ours(load, sample, registry):
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model, workflow=lambda: "w", node_id="1")
    sample(compiled, "tiny_sd15")
    network = weakref.ref(model.model.diffusion_model)
    comfy.model_management.unload_all_models()
    del model, compiled
    gc.collect()
    assert network() is None
    assert registry.report()["workflows"]["w"]["roles"]["1:base UNet"]["compiled"] == 0


def test_what_replaces_a_networks_forward_goes_without_waiting_for_the_cycle_search(load, sample, registry):
    """ComfyUI puts back a bound method in its place, which holds the model until that is tidied."""
    model = load("tiny_sd15")
    compiled, _ = compile_eager(model)
    sample(compiled, "tiny_sd15")
    entrance = weakref.ref(compiled.object_patches["diffusion_model.forward"])
    comfy.model_management.unload_all_models()
    gc.disable()
    try:
        del compiled
        assert entrance() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("name", ["tiny_sd15"])
def test_inductor_gives_eagers_image(name, load, sample, registry):
    model = load(name)
    compiled, text = host.compile_model(model)
    assert text.startswith("Ready: 3 of 3 block types compiled (")
    with totals.expect(compiles=0, retired=0):
        for change in ({}, {"height": 9, "width": 5, "batch": 3}, {"tokens": 154, "cfg": 1.0}):
            assert_same(sample(compiled, name, **change), sample(model, name, **change))
