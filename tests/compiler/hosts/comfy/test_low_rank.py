"""LoRAs beside quantised weights: exact where merging rounds, without a compile, and gone when they are gone."""

from __future__ import annotations

import gc
import re
import uuid
import weakref
from functools import partial
from types import SimpleNamespace

import comfy.lora
import comfy.ops
import comfy.sample
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.compile_cache.worker_pool import Workers
from compiled_graphs.compiler.hosts.comfy import (
    comfy_compat,
    lora_loss,
    low_rank,
    process,
    sampling_hooks,
    worker_setup,
)
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.low_rank import Lora
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.hosts.comfy.texts import no_branches
from compiled_graphs.compiler.identity.low_rank import DOWN, UP
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime import step_replay
from quantized_flux import error, load_flux, sampled
from recorders import repeat
from rows import adapted, dora, linear_weights, loha, random
from vbar import stream

pytestmark = pytest.mark.usefixtures("traced_once")

EXACT = {"full_precision_matrix_mult": True}
"""Layers dequantise their weights, and do not round their inputs: what is left is what becomes of the LoRA."""
ON_GPU = torch.cuda.is_available()
BOUND = 3e-4 if ON_GPU else 1e-5
"""A GPU adds in another order at each size, and two steps of random weights multiply that. Merging loses 1e-3."""
FORMATS = ("float8_e4m3fn", "int8_tensorwise")
FLOAT8 = "float8_e4m3fn"
QKV = "diffusion_model.double_blocks.0.img_attn.qkv.weight"


def load_exact(state, chosen, **settings):
    """Load the small Flux to compute in float32 on a GPU, as it does on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for choice in ("should_use_fp16", "should_use_bf16"):
            patch.setattr(comfy.model_management, choice, lambda *args, **options: False)
        return load_flux(state, chosen, **settings)


@pytest.fixture
def flux(flux, flux_state, monkeypatch):
    """Loads the small Flux. LoRAs are merged in float32, and with settings the model computes in it."""
    monkeypatch.setattr(comfy.model_management, "lora_compute_dtype", lambda device: torch.float32, raising=False)
    return lambda name, **settings: load_exact(flux_state, name, **settings) if settings else flux(name)


def compiled(model, low_rank=True, backend="eager", **options):
    options = {"verify": False} | options
    ours, text = host.compile_model(model, host.Request(backend, low_rank=low_rank, **options))
    assert ours is not model, text
    return ours


def factors_of(shape, rank, seed=3, scale=0.05):
    up, down = random(shape[0], rank, seed=seed, scale=scale), random(rank, shape[1], seed=seed + 1, scale=scale)
    return {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(2.0 * rank)}


def lora(rank, seed=3):
    return adapted(lambda shape, _: factors_of(shape, rank, seed))


def dequantised(model):
    """Return a model that holds the values of another one's quantised weights in float32."""
    weights = model.model.diffusion_model.named_parameters()
    state = {n: (w.dequantize() if hasattr(w, "_qdata") else w).detach().float().clone() for n, w in weights}
    return load_exact(state, None)


def has_branches(model):
    modules = model.model.diffusion_model.modules()
    return any(layer._forward_hooks or {DOWN, UP} & layer._buffers.keys() for layer in modules)


def counters(model):
    return model.object_patches["diffusion_model.forward"].compiled.counters


@pytest.mark.parametrize("name", FORMATS)
def test_a_lora_beside_quantised_weights_is_exact(name, flux, registry):
    model, change = flux(name, **EXACT), lora(4)
    expected, base = sampled(change(dequantised(model), 1.0)), sampled(dequantised(model))
    merged = error(sampled(change(compiled(model, low_rank=False), 1.0)), expected)
    ours = compiled(model)
    rounded = error(sampled(ours), base)
    image = error(sampled(change(ours, 1.0)), expected)
    assert error(base, expected) > 0.1
    assert image < BOUND + 1.5 * rounded
    assert image < merged / 1.5


@pytest.mark.parametrize("verify", [False, True])
def test_strengths_ranks_and_loras_compile_nothing(verify, flux, registry):
    model = flux(FLOAT8, **EXACT)
    reference = dequantised(model)
    ours = compiled(model, verify=verify)
    sampled(ours)
    sampled(lora(4)(ours, 0.5))
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for change, strength in ((lora(4), 1.0), (lora(20), 1.0), (lora(4, seed=7), 0.5), (lora(40), -1.0)):
            for size in ({}, {"height": 24, "width": 32}):
                assert (
                    error(sampled(change(ours, strength), **size), sampled(change(reference, strength), **size)) < BOUND
                )
        both = lora(20, seed=9)(lora(4)(ours, 1.0), 0.5)
        assert error(sampled(both), sampled(lora(20, seed=9)(lora(4)(reference, 1.0), 0.5))) < BOUND
        assert error(sampled(ours), sampled(model)) < BOUND
    assert totals.eager_calls == before


def test_without_the_switch_loras_are_merged(flux, registry):
    model, change = flux(FLOAT8, **EXACT), lora(4)
    ours = compiled(model, low_rank=False)
    assert not ours.wrappers.get("outer_sample")
    assert error(sampled(change(ours, 1.0)), sampled(change(model, 1.0))) < BOUND


def test_a_comfyui_that_announces_no_samplings_merges_loras(flux, registry, monkeypatch):
    model, change = flux(FLOAT8, **EXACT), lora(4)
    monkeypatch.setattr(comfy_compat, "_outermost", lambda: None)
    ours, text = host.compile_model(model, host.Request("eager", verify=False, low_rank=True))
    assert no_branches() in text
    assert error(sampled(change(ours, 1.0)), sampled(change(model, 1.0))) < BOUND


def test_a_later_node_without_the_switch_takes_it_out(flux, registry):
    model, change = flux(FLOAT8, **EXACT), lora(4)
    ours = compiled(compiled(model), low_rank=False)
    assert error(sampled(change(ours, 1.0)), sampled(change(model, 1.0))) < BOUND


def test_a_lora_before_the_node_is_compiled_with_it(flux, registry):
    model, change = flux(FLOAT8, **EXACT), lora(4)
    ours = compiled(change(model, 1.0))
    assert not has_branches(ours)
    with totals.expect(compiles=0, retired=0):
        image = sampled(ours)
    assert error(image, sampled(change(dequantised(model), 1.0))) < BOUND
    assert counters(ours).eager_calls == {}


def test_the_person_is_told_of_branches(flux, registry):
    told = []
    ours = compiled(flux(FLOAT8), on_change=told.append)
    changed = lora(4)(ours, 1.0)
    sampled(changed)
    sampled(changed)
    sampled(ours)
    with_branches = ["beside the quantised weights of 12 layers" in text for text in told]
    assert with_branches.count(True) >= 1
    assert not with_branches[-1]


def figures_of(model, change, registry, told):
    """Sample with a LoRA beside the weights; return what the node was told to have been lost."""
    ours = compiled(model, on_change=told.append)
    sampled(change(ours, 1.0))
    found = re.search(r"off by (\d+)%\D* off by ([\d.]+)%", told[-1])
    return tuple(float(figure) / 100 for figure in found.groups()) if found else None


@pytest.mark.parametrize("name", FORMATS)
def test_the_person_is_told_what_merging_would_lose(name, flux, registry):
    """The figure is what has become of the largest layer's weight where ComfyUI has merged the LoRA."""
    model, told = flux(name), []
    layer, key = model.model.diffusion_model.double_blocks[0].img_attn.qkv, QKV
    before = layer.weight.dequantize().float().cpu()
    merged = lora(4)(compiled(model, low_rank=False), 1.0)
    sampled(merged)
    factors = factors_of(layer.weight.shape, 4)
    change = 2 * factors["lora_up.weight"] @ factors["lora_down.weight"]
    expected = error(layer.weight.dequantize().float().cpu() - before, change)
    sampled(model)  # which takes the LoRA out of the weights
    only_this = partial(on_one_layer, key=key, factors=factors)
    shown, beside = figures_of(model, only_this, registry, told)
    assert expected > 0.05
    assert shown == pytest.approx(expected, abs=0.01)
    assert beside < 0.01


def on_one_layer(patcher, value, key, factors):
    patcher = patcher.clone()
    loaded = comfy.lora.load_lora({f"a.{name}": tensor for name, tensor in factors.items()}, {"a": key})
    assert len(patcher.add_patches(loaded, value)) == 1
    return patcher


def test_a_branch_in_bfloat16_is_off_by_its_rounding(flux, registry, monkeypatch):
    monkeypatch.setattr(low_rank, "_dtype_of", lambda patcher: torch.bfloat16)
    _, beside = figures_of(flux(FLOAT8), lora(4), registry, [])
    assert 0.001 <= beside < 0.01


def test_what_loras_lose_is_computed_once(flux, registry, monkeypatch):
    asked, losses = [], low_rank.losses
    monkeypatch.setattr(low_rank, "losses", lambda *each: asked.append(each[1]) or losses(*each))
    ours = compiled(flux(FLOAT8))
    one, other = lora(4)(ours, 1.0), lora(4)(ours, 0.5)
    for clone, count in ((ours, 0), (one, 1), (one, 1), (other, 2), (other, 2)):
        sampled(clone)
        assert len(asked) == count
        assert not clone.backup


def no_memory(*args, **options):
    raise torch.cuda.OutOfMemoryError


@pytest.mark.parametrize(
    ("module", "name", "stand_in"),
    [
        (comfy_compat, "merged_weight", lambda *args: None),
        (comfy_compat, "merged_weight", no_memory),
        (lora_loss, "gguf_weights", SimpleNamespace(is_known=lambda cls: True)),
        (lora_loss, "_values", lambda *args: 1 / 0),
    ],
    ids=["an older ComfyUI", "no memory", "GGUF", "an unknown layout"],
)
def test_what_cannot_be_computed_is_not_said(module, name, stand_in, flux, registry, monkeypatch):
    monkeypatch.setattr(module, name, stand_in)
    told = []
    ours = compiled(flux(FLOAT8), on_change=told.append)
    sampled(lora(4)(ours, 1.0))
    assert told[-1].splitlines()[-1] == "LoRAs run beside the quantised weights of 12 layers."


def test_only_a_host_that_returns_a_merged_weight_is_asked():
    class Old:
        def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
            raise AssertionError("it would change the model")

    assert comfy_compat.merged_weight(Old(), QKV, torch.device("cpu")) is None


def test_a_patcher_gets_its_patches_back(flux, registry):
    ours = lora(4)(compiled(flux(FLOAT8)), 1.0)
    patches, token = ours.patches, ours.patches_uuid
    seen = []

    def stop(*args):
        seen.append((has_branches(ours), QKV in ours.patches, ours.patches_uuid))
        raise KeyboardInterrupt

    for callback in (None, stop):
        latent = torch.zeros(1, 16, 8, 8)
        conditioning = [[torch.zeros(1, 4, 64), {"pooled_output": torch.zeros(1, 64)}]]
        try:
            with torch.inference_mode():
                arguments = (ours, latent, 1, 1.0, "euler", "simple", conditioning, conditioning, latent)
                comfy.sample.sample(*arguments, disable_pbar=True, seed=1, callback=callback)
        except KeyboardInterrupt:
            pass
        assert ours.patches is patches
        assert ours.patches_uuid == token
        assert not has_branches(ours)
    assert seen == [(True, False, low_rank.UNPATCHED)]


def test_another_lora_loads_no_weights_anew(flux, registry):
    ours = compiled(flux(FLOAT8))
    sampled(ours)
    layer, values = ours.model.diffusion_model.double_blocks[0].img_attn.qkv, set()
    for patcher in (lora(4)(ours, 1.0), lora(4)(ours, 0.5), ours):
        sampled(patcher)
        assert patcher.model.current_weight_patches_uuid == low_rank.UNPATCHED
        values.add(layer.weight._qdata.data_ptr())
    assert len(values) == 1


def test_an_eager_block_has_its_branch_too(flux, registry):
    model, change = flux(FLOAT8, **EXACT), lora(4)
    expected = sampled(change(dequantised(model), 1.0))
    ours = compiled(model)
    layer = model.model.diffusion_model.double_blocks[0].img_attn.proj
    handle = layer.register_forward_hook(lambda *args: None)
    assert error(sampled(change(ours, 1.0)), expected) < BOUND
    assert {reason.code for reason in counters(ours).eager_calls} == {ReasonCode.HOOK}
    handle.remove()


@pytest.mark.parametrize("other", [loha, dora])
def test_what_is_no_plain_lora_is_merged_by_the_host(other, flux, registry):
    """The other adapter lies on the first half of the layers."""
    model, change = flux(FLOAT8, **EXACT), lora(4)

    def changed(patcher):
        patcher = change(patcher, 1.0)
        keys = list(linear_weights(patcher))[:6]
        weights = linear_weights(patcher)
        file = {f"{key}.{n}": t for key in keys for n, t in other(weights[key].shape, 5).items()}
        loaded = comfy.lora.load_lora(file, {key: f"{key}.weight" for key in keys})
        assert len(patcher.add_patches(loaded, 1.0)) == 6
        return patcher

    ours = changed(compiled(model))
    image = sampled(ours)
    branches = low_rank.branches_of(ours, ours.model.diffusion_model, frozenset(["double_blocks.0", "double_blocks.1"]))
    assert len(branches) == 6
    expected = sampled(changed(dequantised(model)))
    assert 1e-4 < error(image, expected) < 1.01 * error(sampled(changed(model)), expected)


def test_a_lora_on_a_part_of_a_fused_weight(flux, registry):
    model, reference = flux(FLOAT8, **EXACT), None
    reference = dequantised(model)

    def changed(patcher):
        patcher, size = patcher.clone(), 256
        for part in (0, 2):
            up, down = random(size, 4, seed=part, scale=0.1), random(4, size, seed=part + 1, scale=0.1)
            loaded = comfy.lora.load_lora(
                {"a.lora_up.weight": up, "a.lora_down.weight": down}, {"a": (QKV, (0, part * size, size))}
            )
            assert len(patcher.add_patches(loaded, 1.0)) == 1
        return patcher

    expected = sampled(changed(reference))
    assert error(sampled(reference), expected) > 1e-3
    assert error(sampled(changed(compiled(model))), expected) < BOUND


def test_two_clones_in_turn_keep_their_loras(flux, registry):
    model = flux(FLOAT8, **EXACT)
    reference, ours = dequantised(model), compiled(model)
    changes = [partial(lora(4), value=1.0), partial(lora(24, seed=8), value=0.5)]
    expected = [sampled(change(reference)) for change in changes]
    clones = [change(ours) for change in changes]
    for _ in range(2):
        for clone, image in zip(clones, expected, strict=True):
            assert error(sampled(clone), image) < BOUND
    merged = sampled(changes[0](model))  # and by the host, in between
    assert error(merged, expected[0]) > 1e-3
    assert error(sampled(clones[0]), expected[0]) < BOUND
    assert error(sampled(model), sampled(reference)) < BOUND


def test_hooks_of_conditionings_are_left_to_the_host(flux, registry):
    import comfy.hooks

    model, change = flux(FLOAT8, **EXACT), lora(4)
    ours = change(compiled(model), 1.0)
    group = comfy.hooks.HookGroup()
    group.add(comfy.hooks.WeightHook(strength_model=1.0))
    guider = type("Guider", (), {"model_patcher": ours, "model_options": {}, "conds": {"positive": [{}]}})()
    network = ours.model.diffusion_model
    assert low_rank.is_plain(guider, network)
    guider.conds = {"positive": [{"hooks": group}]}
    assert not low_rank.is_plain(guider, network)
    guider.conds, guider.model_options = {}, {"registered_hooks": group}
    assert not low_rank.is_plain(guider, network)
    assert not low_rank.is_plain(guider, torch.nn.Identity())


def test_branches_that_a_sampling_goes_without_are_no_longer_told_of(flux, registry):
    ours = lora(4)(compiled(flux(FLOAT8)), 1.0)
    sampled(ours)
    (branches,) = ours.wrappers["outer_sample"]["compiled_graphs"]
    assert branches.count > 0
    told = []
    branches.on_change = lambda: told.append((branches.count, branches.losses))
    guider = SimpleNamespace(model_patcher=ours, model_options={"registered_hooks": object()}, conds={})

    class Sample:
        class_obj = guider

        def __call__(self):
            return "an image"

    assert branches(Sample()) == "an image"
    assert told == [(0, None)]


def test_factors_stay_in_place_for_recorded_steps(flux, registry, monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
        monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: repeat)
    model = flux(FLOAT8, **EXACT)
    reference, ours = dequantised(model), compiled(model)
    network, places = model.model.diffusion_model, []
    loras = [partial(lora(rank), value=strength) for rank, strength in ((4, 1.0), (9, 0.5), (4, 1.0), (40, 1.0))]
    expected = [sampled(change(reference), steps=9) for change in loras]  # to load another model drops the factors
    for change, image in zip(loras, expected, strict=True):
        assert error(sampled(change(ours), steps=9), image) < BOUND
        places.append({path: pair[0].data_ptr() for path, pair in low_rank._factors_of(network)._pairs.items()})
    assert counters(ours).replays > 0
    assert places[0] == places[1] == places[2] != places[3]


@pytest.mark.skipif(ON_GPU, reason="the stand-in for a VBAR lies in the CPU's memory")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_recorded_steps_serve_other_loras_of_their_rank(is_streamed, flux, registry, monkeypatch, request):
    monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
    monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: repeat)
    monkeypatch.setattr(step_replay, "captures_borrow_memory", lambda device: True)
    monkeypatch.setattr(step_replay, "return_lent_memory", lambda device: None)
    model = flux(FLOAT8, **EXACT)
    reference = dequantised(model)
    loras = [partial(lora(4), value=1.0), partial(lora(4), value=0.5), partial(lora(9, seed=7), value=1.0)]
    loras += [partial(lora(40), value=1.0), lambda patcher: patcher]
    expected = [sampled(change(reference), steps=9) for change in loras]
    ours = compiled(stream(model, request.getfixturevalue("vbar")) if is_streamed else model)
    captures = []
    for change, image in zip(loras, expected, strict=True):
        clone = change(ours)
        for _ in range(2):
            assert error(sampled(clone, steps=9), image) < BOUND
        captures.append(counters(ours).captures)
    assert captures == [1, 1, 1, 2, 3]
    assert counters(ours).eager_calls == {}


def test_an_unloaded_model_keeps_no_factors(flux, registry):
    ours = lora(4)(compiled(flux(FLOAT8)), 1.0)
    sampled(ours)
    factors = low_rank._factors_of(ours.model.diffusion_model)
    assert factors._pairs
    comfy.model_management.unload_all_models()
    assert not factors._pairs


@pytest.mark.parametrize("then", ["without the node", "without the switch"])
def test_factors_go_with_the_last_node_that_asks_for_them(then, flux, registry):
    model = flux(FLOAT8)
    ours = lora(4)(compiled(model), 1.0)
    sampled(ours)
    factors = weakref.ref(low_rank._factors_of(model.model.diffusion_model))
    later = model if then == "without the node" else lora(4)(compiled(model, low_rank=False), 1.0)
    del ours
    sampled(later)
    gc.collect()
    assert factors() is None


def test_without_memory_for_factors_loras_are_merged(flux, registry, monkeypatch):
    model, change = flux(FLOAT8, **EXACT), lora(4)
    expected = sampled(change(model, 1.0))

    monkeypatch.setattr(low_rank.Factors, "_write", no_memory)
    assert error(sampled(change(compiled(model), 1.0)), expected) < BOUND


@pytest.mark.skipif(ON_GPU, reason="the stand-in for a VBAR lies in the CPU's memory")
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_streamed_weights_have_branches(share, flux, registry, request):
    plain = flux(FLOAT8, **EXACT)
    reference, change = dequantised(plain), lora(4)
    expected, base = sampled(change(reference, 0.7)), sampled(reference)
    vbar = request.getfixturevalue("vbar")
    ours = compiled(stream(plain, vbar))
    clone = change(ours, 0.7)
    assert error(sampled(clone), expected) < BOUND
    vbar.evict()
    vbar.limit = int(vbar.size * share)
    with totals.expect(compiles=0, retired=0):
        assert error(sampled(clone), expected) < BOUND
        assert error(sampled(ours), base) < BOUND
        assert error(sampled(change(ours, -0.7)), sampled(change(reference, -0.7))) < BOUND
    assert vbar.pinned == 0


def test_blocks_compile_in_the_background_with_their_branches(flux, monkeypatch):
    workers = Workers(worker_setup.setup, HOST, count=1)
    registry = Registry(GraphCache(workers=workers))
    monkeypatch.setattr(process, "registry", lambda: registry)
    try:
        model, change = flux(FLOAT8, **EXACT), lora(4)
        expected = sampled(change(dequantised(model), 1.0))
        ours = compiled(model, background=True)
        host.finish(ours)
        clone = change(ours, 1.0)
        for _ in range(8):  # what a sampling asks for may come when it has ended, and is asked for again
            before = counters(ours).eager_calls.copy()
            assert error(sampled(clone), expected) < BOUND
            if counters(ours).eager_calls == before:
                break
            host.finish(ours)
        assert counters(ours).eager_calls == before
    finally:
        workers.stop()


@pytest.mark.usefixtures("cpp_compiler")
def test_inductor_computes_branches_of_any_rank(flux, registry):
    model = flux(FLOAT8, **EXACT)
    reference, ours = dequantised(model), compiled(model, backend="inductor", verify=True)
    sampled(lora(4)(ours, 1.0))
    with totals.expect(compiles=0, retired=0):
        for rank in (4, 40):
            assert error(sampled(lora(rank)(ours, 1.0)), sampled(lora(rank)(reference, 1.0))) < 10 * BOUND
    assert counters(ours).eager_calls == {}


class Block(torch.nn.Module):
    def __init__(self, layer, *others):
        super().__init__()
        self.layer = layer
        self.others = torch.nn.ModuleList(others)


class Caller(Block):
    def forward(self, x):
        return comfy.ops.linear_input_act(self.layer, x, "gelu_tanh") * comfy.ops.cast_bias_weight(self.others, x)


class Reader(Block):
    """Takes a layer's weight, and does not call the layer."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.layer.weight.dequantize())


class ReaderOfAny(Block):
    def forward(self, x):
        return [torch.nn.functional.linear(x, layer.weight) for layer in self.others]


@pytest.mark.parametrize(
    ("cls", "name", "branches"),
    [
        (Caller, FLOAT8, {"layer"}),
        (Caller, "int8_tensorwise", set()),
        (Reader, FLOAT8, {"others.0"}),
        (ReaderOfAny, FLOAT8, set()),
    ],
)
def test_a_weight_that_a_block_reads_itself_is_merged(cls, name, branches, flux):
    layers = [block.img_attn.qkv for block in flux(name).model.diffusion_model.double_blocks]
    network = torch.nn.Module()
    network.block = torch.nn.Sequential(cls(*layers, torch.nn.Linear(8, 8)))
    paths = ("layer", "others.0", "others.1", "others.2")
    shapes = {path: low_rank.quantised_shape(network, "block", f"block.0.{path}") for path in paths}
    assert {path for path, shape in shapes.items() if shape} == branches
    assert {shape for shape in shapes.values() if shape} <= {(768, 256)}


UP_AND_DOWN = torch.ones(6, 2), torch.ones(2, 4)


@pytest.mark.parametrize(
    "patch",
    [
        (1.0, ("lora", (*UP_AND_DOWN, None, torch.ones(2, 2), None)), 1.0, None, None),
        (1.0, ("lora", (*UP_AND_DOWN, None, None, torch.ones(6, 1))), 1.0, None, None),
        (1.0, ("lora", (*UP_AND_DOWN, None, None, None, [6, 8])), 1.0, None, None),
        (1.0, ("lora", (torch.ones(6, 3), torch.ones(2, 4), None, None, None)), 1.0, None, None),
        (1.0, ("lora", (*UP_AND_DOWN, None, None, None)), 0.5, None, None),
        (1.0, ("lora", (*UP_AND_DOWN, None, None, None)), 1.0, None, lambda weight: weight),
        (1.0, ("diff", (torch.ones(6, 4),)), 1.0, None, None),
        (1.0, ("set", (torch.ones(6, 4),)), 1.0, None, None),
        (1.0, (torch.ones(6, 4),), 1.0, None, None),
        (1.0, ("lora", (torch.ones(6), torch.ones(2, 4), None)), 1.0, None, None),
        (1.0, ("lora", (torch.ones(6, 2),)), 1.0, None, None),
    ],
)
def test_other_patches_are_no_plain_loras(patch):
    assert Lora.of(patch) is None


def test_a_lora_fits_a_weight_of_its_shape():
    found = Lora.of((0.5, ("lora", (*UP_AND_DOWN, 1.0, None, None)), 1.0, (0, 6, 6), None))
    assert (found.rank, found.scale) == (2, 0.25)
    assert found.fits((12, 4))
    assert not found.fits((11, 4))
    assert not found.fits((12, 5))


def test_patches_are_told_apart_by_what_is_left(flux):
    patcher = lora(4)(flux(FLOAT8), 1.0)
    with low_rank.without_patches(patcher, list(patcher.patches)):
        assert (patcher.patches, patcher.patches_uuid) == ({}, low_rank.UNPATCHED)
    names = []
    for _ in range(2):
        with low_rank.without_patches(patcher, [QKV]):
            names.append(patcher.patches_uuid)
    for keys in ([], list(patcher.patches)[:3]):
        with low_rank.without_patches(patcher, keys):
            names.append(patcher.patches_uuid)
    patcher.set_model_compute_dtype(torch.float32)  # the weights are loaded in another way
    with low_rank.without_patches(patcher, list(patcher.patches)):
        names.append(patcher.patches_uuid)
    patcher.patches_uuid = uuid.uuid4()
    with low_rank.without_patches(patcher, [QKV]):
        names.append(patcher.patches_uuid)
    assert names[0] == names[1]
    assert len({*names, low_rank.UNPATCHED}) == 6
