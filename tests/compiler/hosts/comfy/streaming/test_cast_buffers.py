"""ComfyUI casts weights without room into a buffer for each of its streams. What casts later must not reach a graph."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.hosts.comfy.streaming import casts, streamed_weights
from compiled_graphs.compiler.runtime.region_forward import RegionForward
from rows import adapted, low_rank
from test_streamed_weights import assert_image, compiled, layers_of
from vbar import pin

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory"),
]


@pytest.fixture
def crowded(model, plain, sample, registry, vbar, streams):
    """A compiled model of which nothing has room, and every second layer is in pinned memory."""
    ours = compiled(model, verify=False)
    sample(ours, "tiny_sd15")
    pin(ours)
    for layer in layers_of(ours)[::2]:
        del layer._pins
    vbar.evict()
    vbar.limit = 0
    return ours


def cast(layers):
    """Do what a core does on a GPU when these layers run uncompiled."""
    import comfy.model_prefetch
    import comfy.ops

    for layer in layers:
        if not hasattr(layer, "_prefetch"):
            comfy.ops.cast_modules_with_vbar([layer], None, torch.device("cpu"), None, True)
            comfy.model_prefetch.cleanup_prefetched_modules(None, [layer])


def forwards_of(ours):
    return ours.object_patches["diffusion_model.forward"]._forwards


def test_casts_take_turns_on_streams(crowded, streams, sample):
    before = [stream.casts for stream in streams]
    cast(layers_of(crowded)[:6])
    assert [stream.casts for stream in streams] == [casts + 3 for casts in before]


def test_a_check_has_the_right_weights(crowded, plain, sample, registry, vbar, monkeypatch):
    """Uncompiled code runs before the graph, and brings weights for itself."""
    eager = RegionForward._eager

    def casting(forward, *args):
        cast(layer for layer in forward.module().modules() if "_v" in vars(layer))
        return eager(forward, *args)

    monkeypatch.setattr(RegionForward, "_eager", casting)
    for forward in forwards_of(crowded).values():
        forward._verify = forward.check_next = True
    before = totals.verifications
    assert_image(sample, crowded, plain, vbar)
    assert totals.verifications - before == len(forwards_of(crowded))


@pytest.mark.parametrize(("strength", "count"), [(None, 1), (None, 2), (1.0, 2)], ids=["one", "two", "with a LoRA"])
def test_layers_run_between_blocks(strength, count, crowded, plain, sample, registry, vbar, monkeypatch):
    """The network's own ones, or another extension's, when the next block's weights are on their way."""
    ours, theirs = (m if strength is None else adapted(low_rank)(m, strength) for m in (crowded, plain))
    layers, call = layers_of(crowded)[:count], RegionForward.__call__

    def call_and_cast(forward, *args, **kwargs):
        result = call(forward, *args, **kwargs)
        cast(layers)
        return result

    monkeypatch.setattr(RegionForward, "__call__", call_and_cast)
    assert_image(sample, ours, theirs, vbar, steps=3)


def test_a_patch_runs_layers_within_a_block(crowded, plain, sample, registry, vbar):
    seen, layers = [], layers_of(crowded)[:2]

    def attend(q, k, v, options):
        seen.append(q.shape)
        cast(layers)
        return v * 0.5

    ours, theirs = crowded.clone(), plain.clone()
    ours.set_model_attn1_replace(attend, "middle", 0)
    theirs.set_model_attn1_replace(lambda q, k, v, options: v * 0.5, "middle", 0)
    sample(ours, "tiny_sd15")
    before = len(seen)
    assert_image(sample, ours, theirs, vbar, steps=2)
    assert len(seen) > before


def test_a_lora_is_added_once_to_weights_that_the_network_has_brought(crowded, sample):
    """Uncompiled code may use them as well, and adds it for itself."""
    import comfy.model_prefetch
    import comfy.ops

    device = torch.device("cpu")
    ours = adapted(low_rank)(crowded, 1.0)
    sample(ours, "tiny_sd15")
    layer = next(layer for layer in layers_of(ours) if layer.weight_lowvram_function)
    dtype = layer.weight._model_dtype
    layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    layer.weight._model_dtype = dtype  # it needs no cast, so LoRAs are added in place
    comfy.ops.cast_modules_with_vbar([layer], None, device, None, True)
    plain = layer.weight.clone()
    made = casts.Cast([layer], device)
    made.resolve(HOST, lambda buffer, stream: buffer)
    first, second = (made.arrived()[0][1]["_v_weight"].clone() for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    comfy.model_prefetch.cleanup_prefetched_modules(None, [layer])


def test_weights_that_cannot_come_ahead_are_brought_by_their_own_call(
    crowded, plain, sample, registry, vbar, monkeypatch
):
    begin, failed = streamed_weights.StreamedSource.begin_bringing, []

    def fail_ahead(source):
        is_ahead = source is not source._weights.prefetcher._last
        if is_ahead:
            failed.append(1)
            begin(source)
            raise RuntimeError("something of a LoRA")
        begin(source)

    monkeypatch.setattr(streamed_weights.StreamedSource, "begin_bringing", fail_ahead)
    assert_image(sample, crowded, plain, vbar, steps=2)
    assert failed
