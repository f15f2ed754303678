from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends import cuda_warmup as libraries
from compiled_graphs.compiler.backends.cuda_warmup import Example, load_libraries
from networks import CPU
from recorders import Operators

CUDA = torch.device("cuda")


def test_nothing_is_computed_without_cuda(monkeypatch):
    monkeypatch.setattr(libraries, "_compute", lambda *_: pytest.fail("computed"))
    load_libraries(CPU)


def test_each_dtype_is_computed(monkeypatch):
    computed = []
    monkeypatch.setattr(libraries, "_compute", lambda device, dtype: computed.append(dtype))
    load_libraries(CUDA)
    assert computed == [torch.float16, torch.bfloat16]


def test_failing_gpu_is_left_alone(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(libraries, "_compute", full)
    load_libraries(CUDA)


def test_warm_up_runs_the_operators_of_blocks():
    with Operators() as operators, torch.inference_mode():
        libraries._compute(CPU, torch.bfloat16)
    names = {name.split(".")[0] for name in operators.names}
    assert {"conv2d", "linear", "matmul", "gelu", "silu", "cat", "isfinite", "pow", "log", "sin"} <= names
    assert any("attention" in name for name in names)


def test_warm_up_draws_no_random_numbers():
    before = torch.get_rng_state()
    libraries._compute(CPU, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_example_keeps_batch_and_pixels():
    assert Example(CPU, torch.float32)(torch.zeros(2, 8, 6, 10)).shape == (2, 60, 16)
