"""ControlNet Speedup on ComfyUI's own ControlNets, applied as its nodes apply them."""

from __future__ import annotations

import comfy.controlnet
import comfy.model_patcher
import comfy.ops
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import process
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.storage.graph_file import StoredGraph
from rows import adapter, control_net, controlled_by_lora, fill, hinted

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 1e-4
"""Relative error of a sampled latent; GPUs sample in half precision."""


@pytest.fixture
def model(load):
    return load("tiny_sd15")


def speed_up(control, **options):
    return host.compile_control_net(control, host.Request("eager", verify=False, **options))


def assert_same(ours, theirs):
    assert ours.isfinite().all()
    assert (ours - theirs).norm() <= BOUND * theirs.norm()


def test_the_image_is_eagers_at_every_size_from_one_set_of_graphs(model, sample, registry):
    control = control_net(model)
    compiled, text = speed_up(control)
    assert text.startswith("Ready: 3 of 3 block types compiled ("), text
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for size in ({}, {"height": 16, "width": 8}, {"batch": 2}, {"tokens": 154}, {"cfg": 1.0}, {"seed": 5}):
            calls = totals.calls
            ours = sample(model, "tiny_sd15", **hinted(compiled, 0.8), **size)
            assert totals.calls > calls
            assert_same(ours, sample(model, "tiny_sd15", **hinted(control, 0.8), **size))
    assert totals.eager_calls == before
    assert registry.report()["workflows"][""]["roles"].keys() == {":ControlNet"}


def test_it_is_applied(model, sample, registry):
    compiled, _ = speed_up(control_net(model))
    with_hint, without = sample(model, "tiny_sd15", **hinted(compiled, 0.8)), sample(model, "tiny_sd15")
    assert (with_hint - without).norm() > 1e-3 * without.norm()
    assert_same(sample(model, "tiny_sd15", **hinted(compiled, 0.0)), without)


def test_the_control_net_that_came_in_stays_eager_and_weights_are_shared(model, sample, registry):
    control = control_net(model)
    compiled, _ = speed_up(control)
    sample(model, "tiny_sd15", **hinted(compiled, 0.8))
    with totals.expect(calls=0):
        sample(model, "tiny_sd15", **hinted(control, 0.8))
    pairs = zip(compiled.control_model.parameters(), control.control_model.parameters(), strict=True)
    assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)
    comfy.model_management.unload_all_models()
    assert not any("forward" in module.__dict__ and not HOST.module_is_clean(module)
                   for module in control.control_model.modules())  # fmt: skip


def test_model_and_control_net_are_compiled_together(model, sample, registry):
    control = control_net(model)
    theirs = sample(model, "tiny_sd15", **hinted(control, 0.8))
    compiled, _ = speed_up(control)
    fast, _ = host.compile_model(model, host.Request("eager", verify=False))
    assert_same(sample(fast, "tiny_sd15", **hinted(compiled, 0.8)), theirs)


def test_two_in_a_chain_and_one_loaded_before_another(model, sample, registry):
    first, second = control_net(model), control_net(model)
    fill(second.control_model, seed=5)

    def chained(one, other):
        arguments = hinted(other, 0.5)
        arguments["conditioning"]["control"].set_previous_controlnet(hinted(one, 0.9)["conditioning"]["control"])
        return arguments

    theirs = sample(model, "tiny_sd15", **chained(first, second))
    ours = sample(model, "tiny_sd15", **chained(speed_up(first)[0], speed_up(second)[0]))
    assert_same(ours, theirs)
    chain = hinted(first, 0.9)["conditioning"]["control"]
    chain.set_previous_controlnet(second)
    assert speed_up(chain)[0].previous_controlnet is second


def test_graphs_of_a_file_serve_it_without_compiling(model, sample, registry, monkeypatch):
    control = control_net(model)
    compiled, _ = speed_up(control)
    stored = [StoredGraph.of(graph) for graph in host.graphs_in_use(host.patcher_of(compiled))]
    fresh = type(registry)()
    monkeypatch.setattr(process, "registry", lambda: fresh)
    with totals.expect(compiles=0):
        loaded, text = speed_up(control, graphs=stored, source="control")
        assert text.startswith("Ready: 3 of 3 block types loaded from control ("), text
        ours = sample(model, "tiny_sd15", **hinted(loaded, 0.8))
    assert_same(ours, sample(model, "tiny_sd15", **hinted(control, 0.8)))


def test_what_has_no_network_of_its_own_passes_through_with_the_reason(model, registry):
    for make, reason in (
        (adapter, "a T2IAdapter runs once per image"),
        (controlled_by_lora, "a ControlLora is made anew from the model's own weights"),
    ):
        control = make(model, 1.0)["conditioning"]["control"]
        same, text = speed_up(control)
        assert same is control
        assert reason in text


def transformer_control(name):
    """A ControlNet of the SD3 or Flux kind, narrow."""
    operations = {"dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
    if name == "sd3":
        mmdit = pytest.importorskip("comfy.cldm.mmdit")
        embedder = {"target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 128}}
        return mmdit.ControlNet(
            num_blocks=2, control_latent_channels=17, depth=2, in_channels=16, patch_size=2, adm_in_channels=64,
            context_embedder_config=embedder, num_patches=4096, pos_embed_max_size=64, **operations,
        )  # fmt: skip
    flux = pytest.importorskip("comfy.ldm.flux.controlnet")
    from comfy.ldm.flux.model import FluxParams

    newer = {"txt_ids_dims": []} if "txt_ids_dims" in FluxParams.__dataclass_fields__ else {}
    return flux.ControlNetFlux(
        latent_input=name == "flux_latent", control_latent_channels=16, in_channels=16, out_channels=16, patch_size=2,
        vec_in_dim=32, context_in_dim=48, hidden_size=64, mlp_ratio=2.0, num_heads=2, depth=2, depth_single_blocks=2,
        axes_dim=[8, 12, 12], theta=10000, qkv_bias=True, guidance_embed=True, image_model="flux",
        **newer, **operations,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["sd3", "flux", "flux_latent"])
def test_transformer_control_nets_are_compiled_ahead_and_give_eagers_residuals(name, registry):
    network = transformer_control(name)
    fill(network)
    control = comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"), extra_conds=["y", "guidance"])
    compiled, text = speed_up(control)
    assert "normal speed" not in text, text
    assert "when first used" not in text
    generator = torch.Generator().manual_seed(0)

    def call(control, height=8, width=12):
        random = lambda *shape: torch.randn(shape, generator=generator.manual_seed(1))  # noqa: E731
        side = 1 if name != "flux" else 8
        hint = random(1, {"sd3": 17, "flux": 3, "flux_latent": 16}[name], height * side, width * side)
        with torch.inference_mode():
            return control.control_model(
                x=random(1, 16, height, width), hint=hint, timesteps=random(1).abs(),
                context=random(1, 9, 96 if name == "sd3" else 48), y=random(1, 64 if name == "sd3" else 32),
                **({} if name == "sd3" else {"guidance": random(1)}),
            )  # fmt: skip

    for size in ((8, 12), (16, 8)):
        theirs = [t for group in call(control, *size).values() for t in group if t is not None]
        patcher = host.patcher_of(compiled)
        patcher.patch_model(torch.device("cpu"))
        with totals.expect(compiles=0):
            ours = [t for group in call(compiled, *size).values() for t in group if t is not None]
        patcher.unpatch_model(torch.device("cpu"))
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("is_announced", [True, False], ids=["compiled model", "plain model"])
def test_a_control_net_is_compared_once_in_a_sampling_of_a_compiled_model(
    model, sample, registry, monkeypatch, is_announced
):
    control, _ = speed_up(control_net(model))
    network = host.compiled_model(control)
    ours = host.compile_model(model, host.Request("eager", verify=False))[0] if is_announced else model
    refresh, count = network.refresh, []
    monkeypatch.setattr(network, "refresh", lambda **where: count.append(1) or refresh(**where))
    for _ in range(2):
        count.clear()
        sample(ours, "tiny_sd15", steps=4, **hinted(control, 0.8))
        assert len(count) == (1 if is_announced else 4)


def test_a_control_net_that_changes_between_samplings_is_followed(model, sample, registry):
    plain = control_net(model)
    control, _ = speed_up(plain)
    ours, _ = host.compile_model(model, host.Request("eager", verify=False))
    convolution = next(m for m in plain.control_model.input_blocks[1].modules() if isinstance(m, torch.nn.Conv2d))
    seen = []
    for mode in ("zeros", "circular", "zeros"):
        convolution.padding_mode = mode
        images = [sample(net, "tiny_sd15", **hinted(each, 0.8)) for net, each in ((ours, control), (model, plain))]
        assert_same(*images)
        seen.append(images[1])
    assert (seen[0] - seen[1]).norm() > 10 * BOUND * seen[0].norm()
