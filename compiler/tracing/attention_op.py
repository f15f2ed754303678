"""Attention as an opaque operator: a graph calls the host's attention function instead of tracing it.

Hosts choose an attention kernel for the machine and the user (cuDNN, SageAttention, xFormers, chunked
for little memory). A trace through the function would lose that choice, and a chunk size computed from today's
free memory would become a limit on every later call. A person's own function for one model, an override, is called
in place of the host's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from ..common.reason import ReasonCode, Unsupported
from ..identity.context_options import TracedOptions
from ..identity.memory_format import CHANNELS_LAST
from .by_name import decode, encode, function_now, is_called_by
from .once import once
from .patch_ops import acts, added_options, call_patch, decoded

_MAP_SCHEMA = "(str function, Tensor q, Tensor k, Tensor v) -> Tensor"
_SCHEMA = (
    "(str function, Tensor q, Tensor k, Tensor v, int heads, Tensor? mask, ScalarType? precision, "
    "bool skip_reshape, bool skip_output_reshape, str options, bool are_own, str added, SymInt[] sizes) -> Tensor"
)
OVERRIDE = "optimized_attention_override"
"""Hook of a function that takes the place of the host's attention in one model. Graphs need not foresee it."""

_PLAIN = (bool, int, float, str, torch.dtype)
"""Types of options that an operator takes as text."""

_GIVEN_SCHEMA = "(str function, Tensor q, Tensor k, Tensor v, int heads, Tensor? mask, str options) -> Tensor"


@once
def register_operator() -> None:
    """Define `torch.ops.compiled_graphs.host_attention`, unless another copy of this package did.

    Call this before a graph that uses it is traced, loaded or called.
    """
    if hasattr(torch.ops.compiled_graphs, "host_attention"):
        return
    torch.library.define("compiled_graphs::host_attention", _SCHEMA)
    torch.library.impl("compiled_graphs::host_attention", "CompositeExplicitAutograd", _run)
    torch.library.register_fake("compiled_graphs::host_attention", _shape)
    torch.library.define("compiled_graphs::map_attention", _MAP_SCHEMA)
    torch.library.impl("compiled_graphs::map_attention", "CompositeExplicitAutograd", _run_map)
    torch.library.register_fake("compiled_graphs::map_attention", lambda function, q, k, v: torch.empty_like(q))


@once
def register_given_operator() -> None:
    """Define `torch.ops.compiled_graphs.given_attention`, which an older copy of this package may lack."""
    if hasattr(torch.ops.compiled_graphs, "given_attention"):
        return
    torch.library.define("compiled_graphs::given_attention", _GIVEN_SCHEMA)
    torch.library.impl("compiled_graphs::given_attention", "CompositeExplicitAutograd", _run_given)
    torch.library.register_fake("compiled_graphs::given_attention", _shape_given)


def opaque_attention(
    function: Callable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *,
    known: Container[str] = (),
    pass_by: Callable[[], None] = lambda: None,
    **options: Any,
) -> torch.Tensor:
    """Take the place of an attention function with ComfyUI's calling convention while a region is traced.

    q, k, v: [batch, tokens, heads * dim] or [batch, tokens, heads, dim]; [batch, heads, tokens, dim] with
    skip_reshape. Returns [batch, tokens, heads * dim], or [batch, heads, tokens, dim] with
    skip_output_reshape (`comfy.ldm.modules.attention`, hook `optimized_attention_override`). A function that
    cannot be found again by its name, or a call with options that are no plain values, is traced through.

    `known` are the transformer options that each call brings itself: an override gets those and what the block adds,
    to the call's own dictionary or to a copy. `pass_by` is called if the graph cannot call an override here.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    ours = ("_inside_attn_wrapper", "transformer_options")
    others = {key: value for key, value in options.items() if key not in ours and value is not None}
    is_plain = all(type(value) in _PLAIN for value in others.values())
    if not is_called_by(name, function) or not is_plain or (others.get("enable_gqa") and not skip_reshape):
        pass_by()
        return function(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options)
    given = options.get("transformer_options") or {}
    are_own = isinstance(given, TracedOptions) and not given.is_copy
    try:
        added, sizes = added_options(given, known)
    except Unsupported:
        pass_by()
        added, sizes = encode({}), []
    register_operator()
    if skip_reshape and not skip_output_reshape and q.device.type == "cuda":
        q, k, v = map(by_tokens, (q, k, v))
    return torch.ops.compiled_graphs.host_attention(
        name, q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape,
        encode(others), are_own, added, sizes,
    )  # fmt: skip


def given_attention(name: str) -> Callable:
    """Return what takes the place of an attention function that a block is given, `module:name`, in a trace.

    It is called as `opaque_attention` says, and with any plain options. Whatever stands under the name when the graph
    runs is called: a call whose function is not that one has no graph.
    """
    register_given_operator()

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        given = {key: value for key, value in options.items() if value is not None}
        if not all(type(value) in _PLAIN for value in given.values()):
            raise Unsupported(ReasonCode.ARGUMENT_TYPE, f"function ({name.replace(':', '.')}, with other options)")
        if given.get("skip_reshape") and not given.get("skip_output_reshape") and q.device.type == "cuda":
            q, k, v = map(by_tokens, (q, k, v))
        return torch.ops.compiled_graphs.given_attention(name, q, k, v, heads, mask, encode(given))

    return call


def by_tokens(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, tokens, dim] laid out as [batch, tokens, heads, dim], if it is contiguous.

    GPU kernels write their output in the memory order of the queries, and the result is [batch, tokens, heads * dim].
    So this layout saves a copy of the output. It costs nothing, since a compiled kernel writes the queries anyway.
    """
    if not tensor.is_contiguous():
        return tensor
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _by_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Undo `by_tokens`."""
    return tensor.contiguous() if tensor.transpose(1, 2).is_contiguous() else tensor


def opaque_map_attention(function: Callable) -> Callable:
    """Return the operator call that replaces a VAE's attention function over feature maps while a region is traced.

    q, k, v and the result: [batch, channels, height, width] (`comfy.ldm.modules.diffusionmodules.model`,
    `AttnBlock.optimized_attention`). Returns `function` itself if it cannot be found again by its name.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    if not is_called_by(name, function):
        return function
    register_operator()
    return lambda q, k, v: torch.ops.compiled_graphs.map_attention(name, q, k, v)


def _run(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None,
    precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    options: str,
    are_own: bool,
    added: str,
    sizes: Sequence[int] | None,
) -> torch.Tensor:
    given = {"attn_precision": precision, "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    given |= decode(options)
    if not acts(OVERRIDE):
        return function_now(function)(q, k, v, heads, mask=mask, **given).to(q.dtype).contiguous()
    if skip_reshape and not skip_output_reshape:  # an override gets them laid out as the block has them
        q, k, v = map(_by_heads, (q, k, v))
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    shape = _output_shape(q, v, heads, skip_reshape, skip_output_reshape)
    given |= {"function": function, "heads": heads, "are_own": are_own}
    return call_patch(OVERRIDE, decoded(added, sizes), tensors, shape, **given)


def _run_given(function, q, k, v, heads, mask, options):  # noqa: ANN001, ANN202
    output = function_now(function)(q, k, v, heads, mask=mask, **decode(options))
    return output.to(q.dtype).contiguous()


def _shape_given(function, q, k, v, heads, mask, options):  # noqa: ANN001, ANN202
    given = decode(options)
    is_split, stays_split = given.get("skip_reshape", False), given.get("skip_output_reshape", False)
    return q.new_empty(_output_shape(q, v, heads, is_split, stays_split))


def _run_map(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output = function_now(function)(*(_dense(t) for t in (q, k, v))).to(q.dtype)
    return output if output.stride() == q.stride() else torch.empty_like(q).copy_(output)


def _dense(feature_map: torch.Tensor) -> torch.Tensor:
    """Return a map in one of the two layouts that allow a view as [batch, channels, pixels], which hosts take."""
    is_channels_last = feature_map.is_contiguous(memory_format=CHANNELS_LAST[feature_map.ndim])
    return feature_map if is_channels_last else feature_map.contiguous()


def _shape(function, q, k, v, heads, mask, precision, skip_reshape, skip_output_reshape, *options):  # noqa: ANN001, ANN202
    return q.new_empty(_output_shape(q, v, heads, skip_reshape, skip_output_reshape))


def _output_shape(
    q: torch.Tensor, v: torch.Tensor, heads: int, skip_reshape: bool, skip_output_reshape: bool
) -> tuple[int, ...]:
    batch, tokens = q.shape[0], q.shape[2 if skip_reshape else 1]
    dim = v.shape[-1] if skip_reshape else math.prod(v.shape[2:]) // heads
    return (batch, heads, tokens, dim) if skip_output_reshape else (batch, tokens, heads * dim)
