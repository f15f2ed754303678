"""Exports a region as a graph whose weights are inputs and whose sizes are symbolic.

The graph is a program of aten operators over (weights, inputs) that any backend can compile. The GraphSpec holds
what the trace says about valid calls, so that any other call is refused rather than computed wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..common.errors import one_line
from ..common.host import Host
from ..common.torch_compat import (
    ConstantArgument,
    FakeTensorMode,
    PythonPrinter,
    ShapeEnv,
    TensorArgument,
    guard_expressions,
    pytree,
    size_expression,
    version,
)
from ..identity.call_signature import Structure, Unsupported, call_forward, parse
from ..identity.context_options import TracedOptions, encode_writes
from ..identity.fingerprint import strings_of, tensor_attributes
from ..identity.graph_spec import MEMORY_FORMATS, GraphIdentity, GraphSpec, InputSpec, WeightSpec
from ..identity.memory_format import has_layouts, input_format, laid_out, stride_in
from ..identity.regions import Region
from .decompositions import ForGPUs
from .weightless_copy import skeleton, tensor_slots

log = logging.getLogger(__name__)

MAX_ELEMENTS = 2**31 - 1
"""Limit of elements of one tensor in a compiled GPU graph: its kernels index with 32 bits."""
MAX_HINT = 2**20
"""Upper bound for example sizes that come from a file."""
MAX_STRUCTURE = 2**18
"""Limit of characters in a call's structure that comes from a file."""


@dataclass(frozen=True)
class Variant:
    """A request for one graph: a region, a call structure, and which sizes are symbols."""

    region: str
    """The name that people are shown."""
    module: nn.Module
    """Any region of this kind. Only its code, settings and shapes matter, not its values."""
    fingerprint: str
    structure: Structure
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    hints: tuple[tuple[int, ...], ...]
    """Example shapes. Sizes of different symbols differ, and none is 0 or 1: tracing takes equal
    sizes for one symbol, and 0 and 1 for constants."""
    symbolic: tuple[tuple[bool, ...], ...]
    """For each size of each input, whether it is a symbol (a dynamic dimension)."""

    @property
    def sizes(self) -> list[list[int | str]]:
        """Each input's sizes as a key holds them: a number, or "s" and a symbol's hint. Tracing can depend on hints."""
        return [
            [f"s{size}" if is_symbol else size for size, is_symbol in zip(shape, symbols, strict=True)]
            for shape, symbols in zip(self.hints, self.symbolic, strict=True)
        ]

    def without_module(self) -> Variant:
        """Return a copy that keeps no model alive."""
        return replace(self, module=nn.Module())

    def with_structure(self, structure: Structure) -> Variant | None:
        """Return the request for a call whose other arguments differ, or None if its tensors differ as well."""
        return replace(self, structure=structure) if structure.has_tensors_of(self.structure) else None

    @classmethod
    def like(cls, identity: GraphIdentity, region: Region, device: torch.device) -> Variant:
        """Return the request for the graph that a file describes. The description need not be trusted.

        Raises ValueError if the description is inconsistent.
        """
        inputs = [(i.hints, i.symbolic) for i in identity.spec.inputs]
        return cls._described(region.label, region.module, identity.fingerprint, identity.structure, inputs, device)

    def note(self) -> dict[str, Any]:
        """Return the request without its module and device, as values that JSON can hold."""
        fields = {"region": self.region, "fingerprint": self.fingerprint, "structure": self.structure.text}
        return fields | {"inputs": list(zip(self.hints, self.symbolic, strict=True))}

    @classmethod
    def noted(cls, note: Mapping[str, Any], device: torch.device) -> Variant:
        """Return the request that a note describes, without a module. The note need not be trusted.

        Raises ValueError, KeyError or TypeError if the note is inconsistent.
        """
        inputs = [(tuple(hints), tuple(symbolic)) for hints, symbolic in note["inputs"]]
        texts = [note[name] for name in ("region", "fingerprint", "structure")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the names are not strings")
        return cls._described(texts[0], nn.Module(), *texts[1:], inputs, device)

    @classmethod
    def _described(
        cls,
        region: str,
        module: nn.Module,
        fingerprint: str,
        structure_text: str,
        inputs: Sequence[tuple[tuple[int, ...], tuple[bool, ...]]],
        device: torch.device,
    ) -> Variant:
        if len(structure_text) > MAX_STRUCTURE:
            raise ValueError("the call has more arguments than any block takes")
        structure, tensors = parse(structure_text)
        if [(len(hints), len(symbolic)) for hints, symbolic in inputs] != [(ndim, ndim) for ndim, _ in tensors]:
            raise ValueError("the inputs do not fit the structure of the call")
        sizes = [pair for hints, symbolic in inputs for pair in zip(hints, symbolic, strict=True)]
        if not all(type(size) is int and type(is_symbol) is bool for size, is_symbol in sizes):
            raise ValueError("the example sizes are not numbers")
        if not all(is_symbol < size < MAX_HINT for size, is_symbol in sizes):  # a symbol is at least 2
            raise ValueError("no tensor has these example sizes")
        return cls(
            region=region,
            module=module,
            fingerprint=fingerprint,
            structure=structure,
            device=device,
            dtypes=tuple(dtype for _, dtype in tensors),
            hints=tuple(hints for hints, _ in inputs),
            symbolic=tuple(symbolic for _, symbolic in inputs),
        )


@dataclass(frozen=True)
class ExportedRegion:
    """The input of a backend: the exported program, and what it may be called with."""

    program: torch.export.ExportedProgram
    spec: GraphSpec


Functions = Callable[[bool], AbstractContextManager[Any]]
"""Returns a context to run a region's code in. The argument says whether the region is called with feature maps."""


class _PureRegion(nn.Module):
    """The region as f(weights, inputs). It is not registered as a submodule, so that no tensor becomes a constant."""

    def __init__(
        self,
        region: nn.Module,
        structure: Structure,
        context: Callable[[], dict[str, Any]],
        has_maps: bool,
        functions: Functions,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "hidden", (region, structure, context, has_maps, functions))

    def forward(self, weights: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        region, structure, make_context, has_maps, functions = self.hidden
        context = make_context()
        for (_, (group, name)), weight in zip(list(tensor_slots(region)), weights, strict=True):
            group[name] = laid_out(weight)
        arguments = structure.fill(inputs)
        with functions(has_maps):
            result = call_forward(region, arguments, context)
        if not structure.is_intact(arguments, inputs):  # a graph would write to its own lists
            raise Unsupported("a region that writes to a list or dictionary it is given")
        # Some blocks make their map contiguous at the end, which the next block would have to undo.
        return pytree.tree_map_only(torch.Tensor, laid_out, result) if has_maps else result


def export_region(variant: Variant, host: Host) -> ExportedRegion:
    """Trace a region into a graph of its weights and inputs.

    Works on fake tensors: it allocates nothing and does not use the device. Raises Unsupported, with a
    reason for people, if the region cannot be a pure function. Other errors come from tracing itself.
    """
    try:
        return _exported(variant, host, ForGPUs)
    except Unsupported:
        raise
    except Exception as error:  # for instance code that takes a view that only the layout of torch's own result allows
        log.info("%s is traced with torch's own functions: %s", variant.region, one_line(error))
        return _exported(variant, host, lambda has_maps: nullcontext())


def _exported(variant: Variant, host: Host, functions: Functions) -> ExportedRegion:
    if constants := tensor_attributes(variant.module, host):
        raise Unsupported(f"a tensor outside parameters and buffers ({constants[0]})")
    strings = strings_of(variant.module, host)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        is_arranged = host.arranges(variant.module) and variant.device.type in host.arranged_on
        weightless = skeleton(variant.module, host, lambda t: _empty_like(t, variant.device, is_arranged))
        host.adapt(weightless)
        named = list(tensor_slots(weightless))
        weights = [group[name] for _, (group, name) in named]
        formats = [input_format(variant.module, shape, variant.device) for shape in variant.hints]
        inputs = [
            torch.empty(shape, dtype=dtype, device=variant.device, memory_format=MEMORY_FORMATS[fmt])
            for shape, dtype, fmt in zip(variant.hints, variant.dtypes, formats, strict=True)
        ]

    traced: list[TracedOptions] = []  # one for each run of the code; the last run is the exported one

    def context() -> dict[str, Any]:
        made = {name: host.stand_in(name, strings, variant.structure.hooks) for name in variant.structure.context}
        traced.extend(value for value in made.values() if isinstance(value, TracedOptions))
        return made

    pure = _PureRegion(weightless, variant.structure, context, "channels_last" in formats, functions)
    auto = torch.export.Dim.AUTO
    symbols = [{i: auto for i, is_symbol in enumerate(row) if is_symbol} or None for row in variant.symbolic]
    with torch.no_grad():
        mutated = _mutated_inputs(mode, pure, weights, inputs)
        program = torch.export.export(
            pure, (weights, inputs), dynamic_shapes=([None] * len(weights), symbols), strict=False
        )
    if _draws_random_numbers(program):
        raise Unsupported("a region that draws random numbers")
    weight_specs = tuple(
        WeightSpec(name, tuple(t.shape), tuple(t.stride()), str(t.dtype))
        for (name, _), t in zip(named, weights, strict=True)
    )
    spec = _spec(variant, program, weight_specs, formats, mutated)
    if traced:
        reads = tuple(sorted(set().union(*(options.reads for options in traced))))
        spec = replace(spec, reads=reads, writes=encode_writes(traced[-1].writes(), _size))
    return ExportedRegion(program, spec)


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
    stride = stride_in(tensor, torch.channels_last) if is_arranged and has_layouts(tensor) else tensor.stride()
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
        raise Unsupported("a region that writes to its own weights")
    return tuple(i for i, moved in enumerate(changed[len(weights) :]) if moved)


def _spec(
    variant: Variant,
    program: torch.export.ExportedProgram,
    weights: tuple[WeightSpec, ...],
    formats: list[str],
    mutated: tuple[int, ...],
) -> GraphSpec:
    placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = placeholders[len(weights) :]
    return GraphSpec(
        region=type(variant.module).__name__,
        device=str(variant.device),
        weights=weights,
        inputs=tuple(
            InputSpec(tuple(_size(s) for s in t.shape), str(t.dtype), fmt, hints, symbolic)
            for t, fmt, hints, symbolic in zip(inputs, formats, variant.hints, variant.symbolic, strict=True)
        ),
        guards=(*_guards(inputs), *(_index_limits(program) if variant.device.type != "cpu" else ())),
        mutated=mutated,
        outputs=tuple(_is_tensor(spec.arg) for spec in program.graph_signature.output_specs),
        tree=pytree.treespec_dumps(program.call_spec.out_spec),
    )


def _size(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else PythonPrinter().doprint(size_expression(size))


def _guards(inputs: list[torch.Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(PythonPrinter().doprint(e) for e in guard_expressions(inputs) if e != True))  # noqa: E712  sympy


def _index_limits(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Return guards against tensors with more values than 32 bits can count, since compiled GPU kernels index so.

    A decoder's widest map has 256 times as many values as the image has pixels: a batch of eight at 1024x1024 has
    too many. Inductor makes such guards while it compiles. They are not part of its artifact, and were missing where
    it had compiled the same graph before.
    """
    most: dict[Any, int] = {}
    for value in pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes]):
        if isinstance(value, torch.Tensor) and isinstance(numel := value.numel(), torch.SymInt):
            factor, symbols = size_expression(numel).as_coeff_Mul()
            most[symbols] = max(most.get(symbols, 0), factor)
    return tuple(f"{PythonPrinter().doprint(factor * symbols)} <= {MAX_ELEMENTS}" for symbols, factor in most.items())


def _is_tensor(argument: Any) -> bool:
    if isinstance(argument, TensorArgument):
        return True
    if isinstance(argument, ConstantArgument) and argument.value is None:
        return False
    raise Unsupported("a region that returns something besides tensors and None")
