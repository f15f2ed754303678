"""What other extensions change in a network after Compile Model: each sampling gives what it would give uncompiled."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("traced_once")

NAME = "tiny_sd15"
BOUND = 5e-2 if torch.cuda.is_available() else 1e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""


def convolutions(network):
    return [module for module in network.modules() if isinstance(module, nn.Conv2d)]


def some_convolutions(network):
    """Those of one type of block, so that the others need no graphs of their own."""
    return [layer for block in network.modules() if type(block).__name__ == "ResBlock" for layer in convolutions(block)]


def tile(network, patch):
    for layer in convolutions(network):
        patch.setattr(layer, "padding_mode", "circular")


def tile_by_method(network, patch):
    """As seamless tiling nodes do, in one direction."""

    def make(layer):
        def conv_forward(x, weight, bias):
            x = functional.pad(x, (layer.padding[1], layer.padding[1], 0, 0), mode="circular")
            x = functional.pad(x, (0, 0, layer.padding[0], layer.padding[0]))
            return functional.conv2d(x, weight, bias, layer.stride, 0, layer.dilation, layer.groups)

        return conv_forward

    for layer in convolutions(network):
        patch.setattr(layer, "_conv_forward", make(layer), raising=False)


class Direction:
    """What a tiling node leaves on each layer: a method of its own, and what that reads."""

    def conv_forward(self, x, weight, bias):
        x = functional.pad(x, self.padding_x, mode=self.mode_x)
        x = functional.pad(x, self.padding_y, mode=self.mode_y)
        return functional.conv2d(x, weight, bias, self.stride, 0, self.dilation, self.groups)


def tile_in(network, patch, x, y, bind):
    for layer in some_convolutions(network):
        patch.setattr(layer, "mode_x", "circular" if x else "constant", raising=False)
        patch.setattr(layer, "mode_y", "circular" if y else "constant", raising=False)
        patch.setattr(layer, "padding_x", (layer.padding[1], layer.padding[1], 0, 0), raising=False)
        patch.setattr(layer, "padding_y", (0, 0, layer.padding[0], layer.padding[0]), raising=False)
        patch.setattr(layer, "_conv_forward", bind(Direction.conv_forward, layer), raising=False)


def edit_eps(network, patch):
    for module in network.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            patch.setattr(module, "eps", 0.5)


def edit_heads(network, patch):
    for module in network.modules():
        if type(module).__name__ == "CrossAttention":
            patch.setattr(module, "heads", module.heads // 2)


def swap_class(network, patch):
    blocks = [module for module in network.modules() if type(module).__name__ == "BasicTransformerBlock"]
    cls = type(blocks[0])
    other = type("Other", (cls,), {"forward": lambda self, *a, **k: cls.forward(self, *a, **k) * 0.5})
    for block in blocks:
        patch.setattr(block, "__class__", other)


def replace_on_class(network, patch):
    import comfy.ldm.modules.attention as attention

    forward = attention.CrossAttention.forward
    patch.setattr(attention.CrossAttention, "forward", lambda self, *a, **k: forward(self, *a, **k) * 0.5)


def replace_attention(network, patch):
    import comfy.ldm.modules.attention as attention

    plain = attention.optimized_attention
    patch.setattr(attention, "optimized_attention", lambda *a, **k: plain(*a, **k) * 0.5)


def replace_torch_function(network, patch):
    plain = functional.group_norm
    patch.setattr(functional, "group_norm", lambda *a, **k: plain(*a, **k) * 0.5)


CHANGES = [tile, tile_by_method, edit_eps, edit_heads, swap_class, replace_on_class, replace_attention,
           replace_torch_function]  # fmt: skip


def same(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item() <= BOUND


@pytest.fixture
def compiled(load, registry):
    model = load(NAME)
    return model, host.compile_model(model, host.Request("eager"))[0]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_compiling_shows(compiled, sample, monkeypatch, change):
    model, fast = compiled
    before = sample(fast, NAME)
    with monkeypatch.context() as patch:
        change(model.model.diffusion_model, patch)
        theirs = sample(model, NAME)
        assert not same(theirs, before)
        assert same(sample(fast, NAME), theirs)
    assert same(sample(fast, NAME), before)


@pytest.mark.parametrize("bind", [types.MethodType, functools.partial])
def test_attributes_that_a_replaced_method_reads_show(compiled, sample, monkeypatch, bind):
    """Graphs of one direction were proven right, and the next prompt tiles in the other."""
    model, fast = compiled
    for x, y in ((True, True), (True, False), (False, True)):
        with monkeypatch.context() as patch:
            tile_in(model.model.diffusion_model, patch, x, y, bind)
            for _ in range(2):
                assert same(sample(fast, NAME), sample(model, NAME))


def replace_method_of_torch(patch, layers):
    plain = nn.Conv2d._conv_forward
    patch.setattr(nn.Conv2d, "_conv_forward", lambda self, *a: plain(self, *a) * getattr(self, "strength", 1.0))


def replace_call(patch, layers):
    plain = nn.Module.__call__

    def call(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        return result * self.strength if hasattr(self, "strength") else result

    patch.setattr(nn.Module, "__call__", call)


def replace_function_of_comfyui(patch, layers):
    import comfy.ops

    plain = comfy.ops.cast_bias_weight

    def cast(s, *args, **kwargs):
        weight, *rest = plain(s, *args, **kwargs)
        return weight * vars(s).get("strength", 1.0), *rest

    patch.setattr(comfy.ops, "cast_bias_weight", cast)
    for layer in layers:
        patch.setattr(layer, "comfy_cast_weights", True)


@pytest.mark.parametrize("replace", [replace_method_of_torch, replace_call, replace_function_of_comfyui])
def test_attributes_that_a_replaced_function_reads_show(compiled, sample, monkeypatch, replace):
    """The function stays while its node writes other values on the layers, from one prompt to the next."""
    model, fast = compiled
    layers = some_convolutions(model.model.diffusion_model)
    before = sample(fast, NAME)
    with monkeypatch.context() as patch:
        replace(patch, layers)
        for strength in (None, 0.5, 1.5):
            for layer in layers if strength else []:
                patch.setattr(layer, "strength", strength, raising=False)
            theirs = sample(model, NAME)
            assert same(theirs, before) == (strength is None)
            assert same(sample(fast, NAME), theirs)
        assert same(sample(fast, NAME), theirs), "the first sampling was eager's, which proved the graphs"
    assert same(sample(fast, NAME), before)


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_object_patch_of_a_number_shows(load, registry, sample, order):
    model = load(NAME)

    def patched(patcher):
        clone = patcher.clone()
        for path, module in model.model.diffusion_model.named_modules():
            if isinstance(module, nn.LayerNorm):
                clone.add_object_patch(f"diffusion_model.{path}.eps", 0.5)
        return clone

    request = host.Request("eager")
    if order == "before":
        fast = host.compile_model(patched(model), request)[0]
    else:
        fast = patched(host.compile_model(model, request)[0])
    theirs = sample(patched(model), NAME)
    assert not same(theirs, sample(model, NAME))
    for _ in range(2):
        assert same(sample(fast, NAME), theirs)


@pytest.mark.parametrize("change", [tile, edit_heads, replace_attention], ids=lambda change: change.__name__)
def test_what_a_wrapper_changes_for_the_length_of_a_call_shows(compiled, sample, monkeypatch, change):
    """In turn with samplings without it: the network is the same before and after each call."""
    patcher_extension = pytest.importorskip("comfy.patcher_extension", reason="this ComfyUI has no wrappers")
    model, fast = compiled

    def changing(executor, *args, **kwargs):
        with monkeypatch.context() as patch:
            change(model.model.diffusion_model, patch)
            return executor(*args, **kwargs)

    ours, theirs = fast.clone(), model.clone()
    for each in (ours, theirs):
        each.add_wrapper_with_key(patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", changing)
    plain, changed = sample(model, NAME), sample(theirs, NAME)
    assert not same(changed, plain)
    for _ in range(2):
        assert same(sample(fast, NAME), plain)
        assert same(sample(ours, NAME), changed)


def test_what_comes_and_goes_with_each_call_is_not_described_in_each(compiled, sample, monkeypatch):
    from compiled_graphs.compiler.runtime.region_kinds import RegionKinds

    patcher_extension = pytest.importorskip("comfy.patcher_extension", reason="this ComfyUI has no wrappers")
    model, fast = compiled
    described, describe_all = [], RegionKinds._describe_all
    monkeypatch.setattr(
        RegionKinds, "_describe_all", lambda self, paths: described.append(1) or describe_all(self, paths)
    )

    def changing(executor, *args, **kwargs):
        with monkeypatch.context() as patch:
            edit_heads(model.model.diffusion_model, patch)
            return executor(*args, **kwargs)

    clone = fast.clone()
    clone.add_wrapper_with_key(patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", changing)
    sample(clone, NAME, steps=4)
    assert len(described) == 2, "when it is there first, and when its graphs are missing"


def test_a_block_that_is_replaced_and_freed(compiled, sample):
    model, fast = compiled
    sample(fast, NAME)
    block = model.model.diffusion_model.middle_block
    copied = copy.deepcopy(block[0])
    for weight in copied.parameters():
        weight.data.mul_(0.5)
    block[0] = copied
    assert same(sample(fast, NAME), sample(model, NAME))
    assert not any("forward" in module.__dict__ for module in model.model.diffusion_model.middle_block.modules())


def test_a_canary_sees_what_no_description_does(compiled, sample, monkeypatch, registry):
    """A graph that goes wrong by itself, as one does whose kernels somebody replaced."""
    from compiled_graphs.compiler.runtime import canary

    model, fast = compiled
    told = []
    fast, _ = host.compile_model(model, host.Request("eager", on_change=told.append))
    sample(fast, NAME)
    entry = next(entry for kind in host.compiled_model(fast).kinds() for entry in kind.graphs)
    good = entry.graph.executable
    object.__setattr__(entry.graph, "executable", lambda *tensors: [output * 2 for output in good(*tensors)])
    monkeypatch.setattr(canary, "CALLS", 1)
    with totals.expect(retired=1):
        for _ in range(20):
            sample(fast, NAME)
    assert same(sample(fast, NAME), sample(model, NAME))
    assert any("failed its check" in line for line in told)


@pytest.fixture
def looks(monkeypatch):
    """Count how often a compiled model is looked at."""
    from compiled_graphs.compiler.runtime.compiled_model import CompiledModel

    seen = []
    refresh = CompiledModel.refresh
    monkeypatch.setattr(CompiledModel, "refresh", lambda self, **given: seen.append(1) or refresh(self, **given))
    return seen


def test_a_network_is_looked_at_once_a_sampling(compiled, sample, looks):
    _, fast = compiled
    for _ in range(2):
        sample(fast, NAME, steps=5)
    once = hasattr(fast, "add_callback_with_key")
    assert len(looks) == (2 if once else 10)


class Half(nn.Module):
    """Stands for a block, and runs it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs) * 0.5


def reverse_blocks(blocks, patch):
    first, second = blocks
    patch.setitem(blocks._modules, "0", second)
    patch.setitem(blocks._modules, "1", first)


def skip_a_block(blocks, patch):
    patch.delitem(blocks._modules, "1")


def wrap_a_block(blocks, patch):
    patch.setitem(blocks._modules, "1", Half(blocks[1]))


@pytest.mark.parametrize("change", [reverse_blocks, skip_a_block, wrap_a_block], ids=lambda change: change.__name__)
def test_blocks_that_a_wrapper_moves_for_a_call_are_as_they_run(load, registry, sample, monkeypatch, change):
    patcher_extension = pytest.importorskip("comfy.patcher_extension", reason="this ComfyUI has no wrappers")
    model = load("tiny_sdxl")
    fast = host.compile_model(model, host.Request("eager"))[0]
    blocks = model.model.diffusion_model.input_blocks[4][1].transformer_blocks

    def changing(executor, *args, **kwargs):
        with monkeypatch.context() as patch:
            change(blocks, patch)
            return executor(*args, **kwargs)

    ours, theirs = fast.clone(), model.clone()
    for each in (ours, theirs):
        each.add_wrapper_with_key(patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", changing)
    plain, changed = sample(model, "tiny_sdxl"), sample(theirs, "tiny_sdxl")
    assert not torch.equal(changed, plain)
    for _ in range(2):
        close(sample(fast, "tiny_sdxl"), plain)
        close(sample(ours, "tiny_sdxl"), changed)


def close(ours, theirs):
    """Closer than the images with and without a change of one block."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_wrapper_may_run_a_network_twice(compiled, sample, monkeypatch, is_first):
    """And change it before one of the two runs."""
    patcher_extension = pytest.importorskip("comfy.patcher_extension", reason="this ComfyUI has no wrappers")
    model, fast = compiled

    def twice(executor, *args, **kwargs):
        results = []
        for is_changed in (is_first, not is_first):
            with monkeypatch.context() as patch:
                if is_changed:
                    tile(model.model.diffusion_model, patch)
                results.append(executor(*args, **kwargs))
        return results[0] * 0.7 + results[1] * 0.3

    ours, theirs = fast.clone(), model.clone()
    for each in (ours, theirs):
        each.add_wrapper_with_key(patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", twice)
    assert same(sample(ours, NAME), sample(theirs, NAME))


@pytest.mark.parametrize("how", ["model_function_wrapper", "apply_model"])
def test_what_changes_in_some_steps_only_shows(compiled, sample, monkeypatch, how):
    """As nodes do that have a first and a last step."""
    model, fast = compiled
    calls = []

    def run(call):
        calls.append(call)
        with monkeypatch.context() as patch:
            if len(calls) in (3, 4):
                edit_eps(model.model.diffusion_model, patch)
            return call()

    def wrapped(patcher):
        clone = patcher.clone()
        if how == "apply_model":
            extension = pytest.importorskip("comfy.patcher_extension", reason="this ComfyUI has no wrappers")
            clone.add_wrapper_with_key(
                extension.WrappersMP.APPLY_MODEL, "test", lambda executor, *a, **k: run(lambda: executor(*a, **k))
            )
        else:
            clone.set_model_unet_function_wrapper(
                lambda apply, given: run(lambda: apply(given["input"], given["timestep"], **given["c"]))
            )
        return clone

    plain, images = sample(model, NAME, steps=5), []
    for each in (model, fast):
        calls.clear()
        images.append(sample(wrapped(each), NAME, steps=5))
        assert len(calls) == 5
    assert not same(images[0], plain)
    assert same(images[1], images[0])


def test_a_network_is_looked_at_in_each_call_with_a_wrapper(compiled, sample, looks):
    """Once before the sampling, and once inside of each call."""
    patcher_extension = pytest.importorskip("comfy.patcher_extension", reason="this ComfyUI has no wrappers")
    _, fast = compiled
    clone = fast.clone()
    wrapper = patcher_extension.WrappersMP.DIFFUSION_MODEL
    clone.add_wrapper_with_key(wrapper, "test", lambda executor, *args, **kwargs: executor(*args, **kwargs))
    sample(clone, NAME, steps=5)
    assert len(looks) == 1 + 5


def test_torch_is_as_it_was(compiled, sample):
    _, fast = compiled
    sample(fast, NAME)
    state = torch.get_rng_state()
    host.compile_model(fast, host.Request("eager"))
    assert torch.equal(torch.get_rng_state(), state)
