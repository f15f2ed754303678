"""CLIP Speedup on ComfyUI's own text encoders, which encode as its nodes have them encode."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import process
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage.graph_file import StoredGraph
from encoders import LLM, TABLE, fill
from vbar import stream

LONG = 'a "black cat" and (some other dogs:1.3) in front of an old house ' * 5
TEXTS = ("a cat", LONG)
BOUND = 5e-2 if torch.cuda.is_available() else 1e-5


@pytest.fixture(scope="module")
def registry():
    """A registry for all tests here, without a store: most encoders have blocks of the same kinds."""
    registry = Registry()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "registry", lambda: registry)
        yield registry


@pytest.fixture
def load():
    rows = {row.name.partition(": ")[2]: row for row in TABLE}
    return lambda name, **options: rows[name].load(**options)


def speed_up(clip, **options):
    return host.compile_clip(clip, host.Request("eager", **{"verify": False, **options}))


def encode(clip, text, **images):
    """Return what a prompt is encoded as, and its pooled form if it has one."""
    with torch.inference_mode():
        return clip.encode_from_tokens(clip.tokenize(text, **images), return_pooled=True)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            known = torch.isfinite(other)  # an older ComfyUI's mask makes some rows of padding not a number
            assert known.any()
            assert torch.equal(known, torch.isfinite(one))
            assert (one - other)[known].norm() <= BOUND * other[known].norm()


def assert_all_compiled(ours, clip, texts=TEXTS):
    """Each text is encoded as by the plain CLIP, from graphs alone, and nothing is compiled meanwhile."""
    counters = host.compiled_model(ours).counters
    eager, calls = counters.eager_calls.copy(), counters.calls
    for text in texts:
        expected = encode(clip, text)
        with totals.expect(compiles=0, retired=0):
            assert_same(encode(ours, text), expected)
    assert counters.calls > calls
    assert counters.eager_calls == eager


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_encoder(row, registry):
    clip = row.load()
    ours, told = speed_up(clip)
    assert told.startswith("Ready"), told
    summary = host.compiled_model(ours).summary()
    assert (summary.compiled, summary.waiting, summary.eager) == (row.kinds, 0, 0)
    assert_all_compiled(ours, clip)


def test_an_encoder_goes_with_its_last_user(load, registry):
    """Without a search for cycles, which may come when the next encoder is there already."""
    ours, _ = speed_up(load("SDXL"))
    encode(ours, "a cat")
    network = weakref.ref(ours.cond_stage_model)
    gc.collect()
    gc.disable()
    try:
        del ours
        assert network() is None
    finally:
        gc.enable()


def test_the_page_about_compatibility_names_the_same_encoders():
    page = (Path(__file__).parents[4] / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("## Text encoders")[2].partition("\n## ")[0], re.M)
    assert [f"{encoder}: {models}" for encoder, models in rows[1:]] == [row.name for row in TABLE]


def test_inductor_compiles_it(load, registry, cpp_compiler):
    clip = load("Z-Image")
    ours, told = host.compile_clip(clip, host.Request("inductor"))
    assert told.startswith("Ready: 1 of 1 block types compiled"), told
    assert_all_compiled(ours, clip)
    assert host.compiled_model(ours).counters.verifications > 0


def test_the_clip_that_came_in_stays_eager_and_weights_are_shared(load, registry):
    clip = load("SD1.5")
    ours, _ = speed_up(clip)
    encode(ours, "a cat")
    with totals.expect(calls=0):
        encode(clip, "a cat")
    assert ours.cond_stage_model is clip.cond_stage_model
    comfy.model_management.unload_all_models()
    assert all(HOST.module_is_clean(module) for module in clip.cond_stage_model.modules())
    assert registry.report()["workflows"][""]["roles"].keys() >= {":text encoder"}


@pytest.mark.parametrize("is_before", [True, False], ids=["before the node", "after the node"])
@pytest.mark.parametrize("layer", [-1, -2, -3])
def test_clip_skip(layer, is_before, load, registry):
    clip = load("SDXL")

    def skip(clip):  # CLIPSetLastLayer
        clip = clip.clone()
        clip.clip_layer(layer)
        return clip

    ours = speed_up(skip(clip))[0] if is_before else skip(speed_up(clip)[0])
    assert_all_compiled(ours, skip(clip))


@pytest.mark.parametrize("is_before", [True, False], ids=["before the node", "after the node"])
def test_a_lora_on_the_text_encoder(is_before, load, registry):
    clip = load("Flux")

    def with_lora(clip):
        clip = clip.clone()
        weights = clip.cond_stage_model.state_dict()
        generator = torch.Generator().manual_seed(3)
        patches = {
            name: ("diff", (torch.randn(weight.shape, generator=generator) * 0.05,))
            for name, weight in weights.items()
            if name.endswith(("q_proj.weight", "SelfAttention.q.weight"))
        }
        assert len(clip.add_patches(patches, 1.0)) == len(patches) == 6
        return clip

    plain = encode(clip, "a cat")
    ours = speed_up(with_lora(clip))[0] if is_before else with_lora(speed_up(clip)[0])
    changed = encode(with_lora(clip), "a cat")
    assert (plain[0] - changed[0]).norm() > 1e-3 * plain[0].norm()
    assert_all_compiled(ours, with_lora(clip))


def test_embeddings_in_a_prompt(load, registry):
    clip = load("SD1.5")
    ours, _ = speed_up(clip)
    tokens = clip.tokenize("a cat")
    vector = torch.randn(64, generator=torch.Generator().manual_seed(5))
    tokens["l"][0][2] = (vector, 1.2)
    with torch.inference_mode():
        expected = clip.encode_from_tokens(tokens, return_pooled=True)
        with totals.expect(compiles=0):
            assert_same(ours.encode_from_tokens(tokens, return_pooled=True), expected)


@pytest.fixture
def seeing(load):
    """Qwen2.5-VL with a narrow network for images, which the table leaves out."""
    qwen_vl = pytest.importorskip("comfy.text_encoders.qwen_vl")

    clip = load("Qwen-Image")
    part = clip.cond_stage_model.qwen25_7b
    part.transformer.visual = qwen_vl.Qwen2VLVisionTransformer(
        hidden_size=64, output_hidden_size=64, intermediate_size=96, num_heads=4, num_layers=2, dtype=torch.float32,
        ops=comfy.ops.manual_cast,
    )  # fmt: skip
    fill(clip.cond_stage_model)
    return clip


def test_images_in_a_prompt(seeing, registry):
    """Blocks for text get positions in two dimensions then. One more graph serves images of any size."""
    ours, told = speed_up(seeing)
    assert told.startswith("Ready"), told
    pictures = [torch.rand(1, *size, 3, generator=torch.Generator().manual_seed(6)) for size in ((64, 96), (112, 80))]
    counters = host.compiled_model(ours).counters
    before = counters.compiles
    for number, pictures_in in enumerate(([pictures[0]], [pictures[1]], pictures)):
        expected = encode(seeing, "make it blue", images=pictures_in)
        assert_same(encode(ours, "make it blue", images=pictures_in), expected)
        assert counters.compiles == before + 1, f"prompt {number}"
    assert not counters.eager_calls
    assert_all_compiled(ours, seeing, TEXTS[:1])


def test_text_is_generated_without_graphs(load, registry):
    clip = load("Z-Image")
    if not hasattr(clip, "generate"):
        pytest.skip("this ComfyUI's text encoders generate nothing")
    ours, _ = speed_up(clip)
    tokens = clip.tokenize("a cat")
    with torch.inference_mode(), totals.expect(calls=0, compiles=0):
        answers = [c.generate(tokens, do_sample=False, max_length=4) for c in (clip, ours)]
    assert answers[0] == answers[1]


def test_a_block_with_a_cache_of_earlier_tokens_runs_uncompiled():
    assert HOST.unsupported_patch({"past_key_value": []}, frozenset()) == Reason(ReasonCode.EARLIER_TOKENS)
    assert HOST.unsupported_patch({"past_key_value": None}, frozenset()) is None


FORMATS = ("float8_e4m3fn", "int8_tensorwise", "nvfp4")


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_weights(form, load, registry):
    quant_ops = pytest.importorskip("comfy.quant_ops")
    if form not in getattr(quant_ops, "QUANT_ALGOS", {}) or not getattr(quant_ops, "_CK_AVAILABLE", False):
        pytest.skip(f"this ComfyUI has no {form}")
    from comfy.text_encoders import z_image

    def quantised():
        state = {}
        for key, weight in (
            load("Z-Image", dtype=torch.bfloat16).cond_stage_model.qwen3_4b.transformer.state_dict().items()
        ):
            state[key] = weight
            if weight.ndim == 2 and ".layers." in key:
                layout = quant_ops.QUANT_ALGOS[form]["comfy_tensor_layout"]
                kind = {"scale": "recalculate"} if "float8" in form else {}
                state |= quant_ops.QuantizedTensor.from_float(weight, layout, **kind).state_dict(key)
                note = json.dumps({"format": form}).encode()
                state[f"{key.removesuffix('weight')}comfy_quant"] = torch.tensor(list(note), dtype=torch.uint8)
        said = comfy.utils.detect_layer_quantization(state, "")
        network = z_image.te(dtype_llama=torch.bfloat16, llama_quantization_metadata=said)
        target = SimpleNamespace(params={}, clip=network, tokenizer=z_image.ZImageTokenizer)
        return comfy.sd.CLIP(target, model_options={"qwen3_4b_model_config": LLM}, state_dict=[state])

    clip = quantised()
    ours, _ = speed_up(clip)
    assert_all_compiled(ours, clip)
    layer = clip.cond_stage_model.qwen3_4b.transformer.model.layers[0].mlp.up_proj
    assert isinstance(layer.weight, quant_ops.QuantizedTensor)
    assert layer.comfy_force_cast_weights


def test_weights_that_are_streamed(load, registry, request):
    clip = load("Z-Image", dtype=torch.bfloat16)
    plain = load("Z-Image", dtype=torch.bfloat16)
    vbar = request.getfixturevalue("vbar")
    stream(clip.patcher, vbar)
    ours, _ = speed_up(clip)
    for share in (0.0, 0.5, 1.0):
        vbar.evict(share)
        assert_all_compiled(ours, plain)
        assert vbar.pinned == 0


def test_a_tokenizer_that_refuses_long_texts_fails_no_prompt(load, registry, monkeypatch):
    clip, plain = load("Z-Image"), load("Z-Image")
    tokenize = type(clip.tokenizer).tokenize_with_weights

    def strict(self, text, *args, **options):
        if len(text) > 1000:
            raise ValueError("more than 77 tokens")
        return tokenize(self, text, *args, **options)

    monkeypatch.setattr(type(clip.tokenizer), "tokenize_with_weights", strict)
    ours, told = speed_up(clip)
    assert told == "Compiled when the model first runs: 1 block type."
    assert_same(encode(ours, "a cat"), encode(plain, "a cat"))
    reasons = {reason.code for reason in host.compiled_model(ours).counters.eager_calls}
    assert reasons == {ReasonCode.SIZES_UNCLEAR}


def test_graphs_of_a_file_serve_it_without_compiling(load, registry, monkeypatch):
    clip = load("Z-Image")
    stored = [StoredGraph.of(graph) for graph in host.graphs_in_use(host.patcher_of(speed_up(clip)[0]))]
    fresh = Registry()
    monkeypatch.setattr(process, "registry", lambda: fresh)
    with totals.expect(compiles=0):
        loaded, told = speed_up(clip, graphs=stored, source="prompts")
        assert told.startswith("Ready: 1 of 1 block types loaded from prompts ("), told
    assert_all_compiled(loaded, clip)


def test_what_is_no_text_encoder_passes_through_with_the_reason(load, registry):
    assert speed_up(None) == (None, "Not compiled: the checkpoint has no text encoder")
    strange = SimpleNamespace(cond_stage_model=torch.nn.Identity())
    assert speed_up(strange) == (strange, "Not compiled: this ComfyUI's SimpleNamespace has no patcher")
