"""Models whose weights ComfyUI streams: compiled, whatever is evicted, fails or runs out, and nothing stays pinned."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.hosts.comfy import comfy_compat, sampling_hooks
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.hosts.comfy.streaming import casts, channels_last, streamed_weights, vbar_places
from compiled_graphs.compiler.runtime import step_replay
from compiled_graphs.compiler.runtime.step_replay import StepReplay
from compiled_graphs.compiler.tracing.call_lock import call_lock
from recorders import repeat
from rows import adapted, low_rank
from vbar import PAGE, VBAR, Stream, stream

STEPS = 9
BOUND = 2e-4

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory"),
]


@pytest.fixture
def model(plain, request, load):
    """Its layers hold what the file has (float16), as a core that streams leaves them; the model is of float32."""
    vbar = request.getfixturevalue("vbar")  # after the plain model
    made = stream(load("tiny_sd15"), vbar)
    assert {weight.dtype for weight in made.model.diffusion_model.parameters()} > {torch.float16}
    return made


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
    monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: repeat)


@pytest.fixture
def lent(monkeypatch):
    """Captures outlive their sampling, as with CUDA's asynchronous allocator."""
    monkeypatch.setattr(step_replay, "captures_borrow_memory", lambda device: True)
    monkeypatch.setattr(step_replay, "return_lent_memory", lambda device: None)


def compiled(model, **options):
    ours, text = host.compile_model(model, host.Request("eager", **options))
    assert "normal speed" not in text
    return ours


def assert_image(sample, ours, theirs, vbar, steps=1, **options):
    """Both sample the same image; no region of ours runs eagerly, nothing is compiled, and nothing stays pinned."""
    expected = sample(theirs, "tiny_sd15", steps=steps, **options)
    eager = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        image = sample(ours, "tiny_sd15", steps=steps, **options)
    assert totals.eager_calls == eager
    error = ((image - expected).norm() / expected.norm()).item()
    assert error <= BOUND, f"relative error {error:.1e}"
    assert vbar.pinned == 0
    assert not any("_prefetch" in vars(layer) for layer in ours.model.modules())


def noted_fills(monkeypatch):
    """Return a list to which each fill adds whether all weights got into their pages."""
    fill, filled = streamed_weights.StreamedWeights.fill, []
    monkeypatch.setattr(
        streamed_weights.StreamedWeights, "fill", lambda self, layers: filled.append(fill(self, layers)) or filled[-1]
    )
    return filled


def layers_of(model):
    return [layer for layer in model.model.diffusion_model.modules() if "_v" in vars(layer)]


def test_a_streamed_model_stays_streamed(model, registry):
    ours = compiled(model)
    assert ours.is_dynamic()
    assert ours.model is model.model


def test_weights_come_from_the_vbar(model, plain, sample, registry, vbar):
    ours = compiled(model, verify=False)
    assert_image(sample, ours, plain, vbar, steps=2)
    layers = layers_of(ours)
    assert len(layers) > 30
    assert all(casts.has_arrived(layer) for layer in layers)
    with torch.inference_mode():
        layers[5]._v_weight.zero_()  # what is in the page, and not what is in the file
    assert not torch.equal(sample(ours, "tiny_sd15"), sample(plain, "tiny_sd15"))


def test_one_fault_holds_all_weights_of_a_call(model, sample, registry, vbar):
    ours = compiled(model, verify=False)
    sample(ours, "tiny_sd15", steps=2)
    wrapper = ours.object_patches["diffusion_model.forward"]
    before, called = vbar.faults, wrapper.compiled.counters.calls
    sample(ours, "tiny_sd15", steps=4)
    assert wrapper.compiled.counters.calls - called == 4 * 15
    assert vbar.faults - before == 4


def test_whether_weights_are_there_is_asked_without_bringing_any(model, sample, registry, vbar):
    ours = compiled(model, verify=False)
    weights = ours.object_patches["diffusion_model.forward"].compiled.weights
    seen = []
    for share in (0.0, 0.1, 1.0):
        sample(ours, "tiny_sd15")
        vbar.evict(share)
        faults = vbar.faults
        seen.append(weights.are_there)
        assert vbar.faults == faults
    assert seen == [True, False, False]


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_evicted_weights_come_back(share, model, plain, sample, registry, vbar):
    ours = compiled(model)
    for seed in range(3):
        assert_image(sample, ours, plain, vbar, seed=seed, steps=2)
        vbar.evict(share)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_weights_that_do_not_fit_are_brought_for_each_region(share, model, plain, sample, registry, vbar):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    vbar.evict()
    vbar.limit = int(vbar.size * share)
    for seed in range(2):
        assert_image(sample, ours, plain, vbar, seed=seed, steps=2)
    vbar.limit = vbar.memory.numel()
    assert_image(sample, ours, plain, vbar, steps=2)
    assert all(casts.has_arrived(layer) for layer in layers_of(ours))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_loras_are_in_the_weights(share, model, plain, sample, registry, vbar):
    """Changed, in turn with another clone, and without."""
    ours = compiled(model)
    sample(ours, "tiny_sd15")
    vbar.evict()
    vbar.limit = int(vbar.size * share) if share < 1 else vbar.memory.numel()
    images = []
    for strength in (1.0, 0.5, None, 1.0):
        ours_now, plain_now = (m if strength is None else adapted(low_rank)(m, strength) for m in (ours, plain))
        assert_image(sample, ours_now, plain_now, vbar, steps=2)
        images.append(sample(ours_now, "tiny_sd15", steps=2))
    assert torch.equal(images[0], images[3])
    assert not torch.allclose(images[0], images[1], rtol=1e-2)


def test_weights_that_change_wait_for_their_readers(model, sample, registry, vbar, monkeypatch):
    """Weights that are filled in anew, in pages that a call before may still read on the GPU."""
    held_back = []
    monkeypatch.setattr(comfy_compat, "hold_back_offload_streams", held_back.append)
    ours = compiled(model, verify=False)
    sample(ours, "tiny_sd15", steps=2)
    held_back.clear()
    sample(ours, "tiny_sd15", steps=2)
    assert held_back == []
    sample(adapted(low_rank)(ours, 0.5), "tiny_sd15", steps=2)
    assert held_back == [torch.device("cpu")]
    vbar.evict()
    vbar.limit = 0
    sample(ours, "tiny_sd15", steps=2)
    assert len(held_back) == 3


def test_a_core_that_streams_in_another_way_runs_eagerly(model, sample, registry, vbar, monkeypatch):
    ours = compiled(model)
    monkeypatch.setattr(comfy_compat, "can_stream", lambda: False)
    before = totals.eager_calls.copy()
    assert torch.isfinite(sample(ours, "tiny_sd15")).all()
    assert {reason.code for reason in totals.eager_calls - before} == {ReasonCode.WEIGHT_DEVICE}
    assert vbar.faults == 0


def test_a_failed_fault_leaves_nothing_pinned(model, plain, sample, registry, vbar):
    """The block's own code runs then, and asks for its weights itself."""
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    before = totals.eager_calls.copy()
    vbar.fails = True
    sample(ours, "tiny_sd15")
    vbar.fails = False
    assert any("Fault failed" in str(reason) for reason in totals.eager_calls - before)
    assert vbar.pinned == 0
    assert_image(sample, ours, plain, vbar)


def test_a_fault_that_fails_finds_no_room(vbar):
    place = vbar.alloc(PAGE)
    vbar.fails = True
    assert vbar_places.fault(place) is None
    assert vbar_places.is_evicted_soon(place)


@pytest.mark.parametrize("is_first", [True, False])
def test_weights_that_others_have_left_half_made_are_made_anew(
    is_first, model, plain, sample, registry, vbar, monkeypatch
):
    """In a sampling without the node, ComfyUI had brought a layer's weights, and failed to add its LoRA to them.

    The next sampling is the first one with the node, or not.
    """
    from comfy.model_patcher import LowVramPatch

    ours, theirs = (adapted(low_rank)(patcher, 1.0) for patcher in (compiled(model, verify=False), plain))
    if is_first:
        ours.load()
    else:
        sample(ours, "tiny_sd15")
    vbar.evict()
    layer = next(layer for layer in layers_of(model) if layer.weight_lowvram_function is not None)
    comfy_compat.find(casts.CAST)([layer], None, torch.device("cpu"), None, True)
    resolve = comfy_compat.find("comfy.ops.resolve_cast_module_with_vbar")
    with monkeypatch.context() as patch:
        patch.setattr(LowVramPatch, "__call__", no_room)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            resolve(layer, torch.float32, torch.device("cpu"), torch.float32, None, True)
    assert_image(sample, ours, theirs, vbar)


def no_room(*_):
    raise torch.cuda.OutOfMemoryError("no room")


@pytest.fixture
def arranged(model):
    """Returns a model's weights, and one of its convolutions, whose weight a call has brought into channels_last."""
    weights = streamed_weights.weights_of(model.model.diffusion_model, torch.device("cpu"), HOST)
    model.load()
    weights.follow()
    weights.begin_sampling()
    weights.channels_last.begin()
    for layer in layers_of(model):
        casts.has_arrived(layer)  # its pages are there from now on
    with weights.running(1):
        assert weights.is_held
    return weights, next(layer for layer in layers_of(model) if layer.weight.ndim == 4 and layer.weight.shape[-1] > 1)


def is_channels_last(weight):
    return weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_that_others_fill_in_between_calls_are_seen(arranged):
    weights, layer = arranged
    assert is_channels_last(layer._v_weight)
    casts.declare_outdated([layer])
    with casts.cast([layer], torch.device("cpu")):
        casts.resolve(layer, HOST, torch.device("cpu"), returns=False)
    assert not is_channels_last(layer._v_weight)
    with weights.running(1):
        assert is_channels_last(layer._v_weight)


def test_too_little_memory_at_the_end_leaves_nothing_pinned(arranged, vbar, monkeypatch):
    """To bring a weight back into order takes a copy of it."""
    weights, layer = arranged
    monkeypatch.setattr(channels_last, "_lay_out", no_room)
    weights.channels_last.end()
    assert vbar.pinned == 0
    assert not casts.has_arrived(layer)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_block_that_fails_leaves_nothing_pinned(share, model, plain, sample, registry, vbar, monkeypatch):
    ours = compiled(model, verify=False)
    assert_image(sample, ours, plain, vbar)
    vbar.evict()
    vbar.limit = int(vbar.size * share) if share < 1 else vbar.memory.numel()
    block = ours.model.diffusion_model.output_blocks[-1][0]
    with monkeypatch.context() as patch:
        patch.setattr(type(block), "_forward", lambda *args: 1 / 0)
        forward = ours.object_patches["diffusion_model.forward"]._forwards["output_blocks.2.0"]
        patch.setattr(forward, "_serve", lambda call: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sample(ours, "tiny_sd15")
    assert vbar.pinned == 0
    assert_image(sample, ours, plain, vbar)


def test_too_little_memory_beside_the_weights_gives_them_up(model, plain, sample, registry, vbar, monkeypatch):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar)
    wrapper, raised = ours.object_patches["diffusion_model.forward"], []
    weights, call = wrapper.compiled.weights, wrapper._call_network

    def scarce(*args, **kwargs):
        if weights.is_held:
            raised.append(1)
            raise torch.cuda.OutOfMemoryError("no room")
        return call(*args, **kwargs)

    monkeypatch.setattr(wrapper, "_call_network", scarce)
    assert_image(sample, ours, plain, vbar, steps=3)
    assert len(raised) == 1, "calls of this size hold all weights again"
    monkeypatch.undo()
    monkeypatch.setattr(wrapper, "_call_network", lambda *a, **k: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        sample(ours, "tiny_sd15")
    assert vbar.pinned == 0


@pytest.mark.parametrize("failing", [1, 7])
def test_a_lora_that_finds_no_memory_is_added_later(failing, model, plain, sample, registry, vbar, monkeypatch):
    """ComfyUI has noted by then that the weights have arrived."""
    from comfy.model_patcher import LowVramPatch

    ours, theirs = (adapted(low_rank)(patcher, 1.0) for patcher in (compiled(model, verify=False), plain))
    add, calls = LowVramPatch.__call__, itertools.count(1)

    def fail_once(patch, weight):
        if next(calls) == failing:
            raise torch.cuda.OutOfMemoryError("no room")
        return add(patch, weight)

    monkeypatch.setattr(LowVramPatch, "__call__", fail_once)
    assert_image(sample, ours, theirs, vbar, steps=3)
    assert next(calls) > failing


@pytest.mark.parametrize("failing", [1, 7])
def test_a_lora_that_the_adapter_leaves_out_for_lack_of_memory_is_added(
    failing, model, plain, sample, registry, vbar, monkeypatch
):
    """ComfyUI's adapters catch the error, log it, and return the weight without the LoRA."""
    from comfy.weight_adapter import lora

    ours, theirs = (adapted(low_rank)(patcher, 1.0) for patcher in (compiled(model, verify=False), plain))
    sample(theirs, "tiny_sd15")  # its patches are added here, once
    calls = itertools.count(1)

    class Torch:
        """What the adapter multiplies with."""

        def __getattr__(self, name):
            if name == "mm" and next(calls) == failing:
                raise torch.cuda.OutOfMemoryError("no room")
            return getattr(torch, name)

    with monkeypatch.context() as patch:
        patch.setattr(lora, "torch", Torch())
        assert_image(sample, ours, theirs, vbar, steps=3)
    assert next(calls) > failing
    assert_image(sample, ours, theirs, vbar, steps=3)


@pytest.mark.parametrize("at", [1, 7])
def test_pages_that_are_given_up_while_loras_are_added_are_not_read(
    at, model, plain, sample, registry, vbar, monkeypatch
):
    """Their arithmetic takes memory. The pages of later layers are pinned, but another fault of them is refused."""
    from comfy.model_patcher import LowVramPatch

    ours, plain_now = compiled(model, verify=False), adapted(low_rank)(plain, 1.0)
    assert_image(sample, ours, plain, vbar)
    expected = sample(plain_now, "tiny_sd15", steps=2)
    add, calls = LowVramPatch.__call__, itertools.count(1)

    def make_room(patch, weight):
        if next(calls) == at:
            vbar.make_room(vbar.max_size)
        return add(patch, weight)

    filled = noted_fills(monkeypatch)
    monkeypatch.setattr(LowVramPatch, "__call__", make_room)
    monkeypatch.setattr(streamed_weights, "FILL_BYTES", 2**18)
    image = sample(adapted(low_rank)(ours, 1.0), "tiny_sd15", steps=2)
    assert next(calls) > at
    assert False in filled
    assert ((image - expected).norm() / expected.norm()).item() <= BOUND
    assert vbar.pinned == 0


def test_a_block_whose_weights_find_no_memory_at_all_runs_layer_by_layer(
    model, plain, sample, registry, vbar, monkeypatch
):
    ours, real = compiled(model, verify=False), casts.resolve
    sample(ours, "tiny_sd15")
    vbar.evict()
    vbar.limit = 0
    missing = layers_of(ours)[3]

    def resolve(layer, *args, **options):
        if layer is missing:
            raise torch.cuda.OutOfMemoryError("no room")
        return real(layer, *args, **options)

    monkeypatch.setattr(casts, "resolve", resolve)
    expected, eager = sample(plain, "tiny_sd15", steps=3), totals.eager_calls.copy()
    assert torch.allclose(sample(ours, "tiny_sd15", steps=3), expected, rtol=BOUND, atol=BOUND)
    assert totals.eager_calls - eager == {Reason(ReasonCode.WEIGHT_MEMORY): 3}
    assert vbar.pinned == 0


@pytest.mark.parametrize("is_made_again", [True, False])
def test_a_layer_that_fails_while_its_weights_arrive_lets_them_go(
    is_made_again, model, plain, sample, registry, vbar, monkeypatch
):
    ours = compiled(model, verify=False)
    sample(ours, "tiny_sd15")
    wrapper, layer = ours.object_patches["diffusion_model.forward"], layers_of(ours)[0]
    real, raised = wrapper._call_or_replay, []

    def fail(*args):
        if raised:
            return real(*args)
        raised.append(1)
        layer._prefetch = {"signature": layer._v[0].fault(layer._v), "resident": True}
        raise torch.cuda.OutOfMemoryError("no room") if is_made_again else RuntimeError("something else")

    monkeypatch.setattr(wrapper, "_call_or_replay", fail)
    if is_made_again:
        assert_image(sample, ours, plain, vbar)
    else:
        with pytest.raises(RuntimeError, match="something else"):
            sample(ours, "tiny_sd15")
    assert (vbar.pinned, "_prefetch" in vars(layer)) == (0, False)
    assert layer._v_signature is None, "its LoRA may be missing"


def test_a_buffer_that_finds_no_memory_is_too_little_memory(model, vbar, monkeypatch):
    ops = pytest.importorskip("comfy.ops")

    def fail(*args):
        raise RuntimeError("VRAM grow failed: 5 bytes")

    model.load()
    monkeypatch.setattr(ops, "cast_modules_with_vbar", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="VRAM grow failed"):
        casts.Cast(layers_of(model), torch.device("cpu"))


@pytest.mark.parametrize("failing", [0, 3])
@pytest.mark.parametrize("fails", ["the buffer", "the fault"])
def test_a_cast_that_fails_half_way_leaves_nothing_pinned(fails, failing, model, vbar, streams, monkeypatch):
    """ComfyUI's cast has faulted a layer with a LoRA, which needs a buffer, and has not noted that yet."""
    ours = adapted(low_rank)(model, 1.0)
    ours.patch_model(load_weights=False)
    ours.load()
    layers = [layer for layer in layers_of(ours) if layer.weight_lowvram_function is not None]
    done = []

    def fail_at(real):
        def call(*args):
            done.append(1)
            if len(done) > failing:
                raise RuntimeError("VRAM grow failed: 5 bytes" if fails == "the buffer" else "Fault failed: 2")
            return real(*args)

        return call

    for owner, name in [(Stream, "get")] if fails == "the buffer" else [(VBAR, "fault")]:
        monkeypatch.setattr(owner, name, fail_at(getattr(owner, name)))
    with pytest.raises(RuntimeError, match=r"VRAM grow failed|Fault failed"):
        casts.Cast(layers, torch.device("cpu"))
    assert len(done) == failing + 1
    assert vbar.pinned == 0
    assert not any("_prefetch" in vars(layer) for layer in layers)


def test_weights_are_let_go_whatever_a_call_ends_with(model, sample, registry, vbar, monkeypatch):
    ours = compiled(model, verify=False)
    sample(ours, "tiny_sd15", steps=2)
    weights = ours.object_patches["diffusion_model.forward"].compiled.weights
    monkeypatch.setattr(weights, "_plan_what_stays", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sample(ours, "tiny_sd15")
    assert (vbar.pinned, weights.is_held) == (0, False)


def test_a_sampling_does_not_end_within_a_call_of_another_thread(model, sample, registry, vbar):
    """A sampling that fails on one GPU ends while another one's thread works."""
    ours = compiled(model, verify=False)
    sample(ours, "tiny_sd15")
    is_inside, may_leave, ended = threading.Event(), threading.Event(), threading.Event()

    def be_inside():
        with call_lock.shared():
            is_inside.set()
            may_leave.wait(60)

    def end():
        ours.cleanup()
        ended.set()

    threads = [threading.Thread(target=job, daemon=True) for job in (be_inside, end)]
    threads[0].start()
    assert is_inside.wait(60)
    threads[1].start()
    assert not ended.wait(0.2)
    may_leave.set()
    assert ended.wait(60)


def test_steps_are_replayed_while_weights_stay(model, plain, sample, registry, vbar, captures):
    ours = compiled(model)
    counters = ours.object_patches["diffusion_model.forward"].compiled.counters
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    assert counters.replays == STEPS - 3


def test_captures_wait_for_weights_to_come_back(model, plain, sample, registry, vbar, captures, lent):
    ours = compiled(model)
    wrapper = ours.object_patches["diffusion_model.forward"]
    counters = wrapper.compiled.counters
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    made, steps = counters.captures, STEPS
    for change in (lambda m: m, adapted(low_rank), lambda m: m):
        ours_now, plain_now = (
            m if change is None else change(m, 1.0) if change.__name__ != "<lambda>" else m for m in (ours, plain)
        )
        before = counters.replays
        assert_image(sample, ours_now, plain_now, vbar, steps=STEPS)
        assert counters.replays - before == steps
        vbar.evict()
        steps = STEPS - 1  # the first call brings the weights, region by region
    vbar.limit = vbar.size // 2
    before = counters.replays
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    assert counters.replays == before
    assert wrapper.step_replay.reason == Reason(ReasonCode.WEIGHTS_ELSEWHERE)
    vbar.limit = vbar.memory.numel()
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    assert counters.replays - before == STEPS - 1
    assert counters.captures == made


@pytest.fixture
def tight(monkeypatch, vbar):
    """Returns what happened to pages during captures, in which every allocation wants to make room."""
    other, seen = VBAR(PAGE * 8), []

    def capture(call, pool):
        before = vbar.waits, other.waits, len(vbar.filled)
        for each in (vbar, other):
            each.make_room(each.max_size)
        made = repeat(call, pool)
        seen.append((vbar.waits - before[0], other.waits - before[1], len(vbar.filled) - before[2]))
        return made

    monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
    monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: capture)
    yield seen
    assert (vbar.kept, other.kept) == (0, 0)


def test_no_page_goes_during_a_capture(model, plain, sample, registry, vbar, tight):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    assert tight == [(0, 0, 0)]


def test_limits_end_with_a_capture_that_fails(vbar):
    """Also where one VBAR is being made, and another one was closed."""
    half_made, closed = VBAR.__new__(VBAR), VBAR(PAGE)
    closed._ptr = None

    @vbar_places.without_evictions()
    def fail():
        raise RuntimeError(vbar.kept == vbar.max_size)

    with pytest.raises(RuntimeError, match="True"):
        fail()
    assert (vbar.kept, closed.kept, vars(half_made)) == (0, 0, {})


def test_pages_that_go_soon_are_not_captured(model, plain, sample, registry, vbar, tight, monkeypatch):
    ours = compiled(model)
    wrapper = ours.object_patches["diffusion_model.forward"]
    watched = StepReplay._watched

    def crowded(self, *args):
        vbar.make_room(vbar.max_size)  # while the call holds its pages
        return watched(self, *args)

    monkeypatch.setattr(StepReplay, "_watched", crowded)
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    assert (tight, wrapper.compiled.counters.replays) == ([], 0)


def test_a_library_without_limits_is_not_captured(model, plain, sample, registry, vbar, tight, monkeypatch):
    monkeypatch.delattr(VBAR, "set_watermark_limit")
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    assert tight == []


def test_captures_serve_the_clone_of_a_node_that_runs_again(model, plain, sample, registry, vbar, captures, lent):
    ours = compiled(model)
    assert_image(sample, ours, plain, vbar, steps=STEPS)
    for strength in (1.0, 0.5):
        ours = compiled(adapted(low_rank)(model, strength))
        assert_image(sample, ours, adapted(low_rank)(plain, strength), vbar, steps=STEPS)
        counters = ours.object_patches["diffusion_model.forward"].compiled.counters
        assert (counters.captures, counters.replays) == (0, STEPS)


def test_small_weights_stay_where_captures_read_them(model, sample, registry, vbar):
    ours = compiled(model)
    weights = ours.object_patches["diffusion_model.forward"].compiled.weights
    sample(ours, "tiny_sd15", steps=2)
    places = [tensor.data_ptr() for tensor in weights._small_tensors.tensors()]
    assert len(places) > 20
    for seed in range(2):
        sample(ours, "tiny_sd15", seed=seed)
        assert [tensor.data_ptr() for tensor in weights._small_tensors.tensors()] == places


def test_what_is_called_around_samplings_does_not_keep_the_patcher(model, registry, vbar):
    ours = compiled(model, verify=False)
    patcher = weakref.ref(ours)
    gc.disable()
    try:
        del ours
        assert patcher() is None
    finally:
        gc.enable()
