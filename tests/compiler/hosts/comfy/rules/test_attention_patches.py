"""Attention patches of ComfyUI inside of graphs."""

from __future__ import annotations

import json

import comfy.supported_models
import pytest
import torch
from architectures import TABLE, At
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.rules.attention_patches import (
    PATCH_POINTS,
    PatchCalls,
    patch_names,
    patch_points_of,
    traced_options,
)
from compiled_graphs.compiler.identity.call_signature import parse

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 1e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""
LITERALS = frozenset({"n_heads", "dim_head", "attn_precision", *PATCH_POINTS})


def first(q, k, v, options):
    return q


def options(block=("input", 4), **patches):
    replaced = {name: patches.pop(name) for name in ("attn1", "attn2") if name in patches}
    return {"block": block, "patches": patches, "patches_replace": replaced, "sigmas": torch.ones(1)}


@pytest.mark.parametrize(
    ("given", "patch_points"),
    [
        ({}, ""),
        ({"attn2": {("input", 4): first}}, "attn2:*"),
        ({"attn2": {("input", 4, 1): first, ("input", 4, 0): first, ("input", 7, 9): first}}, "attn2:0,1"),
        ({"attn2": {("input", 4): first, ("input", 4, 1): first}}, "attn2:*"),
        ({"attn2": {("output", 4): first}}, ""),
        ({"attn1": {("input", 4): first}, "attn2": {("input", 4, 0): first}}, "attn1:*;attn2:0"),
        ({"middle_patch": [first], "attn1_output_patch": []}, "middle_patch"),
        ({"input_block_patch": [first]}, ""),
    ],
)
def test_hooks_are_those_that_the_block_will_look_up(given, patch_points):
    assert patch_points_of(options(**given), LITERALS) == patch_points
    assert patch_points_of(options(**given), frozenset({"attn2"})) == "", "another block's code"


OF_FLUX = frozenset({"patches", "attn1_patch", "attn1_output_patch", "img_slice"})
OF_KREA = OF_FLUX | {"block_index"}


@pytest.mark.parametrize(
    ("given", "code", "patch_points"),
    [
        ({}, OF_FLUX, "attn1_output_patch"),
        ({"block_index": 2}, OF_FLUX, "attn1_output_patch"),
        ({"block_index": 2}, OF_KREA, "attn1_output_patch"),
        ({}, OF_KREA, "attn1_output_patch;unnumbered"),
        ({}, frozenset({"patches", "attn1_patch"}), ""),
    ],
)
def test_other_code_has_operators_for_the_outputs_that_it_names(given, code, patch_points):
    given = {**options(attn1={("input", 4): first}, attn1_output_patch=[first], middle_patch=[first]), **given}
    assert patch_points_of(given, code) == patch_points


def test_switches_that_code_names_are_among_the_patch_points():
    given = options() | {"b_switch": False, "a_switch": True, "other": True, "block_index": True}
    assert patch_points_of(given, OF_KREA | {"a_switch", "b_switch"}) == "a_switch=True;b_switch=False"
    traced = traced_options(False, "a_switch=True;b_switch=False")
    assert (traced.get("a_switch"), traced.get("b_switch", True), traced.get("c_switch", 5)) == (True, False, 5)
    assert (traced.reads, traced.writes()) == ({"c_switch"}, {})


def test_code_sees_whether_its_block_has_a_number():
    assert "block_index" in traced_options(False, "attn1_output_patch")
    assert "block_index" not in traced_options(False, "attn1_output_patch;unnumbered")


def test_the_function_for_one_transformer_comes_before_that_for_all():
    given = options(attn2={("input", 4): lambda *a: "all", ("input", 4, 1): lambda *a: "one"})
    call = PatchCalls(given)
    assert [call("attn2", {"block_index": n}, None, None, None) for n in (0, 1)] == ["all", "one"]


def test_a_patch_sees_the_options_of_the_call_and_of_the_block():
    seen = {}
    given = options(middle_patch=[lambda x, extra: seen.update(extra) or x + 1, lambda x, extra: x * 2])
    assert PatchCalls(given)("middle_patch", {"n_heads": 8}, 3) == 8
    assert seen.keys() == {*given, "n_heads"}
    assert seen["block"] == ("input", 4)


def test_a_patch_sees_what_one_before_it_left():
    def leave(x, extra):
        extra["left"] = x
        return x

    given = options(attn1_output_patch=[leave], middle_patch=[lambda x, extra: x + extra["left"]])
    call = PatchCalls(given)
    call("attn1_output_patch", {"block_index": 0}, 2)
    assert call("middle_patch", {"block_index": 0}, 3) == 5
    with pytest.raises(KeyError):  # another transformer block has options of its own
        call("middle_patch", {"block_index": 1}, 3)


def test_functions_are_told_apart_by_name():
    assert patch_names(options(attn2={("input", 4): first}), "attn2:*") == {f"{__name__}.first"}


@pytest.mark.parametrize("patch_points", ["attn9:*", "attn2:x", "attn2:", "__import__('os')", "switch=yes"])
def test_hooks_of_a_file_that_make_no_sense_are_refused(patch_points):
    with pytest.raises(ValueError):  # noqa: PT011  int() and we
        traced_options(False, patch_points)
    signature, _ = parse(json.dumps([["dict", []], ["transformer_options"], patch_points]))
    assert signature.patch_points == patch_points


@pytest.fixture
def compiled(load, registry):
    model = load("tiny_sd15")
    return model, host.compile_model(model, host.Request("eager"))[0]


def replaced(patcher, function, kind="attn2"):
    clone = patcher.clone()
    getattr(clone, f"set_model_{kind}_replace")(function, "middle", 0)
    return clone


def same(ours, theirs, bound=BOUND):
    return ((ours - theirs).norm() / theirs.norm()).item() <= bound


def differ(ours, theirs):
    """Whether two plain runs differ: nothing is rounded otherwise in one of them."""
    return not same(ours, theirs, bound=1e-4)


def test_another_function_is_checked_before_its_results_are_used(compiled, sample):
    model, fast = compiled
    steps = {"steps": 3}

    def one(q, k, v, options):
        return q * 0.5

    def other(q, k, v, options):
        return q * 2

    for function in (one, other):
        with totals.expect(verifications=1 + (function is one) * 3, retired=0):  # the plain graphs too, the first time
            assert same(sample(replaced(fast, function), "tiny_sd15", **steps),
                        sample(replaced(model, function), "tiny_sd15", **steps))  # fmt: skip
        with totals.expect(verifications=0):
            sample(replaced(fast, function), "tiny_sd15", **steps)


def test_what_a_patch_raises_is_raised_as_it_is_and_the_graph_stays(compiled, sample):
    model, fast = compiled
    function = lambda q, k, v, options: q * 0.5  # noqa: E731
    sample(replaced(fast, function), "tiny_sd15")

    def failing(q, k, v, options):
        raise ZeroDivisionError("a patch's own")

    with totals.expect(retired=0):
        with pytest.raises(ZeroDivisionError, match="a patch's own"):
            sample(replaced(fast, failing), "tiny_sd15")
        assert same(sample(replaced(fast, function), "tiny_sd15"), sample(replaced(model, function), "tiny_sd15"))


def test_a_patch_that_gives_another_dtype_fails_as_it_would(compiled, sample):
    model, fast = compiled

    def wide(q, k, v, options):
        return q.double()

    with pytest.raises(RuntimeError) as theirs:  # the next layer refuses it
        sample(replaced(model, wide), "tiny_sd15")
    with totals.expect(retired=0), pytest.raises(RuntimeError) as ours:
        sample(replaced(fast, wide), "tiny_sd15")
    assert str(ours.value) == str(theirs.value)


def drawing(q, k, v, options):
    return q + torch.rand(1).item()


def counting():
    calls = []

    def patch(q, k, v, options):
        calls.append(1)
        return q * (1 + len(calls) / 10)

    return patch, calls


def test_a_patch_draws_its_random_numbers_once(compiled, sample):
    model, fast = compiled
    with totals.expect(retired=0):
        for _ in range(2):  # the first one checks
            assert same(sample(replaced(fast, drawing), "tiny_sd15", steps=2),
                        sample(replaced(model, drawing), "tiny_sd15", steps=2))  # fmt: skip


def test_a_patch_is_called_once_for_each_call_of_its_block(compiled, sample):
    model, fast = compiled
    (ours, our_calls), (theirs, their_calls) = counting(), counting()
    with totals.expect(retired=0):
        assert same(sample(replaced(fast, ours), "tiny_sd15", steps=3),
                    sample(replaced(model, theirs), "tiny_sd15", steps=3))  # fmt: skip
    assert len(our_calls) == len(their_calls) > 0


@pytest.mark.parametrize("kind", ["set_model_output_block_patch", "set_model_input_block_patch"])
def test_patches_between_blocks_see_what_blocks_write(compiled, sample, kind):
    model, fast = compiled
    seen = {}

    def patched(patcher, name):
        def patch(*arguments):
            *tensors, options = arguments
            written = {n: options[n] for n in ("activations_shape", "block_index", "block") if n in options}
            seen.setdefault(name, []).append(written)
            return tuple(tensors) if len(tensors) > 1 else tensors[0]

        clone = patcher.clone()
        getattr(clone, kind)(patch)
        return clone

    for _ in range(2):
        seen.clear()
        assert same(sample(patched(fast, "ours"), "tiny_sd15"), sample(patched(model, "theirs"), "tiny_sd15"))
        assert seen["ours"] == seen["theirs"]


def test_a_block_that_asks_where_it_is_runs_eagerly(load, registry, sample, monkeypatch):
    from comfy.ldm.modules.attention import BasicTransformerBlock

    forward = BasicTransformerBlock.forward

    def by_place(self, x, context=None, transformer_options={}):  # noqa: B006  as ComfyUI has it
        x = forward(self, x, context, transformer_options)
        return x * 3 if transformer_options.get("block") == ("middle", 0) else x

    monkeypatch.setattr(BasicTransformerBlock, "forward", by_place)
    model = load("tiny_sd15")
    fast = host.compile_model(model, host.Request("eager"))[0]
    assert same(sample(fast, "tiny_sd15"), sample(model, "tiny_sd15"))
    reasons = host.compiled_model(fast).summary().reasons
    assert any("depends on the transformer option block" in str(reason) for reason in reasons)


@pytest.mark.parametrize("name", ["Flux dev", "FLUX.2 dev, Klein", "Chroma", "HunyuanVideo", "Krea 2"])
def test_normalized_attention_guidance_is_compiled_in_blocks_of_other_networks(name, registry):
    guidance = pytest.importorskip("comfy_extras.nodes_nag").NAGuidance.execute
    architecture = next(row for row in TABLE if row.name == name)
    if not hasattr(comfy.supported_models, architecture.cls):
        pytest.skip(f"this ComfyUI has no {architecture.cls}")
    sides = (18, 34) if name == "HunyuanVideo" else (17, 33)  # its own code bears no odd sides
    first, *others = At(1, 3, 16, 24, 20), At(1, 5, 24, 16, 33), At(2, 3, *sides, 20)

    def sampled(patcher, at):
        (guided,) = guidance(patcher, 5.0, 0.5, 1.5)
        return architecture.sample(guided, at)

    plain = architecture.patcher()
    fast = host.compile_model(architecture.patcher(), host.Request("eager"))[0]
    assert same(sampled(fast, first), sampled(plain, first))
    assert differ(architecture.sample(plain, first), sampled(plain, first)), "the patch acts"
    with totals.expect(compiles=0, retired=0):
        for at in others:
            assert same(sampled(fast, at), sampled(plain, at))
    assert host.compiled_model(fast).counters.eager_calls == {}


def overridden(patcher, override):
    """Set a function in the place of attention, as nodes for SageAttention do."""
    clone = patcher.clone()
    clone.model_options = {**clone.model_options}
    options = {**clone.model_options["transformer_options"], "optimized_attention_override": override}
    clone.model_options["transformer_options"] = options
    return clone


def halved(function, *arguments, **given):
    return function(*arguments, **given) * 0.5


def by_block(function, *arguments, **given):
    options = given["transformer_options"]
    options["calls"] = options.get("calls", 0) + 1
    number = options.get("block_index", 0) + len(options.get("block", ())) + options["calls"] / 100
    return function(*arguments, **given) * (1 + number / 10)


def random_override(function, *arguments, **given):
    return function(*arguments, **given) + torch.rand(1).item()


OVERRIDES = [halved, by_block, random_override]


@pytest.fixture
def overrides():
    from comfy.ldm.modules import attention

    if not hasattr(attention, "wrap_attn"):
        pytest.skip("this ComfyUI has no attention overrides")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_of_attention_is_called_from_inside_of_graphs(load, registry, sample, overrides, override, verify):
    model = load("tiny_sd15")
    fast = host.compile_model(model, host.Request("eager", verify=verify))[0]
    steps = {"steps": 2}
    with totals.expect(compiles=0, retired=0):
        for _ in range(2):
            assert same(sample(overridden(fast, override), "tiny_sd15", **steps),
                        sample(overridden(model, override), "tiny_sd15", **steps))  # fmt: skip
        assert same(sample(fast, "tiny_sd15", **steps), sample(model, "tiny_sd15", **steps))
    assert host.compiled_model(fast).counters.eager_calls == {}


@pytest.mark.parametrize("name", ["Flux dev", "Qwen-Image", "Wan 2.1, image to video", "LTX-Video", "LTX-2"])
@pytest.mark.parametrize("override", [halved, by_block])
def test_networks_of_other_kinds_call_an_override(name, override, registry, overrides):
    architecture = next(row for row in TABLE if row.name == name)
    if not hasattr(comfy.supported_models, architecture.cls):
        pytest.skip(f"this ComfyUI has no {architecture.cls}")
    plain, fast = architecture.patcher(), host.compile_model(architecture.patcher(), host.Request("eager"))[0]
    for at in (At(1, 3, 16, 24, 20), At(1, 5, 24, 16, 33)):
        ours, theirs = (architecture.sample(overridden(patcher, override), at) for patcher in (fast, plain))
        assert same(ours, theirs)
        assert differ(architecture.sample(plain, at), theirs), "it acts"
    assert host.compiled_model(fast).counters.eager_calls == {}


def test_networks_without_one_of_their_parts_are_compiled(registry):
    """As LTX-2's guidance nodes have it: one pass without the attention between video and sound."""
    architecture = next(row for row in TABLE if row.name == "LTX-2")
    if not hasattr(comfy.supported_models, architecture.cls):
        pytest.skip(f"this ComfyUI has no {architecture.cls}")

    def sampled(patcher, at, **switches):
        clone = patcher.clone()
        clone.model_options = {**clone.model_options}
        clone.model_options["transformer_options"] = {**clone.model_options["transformer_options"], **switches}
        return architecture.sample(clone, at)

    first, other = At(1, 3, 16, 24, 20), At(1, 5, 24, 16, 33)
    plain, fast = architecture.patcher(), host.compile_model(architecture.patcher(), host.Request("eager"))[0]
    ways = [{}, {"a2v_cross_attn": False}, {"a2v_cross_attn": False, "v2a_cross_attn": False}, {"a2v_cross_attn": True}]
    for switches in ways:
        assert same(sampled(fast, first, **switches), sampled(plain, first, **switches))
    assert differ(sampled(plain, first), sampled(plain, first, **ways[1]))
    with totals.expect(compiles=0, retired=0):
        for switches in ways:
            assert same(sampled(fast, other, **switches), sampled(plain, other, **switches))
    assert host.compiled_model(fast).counters.eager_calls == {}


def test_the_node_that_chooses_an_attention_keeps_a_model_compiled(load, registry, sample, overrides):
    model = load("tiny_sd15")
    fast = host.compile_model(model, host.Request("eager"))[0]
    from comfy.ldm.modules.attention import attention_basic

    clones = [patcher.clone() for patcher in (fast, model)]
    if not hasattr(model, "set_model_optimized_attention"):
        pytest.skip("this ComfyUI has no such node")
    for clone in clones:
        clone.set_model_optimized_attention(attention_basic)
    with totals.expect(compiles=0, retired=0):
        assert same(*(sample(clone, "tiny_sd15") for clone in clones))
    assert host.compiled_model(fast).counters.eager_calls == {}


def test_an_override_that_gives_another_dtype_runs_as_it_would(load, registry, sample, overrides):
    def wide(function, *arguments, **given):
        return function(*arguments, **given).double()

    model = load("tiny_sd15")
    fast = host.compile_model(model, host.Request("eager", verify=False))[0]
    with pytest.raises(RuntimeError) as theirs:  # the next layer refuses it
        sample(overridden(model, wide), "tiny_sd15")
    with totals.expect(retired=0), pytest.raises(RuntimeError) as ours:
        sample(overridden(fast, wide), "tiny_sd15")
    assert str(ours.value) == str(theirs.value)


def test_attention_that_no_graph_can_hand_over_is_left_to_the_block(load, registry, sample, overrides, monkeypatch):
    from comfy.ldm.modules import attention

    forward = attention.CrossAttention.forward

    def with_scale(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006  as in ComfyUI
        own = {**transformer_options, "of_the_block": torch.ones(1)}
        return forward(self, x, context, value, mask, own)

    monkeypatch.setattr(attention.CrossAttention, "forward", with_scale)
    model = load("tiny_sd15")
    fast = host.compile_model(model, host.Request("eager", verify=False))[0]
    assert same(sample(fast, "tiny_sd15"), sample(model, "tiny_sd15"))
    assert host.compiled_model(fast).counters.eager_calls == {}
    assert same(sample(overridden(fast, halved), "tiny_sd15"), sample(overridden(model, halved), "tiny_sd15"))
    reasons = map(str, host.compiled_model(fast).counters.eager_calls)
    assert any("transformer option optimized_attention_override" in reason for reason in reasons)


def strict(function, q, k, v, heads, mask=None, skip_reshape=False, transformer_options=None, **inside):
    assert set(inside) <= {"_inside_attn_wrapper"}
    return function(q, k, v, heads, mask=mask, skip_reshape=skip_reshape) * 0.5


def one_shot(function, *arguments, **given):
    factor = given["transformer_options"].pop("factor", 1)
    return function(*arguments, **given) * factor


def removing_itself(function, *arguments, **given):
    given["transformer_options"].pop("optimized_attention_override")
    return function(*arguments, **given) * 2


def taking_memory_as_it_lies(function, q, k, v, heads, **given):
    return function(q, k, v, heads, **given) + q.as_strided((1,), (1,)) + q.view(-1, q.shape[-1])[0, 0]


def containers(function, *arguments, **given):
    return function(*arguments, **given) * 0.5


containers.container_function = lambda q, k, v, *arguments, **given: None


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("override", [strict, one_shot, removing_itself, taking_memory_as_it_lies, containers])
def test_overrides_get_and_leave_what_they_would(override, verify, registry, overrides):
    architecture = next(row for row in TABLE if row.name == "Flux dev")
    plain, fast = (
        architecture.patcher(),
        host.compile_model(architecture.patcher(), host.Request("eager", verify=verify))[0],
    )

    def sampled(patcher):
        clone = overridden(patcher, override)
        clone.model_options["transformer_options"]["factor"] = 3
        return architecture.sample(clone, At(2, 3, 16, 24, 20))

    for _ in range(2):
        assert same(sampled(fast), sampled(plain))
    is_refused = override is containers
    assert bool(host.compiled_model(fast).counters.eager_calls) == is_refused


def test_queries_are_laid_out_for_an_override_as_the_block_has_them():
    """Graphs for GPUs lay them out by tokens."""
    from compiled_graphs.compiler.tracing import attention_op, patch_ops

    seen, q = [], torch.randn(2, 4, 6, 8)
    attention_op.register_operator()

    class Calls:
        unforeseen = frozenset({attention_op.OVERRIDE})

        def __call__(self, hook, constants, q, k, v, **given):
            seen.extend((q, k, v))
            return q.transpose(1, 2).flatten(2)

    with patch_ops.calling(Calls()):
        laid_out = attention_op.by_tokens(q)
        assert not laid_out.is_contiguous()
        name = "comfy.ldm.modules.attention:attention_basic"
        arguments = (4, None, None, True, False, "{}", True, "{}", [])
        torch.ops.compiled_graphs.host_attention(name, laid_out, laid_out, laid_out, *arguments)
    assert len(seen) == 3
    assert all(tensor.is_contiguous() for tensor in seen)


def test_an_override_acts_in_its_own_model_only(load, registry, sample, overrides):
    model, other = load("tiny_sd15"), load("tiny_sd15_other")
    images = []

    def run(patchers):
        main, beside = patchers

        def attend(function, *arguments, **given):
            if not images or images[-1] is None:
                images[-1:] = [sample(beside, "tiny_sd15", tokens=12)]
            return function(*arguments, **given) * 0.5

        images.append(None)
        return sample(overridden(main, attend), "tiny_sd15"), images.pop()

    fast = [host.compile_model(patcher, host.Request("eager", verify=False))[0] for patcher in (model, other)]
    for ours, theirs in zip(run(fast), run((model, other)), strict=True):
        assert same(ours, theirs)


def test_what_an_override_leaves_reaches_patches_where_it_would(registry, overrides):
    architecture = next(row for row in TABLE if row.name == "Flux dev")
    seen = {"ours": [], "theirs": []}

    def sampled(patcher, name):
        def attend(function, *arguments, **given):
            options = given["transformer_options"]
            options["count"] = options.get("count", 0) + 1
            return function(*arguments, **given)

        clone = overridden(patcher, attend)
        clone.set_model_attn1_output_patch(
            lambda out, extra: seen.setdefault(name, []).append(extra.get("count")) or out
        )
        return architecture.sample(clone, At(1, 3, 16, 24, 20))

    plain, fast = (
        architecture.patcher(),
        host.compile_model(architecture.patcher(), host.Request("eager", verify=False))[0],
    )
    assert same(sampled(fast, "ours"), sampled(plain, "theirs"))
    assert seen["ours"] == seen["theirs"]


def test_a_patch_may_call_attention_itself(load, registry, sample, overrides):
    from comfy.ldm.modules.attention import optimized_attention

    def attend(q, k, v, options):
        return optimized_attention(q, k, v, options["n_heads"], transformer_options=options)

    model = load("tiny_sd15")
    fast = host.compile_model(model, host.Request("eager"))[0]
    assert same(sample(overridden(replaced(fast, attend), halved), "tiny_sd15"),
                sample(overridden(replaced(model, attend), halved), "tiny_sd15"))  # fmt: skip
    assert host.compiled_model(fast).counters.eager_calls == {}


def test_blocks_that_write_to_their_inputs_take_a_refused_override_back(registry, overrides):
    architecture = next(row for row in TABLE if row.name == "Flux dev")

    def half(function, *arguments, **given):
        return function(*arguments, **given).half()

    def casting(patcher):
        for layer in patcher.model.modules():
            if hasattr(layer, "comfy_cast_weights"):
                layer.comfy_cast_weights = True
        return patcher

    at, fast = (
        At(1, 3, 16, 24, 20),
        host.compile_model(casting(architecture.patcher()), host.Request("eager", verify=False))[0],
    )
    theirs = architecture.sample(overridden(casting(architecture.patcher()), half), at)
    for _ in range(2):
        assert same(architecture.sample(overridden(fast, half), at), theirs)
    reasons = map(str, host.compiled_model(fast).counters.eager_calls)
    assert set(reasons) == {"patch optimized_attention_override changes the shape or dtype"}
