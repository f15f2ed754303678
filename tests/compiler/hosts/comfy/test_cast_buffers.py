"""ComfyUI casts weights without room into a buffer for each of its streams. What casts later must not reach a graph."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
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
