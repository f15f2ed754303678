"""Steps of ComfyUI's samplers as CUDA graphs. Without a GPU a stand-in repeats the operators on the same addresses."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import sampling_hooks
from compiled_graphs.compiler.runtime import step_replay as step_replay_module
from recorders import repeat
from rows import adapted, control_net, hinted, low_rank

pytestmark = pytest.mark.usefixtures("traced_once")

STEPS = 9
BOUND = 5e-2 if torch.cuda.is_available() else 2e-4


@pytest.fixture(autouse=True)
def _recordable(monkeypatch, load):
    model = load("tiny_sd15")
    if not hasattr(model, "add_callback_with_key"):
        pytest.skip("this ComfyUI does not say when a sampling ends")
    if not torch.cuda.is_available():
        monkeypatch.setattr(sampling_hooks, "can_capture", lambda device: True)
        monkeypatch.setattr(sampling_hooks, "capture_within", lambda context: repeat)


@pytest.fixture
def model(load):
    return load("tiny_sd15")


def compiled(model, **options):
    return host.compile_model(model, host.Request("eager", **options))[0]


def counters(model):
    return model.object_patches["diffusion_model.forward"].compiled.counters


def assert_image(sample, ours, theirs, replays, name="tiny_sd15", **options):
    """Sample with both; the images agree, and this many calls of ours were replayed."""
    expected = sample(theirs, name, steps=STEPS, **options)
    before = counters(ours).replays
    image = sample(ours, name, steps=STEPS, **options)
    error = ((image - expected).norm() / expected.norm()).item()
    assert error <= BOUND, f"relative error {error:.1e}"
    assert counters(ours).replays - before == replays


@pytest.mark.parametrize("name", ["tiny_sd15", "tiny_sdxl", "tiny_sd3"])
def test_steps_are_replayed_and_the_image_is_eagers(name, load, sample, registry):
    model = load(name)
    ours = compiled(model)
    assert_image(sample, ours, model, STEPS - 3, name)  # checked, undisturbed, recorded
    assert_image(sample, ours, model, STEPS - 2, name, seed=5)
    assert_image(sample, ours, model, STEPS - 2, name, height=16, batch=2)


@pytest.fixture
def own_memory(monkeypatch):
    """As with PyTorch's own allocator, whose recordings end with a sampling."""
    monkeypatch.setattr(step_replay_module, "captures_borrow_memory", lambda device: False)


def test_recordings_end_with_the_sampling(model, sample, registry, own_memory):
    ours = compiled(model)
    sample(ours, "tiny_sd15", steps=STEPS)
    recordings = ours.object_patches["diffusion_model.forward"].step_replay
    assert counters(ours).captures == 1
    assert not recordings._states
    assert recordings._tensors is None


def test_the_node_says_how_steps_were_run(model, sample, registry, own_memory):
    told = []
    ours = compiled(model, on_change=told.append)
    sample(ours, "tiny_sd15", steps=STEPS)
    sample(ours, "tiny_sd15", steps=STEPS)
    sample(ours, "tiny_sd15", steps=2)
    lines = [text.splitlines()[-1] for text in told]
    assert list(dict.fromkeys(lines)) == [
        "Steps run as CUDA graphs.",
        "Steps run without CUDA graphs: fewer than 8 steps.",
    ]


def test_few_steps_are_not_worth_a_recording_that_ends_with_them(model, sample, registry, own_memory):
    ours = compiled(model)
    sample(ours, "tiny_sd15", steps=7)
    assert counters(ours).replays == 0


def test_few_steps_are_replayed_where_recordings_outlive_a_sampling(model, sample, registry, monkeypatch):
    monkeypatch.setattr(step_replay_module, "captures_borrow_memory", lambda device: True)
    if not torch.cuda.is_available():
        monkeypatch.setattr(step_replay_module, "return_lent_memory", lambda device: None)
    ours = compiled(model)
    replays = []
    for seed in range(5):
        before = counters(ours).replays
        expected = sample(model, "tiny_sd15", steps=1, seed=seed)
        image = sample(ours, "tiny_sd15", steps=1, seed=seed)
        assert ((image - expected).norm() / expected.norm()).item() <= BOUND
        replays.append(counters(ours).replays - before)
    assert replays == [0, 0, 0, 1, 1]  # checked, undisturbed, recorded


def test_the_switch_turns_them_off(model, sample, registry):
    ours = compiled(model, capture=False)
    assert_image(sample, ours, model, 0)


def test_a_lora_comes_and_goes(model, sample, registry):
    ours = compiled(model)
    assert_image(sample, ours, model, STEPS - 3)
    for strength in (1.0, 0.5):
        change = adapted(low_rank)
        assert_image(sample, change(ours, strength), change(model, strength), STEPS - 2)
    assert_image(sample, ours, model, STEPS - 2)


def test_residuals_of_a_control_net_are_inputs(model, sample, registry):
    ours = compiled(model)
    for value in (0.2, 0.7):
        control = hinted(control_net(model), value)
        replays = STEPS - 3 if value == 0.2 else STEPS - 2
        assert_image(sample, ours, model, replays, **control)


def test_a_wrapper_around_the_network_may_change_with_every_step(model, sample, registry):
    def wrap(patcher):
        def wrapper(apply_model, arguments):
            weight = 1 + 0.1 * float(arguments["timestep"][0])
            return weight * apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

        patcher = patcher.clone()
        patcher.set_model_unet_function_wrapper(wrapper)
        return patcher

    assert_image(sample, wrap(compiled(model)), wrap(model), STEPS - 3)


def step_dependent(options):
    """A factor that a recording would freeze."""
    return 1 + 0.1 * float(options["sigmas"][0] > 1)


def output_patch(patcher):
    patcher.set_model_output_block_patch(lambda h, skip, options: (h * step_dependent(options), skip))


def input_patch(patcher):
    patcher.set_model_input_block_patch(lambda h, options: h * step_dependent(options))


def attention_patch(patcher):
    patcher.set_model_attn1_patch(lambda q, k, v, options: (q * step_dependent(options), k, v))


def replacement(patcher):
    patcher.set_model_attn2_replace(lambda q, k, v, options: q * step_dependent(options), "middle", 0)


def attention_override(patcher):
    def attend(function, *arguments, **given):
        return function(*arguments, **given) * step_dependent(given["transformer_options"])

    patcher.model_options["transformer_options"]["optimized_attention_override"] = attend


def network_wrapper(patcher):
    def wrapper(executor, x, timesteps, context, y, control, transformer_options, **extra):
        return executor(x, timesteps, context, y, control, transformer_options, **extra) * step_dependent(
            transformer_options
        )

    patcher.add_wrapper_with_key("diffusion_model", "test", wrapper)


def object_patch(patcher):
    layer = patcher.model.diffusion_model.time_embed
    patcher.add_object_patch("diffusion_model.time_embed.forward", lambda x: type(layer).forward(layer, x) * 1.1)


@pytest.mark.parametrize(
    "patch",
    [output_patch, input_patch, attention_patch, replacement, attention_override, network_wrapper, object_patch],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_patched_models_are_called_and_recorded_again_without_the_patch(patch, order, model, sample, registry):
    def patched(patcher):
        patcher = patcher.clone()
        patch(patcher)
        return patcher

    ours = compiled(model)
    assert_image(sample, ours, model, STEPS - 3)
    with_patch = patched(ours) if order == "after" else compiled(patched(model))
    assert_image(sample, with_patch, patched(model), 0)
    assert_image(sample, ours, model, STEPS - 2)


def test_scheduled_conditionings_are_calls_of_their_own(model, sample, registry):
    conditioning = [{"start_percent": 0.0, "end_percent": 0.5}, {"start_percent": 0.4, "end_percent": 1.0}]
    ours = compiled(model)
    expected = sample(model, "tiny_sd15", steps=12, conditioning=conditioning)
    image = sample(ours, "tiny_sd15", steps=12, conditioning=conditioning)
    assert ((image - expected).norm() / expected.norm()).item() <= BOUND
    assert counters(ours).replays > 0


def test_compiled_twice_ends_one_set_of_recordings(model, sample, registry):
    once = compiled(model)
    ours = compiled(once)
    assert len(ours.get_all_callbacks("on_cleanup")) == len(once.get_all_callbacks("on_cleanup"))
    assert_image(sample, ours, model, STEPS - 3)


def scale_by_closure(network):
    norm = network.middle_block[1].transformer_blocks[0].norm1
    plain, this = type(norm).forward, weakref.ref(norm)
    norm.forward = lambda x: plain(this(), x) * (2 if network.num_classes is None else 3)


def scale_by_helper(network):
    norm = network.middle_block[1].transformer_blocks[0].norm1
    plain, this, helper = type(norm).forward, weakref.ref(norm), types.SimpleNamespace(network=network, factor=2.0)
    norm.forward = lambda x: plain(this(), x) * helper.factor


@pytest.mark.parametrize("change", [scale_by_closure, scale_by_helper], ids=lambda change: change.__name__)
def test_a_network_goes_that_an_extensions_function_leads_to(change, load, sample, registry):
    """What was read of it is remembered, also the function and what that closes over."""
    import comfy.model_management as management

    model = load("tiny_sd15")
    network = model.model.diffusion_model
    change(network)
    ours = compiled(model)
    sample(ours, "tiny_sd15", steps=STEPS)
    gone = weakref.ref(network)
    del model, network, ours
    management.unload_all_models()
    management.current_loaded_models.clear()
    gc.collect()
    assert gone() is None


def test_an_error_in_the_middle_of_a_sampling_drops_them(model, sample, registry):
    ours = compiled(model)

    def stop(step, *_):
        if step == STEPS - 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        sample(ours, "tiny_sd15", steps=STEPS, callback=stop)
    assert counters(ours).replays > 0
    assert not ours.object_patches["diffusion_model.forward"].step_replay._states
    assert_image(sample, ours, model, STEPS - 2)
