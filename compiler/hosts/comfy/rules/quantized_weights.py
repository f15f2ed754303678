"""Quantised weights (`comfy_kitchen`'s QuantizedTensor): their inner tensors are inputs of a graph.

ComfyUI's layers hand such a weight to torch's functions. Its class answers for them when torch's dispatcher asks,
and the dispatcher cannot ask while an export listens. So a mode asks the class first. Whatever ComfyUI's code does
is traced as it is: the same products as eager code, on the same GPU, in the same rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from ....common.inner_tensors import TENSOR_TYPES, InnerTensors
from ....common.reason import ReasonCode, Unsupported
from ....common.torch_compat import DisableTorchFunctionSubclass
from ....tracing.by_name import can_find
from ....tracing.opaque_op import call_by_name
from .. import comfy_compat
from . import kitchen_ops

_BASE = {"scale", "orig_dtype", "orig_shape"}
_W4A8 = {"s_channel", "correction", "codebook", "group_size", "convrot_groupsize", "transposed"}
FIELDS = {
    "TensorCoreFP8Layout": _BASE,
    "TensorCoreFP8E4M3Layout": _BASE,
    "TensorCoreFP8E5M2Layout": _BASE,
    "TensorCoreMXFP8Layout": _BASE | {"transposed"},
    "TensorCoreNVFP4Layout": _BASE | {"block_scale", "transposed"},
    "TensorWiseINT8Layout": _BASE | {"is_weight", "convrot", "convrot_groupsize", "transposed"},
    "TensorCoreConvRotW4A4Layout": _BASE | {"convrot_groupsize", "quant_group_size", "linear_dtype", "transposed"},
    "AsymW4A8Int8Layout": _BASE | _W4A8,
}
"""The layouts that are known, and what each one's parameters are. One with other parameters may mean another thing."""

OPAQUE_LINEARS = {
    "TensorCoreConvRotW4A4Layout": (
        "comfy_kitchen.tensor.convrot_w4a4:convrot_w4a4_linear",
        {"qweight": "_qdata", "wscales": "scale"}
        | {name: name for name in ("convrot_groupsize", "quant_group_size", "linear_dtype")},
    ),
    "AsymW4A8Int8Layout": (
        "comfy_kitchen.tensor.w4a8_int8:w4a8_int8_linear",
        {"qdata": "_qdata", "s_rel": "scale", "out_dtype": "orig_dtype"}
        | {name: name for name in ("s_channel", "codebook", "correction", "group_size", "convrot_groupsize")},
    ),
}
"""Layouts whose linear function is no operator: the function, and the parameter that each of its arguments takes."""

INT8_LAYOUT = "TensorWiseINT8Layout"
"""Of weights that ComfyUI takes from their layer where it fuses an activation (`comfy.ops.linear_input_act`)."""
DATA = "_qdata"
"""Attribute of a quantised weight: its values."""
_KNOWN = "_compiled_graphs_inner_tensors"


def inner_tensors(weight: Any) -> InnerTensors:
    """Return what a quantised weight consists of. Raises Unsupported, with its name, for an unknown layout.

    Each call of a region asks. The answer is kept with the weight: a reference from elsewhere, even a weak one, would
    keep `Module.to` from replacing the weight (`torch.utils.swap_tensors`).
    """
    known = weight.__dict__.get(_KNOWN)
    if known is not None and known[0] is weight._qdata and known[1] is weight._params:
        return known[2]
    inner = _inner_tensors(weight)
    weight.__dict__[_KNOWN] = weight._qdata, weight._params, inner
    return inner


def _inner_tensors(weight: Any) -> InnerTensors:
    name, fields = weight._layout_cls, _fields(weight)
    if fields.keys() != FIELDS.get(name):
        known = "with other parameters than are known" if name in FIELDS else "which is not known"
        raise Unsupported(ReasonCode.WEIGHT_LAYOUT, f"{name}, {known}")
    tensors = {n: value for n, value in fields.items() if isinstance(value, torch.Tensor)}
    settings = tuple((n, _plain(value)) for n, value in fields.items() if n not in tensors)
    layout = name, weight.layout_cls, settings, kitchen_ops.version()
    return InnerTensors((DATA, *tensors), (weight._qdata, *tensors.values()), layout)


def with_inner_tensors(weight: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a quantised weight of the same layout that consists of other tensors."""
    names = inner_tensors(weight).names
    data, *others = tensors
    parameters = dataclasses.replace(weight._params, **dict(zip(names[1:], others, strict=True)))
    return type(weight)(data, weight._layout_cls, parameters)


def is_known(cls: type) -> bool:
    """Whether a class is that of quantised weights. Before comfy_kitchen, ComfyUI had another one of that name."""
    quantized = quantized_type()
    return quantized is not None and issubclass(cls, quantized) and "comfy_kitchen" in cls.__module__


def is_quantized(attributes: Mapping[str, Any]) -> bool:
    """Whether a layer with these attributes has a weight that is no plain tensor."""
    weight = attributes["_parameters"].get("weight")
    return weight is not None and type(weight) not in TENSOR_TYPES


def precision(module: nn.Module) -> torch.dtype | None:
    """Return the precision to which layers of a module round their inputs; None if they dequantise their weights.

    Layers of int8 keep about as many digits as bfloat16, the others as many as float8 or fewer.
    """
    found = None
    for layer in module.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not is_known(type(weight)) or vars(layer).get("_full_precision_mm"):
            continue
        if getattr(weight, "_qdata", weight).dtype != torch.int8:
            return torch.float8_e4m3fn
        found = torch.bfloat16
    return found


def quantized_type() -> type | None:
    """Return the class of quantised weights, or None if this ComfyUI has none."""
    return comfy_compat.find("comfy.quant_ops.QuantizedTensor")


def hide_from_fused_inputs(weightless: nn.Module) -> None:
    """Have `comfy.ops.linear_input_act` call the int8 layers of a weightless copy.

    For such a weight it hands addresses to a kernel that applies the activation as well (Wan, LTX), and fake tensors
    have none. For a weight of any other kind it applies the activation and calls the layer.
    """
    quantized = quantized_type()
    for layer in weightless.modules() if quantized is not None else ():
        weight = layer._parameters.get("weight") if type(layer).__name__ == "Linear" else None
        if isinstance(weight, quantized) and weight._layout_cls == INT8_LAYOUT:
            layer.__class__ = _with_hidden_weight(type(layer))


@lru_cache(maxsize=16)
def _with_hidden_weight(cls: type) -> type:
    class Hidden(cls):
        """A layer whose weight only its own code can see."""

        @property
        def weight(self) -> Any:
            return self._parameters["weight"] if self.__dict__.get("_is_running") else None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__["_is_running"] = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                del self.__dict__["_is_running"]

    return Hidden


class QuantizedFunctions(TorchFunctionMode):
    """Has torch's functions of quantised tensors answered by their layout, before the dispatcher meets them.

    Raises Unsupported for a function that no layout answers for: dequantising there would be our choice, not ComfyUI's.
    A lenient one leaves such a function to the class, which dequantises.
    """

    def __init__(self, quantized: type, is_lenient: bool = False) -> None:
        super().__init__()
        self._quantized = quantized
        self._is_lenient = is_lenient

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(value, self._quantized) for value in (*args, *kwargs.values())):
            made = kitchen_ops.written_out(function, args, kwargs)
            return function(*args, **kwargs) if made is None else made
        if function in _metadata_functions():
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if self._is_lenient and function not in _OPERATORS:
            return function(*args, **kwargs)
        operator = _OPERATORS.get(function)
        if function is F.linear and (made := _opaque_linear(*args, **kwargs)) is not None:
            return made
        if operator is None:
            raise Unsupported(ReasonCode.WEIGHT_OPERATION, getattr(function, "__name__", str(function)))
        return self._quantized.__torch_dispatch__(operator, types, *_by_place(function, args, kwargs))


def _opaque_linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:  # noqa: A002
    """Return the layer's result as one operator, for a layout that needs it; None for any other."""
    function, arguments = OPAQUE_LINEARS.get(getattr(weight, "_layout_cls", None), (None, {}))
    if function is None or not can_find(function) or weight._params.transposed or isinstance(input, type(weight)):
        return None
    parameters = {DATA: weight._qdata} | _fields(weight)
    given = {"x": input, "bias": bias} | {name: parameters[of] for name, of in arguments.items()}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in given.items() if name not in tensors and value is not None}
    shape = *input.shape[:-1], weight.shape[0]
    return call_by_name(function, tensors, constants, shape, constants.get("out_dtype", input.dtype))


def _by_place(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return a function's arguments as torch's dispatcher would hand them on: layouts read the first ones by place."""
    if function in (torch.Tensor.view, torch.Tensor.reshape) and len(args) > 2:
        args = args[0], list(args[1:])
    left, placed = dict(kwargs), list(args)
    for name in _PARAMETERS.get(function, ())[len(args) :]:
        placed.append(left.pop(name, None))
    return tuple(placed), left


_PARAMETERS = {
    F.linear: ("input", "weight", "bias"),
    torch.mm: ("input", "mat2"),
    torch.addmm: ("input", "mat1", "mat2"),
}
_ATEN = torch.ops.aten
_OPERATORS: dict[Callable, Any] = {
    F.linear: _ATEN.linear.default,
    torch.mm: _ATEN.mm.default,
    torch.Tensor.mm: _ATEN.mm.default,
    torch.addmm: _ATEN.addmm.default,
    torch.t: _ATEN.t.default,
    torch.Tensor.t: _ATEN.t.default,
    torch.Tensor.to: _ATEN.to.dtype,
    torch.Tensor.detach: _ATEN.detach.default,
    torch.clone: _ATEN.clone.default,
    torch.Tensor.clone: _ATEN.clone.default,
    torch.Tensor.contiguous: _ATEN.contiguous.default,
    torch.Tensor.view: _ATEN.view.default,
    torch.Tensor.reshape: _ATEN.reshape.default,
}
"""torch's functions, and the operator by which a layout answers for each."""


@lru_cache(maxsize=1)
def _metadata_functions() -> set[Callable]:
    """Return the functions that read a tensor's shape, dtype or device, and no values."""
    methods = ("size", "dim", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
    attributes = ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta")
    own = {getattr(torch.Tensor, name) for name in methods}
    own |= {getattr(torch.Tensor, name).__get__ for name in attributes}
    return own | get_default_nowrap_functions()


def _fields(weight: Any) -> dict[str, Any]:
    parameters = weight._params
    return {field.name: getattr(parameters, field.name) for field in dataclasses.fields(parameters)}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | torch.Size) else value
