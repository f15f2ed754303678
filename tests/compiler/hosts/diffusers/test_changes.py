"""People change a compiled diffusers pipeline: the next image matches that of an uncompiled one."""

from __future__ import annotations

import io
import pickle

import numpy
import pipelines
import pytest
import torch
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.hosts.diffusers import pipeline as host
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.diffusers import compile_pipe
from diffusers.models.attention_processor import AttnProcessor2_0
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture
def pipe(monkeypatch):
    registry = Registry()
    monkeypatch.setattr(host, "registry", lambda: registry)
    pipe = compile_pipe(pipelines.sd15(), backend="eager")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe) -> torch.Tensor:
    arguments = {"generator": torch.Generator().manual_seed(0), "output_type": "np", "num_inference_steps": 2}
    return torch.from_numpy(numpy.asarray(pipe("a cat", height=64, width=64, **arguments).images))


def blocks(pipe, name):
    return [module for module in pipe.unet.modules() if type(module).__name__ == name]


class Scaling(AttnProcessor2_0):
    def __init__(self):
        super().__init__()
        self._scale = 1.0
        self.table = {"a": {"b": {"c": 1.0}}}

    def __call__(self, *arguments, **options):
        return super().__call__(*arguments, **options) * self._scale * self.table["a"]["b"]["c"]


class Slotted:
    __slots__ = ("inner", "scale")

    def __init__(self, scale=1.0):
        self.inner, self.scale = AttnProcessor2_0(), scale

    def __call__(self, *arguments, **options):
        return self.inner(*arguments, **options) * self.scale


def private_attribute(pipe, patch):
    for module in blocks(pipe, "Attention"):
        patch.setattr(module.processor, "_scale", 0.5)


def nested_table(pipe, patch):
    for module in blocks(pipe, "Attention"):
        patch.setitem(module.processor.table["a"]["b"], "c", 0.5)


def slotted_processor(pipe, patch):
    for module in blocks(pipe, "Attention"):
        patch.setattr(module, "processor", Slotted(0.5))


def class_of_a_block(pipe, patch):
    first = blocks(pipe, "ResnetBlock2D")
    cls = type(first[0])
    other = type("Other", (cls,), {"forward": lambda self, *a, **k: cls.forward(self, *a, **k) * 0.5})
    for block in first:
        patch.setattr(block, "__class__", other)


def eps(pipe, patch):
    for block in blocks(pipe, "GroupNorm"):
        patch.setattr(block, "eps", 0.5)


def output_scale(pipe, patch):
    for block in blocks(pipe, "ResnetBlock2D"):
        patch.setattr(block, "output_scale_factor", 2.0)


def heads(pipe, patch):
    for module in blocks(pipe, "Attention"):
        patch.setattr(module, "heads", module.heads // 2)


def tiling(pipe, patch):
    for layer in blocks(pipe, "Conv2d"):
        patch.setattr(layer, "padding_mode", "circular")


def processor_on_the_class(pipe, patch):
    call = AttnProcessor2_0.__call__
    patch.setattr(AttnProcessor2_0, "__call__", lambda self, *a, **k: call(self, *a, **k) * 0.5)


def attention_of_torch(pipe, patch):
    attend = functional.scaled_dot_product_attention
    patch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: attend(*a, **k) * 0.5)


CHANGES = [private_attribute, nested_table, slotted_processor, class_of_a_block, eps, output_scale, heads, tiling,
           processor_on_the_class, attention_of_torch]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_compiling_shows(pipe, monkeypatch, change):
    if change in (private_attribute, nested_table):
        pipe.unet.set_attn_processor(Scaling())
    before = image(pipe)
    with monkeypatch.context() as patch:
        change(pipe, patch)
        ours = image(pipe)
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(host.HOST, "unsupported_patch", lambda *_: Reason(ReasonCode.PATCH, "for comparison"))
            theirs = image(pipe)
        assert not torch.allclose(theirs, before, atol=1e-3)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(image(pipe), before, atol=1e-4, rtol=1e-4)


def test_dropout_that_trains_shows(pipe):
    image(pipe)
    for layer in blocks(pipe, "Dropout"):
        layer.p = 1.0
    pipe.unet.train()
    ours = image(pipe)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(host.HOST, "unsupported_patch", lambda *_: Reason(ReasonCode.PATCH, "for comparison"))
        torch.testing.assert_close(ours, image(pipe), atol=1e-4, rtol=1e-4)


def test_pickles_of_a_compiled_network_are_uncompiled(pipe):
    before = image(pipe)
    copied = pickle.loads(pickle.dumps(pipe.unet))
    buffer = io.BytesIO()
    torch.save(pipe.unet, buffer)
    buffer.seek(0)
    for copy in (copied, torch.load(buffer, weights_only=False)):
        assert host._part_of(copy) is None
        pipe.unet = copy
        torch.testing.assert_close(image(pipe), before, atol=1e-4, rtol=1e-4)


def test_a_network_is_checked_once_per_run(pipe, monkeypatch):
    image(pipe)
    looks = []
    compiled = host._part_of(pipe.unet).compiled
    monkeypatch.setattr(type(compiled), "refresh", lambda self: looks.append(self is compiled) or False)
    for _ in range(2):
        image(pipe)
    assert looks.count(True) == 2
