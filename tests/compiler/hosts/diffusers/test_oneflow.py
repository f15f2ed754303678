"""compile_pipe, save_pipe and load_pipe through OneFlow."""

from __future__ import annotations

import numpy
import pipelines
import pytest
import torch
from compiled_graphs.compiler.backends.oneflow import backend
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.hosts.diffusers import pipeline as host
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.diffusers import compile_pipe, load_pipe, save_pipe, summaries

pytestmark = pytest.mark.oneflow


def image(pipe, height=64, width=64, batch=1):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    made = pipe(prompt="a cat", height=height, width=width, num_images_per_prompt=batch, generator=generator,
                output_type="np", num_inference_steps=2)  # fmt: skip
    return torch.from_numpy(numpy.asarray(made.images))


def assert_same(ours, theirs):
    assert ((ours - theirs).norm() / theirs.norm()) <= 1e-4


@pytest.mark.parametrize("name", ["sd15", "sd3"])
def test_images_match_eager_and_saved_graphs_load(name, monkeypatch, tmp_path):
    first, second = Registry(), Registry()
    monkeypatch.setattr(host, "registry", lambda: first)
    pipe = getattr(pipelines, name)()
    sizes = [(64, 64), (80, 48, 2), (64, 64)]
    expected = [image(pipe, *size) for size in sizes]
    compile_pipe(pipe, backend="oneflow")
    for size, theirs in zip(sizes, expected, strict=True):
        assert_same(image(pipe, *size), theirs)
    assert all(summary.eager == 0 and not summary.reasons for summary in summaries(pipe).values())
    built = backend.report("cpu")["built"]
    for size, theirs in zip(sizes, expected, strict=True):
        assert_same(image(pipe, *size), theirs)
    assert backend.report("cpu")["built"] == built
    save_pipe(pipe, tmp_path)
    monkeypatch.setattr(host, "registry", lambda: second)
    fresh = getattr(pipelines, name)()
    with totals.expect(compiles=0, retired=0):
        load_pipe(fresh, tmp_path)
        assert_same(image(fresh), expected[0])
    assert all(summary.loaded == summary.regions for summary in summaries(fresh).values())
