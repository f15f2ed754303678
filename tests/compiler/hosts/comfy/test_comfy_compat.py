"""Each name that ComfyUI calls its own, taken away: what it was for is lost and nothing else, or the node names it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import coexistence, comfy_compat, doctor_facts, process, worker_setup
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy.deep_cache import Settings, use_deep_cache
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 1e-4


USED_BY_COMFYUI = {
    "comfy.memory_management.aimdo_enabled",
    "comfy.memory_management.vram_aligned_size",
    "comfy.model_management.MAX_PINNED_MEMORY",
    "comfy.model_management.STREAMS",
    "comfy.model_management.TOTAL_PINNED_MEMORY",
    "comfy.model_management.stream_counters",
    "comfy.ops.cast_bias_weight",
    "comfy.ops.cast_modules_with_vbar",
    "comfy.ops.resolve_cast_module_with_vbar",
    "comfy.cli_args.args",
    "comfy.model_management.throw_exception_if_processing_interrupted",
    "comfy.model_patcher.ModelPatcher",
    "comfy.patcher_extension.WrappersMP",
}
"""Names without which ComfyUI itself does not run: they are kept from us alone."""


class Without:
    """A thing of ComfyUI's as it would be if it had no attribute of one name; a clone of it lacks that, too."""

    def __init__(self, thing, name):
        self.__dict__.update(_thing=thing, _name=name)
        if name != "clone":
            self.__dict__["clone"] = lambda **options: Without(thing.clone(**options), name)

    def __getattr__(self, name):
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._thing, name)

    def __setattr__(self, name, value):
        setattr(self._thing, name, value)


def take_away(patch, name):
    """Delete a name of one of ComfyUI's modules, if this ComfyUI has it."""
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return
    if name in USED_BY_COMFYUI:
        found = SimpleNamespace(**vars(found))
        patch.setitem(sys.modules, module, found)
    patch.delattr(found, attribute, raising=False)


def compiled(model):
    return host.compile_model(model, host.Request("eager"))


def assert_image(sample, ours, theirs):
    image, expected = sample(ours, "tiny_sd15"), sample(theirs, "tiny_sd15")
    assert (image - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize("name", sorted(comfy_compat.MODULE_NAMES))
def test_a_module_without_a_name_costs_what_it_was_for(name, load, sample, registry, monkeypatch, tmp_path):
    monkeypatch.setenv("COMPILED_GRAPHS_STORE", str(tmp_path))  # the registry of tests keeps nothing
    model = load("tiny_sd15")
    has_server = importlib.util.find_spec("folder_paths") is not None  # the package index's build has none
    if has_server:
        importlib.import_module("folder_paths")
    with monkeypatch.context() as patch:
        take_away(patch, name)
        assert comfy_compat.find(name) is None
        ours, text = compiled(model)
        worker_setup.make_host(worker_setup.Given(comfy_compat.start_options(), {}))
        assert process._default_folder()
        if has_server:
            assert doctor_facts.running().store
        HOST.check_cancelled()
        HOST.return_cancellation()
        HOST.is_cancelled()
        assert not HOST.is_cancellation(ValueError())
        assert isinstance(comfy_compat.torch_device(), torch.device)
        use_deep_cache(model, Settings(), print)
    if interrupt := comfy_compat.find("comfy.model_management.interrupt_current_processing"):
        interrupt(False)
    assert text.startswith("Ready: 3 of 3 block types compiled (")
    assert_image(sample, ours, model)


@pytest.mark.parametrize("name", comfy_compat.PATCHER_NEEDS)
def test_a_patcher_without_what_is_needed_stays_as_it_is(name, load, registry):
    model = Without(load("tiny_sd15"), name)
    ours, text = compiled(model)
    assert ours is model
    assert text == f"Not compiled: this ComfyUI's {type(model).__name__} has no {name}"


@pytest.mark.parametrize("name", sorted(comfy_compat.PATCHER_OFFERS))
def test_a_patcher_without_what_is_offered_is_compiled(name, load, sample, registry):
    model = load("tiny_sd15")
    ours, text = compiled(Without(model, name))
    assert text.startswith("Ready: 3 of 3 block types compiled (")
    assert_image(sample, ours._thing, model)


@pytest.mark.parametrize("name", comfy_compat.VAE_NEEDS)
def test_a_vae_without_what_is_needed_stays_as_it_is(name, load_vae, registry):
    vae = Without(load_vae("taesd"), name)
    assert host.compile_vae(vae, host.Request("eager")) == (
        vae,
        f"Not compiled: this ComfyUI's {type(vae).__name__} has no {name}",
    )


class FakeControlNet:
    """A ControlNet with a patcher of its own."""

    control_model = nn.Identity()
    previous_controlnet = None

    def __init__(self, patcher):
        self.control_model_wrapped = patcher

    def get_control(self): ...

    def copy(self): ...


@pytest.mark.parametrize("name", comfy_compat.CONTROL_NET_NEEDS)
def test_a_control_net_without_what_is_needed_stays_as_it_is(name, load, registry):
    control_net = Without(FakeControlNet(load("tiny_sd15")), name)
    ours, text = host.compile_control_net(control_net)
    assert ours is control_net
    assert text == f"Not compiled: this ComfyUI's {type(control_net).__name__} has no {name}"


def test_a_control_net_without_a_patcher_stays_as_it_is(load, registry):
    control_net = Without(FakeControlNet(load("tiny_sd15")), comfy_compat.CONTROL_NET_PATCHER)
    ours, text = host.compile_control_net(control_net)
    assert ours is control_net
    assert text.startswith("Not compiled: ")


@pytest.mark.parametrize("key", comfy_compat.OPTION_KEYS)
def test_calls_without_an_option_are_eagers(key, load, sample, registry):
    """An option of another name, such as the key with an underline."""
    ours, theirs = compiled(load("tiny_sd15"))[0], load("tiny_sd15")

    def rename(apply_model, arguments):
        options = dict(arguments["c"]["transformer_options"])
        if key in options:
            options[f"{key}_"] = options.pop(key)
        return apply_model(
            arguments["input"], arguments["timestep"], **arguments["c"] | {"transformer_options": options}
        )

    for model in (ours, theirs):
        model.set_model_unet_function_wrapper(rename)
    assert_image(sample, ours, theirs)


@pytest.mark.parametrize("moment", ["ON_PRE_RUN", "ON_CLEANUP"])
def test_without_a_callbacks_name_no_sampling_is_announced(moment, load, sample, registry, monkeypatch):
    names = comfy_compat.find("comfy.patcher_extension.CallbacksMP")
    if names is None:
        pytest.skip("this ComfyUI does not say when a sampling begins")
    model = load("tiny_sd15")
    with monkeypatch.context() as patch:
        patch.delattr(names, moment)
        assert not comfy_compat.announces_samplings()
        ours, _ = compiled(model)
        assert use_deep_cache(model, Settings(), print)[1].startswith("Without DeepCache: ")
    assert_image(sample, ours, model)


@pytest.mark.parametrize("without", [comfy_compat.FP8_FORWARD, comfy_compat.FP8_SCALE, comfy_compat.FP8_PRODUCTS])
def test_a_scaled_layer_without_a_name_is_left_as_it_is(without):
    fp8_matrix_mult = False

    class Linear(nn.Linear):
        def forward_comfy_cast_weights(self, x):
            return fp8_matrix_mult

    layer = Linear(2, 2)
    layer.scale_weight = torch.ones(1)
    assert comfy_compat.chooses_by_size(layer)
    if without == comfy_compat.FP8_FORWARD:
        del Linear.forward_comfy_cast_weights
    elif without == comfy_compat.FP8_SCALE:
        del layer.scale_weight
    else:
        Linear.forward_comfy_cast_weights = lambda self, x: x
    assert not comfy_compat.chooses_by_size(layer)


def patch_of(**attributes):
    return type("Patch", (), attributes)()


@pytest.mark.parametrize(
    ("patch", "is_ours"),
    [
        (patch_of(package="compiled_graphs", __module__="other.folder.runtime.network_call"), True),
        (patch_of(package="another", __module__="other.folder.runtime.network_call"), False),
        (patch_of(), False),
    ],
)
def test_patches_of_another_copy_are_told_by_their_mark(patch, is_ours):
    assert coexistence.is_ours(patch) is is_ours


@pytest.mark.parametrize("name", ["Entrance", "CodingEntrance"])
def test_patches_of_an_older_copy_are_told_by_their_path(name):
    patch = type(name, (), {"__module__": "custom_nodes.older.compiler.entrance"})()
    assert coexistence.is_ours(patch)


def test_the_node_of_another_copy_is_replaced(load, registry):
    model = load("tiny_sd15")
    ours, _ = compiled(model)
    first = ours.object_patches["diffusion_model.forward"]
    again, _ = compiled(ours)
    second = again.object_patches["diffusion_model.forward"]
    assert second is not first
    assert second.inner is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0), ({"reserve_vram": None}, 0), ({"reserve_vram": 1.5}, 1.5), ({"vram_headroom": 4, "reserve_vram": 1}, 5)],
)
def test_memory_that_comfyui_leaves_free(options, expected, monkeypatch):
    monkeypatch.setattr(comfy_compat, "start_options", lambda: options)
    assert comfy_compat.memory_left_free() == expected * 2**30


@pytest.mark.parametrize("known", [True, False], ids=["its streams", "unknown streams"])
def test_offload_streams_wait_for_what_was_launched(known, monkeypatch):
    """And where ComfyUI does not say which those are, the CPU waits."""
    done, device = [], torch.device("cpu")
    current = SimpleNamespace(synchronize=lambda: done.append("synchronized"))
    streams = [SimpleNamespace(wait_stream=done.append) for _ in range(2)]
    monkeypatch.setattr(comfy_compat, "current_stream", lambda device: current)
    monkeypatch.setattr(comfy_compat, "find", lambda name: {device: streams} if known else None)
    comfy_compat.hold_back_offload_streams(device)
    assert done == ([current, current] if known else ["synchronized"])
