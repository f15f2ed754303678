"""Exports a region as a graph whose weights are inputs and whose sizes are symbolic.

The graph is a program of aten operators over (weights, inputs) that any backend can compile. The GraphSpec holds
what the trace says about valid calls, so that any other call is refused rather than computed wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..common.errors import one_line
from ..common.host import Host
from ..common.inner_tensors import plain_names, plain_tensors
from ..common.reason import ReasonCode, Unsupported
from ..common.tensor_slots import Slot, tensor_slots
from ..common.torch_compat import (
    ConstantArgument,
    FakeTensorMode,
    PythonPrinter,
    ShapeEnv,
    TensorArgument,
    guard_expressions,
    met_real_tensor,
    pytree,
    size_expression,
    undecided_strides,
    version,
)
from ..identity.call_signature import CallSignature, call_forward
from ..identity.context_options import TracedOptions, encode_writes
from ..identity.fingerprint import string_constants_of, tensor_attributes
from ..identity.frame_cells import Cells
from ..identity.graph_spec import MEMORY_FORMATS, GraphSpec, InputSpec, WeightSpec, element_limit
from ..identity.low_rank import RANK, is_factor
from ..identity.memory_format import has_layouts, input_format, laid_out, stride_in, unrepeated_stride
from .decompositions import ForGPUs, LiteralTensors
from .frame_windows import frame_writes, traced_window
from .graph_request import GraphRequest
from .low_rank import trace_branches
from .weightless_copy import weightless_copy

log = logging.getLogger(__name__)

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
"""The namespaces of torch.distributed's operators."""


@dataclass(frozen=True)
class ExportedRegion:
    """The input of a backend: the exported program, and what it may be called with."""

    program: torch.export.ExportedProgram
    spec: GraphSpec
    describe: Callable[[], GraphSpec] | None = None
    """Writes the contract again."""

    def spec_now(self) -> GraphSpec:
        """Return the contract after a compile: a compiler may have made numbers of symbols, or one symbol of two."""
        return self.spec if self.describe is None else self.describe()


Functions = Callable[[bool], AbstractContextManager[Any]]
"""Returns a context to run a region's code in. The argument says whether the region is called with feature maps."""


class _Weights:
    """The weights of a weightless copy, and how new ones are put into it."""

    def __init__(self, weightless: nn.Module, host: Host) -> None:
        named = [(name, group[own], (group, own)) for name, (group, own) in tensor_slots(weightless)]
        self.names = plain_names(((name, weight) for name, weight, _ in named), host.inner_tensors)
        self.tensors = plain_tensors((weight for _, weight, _ in named), host.inner_tensors)
        self._host = host
        self._slots: list[tuple[Slot, torch.Tensor]] = [(slot, weight) for _, weight, slot in named]

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put tensors into the copy, in the order of `tensors`."""
        supply = iter(tensors)
        for (group, name), before in self._slots:
            inner = self._host.inner_tensors(before)
            if inner is None:
                group[name] = laid_out(next(supply))
            else:
                group[name] = self._host.with_inner_tensors(before, [next(supply) for _ in inner.tensors])


class _Contexts:
    """Makes the arguments that a host fills in for each run of a region's code, and remembers what the code read."""

    def __init__(self, request: GraphRequest, host: Host) -> None:
        self._signature, self._host = request.signature, host
        self._strings = string_constants_of(request.module, host)
        self._options: list[TracedOptions] = []
        """By run. The last run is the exported one."""

    def make(self) -> dict[str, Any]:
        """Return the arguments of another run."""
        made = {
            name: self._host.placeholder_for(name, self._strings, self._signature.patch_points)
            for name in self._signature.context
        }
        self._options.extend(value for value in made.values() if isinstance(value, TracedOptions))
        return made

    def described(self, spec: GraphSpec) -> GraphSpec:
        """Return a contract that says which options the code asked for in vain, and which it left behind."""
        if not self._options:
            return spec
        reads = tuple(sorted(set().union(*(options.reads for options in self._options))))
        return replace(spec, reads=reads, writes=encode_writes(self._options[-1].writes(), _size))


@dataclass(frozen=True)
class _Traced:
    """A region's code, and what it runs with."""

    region: nn.Module
    """A copy without weights."""
    weights: _Weights
    signature: CallSignature
    contexts: _Contexts
    host: Host
    functions: Functions
    has_maps: bool

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Return a context in which the code calls operators that a graph can have."""
        with self.functions(self.has_maps), LiteralTensors(), self.host.traced_functions():
            yield


class _PureRegion(nn.Module):
    """The region as f(weights, inputs). It is not registered as a submodule, so that no tensor becomes a constant."""

    def __init__(self, traced: _Traced) -> None:
        super().__init__()
        object.__setattr__(self, "traced", traced)
        object.__setattr__(self, "frames", "")  # what the latest run has left in its frame cache

    def forward(self, weights: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        traced = self.traced
        context = traced.contexts.make()
        traced.weights.put(weights)
        arguments = traced.signature.fill(inputs)
        window = traced_window(traced.region, traced.host, arguments)
        with traced.surroundings():
            given = arguments | window.arguments if window else arguments
            result = call_forward(traced.region, given, context, traced.host.operator_for)
        if not traced.signature.has_unchanged_arguments(arguments, inputs):  # a graph would write to its own lists
            raise Unsupported(ReasonCode.WRITES_ARGUMENT)
        if window:
            writes, kept = frame_writes(window, result)
            object.__setattr__(self, "frames", writes.to_text())
        # Some blocks make their map contiguous at the end, which the next block would have to undo.
        result = pytree.tree_map_only(torch.Tensor, laid_out, result) if traced.has_maps else result
        return (result, kept) if window else result


def export_region(request: GraphRequest, host: Host) -> ExportedRegion:
    """Trace a region into a graph of its weights and inputs.

    Works on fake tensors: it allocates nothing and does not use the device. Raises Unsupported, with a
    reason for people, if the region cannot be a pure function. Other errors come from tracing itself.
    """
    exported = _exported_with_fallback(request, host)
    if not exported.spec.fits(request.hints):
        is_too_large = exported.spec.is_exceeded_by(request.hints)
        raise Unsupported(ReasonCode.TOO_LARGE if is_too_large else ReasonCode.SIZES_OUTSIDE)
    return exported


def _exported_with_fallback(request: GraphRequest, host: Host) -> ExportedRegion:
    try:
        return _exported(request, host, ForGPUs)
    except Unsupported:
        raise
    except Exception as error:  # for instance code that takes a view that only the layout of torch's own result allows
        if met_real_tensor(error):
            raise Unsupported(ReasonCode.STRAY_TENSOR, "a table that its code reads") from error
        log.info("%s is traced with torch's own functions: %s", request.region, one_line(error))
        return _exported(request, host, lambda has_maps: nullcontext())


def _exported(request: GraphRequest, host: Host, functions: Functions) -> ExportedRegion:
    if constants := tensor_attributes(request.module, host):
        raise Unsupported(ReasonCode.STRAY_TENSOR, constants[0])
    formats = [input_format(request.module, shape, request.device) for shape in request.hints]
    has_maps = any(fmt != "contiguous" for fmt in formats)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        region = _weightless_region(request, host)
        weights, inputs = _Weights(region, host), _example_inputs(request, formats)
    contexts = _Contexts(request, host)
    pure = _PureRegion(_Traced(region, weights, request.signature, contexts, host, functions, has_maps))
    cells = len(Cells.of(region, host))
    # Torch would guard the strides of the example. Chunks of two and of three frames would then need their own graphs.
    strides = undecided_strides() if request.signature.is_chunk else nullcontext()
    with torch.no_grad(), strides:
        mutated = _mutated_inputs(mode, pure, weights.tensors, inputs)
        sizes = _dynamic_shapes(request, weights.names)
        program = torch.export.export(pure, (weights.tensors, inputs), dynamic_shapes=sizes, strict=False)
    if len(Cells.of(region, host)) != cells:  # the code makes them when it first runs
        raise Unsupported(ReasonCode.WRITES_ARGUMENT)
    _refuse_side_effects(program)
    guards = len(guard_expressions(_values_of_inputs(program, weights.names)))

    def describe() -> GraphSpec:
        spec = _spec(request, program, weights.names, formats, mutated, guards)
        return contexts.described(replace(spec, frames=pure.frames))

    return ExportedRegion(program, describe(), describe)


def _weightless_region(request: GraphRequest, host: Host) -> nn.Module:
    """Return a copy of the region with fake weights, on the request's device and in the layout of its graph."""
    is_arranged = host.uses_channels_last(request.module) and request.device.type in host.channels_last_on
    region = weightless_copy(request.module, host, lambda tensor: _empty_like(tensor, request.device, is_arranged))
    host.prepare_for_tracing(region)
    trace_branches(region, set(chain.from_iterable(request.hints)))
    return region


def _example_inputs(request: GraphRequest, formats: Sequence[str]) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=dtype, device=request.device, memory_format=MEMORY_FORMATS[fmt])
        for shape, dtype, fmt in zip(request.hints, request.dtypes, formats, strict=True)
    ]


def _dynamic_shapes(request: GraphRequest, weight_names: Sequence[str]) -> tuple[list, list]:
    """Return which sizes of weights and of inputs are symbols, as `torch.export.export` wants it."""
    auto = torch.export.Dim.AUTO
    rank = torch.export.Dim(RANK, min=2)  # one for all factors, so that equal blocks within a region have equal graphs
    ranks = [{0: rank} if is_factor(name) else None for name in weight_names]
    symbols = [{i: auto for i, is_symbol in enumerate(row) if is_symbol} or None for row in request.symbolic]
    return ranks, symbols


def _refuse_side_effects(program: torch.export.ExportedProgram) -> None:
    """Raise Unsupported for a graph that does more than give a result of its inputs."""
    if _draws_random_numbers(program):
        raise Unsupported(ReasonCode.RANDOM)
    if collective := _collective(program):
        raise Unsupported(ReasonCode.COMMUNICATES, collective)


def _collective(program: torch.export.ExportedProgram) -> str:
    """Return the first operator that exchanges data with other processes: a graph would hold their number."""
    names = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return next((name for name in names if name.partition(".")[0] in _COLLECTIVES), "")


def _draws_random_numbers(program: torch.export.ExportedProgram) -> bool:
    """Whether a graph draws random numbers, which would differ from those of eager code.

    Attention and dropout do not count: they could draw, but do not at inference.
    """
    drawing = (
        node.target.__name__
        for node in program.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    )
    return any("attention" not in name and "dropout" not in name for name in drawing)


def _empty_like(tensor: torch.Tensor, device: torch.device, is_arranged: bool) -> torch.Tensor:
    is_filter = is_arranged and has_layouts(tensor)
    stride = stride_in(tensor, torch.channels_last) if is_filter else unrepeated_stride(tensor)
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)


def _mutated_inputs(
    mode: FakeTensorMode, pure: nn.Module, weights: list[torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[int, ...]:
    """Run once on fake tensors, and return the inputs whose version counters have changed."""
    with mode:
        weights = [w.clone() for w in weights]
        inputs = [t.clone() for t in inputs]
        before = [version(t) for t in [*weights, *inputs]]
        pure(weights, inputs)
        changed = [version(t) != was for t, was in zip([*weights, *inputs], before, strict=True)]
    if any(changed[: len(weights)]):
        raise Unsupported(ReasonCode.WRITES_WEIGHTS)
    return tuple(i for i, moved in enumerate(changed[len(weights) :]) if moved)


def _spec(
    request: GraphRequest,
    program: torch.export.ExportedProgram,
    names: list[str],
    formats: list[str],
    mutated: tuple[int, ...],
    guards: int,
) -> GraphSpec:
    """Return the contract. Of what is assumed of sizes, the first `guards` are from the trace."""
    if lifted := program.graph_signature.inputs_to_lifted_tensor_constants:
        # A tensor that an earlier run left in the block, as video VAEs keep frames.
        raise Unsupported(ReasonCode.STRAY_TENSOR, ", ".join(sorted(lifted.values())))
    weights = _placeholders(program)[: len(names)]
    inputs = _values_of_inputs(program, names)
    ranks = {size_expression(size) for t in weights for size in t.shape if isinstance(size, torch.SymInt)}
    return GraphSpec(
        region=type(request.module).__name__,
        device=str(request.device),
        weights=tuple(
            WeightSpec(name, tuple(_size(s) for s in t.shape), tuple(t.stride()), str(t.dtype))
            for name, t in zip(names, weights, strict=True)
        ),
        inputs=tuple(
            InputSpec(tuple(_size(s) for s in t.shape), str(t.dtype), fmt, hints, symbolic)
            for t, fmt, hints, symbolic in zip(inputs, formats, request.hints, request.symbolic, strict=True)
        ),
        guards=(
            *_guards(inputs, guards),
            *_chunk_limits(request, inputs),
            *(_index_limits(program, ranks) if request.device.type != "cpu" else ()),
        ),
        mutated=mutated,
        outputs=tuple(_is_tensor(spec.arg) for spec in program.graph_signature.output_specs),
        tree=pytree.treespec_dumps(program.call_spec.out_spec),
    )


def _size(size: int | torch.SymInt) -> int | str:
    expression = size if isinstance(size, int) else size_expression(size)
    # A symbol that has become a number is still a SymInt.
    return int(expression) if isinstance(size, int) or expression.is_number else PythonPrinter().doprint(expression)


def _placeholders(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    return [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]


def _values_of_inputs(program: torch.export.ExportedProgram, names: Sequence[str]) -> list[torch.Tensor]:
    return _placeholders(program)[len(names) :]


def _guards(inputs: list[torch.Tensor], count: int) -> tuple[str, ...]:
    expressions = guard_expressions(inputs)[:count]
    return tuple(dict.fromkeys(PythonPrinter().doprint(e) for e in expressions if e != True))  # noqa: E712  sympy


def _chunk_limits(request: GraphRequest, inputs: list[torch.Tensor]) -> tuple[str, ...]:
    """Return guards against chunks of one frame. Tracing takes every symbol for 2 or more, and so drops the question
    whether a chunk has the frames that the next one needs.
    """
    if not request.signature.is_chunk:
        return ()
    frames = dict.fromkeys(str(_size(tensor.shape[2])) for tensor in inputs if tensor.ndim == 5)
    return tuple(f"{size} >= 2" for size in frames if not size.isdigit())


def _index_limits(program: torch.export.ExportedProgram, ranks: Set[Any] = frozenset()) -> tuple[str, ...]:
    """Return guards against tensors with more values than 32 bits can count, since compiled GPU kernels index so.

    A decoder's widest map has 256 times as many values as the image has pixels: a batch of eight at 1024x1024 has
    too many. Inductor makes such guards while it compiles. They are not part of its artifact, and were missing where
    it had compiled the same graph before. The `ranks` of low-rank branches need none: the host keeps each below the
    widths of its layer, whose own result then has more values than the product in between.
    """
    most: dict[Any, int] = {}
    for value in pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes]):
        if isinstance(value, torch.Tensor) and isinstance(numel := value.numel(), torch.SymInt):
            factor, symbols = size_expression(numel).as_coeff_Mul()
            if ranks.isdisjoint(symbols.free_symbols):
                most[symbols] = max(most.get(symbols, 0), factor)
    return tuple(element_limit(PythonPrinter().doprint(factor * symbols)) for symbols, factor in most.items())


def _is_tensor(argument: Any) -> bool:
    if isinstance(argument, TensorArgument):
        return True
    if isinstance(argument, ConstantArgument) and argument.value is None:
        return False
    raise Unsupported(ReasonCode.RESULT_TYPE)
