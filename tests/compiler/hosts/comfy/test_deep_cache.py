"""Shallow steps of ComfyUI's UNets, against the same steps computed whole with the deep features put in by hand."""

from __future__ import annotations

import pytest
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.hosts.comfy import comfy_compat
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.deep_cache import Comparison, DeepCache, Settings, unusable, use_deep_cache
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from rows import control_net, hinted
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

STEPS = 9
DONE = Comparison(1.0, 0.5, 0.1)
"""With a comparison made, no step is computed both ways."""
TOKENS, WIDTH = 5, 24


class Model:
    """What a `model_function_wrapper` is given: a bound `apply_model`."""

    def __init__(self, network):
        self.diffusion_model = network
        self.blocks = 0
        for layer in network.modules():
            if type(layer).__name__ in ("ResBlock", "SpatialTransformer"):
                layer.register_forward_hook(self._count)

    def _count(self, *_):
        self.blocks += 1

    def apply_model(self, x, timestep, c_crossattn=None, control=None, transformer_options=None):
        return self.diffusion_model(
            x, timestep, context=c_crossattn, control=control, transformer_options=transformer_options
        )


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    operations = __import__("comfy.ops", fromlist=["ops"]).disable_weight_init
    network = UNetModel(
        image_size=8, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=[2, 2], channel_mult=[1, 2],
        transformer_depth=[1, 1, 1, 1], transformer_depth_middle=1, transformer_depth_output=[1] * 6,
        context_dim=WIDTH, num_heads=2, use_spatial_transformer=True, dtype=torch.float32, device="cpu",
        operations=operations,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in network.parameters():
            nn.init.normal_(parameter, 0, 0.1)
    return network


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def arguments(number, sigmas, control=None, which=(0, 1)):
    generator = torch.Generator().manual_seed(number)
    c = {"c_crossattn": torch.randn(2, TOKENS, WIDTH, generator=generator), "control": control}
    c["transformer_options"] = {"sigmas": sigmas}
    x = torch.randn(2, 4, 16, 16, generator=generator)
    return {"input": x, "timestep": sigmas.expand(2), "c": c, "cond_or_uncond": list(which)}


SCHEDULE = torch.linspace(10, 0, STEPS + 1)


def residuals(network, seed=0):
    """A ControlNet's: each block takes the last of its list."""
    shapes, generator = [], torch.Generator().manual_seed(seed)
    hooks = [
        block[-1].register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
        for block in [*network.input_blocks, network.middle_block]
    ]
    network(torch.zeros(2, 4, 16, 16), torch.ones(2), context=torch.zeros(2, TOKENS, WIDTH), transformer_options={})
    for hook in hooks:
        hook.remove()
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return {"input": [], "middle": [tensors[-1]], "output": tensors[:-1]}


def by_hand(network, depth, whole, shallow):
    """The call `shallow` computed whole, with what came up from the deep blocks in the call `whole`."""
    count = len(network.output_blocks) - depth - 1
    last = (network.output_blocks[count - 1] if count else network.middle_block)[-1]
    kept = []

    def put_in(module, inputs, output):
        kept.append(output.clone())  # residuals are added in place
        return kept[0].clone()

    hook = last.register_forward_hook(put_in)
    for call in (whole, shallow):
        result = network(
            call["input"],
            call["timestep"],
            context=call["c"]["c_crossattn"],
            control=copied(call),
            transformer_options=dict(call["c"]["transformer_options"]),
        )
    hook.remove()
    return result


@pytest.mark.parametrize(("layer", "block"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 12)])
@pytest.mark.parametrize("controlled", [False, True])
def test_a_shallow_step_is_a_whole_one_with_the_deep_features_of_an_earlier(network, layer, block, controlled):
    cache = DeepCache(network, Settings(interval=3, layer=layer, block=block))
    model = Model(network)
    calls = [arguments(n, SCHEDULE[n : n + 1].clone()) for n in range(4)]
    for call in calls:
        call["c"]["control"] = residuals(network) if controlled else None
    results, computed = [], []
    for call in calls:
        before = model.blocks
        results.append(cache(model.apply_model, {**call, "c": {**call["c"], "control": copied(call)}}))
        computed.append(model.blocks - before)
    for place, earlier in enumerate((0, 0, 0, 3)):
        torch.testing.assert_close(results[place], by_hand(network, cache.depth, calls[earlier], calls[place]))
    assert (cache.whole, cache.shallow) == (2, 2)
    assert computed[0] == computed[3] > 0
    assert all("forward" not in module.__dict__ for module in network.modules())


def copied(call):
    control = call["c"]["control"]
    return control and {name: list(values) for name, values in control.items()}


def test_what_a_shallow_step_leaves_out(network):
    cache = DeepCache(network, Settings(interval=100))
    model = Model(network)
    counts = []
    for number in range(4):
        before = model.blocks
        cache(model.apply_model, arguments(number, SCHEDULE[number : number + 1].clone()))
        counts.append(model.blocks - before)
    layers = [block for block in network.modules() if type(block).__name__ in ("ResBlock", "SpatialTransformer")]
    # Hooks run on layers that are left out, too: what counts is who computes.
    assert counts[0] == counts[2] == len(layers)
    outer = [*network.input_blocks[:3], *network.output_blocks[-3:]]
    deep = cache._deepest()
    assert len(deep) == sum(map(len, [*network.input_blocks, network.middle_block, *network.output_blocks])) - sum(
        map(len, outer)
    )
    assert cache.comparison.difference > 0
    assert cache.comparison.whole > 0


def test_the_calls_of_a_step_have_features_of_their_own(network):
    cache = DeepCache(network, Settings(interval=2))
    cache.comparison = DONE
    model = Model(network)
    first, second = SCHEDULE[:1].clone(), SCHEDULE[1:2].clone()
    cond, uncond = arguments(0, first, which=(0,)), arguments(1, first, which=(1,))
    cache(model.apply_model, cond)
    cache(model.apply_model, uncond)
    for number, (earlier, which) in enumerate(((cond, (0,)), (uncond, (1,)))):
        call = arguments(2 + number, second, which=which)
        torch.testing.assert_close(cache(model.apply_model, call), by_hand(network, cache.depth, earlier, call))
    assert (cache.whole, cache.shallow) == (1, 1)


def test_features_belong_to_their_conditioning(network):
    """One that ends makes way for another one, or for a region that had another number in the step."""
    cache = DeepCache(network, Settings(interval=4))
    model = Model(network)
    calls = [arguments(number, SCHEDULE[number : number + 1].clone()) for number in range(3)]
    for call, name in zip(calls, "aab"):
        call["c"]["transformer_options"]["uuids"] = [name, "uncond"]
    results = [cache(model.apply_model, call) for call in calls]
    torch.testing.assert_close(results[1], by_hand(network, cache.depth, calls[0], calls[1]))
    torch.testing.assert_close(results[2], by_hand(network, cache.depth, calls[2], calls[2]))


def test_a_function_of_another_wrapper_is_called(network):
    """It does not say which model's schedule the window is a part of. Then all steps are whole."""
    cache = DeepCache(network, Settings(interval=4, start=400))
    model = Model(network)
    for number in range(2):
        call = arguments(number, SCHEDULE[number : number + 1].clone())
        result = cache(lambda x, t, **c: model.apply_model(x, t, **c), call)
        torch.testing.assert_close(result, by_hand(network, cache.depth, call, call))


def test_a_new_sampling_begins_whole(network):
    cache = DeepCache(network, Settings(interval=4))
    cache.comparison = DONE
    model = Model(network)
    for number in range(3):
        cache(model.apply_model, arguments(number, SCHEDULE[number : number + 1].clone()))
    assert (cache.whole, cache.shallow) == (1, 2)
    cache.begin()  # the last one was interrupted, and did not end
    call = arguments(9, SCHEDULE[3:4].clone())
    torch.testing.assert_close(cache(model.apply_model, call), by_hand(network, cache.depth, call, call))
    assert (cache.whole, cache.shallow) == (1, 0)


def test_another_size_is_whole_first(network):
    cache = DeepCache(network, Settings(interval=4))
    model = Model(network)
    cache(model.apply_model, arguments(0, SCHEDULE[:1].clone()))
    call = arguments(1, SCHEDULE[1:2].clone())
    call["input"] = call["input"][:, :, :8]
    torch.testing.assert_close(cache(model.apply_model, call), by_hand(network, cache.depth, call, call))


@pytest.mark.parametrize("name", ["output_block_patch", "input_block_patch", "middle_block_after_patch"])
def test_steps_with_patches_between_blocks_are_whole_and_the_text_says_so(network, name):
    cache = DeepCache(network, Settings(interval=4))
    model, seen = Model(network), []

    def patch(h, *rest):
        seen.append((h["h"] if isinstance(h, dict) else h).shape[1])
        return (h, rest[0]) if len(rest) > 1 else h

    for number in range(3):
        call = arguments(number, SCHEDULE[number : number + 1].clone())
        call["c"]["transformer_options"]["patches"] = {name: [patch]}
        cache(model.apply_model, call)
    assert (cache.whole, cache.shallow) == (3, 0)
    assert min(seen) >= 32
    assert f"The last step was whole because of patch {name}." in cache.text()


def test_an_earlier_wrapper_goes_on(network):
    seen = []

    def inner(apply_model, call):
        seen.append(call["timestep"])
        return 2 * apply_model(call["input"], call["timestep"], **call["c"])

    cache, model = DeepCache(network, Settings(), inner), Model(network)
    call = arguments(0, SCHEDULE[:1].clone())
    torch.testing.assert_close(cache(model.apply_model, call), 2 * by_hand(network, cache.depth, call, call))
    assert len(seen) == 1


def test_what_is_raised_in_a_shallow_step_leaves_nothing_behind(network):
    cache, model = DeepCache(network, Settings()), Model(network)
    cache(model.apply_model, arguments(0, SCHEDULE[:1].clone()))
    call = arguments(1, SCHEDULE[1:2].clone())
    call["c"]["c_crossattn"] = None
    with pytest.raises((AttributeError, RuntimeError, TypeError)):
        cache(model.apply_model, call)
    assert all("forward" not in module.__dict__ for module in network.modules())
    assert not network.middle_block[-1]._forward_hooks or all(
        hook.__name__ != "keep" for hook in network.middle_block[-1]._forward_hooks.values()
    )


def test_only_a_unet_has_deep_blocks():
    assert "is not a UNet" in unusable(nn.Linear(2, 2))


# In ComfyUI's own sampling, beside compiled blocks.


@pytest.fixture
def model(load):
    return load("tiny_sd15")


def cached(model, told=None, **settings):
    if not hasattr(model, "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling begins")
    return use_deep_cache(model, Settings(**settings), (told if told is not None else []).append)[0]


def cache_of(model):
    return model.model_options["model_function_wrapper"]


@pytest.mark.parametrize("name", ["tiny_sd15", "tiny_sdxl"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_with_compiled_blocks_the_image_is_that_without(name, order, load, sample, registry):
    model = load(name)
    theirs = cached(model, block=0)
    ours = cached(model, block=0) if order == "before" else model
    ours = host.compile_model(ours, host.Request("eager"))[0]
    ours = cached(ours, block=0) if order == "after" else ours
    for patcher in (theirs, ours):
        cache_of(patcher).comparison = DONE
    expected, image = sample(theirs, name, steps=STEPS), sample(ours, name, steps=STEPS)
    assert ((image - expected).norm() / expected.norm()).item() < 2e-4
    assert (cache_of(ours).whole, cache_of(ours).shallow) == (3, 6)
    counters = ours.object_patches["diffusion_model.forward"].compiled.counters
    assert counters.calls > 0
    assert not counters.eager_calls
    whole = sample(model, name, steps=STEPS)
    assert ((expected - whole).norm() / whole.norm()).item() > 1e-3, "no step was shallow"


def test_the_window_is_part_of_the_schedule(model, sample):
    theirs = cached(model, block=0, start=400, end=700)
    cache_of(theirs).comparison = DONE
    sample(theirs, "tiny_sd15", steps=STEPS)
    assert 0 < cache_of(theirs).shallow < 4
    assert cache_of(theirs).whole + cache_of(theirs).shallow == STEPS


def test_residuals_of_a_control_net_reach_the_blocks_that_are_computed(model, sample):
    theirs = cached(model, block=0)
    cache_of(theirs).comparison = DONE
    images = [sample(theirs, "tiny_sd15", steps=STEPS, **hinted(control_net(model), v)) for v in (0.2, 0.9)]
    assert cache_of(theirs).shallow == 6
    assert (images[0] - images[1]).norm() / images[0].norm() > 1e-3


def test_an_interrupted_sampling_leaves_nothing_for_the_next(model, sample):
    theirs, untouched = cached(model, block=0), cached(model, block=0)
    for patcher in (theirs, untouched):
        cache_of(patcher).comparison = DONE

    def interrupt(step, *_):
        if step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(theirs, "tiny_sd15", steps=STEPS, seed=5, callback=interrupt)
    images = [sample(patcher, "tiny_sd15", steps=STEPS, seed=7) for patcher in (theirs, untouched)]
    assert torch.equal(*images)
    assert (cache_of(theirs).whole, cache_of(theirs).shallow) == (3, 6)


def test_where_nobody_says_that_a_sampling_begins_the_model_comes_back():
    class Old:
        model = None

    old = Old()
    assert use_deep_cache(old, Settings(), print) == (
        old,
        "Without DeepCache: this ComfyUI does not say when a sampling begins. Update it to 0.3.10 or newer.",
    )


def test_what_a_sampling_did_is_told(model, sample):
    told = []
    sample(cached(model, told, block=0), "tiny_sd15", steps=STEPS)
    assert told[0].startswith("DeepCache: a shallow step computes")
    assert "6 of 9 steps were shallow. A shallow step is " in told[0]
    assert told[0].endswith("%.")


def test_a_later_deep_cache_takes_the_place_of_an_earlier(model, sample):
    first = cached(model, interval=2)
    second = cached(first, interval=5)
    assert cache_of(second).inner is None
    assert cache_of(first).settings.interval == 2


def passed_on(model):
    """What other nodes do that keep the wrapper that was there."""
    inner, clone = cache_of(model), model.clone()
    clone.set_model_unet_function_wrapper(lambda apply, given: inner(lambda x, t, **c: apply(x, t, **c), given))
    return clone


def test_two_of_them_with_another_wrapper_between_begin_anew_with_each_sampling(model, sample):
    def twice():
        return cached(passed_on(cached(model, block=0, interval=3)), block=0, interval=3)

    again, fresh = twice(), twice()
    sample(again, "tiny_sd15", steps=STEPS, seed=5)
    assert torch.equal(sample(again, "tiny_sd15", steps=STEPS, seed=7), sample(fresh, "tiny_sd15", steps=STEPS, seed=7))


def test_it_changes_nothing_in_a_network_and_another_wrapper_might(model):
    assert not comfy_compat.wraps_calls(model)
    assert not comfy_compat.wraps_calls(cached(model))
    assert comfy_compat.wraps_calls(passed_on(cached(model)))
    assert comfy_compat.wraps_calls(cached(passed_on(cached(model))))


def test_the_window_is_known_through_another_wrapper(model, sample):
    theirs = cached(model, block=0, start=400, end=700)
    sample(passed_on(theirs), "tiny_sd15", steps=STEPS)
    assert 0 < cache_of(theirs).shallow < 4


def test_with_context_windows_each_step_is_whole(model, sample):
    """Each window has other frames: the deep features of one are not those of another."""
    windows = pytest.importorskip("comfy.context_windows", reason="this ComfyUI has no context windows")
    model = model.clone()
    model.model_options["context_handler"] = windows.IndexListContextHandler(
        context_schedule=windows.get_matching_context_schedule("standard_static"),
        fuse_method=windows.get_matching_fuse_method("flat"), context_length=2, context_overlap=0, dim=0,
    )  # fmt: skip
    ours = cached(model, interval=2)
    cache_of(ours).comparison = DONE
    expected, image = (sample(each, "tiny_sd15", steps=4, batch=4) for each in (model, ours))
    assert torch.equal(image, expected)
    assert "context windows" in cache_of(ours).text()


def test_the_first_image_is_that_of_later_runs(model, sample):
    """Its first shallow step is compared with a whole one."""
    theirs = cached(model, block=0)
    images = [sample(theirs, "tiny_sd15", steps=STEPS) for _ in range(2)]
    assert cache_of(theirs).comparison is not None
    assert torch.equal(*images)


def test_a_model_without_deep_blocks_comes_back_as_it_is(load):
    model = load("tiny_sd3")
    if not hasattr(model, "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling begins")
    same, text = use_deep_cache(model, Settings(), print)
    assert same is model
    assert text.startswith("Without DeepCache:")


def test_steps_are_not_recorded_and_the_reason_is_said():
    reason = HOST.capture_blocker(
        {"transformer_options": {"sample_sigmas": torch.ones(21), "compiled_graphs.deep_cache": True}}, frozenset()
    )
    assert reason.code is ReasonCode.DEEP_CACHE
