"""The call path at run time: a region's call goes to its graph, or runs eagerly for a counted reason.

What is looked at on every call is what can change between calls without anybody telling us: the
arguments, the host's patches, and where the weights are. What that leads to is remembered per structure.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from .counters import Counters
from .errors import one_line
from .fingerprint import Description
from .graph import MEMORY_FORMATS
from .guards import Changed, ModuleGuard, WeightGuard
from .host import Host
from .patches import PatchFailed, WrongOutput, calling
from .randomness import same_random_numbers
from .registry import MAX_STRUCTURES, GraphEntry
from .signature import TENSOR_TYPES, Structure, Unsupported, bind, describe, forward_signature, read
from .skeleton import tensor_slots
from .timing import compare
from .torch_compat import pytree
from .verify import disagreement

log = logging.getLogger(__name__)

MAX_PLANS = 1024
"""Remembered argument shapes per kind of region; past it they are worked out again."""


class Owner(Protocol):
    """What a region asks of the model that it belongs to."""

    def learn(self, kind: RegionKind, structure: Structure) -> str | None:
        """Provide a graph for calls of a structure that none serves, or say why not."""
        ...

    def describe(self, path: str) -> RegionKind:
        """Return the kind of a region that has changed."""
        ...

    def is_unchanged(self) -> bool:
        """Whether the model's regions are still what was described when the running call began."""
        ...

    def give_up(self, kind: RegionKind, entry: GraphEntry, reason: str, was_right: bool) -> None:
        """Use a graph no more that failed its check; `was_right` if it passed one before."""
        ...


_everything = threading.local()


@contextmanager
def eagerly(reason: str) -> Iterator[None]:
    """Run every region of this thread eagerly for a while."""
    outer = getattr(_everything, "eager", None)
    _everything.eager = reason
    try:
        yield
    finally:
        _everything.eager = outer


@dataclass(frozen=True)
class Plan:
    """How calls with one set of argument shapes are served."""

    entry: GraphEntry
    order: tuple[int, ...]
    """Which of the call's tensors is the graph's n-th input."""
    relayout: tuple[tuple[int, torch.memory_format], ...]
    """Inputs that arrive in another layout than the graph was compiled for."""
    at_one: frozenset[str]
    defaults: tuple[torch.Tensor, ...]
    """Tensors that the call leaves to the defaults of `forward`; they follow the call's own."""
    reads: frozenset[str]
    """Options with which a call is not one for this graph."""
    writes: Mapping[str, Any]
    """What the region's code leaves in its options."""


@dataclass(eq=False)
class RegionKind:
    """What equal regions of one model share."""

    cls: type
    fingerprint: str
    strings: frozenset[str]
    context_places: Mapping[int, str]
    """Positions of context arguments, and their names."""
    device: torch.device
    """Where the model runs."""
    graphs: dict[str, list[GraphEntry]] = field(default_factory=dict)
    """By structure text. More than one if sizes once fixed turned out not to be."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By structure text: why there is no graph."""
    plans: dict[Any, Plan | str] = field(default_factory=dict)
    """By argument shapes: the plan, or why there is none."""
    closed: str | None = None
    """Why no call at all can be compiled."""

    @classmethod
    def of(cls, module: nn.Module, description: Description, host: Host, device: torch.device) -> RegionKind:
        names = forward_signature(type(module)).parameters
        return cls(
            type(module),
            description.fingerprint,
            description.strings,
            {index: name for index, name in enumerate(names) if name in host.context_arguments},
            device,
            closed=description.obscure or _unusual_weight(module),
        )

    def serve(self, structure_text: str, entry: GraphEntry) -> None:
        """Use a graph for calls of this structure from now on."""
        entries = self.graphs.setdefault(structure_text, [])
        if entry not in entries:
            entries.append(entry)
        self.refusals.pop(structure_text, None)
        self.plans.clear()

    def refuse(self, structure_text: str, reason: str) -> None:
        """Run calls of this structure eagerly from now on."""
        self.refusals[structure_text] = reason
        self.plans.clear()

    def drop(self, keys: Set[str]) -> None:
        """Forget graphs; calls that want them ask for them again. Not while a call runs."""
        for text, entries in list(self.graphs.items()):
            kept = [entry for entry in entries if entry.retired or entry.graph.key not in keys]
            if kept:
                self.graphs[text] = kept
            else:
                del self.graphs[text]
        self.plans.clear()


class RegionForward:
    """Takes the place of one region's `forward`. Nothing in it refers back to the region's module."""

    inner = None
    """It is only ever put in the place of the class's own `forward`."""

    def __init__(
        self, module: nn.Module, path: str, kind: RegionKind, host: Host, counters: Counters, owner: Owner, verify: bool
    ) -> None:
        self._path = path
        self._host = host
        self._counters = counters
        self._owner = owner
        self._verify = verify
        self.check_next = False
        """Set to have the next call compared with eager, whatever was proven before."""
        self.become(module, kind)

    def become(self, module: nn.Module, kind: RegionKind) -> None:
        """Serve this module from now on, as a region of this kind."""
        self._module = weakref.ref(module)
        self._kind = kind
        self._modules = ModuleGuard(module, self._host)
        self._weights = WeightGuard(module, self._host, kind.device)

    def module(self) -> nn.Module | None:
        """Return the region, or None if it is gone."""
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable | None:
        """A copy of the module has weights of its own, and is eager until somebody compiles it."""
        twin = memo.get(id(self._module()))
        return self if twin is None else MethodType(type(twin).forward, twin)

    def __reduce__(self) -> tuple:
        """Pickle as the method that this stands for: whoever loads it has a module that is not compiled."""
        return getattr, (self._module(), "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        eager = partial(type(module).forward, module)
        if torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        self._counters.add("calls")
        try:
            weights = self._follow(module)
            context = self._check_call(args, kwargs)
            hooks = self._host.hooks(context, self._kind.strings)
            plan, tensors = self._plan(args, kwargs, hooks)
            if plan.reads and (reason := self._host.reaches(context, plan.reads)):
                raise Unsupported(reason)
            patches = self._host.patch_names(context, hooks) if hooks else frozenset()
            if patches and patches in plan.entry.rejected:
                raise Unsupported(plan.entry.rejected[patches])
            spec = plan.entry.graph.spec
            weights = self._weights.admit(weights, spec)
            if spec.mutated:
                _check_aliases(spec.mutated, [tensors[i] for i in plan.order])
        except Unsupported as reason:
            self._counters.add_eager(str(reason))
            return eager(*args, **kwargs)
        make_call = partial(_Call, plan, weights, tensors, context, hooks, patches, partial(self._eager, args, kwargs))
        checked = plan.at_one | patches if patches else plan.at_one
        if self._verify and (self.check_next or checked not in plan.entry.verified):
            if not _is_recording(self._kind.device):
                return self._run_checked(make_call())
        if plan.writes:
            self._host.leave_behind(context, plan.writes)
        try:
            with calling(self._host.patch_call(context)) if hooks else nullcontext():
                return self._run(plan, weights, tensors)
        except torch.cuda.OutOfMemoryError:
            raise
        except PatchFailed as failed:
            return self._after_patch(failed, make_call())
        except Exception as error:
            if spec.mutated or _is_recording(self._kind.device):
                raise  # the inputs may be half written, or it is the recording that is at fault
            self._retire(plan, f"{type(error).__name__}: {error}")
            return eager(*args, **kwargs)

    def _eager(self, args: tuple, kwargs: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
        """Run the region's own code, with other context arguments."""
        module = self._module()
        places = self._kind.context_places
        args = tuple(context[places[i]] if i in places else value for i, value in enumerate(args))
        kwargs = {**kwargs, **{name: context[name] for name in context.keys() & kwargs.keys()}}
        return type(module).forward(module, *args, **kwargs)

    def _after_patch(self, failed: PatchFailed, call: _Call) -> Any:
        """Run what a patch did not let a graph do; raise what is the patch's own to raise."""
        if not isinstance(failed.error, WrongOutput) or call.plan.entry.graph.spec.mutated:
            raise failed.error
        self._counters.add_eager(str(failed.error))
        call.plan.entry.rejected[call.patches] = str(failed.error)
        return call.eager(call.context)

    def _plan(self, args: tuple, kwargs: Mapping[str, Any], hooks: str) -> tuple[Plan, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        context = self._host.context_arguments
        places = self._kind.context_places
        token = (
            tuple([None if i in places else describe(value, tensors) for i, value in enumerate(args)]),
            tuple([(name, name in context or describe(value, tensors)) for name, value in kwargs.items()]),
            _repeats(tensors),
            hooks,
        )
        plan = self._kind.plans.get(token)
        if plan is None or (isinstance(plan, Plan) and plan.entry.retired):
            if len(self._kind.plans) >= MAX_PLANS:
                self._kind.plans.clear()
            plan = self._kind.plans[token] = self._make_plan(args, kwargs, tensors, hooks)
        if isinstance(plan, str):
            raise Unsupported(plan)
        return plan, [*tensors, *plan.defaults] if plan.defaults else tensors

    def _make_plan(self, args: tuple, kwargs: Mapping[str, Any], tensors: list[torch.Tensor], hooks: str) -> Plan | str:
        kind = self._kind
        if kind.closed:
            return kind.closed
        try:
            structure, ordered = read(bind(kind.cls, args, kwargs, self._host.context_arguments), hooks=hooks)
        except Unsupported as reason:
            return str(reason)
        if structure.text not in kind.graphs and structure.text not in kind.refusals:
            if len(kind.graphs) + len(kind.refusals) >= MAX_STRUCTURES:
                return f"an argument that keeps changing (more than {MAX_STRUCTURES} kinds of call)"
            if reason := self._owner.learn(kind, structure):
                kind.refuse(structure.text, reason)
        if structure.text in kind.refusals:
            return kind.refusals[structure.text]
        if structure.text not in kind.graphs:
            return "a graph that was taken back"
        shapes = [t.shape for t in ordered]
        entry = next((e for e in kind.graphs[structure.text] if e.graph.spec.fits(shapes)), None)
        if entry is None:
            return "sizes outside of what the graph was traced for"
        if entry.retired:
            return entry.retired
        spec = entry.graph.spec
        given = {id(tensor) for tensor in tensors}
        defaults = tuple({id(t): t for t in ordered if id(t) not in given}.values())
        everything = [*tensors, *defaults]
        order = tuple(next(i for i, t in enumerate(everything) if t is wanted) for wanted in ordered)
        formats = [MEMORY_FORMATS[item.memory_format] for item in spec.inputs]
        relayout = tuple(
            (i, fmt)
            for i, (t, fmt) in enumerate(zip(ordered, formats, strict=True))
            if not t.is_contiguous(memory_format=fmt)
        )
        try:
            writes = spec.left_behind(shapes)
        except Exception as error:  # a file says what it likes
            return f"a graph whose contract makes no sense ({one_line(error)})"
        return Plan(entry, order, relayout, spec.symbols_at_one(shapes), defaults, frozenset(spec.reads), writes)

    def _check_call(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the context arguments. Raises Unsupported if the call is not one for graphs."""
        if reason := getattr(_everything, "eager", None):
            raise Unsupported(reason)
        if torch.is_grad_enabled():
            raise Unsupported("gradients are on")
        if torch.is_autocast_enabled(self._kind.device.type):
            raise Unsupported("autocast is on")
        context = {name: args[i] for i, name in self._kind.context_places.items() if i < len(args)}
        context |= {name: kwargs[name] for name in self._host.context_arguments if name in kwargs}
        if reason := self._host.reaches(context, self._kind.strings):
            raise Unsupported(reason)
        return context

    def _follow(self, module: nn.Module) -> list[torch.Tensor | None]:
        """See whether the region is still the one that was described; if not, go on as what it is now.

        Returns its weights.
        """
        try:
            self._modules.check()
            return self._weights.check()
        except Changed:
            ModuleGuard(module, self._host).check()  # a change that cannot be followed yet must be seen again
            self.become(module, self._owner.describe(self._path))
            return self._weights.current()

    def _run(self, plan: Plan, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        spec = plan.entry.graph.spec
        inputs = [tensors[i] for i in plan.order]
        originals = {}
        for i, memory_format in plan.relayout:
            originals[i] = inputs[i]
            inputs[i] = inputs[i].contiguous(memory_format=memory_format)
        outputs = plan.entry.graph(weights, inputs)
        for i in spec.mutated:
            if i in originals:
                originals[i].copy_(inputs[i])
                # A region that returns what it wrote to returns the caller's tensor, for the next one to write to.
                outputs = [originals[i] if _is_same(output, inputs[i]) else output for output in outputs]
        return spec.rebuild(outputs)

    def _run_checked(self, call: _Call) -> Any:
        """Run the region eagerly, then its graph on copies, and compare; the person gets eager's result.

        Patches are called once, by the eager region: what they returned is what the graph is given.
        """
        plan, spec = call.plan, call.plan.entry.graph.spec
        self.check_next = False
        was_right = plan.at_one | call.patches in plan.entry.verified
        copies = [t.clone() for t in call.tensors]
        recorded = self._host.record_patches(call.context, call.hooks) if call.hooks else None
        theirs = call.eager(recorded.context if recorded else call.context)
        if recorded:
            recorded.hand_over()
        try:
            with calling(recorded) if recorded else nullcontext():
                ours = self._run(plan, call.weights, copies)
            written = [plan.order[i] for i in spec.mutated]
            error = (recorded.error if recorded else "") or disagreement(
                [*_tensors(ours), *(copies[i] for i in written)],
                [*_tensors(theirs), *(call.tensors[i] for i in written)],
                plan.entry.graph.precision,
            )
        except torch.cuda.OutOfMemoryError:  # eager had enough: another call will tell
            return theirs
        except PatchFailed as failed:
            error = str(failed.error)
        except Exception as raised:  # a graph that cannot run is a graph that is wrong
            error = f"{type(raised).__name__}: {raised}"
        self._counters.add("verifications")
        if error and call.patches:
            self._reject(call, error)
        elif error:
            self._retire(plan, error, was_right)
        else:
            plan.entry.verified.add(plan.at_one | call.patches)
            if not call.patches:
                self._time(call, copies)
        return theirs

    def _time(self, call: _Call, copies: Sequence[torch.Tensor]) -> None:
        """Time the graph and the eager region, once, unless the region's code leaves something behind."""
        entry = call.plan.entry
        if entry.timing is not None or not self._owner.is_unchanged():
            return
        written = (call.tensors[call.plan.order[i]] for i in entry.graph.spec.mutated)
        with suppress(torch.cuda.OutOfMemoryError), _unchanged(written), same_random_numbers(self._kind.device):
            graph, eager = partial(self._run, call.plan, call.weights, copies), partial(call.eager, call.context)
            entry.timing = compare(graph, eager, self._kind.device)

    def _reject(self, call: _Call, error: str) -> None:
        """Run calls with these patches eagerly from now on; the graph may be right for others."""
        region, entry = call.plan.entry.graph.spec.region, call.plan.entry
        entry.rejected[call.patches] = f"the graph of {region} failed its check with a patch: {error.splitlines()[0]}"
        log.warning("%s runs eagerly with %s: %s", region, ", ".join(sorted(call.patches)), error)
        self._counters.add_eager(entry.rejected[call.patches])

    def _retire(self, plan: Plan, error: str, was_right: bool = False) -> None:
        region = plan.entry.graph.spec.region
        reason = f"the graph of {region} failed its check: {error.splitlines()[0]}"
        log.warning("%s: %s", region, reason)
        self._counters.add("retired")
        self._counters.add_eager(reason)
        self._owner.give_up(self._kind, plan.entry, reason, was_right)


@dataclass(frozen=True)
class _Call:
    """One call of a region that a graph can serve."""

    plan: Plan
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    context: Mapping[str, Any]
    hooks: str
    patches: frozenset[str]
    eager: Callable[[Mapping[str, Any]], Any]
    """Runs the region's own code with these context arguments."""


def _unusual_weight(module: nn.Module) -> str | None:
    """Quantised and wrapped weights decide for themselves what an operator does to them."""
    types = {type(group[name]) for _, (group, name) in tensor_slots(module)}
    unusual = sorted(kind.__name__ for kind in types if kind not in TENSOR_TYPES)
    return f"weights of type {unusual[0]}" if unusual else None


def _check_aliases(mutated: Sequence[int], inputs: Sequence[torch.Tensor]) -> None:
    """A graph assumes that what it writes to is nobody else's input."""
    for i in mutated:
        storage = inputs[i].untyped_storage().data_ptr()
        if any(j != i and t.untyped_storage().data_ptr() == storage for j, t in enumerate(inputs)):
            raise Unsupported("an input that is written to and shares memory with another")


@contextmanager
def _unchanged(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give tensors back their values at the end."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, values in kept:
            tensor.copy_(values)


def _is_recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _repeats(tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
    """Return which arguments are one and the same tensor: a plan for f(x, x) is none for f(x, y)."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    return None if len(places) == len(tensors) else tuple([places[id(tensor)] for tensor in tensors])


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
