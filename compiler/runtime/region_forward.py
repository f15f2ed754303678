"""What takes the place of a region's `forward`: each call goes to a graph, or runs eagerly for a counted reason.

A call looks at what can change between calls without anybody telling us: the arguments, the host's patches, and
where the weights are. What that leads to is remembered per signature (`region_kind`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from ..common.compare import disagreement
from ..common.counters import Counters
from ..common.host import Host
from ..common.peers import has_peers
from ..common.random_state import same_random_numbers
from ..common.reason import Reason, ReasonCode, Unsupported, reason_of
from ..common.tensors import tensors_in
from ..common.timing import compare
from ..common.torch_compat import pytree
from ..common.weight_source import NetworkWeights
from ..compile_cache.graph_cache import CacheEntry
from ..identity.memory_format import in_format
from ..tracing.frame_windows import AnyWindow, see
from ..tracing.patch_ops import PatchFailed, WrongOutput, calling
from .guards import Changed, ModuleGuard, WeightGuard
from .region_kind import Miss, Plan, Refusal, RegionKind
from .running_call import RunningCall, running_call

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The model that a region belongs to, as the region sees it."""

    host: Host
    counters: Counters
    weights: NetworkWeights
    """Where the model's weights come from."""
    verifies: bool
    """Whether a graph is compared with eager before it serves."""

    def on_cache_miss(self, kind: RegionKind, miss: Miss, call: RunningCall | None) -> Reason | None:
        """Provide a graph for calls that none serves, or return why not.

        Raises Unsupported while one is compiled in the background.
        """
        ...

    def describe(self, path: str) -> RegionKind:
        """Return the kind of a region that has changed."""
        ...

    def is_unchanged(self) -> bool:
        """Whether the model's regions are still what was described when the running call began."""
        ...

    def retire(self, kind: RegionKind, entry: CacheEntry, reason: Reason, was_right: bool) -> None:
        """Stop using a graph that failed its check; `was_right` if it passed one before."""
        ...


_thread = threading.local()


@contextmanager
def eagerly(reason: Reason) -> Iterator[None]:
    """Run every region of this thread eagerly for a while."""
    outer = getattr(_thread, "eager", None)
    _thread.eager = reason
    try:
        yield
    finally:
        _thread.eager = outer


class RegionForward:
    """Takes the place of one region's `forward`. Nothing in it refers back to the region's module."""

    inner = None
    """It is only ever put in the place of the class's own `forward`."""

    def __init__(self, module: nn.Module, path: str, kind: RegionKind, owner: Owner, place: int = 0) -> None:
        """`place` is the region's among all regions of its model."""
        self.place = place
        self._path = path
        self._owner = owner
        self._host = owner.host
        self._counters = owner.counters
        self._verify = owner.verifies
        self.check_next = False
        """Set to have the next call compared with eager, whatever was proven before."""
        self.attach(module, kind)

    def attach(self, module: nn.Module, kind: RegionKind) -> None:
        """Serve this module from now on, as a region of this kind."""
        self._module = weakref.ref(module)
        self._is_detached = False
        self._kind = kind
        self._modules = ModuleGuard(module, self._host)
        self._weights = WeightGuard(module, self._host, kind.device, self._owner.weights.of(module))

    def is_attached_to(self, module: nn.Module, kind: RegionKind) -> bool:
        """Whether it is attached to this module, as a region of this kind."""
        return not self._is_detached and module is self._module() and kind is self._kind

    def detach(self) -> bool:
        """Run eagerly from now on: the region is not at its path any more. Return whether it was attached so far."""
        was_left, self._is_detached = self._is_detached, True
        return not was_left

    def module(self) -> nn.Module | None:
        """Return the region, or None if it is gone."""
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable | None:
        """A copy of the module has weights of its own, and is eager until somebody compiles it."""
        copied = memo.get(id(self._module()))
        return self if copied is None else MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple:
        """Pickle as the method that this stands for: whoever loads it has a module that is not compiled."""
        return getattr, (self._module(), "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        eager = partial(type(module).forward, module)
        if torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        self._counters.add("calls")
        if running := running_call(self._owner):
            running.note_region(self.place)
        try:
            call, reason = self._match(module, args, kwargs, running), None
        except BaseException as error:
            self._weights.release()
            call, reason = None, self._why_unmatched(error)
        if call is None:
            self._note_eager(reason)
            return eager(*args, **kwargs)
        if running:
            running.entries.add(call.plan.entry)
        try:
            return self._serve(call)
        finally:
            self._weights.release()

    def _why_unmatched(self, error: BaseException) -> Reason:
        """Return why no graph serves a call. Its own code can: nothing of the call has run yet.

        Raises the error again if the person cancels, if memory is short (the host knows how to free some), and within a
        capture.
        """
        if isinstance(error, Unsupported):
            return error.reason
        lacks_memory = isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error)
        if lacks_memory or not isinstance(error, Exception) or self._host.is_cancellation(error):
            raise error
        if _is_capturing(self._kind.device):  # the region's own code may do what no capture bears
            raise error
        reason = reason_of(error)
        level = logging.DEBUG if reason in self._counters.eager_calls else logging.WARNING
        name = type(self._module()).__name__
        log.log(level, "%s: a call runs uncompiled because of an error", name, exc_info=error)
        return reason

    def _match(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], running: RunningCall | None) -> _Call:
        """Return how a graph serves a call, with its weights. Raises Unsupported if none can.

        It keeps no frames of a video: a block that runs eagerly must be able to free those of the chunk before.
        """
        have_functions = self._refresh_if_changed(module)
        context = self._check_call(args, kwargs)
        patch_points = self._host.patch_points(context, self._kind.string_constants)
        seen = see(module, self._kind.fingerprint, self._host, self._kind.window_sizes, args, kwargs)
        plan, tensors = self._plan(seen.args, seen.kwargs, patch_points, running)
        if plan.reads and (reason := self._host.unsupported_read(context, plan.reads)):
            raise Unsupported.of(reason)
        patches = self._host.patch_names(context, patch_points, self._kind.string_constants)
        if patches and patches in plan.entry.rejected:
            raise Unsupported.of(plan.entry.rejected[patches])
        spec = plan.entry.graph.spec
        if spec.mutated:
            _check_aliases(spec.mutated, [tensors[i] for i in plan.order])
        weights = self._weights.acquire(spec, have_functions)
        run_eagerly = partial(self._eager, args, kwargs)
        return _Call(plan, weights, tensors, context, patch_points, patches, run_eagerly, seen.window)

    def _serve(self, call: _Call) -> Any:
        """Run a call's graph, or compare it with eager first."""
        plan = call.plan
        checked = plan.small_sizes | call.patches if call.patches else plan.small_sizes
        is_new = checked not in plan.entry.verified
        if (self._verify and (self.check_next or is_new)) or (plan.few_frames and is_new):
            if not _is_capturing(self._kind.device):
                return self._run_checked(call)
        if plan.writes:
            self._host.apply_writes(call.context, plan.writes)
        given = self._given_to_new_patches(call)
        try:
            with calling(self._host.patch_call(call.context)) if call.patches else nullcontext():
                result, left = call.unpack(self._run(plan, call.weights, call.tensors))
        except torch.cuda.OutOfMemoryError:
            raise
        except PatchFailed as failed:
            return self._after_patch(failed, call, given)
        except Exception as error:
            if plan.entry.graph.spec.mutated or _is_capturing(self._kind.device):
                raise  # the inputs may be half written, or the captured graph is at fault
            self._retire(plan, f"{type(error).__name__}: {error}", checked in plan.entry.verified)
            return call.eager(call.context)
        if call.patches:
            plan.entry.served.add(call.patches)
            if plan.writes:  # a patch gets the same dictionary, and may have written to it
                self._host.apply_writes(call.context, plan.writes)
        if call.window:
            call.window.write(*left)
        return result

    def _note_eager(self, reason: Reason) -> None:
        """Count an eager call of the region, and tell the running call."""
        self._counters.add_eager(reason)
        if running := running_call(self._owner):
            running.is_eager_in_part = True

    def _eager(self, args: tuple, kwargs: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
        """Run the region's own code, with other context arguments."""
        module = self._module()
        args, kwargs = self._kind.context.replaced(args, kwargs, context)
        return type(module).forward(module, *args, **kwargs)

    def _eager_on_given_frames(self, call: _Call) -> Any:
        """Run the region's own code on the frames that it was given, and leave those that are kept as they are."""
        left = call.window.now()
        call.window.reset()
        try:
            return call.eager(call.context)
        finally:
            call.window.write(*left)

    def _given_to_new_patches(self, call: _Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of what the graph writes to, before it first calls these patches: they may not suit it."""
        entry = call.plan.entry
        if not call.patches or call.patches in entry.served:
            return []
        written = [call.tensors[call.plan.order[i]] for i in entry.graph.spec.mutated]
        return [(tensor, tensor.clone()) for tensor in written]

    def _after_patch(self, failed: PatchFailed, call: _Call, given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Run the block eagerly if a patch gave another shape or dtype. Raise the patch's own exception."""
        if not isinstance(failed.error, WrongOutput) or len(given) < len(call.plan.entry.graph.spec.mutated):
            raise failed.error
        for tensor, values in given:
            tensor.copy_(values)
        call.plan.entry.rejected[call.patches] = failed.error.reason
        self._note_eager(failed.error.reason)
        return call.eager(call.context)

    def _plan(
        self, args: tuple, kwargs: Mapping[str, Any], patch_points: str, call: RunningCall | None
    ) -> tuple[Plan, list[torch.Tensor]]:
        """Return how the call is served, after asking for a graph if there is none. Raises Unsupported."""
        found, tensors = self._kind.lookup(args, kwargs, patch_points)
        asked: set[str] = set()
        # A look ahead can show that a number in the call is a size. Then it misses again, under another signature.
        while isinstance(found, Miss) and found.signature.text not in asked:
            asked.add(found.signature.text)
            if call:
                call.had_setup = True
            if reason := self._owner.on_cache_miss(self._kind, found, call):
                self._kind.mark_eager(found.signature.text, reason)
            found, tensors = self._kind.lookup(args, kwargs, patch_points)
        if isinstance(found, Plan):
            return found, tensors
        raise Unsupported.of(found.reason if isinstance(found, Refusal) else Reason(ReasonCode.TAKEN_BACK))

    def _check_call(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the context arguments. Raises Unsupported if the call is not one for graphs."""
        if reason := getattr(_thread, "eager", None):
            raise Unsupported.of(reason)
        if torch.is_grad_enabled():
            raise Unsupported(ReasonCode.GRADIENTS)
        if torch.is_autocast_enabled(self._kind.device.type):
            raise Unsupported(ReasonCode.AUTOCAST)
        context = self._kind.context.of(args, kwargs)
        if reason := self._host.unsupported_patch(context, self._kind.string_constants):
            raise Unsupported.of(reason)
        return context

    def _refresh_if_changed(self, module: nn.Module) -> bool:
        """See whether the region is still the one that was described; if not, go on as what it is now.

        Returns whether weight functions act.
        """
        if self._is_detached:
            raise Unsupported(ReasonCode.MODULE_REPLACED)
        try:
            have_functions = self._modules.check()
            self._weights.check()
        except Changed:
            # If this raises, the old guards stay, and the next call sees the change again.
            have_functions = ModuleGuard(module, self._host).check()
            self.attach(module, self._owner.describe(self._path))
        return have_functions

    def _run(self, plan: Plan, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        spec = plan.entry.graph.spec
        inputs = [tensors[i] for i in plan.order]
        originals = {}
        for i, memory_format in plan.relayout:
            originals[i] = inputs[i]
            inputs[i] = in_format(inputs[i], memory_format)
        outputs = plan.entry.graph(weights, inputs)
        for i in spec.mutated:
            if i in originals:
                if originals[i].data_ptr() != inputs[i].data_ptr():
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
        was_right = plan.small_sizes | call.patches in plan.entry.verified
        copies = _copies(call.tensors)
        recorded = self._host.record_patches(call.context, call.patch_points) if call.patches else None
        theirs = _eager_beside(copies, call, recorded.context if recorded else call.context)
        if recorded:
            recorded.hand_over()
        if not copies:  # another call will tell
            return theirs
        try:
            with calling(recorded) if recorded else nullcontext():
                ours = call.unpack(self._run(plan, call.weights, copies))
            written = [plan.order[i] for i in spec.mutated]
            left = call.window.now() if call.window else None
            error = (recorded.error if recorded else "") or _frames_mismatch(ours[1], left)
            error = error or disagreement(
                [*tensors_in(ours), *(copies[i] for i in written)],
                [*tensors_in((theirs, left)), *(call.tensors[i] for i in written)],
                plan.entry.graph.precision or self._host.precision(self._module()),
            )
        except torch.cuda.OutOfMemoryError:  # eager had enough: another call will tell
            return theirs
        except PatchFailed as failed:
            error = str(failed.error)
        except Exception as raised:  # a graph that cannot run is a graph that is wrong
            error = f"{type(raised).__name__}: {raised}"
        self._counters.add("verifications")
        if running := running_call(self._owner):
            running.had_setup = True
        if error and call.patches:
            self._reject(call, error)
        elif error and plan.few_frames and not was_right:
            log.info("%s: another graph for so few frames: %s", spec.region, error)
            plan.entry.wrong_at.add(plan.few_frames)
        elif error:
            self._retire(plan, error, was_right)
        else:
            plan.entry.verified.add(plan.small_sizes | call.patches)
            if not call.patches:
                self._time(call, copies)
        return theirs

    def _time(self, call: _Call, copies: Sequence[torch.Tensor]) -> None:
        """Time the graph and the eager region, once, unless the region's code leaves something behind."""
        entry = call.plan.entry
        if entry.timing is not None or has_peers() or not self._owner.is_unchanged():
            return
        written = (call.tensors[call.plan.order[i]] for i in entry.graph.spec.mutated)
        with suppress(torch.cuda.OutOfMemoryError), _unchanged(written), same_random_numbers(self._kind.device):
            graph, eager = partial(self._run, call.plan, call.weights, copies), partial(call.eager, call.context)
            if call.window:  # each run needs entries that no other run has written to
                eager = partial(self._eager_on_given_frames, call)
            running = running_call(self._owner)
            entry.timing = compare(graph, eager, self._kind.device, running.shape if running else ())

    def _reject(self, call: _Call, error: str) -> None:
        """Run calls with these patches eagerly from now on; the graph may be right for others."""
        region, entry = call.plan.entry.graph.spec.region, call.plan.entry
        detail = f"{region} failed its check with a patch: {error.splitlines()[0]}"
        entry.rejected[call.patches] = Reason(ReasonCode.CHECK_FAILED, detail)
        log.warning("%s runs eagerly with %s: %s", region, ", ".join(sorted(call.patches)), error)
        self._note_eager(entry.rejected[call.patches])

    def _retire(self, plan: Plan, error: str, was_right: bool) -> None:
        region = plan.entry.graph.spec.region
        reason = Reason(ReasonCode.CHECK_FAILED, f"{region} failed its check: {error.splitlines()[0]}")
        log.warning("%s: %s", region, reason)
        self._counters.add("retired")
        self._note_eager(reason)
        self._owner.retire(self._kind, plan.entry, reason, was_right)


@dataclass(frozen=True)
class _Call:
    """One call of a region that a graph can serve."""

    plan: Plan
    weights: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    context: Mapping[str, Any]
    patch_points: str
    patches: frozenset[str]
    eager: Callable[[Mapping[str, Any]], Any]
    """Runs the region's own code with these context arguments."""
    window: AnyWindow | None
    """The frames that the region keeps between calls."""

    def unpack(self, rebuilt: Any) -> tuple[Any, tuple[list[Any], int] | None]:
        """Return the region's result, and what it leaves in its entries and how far it moves the cursor.

        `rebuilt` is what the graph returned. Raises ValueError if its contract does not fit the call.
        """
        writes = self.plan.entry.graph.spec.frame_writes
        if (writes is None) != (self.window is None):
            raise ValueError("a graph for a call with another list of frames")
        if writes is None:
            return rebuilt, None
        result, kept = rebuilt
        values = writes.values(self.window.given, result, [_with_own_memory(tensor) for tensor in kept])
        if not self.window.accepts(values):
            raise ValueError("a graph that leaves other frames")
        return result, (values, writes.moved)


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors, or return nothing if there is too little memory."""
    try:
        return [tensor.clone() for tensor in tensors]
    except torch.cuda.OutOfMemoryError:
        return []


def _eager_beside(copies: list[torch.Tensor], call: _Call, context: Mapping[str, Any]) -> Any:
    """Run the region's own code. If the copies leave it too little memory, empty their list and run it again."""
    spec = call.plan.entry.graph.spec
    try:
        return call.eager(context)
    except torch.cuda.OutOfMemoryError:
        if spec.mutated or call.window or call.patches:  # what it wrote or called cannot be undone
            raise
    copies.clear()
    return call.eager(context)


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that keeps little more memory than its own.

    Inductor returns the last frames of a chunk as a view of the map that it put together for a convolution.
    """
    memory = tensor.untyped_storage().nbytes()
    return tensor.clone() if memory > 1.1 * tensor.nbytes else tensor


def _frames_mismatch(ours: tuple[list[Any], int] | None, theirs: tuple[list[Any], int] | None) -> str:
    """Return an error if a graph leaves other entries than eager, besides what their tensors hold."""

    def outline(left: tuple[list[Any], int] | None) -> Any:
        return left and (pytree.tree_map_only(torch.Tensor, lambda t: tuple(t.shape), left[0]), left[1])

    return "" if outline(ours) == outline(theirs) else "other frames kept"


def _check_aliases(mutated: Sequence[int], inputs: Sequence[torch.Tensor]) -> None:
    """A graph assumes that what it writes to is nobody else's input."""
    for i in mutated:
        storage = inputs[i].untyped_storage().data_ptr()  # 0 for an empty tensor, which shares nothing
        if storage and any(j != i and t.untyped_storage().data_ptr() == storage for j, t in enumerate(inputs)):
            raise Unsupported(ReasonCode.ALIASED_INPUT)


@contextmanager
def _unchanged(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give tensors back their values at the end."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, values in kept:
            tensor.copy_(values)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
