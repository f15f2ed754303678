"""Forms of `comfy_kitchen`'s operators: they round as the library's own."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy.rules import kitchen_ops

kitchen = pytest.importorskip("comfy_kitchen")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def code(dtype):
    from comfy_kitchen.backends.eager.quantization import DTYPE_TO_CODE

    return DTYPE_TO_CODE[dtype]


def values(dtype):
    """Numbers of all sizes, too large ones among them."""
    spread = torch.logspace(-12, 12, 4096, base=2)
    return torch.cat([spread, -spread, torch.zeros(1)]).to(dtype)


@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_rounded_as_the_operator_rounds_it(dtype, float8):
    x, scale = values(dtype), torch.tensor(0.37)
    operator = torch.ops.comfy_kitchen.quantize_fp8
    expected = operator(x, scale, code(float8))
    ours = kitchen_ops.written_out(operator, (x, scale, code(float8)), {})
    assert ours is not None
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_dequantised_as_the_operator_does_it(dtype):
    x, scale = values(torch.float32).to(torch.float8_e4m3fn), torch.tensor(0.37)
    operator = torch.ops.comfy_kitchen.dequantize_fp8.default
    expected = operator(x, scale, code(dtype))
    ours = kitchen_ops.written_out(operator, (x, scale, code(dtype)), {})
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)  # torch 2.11 makes NaN of large values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_float8_is_rounded_as_the_kernel_rounds_it(dtype, float8):
    x, scale = values(dtype)[: 4096 * 2].cuda(), torch.tensor(0.37, device="cuda")
    operator = torch.ops.comfy_kitchen.quantize_fp8
    expected = operator(x, scale, code(float8))
    ours = kitchen_ops.written_out(operator, (x, scale, code(float8)), {})
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


def test_the_cuda_kernels_form_divides_in_float32():
    x = torch.tensor([1.0, 3.0, 500.0, -1e6], dtype=torch.bfloat16)
    scale = torch.tensor(3.0)
    made = kitchen_ops.quantize_in_float(x, scale, torch.float8_e4m3fn).float()
    assert made.tolist() == [(x[0].float() / 3).to(torch.float8_e4m3fn).float().item(), 1.0, 160.0, -448.0]


@pytest.mark.parametrize("operator", [torch.add, torch.ops.aten.add.Tensor])
def test_other_functions_have_no_form(operator):
    assert kitchen_ops.written_out(operator, (torch.ones(1), torch.ones(1), 5), {}) is None


def test_the_version_names_the_backends():
    number, *backends = kitchen_ops.version().split()
    assert number[0].isdigit()
    assert "eager" in backends
