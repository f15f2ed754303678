"""VAE Speedup on ComfyUI's own VAE objects."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MethodType

import comfy.ldm.lightricks.vae.causal_video_autoencoder as causal_video_autoencoder
import comfy.model_management
import comfy.sd
import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend, EagerExecutable
from compiled_graphs.compiler.backends.inductor import channels_last
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.compile_cache import graph_cache
from compiled_graphs.compiler.hosts.comfy import compile as host
from compiled_graphs.compiler.hosts.comfy import process, synthetic_calls
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage.graph_file import StoredGraph, read_graphs, write_graphs
from compiled_graphs.compiler.storage.trust import Trust
from compiled_graphs.compiler.tracing import decompositions, export
from garbage import no_tensors_in_cycles

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 5e-2 if torch.cuda.is_available() else 1e-4
"""Relative error of an image."""
SIZES = [(1, 8, 8), (1, 8, 12), (2, 5, 7), (1, 1, 1), (1, 4, 3), (3, 3, 3), (4, 2, 6)]
"""Batch, height and width in latent units."""
WANS = ["wan", "wan22"]
"""VAEs that cut a video into chunks and keep frames between them."""
BROKEN = "a compiled image with values that are not finite, made again eagerly"


@pytest.fixture(scope="module")
def known(load_vae) -> list:
    """The graphs of a small VAE, in both directions."""
    registry = Registry()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "registry", lambda: registry)
        compiled, _ = compile_eager(load_vae("small_kl"), encode=True)
    return host.graphs_in_use(compiled.patcher)


@pytest.fixture(scope="module")
def chunk_graphs(load_vae) -> Callable[[str], list]:
    """The graphs that the node makes for a VAE that cuts a video into chunks, in both directions."""

    @cache
    def graphs(name: str) -> list:
        registry, vae = Registry(), load_vae(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "registry", lambda: registry)
            compiled, _ = compile_eager(vae, encode=True)
        return host.graphs_in_use(compiled.patcher)

    return graphs


@pytest.fixture
def warm_chunks(registry, chunk_graphs) -> Callable[[str], Registry]:
    """The test's own registry, with the graphs of such a VAE in memory."""

    def warm(name: str) -> Registry:
        for graph in chunk_graphs(name):
            registry.cache._keep(graph)
        return registry

    return warm


@pytest.fixture
def warm(registry, known) -> Registry:
    """The test's own registry, with a small VAE's graphs in memory."""
    for graph in known:
        registry.cache._keep(graph)
    return registry


def compile_eager(vae, encode=False, **options):
    return host.compile_vae(vae, host.Request("eager", **options), encode)


def latent(vae, batch: int = 1, height: int = 4, width: int = 4, frames: tuple = (), seed: int = 1) -> torch.Tensor:
    shape = (batch, vae.latent_channels, *frames, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pixels(batch: int = 1, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.rand((batch, height, width, channels), generator=torch.Generator().manual_seed(2))


def decode(vae, samples: torch.Tensor | None = None, tiled: dict | None = None, **options) -> torch.Tensor:
    samples = latent(vae) if samples is None else samples
    with torch.inference_mode():
        return vae.decode(samples, **options) if tiled is None else vae.decode_tiled(samples, **tiled)


def encode(vae, image: torch.Tensor | None = None, tiled: dict | None = None) -> torch.Tensor:
    image = pixels() if image is None else image
    torch.manual_seed(0)  # a ComfyUI of 2024 draws from the distribution it encodes to
    with torch.inference_mode():
        return vae.encode(image) if tiled is None else vae.encode_tiled(image, **tiled)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, bound: float = BOUND) -> None:
    assert ours.isfinite().all()
    assert ours.shape == theirs.shape
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= bound, f"relative error {error:.1e}"


def assert_different(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).norm() > 1e-2 * theirs.norm()


def roles(registry: Registry) -> dict:
    return registry.report()["workflows"][""]["roles"]


def reasons(registry: Registry) -> dict:
    return roles(registry)[":VAE"]["reasons"]


def spoil(registry: Registry, change) -> None:
    """Let every graph in memory return something else."""

    def spoiled(executable):
        return lambda *tensors: [change(output) for output in executable(*tensors)]

    for entry in registry.cache._entries.values():
        entry.graph = replace(entry.graph, executable=spoiled(entry.graph.executable))


def assert_same_outcome(ours, theirs) -> None:
    """An image that is equal, or an exception of the same type: newer ComfyUIs refuse less."""
    ours, theirs = outcome(ours), outcome(theirs)
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        assert_same(ours, theirs)


def outcome(action) -> torch.Tensor | type[Exception]:
    try:
        return action()
    except Exception as error:
        return type(error)


def read_back(*vaes) -> list[StoredGraph]:
    """The graphs of compiled VAEs, as a file gives them back."""
    graphs = [StoredGraph.of(graph) for vae in vaes for graph in host.graphs_in_use(vae.patcher)]
    return read_graphs(write_graphs(graphs, Trust()), Trust())


def restart(monkeypatch) -> Registry:
    """Forget every graph in memory."""
    registry = Registry()
    monkeypatch.setattr(process, "registry", lambda: registry)
    return registry


@pytest.mark.parametrize("name", ["small_kl", "sd3", "taesd"])
def test_the_image_is_eagers_at_every_size_and_only_the_first_compiles(name, load_vae, registry):
    vae = load_vae(name)
    before = totals.eager_calls.total()
    compiled, text = compile_eager(vae)
    assert re.fullmatch(r"Ready: 1 of 1 block types compiled \([\d.]+ s, once per model type\)\.", text), text
    with totals.expect(compiles=0, retired=0):
        for size in SIZES:
            theirs = decode(vae, latent(vae, *size))
            calls = totals.calls
            assert_same(decode(compiled, latent(vae, *size)), theirs)
            assert totals.calls > calls
    assert totals.eager_calls.total() == before


def test_a_vae_as_wide_as_released_ones_is_right_in_both_directions(load_vae, registry):
    vae = load_vae("kl")
    theirs, code = decode(vae), encode(vae)
    compiled, text = compile_eager(vae, encode=True)
    assert text.startswith("Ready: 2 of 2 block types compiled (")
    for _ in range(2):  # the first is eager's, in a check
        assert_same(decode(compiled), theirs)
        assert_same(encode(compiled), code)
    assert reasons(registry) == {}


def test_frames_of_stable_video_diffusion_are_decoded_as_eager_does(load_vae, registry):
    vae = load_vae("svd")
    compiled, text = compile_eager(vae)
    assert "normal speed" not in text
    for batch, height, width in [(3, 4, 4), (3, 4, 4), (5, 2, 6), (1, 4, 4)]:
        samples = latent(vae, batch, height, width)
        assert_same(decode(compiled, samples), decode(vae, samples))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", ["hunyuan_video", "ltxv"])
def test_frames_of_a_video_vae_are_decoded_as_eager_does(name, load_vae, registry):
    vae = load_vae(name)
    compiled, text = compile_eager(vae)
    assert re.match("Ready: |Ready \\(|Not compiled: |Compiled when |None of ", text)
    for frames, height, width in [(2, 4, 4), (2, 4, 4), (3, 2, 3), (1, 4, 4)]:
        samples = latent(vae, 1, height, width, (frames,))
        assert_same(decode(compiled, samples), decode(vae, samples))


def test_blocks_that_draw_random_numbers_give_eagers_frames_with_the_same_seed(load_vae, registry):
    vae = load_vae("noisy_ltxv")
    compiled, _ = compile_eager(vae)
    samples = latent(vae, 1, 4, 4, (2,))
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = decode(vae, samples)
        torch.manual_seed(seed)
        assert_same(decode(compiled, samples), theirs)


@pytest.mark.parametrize("name", WANS)
def test_chunks_of_a_video_are_compiled_ahead_at_every_length_and_size(name, load_vae, warm_chunks):
    vae, registry = load_vae(name), warm_chunks(name)
    with totals.expect(compiles=0, retired=0):
        compiled, text = compile_eager(vae)
        assert "normal speed" not in text
        for frames, height, width in [(1, 4, 4), (2, 4, 4), (3, 2, 3), (5, 3, 2), (4, 2, 5), (6, 3, 4)]:
            samples = latent(vae, 1, height, width, (frames,))
            assert_same(decode(compiled, samples), decode(vae, samples))
        samples = latent(vae, 2, 3, 4, (3,))
        assert_same(decode(compiled, samples), decode(vae, samples))
    assert reasons(registry) == {}


def chunks_carry_frames():
    from comfy.ldm.modules.diffusionmodules import model

    return hasattr(model, "conv_carry_causal_3d")


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_frames_that_chunks_hand_on_are_compiled_ahead_at_every_length_and_size(name, load_vae, registry):
    if not chunks_carry_frames():
        pytest.skip("this ComfyUI decodes a video as a whole")
    vae = load_vae(name)
    compiled, text = compile_eager(vae)
    assert "normal speed" not in text
    with totals.expect(compiles=0, retired=0):
        for frames, height, width in [(5, 4, 6), (9, 4, 4), (1, 4, 4), (2, 6, 4), (3, 3, 5), (12, 4, 6), (17, 4, 4)]:
            samples = latent(vae, 1, height, width, (frames,))
            assert_same(decode(compiled, samples), decode(vae, samples))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_frames_that_chunks_hand_on_are_encoded_by_the_same_graphs(name, load_vae, registry):
    if not chunks_carry_frames():
        pytest.skip("this ComfyUI encodes a video as a whole")
    vae = load_vae(name)
    compiled, _ = compile_eager(vae, encode=True)
    with totals.expect(compiles=0, retired=0):
        for frames, height, width in [(17, 64, 96), (1, 64, 64), (5, 64, 64), (9, 96, 64), (33, 64, 64)]:
            video = pixels(frames, height, width)
            assert_same(encode(compiled, video), encode(vae, video))
    assert reasons(registry) == {}


def test_frames_that_modules_keep_in_a_dictionary_are_compiled_ahead_at_every_length_and_size(load_vae, registry):
    vae = load_vae("seedvr2")
    compiled, text = compile_eager(vae)
    assert "normal speed" not in text
    with totals.expect(compiles=0, retired=0):
        for frames, height, width in [(1, 4, 4), (2, 4, 6), (3, 3, 4), (5, 4, 3), (4, 2, 5)]:
            samples = latent(vae, 1, height, width, (frames,))
            assert_same(decode(compiled, samples), decode(vae, samples))
    assert reasons(registry) == {}


def test_frames_that_modules_keep_in_a_dictionary_are_encoded_as_eager_does(load_vae, registry):
    vae = load_vae("seedvr2")
    compiled, _ = compile_eager(vae, encode=True)
    with totals.expect(compiles=0, retired=0):
        for frames, height, width in [(1, 32, 32), (5, 32, 48), (9, 48, 32), (17, 32, 32)]:
            video = pixels(frames, height, width)
            assert_same(encode(compiled, video), encode(vae, video))
    assert reasons(registry) == {}


@pytest.mark.parametrize(("name", "channels"), [("wan", 3), ("wan22", 3), ("wan_alpha", 4), ("cosmos", 3)])
def test_videos_are_encoded_as_eager_does(name, channels, load_vae, warm_chunks):
    """Cosmos' encoder takes a video whole; the others cut it into chunks."""
    vae, registry = load_vae(name), warm_chunks(name)
    with totals.expect(compiles=0, retired=0):
        compiled, _ = compile_eager(vae, encode=True)
        for frames, height, width in [(1, 32, 32), (5, 32, 48), (9, 48, 32), (13, 32, 32), (3, 32, 32)]:
            video = pixels(frames, height, width, channels)
            assert_same(encode(compiled, video), encode(vae, video))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", WANS)
def test_the_smallest_videos_get_graphs_of_their_own(name, load_vae, warm_chunks):
    """A map that is halved to one row is another branch of torch's own code."""
    vae, registry = load_vae(name), warm_chunks(name)
    compiled, _ = compile_eager(vae, encode=True)
    least = 16 if name == "wan22" else 8  # it packs two by two pixels first
    for frames, height, width in [(1, least, least), (5, least, 48)]:
        video = pixels(frames, height, width)
        assert_same(encode(compiled, video), encode(vae, video))
    samples = latent(vae, 1, 1, 1, (3,))
    assert_same(decode(compiled, samples), decode(vae, samples))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", WANS)
def test_every_block_of_these_classes_is_compiled(name, load_vae, warm_chunks):
    vae, registry = load_vae(name), warm_chunks(name)
    compiled, _ = compile_eager(vae)
    names = {"ResidualBlock", "Resample", "AttentionBlock"}
    blocks = [module for module in vae.first_stage_model.decoder.modules() if type(module).__name__ in names]
    with totals.expect(calls=len(blocks)):
        decode(compiled, latent(vae, 1, 4, 4, (1,)))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", WANS)
def test_tiles_of_a_video_come_from_the_same_graphs(name, load_vae, warm_chunks):
    vae, registry = load_vae(name), warm_chunks(name)
    tiled = {"tile_x": 4, "tile_y": 4, "overlap": 1, "tile_t": 4, "overlap_t": 1}
    samples = latent(vae, 1, 6, 5, (7,))
    compiled, _ = compile_eager(vae)
    with totals.expect(compiles=0, retired=0):
        assert_same(decode(compiled, samples, tiled), decode(vae, samples, tiled))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", ["wan", "hunyuan_video_15", "small_kl"])
def test_maps_of_a_video_are_freed_before_the_garbage_collector_runs(name, load_vae, registry):
    vae = load_vae(name)
    samples = latent(vae, 1, 4, 4, () if name == "small_kl" else (5,))
    compiled, _ = compile_eager(vae)
    decode(compiled, samples)
    with no_tensors_in_cycles(), totals.expect(compiles=0):
        compiled.first_stage_model.decode(samples.to(compiled.vae_dtype))


def test_graphs_that_keep_frames_are_saved_and_loaded(load_vae, warm_chunks, monkeypatch):
    vae, _ = load_vae("wan"), warm_chunks("wan")
    stored = read_back(compile_eager(vae)[0])
    registry = restart(monkeypatch)
    with totals.expect(compiles=0, retired=0):
        compiled, text = compile_eager(vae, None, graphs=stored, source="x", verify=False)
        assert " loaded from x (" in text
        for frames in (1, 3, 5):
            samples = latent(vae, 1, 4, 3, (frames,))
            assert_same(decode(compiled, samples), decode(vae, samples))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", WANS)
def test_a_graph_that_keeps_wrong_frames_is_retired(name, load_vae, warm_chunks):
    vae, registry = load_vae(name), warm_chunks(name)
    compiled, _ = compile_eager(vae)
    for entry in registry.cache._entries.values():
        if entry.graph.spec.region == "ResidualBlock" and entry.graph.spec.frames:
            entry.graph = replace(entry.graph, executable=with_wrong_frames(entry.graph.executable))
    samples = latent(vae, 1, 4, 4, (3,))
    before = totals.retired
    for _ in range(2):
        assert_same(decode(compiled, samples), decode(vae, samples), BOUND / 100)
    assert totals.retired > before
    assert all("failed its check: relative error" in reason for reason in reasons(registry))


def with_wrong_frames(executable):
    def run(*tensors):
        result, *kept = executable(*tensors)
        return [result, *(tensor * 1.1 for tensor in kept)]

    return run


def test_a_graph_that_fails_in_the_middle_of_a_video_leaves_the_list_to_eager(load_vae, warm_chunks):
    vae, registry = load_vae("wan"), warm_chunks("wan")
    compiled, _ = compile_eager(vae, verify=False)
    samples = latent(vae, 1, 4, 4, (3,))

    def fail(output):
        raise RuntimeError("no such kernel")

    spoil(registry, fail)
    assert_same(decode(compiled, samples), decode(vae, samples))


@pytest.fixture
def short_chunks(monkeypatch) -> None:
    """Let LTX's VAEs cut small videos into chunks as they cut large ones."""
    if not hasattr(causal_video_autoencoder, "get_max_chunk_size"):
        pytest.skip("this ComfyUI has VAEs of LTX that do not cut videos into chunks")
    monkeypatch.setattr(causal_video_autoencoder, "get_max_chunk_size", lambda device: 100_000)
    monkeypatch.setitem(synthetic_calls.VIDEOS, "decode", ((9, 4, 4),))


def decode_both(compiled, vae, samples: torch.Tensor) -> None:
    """Decode by graphs and without them. VAEs with a step of noise draw random numbers first."""
    torch.manual_seed(1)
    ours = decode(compiled, samples)
    torch.manual_seed(1)
    assert_same(ours, decode(vae, samples))


@pytest.mark.parametrize("name", ["ltxv", "deep_ltxv"])
def test_chunks_whose_frames_stay_in_modules_are_compiled(name, load_vae, registry, short_chunks):
    vae = load_vae(name)
    compiled, text = compile_eager(vae)
    assert "normal speed" not in text
    with totals.expect(compiles=0, retired=0):
        decode_both(compiled, vae, latent(vae, 1, 4, 4, (9,)))
    for frames, height, width in [(9, 3, 4), (2, 4, 4), (6, 4, 6), (1, 4, 4)]:  # other chunks, and a single one
        samples = latent(vae, 1, height, width, (frames,))
        decode_both(compiled, vae, samples)
        with totals.expect(compiles=0, verifications=0, retired=0):
            decode_both(compiled, vae, samples)
    assert reasons(registry) == {}
    assert not any(vars(module).get("temporal_cache_state") for module in compiled.first_stage_model.modules())


def test_videos_of_few_frames_are_compiled_ahead(load_vae, registry, short_chunks, monkeypatch):
    """In short videos a chunk can be the first and the last of a block that longer ones call with parts."""
    monkeypatch.setitem(synthetic_calls.VIDEOS, "decode", ((9, 4, 4), (2, 4, 4)))
    vae = load_vae("ltxv")
    compiled, _ = compile_eager(vae)
    with totals.expect(compiles=0, retired=0):
        for frames in (2, 9):
            decode_both(compiled, vae, latent(vae, 1, 4, 4, (frames,)))
    assert reasons(registry) == {}


def test_chunks_are_encoded_by_graphs_whose_frames_stay_in_modules(load_vae, registry, short_chunks, monkeypatch):
    monkeypatch.setattr(synthetic_calls, "VIDEOS", {"decode": ((1, 4, 4),), "encode": ((17, 64, 64),)})
    vae = load_vae("deep_ltxv")
    compiled, _ = compile_eager(vae, encode=True)
    for frames, height in [(17, 64), (1, 64), (25, 128)]:
        video = pixels(frames, height, 64)
        assert_same(encode(compiled, video), encode(vae, video))
    assert reasons(registry) == {}


def test_graphs_whose_frames_stay_in_modules_are_saved_and_loaded(load_vae, registry, short_chunks, monkeypatch):
    vae = load_vae("ltxv")
    samples = latent(vae, 1, 4, 4, (9,))
    stored = read_back(compile_eager(vae)[0])
    registry = restart(monkeypatch)
    with totals.expect(compiles=0, retired=0):
        compiled, text = compile_eager(vae, None, graphs=stored, source="x")
        assert " loaded from x (" in text
        decode_both(compiled, vae, samples)
    assert reasons(registry) == {}


def test_a_graph_that_leaves_wrong_frames_in_modules_is_retired(load_vae, registry, short_chunks):
    vae = load_vae("ltxv")
    compiled, _ = compile_eager(vae)
    for entry in registry.cache._entries.values():
        if '"kept"' in entry.graph.spec.frames:
            entry.graph = replace(entry.graph, executable=with_wrong_frames(entry.graph.executable))
    samples = latent(vae, 1, 4, 4, (9,))
    before = totals.retired
    for _ in range(2):
        assert_same(decode(compiled, samples), decode(vae, samples), BOUND / 100)
    assert totals.retired > before
    assert all("failed its check: relative error" in reason for reason in reasons(registry))


def test_a_graph_that_fails_in_the_middle_of_a_video_leaves_the_modules_to_eager(load_vae, registry, short_chunks):
    vae = load_vae("ltxv")
    compiled, _ = compile_eager(vae, verify=False)

    def fail(output):
        raise RuntimeError("no such kernel")

    spoil(registry, fail)
    samples = latent(vae, 1, 4, 4, (9,))
    assert_same(decode(compiled, samples), decode(vae, samples))


@pytest.mark.parametrize("name", ["deep_ltxv", "hunyuan_video", "hunyuan_video_15", "svd", "wan"])
def test_maps_that_stay_in_channels_last_give_the_same_video(name, load_vae, registry, short_chunks, monkeypatch):
    """Graphs for GPUs are changed so, each that convolves frames. Here their operators run one by one."""
    changed = []

    def compile_changed(self, exported):
        module = exported.program.graph_module
        convolves = any(node.target is torch.ops.aten.conv3d.default for node in module.graph.nodes)
        count = channels_last.keep_channels_last(module)
        changed.extend([count] if convolves else [])
        return EagerExecutable(exported.program)

    monkeypatch.setattr(EagerBackend, "compile", compile_changed)
    monkeypatch.setattr(decompositions, "_group_norm_on_gpu", decompositions.group_norm_by_channel)
    monkeypatch.setattr(graph_cache, "export_region", export.export_region)  # other tests trace without that
    vae = load_vae(name)
    compiled, _ = compile_eager(vae)
    for frames, height in [(9, 4), (2, 3)]:
        shape = (frames, height, 4) if name == "svd" else (1, height, 4, (frames,))
        decode_both(compiled, vae, latent(vae, *shape))
    assert reasons(registry) == {}
    assert min(changed) > 0, changed


@pytest.mark.parametrize("name", ["ltxv", "hunyuan_video_15"])
def test_inductor_gives_the_image_of_chunks_of_any_length(name, load_vae, registry, short_chunks, cpp_compiler):
    vae = load_vae(name)
    compiled, _ = host.compile_vae(vae, host.Request("inductor"), False)
    for frames, height in [(9, 4), (6, 6)]:
        decode_both(compiled, vae, latent(vae, 1, height, 4, (frames,)))
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", ["small_kl", "taesd"])
def test_tiles_of_all_shapes_come_from_one_graph(name, load_vae, warm):
    vae = load_vae(name)
    tiled = {"tile_x": 8, "tile_y": 8, "overlap": 2}
    samples = latent(vae, 1, 12, 10)
    compiled, _ = compile_eager(vae)
    with totals.expect(compiles=0, retired=0):
        ours = decode(compiled, samples, tiled)
    assert_same(ours, decode(vae, samples, tiled))
    assert_different(ours, decode(vae, samples))
    assert reasons(warm) == {}


def without_memory_once(vae) -> None:
    """Let the next plain decode find no memory before it begins."""
    needed = vae.memory_used_decode

    def memory_used(*arguments):
        vae.memory_used_decode = needed
        raise comfy.model_management.OOM_EXCEPTION("none left")

    vae.memory_used_decode = memory_used


def test_tiles_that_comfyui_falls_back_to_come_from_the_same_graph(load_vae, registry):
    vae = load_vae("taesd")
    samples = latent(vae, 1, 40, 4)
    compiled, _ = compile_eager(vae)
    without_memory_once(vae)
    theirs = decode(vae, samples)
    without_memory_once(compiled)
    with totals.expect(compiles=0, retired=0):
        assert_same(decode(compiled, samples), theirs)
    assert reasons(registry) == {}


@pytest.mark.parametrize("verify", [True, False])
def test_a_graph_out_of_memory_leaves_the_fallback_to_comfyui(verify, load_vae, warm):
    vae = load_vae("small_kl")
    without_memory_once(vae)
    theirs = decode(vae)
    compiled, _ = compile_eager(vae, verify=verify)
    failures = [comfy.model_management.OOM_EXCEPTION("none left")]

    def run_out(output):
        if failures:
            raise failures.pop()
        return output

    spoil(warm, run_out)
    with totals.expect(compiles=0, retired=0):
        assert_same(decode(compiled), theirs)
        assert_same(decode(compiled), decode(vae))
    assert not failures
    assert reasons(warm) == {}


@pytest.mark.parametrize("name", ["small_kl", "sd3", "taesd"])
def test_encoding_is_compiled_if_wanted(name, load_vae, warm):
    vae = load_vae(name)
    compiled, text = compile_eager(vae, encode=True)
    assert "normal speed" not in text
    with totals.expect(compiles=0, retired=0):
        for size in [(1, 32, 32), (1, 32, 32), (2, 40, 24), (1, 16, 16), (1, 37, 30)]:
            if size[1] % 8 and not hasattr(vae, "crop_input"):
                continue  # a ComfyUI of 2024 crops to nothing
            theirs = encode(vae, pixels(*size))
            calls = totals.calls
            assert_same(encode(compiled, pixels(*size)), theirs)
            assert totals.calls > calls
    assert_same(decode(compiled), decode(vae))
    assert reasons(warm) == {}


def test_an_image_that_is_halved_to_one_row_gets_a_graph_of_its_own(load_vae, warm):
    vae = load_vae("small_kl")
    compiled, _ = compile_eager(vae, encode=True)
    for size in [(1, 8, 8), (2, 8, 32)]:
        assert_same(encode(compiled, pixels(*size)), encode(vae, pixels(*size)))
    assert reasons(warm) == {}


def test_encoding_in_tiles_comes_from_one_graph(load_vae, warm):
    vae = load_vae("small_kl")
    if not hasattr(vae, "crop_input"):
        pytest.skip("this ComfyUI draws random numbers per tile")
    tiled = {"tile_x": 32, "tile_y": 32, "overlap": 8}
    compiled, _ = compile_eager(vae, encode=True)
    with totals.expect(compiles=0, retired=0):
        assert_same(encode(compiled, pixels(1, 48, 40), tiled), encode(vae, pixels(1, 48, 40), tiled))
    assert reasons(warm) == {}


@pytest.mark.parametrize("name", ["small_kl", "taesd"])
def test_encoding_is_left_alone_unless_wanted(name, load_vae, warm):
    vae = load_vae(name)
    compiled, _ = compile_eager(vae, encode=False)
    before = totals.eager_calls.total()
    with totals.expect(calls=0, compiles=0):
        assert_same(encode(compiled), encode(vae), BOUND / 100)
    assert totals.eager_calls.total() == before


def shape_of(network) -> dict:
    """Every module's own attributes, but for methods of its class that ComfyUI puts back on the instance."""
    return {
        path: {name: v for name, v in vars(m).items() if not own(m, name, v)} for path, m in network.named_modules()
    }


def own(module, name: str, value) -> bool:
    method = isinstance(value, MethodType) and value.__func__ is getattr(type(module), name, None)
    return method or name == "last_z_shape"


def test_the_vae_given_is_never_touched(load_vae, warm):
    vae = load_vae("small_kl")
    network, patcher = vae.first_stage_model, vae.patcher
    encode(vae), decode(vae)
    comfy.model_management.unload_all_models()
    attributes, modules = dict(vars(vae)), shape_of(network)
    compiled, _ = compile_eager(vae, encode=True)
    encode(compiled), decode(compiled)
    assert patcher.object_patches == {}
    comfy.model_management.unload_all_models()
    assert vars(vae) == attributes
    assert shape_of(network) == modules
    assert compiled.patcher is not patcher


def test_the_weights_are_there_once(load_vae, warm):
    vae = load_vae("small_kl")
    decode(vae)
    gc.collect()
    before = bytes_of_tensors()
    compiled, _ = compile_eager(vae, encode=True)
    decode(compiled), encode(compiled)
    gc.collect()
    mine, given = (dict(v.first_stage_model.named_parameters()) for v in (compiled, vae))
    assert {name: p.data_ptr() for name, p in mine.items()} == {name: p.data_ptr() for name, p in given.items()}
    assert compiled.patcher.model is vae.patcher.model
    weights = sum(parameter.nbytes for parameter in given.values())
    assert bytes_of_tensors() - before < weights / 10


def bytes_of_tensors() -> int:
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in gc.get_objects() if type(t) in kinds and t.layout is torch.strided]
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_one_vae_compiled_twice_and_plain_run_in_turns(load_vae, warm):
    vae = load_vae("small_kl")
    theirs = decode(vae)
    compiled = [compile_eager(vae)[0] for _ in range(2)]
    for _ in range(2):
        for ours in compiled:
            with totals.expect(calls=1):
                assert_same(decode(ours), theirs)
            with totals.expect(calls=0):
                assert torch.equal(decode(vae), theirs)


def test_two_vaes_of_one_architecture_share_graphs_and_never_weights(load_vae, warm):
    vaes = [load_vae("small_kl", seed) for seed in (0, 1)]
    with totals.expect(compiles=0):
        first, _ = compile_eager(vaes[0], encode=True)
        second, text = compile_eager(vaes[1], encode=True)
    assert text.startswith("Ready (loaded from memory, ")
    assert {g.key for g in host.graphs_in_use(first.patcher)} == {g.key for g in host.graphs_in_use(second.patcher)}
    theirs = [(decode(vae), encode(vae)) for vae in vaes]
    assert_different(theirs[0][0], theirs[1][0])
    for _ in range(2):
        for ours, (image, code) in zip((first, second), theirs, strict=True):
            assert_same(decode(ours), image)
            assert_same(encode(ours), code)


@pytest.mark.parametrize("directions", [(False, False), (True, True), (False, True), (True, False)])
def test_compiling_twice_in_a_chain_runs_each_region_once(directions, load_vae, warm):
    vae = load_vae("small_kl")
    theirs = decode(vae), encode(vae)
    once, _ = compile_eager(vae, directions[0])
    decode(once)
    twice, text = compile_eager(once, directions[1])
    assert "another node" not in text
    for _ in range(2):
        with totals.expect(calls=1):
            assert_same(decode(twice), theirs[0])
        assert_same(encode(twice), theirs[1])
    assert reasons(warm) == {}


def test_a_freed_vae_is_not_kept_by_anything_of_ours(load_vae, warm):
    vae = load_vae("small_kl")
    compiled, _ = compile_eager(vae, True, workflow=lambda: "w", node_id="1")
    decode(compiled), encode(compiled)
    network = weakref.ref(vae.first_stage_model)
    comfy.model_management.unload_all_models()
    gc.collect()
    gc.disable()
    try:
        del vae, compiled
        assert network() is None  # without a search for cycles
    finally:
        gc.enable()
    assert warm.report()["workflows"]["w"]["roles"]["1:VAE"]["compiled"] == 0


def test_a_dtype_has_graphs_of_its_own(load_vae, warm):
    wide, narrow = load_vae("small_kl"), load_vae("small_kl", dtype=torch.bfloat16)
    with totals.expect(compiles=1):
        compiled = [compile_eager(vae)[0] for vae in (wide, narrow)]
    keys = [{graph.key for graph in host.graphs_in_use(vae.patcher)} for vae in compiled]
    assert keys[0].isdisjoint(keys[1])
    assert_same(decode(compiled[0]), decode(wide))
    for _ in range(2):
        assert_same(decode(compiled[1]), decode(narrow), 5e-2)
    assert reasons(warm) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_of_the_command_line_is_the_graphs(dtype, load_vae, registry, monkeypatch):
    name = {torch.float16: "fp16_vae", torch.bfloat16: "bf16_vae", torch.float32: "fp32_vae"}[dtype]
    if hasattr(comfy.model_management, "VAE_DTYPE"):  # the command line, read on import in 2024
        monkeypatch.setattr(comfy.model_management, "VAE_DTYPE", dtype)
    else:
        monkeypatch.setattr(comfy.model_management.args, name, True)
    vae = load_vae("small_kl", dtype=None)
    assert vae.vae_dtype == dtype
    compiled, _ = compile_eager(vae)
    (graph,) = host.graphs_in_use(compiled.patcher)
    assert {i.dtype for i in graph.spec.inputs} == {str(dtype)}
    with totals.expect(compiles=0):
        for _ in range(2):
            assert_same(decode(compiled), decode(vae), BOUND if dtype == torch.float32 else 5e-2)
    assert reasons(registry) == {}


def test_a_file_of_another_dtype_does_no_harm(load_vae, warm, monkeypatch):
    wide, narrow = load_vae("small_kl"), load_vae("small_kl", dtype=torch.bfloat16)
    stored = read_back(compile_eager(narrow)[0])
    registry = restart(monkeypatch)
    with totals.expect(compiles=0, from_file=1):
        half, _ = compile_eager(narrow, None, graphs=stored, source="x")
    with totals.expect(compiles=1, from_file=0):
        full, text = compile_eager(wide, None, graphs=stored, source="x")
    assert text.startswith("Ready: 0 of 1 block types loaded from x, 1 compiled here (")
    assert text.splitlines()[1] == "Not in the file, compiled here: decoder."
    for _ in range(2):
        assert_same(decode(full), decode(wide))
        assert_same(decode(half), decode(narrow), 5e-2)
    assert reasons(registry) == {}


@pytest.mark.parametrize("name", ["small_kl", "taesd"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_image_that_only_the_graph_overflows_in_is_eagers(name, value, load_vae, warm):
    vae = load_vae(name)
    told = []
    compiled, _ = compile_eager(vae, verify=False, on_change=told.append)
    assert_same(decode(compiled), decode(vae))
    spoil(warm, lambda output: output * float(value))
    assert_same(decode(compiled), decode(vae), BOUND / 100)
    assert told[-1].endswith(f"made again uncompiled. ({BROKEN})")
    assert list(reasons(warm)) == [BROKEN]


def test_one_bad_value_after_a_passed_check_is_enough(load_vae, warm):
    vae = load_vae("small_kl")
    told = []
    compiled, _ = compile_eager(vae, encode=True, on_change=told.append)
    assert_same(decode(compiled), decode(vae))
    assert_same(encode(compiled), encode(vae))

    def spoil_one(output):
        output[0, 0, 0, 0] = float("nan")
        return output

    spoil(warm, spoil_one)
    with totals.expect(retired=0):
        assert_same(decode(compiled), decode(vae), BOUND / 100)
        assert encode(compiled).isfinite().all()
    assert [str(BROKEN) in text for text in told[-2:]] == [True, True]
    assert reasons(warm) == {BROKEN: 2}


def test_a_code_made_again_eagerly_is_eagers_with_the_same_seed(load_vae, warm):
    vae = load_vae("small_kl")
    compiled, _ = compile_eager(vae, encode=True, verify=False)
    spoil(warm, lambda output: output * float("nan"))
    assert_same(encode(compiled), encode(vae), BOUND / 100)


def test_memory_that_runs_out_while_an_image_is_made_again_is_comfyuis_business(load_vae, warm, monkeypatch):
    vae = load_vae("small_kl")
    theirs = decode(vae)
    compiled, _ = compile_eager(vae, verify=False)
    spoil(warm, lambda output: output * float("nan"))
    failures = [comfy.model_management.OOM_EXCEPTION("none left")]
    forward = type(vae.first_stage_model.decoder).forward

    def run_out(self, *arguments, **options):
        if failures:
            raise failures.pop()
        return forward(self, *arguments, **options)

    monkeypatch.setattr(type(vae.first_stage_model.decoder), "forward", run_out)
    assert_same(decode(compiled), theirs)
    assert not failures


def test_nan_in_the_weights_is_eagers_business(load_vae, warm):
    vae = load_vae("small_kl")
    with torch.no_grad():
        vae.first_stage_model.decoder.conv_out.weight[0, 0, 0, 0] = float("nan")
    told = []
    compiled, _ = compile_eager(vae, on_change=told.append)
    theirs = decode(vae)
    assert theirs.isnan().any()
    with totals.expect(retired=0):
        for _ in range(2):
            ours = decode(compiled)
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert_same(ours.nan_to_num(), theirs.nan_to_num())
    assert not any(str(BROKEN) in text for text in told)


@pytest.mark.parametrize("name", ["small_kl", "taesd"])
def test_a_graph_that_fails_its_check_is_retired(name, load_vae, warm):
    vae = load_vae(name)
    told = []
    compiled, _ = compile_eager(vae, on_change=told.append)
    spoil(warm, lambda output: output * 1.1)
    with totals.expect(retired=1):
        for _ in range(2):
            assert_same(decode(compiled), decode(vae), BOUND / 100)
    assert re.search(r"\(the graph of \w+ failed its check: relative error .*\)$", told[-1])
    assert len(told) == 1


def test_an_encoder_without_blocks_is_named(load_vae, warm):
    """Mochi's repeats no block."""
    vae = load_vae("small_kl")
    vae.first_stage_model.encoder = torch.nn.Identity()
    line = "Encoding runs as before: the encoder has no block that can be compiled."
    assert compile_eager(vae, encode=True)[1].splitlines()[-1] == line
    assert line not in compile_eager(vae)[1]


@pytest.mark.parametrize("way", ["attribute", "patch"])
def test_a_decoder_that_another_extension_replaced_is_left_alone(way, load_vae, warm):
    vae = load_vae("small_kl")
    decoder = vae.first_stage_model.decoder
    before = decode(vae)
    comfy.model_management.unload_all_models()
    replace_forward(vae, "decoder", way)
    theirs = decode(vae)
    assert_different(theirs, before)
    passed, text = compile_eager(vae)
    assert passed is vae
    assert text == (
        f"Not compiled: {type(vae.first_stage_model).__name__} has no block that can be compiled\n"
        "1 block is left to another node, which replaces its code."
    )
    assert torch.equal(decode(passed), theirs)
    compiled, text = compile_eager(vae, encode=True)
    assert text.startswith("Ready (loaded from memory, ")
    assert "1 block is left to another node" in text
    assert torch.equal(decode(compiled), theirs)
    assert_same(encode(compiled), encode(vae))
    comfy.model_management.unload_all_models()
    assert ("forward" in vars(decoder)) or way == "patch"
    assert torch.equal(decode(vae), theirs)


def replace_forward(vae, path: str, way: str) -> None:
    """As another extension might: on the module, or as an object patch."""
    module = vae.first_stage_model.get_submodule(path)

    def forward(*arguments, **options):
        return type(module).forward(module, *arguments, **options) * 0.5

    if way == "attribute":
        module.forward = forward
    else:
        vae.patcher.add_object_patch(f"{path}.forward", forward)


@pytest.mark.parametrize("way", ["attribute", "patch"])
def test_one_block_that_another_extension_replaced_leaves_the_others_compiled(way, load_vae, warm):
    vae = load_vae("taesd")
    replace_forward(vae, "taesd_decoder.4", way)
    theirs = decode(vae)
    compiled, text = compile_eager(vae)
    assert text.endswith("\n1 block is left to another node, which replaces its code.")
    with totals.expect(calls=9):
        assert_same(decode(compiled), theirs)
    comfy.model_management.unload_all_models()
    assert_same(decode(compiled), theirs)
    assert torch.equal(decode(vae), theirs)


@pytest.mark.parametrize("way", ["attribute", "patch"])
def test_a_decode_that_another_extension_replaced_keeps_running(way, load_vae, warm):
    vae = load_vae("small_kl")
    network = vae.first_stage_model
    before = decode(vae)
    comfy.model_management.unload_all_models()

    def half(*arguments, **options):
        return type(network).decode(network, *arguments, **options) * 0.5

    if way == "attribute":
        network.decode = half
    else:
        vae.patcher.add_object_patch("decode", half)
    theirs = decode(vae)
    assert_different(theirs, before)
    compiled, _ = compile_eager(vae)
    assert_same(decode(compiled), theirs)
    again, _ = compile_eager(vae)  # while the first one is loaded
    chained, _ = compile_eager(again)
    for ours in (again, chained, compiled):
        with totals.expect(calls=1):
            assert_same(decode(ours), theirs)
    comfy.model_management.unload_all_models()
    with totals.expect(calls=0):
        assert torch.equal(decode(vae), theirs)


def test_a_hook_inside_the_decoder_runs(load_vae, warm):
    vae = load_vae("small_kl")
    compiled, _ = compile_eager(vae)
    decode(compiled)
    hook = vae.first_stage_model.decoder.mid.attn_1.register_forward_hook(lambda module, given, result: result * 0.5)
    theirs = decode(vae)
    assert_same(decode(compiled), theirs)
    assert list(reasons(warm)) == ["a hook on a module inside the region"]
    hook.remove()
    assert_same(decode(compiled), decode(vae))


@pytest.mark.parametrize("encoding", [False, True, None])
def test_a_checkpoint_without_a_vae_passes_through(encoding, registry):
    vae = comfy.sd.VAE(sd={})
    passed, text = compile_eager(vae, encoding)
    assert passed is vae
    assert text == "Not compiled: the checkpoint has no VAE"


def test_missing_and_extra_keys_are_comfyuis_business(load_vae, warm):
    def change(weights: dict) -> dict:
        changed = {name: tensor for name, tensor in weights.items() if not name.startswith("encoder.mid")}
        return changed | {"loss.logvar": torch.zeros(1), "decoder.unheard.of": torch.ones(2)}

    vae = load_vae("small_kl", change=change)
    compiled, text = compile_eager(vae)
    assert text.startswith("Ready (loaded from memory, ")
    assert_same(decode(compiled), decode(vae))
    assert_same(decode(compiled), decode(load_vae("small_kl")))
    assert list(compiled.get_sd()) == list(vae.get_sd())


@pytest.mark.parametrize("name", ["small_kl", "taesd"])
def test_a_latent_of_five_dimensions_is_what_it_is_to_eager(name, load_vae, warm):
    vae = load_vae(name)
    samples = latent(vae, 1, 4, 4, (2,))
    compiled, _ = compile_eager(vae)
    assert_same_outcome(lambda: decode(compiled, samples), lambda: decode(vae, samples))
    assert_same(decode(compiled), decode(vae))


def test_a_latent_of_other_channels_is_what_it_is_to_eager(load_vae, warm):
    vae = load_vae("sd3")
    samples = torch.zeros(1, 4, 4, 4)
    compiled, _ = compile_eager(vae)
    assert_same_outcome(lambda: decode(compiled, samples), lambda: decode(vae, samples))
    assert_same(decode(compiled), decode(vae))


def test_pixels_with_an_alpha_channel_are_what_they_are_to_eager(load_vae, warm):
    vae = load_vae("small_kl")
    image = pixels(channels=4)
    compiled, _ = compile_eager(vae, encode=True)
    assert_same_outcome(lambda: encode(compiled, image), lambda: encode(vae, image))
    for _ in range(2):  # as VAE Encode passes them: a view
        assert_same(encode(compiled, image[..., :3]), encode(vae, image[..., :3]))


def test_unloading_between_decodes_changes_nothing(load_vae, warm):
    vae = load_vae("small_kl")
    theirs = decode(vae)
    compiled, _ = compile_eager(vae)
    for _ in range(3):
        with totals.expect(calls=1, retired=0):
            assert_same(decode(compiled), theirs)
        comfy.model_management.unload_all_models()
    assert reasons(warm) == {}


@pytest.mark.parametrize("name", ["small_kl", "taesd"])
def test_graphs_of_a_file_need_no_compiling(name, load_vae, warm, monkeypatch):
    vae = load_vae(name)
    stored = read_back(compile_eager(vae)[0])
    registry = restart(monkeypatch)
    with totals.expect(compiles=0, from_file=1):
        compiled, text = compile_eager(vae, None, graphs=stored, source="x")
        assert text.startswith("Ready: 1 of 1 block types loaded from x (")
        for size in SIZES:
            assert_same(decode(compiled, latent(vae, *size)), decode(vae, latent(vae, *size)))
        with totals.expect(calls=0):
            assert_same(encode(compiled), encode(vae))
    assert roles(registry)[":VAE"]["from_file"] == 1
    assert reasons(registry) == {}


def test_the_encoder_is_installed_if_the_file_has_it(load_vae, warm, monkeypatch):
    vae = load_vae("small_kl")
    stored = read_back(compile_eager(vae, encode=True)[0])
    restart(monkeypatch)
    with totals.expect(compiles=0, from_file=2):
        compiled, text = compile_eager(load_vae("small_kl", seed=1), None, graphs=stored, source="x")
    assert text.startswith("Ready: 2 of 2 block types loaded from x (")
    other = load_vae("small_kl", seed=1)
    for _ in range(2):
        with totals.expect(calls=2, compiles=0, retired=0):
            ours = decode(compiled), encode(compiled)
        assert_same(ours[0], decode(other))
        assert_same(ours[1], encode(other))


def test_a_wanted_encoder_that_the_file_lacks_is_compiled(load_vae, warm, monkeypatch):
    vae = load_vae("small_kl")
    stored = read_back(compile_eager(vae)[0])
    restart(monkeypatch)
    with totals.expect(compiles=1, from_file=1):
        compiled, text = compile_eager(vae, True, graphs=stored, source="x")
    assert text.startswith("Ready: 1 of 2 block types loaded from x, 1 compiled here (")
    assert text.splitlines()[1] == "Not in the file, compiled here: encoder."
    assert_same(encode(compiled), encode(vae))


def test_a_file_that_cannot_be_loaded_says_what_to_compile(load_vae, warm, monkeypatch):
    vae = load_vae("small_kl")
    listed = host.graphs_in_use(compile_eager(vae, encode=True)[0].patcher)
    restart(monkeypatch)
    with totals.expect(compiles=2):
        compiled, _ = compile_eager(vae, None, listed=listed)
    with totals.expect(compiles=0):
        assert_same(encode(compiled), encode(vae))
        assert_same(decode(compiled), decode(vae))


def test_each_prompt_is_played_by_the_vae_that_runs(load_vae, warm):
    vae = load_vae("small_kl")
    running = ["a"]
    compiled, _ = compile_eager(vae, workflow=lambda: running[-1], node_id="7")
    for workflow in "abb":
        running.append(workflow)
        decode(compiled)
    report = warm.report()["workflows"]
    assert Counter(name for workflow in report.values() for name in workflow["roles"]) == {"7:VAE": 2}
