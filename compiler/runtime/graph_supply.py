"""How a model gets its graphs: from a file, ahead of its first call, or when a call misses one.

Each graph goes to the kind of region that it is for, and each reason why there is none goes there too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch

from ..common.counters import Counters
from ..common.errors import one_line
from ..common.quiet import quiet
from ..common.random_state import same_random_numbers
from ..common.reason import Reason, ReasonCode, Unsupported, reason_of
from ..common.torch_compat import FAKE_TENSOR_LOGGER, needs_values
from ..common.words import say
from ..compile_cache.background_queue import Background
from ..compile_cache.graph_cache import MAX_SIGNATURES, CacheEntry, CompileIn, GraphCache, Outcome, Requester
from ..compile_cache.key import environment, request_version
from ..identity.call_signature import CallSignature, covers
from ..identity.graph_spec import GraphIdentity
from ..storage.graph_file import StoredGraph
from ..tracing.answered_values import Guess
from ..tracing.graph_request import GraphRequest
from ..tracing.shape_discovery import ModelCall, discover_requests
from ..tracing.side_effects import untouched
from .region_kind import Miss, RegionKind
from .region_kinds import RegionKinds
from .summary import Progress

log = logging.getLogger(__name__)

MAX_DIFFERENCES = 3
"""A region that workers find to be another one this often is another one there."""

MAX_NOTED = MAX_SIGNATURES // 2
"""Kinds of call of one block that the next start knows ahead."""

OnProgress = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """Take no note of progress."""


class CannotCallAhead(Exception):
    """A model that cannot run under fake tensors with the inputs it was given; its own error is the cause."""


class GraphSupply:
    """Provides graphs for the kinds of one model."""

    def __init__(
        self,
        kinds: RegionKinds,
        cache: GraphCache,
        counters: Counters,
        background: Background | None,
        on_change: Callable[[], None],
    ) -> None:
        """With a `background`, what a running call misses is compiled there."""
        self.compiled: list[str] = []
        """Regions whose graphs had to be compiled."""
        self.pending: list[StoredGraph] = []
        """Graphs of files that wait for the model to change its dtype or device."""
        self._kinds = kinds
        self._cache = cache
        self._counters = counters
        self._background = background
        self._on_change = on_change
        self._loaded: set[str] = set()
        self._differed: Counter[str] = Counter()
        """By fingerprint: how often a worker has found another region although none had changed."""
        self._met_another = False
        """Whether a worker did so in the job that runs, and the next call that wants the graph may ask again."""
        self._known: dict[str, list[GraphRequest]] = {}
        """What calls with a name are known to want, without modules."""

    @property
    def loaded(self) -> int:
        """Kinds, of those that the model has now, that a file gave a graph."""
        return len(self._loaded & set(self._kinds.paths().values()))

    def load(self, stored: Iterable[StoredGraph], keep: bool, left: Iterable[GraphIdentity] = ()) -> list[str]:
        """Use graphs from a file for the kinds they were made for, without looking at a call.

        `keep` keeps those that fit no region as it is now for when the model changes its dtype or device. `left` are
        graphs that were not read from the file, because they are for other machines.
        Returns a sentence for each reason why graphs that fit a region cannot serve here, if no other graph of the file
        does.
        """
        failed: list[tuple[GraphIdentity, str]] = []
        classes = {kind.cls.__name__ for kind in self._kinds}
        waiting = [graph for graph in stored if not self._use_stored(graph, failed)]
        self.pending = [graph for graph in waiting if keep and graph.spec.region in classes]
        failed += [(graph, self._foreign_to(graph)) for graph in left if self._kinds.of(graph.fingerprint)]
        refused = Counter(reason for graph, reason in failed if reason and not self._serves(graph))
        return [
            say("{count} graphs of the file were {reason}; compiled here instead", count=count, reason=reason)
            for reason, count in refused.items()
        ]

    def use_pending(self) -> None:
        """Use graphs of files that fit what the model has become."""
        self.pending = [graph for graph in self.pending if not self._use_stored(graph, [])]

    def compile_listed(self, listed: Iterable[GraphIdentity], on_progress: OnProgress) -> None:
        """Provide graphs like those of a file that cannot be loaded here. The file need not be trusted.

        Between graphs the host may cancel.
        """
        requests = [request for identity in listed if (request := self._request_like(identity))]
        for done, request in enumerate(requests):
            if self._is_missing(request) and self._kinds.of(request.fingerprint).has_room(request.signature.text):
                self._check_cancelled()
                on_progress(self._settle(self._get(request), done + 1, len(requests)))

    def prepare(self, call: ModelCall, on_progress: OnProgress, name: str) -> None:
        """Provide the graphs that a call of the model will use.

        What a call with a name wants is remembered as long as the model lives, for each `variant` that the call has:
        clones of a model may compute in other dtypes. Between graphs the host may cancel;
        what is done is kept. Raises CannotCallAhead, before anything is compiled, if the call fails under fake tensors.
        """
        start = time.perf_counter()
        name = name and name + getattr(call, "variant", "")
        self._known[name] = []
        try:
            requests = self._wanted_ahead(call, name)
        except Exception as error:
            raise CannotCallAhead(one_line(error)) from error
        self._counters.add("seconds", time.perf_counter() - start)
        self._known[name] = [request.without_module() for request in requests]
        self._get_all([request for request in requests if not request.is_for_short_chunk], on_progress)
        # Most short chunks have a graph by now: one for any length. Without that one, they stay uncompiled like others.
        short = (request for request in requests if request.is_for_short_chunk)
        self._get_all([each for each in short if each.signature.text not in self._refusals_of(each)], on_progress)

    def _get_all(self, requests: Iterable[GraphRequest], on_progress: OnProgress) -> None:
        missing = [request for request in requests if self._is_missing(request)]
        if not missing:
            return
        on_progress(Progress(0, len(missing), "", "", 0.0))
        outcomes = self._cache.get_or_compile_all(missing, self._requester, self._is_beside, self._check_cancelled)
        for done, outcome in enumerate(outcomes):
            on_progress(self._settle(outcome, done + 1, len(missing)))

    def on_cache_miss(self, kind: RegionKind, miss: Miss, call: ModelCall | None) -> Reason | None:
        """Provide a graph that a running call misses, or return why there is none. `call` repeats it, if that is known.

        With a background, raises Unsupported: the graph comes later.
        """
        if call is None and not kind.graphs_of(miss.signature.text) and not miss.signature.is_chunk:
            return Reason(ReasonCode.UNFORESEEN)
        if self._background is None:
            self._kinds.describe_again()  # what has made one region another may have changed others, not called since
            return self._provide_now(kind, miss, call)
        job = partial(self._provide_later, kind, miss, call)
        self._background.submit((kind.fingerprint, miss.signature.text, miss.shapes), job)
        raise Unsupported(ReasonCode.BACKGROUND)

    def evict(self, kind: RegionKind, entry: CacheEntry) -> None:
        """Forget a graph that was loaded and is wrong: the next call that wants it has it compiled."""
        self._cache.evict(entry)
        kind.evict({entry.graph.key})

    def _provide_later(self, kind: RegionKind, miss: Miss, call: ModelCall | None) -> None:
        if self._kinds.model() is None or kind.has_resolved(miss):
            return
        if not self._kinds.are_unchanged():  # such as after a sampling: a call that still wants it asks again
            return
        self._met_another = False
        reason = self._provide_now(kind, miss, call)
        if reason and not self._met_another:
            kind.mark_eager(miss.signature.text, reason)
            self._on_change()

    def _provide_now(self, kind: RegionKind, miss: Miss, call: ModelCall | None) -> Reason | None:
        signature = miss.signature
        if signature.is_chunk:
            return self._provide_chunk(kind, miss)
        if signature.patch_points and self._provide_patched(kind, miss):
            return None
        specs = [entry.graph.spec for entry in kind.graphs_of(signature.text)]
        if call is None or any(spec.tells_symbols_of(miss.shapes) for spec in specs):
            return self._provide_branch(kind, miss)
        try:
            requests = self._look_ahead_for(kind, signature, call)
        except Exception as error:
            if operator := needs_values(error):
                return Reason(ReasonCode.DEPENDS_ON_VALUES, operator)
            return Reason(ReasonCode.SIZES_UNCLEAR, one_line(error))
        if not any(r.fingerprint == kind.fingerprint and covers(r.signature.text, signature.text) for r in requests):
            # Repeated without patches, the call did not get here; the sizes of those like it vary in the same way.
            alike = (r.with_signature(signature) for r in requests if r.fingerprint == kind.fingerprint)
            requests += [request for request in alike if request]
        for request in requests:
            if request.signature.is_chunk:  # each asks for its own, at its own batch
                continue
            if request.signature.text not in self._refusals_of(request) and self._is_missing(request):
                self._check_cancelled()
                self._settle(self._get(request), 1, 1)
        self._on_change()
        self._note(requests)
        if kind.graphs_of(signature.text) and not kind.has_resolved(miss):
            return self._provide_branch(kind, miss)
        return None if kind.is_settled(signature.text) else Reason(ReasonCode.SIZE_ARGUMENT)

    def _provide_patched(self, kind: RegionKind, miss: Miss) -> bool:
        """Provide a graph with places for patches, like one that the same call without patches has.

        Returns whether there is one that serves the call now.
        """
        region, plain = self._kinds.region_of(kind.fingerprint), kind.graphs_of(miss.signature.unpatched)
        if region is None:
            return False
        for entry in sorted(plain, key=lambda entry: not entry.graph.spec.has_fixed_sizes(miss.shapes)):
            request = GraphRequest.like(entry.graph, region, self._kinds.target.device).with_signature(miss.signature)
            if request and self._is_missing(request):
                self._check_cancelled()
                self._settle(self._get(request), 1, 1)
                self._on_change()
                self._note([request])
            if kind.has_resolved(miss):
                return True
        return False

    def _provide_chunk(self, kind: RegionKind, miss: Miss) -> Reason | None:
        """Provide a graph for chunks of a video like this one: calls ahead do not meet every kind of chunk."""
        region = self._kinds.region_of(kind.fingerprint)
        if region is None:
            return Reason(ReasonCode.SIZES_UNCLEAR)
        device, known = self._kinds.target.device, kind.graphs_of(miss.signature.text)
        try:
            any_length, its_length = (
                GraphRequest.of_chunk(miss.signature, miss.shapes, region, kind.fingerprint, device, is_any)
                for is_any in (True, False)
            )
        except ValueError as error:
            return Reason(ReasonCode.SIZES_UNCLEAR, one_line(error))
        has_longer = any(entry.graph.spec.has_fixed_sizes(miss.shapes) for entry in known)
        requests = [its_length] if its_length.is_for_short_chunk and has_longer else [any_length, its_length]
        for request in requests:
            self._check_cancelled()
            self._settle(self._get(request), 1, 1)
            self._on_change()
            self._note([request])
            if kind.has_resolved(miss):
                return None
            if self._met_another or any_length.sizes == its_length.sizes:
                break
        return Reason(ReasonCode.SIZES_OUTSIDE)

    def _provide_branch(self, kind: RegionKind, miss: Miss) -> Reason | None:
        """Provide a graph that is traced at the call's own sizes, for code that takes another branch there."""
        region, entries = self._kinds.region_of(kind.fingerprint), kind.graphs_of(miss.signature.text)
        request = None
        if region and entries:
            alike = next((e for e in entries if e.graph.spec.has_fixed_sizes(miss.shapes)), entries[0])
            request = GraphRequest.at(miss.shapes, alike.graph, region, self._kinds.target.device)
        if request is None:
            return Reason(ReasonCode.SIZES_OUTSIDE)
        self._check_cancelled()
        self._settle(self._get(request), 1, 1)
        self._on_change()
        return None if kind.has_resolved(miss) else Reason(ReasonCode.SIZES_OUTSIDE)

    def _wanted_ahead(self, call: ModelCall, name: str) -> list[GraphRequest]:
        """Return what a call wants, from memory or the store if it has a name that is known there."""
        if not name:
            return self._look_ahead(call)
        model, paths, device = self._kinds.model(), self._kinds.paths(), self._kinds.target.device
        state = name, device, tuple(paths.items())
        requests = self._cache.remembered(model, state)
        if requests is None:
            memo = self._memo_name(name)
            requests = self._cache.memo(memo, device)
            if requests is None:
                requests = self._look_ahead(call)
                self._cache.save_memo(memo, requests)
            self._cache.remember(model, state, requests)
        modules = {fingerprint: model.get_submodule(path) for path, fingerprint in paths.items()}
        known = [request for request in requests if request.fingerprint in modules]  # a memo is anybody's
        return [replace(request, module=modules[request.fingerprint]) for request in known]

    def _note(self, requests: Iterable[GraphRequest]) -> None:
        """Have the next start know what a running call wanted and the call ahead did not foresee.

        A model with several calls does not say which of them runs.
        """
        if len(self._known) != 1 or "" in self._known:
            return
        ((name, known),) = self._known.items()
        notes = [request.note() for request in known]
        counts = Counter(request.fingerprint for request in known if not request.is_for_short_chunk)
        for request in requests:
            has_graph = self._kinds.of(request.fingerprint).graphs_of(request.signature.text)
            if has_graph and request.note() not in notes and counts[request.fingerprint] < MAX_NOTED:
                known.append(request.without_module())
                counts[request.fingerprint] += 1
        if len(known) == len(notes):
            return
        model, paths, device = self._kinds.model(), self._kinds.paths(), self._kinds.target.device
        self._cache.remember(model, (name, device, tuple(paths.items())), known)
        self._cache.save_memo(self._memo_name(name), known)

    def _memo_name(self, name: str) -> str:
        """Return a digest of what the graphs depend on that a call wants; nothing if the model has no fingerprint."""
        network = self._kinds.network_fingerprint() if self._cache.store else ""
        if not network:
            return ""
        target = self._kinds.target
        record = [name, str(target.device), network, sorted(self._kinds.paths().items()), request_version(target.host)]
        return hashlib.sha256(json.dumps([*record, torch.__version__]).encode()).hexdigest()

    def _look_ahead_for(self, kind: RegionKind, signature: CallSignature, call: ModelCall) -> list[GraphRequest]:
        """Look ahead with a running call, and once more if its code asked for a value and this call is not foreseen."""
        guess, requests, failed = Guess(call, False), [], None
        try:
            requests = self._look_ahead(guess)
        except Exception as error:
            failed = error
        if guess.was_asked and not _foresees(requests, kind, signature):
            with suppress(Exception):  # the other answer may not suit the sizes
                others = self._look_ahead(Guess(call, True))
                if _foresees(others, kind, signature):
                    return [*requests, *others]
        if failed is not None:
            raise failed
        return requests

    def _look_ahead(self, call: ModelCall) -> list[GraphRequest]:
        """Return what a call wants. The person's random numbers stay where they are, if the person waits."""
        device = self._kinds.target.device
        # Beside a sampling its generator may be drawn from meanwhile, and must not be set back.
        with nullcontext() if self._is_beside else same_random_numbers(device):
            return self._cache.run("probe", lambda: self._wanted(call), device, traces=True)

    def _wanted(self, call: ModelCall) -> list[GraphRequest]:
        model, target = self._kinds.model(), self._kinds.target
        # A call at sizes that a network does not bear is made again at others: nobody needs to read of it.
        with untouched(model, target.host, getattr(call, "classes", ())), quiet(FAKE_TENSOR_LOGGER):
            return discover_requests(model, self._kinds.regions(), target.device, target.host, call)

    def _use_stored(self, graph: StoredGraph, failed: list[tuple[GraphIdentity, str]]) -> bool:
        """Use a graph from a file if a region is what it was made for, or note why that region cannot."""
        kind = self._kinds.of(graph.fingerprint)
        if kind is None or kind.closed:
            return False
        if foreign := self._foreign_to(graph):
            failed.append((graph, foreign))
            return False
        try:
            kind.add(graph.signature, self._cache.add_loaded(graph, self._requester, self._kinds.target.device))
            self._loaded.add(graph.fingerprint)
        except Exception as error:
            failed.append((graph, say("not loaded ({error})", error=one_line(error))))
        return True

    def _foreign_to(self, graph: GraphIdentity) -> str:
        """Return what a graph was made for, if that is not this machine."""
        target = self._kinds.target
        different = _difference(graph.environment, environment(target.backend, target.device, target.host))
        return say("made for {different}", different=different) if different else ""

    def _serves(self, graph: GraphIdentity) -> bool:
        """Whether the kind of region that a graph was made for has a graph for its calls."""
        kind = self._kinds.of(graph.fingerprint)
        return kind.serves(graph.signature, [spec.hints for spec in graph.spec.inputs])

    def _request_like(self, identity: GraphIdentity) -> GraphRequest | None:
        region = self._kinds.region_of(identity.fingerprint)
        if region is None:
            return None
        try:
            return GraphRequest.like(identity, region, self._kinds.target.device)
        except ValueError as error:
            log.warning("A graph of %s that a file lists makes no sense here: %s.", region.path, error)
            return None

    def _refusals_of(self, request: GraphRequest) -> Mapping[str, Reason]:
        return self._kinds.of(request.fingerprint).refusals

    def _is_missing(self, request: GraphRequest) -> bool:
        kind = self._kinds.of(request.fingerprint)
        return not kind.closed and not kind.serves(request.signature.text, request.hints)

    def _get(self, request: GraphRequest) -> Outcome:
        place = CompileIn.WORKER_REQUIRED if self._is_beside else CompileIn.PROCESS
        return self._cache.get_or_refuse(request, self._requester, place)

    def _settle(self, outcome: Outcome, done: int, total: int) -> Progress:
        """Give a kind its graph, or the reason why it has none."""
        request, reason = outcome.request, None
        kind = self._kinds.of(request.fingerprint)
        if outcome.entry is not None:
            kind.add(request.signature.text, outcome.entry)
        else:
            reason = reason_of(outcome.error)
            if self._is_transient_mismatch(reason, request.fingerprint):
                self._met_another = True
            else:
                kind.mark_eager(request.signature.text, reason)
            log.warning("%s stays eager: %s", request.region, reason)
            log.debug("%s", request.region, exc_info=outcome.error)
        if outcome.source == "compiled":
            self.compiled.append(request.region)
        return Progress(done, total, request.region, outcome.source, outcome.seconds, reason)

    def _is_transient_mismatch(self, reason: Reason, fingerprint: str) -> bool:
        """Whether a worker was sent a region that had changed for a while, such as when a sampling ends."""
        if reason.code is not ReasonCode.CODE_DIFFERS or not self._is_beside:
            return False
        self._differed[fingerprint] += self._kinds.are_unchanged()
        return self._differed[fingerprint] < MAX_DIFFERENCES

    @property
    def _requester(self) -> Requester:
        target = self._kinds.target
        return Requester(target.backend, target.host, self._counters)

    @property
    def _is_beside(self) -> bool:
        """Whether a model may run while graphs are compiled."""
        return self._background is not None

    def _check_cancelled(self) -> None:
        """Let the host cancel, unless this goes on beside it: asking can answer for somebody else's prompt."""
        if not self._is_beside:
            self._kinds.target.host.check_cancelled()


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Name the first field in which two environments differ, or return nothing."""
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            values = {"theirs": theirs.get(name, "none"), "ours": ours.get(name, "none")}
            return say("{name} {theirs}, and this is {ours}", name=name, **values)
    return ""


def _foresees(requests: Iterable[GraphRequest], kind: RegionKind, signature: CallSignature) -> bool:
    """Whether a look ahead met calls of a region like this one, perhaps without its patches."""
    of_kind = (request.signature.text for request in requests if request.fingerprint == kind.fingerprint)
    return any(covers(met, signature.text) or covers(met, signature.unpatched) for met in of_kind)
