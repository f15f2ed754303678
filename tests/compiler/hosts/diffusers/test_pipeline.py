"""Pipelines of diffusers' own classes, narrow and with random weights (diffusers_examples/pipelines.py)."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import numpy
import pipelines
import pytest
import torch
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.compile_cache import key
from compiled_graphs.compiler.hosts.diffusers import pipeline as host
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.storage.graph_file import SUFFIX, GraphFileError
from compiled_graphs.diffusers import (
    Options,
    compile_module,
    compile_pipe,
    load_pipe,
    restore_pipe,
    save_pipe,
    summaries,
    warmup,
)
from diffusers import (
    LCMScheduler,
    PixArtTransformer2DModel,
    PriorTransformer,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from PIL import Image

pytestmark = pytest.mark.usefixtures("traced_once")

BOUND = 1e-4
"""Relative error of an image in single precision."""
SIZES = [(64, 64, 1), (64, 96, 1), (32, 128, 2), (80, 48, 1)]
"""Height and width in pixels, and batch."""


@pytest.fixture(scope="module")
def shared() -> Registry:
    return Registry()


@pytest.fixture
def graphs(shared, monkeypatch) -> Registry:
    """A registry that the tests of this file share, so each kind of region is traced only once."""
    monkeypatch.setattr(host, "registry", lambda: shared)
    return shared


@pytest.fixture
def restart(monkeypatch):
    """Forget every graph, as a new process does."""

    def forget() -> None:
        fresh = Registry()
        monkeypatch.setattr(host, "registry", lambda: fresh)

    return forget


def picture(height: int = 64, width: int = 64) -> Image.Image:
    pixels = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(0))
    return Image.fromarray((pixels * 255).byte().numpy())


def image(pipe, height: int = 64, width: int = 64, batch: int = 1, steps: int = 2, **arguments) -> torch.Tensor:
    """Make one image, or the frames of one video, always with the same seed."""
    arguments |= {"generator": torch.Generator().manual_seed(0), "output_type": "np", "num_inference_steps": steps}
    pipe.set_progress_bar_config(disable=True)
    kind = type(pipe).__name__
    if "Img2Img" in kind:
        arguments |= {"image": arguments.get("image", picture(height, width)), "strength": 1.0}
    else:
        arguments |= {"height": height, "width": width}
    if kind == "StableVideoDiffusionPipeline":
        arguments |= {"image": picture(height, width), "num_frames": 3, "decode_chunk_size": 3}
        return torch.from_numpy(numpy.asarray(pipe(**arguments).frames))
    if kind == "FluxPipeline":
        arguments |= pipelines.embeddings(pipe, batch=batch)
    else:
        arguments |= {"prompt": arguments.get("prompt", "a cat"), "num_images_per_prompt": batch}
    return torch.from_numpy(numpy.asarray(pipe(**arguments).images))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, bound: float = BOUND) -> None:
    assert ours.isfinite().all()
    assert ours.shape == theirs.shape
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= bound, f"relative error {error:.1e}"


def eagerly_compiled(pipe, **options):
    return compile_pipe(pipe, backend="eager", **options)


def reasons(pipe) -> set[str]:
    found = {reason for summary in summaries(pipe).values() for reason in summary.reasons}
    for _, _, part in host._compiled_parts(pipe):
        found |= set(part.compiled.counters.eager_calls)
    return {str(reason) for reason in found}


def is_plain(pipe) -> bool:
    networks = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    return not any("forward" in module.__dict__ for network in networks for module in network.modules())


# Whole pipelines, at any size.


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux"])
def test_images_match_eager_and_only_one_compiles(name, graphs):
    pipe = getattr(pipelines, name)()
    expected = [image(pipe, *size) for size in SIZES]
    assert eagerly_compiled(pipe) is pipe
    assert_same(image(pipe, *SIZES[0]), expected[0])
    with totals.expect(compiles=0, retired=0):
        for size, theirs in zip(SIZES, expected, strict=True):
            for _ in range(2):  # the first call with a batch of one is checked, and returns eager's result
                assert_same(image(pipe, *size), theirs)
    assert reasons(pipe) == set()


@pytest.mark.usefixtures("cpp_compiler")
def test_inductor_makes_the_image_too(restart, tmp_path):
    restart()
    pipe = pipelines.flux()
    expected = [image(pipe, *size) for size in SIZES]
    save_pipe(compile_pipe(pipe, ignores=("vae.encoder",)), tmp_path, ignores=("vae.encoder",))
    with totals.expect(compiles=0, retired=0):
        for size, theirs in zip(SIZES, expected, strict=True):
            for _ in range(2):
                assert_same(image(pipe, *size), theirs, 1e-3)
    restart()
    fresh = pipelines.flux()
    with totals.expect(compiles=0, retired=0):
        load_pipe(fresh, tmp_path)
        assert_same(image(fresh), expected[0], 1e-3)
    assert reasons(fresh) == set()


def test_frames_of_a_video_match_eager(graphs):
    pipe = pipelines.svd()
    expected = [image(pipe, *size) for size in ((64, 64), (64, 96))]
    eagerly_compiled(pipe)
    image(pipe)
    with totals.expect(compiles=0, retired=0):
        for size, theirs in zip(((64, 64), (64, 96)), expected, strict=True):
            assert_same(image(pipe, *size), theirs)
    assert reasons(pipe) == set()


def test_pipelines_of_the_same_networks_share_graphs(graphs):
    pipe = pipelines.sdxl()
    other = StableDiffusionXLImg2ImgPipeline(**pipe.components, add_watermarker=False)
    lcm = StableDiffusionXLImg2ImgPipeline(
        **{**pipe.components, "scheduler": LCMScheduler.from_config(pipe.scheduler.config)}, add_watermarker=False
    )
    expected = [image(other, 64, 96), image(lcm, 96, 64)]
    eagerly_compiled(pipe)
    image(pipe)
    assert_same(image(other), image(restore_pipe(copy.deepcopy(other))))  # the encoder compiles
    with totals.expect(compiles=0, retired=0):
        assert_same(image(other, 64, 96), expected[0])
        assert_same(image(lcm, 96, 64), expected[1])
    assert reasons(pipe) == set()


def test_what_is_ignored_is_left_as_it_is(graphs):
    pipe = eagerly_compiled(pipelines.sd15(), ignores=("vae.encoder", "unet"))
    assert set(summaries(pipe)) == {"vae.decoder"}
    pipe = eagerly_compiled(pipelines.sd15(), ignores=("vae",))
    assert set(summaries(pipe)) == {"unet"}


def test_text_encoders_are_compiled_if_asked_for(graphs):
    pipe = pipelines.sdxl()
    expected = image(pipe)
    eagerly_compiled(pipe, options=Options(text_encoders=True))
    for _ in range(2):
        assert_same(image(pipe), expected)
    assert {"text_encoder", "text_encoder_2"} <= set(summaries(pipe))
    assert all(summaries(pipe)[name].compiled for name in ("text_encoder", "text_encoder_2"))
    assert reasons(pipe) == set()


def test_restoring_leaves_nothing_behind(graphs):
    pipe = pipelines.sdxl()
    expected = image(pipe)
    eagerly_compiled(pipe, options=Options(text_encoders=True))
    image(pipe)
    restore_pipe(pipe)
    assert is_plain(pipe)
    with totals.expect(calls=0):
        assert_same(image(pipe), expected, 0)


def test_single_modules_are_compiled(graphs):
    pipe = pipelines.sd15()
    expected = [image(pipe, *size) for size in SIZES]
    pipe.unet = compile_module(pipe.unet, backend="eager")
    pipe.vae.decoder = compile_module(pipe.vae.decoder, backend="eager")
    for size, theirs in zip(SIZES, expected, strict=True):
        assert_same(image(pipe, *size), theirs)
    assert reasons(pipe) == set()
    assert set(summaries(pipe)) == {"unet", "vae.decoder"}
    assert is_plain(restore_pipe(pipe))


def test_a_pipeline_that_is_dropped_is_freed(graphs):
    pipe = eagerly_compiled(pipelines.sd15())
    image(pipe)
    unet = weakref.ref(pipe.unet)
    del pipe
    gc.collect()
    assert unet() is None


def test_a_deep_copy_runs_on_its_own_weights(graphs):
    pipe = eagerly_compiled(pipelines.sd15(), ignores=("vae",))
    image(pipe)
    copied = copy.deepcopy(pipe.unet)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.9)
    plain = pipelines.sd15(0)
    plain.unet.load_state_dict(copied.state_dict())
    pipe.unet = copied
    with totals.expect(calls=0):
        assert_same(image(pipe), image(plain), 0)


# Each test is named after a bug report that this project answers.


def test_report_saving_before_a_run_saved_nothing(graphs, restart, tmp_path):
    pipe = pipelines.sdxl()
    expected = image(pipe)
    saved = save_pipe(eagerly_compiled(pipe), tmp_path / "graphs")
    assert {part.part for part in saved} == {"unet", "vae.encoder", "vae.decoder"}
    assert all(part.path.stat().st_size == part.size and part.graphs for part in saved)
    restart()
    fresh = pipelines.sdxl()
    with totals.expect(compiles=0):
        loaded = load_pipe(fresh, tmp_path / "graphs")
        assert all(part.loaded == part.regions for part in loaded)
        for _ in range(2):
            assert_same(image(fresh), expected)
    assert reasons(fresh) == set()


def test_report_upcast_fp16_vae_did_not_load(graphs, restart, tmp_path):
    save_pipe(eagerly_compiled(pipelines.sdxl().to(torch.float16)), tmp_path)
    restart()
    plain, fresh = (pipelines.sdxl().to(torch.float16) for _ in range(2))
    load_pipe(fresh, tmp_path)
    with totals.expect(compiles=0):
        for _ in range(2):
            assert_same(image(fresh), image(plain), 1e-2)
        for model in (plain, fresh):  # people may also upcast and decode by themselves
            model.upcast_vae()
        latents = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            assert_same(fresh.vae.decode(latents).sample, plain.vae.decode(latents).sample)
    assert reasons(fresh) == set()


def test_report_video_failed_without_upcast_vae(graphs, restart, tmp_path):
    pipe = eagerly_compiled(pipelines.svd().to(torch.float16))
    small = partial(image, height=32, width=32, steps=1)  # CPUs take long over half precision
    small(pipe)
    save_pipe(pipe, tmp_path)
    restart()
    fresh = pipelines.svd().to(torch.float16)
    load_pipe(fresh, tmp_path)
    with totals.expect(compiles=0):
        frames = [small(fresh) for _ in range(2)]
    assert_same(frames[1], small(pipelines.svd().to(torch.float16)), 2e-2)
    assert reasons(fresh) == set()


@pytest.mark.parametrize("tiny", [False, True])
def test_report_pipelines_sharing_a_vae_did_not_load(tiny, graphs, restart, tmp_path):
    def load_both():
        base = pipelines.sdxl(vae=pipelines.tiny_autoencoder() if tiny else None)
        if tiny:
            torch.manual_seed(5)
            base.vae = pipelines.tiny_autoencoder()
        return base, pipelines.sdxl_refiner(base)

    def refined(base, refiner):
        first = base("a cat", height=64, width=64, num_inference_steps=2, output_type="latent",
                     generator=torch.Generator().manual_seed(0)).images  # fmt: skip
        return image(refiner, image=first, steps=2)

    def make_both():
        torch.manual_seed(3)
        return load_both()

    expected = refined(*make_both())
    pipes, options = make_both(), Options(text_encoders=True)  # the pipelines also share the second text encoder
    for number, pipe in enumerate(pipes):
        save_pipe(eagerly_compiled(pipe, options=options), tmp_path / str(number))
    restart()
    pipes = make_both()
    weights = {t.data_ptr() for t in pipes[0].vae.parameters()}
    with totals.expect(compiles=0):
        for number, pipe in enumerate(pipes):
            load_pipe(pipe, tmp_path / str(number), options=options)
        for _ in range(2):
            assert_same(refined(*pipes), expected)
    assert pipes[0].vae is pipes[1].vae
    assert {t.data_ptr() for t in pipes[1].vae.parameters()} == weights
    assert [reasons(pipe) for pipe in pipes] == [set(), set()]
    restore_pipe(pipes[0])
    assert "vae.decoder" in summaries(pipes[1])  # the refiner still uses it
    restore_pipe(pipes[1])
    assert all(is_plain(pipe) for pipe in pipes)


NEW_PROCESS = """
import sys
import pipelines
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.diffusers import compile_pipe, load_pipe

pipe = pipelines.sd15()
pipe.set_progress_bar_config(disable=True)
if sys.argv[2] == "compiled":
    compile_pipe(pipe)  # with a backend that differs from the files'
found = load_pipe(pipe, sys.argv[1])
for embeddings in (None, "given"):  # an optional input, left out and passed
    options = {"cross_attention_kwargs": {}} if embeddings else {}
    pipe("a cat", height=64, width=64, num_inference_steps=1, **options)
pipe("a cat", height=64, width=96, num_inference_steps=1, num_images_per_prompt=2)
assert totals.calls > 0 and totals.compiles == 0, (totals, found)
assert not totals.eager_calls, totals
print("loaded", totals.from_file)
"""


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_report_the_next_process_compiled_again(how, graphs, tmp_path):
    pipe = eagerly_compiled(pipelines.sd15())
    image(pipe, cross_attention_kwargs={})
    save_pipe(pipe, tmp_path / "graphs")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(pipelines.__file__).parent), *sys.path]),
        "COMPILED_GRAPHS_STORE": str(tmp_path / "store"),
        "PYTHONHASHSEED": "7",
    }
    command = [sys.executable, "-c", NEW_PROCESS, str(tmp_path / "graphs"), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("loaded"), done.stdout


def test_report_the_vae_compiled_at_every_resolution(graphs):
    pipe = eagerly_compiled(pipelines.sdxl(), ignores=("unet",))
    image(pipe)
    with totals.expect(compiles=0, retired=0):
        for height, width in ((64, 72), (96, 64), (32, 128), (128, 32), (96, 96)):
            image(pipe, height, width, steps=1)
    assert reasons(pipe) == set()


def test_report_each_resolution_had_to_be_warmed_up(graphs):
    pipe = eagerly_compiled(pipelines.sdxl())
    pipe.set_progress_bar_config(disable=True)
    warmup(pipe, [(64, 64), (64, 96)])
    with totals.expect(compiles=0, retired=0, verifications=0):
        for size in ((64, 64), (64, 96), (96, 64), (104, 88)):
            image(pipe, *size)


# Networks that the table of calls lacks: the running call shows how they are called.


def wan():
    network = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=3
    )
    return network, lambda batch, frames, height, width, tokens: {
        "hidden_states": torch.randn(batch, 16, frames, height, width),
        "timestep": torch.full((batch,), 5),
        "encoder_hidden_states": torch.randn(batch, tokens, 32),
    }


def pixart():
    network = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=3, cross_attention_dim=32, caption_channels=48,
        sample_size=8, norm_type="ada_norm_single", use_additional_conditions=False,
    )  # fmt: skip
    return network, lambda batch, frames, height, width, tokens: {
        "hidden_states": torch.randn(batch, 4, height, width),
        "timestep": torch.full((batch,), 5),
        "encoder_hidden_states": torch.randn(batch, tokens, 48),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def prior():
    network = PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, num_layers=3, embedding_dim=24, num_embeddings=7
    )
    return network, lambda batch, frames, height, width, tokens: {
        "hidden_states": torch.randn(batch, 24),
        "timestep": torch.tensor(3),
        "proj_embedding": torch.randn(batch, 24),
        "encoder_hidden_states": torch.randn(batch, 7, 24),
        "attention_mask": torch.ones(batch, 7, dtype=torch.bool),
    }


@pytest.mark.parametrize("make", [wan, pixart, prior])
def test_unknown_networks_compile_when_they_first_run(make, graphs):
    network, inputs = make()
    network.eval()
    reference = copy.deepcopy(network)
    compile_module(network, backend="eager")
    network(**inputs(1, 3, 8, 12, 9))
    with totals.expect(compiles=0, retired=0):
        for size in ((1, 3, 8, 12, 9), (2, 2, 12, 8, 11), (2, 2, 12, 8, 11)):
            given = inputs(*size)
            assert_same(network(**given, return_dict=False)[0], reference(**given, return_dict=False)[0])
    assert not host._part_of(network).compiled.counters.eager_calls


# Saving and loading.


def test_what_runs_used_is_saved_too(graphs, restart, tmp_path):
    pipe = eagerly_compiled(pipelines.sd15())
    image(pipe, cross_attention_kwargs={"unused": 0.5})
    before = {part.part: part.graphs for part in save_pipe(eagerly_compiled(pipelines.sd15()), tmp_path / "before")}
    after = {part.part: part.graphs for part in save_pipe(pipe, tmp_path / "after")}
    assert after["unet"] > before["unet"]


def test_graphs_of_another_dtype_wait_for_it(graphs, restart, tmp_path, caplog):
    save_pipe(eagerly_compiled(pipelines.sd15().to(torch.bfloat16)), tmp_path)
    restart()
    fresh = pipelines.sd15()
    found = {part.part: part for part in load_pipe(fresh, tmp_path)}
    assert found["unet"].loaded == 0
    assert found["unet"].waiting > 0
    assert any("none of its graphs in the files is for the dtype" in message for message in caplog.messages)
    fresh.to(torch.bfloat16)
    with totals.expect(compiles=0):
        for _ in range(2):
            assert_same(image(fresh), image(pipelines.sd15().to(torch.bfloat16)), 5e-2)
    assert reasons(fresh) == set()


def test_files_of_another_environment_say_why(graphs, restart, tmp_path, monkeypatch, caplog):
    save_pipe(eagerly_compiled(pipelines.sd15(), ignores=("unet",)), tmp_path)
    restart()
    monkeypatch.setattr(key, "code_version", lambda folder: "another")
    load_pipe(pipelines.sd15(), tmp_path)
    assert any("made for compiling" in message and "and this is another" in message for message in caplog.messages)


def test_not_overwriting_is_said_and_changes_nothing(graphs, tmp_path):
    pipe = eagerly_compiled(pipelines.sd15(), ignores=("unet",))
    (first, _) = save_pipe(pipe, tmp_path)
    before = first.path.read_bytes()
    fresh = eagerly_compiled(pipelines.sd15(1), ignores=("unet",))
    refused = pytest.raises(FileExistsError, match="choose another folder, or pass overwrite=True")
    with totals.expect(compiles=0, from_memory=0), refused:  # it checks for files before it compiles
        save_pipe(fresh, tmp_path, overwrite=False)
    assert first.path.read_bytes() == before


def test_other_files_of_the_folder_stay(graphs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    pipe = eagerly_compiled(pipelines.sd15(), ignores=("unet",))
    save_pipe(pipe, tmp_path)
    load_pipe(pipe, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_with_nothing_to_save_no_folder_is_made(graphs, tmp_path):
    pipe = pipelines.sd15()
    with pytest.raises(ValueError, match="nothing of this StableDiffusionPipeline could be compiled"):
        save_pipe(pipe, tmp_path / "graphs", ignores=("unet", "vae"))
    assert not (tmp_path / "graphs").exists()


def test_a_folder_that_does_not_exist_is_an_error(graphs, tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder; save_pipe makes it"):
        load_pipe(pipelines.sd15(), tmp_path / "graphs")


def test_a_folder_of_other_files_is_an_error(graphs, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(GraphFileError, match="holds no graph file that can be used"):
        load_pipe(pipelines.sd15(), tmp_path)


def test_graphs_of_another_pipeline_are_an_error(graphs, tmp_path):
    save_pipe(eagerly_compiled(pipelines.sd3(), ignores=("vae",)), tmp_path)
    with pytest.raises(GraphFileError, match="JointTransformerBlock, and none of them is in this StableDiffusionPip"):
        load_pipe(pipelines.sd15(), tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:-1] + b"?", lambda data: b""]
)
def test_a_damaged_file_is_named_and_compiled_again(damage, graphs, restart, tmp_path, caplog):
    pipe = pipelines.sd15()
    expected = image(pipe)
    save_pipe(eagerly_compiled(pipe), tmp_path)
    path = tmp_path / f"unet{SUFFIX}"
    path.write_bytes(damage(path.read_bytes()))
    fresh = pipelines.sd15()
    load_pipe(fresh, tmp_path)
    assert any(f"unet{SUFFIX} cannot be used" in record.getMessage() for record in caplog.records)
    assert_same(image(fresh), expected)


def test_a_foreign_file_with_a_damaged_list_is_named(graphs, tmp_path, monkeypatch, caplog):
    saved = save_pipe(eagerly_compiled(pipelines.sd15(), ignores=("unet",)), tmp_path)
    first = saved[0].path
    first.write_bytes(first.read_bytes().replace(b"fingerprint", b"fingerprinx"))
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "other machine"))
    load_pipe(pipelines.sd15(), tmp_path)
    assert any("manifest is damaged" in message for message in caplog.messages)


def test_a_foreign_folder_lists_what_is_compiled(graphs, restart, tmp_path, monkeypatch):
    pipe = pipelines.sd15()
    expected = image(pipe)
    save_pipe(eagerly_compiled(pipe, ignores=("vae",)), tmp_path / "graphs", ignores=("vae",))
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "other machine"))
    restart()
    fresh = pipelines.sd15()
    before = totals.compiles
    load_pipe(fresh, tmp_path / "graphs", ignores=("vae",))
    assert totals.compiles - before == summaries(fresh)["unet"].regions
    with totals.expect(compiles=0, from_file=0):
        assert_same(image(fresh), expected)


# Changes to a pipeline in use.


def lora_file(folder: Path, seed: int) -> dict:
    """Write a LoRA to a file. Return the arguments that load it."""
    from peft import LoraConfig, get_peft_model_state_dict

    pipe = pipelines.sd15()
    torch.manual_seed(seed)
    pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    layers, name = get_peft_model_state_dict(pipe.unet), f"{seed}.safetensors"
    pipe.save_lora_weights(folder, unet_lora_layers=layers, weight_name=name)
    return {"pretrained_model_name_or_path_or_dict": folder, "weight_name": name, "adapter_name": "style"}


def test_a_lora_is_followed_through_its_life(graphs, tmp_path):
    first, second = lora_file(tmp_path, 8), lora_file(tmp_path, 9)
    plain, pipe = pipelines.sd15(), eagerly_compiled(pipelines.sd15(), ignores=("vae",))
    without = image(plain)

    def both(change) -> torch.Tensor:
        """Change both pipelines, assert that they make the same image in two calls, and return it."""
        for model in (plain, pipe):
            change(model)
        expected = image(plain)
        for _ in range(2):
            assert_same(image(pipe), expected)
        return expected

    both(lambda model: None)
    full = both(lambda model: model.load_lora_weights(**first))
    assert (full - without).norm() > 1e-3 * without.norm()
    weak = both(lambda model: model.set_adapters(["style"], [0.3]))
    assert (full - weak).norm() > 1e-3 * full.norm()
    with totals.expect(compiles=0):
        assert_same(both(lambda model: model.set_adapters(["style"], [1.0])), full)
        swapped = both(lambda model: model.load_lora_weights(**second, hotswap=True))
    assert (full - swapped).norm() > 1e-3 * full.norm()
    assert_same(both(lambda model: model.fuse_lora()), swapped)
    both(lambda model: model.unfuse_lora())
    assert_same(both(lambda model: model.disable_lora()), without)
    with totals.expect(compiles=0):
        assert_same(both(lambda model: model.unload_lora_weights()), without)
    assert reasons(pipe) == set()


class HalfAttention:
    """A custom processor."""

    def __init__(self, inner):
        self.inner = inner
        self.factor = 0.5

    def __call__(self, attention, hidden_states, *args, **kwargs):
        return self.inner(attention, hidden_states, *args, **kwargs) * self.factor


def test_changed_attention_processors_take_effect(graphs):
    plain, pipe = pipelines.sd15(), eagerly_compiled(pipelines.sd15(), ignores=("vae",))
    before = image(pipe)
    for model in (plain, pipe):
        model.unet.set_attn_processor({n: HalfAttention(p) for n, p in model.unet.attn_processors.items()})
    assert (image(plain) - before).norm() > 1e-3 * before.norm()
    for _ in range(2):
        assert_same(image(pipe), image(plain))
    for model in (plain, pipe):
        for processor in model.unet.attn_processors.values():
            processor.factor = 2.0
    for _ in range(2):
        assert_same(image(pipe), image(plain))
    for model in (plain, pipe):
        model.unet.set_attn_processor(AttnProcessor2_0())
    for _ in range(2):
        assert_same(image(pipe), image(plain))
    assert not any("failed" in reason for reason in reasons(pipe))


def test_an_attention_backend_for_a_while_is_followed(graphs):
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    pipe = eagerly_compiled(pipelines.flux())
    image(pipe)
    compiled = host._part_of(pipe.transformer).compiled
    with dispatch.attention_backend("_native_math"):
        assert not compiled.is_unchanged()
    assert compiled.is_unchanged()


def test_a_controlnet_is_compiled_with_its_residuals(graphs):
    def controlled(number: int):
        pipe = pipelines.sd15()
        nets = [pipelines.controlnet(pipe.unet, seed) for seed in range(2, 2 + number)]
        return StableDiffusionControlNetPipeline(
            **pipe.components, controlnet=nets if number > 1 else nets[0], requires_safety_checker=False
        )

    for number in (1, 2):
        pipe = controlled(number)
        guide = [picture()] * number if number > 1 else picture()
        wide = [picture(64, 96)] * number if number > 1 else picture(64, 96)
        expected = image(pipe, image=guide), image(pipe, 64, 96, image=wide)
        assert (expected[0] - image(pipelines.sd15())).norm() > 1e-3 * expected[0].norm()
        eagerly_compiled(pipe)
        assert_same(image(pipe, image=guide), expected[0])
        with totals.expect(compiles=0, retired=0):
            assert_same(image(pipe, image=guide), expected[0])
            assert_same(image(pipe, 64, 96, image=wide), expected[1])
        assert reasons(pipe) == set()
        names = {"controlnet"} if number == 1 else {"controlnet.0", "controlnet.1"}
        assert names <= set(summaries(pipe))


def ip_adapter(unet, seed: int = 4) -> dict:
    """Return the weights of an IP-Adapter for a UNet, in the form of its files."""
    torch.manual_seed(seed)
    width, image_width = unet.config.cross_attention_dim, 24
    crossing = [module for name, module in unet.named_modules() if name.endswith("attn2")]
    return {
        "image_proj": {
            "proj.weight": torch.randn(4 * width, image_width),
            "proj.bias": torch.zeros(4 * width),
            "norm.weight": torch.ones(width),
            "norm.bias": torch.zeros(width),
        },
        "ip_adapter": {
            f"{2 * number + 1}.{name}.weight": torch.randn(attention.inner_dim, width)
            for number, attention in enumerate(crossing)
            for name in ("to_k_ip", "to_v_ip")
        },
    }


def test_an_ip_adapter_and_its_scale_are_followed(graphs):
    plain, pipe = pipelines.sd15(), eagerly_compiled(pipelines.sd15(), ignores=("vae",))
    without = image(pipe)
    for model in (plain, pipe):
        model.unet._load_ip_adapter_weights([ip_adapter(model.unet)])
    embeds = {"ip_adapter_image_embeds": [torch.randn(2, 1, 24, generator=torch.Generator().manual_seed(0))]}
    assert (image(plain, **embeds) - without).norm() > 1e-3 * without.norm()
    for scale in (1.0, 0.3):
        for model in (plain, pipe):
            model.set_ip_adapter_scale(scale)
        for _ in range(2):
            assert_same(image(pipe, **embeds), image(plain, **embeds))
    with totals.expect(compiles=0):
        assert_same(image(pipe, 64, 96, **embeds), image(plain, 64, 96, **embeds))
    assert reasons(pipe) == set()


def test_freeu_callbacks_tiling_and_slicing_still_work(graphs):
    def changed(pipe):
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6)
        pipe.vae.enable_slicing()
        pipe.vae.enable_tiling()
        pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 8, 64
        return pipe

    def halve(pipe, step, timestep, tensors):
        return {"latents": tensors["latents"] * 0.9}

    options = {"batch": 2, "callback_on_step_end": halve, "height": 96, "width": 128}
    expected = image(changed(pipelines.sd15()), **options)
    pipe = eagerly_compiled(pipelines.sd15())
    image(pipe)
    changed(pipe)
    with totals.expect(compiles=0, retired=0):
        for _ in range(2):
            assert_same(image(pipe, **options), expected)
    assert reasons(pipe) == set()


@pytest.mark.parametrize("order", ["offloaded first", "compiled first"])
def test_an_offloaded_pipeline_runs_its_graphs(order, graphs):
    """This test uses accelerate's hooks with the CPU as the device that models move to."""
    from accelerate import cpu_offload_with_hook

    def offload(pipe):
        for part in (pipe.text_encoder, pipe.unet, pipe.vae):
            cpu_offload_with_hook(part, "cpu")

    pipe = pipelines.sd15()
    expected = image(pipe)
    if order == "offloaded first":
        offload(pipe)
    eagerly_compiled(pipe)
    if order == "compiled first":
        offload(pipe)
    image(pipe)
    with totals.expect(compiles=0):
        assert_same(image(pipe), expected)
    assert totals.calls > 0
    assert reasons(pipe) == set()
    restore_pipe(pipe)
    with totals.expect(calls=0):
        assert_same(image(pipe), expected, 0)


def tile(network):
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"


def test_a_pipeline_that_offloads_each_part_stays_followed(graphs):
    """Each image ends with accelerate's hooks being removed and made again."""
    pipe = pipelines.sd15()
    pipe.enable_model_cpu_offload(device="cpu")
    eagerly_compiled(pipe)
    plain = image(pipe)
    tile(pipe.unet)
    other = pipelines.sd15()
    tile(other.unet)
    expected = image(other)
    assert (expected - plain).norm() > 1e-2 * plain.norm()
    with totals.expect(retired=0):
        assert_same(image(pipe), expected)
    restore_pipe(pipe)
    with totals.expect(calls=0):
        assert_same(image(pipe), expected, 0)


def test_a_hook_that_was_there_first_takes_nothing_of_ours_with_it(graphs):
    from diffusers.hooks import HookRegistry, ModelHook

    class Seen(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    seen, pipe = [], pipelines.sd15()
    HookRegistry.check_if_exists_or_initialize(pipe.unet).register_hook(Seen(), "seen")
    eagerly_compiled(pipe)
    image(pipe)
    assert seen
    HookRegistry.check_if_exists_or_initialize(pipe.unet).remove_hook("seen", recurse=False)
    tile(pipe.unet)
    other = pipelines.sd15()
    tile(other.unet)
    assert_same(image(pipe), image(other))
    restore_pipe(pipe)
    assert "forward" not in vars(pipe.unet) or pipe.unet.forward.__func__ is type(pipe.unet).forward


def test_a_decoder_that_changes_between_two_decodes_is_followed(graphs):
    """The schedule of the last image says nothing of decodes, however many steps it has."""
    pipe = eagerly_compiled(pipelines.sd15())
    pipe("a cat", height=64, width=64, num_inference_steps=8, output_type="latent")
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = pipe.vae.decode(latent).sample
        tile(pipe.vae)
        ours = pipe.vae.decode(latent).sample
        restore_pipe(pipe)
        theirs = pipe.vae.decode(latent).sample
    assert (theirs - plain).norm() > 1e-2 * plain.norm()
    assert_same(ours, theirs)


def test_restoring_reaches_below_the_hooks_of_a_cache(graphs):
    from diffusers import FirstBlockCacheConfig

    pipe = eagerly_compiled(pipelines.flux())
    image(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    restore_pipe(pipe)
    pipe.transformer.disable_cache()
    with totals.expect(calls=0):
        image(pipe)
    eagerly_compiled(pipe)
    image(pipe)
    assert reasons(pipe) == set()
    assert totals.calls > 0


def test_hooks_on_blocks_before_compiling_are_told(graphs, caplog):
    from diffusers import FirstBlockCacheConfig

    pipe = pipelines.flux()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    eagerly_compiled(pipe, ignores=["vae"])
    assert "transformer is not compiled: other code has hooks on its blocks" in caplog.text


def test_a_network_that_is_compiled_and_then_offloaded_can_be_copied(graphs):
    from accelerate import cpu_offload_with_hook

    pipe = eagerly_compiled(pipelines.sd15())
    cpu_offload_with_hook(pipe.unet, "cpu")
    copied = copy.deepcopy(pipe.unet)
    assert sum(parameter.numel() for parameter in copied.parameters()) > 0


def test_warming_up_runs_a_step_of_an_image_to_image_pipeline(graphs):
    from diffusers import StableDiffusionImg2ImgPipeline

    pipe = StableDiffusionImg2ImgPipeline(**pipelines.sd15().components)
    pipe.set_progress_bar_config(disable=True)
    eagerly_compiled(pipe)
    with totals.expect(retired=0):
        host.warmup(pipe, [(64, 64)], image=picture())
    assert summaries(pipe)["unet"].compiled


def test_random_sizes_compile_nothing_and_leak_nothing(graphs):
    def held() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor))

    pipe = eagerly_compiled(pipelines.sd15())
    sizes = torch.randint(3, 12, (50, 2), generator=torch.Generator().manual_seed(0)) * 8
    for height, width in sizes[:5].tolist():
        image(pipe, height, width, steps=1)
    before = held()
    with totals.expect(compiles=0, retired=0):
        for height, width in sizes[5:].tolist():
            image(pipe, height, width, steps=1)
    assert held() <= before + 5


# On a GPU.

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
HALF = 2e-2
"""Relative error of an image in half precision."""


@pytest.fixture(scope="module")
def saved_on_gpu(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    with pytest.MonkeyPatch.context() as patch:
        fresh = Registry()
        patch.setattr(host, "registry", lambda: fresh)
        patch.setenv("COMPILED_GRAPHS_TRUST", str(folder / "trust"))
        save_pipe(compile_pipe(pipelines.sdxl().to("cuda", torch.float16)), folder)
    return folder


@pytest.fixture
def folder_for_gpu(saved_on_gpu, restart, monkeypatch) -> Path:
    """The folder with graphs of the half-precision SDXL pipeline, in a process without graphs."""
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(saved_on_gpu / "trust"))
    restart()
    return saved_on_gpu


@on_gpu
def test_a_pipeline_loaded_on_the_cpu_runs_on_the_gpu(folder_for_gpu):
    expected = image(pipelines.sdxl().to("cuda", torch.float16))
    fresh = pipelines.sdxl()
    load_pipe(fresh, folder_for_gpu)
    fresh.to("cuda", torch.float16)
    with totals.expect(compiles=0, retired=0):
        for _ in range(2):
            assert_same(image(fresh), expected, HALF)
    assert totals.from_file > 0
    assert reasons(fresh) == set()


@on_gpu
@pytest.mark.parametrize("order", ["offloaded first", "loaded first"])
def test_an_offloaded_pipeline_runs_on_the_gpu(order, folder_for_gpu):
    expected = image(pipelines.sdxl().to("cuda", torch.float16))
    fresh = pipelines.sdxl().to(torch.float16)
    if order == "offloaded first":
        fresh.enable_model_cpu_offload()
    load_pipe(fresh, folder_for_gpu)
    if order == "loaded first":
        fresh.enable_model_cpu_offload()
    with totals.expect(compiles=0, retired=0):
        for _ in range(3):
            assert_same(image(fresh), expected, HALF)
    assert reasons(fresh) == set()
    assert not any(weight.is_cuda for weight in fresh.unet.parameters())


@on_gpu
def test_dtypes_are_followed_there_and_back_on_the_gpu(folder_for_gpu):
    places = [("cuda", torch.float16), ("cuda", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float16)]
    expected = [image(pipelines.sdxl().to(*place)) for place in places]
    pipe = pipelines.sdxl()
    load_pipe(pipe, folder_for_gpu)
    for place, theirs in zip(places, expected, strict=True):
        pipe.to(*place)
        for _ in range(2):
            assert_same(image(pipe), theirs, 5e-2)
    with totals.expect(compiles=0, retired=0):
        for place, theirs in zip(places, expected, strict=True):
            pipe.to(*place)
            assert_same(image(pipe), theirs, 5e-2)
    assert reasons(pipe) == set()


@on_gpu
def test_blocks_offloaded_by_layer_stay_eager(folder_for_gpu):
    expected = image(pipelines.sdxl().to("cuda", torch.float16))
    pipe = pipelines.sdxl().to(torch.float16)
    pipe.enable_sequential_cpu_offload()
    load_pipe(pipe, folder_for_gpu)
    with totals.expect(compiles=0, retired=0):
        for _ in range(2):
            assert_same(image(pipe), expected, HALF)
    assert reasons(pipe)


@on_gpu
def test_offloading_by_groups_gives_the_same_image(folder_for_gpu):
    expected = image(pipelines.sdxl().to("cuda", torch.float16))
    pipe = pipelines.sdxl().to(torch.float16)
    load_pipe(pipe, folder_for_gpu)
    pipe.enable_group_offload(torch.device("cuda"), offload_type="block_level", num_blocks_per_group=1)
    with totals.expect(retired=0):
        for _ in range(2):
            assert_same(image(pipe), expected, HALF)


# Bad input.


def test_what_is_no_pipeline_is_refused(graphs):
    with pytest.raises(TypeError, match="UNet2DConditionModel is no diffusers pipeline; for a single network"):
        compile_pipe(pipelines.sd15().unet)


def test_a_backend_that_does_not_exist_is_refused(graphs):
    with pytest.raises(ValueError, match="There is no backend named 'nonsense'"):
        compile_pipe(pipelines.sd15(), backend="nonsense")


def test_weights_that_were_never_loaded_are_refused(graphs):
    pipe = pipelines.sd15()
    pipe.unet.to("meta")
    with pytest.raises(ValueError, match="load them first"):
        compile_pipe(pipe, backend="eager")


def test_a_part_that_torch_compiled_is_left_alone(graphs, caplog):
    pipe = pipelines.sd15()
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    eagerly_compiled(pipe)
    assert "unet is compiled by torch.compile already, and left so." in caplog.messages
    assert set(summaries(pipe)) == {"vae.encoder", "vae.decoder"}


def test_compiling_twice_is_compiling_once(graphs):
    pipe = pipelines.sd15()
    expected = image(pipe)
    eagerly_compiled(eagerly_compiled(pipe))
    assert_same(image(pipe), expected)
    restore_pipe(pipe)
    assert is_plain(pipe)


def test_parts_that_are_none_are_passed_over(graphs):
    pipe = pipelines.flux()
    eagerly_compiled(pipe, options=Options(text_encoders=True))
    assert set(summaries(pipe)) == {"transformer", "vae.encoder", "vae.decoder"}
