"""A model that is slower with its graphs, sampled by ComfyUI. The figures are the tests', not this machine's."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from compiled_graphs.compiler.backends.eager import EagerBackend
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.common.timing import CallTime, Timing
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import install, sampling_hooks
from compiled_graphs.compiler.hosts.comfy.synthetic_prompts import ENCODE
from compiled_graphs.compiler.runtime.speed_trial import MIN_CALLS
from encoders import TABLE
from recorders import repeat
from rows import control_net, hinted
from vbar import stream

pytestmark = pytest.mark.usefixtures("traced_once")

NAME = "tiny_sd15"
LEFT = "Left uncompiled: compiled, it ran at 0.80x the normal speed here. Choose the backend inductor to compile"


class Fed:
    """A tracker in which each call takes so long."""

    def __init__(self, seconds, method="forward"):
        self._seconds, self._method = seconds, method

    def timed(self, *call, **where):
        return nullcontext()

    def figures(self):
        return [CallTime(self._method, (2, 4, 8, 6), self._seconds, MIN_CALLS)]


@pytest.fixture(autouse=True)
def _timed(monkeypatch, load):
    if not hasattr(load(NAME), "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling ends")
    monkeypatch.setattr(install, "choose_backend", lambda name, device, only_loads: (EagerBackend(), ""))
    monkeypatch.setattr(install, "has_gpu_events", lambda device: True)


def entrance(model):
    return model.object_patches["diffusion_model.forward"]


def compiled(model, backend="auto", **options):
    """Compile; what is timed afterwards is what the tests say: a step takes one second."""
    options = {"verify": False, "capture": False} | options
    ours, text = host.compile_model(model, host.Request(backend, **options))
    entrance(ours).compiled.latency = Fed(1.0)
    return ours, text


def feed(model, eager=0.9, uncompiled=0.8):
    """Have the graphs timed, and uncompiled steps take so long."""
    for kind in entrance(model).compiled.kinds():
        for graph in kind.graphs:
            graph.timing = Timing(eager, 1.0)
    if entrance(model).speed_trial is not None:
        entrance(model).speed_trial.latency = Fed(uncompiled)


def regions_called(model, sample):
    before = entrance(model).compiled.counters.calls
    sample(model, NAME)
    return entrance(model).compiled.counters.calls > before


@pytest.fixture
def model(load):
    return load(NAME)


def test_a_slower_model_is_left_from_the_next_sampling_on(model, sample, registry):
    told = []
    ours, _ = compiled(model, on_change=told.append)
    expected = sample(model, NAME)
    feed(ours)
    assert regions_called(ours, sample)
    assert "slower" in told[-1]
    assert LEFT not in told[-1]
    assert not regions_called(ours, sample), "timed uncompiled, to compare"
    for _ in range(3):
        assert torch.equal(sample(ours, NAME), expected)
        assert not regions_called(ours, sample)
    assert LEFT in told[-1]
    assert "slower" not in told[-1]
    assert {reason.code for reason in entrance(ours).compiled.counters.eager_calls} == {
        ReasonCode.TIMED_UNCOMPILED,
        ReasonCode.SLOWER,
    }


def test_an_explicit_backend_goes_on_compiled_and_says_that_it_is_slower(model, sample, registry):
    told = []
    ours, _ = compiled(model, "inductor", on_change=told.append)
    feed(ours)
    assert [regions_called(ours, sample) for _ in range(4)] == [True] * 4
    assert "slower" in told[-1]
    assert "Left" not in told[-1]


def test_a_later_node_knows_and_can_be_told_otherwise(model, sample, registry):
    ours, _ = compiled(model)
    feed(ours)
    for _ in range(2):
        sample(ours, NAME)
    again, text = compiled(model)
    assert LEFT in text
    assert not regions_called(again, sample)
    forced, text = compiled(model, "inductor")
    assert LEFT not in text
    assert regions_called(forced, sample)
    assert not regions_called(again, sample)


def test_one_that_only_seemed_slower_stays(model, sample, registry):
    told = []
    ours, _ = compiled(model, on_change=told.append)
    feed(ours, uncompiled=1.3)
    assert [regions_called(ours, sample) for _ in range(5)] == [True, False, True, True, True]
    assert "About 1.3x faster per step." in told[-1]


def test_one_that_is_faster_is_never_tried_uncompiled(model, sample, registry):
    ours, _ = compiled(model)
    feed(ours, eager=1.5)
    assert [regions_called(ours, sample) for _ in range(3)] == [True] * 3


@pytest.fixture
def vae(load_vae):
    return load_vae("small_kl")


def decoder(vae):
    return vae.patcher.object_patches["decode"]


def compiled_vae(vae, backend="auto", **options):
    return host.compile_vae(vae, host.Request(backend, verify=False, **options), True)


def feed_vae(vae, uncompiled):
    """Have the graphs seem slower, and whole decodes take one second or so long."""
    decoder(vae).compiled.latency, decoder(vae).speed_trial.latency = Fed(1.0, "decode"), Fed(uncompiled, "decode")
    for kind in decoder(vae).compiled.kinds():
        for graph in kind.graphs:
            graph.timing = Timing(0.9, 1.0)


def decodes(vae):
    """The image, and whether graphs made it."""
    before = decoder(vae).compiled.counters.calls
    image = vae.decode(torch.ones(1, 4, 4, 4))
    return image, decoder(vae).compiled.counters.calls > before


def test_a_slower_vae_is_left_and_its_image_is_the_same(vae, registry):
    told = []
    ours, _ = compiled_vae(vae, on_change=told.append)
    expected, is_compiled = decodes(ours)
    assert is_compiled
    feed_vae(ours, uncompiled=0.8)
    for _ in range(3):
        image, is_compiled = decodes(ours)
        assert not is_compiled
        assert torch.allclose(image, expected, atol=1e-3)
    assert LEFT in told[-1]
    assert sum(LEFT in text for text in told) == 1


def test_another_node_on_a_slower_vae_knows_and_can_be_told_otherwise(vae, registry):
    told = []
    ours, _ = compiled_vae(vae)
    other, _ = compiled_vae(vae, on_change=told.append)
    feed_vae(ours, uncompiled=0.8)
    for _ in range(2):
        decodes(ours)
    assert not decodes(other)[1]
    assert LEFT in told[-1]
    forced, text = compiled_vae(vae, "inductor")
    assert LEFT not in text
    assert decodes(forced)[1]
    again, text = compiled_vae(vae)
    assert LEFT in text
    assert not decodes(again)[1]


def test_a_vae_that_only_seemed_slower_stays(vae, registry):
    ours, _ = compiled_vae(vae)
    feed_vae(ours, uncompiled=1.3)
    assert [decodes(ours)[1] for _ in range(3)] == [False, True, True]


def test_decodes_that_are_left_do_not_count_as_calls_of_blocks(vae, registry):
    ours, _ = compiled_vae(vae)
    feed_vae(ours, uncompiled=0.8)
    for _ in range(3):
        decodes(ours)
    assert decoder(ours).compiled.counters.eager_calls.total() == 3
    assert decoder(ours).compiled.counters.eager_block_calls == 0


def test_encodes_say_nothing_of_a_decoder(vae, registry):
    ours, _ = compiled_vae(vae)
    feed_vae(ours, uncompiled=0.8)
    decoder(ours).compiled.latency = Fed(1.0, "encode")
    assert [decodes(ours)[1] for _ in range(3)] == [True] * 3
    assert ours.patcher.object_patches["encode"].speed_trial is None


@pytest.fixture
def encoder():
    return next(row for row in TABLE if row.name == "CLIP-L: SD1.5").load()


def encodes(clip):
    """The encoded prompt, and whether graphs encoded it."""
    counters = clip.patcher.object_patches[ENCODE].compiled.counters
    before = counters.calls
    return clip.encode_from_tokens(clip.tokenize("a cat")), counters.calls > before


@pytest.mark.parametrize(("uncompiled", "is_left"), [(0.8, True), (1.3, False)])
def test_a_text_encoder_is_compared_without_a_doubt(encoder, registry, uncompiled, is_left):
    told = []
    ours, _ = host.compile_clip(encoder, host.Request("auto", verify=False, on_change=told.append))
    expected, is_compiled = encodes(ours)
    assert is_compiled
    entrance = ours.patcher.object_patches[ENCODE]
    entrance.compiled.latency, entrance.speed_trial.latency = Fed(1.0, ENCODE), Fed(uncompiled, ENCODE)
    for kind in entrance.compiled.kinds():
        for graph in kind.graphs:
            graph.timing = Timing(5.0, 1.0)
    assert [encodes(ours)[1] for _ in range(3)] == [False, not is_left, not is_left]
    assert torch.allclose(encodes(ours)[0], expected, atol=1e-5)
    assert (LEFT in told[-1]) == is_left


@pytest.mark.parametrize(("uncompiled", "is_left"), [(0.8, True), (1.3, False)])
def test_a_slower_control_net_is_left_within_a_sampling(model, sample, registry, uncompiled, is_left):
    told, control = [], control_net(model)
    ours, _ = host.compile_control_net(control, host.Request("auto", verify=False, on_change=told.append))
    expected = sample(model, NAME, **hinted(ours, 0.8))
    made = ours.control_model_wrapped.object_patches["forward"]
    made.compiled.latency, made.speed_trial.latency = Fed(1.0), Fed(uncompiled)
    for kind in made.compiled.kinds():
        for graph in kind.graphs:
            graph.timing = Timing(0.9, 1.0)
    calls = []
    for _ in range(3):
        before = made.compiled.counters.calls
        image = sample(model, NAME, **hinted(ours, 0.8))
        calls.append(made.compiled.counters.calls > before)
        assert torch.allclose(image, expected, atol=1e-3)
    assert calls[1:] == [not is_left] * 2
    assert any(LEFT in text for text in told) == is_left


def test_the_graphs_are_still_there(model, sample, registry):
    ours, _ = compiled(model, workflow=lambda: "workflow")
    graphs = {graph.key for graph in entrance(ours).compiled.graphs()}
    feed(ours)
    for _ in range(4):
        sample(ours, NAME)
    (seen,) = registry.models("workflow").values()
    assert {graph.key for graph in seen.graphs()} == graphs
    report = registry.report()
    (role,) = report["workflows"]["workflow"]["roles"].values()
    assert role["compiled"] == role["regions"] > 0
    assert any("slower" in reason for reason in role["reasons"])
    assert role["reasons"].keys() <= report["explained"].keys()


def test_steps_are_recorded_before_there_is_a_doubt(model, sample, registry, monkeypatch):
    monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
    monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: repeat)
    ours, _ = compiled(model, capture=True)
    feed(ours)
    replay = entrance(ours).step_replay
    sample(ours, NAME)
    assert not replay.is_settled
    assert not entrance(ours).speed_trial.runs_eagerly
    sample(ours, NAME, steps=9)
    assert replay.is_settled
    assert entrance(ours).speed_trial.runs_eagerly
    sample(ours, NAME, steps=9)
    assert entrance(ours).speed_trial.has_fallen_back
    assert not replay._states


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory")
def test_a_streamed_model_is_left_to_the_host(load, sample, registry, request):
    plain = load(NAME)
    expected = sample(plain, NAME)
    ours, _ = compiled(stream(load(NAME), request.getfixturevalue("vbar")))
    feed(ours)
    images = [sample(ours, NAME) for _ in range(3)]
    assert entrance(ours).speed_trial.has_fallen_back
    assert [torch.allclose(image, expected, atol=1e-3) for image in images] == [True] * 3
    assert request.getfixturevalue("vbar").pinned == 0


def test_a_cpu_says_nothing_for_certain(model, sample, registry, monkeypatch):
    monkeypatch.undo()
    assert not install.has_gpu_events(torch.device("cpu"))
