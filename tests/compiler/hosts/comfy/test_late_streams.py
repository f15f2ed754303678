"""Weights that come over several streams, on a GPU that runs these in another order each time."""

from __future__ import annotations

import random

import pytest
import torch
from late_gpu import late
from rows import adapted, low_rank
from test_streamed_weights import BOUND, compiled, layers_of
from vbar import pin, stream

pytestmark = [
    pytest.mark.usefixtures("traced_once"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in for a VBAR lies in the CPU's memory"),
]

ROUNDS = 8


@pytest.fixture
def model(plain, late_gpu, vbar, load):
    return stream(load("tiny_sd15"), vbar)


def test_images_are_right_in_any_order(model, plain, sample, registry, vbar, late_gpu):
    """Two prompts in each round, the second of which is launched while the GPU is busy with the first."""
    chosen, expected = random.Random(0), {}
    ours = compiled(model, verify=False)
    with late(late_gpu):
        sample(ours, "tiny_sd15")
    for _ in range(ROUNDS):
        share = chosen.choice((0.0, 0.1, 0.4, 1.0))
        vbar.evict(chosen.choice((0.0, chosen.random())))
        vbar.limit = int(vbar.size * share) if share < 1 else vbar.memory.numel()
        pin_most(ours, chosen)
        strengths = chosen.choices((None, 0.5, 1.0), k=2)
        for strength in set(strengths) - expected.keys():
            expected[strength] = sample(with_lora(plain, strength), "tiny_sd15", steps=2)
        with late(late_gpu):
            images = [sample(with_lora(ours, strength), "tiny_sd15", steps=2) for strength in strengths]
        for strength, image in zip(strengths, images, strict=True):
            error = ((image - expected[strength]).norm() / expected[strength].norm()).item()
            assert error <= BOUND, f"strength {strength}, {share} of the pages: relative error {error:.1e}"
        assert vbar.pinned == 0


def with_lora(model, strength):
    return model if strength is None else adapted(low_rank)(model, strength)


def pin_most(model, chosen):
    """Have most layers' weights in pinned memory, so that some come over ComfyUI's streams and others over ours."""
    pin(model)
    for layer in layers_of(model):
        if chosen.random() < 0.3:
            del layer._pins
