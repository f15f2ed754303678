"""Quantised checkpoints: compiled, with eager's image, at other sizes, with LoRAs, resident and streamed."""

from __future__ import annotations

import gc
import json
import pickle
import weakref

import comfy.model_management
import comfy.ops
import comfy.sample
import comfy.sd
import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.inner_tensors import plain_tensors
from compiled_graphs.compiler.common.reason import Reason, ReasonCode, Unsupported
from compiled_graphs.compiler.common.tensor_slots import tensor_slots
from compiled_graphs.compiler.compile_cache.graph_cache import GraphCache
from compiled_graphs.compiler.compile_cache.worker_pool import Workers, pickled, without_data
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import install, process, worker_setup
from compiled_graphs.compiler.hosts.comfy.rules import quantized_weights
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.identity.call_signature import bind, read
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime import region_forward
from compiled_graphs.compiler.tracing.export import export_region
from compiled_graphs.compiler.tracing.graph_request import GraphRequest
from compiled_graphs.compiler.tracing.weightless_copy import weightless_copy
from quantized_flux import KIND_OF_SCALE, error, quant_ops, quantized, sampled
from rows import adapted, linear_weights, low_rank
from vbar import stream

pytestmark = pytest.mark.usefixtures("traced_once")

FORMATS = ("float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4", "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8")
NATIVE_ON_CPU = ("float8_e4m3fn", "float8_e5m2")
"""Formats that a CPU can multiply as they are, though ComfyUI has it dequantise them."""

DEVICE = comfy.model_management.get_torch_device()
BOUND, INDUCTOR_BOUND = (3e-2, 3e-2) if DEVICE.type == "cuda" else (1e-5, 1e-2)
"""On a GPU the activations are bfloat16, and a few rounded otherwise change two steps of random weights by 1%."""


@pytest.fixture
def native(monkeypatch):
    """Have ComfyUI multiply float8 as it is, as on a GPU of 2023 or newer."""
    monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda *args, **kwargs: True)


def compiled(model, backend="eager", **options):
    ours, text = host.compile_model(model, host.Request(backend, verify=False, **options))
    assert ours is not model, text
    return ours


def plainly(run, *args, **options):
    """Run without graphs. Skip what this ComfyUI itself cannot run on this GPU."""
    try:
        return run(*args, **options)
    except ValueError as error:
        refused = "Float8_e5m2 matrices is not supported", "Bias is not supported when out_dtype is set to Float32"
        if not any(text in str(error) for text in refused):
            raise
        pytest.skip(f"ComfyUI cannot run it here: {error}")


SIZES = ({}, {"height": 24, "width": 32}, {"height": 8, "width": 40, "tokens": 33})


@pytest.mark.parametrize(
    ("name", "settings", "precision"),
    [
        ("float8_e4m3fn", {}, torch.float8_e4m3fn),
        ("float8_e4m3fn", {"full_precision_matrix_mult": True}, None),
        ("int8_tensorwise", {}, torch.bfloat16),
        (None, {}, None),
    ],
)
def test_the_check_allows_what_rounded_inputs_may_differ_by(
    name, settings, precision, flux, native, registry, monkeypatch
):
    allowed = []

    def note(graph, eager, precision=None):
        allowed.append(precision)

    monkeypatch.setattr(region_forward, "disagreement", note)
    model, text = host.compile_model(flux(name, **settings), host.Request("eager", verify=True))
    sampled(model)
    assert set(allowed) == {precision}, text


def test_the_dtype_that_a_clone_computes_in_is_known_ahead(flux, registry):
    """As Model Compute Dtype sets it."""
    model = flux("float8_e4m3fn", full_precision_matrix_mult=True)
    for dtype in (None, torch.float32, torch.bfloat16, torch.float32):
        changed = model.clone()
        changed.set_model_compute_dtype(dtype)
        expected = sampled(changed)
        ours = compiled(changed)
        with totals.expect(compiles=0):
            assert error(sampled(ours), expected) < BOUND


@pytest.mark.parametrize("name", NATIVE_ON_CPU)
def test_native_products_are_compiled(name, native, flux, registry):
    test_a_quantised_model_is_compiled_for_every_size(name, flux, registry)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_is_compiled_for_every_size(name, flux, registry):
    model = flux(name)
    layer = model.model.diffusion_model.double_blocks[0].img_attn.qkv
    assert type(layer.weight) is quant_ops.QuantizedTensor
    theirs = [plainly(sampled, model, **size) for size in SIZES]
    ours = compiled(model)
    sampled(ours)
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        assert max(error(sampled(ours, **size), each) for size, each in zip(SIZES, theirs, strict=True)) < BOUND
    assert totals.eager_calls == before
    assert len(host.graphs_in_use(ours)) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_loras_on_a_quantised_model_compile_nothing(name, flux, registry):
    model = flux(name)
    plainly(sampled, model)
    ours = compiled(model)
    sampled(ours)
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        for strength in (1.0, 0.5):
            theirs = sampled(adapted(low_rank)(model, strength))
            assert error(theirs, sampled(model)) > 0.1
            assert error(sampled(adapted(low_rank)(ours, strength)), theirs) < BOUND
        assert error(sampled(ours), sampled(model)) < BOUND
    assert totals.eager_calls == before


def test_one_graph_serves_other_checkpoints_of_a_layout(flux, flux_state, registry):
    compiled_one = compiled(flux("float8_e4m3fn"))
    sampled(compiled_one)
    other = {name: weight * 0.5 for name, weight in flux_state.items()}
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model_state_dict(quantized(other, "float8_e4m3fn"))
    with totals.expect(compiles=0, retired=0):
        assert error(sampled(compiled(model)), sampled(model)) < BOUND


def test_formats_and_mixtures_are_kinds_of_their_own(native, flux, registry):
    def mixed(key):
        return "float8_e4m3fn" if "img_" in key else "int8_tensorwise" if "txt_" in key else None

    models = [flux(chosen) for chosen in (None, "float8_e4m3fn", "int8_tensorwise", mixed)]
    models.append(flux("float8_e4m3fn", full_precision_matrix_mult=True))
    blocks = [model.model.diffusion_model.double_blocks[0] for model in models]
    assert len({fingerprint(block, HOST) for block in blocks}) == len(models)
    model = models[3]
    assert error(sampled(compiled(model)), sampled(model)) < BOUND


def test_weights_changed_at_the_call_are_dequantised_by_the_host(flux, registry):
    model = flux("float8_e4m3fn")
    ours = compiled(model)
    sampled(ours)
    layer = model.model.diffusion_model.double_blocks[0].img_attn.qkv
    layer.weight_function = [lambda weight: weight * 2]
    before = totals.eager_calls.copy()
    assert error(sampled(ours), sampled(model)) < BOUND
    eager = totals.eager_calls - before
    assert {reason.code for reason in eager} == {ReasonCode.WEIGHT_FUNCTION}
    assert sum(eager.values()) == 2  # one block of four, in two steps


def test_a_node_that_sets_the_dtype_has_the_host_dequantise(native, flux, registry):
    model = flux("float8_e4m3fn").clone()
    model.set_model_compute_dtype(torch.float32)
    ours = compiled(model)
    before = totals.eager_calls.copy()
    assert error(sampled(ours), sampled(model)) < BOUND
    assert Reason(ReasonCode.WEIGHT_FUNCTION, "comfy_force_cast_weights") in totals.eager_calls - before


def test_where_layers_dequantise_in_any_case_a_node_that_sets_the_dtype_changes_nothing(flux, registry):
    model = flux("float8_e4m3fn", full_precision_matrix_mult=True).clone()
    model.set_model_compute_dtype(torch.float32)
    ours = compiled(model)
    before = totals.eager_calls.copy()
    assert error(sampled(ours), sampled(model)) < BOUND
    assert model.model.diffusion_model.double_blocks[0].img_attn.qkv.comfy_force_cast_weights
    assert totals.eager_calls == before


@pytest.mark.parametrize(
    ("chosen", "is_told"),
    [("float8_e4m3fn", True), (lambda key: "float8_e4m3fn" if "linear1" in key else None, False), (None, False)],
    ids=["quantised", "in part", "not quantised"],
)
def test_a_backend_that_rounds_has_nothing_to_add(chosen, is_told, flux, registry, monkeypatch):
    class Rounding(EagerBackend):
        name, rounds = "rounding", True

    backends = {"rounding": Rounding(), "auto": EagerBackend()}
    monkeypatch.setattr(install, "choose_backend", lambda name, device, only_loads: (backends[name], ""))
    monkeypatch.setattr(install, "MIN_WEIGHTS", 256)
    ours, text = host.compile_model(flux(chosen), host.Request("rounding"))
    assert ("Compiled without rounding: the model" in text) == is_told
    compiled = ours.object_patches["diffusion_model.forward"].compiled
    assert compiled.backend == ("eager" if is_told else "rounding")


def test_an_unknown_layout_is_named(flux, registry, monkeypatch):
    model = flux("float8_e4m3fn")
    monkeypatch.delitem(quantized_weights.FIELDS, "TensorCoreFP8E4M3Layout")
    ours, text = host.compile_model(model, host.Request("eager", verify=False))
    assert "quantised weights in the layout TensorCoreFP8E4M3Layout, which is not known" in text
    assert error(sampled(ours), sampled(model)) < BOUND


def test_parameters_of_another_version_are_named(flux, monkeypatch):
    weight = flux("float8_e4m3fn").model.diffusion_model.double_blocks[0].img_attn.qkv.weight
    monkeypatch.setitem(quantized_weights.FIELDS, "TensorCoreFP8E4M3Layout", {"scale"})
    with pytest.raises(Unsupported, match="TensorCoreFP8E4M3Layout, with other parameters"):
        HOST.inner_tensors(weight)


def test_a_function_that_no_layout_answers_for_is_refused(flux):
    weight = flux("float8_e4m3fn").model.diffusion_model.double_blocks[0].img_attn.qkv.weight
    with HOST.traced_functions(), pytest.raises(Unsupported, match="softmax of a quantised weight"):
        torch.softmax(weight, 0)


def test_a_quantised_block_can_be_sent_to_a_worker(flux):
    block = flux("int8_tensorwise").model.diffusion_model.double_blocks[0]
    sent = pickle.loads(pickled(weightless_copy(block, HOST, without_data), HOST))
    assert fingerprint(sent, HOST) == fingerprint(block, HOST)
    assert {weight.device.type for weight in sent.parameters()} == {"meta"}


def test_a_worker_compiles_a_quantised_model(native, flux, monkeypatch):
    workers = Workers(worker_setup.setup, HOST, count=1)
    registry = Registry(GraphCache(workers=workers))
    monkeypatch.setattr(process, "registry", lambda: registry)
    try:
        model = flux("float8_e4m3fn")
        ours = compiled(model, background=True)
        host.finish(ours)
        assert len(host.graphs_in_use(ours)) == 2
        before = totals.eager_calls.copy()
        assert error(sampled(ours), sampled(model)) < BOUND
        assert totals.eager_calls == before
    finally:
        workers.stop()


@pytest.mark.usefixtures("cpp_compiler")
def test_inductor_gives_a_quantised_models_image(native, flux, registry):
    model = flux(lambda key: "float8_e4m3fn" if "img_" in key else "int8_tensorwise")
    ours = compiled(model, "inductor")
    before = totals.eager_calls.copy()
    assert error(sampled(ours), sampled(model)) < INDUCTOR_BOUND
    assert totals.eager_calls == before


def with_pages_of(streamed, plain):
    """Give a model that holds its weights those that a streamed one has in its pages."""
    for layer, other in zip(streamed.model.modules(), plain.model.modules(), strict=True):
        for name in ("weight", "bias") if "_v" in vars(layer) else ():
            if (arrived := vars(layer).get(f"_v_{name}")) is not None:
                with torch.inference_mode():
                    other._parameters[name] = torch.nn.Parameter(arrived.clone(), requires_grad=False)
    return plain


def strengths_in_pages(streamed):
    """Return with what strength the LoRA is in the pages of each layer that it has: its share of what has changed."""
    found = []
    for path, weight in linear_weights(streamed).items():
        file = low_rank(weight.shape, 3)
        delta = file["lora_up.weight"] @ file["lora_down.weight"]
        page = streamed.model.get_submodule(path)._v_weight
        change = (page.dequantize() - weight.dequantize()).float()
        found.append(((change * delta).sum() / delta.square().sum()).item())
    return found


STREAMED = [(name, 0.5) for name in FORMATS] + [("float8_e4m3fn", 1.0), ("float8_e4m3fn", 0.0), ("nvfp4", 0.0)]
"""The layers of the LoRA lie in the first half."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory")
@pytest.mark.parametrize(("name", "share"), STREAMED)
def test_streamed_quantised_weights_are_compiled(name, share, native, flux, registry, request):
    plain = flux(name)
    theirs = [sampled(plain, **size) for size in SIZES]
    vbar = request.getfixturevalue("vbar")
    ours = compiled(stream(flux(name), vbar))
    lora = adapted(low_rank)(ours, 0.7)
    arrived = sampled(lora, steps=4)
    assert error(arrived, sampled(with_pages_of(ours, flux(name)), steps=4)) < BOUND
    assert strengths_in_pages(ours) == pytest.approx([0.7] * 12, abs=0.1)
    vbar.evict()
    vbar.limit = int(vbar.size * share)
    is_dequantised = ours.model.diffusion_model.double_blocks[0].img_attn.qkv._full_precision_mm
    before = totals.eager_calls.copy()
    with totals.expect(compiles=0, retired=0):
        image = sampled(lora, steps=4)
        if not is_dequantised or share:
            assert error(image, arrived) < BOUND
            assert totals.eager_calls == before
        else:  # the layers themselves do not round such a weight again: the block is theirs
            assert {reason.code for reason in totals.eager_calls - before} == {ReasonCode.WEIGHT_FUNCTION}
        before = totals.eager_calls.copy()
        assert error(sampled(ours), theirs[0]) < BOUND
    assert max(error(sampled(ours, **size), each) for size, each in zip(SIZES, theirs, strict=True)) < BOUND
    assert totals.eager_calls == before
    assert vbar.pinned == 0


def test_an_unloaded_quantised_model_keeps_no_memory(flux, registry):
    model = flux("float8_e4m3fn")
    ours = compiled(model)
    sampled(ours)
    blocks = model.model.diffusion_model.double_blocks
    values = [weakref.ref(w._qdata) for w in blocks.parameters() if type(w) is quant_ops.QuantizedTensor]
    blocks.to("meta")
    gc.collect()
    assert len(values) > 10
    assert not [value for value in values if value() is not None]


def test_a_weight_that_was_looked_into_can_be_moved(flux):
    block = flux("int8_tensorwise").model.diffusion_model.double_blocks[0]
    for weight in block.parameters():
        HOST.inner_tensors(weight)
    holder = torch.nn.Module()  # without an `_apply` of its own
    holder.weight = block.img_attn.qkv.weight
    holder.to(torch.float16)


def test_arguments_by_name_are_those_by_place(flux):
    layer = flux("int8_tensorwise").model.diffusion_model.double_blocks[0].img_attn.qkv
    x, bias = torch.randn(3, 256), torch.randn(768)
    with HOST.traced_functions(), torch.no_grad():
        by_name = torch.nn.functional.linear(x, layer.weight, bias=bias)
        by_place = torch.nn.functional.linear(x, layer.weight, bias)
    assert torch.equal(by_name, by_place)


def test_quantised_weights_of_before_comfy_kitchen_are_named():
    class QuantizedTensor(torch.Tensor):
        """As ComfyUI had it in late 2025: other fields."""

    with pytest.raises(Unsupported, match="weights of type QuantizedTensor"):
        HOST.inner_tensors(torch.zeros(2).as_subclass(QuantizedTensor))


MIXED = comfy.ops.mixed_precision_ops({}, torch.float32)


def from_float(weight, name):
    return quant_ops.QuantizedTensor.from_float(
        weight, quant_ops.QUANT_ALGOS[name]["comfy_tensor_layout"], **KIND_OF_SCALE.get(name, {})
    ).state_dict("weight")


def filled(layer, state, name, **settings):
    note = list(json.dumps({"format": name, **settings}).encode())
    layer.load_state_dict({**state, "comfy_quant": torch.tensor(note, dtype=torch.uint8)}, strict=False)
    return layer


class FusedInput(torch.nn.Module):
    """As the feed-forward layers of Wan and LTX."""

    def __init__(self, name):
        super().__init__()
        state = from_float(torch.randn(32, 64), name) | {"bias": torch.randn(32)}
        self.layer = filled(MIXED.Linear(64, 32), state, name)

    def forward(self, x):
        return comfy.ops.linear_input_act(self.layer, x, "gelu_tanh")


class Table(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer = filled(MIXED.Embedding(16, 64), from_float(torch.randn(16, 64), name), name)

    def forward(self, x):
        return self.layer((x[:, 0] * 3).long().abs() % 16)


class Experts(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        parts = [from_float(torch.randn(32, 64), name) for _ in range(2)]
        state = {key: torch.stack([part[key] for part in parts]) for key in parts[0]} | {"bias": torch.randn(2, 32)}
        self.layer = filled(MIXED.MoEExperts(2, 64, 32), state, name, num_experts=2)

    def forward(self, x):
        with self.layer.bank_resident(x):
            return self.layer.expert_linear(x, 0) + self.layer.expert_linear(x, 1)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_tensorwise"])
@pytest.mark.parametrize("block", [FusedInput, Table, Experts])
def test_each_layer_of_comfyui_is_traced_for_every_size(block, name):
    module, x = block(name).to(DEVICE), torch.randn(5, 64, device=DEVICE)
    with torch.no_grad():
        plainly(module, x)
    signature, _ = read(bind(block, (x,), {}, HOST.context_arguments))
    sizes = (tuple(x.shape),), ((True, False),)
    request = GraphRequest("block", module, fingerprint(module, HOST), signature, x.device, (x.dtype,), *sizes)
    program = export_region(request, HOST).program.module()
    weights = plain_tensors([group[own] for _, (group, own) in tensor_slots(module)], HOST.inner_tensors)
    with torch.no_grad():
        for size in (5, 9):
            x = torch.randn(size, 64, device=DEVICE)
            assert torch.equal(program(weights, [x]), module(x))
