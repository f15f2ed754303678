"""Compile Model beside other things that compile, cache or replace blocks: of two compilers the later node's wins."""

from __future__ import annotations

import copy

import comfy.model_management
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 1e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""
SET_ASIDE = "TorchCompileModel before this node is not used: this node compiles instead."
SIZES = ({}, {"height": 16, "width": 8})


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def model(load):
    return load("tiny_sd3")


def compiled(model):
    return host.compile_model(model, host.Request("eager", verify=False))


def assert_same(ours, theirs):
    assert ours.isfinite().all()
    assert (ours - theirs).norm() <= BOUND * theirs.norm()


def assert_images(sample, changed, reference, sizes=SIZES):
    """Each size twice, with another model in between, which takes the patches of the first one out and in again."""
    for size in sizes:
        theirs = sample(reference, "tiny_sd3", **size)
        for _ in range(2):
            assert_same(sample(changed, "tiny_sd3", **size), theirs)
            comfy.model_management.unload_all_models()


def assert_untouched(model):
    comfy.model_management.unload_all_models()
    for module in model.model.modules():
        assert HOST.module_is_clean(module), type(module).__name__
        assert type(module).__name__ != "OptimizedModule"


def by_wrapper(model):
    """As core's TorchCompileModel does it."""
    helpers = pytest.importorskip("comfy_api.torch_helpers")
    clone = model.clone()
    helpers.set_torch_compile_wrapper(model=clone, backend="eager")
    return clone


def by_patch_of_the_model(model):
    """As core's TorchCompileModel did it in 2024."""
    clone = model.clone()
    clone.add_object_patch("diffusion_model", torch.compile(clone.get_model_object("diffusion_model"), backend="eager"))
    return clone


def by_patch_of_each_block(model):
    clone = model.clone()
    for number in range(len(model.model.diffusion_model.joint_blocks)):
        name = f"diffusion_model.joint_blocks.{number}"
        clone.add_object_patch(name, torch.compile(clone.get_model_object(name), backend="eager"))
    return clone


WAYS = [by_wrapper, by_patch_of_the_model, by_patch_of_each_block]


@pytest.mark.parametrize("torch_compile", WAYS)
def test_torch_compile_before_is_set_aside_and_the_node_says_so(torch_compile, model, sample, registry):
    theirs = torch_compile(model)
    ours, text = compiled(theirs)
    assert SET_ASIDE in text
    assert text.startswith("Ready: ")
    calls = totals.calls
    with totals.expect(compiles=0, retired=0):
        assert_images(sample, ours, model)
    assert totals.calls > calls
    assert_untouched(model)
    assert_images(sample, theirs, model, SIZES[:1])  # the other branch of the workflow keeps its own


@pytest.mark.parametrize("torch_compile", WAYS)
def test_torch_compile_after_wins(torch_compile, model, sample, registry):
    ours, _ = compiled(model)
    both = torch_compile(ours)
    calls = totals.calls
    assert_same(sample(both, "tiny_sd3"), sample(model, "tiny_sd3"))
    if torch_compile is not by_patch_of_the_model:  # there ComfyUI puts our patch onto its wrapper, and blocks are ours
        assert totals.calls == calls
    assert_images(sample, both, model, SIZES[:1])  # dynamo compiles for each size
    calls = totals.calls
    assert_images(sample, ours, model)
    assert totals.calls > calls


def test_blocks_that_torch_compiled_in_place_are_left_so(model, sample, registry):
    block = model.model.diffusion_model.joint_blocks[0]
    block.compile(backend="eager")
    ours, text = compiled(model)
    assert text.splitlines()[1] == "Parts that torch.compile has compiled already stay as they are."
    block._compiled_call_impl = None
    assert_same(sample(ours, "tiny_sd3"), sample(model, "tiny_sd3"))


class FirstBlockCache(nn.Module):
    """Skips the other blocks when the first one gives nearly what it gave last time, as caching extensions do."""

    def __init__(self, blocks, threshold=0.1):
        super().__init__()
        object.__setattr__(self, "blocks", list(blocks))
        self.threshold = threshold
        self.last, self.rest, self.skipped = None, None, 0

    def forward(self, context, x, **arguments):
        context, x = self.blocks[0](context, x, **arguments)
        seen = self.last is not None and self.last.shape == x.shape
        if seen and (x - self.last).norm() < self.threshold * x.norm():
            self.skipped += 1
            return None, x + self.rest
        self.last, first = x.clone(), x.clone()
        for block in self.blocks[1:]:
            context, x = block(context, x, **arguments)
        self.rest = x - first
        return context, x


def cached(model, of):
    clone = model.clone()
    cache = FirstBlockCache(of.model.diffusion_model.joint_blocks)
    clone.add_object_patch("diffusion_model.joint_blocks", nn.ModuleList([cache]))
    return clone, cache


@pytest.mark.parametrize("order", ["cached first", "compiled first"])
def test_a_cache_of_the_first_block_works_with_compiled_blocks(order, model, sample, registry):
    steps = {"steps": 6, "cfg": 1.0}
    reference, plain_cache = cached(model, model)
    theirs = sample(reference, "tiny_sd3", **steps)
    comfy.model_management.unload_all_models()
    if order == "cached first":
        changed, cache = cached(model, model)
        changed, _ = compiled(changed)
    else:
        changed, cache = cached(compiled(model)[0], model)
    calls = totals.calls
    for _ in range(2):
        assert_same(sample(changed, "tiny_sd3", **steps), theirs)
        assert cache.skipped == plain_cache.skipped
        comfy.model_management.unload_all_models()
        cache.last, cache.skipped = None, 0
    assert totals.calls > calls
    assert HOST.module_is_clean(cache)
    assert_untouched(model)


def test_copies_of_a_model_that_runs_are_plain(model, sample, registry):
    """Some nodes keep a deep copy of the network they are given."""
    ours, _ = compiled(model)
    copies = []

    def keeps_a_copy(apply_model, arguments):
        copies.append(copy.deepcopy(model.model.diffusion_model))
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    changed = ours.clone()
    changed.set_model_unet_function_wrapper(keeps_a_copy)
    sample(changed, "tiny_sd3")
    assert all(HOST.module_is_clean(module) for module in copies[0].modules())


class TiledOnce:
    """A wrapper that remembers the first size, until its node resets it (as one of tiled diffusion does)."""

    def __init__(self):
        self.first = None

    def __call__(self, apply_model, arguments):
        self.first = self.first or arguments["input"].shape[-1]
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"]) * self.first


def test_a_wrapper_that_its_node_resets_is_reset(load, registry, sample):
    model, wrapper = load("tiny_sd15"), TiledOnce()
    model.set_model_unet_function_wrapper(wrapper)
    fast = host.compile_model(model, host.Request("eager"))[0]
    for width in (8, 12):
        wrapper.first = None
        ours = sample(fast, "tiny_sd15", width=width)
        wrapper.first = None
        assert torch.equal(ours, sample(model, "tiny_sd15", width=width))


@pytest.fixture
def replaced(load):
    """A model, and a clone in which another node puts another network in the place of the model's."""
    model = load("tiny_sd15")
    other = copy.deepcopy(model.model.diffusion_model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.9)
    clone = model.clone()
    clone.add_object_patch("diffusion_model", other)
    return model, clone


def test_a_network_that_another_node_replaces_is_left_alone(replaced, registry, sample):
    model, clone = replaced
    plain, theirs = sample(model, "tiny_sd15"), sample(clone, "tiny_sd15")
    assert (theirs - plain).norm() > 1e-2 * plain.norm()
    ours, text = host.compile_model(clone, host.Request("eager"))
    assert text == "Not compiled: another node puts its own network in the place of this model's"
    assert_same(sample(ours, "tiny_sd15"), theirs)


def test_a_network_that_is_replaced_after_compiling_gets_nothing_of_ours(replaced, registry, sample):
    model, clone = replaced
    if not hasattr(model, "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling begins")
    plain, theirs = sample(model, "tiny_sd15"), sample(clone, "tiny_sd15")
    fast = host.compile_model(model, host.Request("eager"))[0].clone()
    fast.add_object_patch("diffusion_model", clone.object_patches["diffusion_model"])
    for _ in range(2):
        assert_same(sample(fast, "tiny_sd15"), theirs)
        assert_same(sample(clone, "tiny_sd15"), theirs)
        assert_same(sample(model, "tiny_sd15"), plain)
    comfy.model_management.unload_all_models()
    for network in (model.model.diffusion_model, clone.object_patches["diffusion_model"]):
        assert all(HOST.module_is_clean(module) for module in network.modules())
