"""Finds the graphs that a model needs, and their dynamic dimensions, from two calls of different sizes.

A size that differs between the calls is a symbol; any other size is fixed. The calls run on fake tensors, so
this takes seconds and no memory for any model, before it is loaded or sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..common.host import Host
from ..common.reason import Unsupported
from ..common.tensors import empty_like
from ..common.torch_compat import FakeTensorMode, needs_values, pytree
from ..identity.call_signature import Call, CallSignature, SizePlaces, bind, read, size_places
from ..identity.regions import Region
from .answered_values import without_answers
from .frame_windows import WindowSizes, see
from .graph_request import GraphRequest
from .weightless_copy import weightless_copy


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call ahead, in latent units."""

    batch: int
    frames: int
    height: int
    width: int
    tokens: int

    @property
    def sound(self) -> int:
        """The length of the sound of a video."""
        return self.frames * 37


SMALL = Sizes(batch=2, frames=3, height=40, width=56, tokens=89)
LARGE = Sizes(batch=3, frames=5, height=56, width=72, tokens=283)
"""Within each call all sizes differ, also when height and width are halved down to an eighth. Between the two calls
every size differs, also when a model pads its tokens to a multiple of 32, 64 or 256."""

ModelCall = Callable[[nn.Module, Sizes], object]
"""Calls a weightless copy of the model, under fake tensors, with inputs of the given sizes. Its attribute `classes`, if
present, lists the classes whose code it runs besides the model's."""


@dataclass(frozen=True)
class _ObservedCall:
    """One call of a region during a call ahead."""

    call: Call
    signature: CallSignature
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @classmethod
    def of(cls, call: Call, sizes: SizePlaces = MappingProxyType({})) -> _ObservedCall | None:
        """Return a call, or None if it has no tensors. Raises Unsupported if no graph can take its arguments."""
        signature, tensors = read(call, fake=True, sizes=sizes)
        if not tensors:
            return None
        shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
        return cls(call, signature, shapes, dtypes, tensors[0].device)


def discover_requests(
    model: nn.Module, regions: Mapping[Region, str], device: torch.device, host: Host, call: ModelCall
) -> list[GraphRequest]:
    """Return one request for each distinct graph that the two calls need. `regions` maps to fingerprints.

    Raises whatever the model raises under fake tensors; the caller then waits for a real call.
    """
    fake, weights = FakeTensorMode(allow_non_fake_inputs=True), _FakeWeights(device)
    first, second = (_observe(model, regions, fake, weights, host, call, sizes) for sizes in (SMALL, LARGE))
    requests: dict[Hashable, GraphRequest] = {}
    for region, fingerprint in regions.items():
        for chunk in (one for one in second[region.path] if one.signature.is_chunk):
            for request in _chunk_requests(chunk, region, fingerprint):
                requests.setdefault((fingerprint, chunk.signature.text, _fixed_sizes(request)), request)
        for one, other in zip(first[region.path], second[region.path], strict=False):
            one, other = _with_sizes(one, other)
            if one.signature.is_chunk:
                continue
            if one.signature.text == other.signature.text:
                if request := _request(region, fingerprint, one, other):
                    requests.setdefault((fingerprint, one.signature.text, _fixed_sizes(request)), request)
    return list(requests.values())


def _chunk_requests(chunk: _ObservedCall, region: Region, fingerprint: str) -> list[GraphRequest]:
    """Return the request for chunks like this one, of any length, and if it is short the one for its own length."""
    any_length, its_length = (
        GraphRequest.of_chunk(chunk.signature, chunk.shapes, region, fingerprint, chunk.device, is_any)
        for is_any in (True, False)
    )
    return [any_length, its_length] if its_length.is_for_short_chunk else [any_length]


def _fixed_sizes(request: GraphRequest) -> tuple:
    """Return the sizes that are no symbols: calls that differ in these need graphs of their own."""
    return tuple(
        tuple(None if is_symbol else size for size, is_symbol in zip(shape, symbols, strict=True))
        for shape, symbols in zip(request.hints, request.symbolic, strict=True)
    )


class _FakeWeights:
    """The fake tensors that stand for a model's weights. Both calls share them: to make those of SDXL takes 0.4 s.

    A weight that reaches its layer in another dtype comes here as a tensor of each call's own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what stands for a weight, under fake tensors."""
        if id(weight) not in self._made:
            fake = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=self._device)
            self._made[id(weight)] = weight, fake  # a weight that is kept keeps its id
        return self._made[id(weight)][1]


def _observe(
    model: nn.Module,
    regions: Mapping[Region, str],
    fake: FakeTensorMode,
    weights: _FakeWeights,
    host: Host,
    call: ModelCall,
    sizes: Sizes,
) -> dict[str, list[_ObservedCall]]:
    seen: dict[str, list[_ObservedCall]] = {region.path: [] for region in regions}
    results: dict[Hashable, Any] = {}
    window_sizes: WindowSizes = {}
    unknown: list[Exception] = []
    with torch.no_grad(), fake, host.traced_functions(is_lenient=True), host.without_allocation_scopes():
        weightless = weightless_copy(model, host, weights)
        host.prepare_for_tracing(weightless)
        for region, fingerprint in regions.items():
            block = weightless.get_submodule(region.path)
            notes = seen[region.path], results, window_sizes, unknown
            block.forward = partial(_observed_forward, block, fingerprint, host, *notes)
        try:
            call(weightless, sizes)
        except Exception as error:
            if unknown:  # a guess may be what the network failed with
                raise unknown[0] from error
            raise
    return seen


def _observed_forward(
    block: nn.Module,
    fingerprint: str,
    host: Host,
    seen: list[_ObservedCall],
    results: dict[Hashable, Any],
    window_sizes: WindowSizes,
    unknown: list[Exception],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record a region's call, and run it unless an equal region had an equal call: only the sizes matter."""

    def run(tensors: Sequence[torch.Tensor] = ()) -> Any:
        try:
            with without_answers():
                return type(block).forward(block, *args, **kwargs)
        except Exception as error:
            if not (tensors and needs_values(error)):
                raise
            unknown.append(error)
            return empty_like(tensors[0])  # a guess: no graph can be traced of this block, but of those after it

    try:
        given = see(block, fingerprint, host, window_sizes, args, kwargs)
        call, window = bind(type(block), given.args, given.kwargs, host.context_arguments), given.window
        signature, tensors = read(call, fake=True)
        observed = _ObservedCall.of(call)
    except Unsupported:
        return run()
    if observed is None:
        return run()
    seen.append(observed)
    known = (fingerprint, signature.text, tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors))
    if known not in results:
        result = run(tensors)
        if not signature.has_unchanged_arguments(call.arguments, tensors):
            return result  # a block that writes to lists must run each time
        results[known] = result, window and window.now()
    result, left = pytree.tree_map_only(torch.Tensor, empty_like, results[known])
    if window:
        window.write(*left)
    return result


def _with_sizes(one: _ObservedCall, other: _ObservedCall) -> tuple[_ObservedCall, _ObservedCall]:
    """Return two calls with ints that differ between them as sizes; if anything else differs, these calls."""
    if one.signature.text == other.signature.text:
        return one, other
    places = size_places(one.call, other.call)
    if not places:
        return one, other
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _ObservedCall.of(one.call, places), _ObservedCall.of(other.call, places)


def _request(region: Region, fingerprint: str, one: _ObservedCall, other: _ObservedCall) -> GraphRequest | None:
    """Return the request for a graph that serves both calls, or None if their sizes cannot be told apart."""
    symbolic = tuple(
        tuple(a != b for a, b in zip(shape, changed, strict=True))
        for shape, changed in zip(one.shapes, other.shapes, strict=True)
    )
    hints = next((seen for seen in (one, other) if _hints_are_safe(seen, one, other)), None)
    if hints is None:
        return None
    return GraphRequest(
        region=region.label,
        module=region.module,
        fingerprint=fingerprint,
        signature=one.signature,
        device=one.device,
        dtypes=one.dtypes,
        hints=hints.shapes,
        symbolic=symbolic,
    )


def _hints_are_safe(hints: _ObservedCall, one: _ObservedCall, other: _ObservedCall) -> bool:
    """Whether, in the call chosen as the example, no two symbols share a size by chance and none is 0 or 1."""
    pairs = {
        (a, b)
        for shape, changed in zip(one.shapes, other.shapes, strict=True)
        for a, b in zip(shape, changed, strict=True)
        if a != b
    }
    chosen = [a if hints is one else b for a, b in pairs]
    return len(set(chosen)) == len(pairs) and min(chosen, default=2) > 1
