"""Operators of `comfy_kitchen`, written in torch's functions: a compiler fuses those with what is around them.

The library has several kernels for a function and chooses one for each call. Each form here rounds as one of them
does: `per_tensor_quantize.cu` of its sources, `backends/eager/quantization.py` of its package. A compiler that fuses
may keep more digits between two roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from .. import comfy_compat

Form = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def quantize_in_float(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round as the CUDA kernel does: divide in float32."""
    most = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale).clamp(-most, most).to(dtype)


def dequantize_in_float(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply as the CUDA kernel does: in float32."""
    return (x.to(torch.float32) * scale).to(dtype)


def quantize_in_dtype(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round as the form without kernels does: multiply by the inverse in the values' own dtype."""
    most = torch.finfo(dtype).max
    return (x * (1.0 / scale).to(x.dtype)).clamp(-most, most).to(dtype)


def dequantize_in_dtype(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply as the form without kernels does: in the result's dtype."""
    return x.to(dtype) * scale.to(dtype)


_FORMS: Mapping[str, tuple[str, Mapping[str, Form]]] = {
    "quantize_fp8": ("quantize_per_tensor_fp8", {"cuda": quantize_in_float, "eager": quantize_in_dtype}),
    "dequantize_fp8": ("dequantize_per_tensor_fp8", {"cuda": dequantize_in_float, "eager": dequantize_in_dtype}),
}
"""By operator: the library's name for the function, and a form for each of its backends."""


def written_out(operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what an operator of the library returns, by torch's functions; None for any that has no such form."""
    name = str(operator).removesuffix(".default").rpartition("comfy_kitchen.")
    function, forms = _FORMS.get(name[2], ("", {})) if name[1] else ("", {})
    if not function or kwargs or len(args) != 3:
        return None
    registry, dtypes = comfy_compat.find("comfy_kitchen.registry.registry"), comfy_compat.find(comfy_compat.DTYPE_CODES)
    if registry is None or dtypes is None or args[2] not in dtypes:
        return None
    x, scale, dtype = args[0], args[1], dtypes[args[2]]
    chosen = registry.get_implementation(function, kwargs={"x": x, "scale": scale, "output_type": dtype})
    form = forms.get(chosen.__module__.removeprefix("comfy_kitchen.backends.").partition(".")[0])
    return None if form is None else form(x, scale, dtype)


@lru_cache(maxsize=1)
def version() -> str:
    """Return the library's version and the backends that it chooses from: they decide how weights are multiplied."""
    registry = comfy_compat.find("comfy_kitchen.registry.registry")
    backends = registry.list_backends() if registry is not None else {}
    usable = [n for n, state in backends.items() if state.get("available") and not state.get("disabled")]
    try:
        number = metadata.version("comfy-kitchen")
    except metadata.PackageNotFoundError:
        number = "unknown"
    return " ".join([number, *sorted(usable)])
