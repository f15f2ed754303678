from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler import libraries
from compiled_graphs.compiler.libraries import Example, load_libraries
from networks import CPU
from recorders import Operators

CUDA = torch.device("cuda")


def test_where_there_is_no_cuda_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(libraries, "_compute", lambda *_: pytest.fail("computed"))
    load_libraries(CPU)


def test_each_type_of_a_diffusion_model_is_computed_in(monkeypatch):
    computed = []
    monkeypatch.setattr(libraries, "_compute", lambda device, dtype: computed.append(dtype))
    load_libraries(CUDA)
    assert computed == [torch.float16, torch.bfloat16]


def test_a_gpu_that_cannot_is_left_as_it_is(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(libraries, "_compute", full)
    load_libraries(CUDA)


def test_what_is_computed_is_what_blocks_compute():
    with Operators() as operators, torch.inference_mode():
        libraries._compute(CPU, torch.bfloat16)
    names = {name.split(".")[0] for name in operators.names}
    assert {"conv2d", "linear", "matmul", "gelu", "silu", "cat", "isfinite", "pow", "log", "sin"} <= names
    assert any("attention" in name for name in names)


def test_no_random_numbers_are_drawn_from_whoever_samples_meanwhile():
    before = torch.get_rng_state()
    libraries._compute(CPU, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_example_keeps_batch_and_pixels():
    assert Example(CPU, torch.float32)(torch.zeros(2, 8, 6, 10)).shape == (2, 60, 16)
