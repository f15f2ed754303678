from __future__ import annotations

import copy
import gc
import json
import logging
import threading
import weakref
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.jobs import CompileJobs
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache.graph_cache import MAX_SIGNATURES, GraphCache
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime.graph_supply import MAX_NOTED, CannotCallAhead
from compiled_graphs.compiler.runtime.running_call import RunningCall, entered
from compiled_graphs.compiler.storage.graph_file import StoredGraph, read_manifest, write_graphs
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust
from compiled_graphs.compiler.tracing.call_lock import call_lock
from compiled_graphs.compiler.tracing.shape_discovery import SMALL
from networks import (
    WIDTH,
    ConvolutionNetwork,
    KeywordBlock,
    OptionsBlock,
    Stack,
    StreamNetwork,
    TransformerBlock,
    call,
    call_with,
    compile_network,
    install,
    said,
    sizes,
    transformer,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("traced_once")

SIZES = [
    sizes(batch=1, height=8, width=8, tokens=16),
    sizes(batch=4, height=6, width=10, tokens=7),
    sizes(batch=3, height=5, width=13, tokens=1),
    sizes(batch=1, height=1, width=2, tokens=77),
]


class Pyramid(nn.Module):
    """Two kinds of region in one model."""

    def __init__(self):
        super().__init__()
        self.first = transformer(depth=2)
        self.second = transformer(depth=2, eps=1e-5)

    def forward(self, x):
        return self.second(self.first(x))

    def inputs(self, at):
        return self.first.inputs(at)


class BrokenBackend(EagerBackend):
    def compile(self, exported):
        raise RuntimeError("internal compiler error\nwith details")


class Program(Host):
    """A host whose user stops after a number of questions."""

    def __init__(self, allowed):
        self.left = allowed

    def check_cancelled(self):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError

    def is_cancellation(self, error):
        return isinstance(error, InterruptedError)


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs)


def masks(at):
    return torch.randn(at.batch, 1, at.tokens, at.tokens)


@pytest.mark.parametrize("network", [ConvolutionNetwork(), transformer(), StreamNetwork()], ids=["conv", "dit", "in"])
def test_one_graph_serves_every_block_and_every_size(registry, network):
    reference = copy.deepcopy(network)
    compiled = compile_network(network, registry)
    assert compiled.counters.compiles == 1
    with compiled.counters.expect(compiles=0, retired=0, calls=len(SIZES) * len(network.blocks)):
        for at in SIZES:
            inputs = network.inputs(at)
            same(network(*[t.clone() for t in inputs]), reference(*inputs))
    assert not compiled.counters.eager_calls


def test_sizes_of_one_are_verified_on_their_own(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    for batch, tokens, proven in ((2, 7, 1), (3, 9, 0), (1, 7, 1), (1, 8, 0), (2, 1, 1), (1, 1, 1), (1, 1, 0)):
        with compiled.counters.expect(verifications=proven):
            network(*network.inputs(sizes(batch=batch, tokens=tokens)))


def test_without_verification_the_first_call_goes_to_the_graph(registry):
    network = transformer()
    compiled = compile_network(network, registry, verify=False)
    with compiled.counters.expect(verifications=0, calls=2):
        network(*network.inputs(sizes()))
    assert not compiled.counters.eager_calls


def test_an_optional_input_makes_a_second_graph_beside_the_first(registry):
    network = transformer()
    reference = copy.deepcopy(network)
    running = []
    compiled = compile_network(network, registry, current_call=lambda: running[-1])
    x = network.inputs(sizes())[0]
    network(x)
    running.append(call_with(mask=masks))
    with compiled.counters.expect(compiles=1):
        mask = masks(sizes())
        same(network(x, mask), reference(x, mask))
    with compiled.counters.expect(compiles=0, verifications=0, from_memory=0):
        same(network(x), reference(x))
        same(network(x, mask), reference(x, mask))
    assert not compiled.counters.eager_calls


def test_a_call_that_was_not_foreseen_stays_eager_without_a_way_to_repeat_it(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    network(network.inputs(sizes())[0], masks(sizes()))
    assert compiled.counters.eager_calls == {Reason(ReasonCode.UNFORESEEN): 2}
    assert compiled.summary().reasons == (Reason(ReasonCode.UNFORESEEN),)
    assert compiled.summary().compiled == 1


def test_without_preparation_a_model_compiles_when_it_is_first_called(registry):
    network = transformer()
    compiled = install(network, registry, current_call=lambda: call)
    assert compiled.summary().waiting == 1
    with compiled.counters.expect(compiles=1):
        network(*network.inputs(sizes()))
    assert (compiled.summary().compiled, compiled.summary().waiting) == (1, 0)


class ScaledBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        return x + self.layer(x) * scale


def test_a_call_that_differs_from_the_repeated_one_in_a_number_varies_its_sizes_as_that_does(registry):
    network = Stack(ScaledBlock)
    compiled = compile_network(network, registry, current_call=lambda: call)  # repeated without the number
    reference = copy.deepcopy(network)
    for at in SIZES:
        with compiled.counters.expect(compiles=int(at is SIZES[0])):
            x = network.inputs(at)[0]
            same(network(x, 0.5), reference(x, 0.5))
    assert not compiled.counters.eager_calls


def test_a_model_that_cannot_be_repeated_stays_eager_for_a_reason(registry):
    def failing(network, at):
        raise ValueError("needs data\nand more")

    network = transformer()
    compiled = install(network, registry, current_call=lambda: failing)
    network(*network.inputs(sizes()))
    assert compiled.counters.eager_calls == {Reason(ReasonCode.SIZES_UNCLEAR, "ValueError: needs data"): 2}


def counted(network, at):
    return network(*network.inputs(at), shift=at.tokens)


@pytest.mark.parametrize("ahead", [True, False])
def test_an_int_that_follows_the_sizes_is_a_dynamic_dimension(registry, ahead):
    network = Stack(OptionsBlock)
    reference = copy.deepcopy(network)
    compiled = install(network, registry, current_call=lambda: counted)
    if ahead:
        compiled.prepare(counted)
    for at, shift in ((sizes(), 7), (sizes(tokens=12), 12), (sizes(tokens=12), 5), (sizes(batch=1, tokens=4), 2)):
        x = network.inputs(at)[0]
        same(network(x, shift=shift), reference(x, shift=shift))
    assert compiled.counters.compiles == 1
    assert compiled.counters.eager_calls == {}


@pytest.mark.parametrize("shift", [0, 1, -3])
def test_an_int_that_is_no_length_is_never_taken_for_one(registry, shift):
    network = Stack(OptionsBlock)
    reference = copy.deepcopy(network)
    compiled = install(network, registry, current_call=lambda: counted)
    compiled.prepare(counted)
    x = network.inputs(sizes())[0]
    same(network(x, shift=shift), reference(x, shift=shift))
    assert compiled.counters.compiles == 1


def test_a_graph_with_a_size_among_its_arguments_serves_the_next_process(tmp_path):
    for compiles in (1, 0):
        network = Stack(OptionsBlock)
        compiled = install(network, Registry(GraphCache(FolderStore(tmp_path))))
        compiled.prepare(counted, name="forward")
        x = network.inputs(sizes(tokens=9))[0]
        same(network(x, shift=9), copy.deepcopy(network)(x, shift=9))
        assert (compiled.counters.compiles, compiled.counters.eager_calls) == (compiles, {})


def test_another_models_weights_use_the_same_graph_and_are_never_mixed(registry):
    networks = [transformer(), transformer()]
    references = [copy.deepcopy(network) for network in networks]
    compiled = [compile_network(network, registry) for network in networks]
    assert [model.counters.compiles for model in compiled] == [1, 0]
    x = networks[0].inputs(sizes())[0]
    for _ in range(2):
        for network, reference in zip(networks, references, strict=True):
            same(network(x), reference(x))
    assert not torch.equal(networks[0](x), networks[1](x))
    assert [model.counters.eager_calls for model in compiled] == [{}, {}]


def test_the_second_model_need_not_verify_what_the_first_has_proven(registry):
    one, two = transformer(), transformer()
    compile_network(one, registry)
    compiled = compile_network(two, registry)
    one(*one.inputs(sizes()))
    with compiled.counters.expect(verifications=0, calls=2):
        two(*two.inputs(sizes()))


def test_a_compiler_that_raises_leaves_the_region_eager_with_its_reason(registry, caplog):
    network = transformer()
    reference = copy.deepcopy(network)
    compiled = compile_network(network, registry, BrokenBackend())
    x = network.inputs(sizes())[0]
    same(network(x), reference(x))
    reason = Reason(ReasonCode.ERROR, "RuntimeError: internal compiler error")
    assert compiled.counters.eager_calls == {reason: 2}
    assert (compiled.summary().eager, compiled.summary().reasons) == (1, (reason,))
    assert said(caplog) == [f"TransformerBlock (blocks.0) stays eager: {reason}"]


def test_a_region_that_cannot_be_exported_stays_eager_while_others_compile(registry):
    class Stateful(TransformerBlock):
        def forward(self, x, mask=None):
            return super().forward(x, mask) * self.table

    network = Pyramid()
    network.second = Stack(Stateful)
    for block in network.second.blocks:
        block.table = torch.full((1,), 2.0)
    compiled = install(network, registry)
    reports = []
    compiled.prepare(lambda weightless, at: _first_only(weightless, at), reports.append)
    assert [report.source for report in reports] == ["", "compiled"]
    assert compiled.summary().reasons == (Reason(ReasonCode.STRAY_TENSOR, "table"),)
    x = network.inputs(sizes())[0]
    same(network(x), network.second(network.first(x)))
    summary = compiled.summary()
    assert (summary.regions, summary.compiled, summary.eager) == (2, 1, 1)


def _first_only(network, at):
    """The second stage's tensors are no fake ones; a real host would put them into the call."""
    x = network.first(*network.inputs(at))
    for block in network.second.blocks:
        block.table = torch.full((1,), 2.0)
    return network.second(x)


def test_a_block_that_writes_its_weights_stays_eager(registry):
    class Counting(TransformerBlock):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x):
            self.steps.add_(1)
            return super().forward(x) * self.steps

    network = Stack(Counting)
    compiled = compile_network(network, registry)
    for _ in range(3):
        network(*network.inputs(sizes()))
    assert [block.steps.item() for block in network.blocks] == [3.0, 3.0]
    assert compiled.counters.eager_calls == {Reason(ReasonCode.WRITES_WEIGHTS): 6}


def test_a_block_that_remembers_things_in_a_dict_keeps_working(registry):
    class Remembering(TransformerBlock):
        def __init__(self):
            super().__init__()
            self.positions = {}

        def forward(self, x):
            if x.shape[1] not in self.positions:
                self.positions[x.shape[1]] = torch.arange(x.shape[1])[:, None]
            return super().forward(x) + self.positions[x.shape[1]]

    network = Stack(Remembering)
    reference = copy.deepcopy(network)
    compile_network(network, registry)
    for tokens in (11, 13, 7):
        x = network.inputs(sizes(tokens=tokens))[0]
        same(network(x), reference(x))


def test_a_compiler_that_hangs_leaves_the_region_eager_and_later_jobs_are_refused():
    hangs, release = threading.Event(), threading.Event()

    class Hanging(EagerBackend):
        def compile(self, exported):
            hangs.set()
            release.wait()
            return super().compile(exported)

    def wait(thread, limit):
        """The time is over when the compiler hangs, and not before, however slow the machine is."""
        while thread.is_alive() and not hangs.is_set():
            thread.join(0.01)

    network, reports = Pyramid(), []
    compiled = install(network, Registry(GraphCache(jobs=CompileJobs(wait))), Hanging())
    compiled.prepare(call, reports.append)
    assert [report.reason.code for report in reports[1:]] == [ReasonCode.TIMEOUT, ReasonCode.HANGS]
    x = network.inputs(sizes())[0]
    same(network(x), network.second(network.first(x)))
    assert sum(compiled.counters.eager_calls.values()) == 8
    release.set()


def test_a_cancelled_preparation_keeps_what_is_done(registry):
    network = Pyramid()
    compiled = install(network, registry, host=Program(allowed=1))
    with pytest.raises(InterruptedError):
        compiled.prepare(call)
    assert (compiled.summary().compiled, compiled.summary().waiting) == (1, 1)
    again = install(network, registry)
    again.prepare(call)
    assert (again.counters.from_memory, again.counters.compiles) == (1, 1)


class Asked:
    """A model call that counts how often it is made."""

    def __init__(self):
        self.times = 0

    def __call__(self, weightless, at):
        self.times += 1
        call(weightless, at)


def prepared_in_a_new_process(folder, asked, network, name="forward"):
    compiled = install(network, Registry(GraphCache(FolderStore(folder))))
    compiled.prepare(asked, name=name)
    return compiled


def test_what_a_call_wants_is_noted_for_the_next_process(tmp_path):
    asked = Asked()
    for compiles in (1, 0):
        compiled = prepared_in_a_new_process(tmp_path, asked, transformer())
        assert asked.times == 2  # at two sizes, once
        assert (compiled.counters.compiles, compiled.counters.from_disk) == (compiles, 1 - compiles)
        assert compiled.summary().compiled == 1
    prepared_in_a_new_process(tmp_path, asked, transformer(eps=1e-3))
    prepared_in_a_new_process(tmp_path, asked, transformer(), name="another")
    assert asked.times == 6


def cannot(weightless, at):
    raise ValueError("no conditions")


@pytest.mark.parametrize("probe", [cannot, call], ids=["nothing foreseen", "another call foreseen"])
def test_what_a_running_call_wants_is_noted_for_the_next_process(probe, tmp_path):
    more = call_with(mask=lambda at: torch.ones(at.batch, at.tokens, 1))
    for is_first in (True, False):
        network = Masked()
        (x,), mask = network.inputs(sizes(tokens=11)), torch.randn(2, 11, 1)
        expected = network(x, mask)
        registry = Registry(GraphCache(FolderStore(tmp_path)))
        compiled = install(network, registry, current_call=lambda: more)
        with pytest.raises(CannotCallAhead) if is_first and probe is cannot else nullcontext():
            compiled.prepare(probe, name="forward")
        ahead = compiled.counters.compiles, compiled.counters.from_disk
        assert torch.equal(network(x, mask), expected)
        made = compiled.counters.compiles, compiled.counters.from_disk
        assert made[0] == ahead[0] + is_first
        assert is_first or made == ahead
        again = install(network, registry, current_call=lambda: more)
        again.prepare(probe, name="forward")
        with totals.expect(compiles=0):
            assert torch.equal(network(x, mask), expected)
        assert again.counters.eager_calls == {}


def test_a_call_with_an_empty_input_is_noted_for_the_next_process(tmp_path):
    silent = call_with(mask=lambda at: torch.ones(at.batch, 0, 1))
    for ahead, later in (((1, 0), 2), ((0, 2), 0)):
        network = Masked()
        compiled = install(network, Registry(GraphCache(FolderStore(tmp_path))), current_call=lambda: silent)
        compiled.prepare(call_with(mask=lambda at: torch.ones(at.batch, at.tokens, 1)), name="forward")
        assert (compiled.counters.compiles, compiled.counters.from_disk) == ahead
        network(*network.inputs(sizes()), torch.ones(2, 0, 1))
        assert compiled.counters.compiles == later
        assert compiled.counters.eager_calls == {}


def test_a_note_of_running_calls_is_bounded(tmp_path):
    network = Masked()
    registry = Registry(GraphCache(FolderStore(tmp_path)))
    running = []
    compiled = install(network, registry, current_call=lambda: running[-1])
    compiled.prepare(call, name="forward")
    (x,) = network.inputs(sizes())
    for power in range(2, MAX_NOTED + 4):
        running.append(call_with(power=float(power)))
        network(x, power=float(power))
    (path,) = tmp_path.glob("*.wanted.json")
    assert len(json.loads(json.loads(path.read_text())["note"])) == MAX_NOTED


class Masked(nn.Module):
    """Its blocks may be given a mask."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))

    def inputs(self, at):
        return (torch.ones(at.batch, at.tokens, 16),)

    def forward(self, x, mask=None, power=1.0):
        for block in self.blocks:
            x = block(x, mask, power)
        return x


class MaskedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, mask, power):
        x = self.linear(x) * power
        return x if mask is None or not mask.numel() else x * mask


def test_graphs_that_were_used_last_are_loaded_before_anybody_asks(tmp_path):
    asked = Asked()
    prepared_in_a_new_process(tmp_path, asked, transformer())
    cache = GraphCache(FolderStore(tmp_path))
    recent, in_memory = cache.recent(), []

    def give_way():
        in_memory.append(len(cache._entries))

    cache.preload(recent, EagerBackend(), torch.device("cpu"), Host(), give_way)
    assert in_memory == [0]
    for expected in ((1, 0), (0, 1)):
        network = transformer()
        compiled = install(network, Registry(cache))
        with totals.expect(compiles=0):
            compiled.prepare(asked, name="forward")
        assert (compiled.counters.from_disk, compiled.counters.from_memory) == expected
    (entry,) = cache._entries.values()
    assert entry.source == "disk"


def test_graphs_of_other_versions_and_damaged_files_are_not_preloaded(tmp_path):
    prepared_in_a_new_process(tmp_path, Asked(), transformer())
    cache = GraphCache(FolderStore(tmp_path))
    (graph,) = cache.recent()
    cache.preload([replace(graph, environment={"torch": "1"})], EagerBackend(), torch.device("cpu"), Host())
    cache.preload([replace(graph, executable=b"damaged")], EagerBackend(), torch.device("cpu"), Host())
    assert not cache._entries
    (file,) = tmp_path.glob("*.graph.safetensors")
    file.write_bytes(b"damaged")
    assert cache.recent() == []
    assert GraphCache().recent() == []


@pytest.mark.parametrize("network", [lambda: transformer(depth=3), lambda: transformer().double()])
def test_another_network_of_blocks_of_the_same_code_is_asked_itself(network, tmp_path):
    asked = Asked()
    prepared_in_a_new_process(tmp_path, asked, transformer())
    prepared_in_a_new_process(tmp_path, asked, network())
    assert asked.times == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda notes: [],
        lambda notes: {},
        lambda notes: [1],
        lambda notes: [{"region": "block"}],
        lambda notes: [notes[0] | {"signature": "["}],
        lambda notes: [notes[0] | {"inputs": []}],
        lambda notes: [notes[0] | {"inputs": [[[0, 1, 16], [True, True, False]]]}],
        lambda notes: [notes[0] | {"inputs": [[[2, 1, 16], [True, True, False]]]}],
        lambda notes: [notes[0] | {"inputs": [[[2, 3, 16], [1, 1, 0]]]}],
        lambda notes: [notes[0] | {"inputs": [[[2, 3, "16"], [True, True, False]]]}],
        lambda notes: [notes[0] | {"inputs": [5]}],
        lambda notes: [notes[0] | {"inputs": 5}],
        lambda notes: [notes[0] | {"region": 5}],
        lambda notes: [notes[0] | {"fingerprint": ["a"]}],
        lambda notes: [notes[0] | {"signature": "[" * 100_000}],
        lambda notes: [notes[0] | {"signature": json.dumps([["list", [["int", 1]] * 100_000], []])}],
        lambda notes: 5,
        lambda notes: notes * 300,
    ],
)
def test_a_note_that_makes_no_sense_is_made_anew(damage, tmp_path):
    asked = Asked()
    prepared_in_a_new_process(tmp_path, asked, transformer())
    (note,) = tmp_path.glob("*.wanted.json")
    whole = note.read_bytes()
    edit_note(tmp_path, damage)
    compiled = prepared_in_a_new_process(tmp_path, asked, transformer())
    assert (asked.times, compiled.counters.from_disk) == (4, 1)
    assert note.read_bytes() == whole


def edit_note(folder, edit):
    """Write the only note of a store anew, as this machine would."""
    (path,) = folder.glob("*.wanted.json")
    store, name = FolderStore(folder), path.name.removesuffix(".wanted.json")
    store.put_note(name, json.dumps(edit(json.loads(store.note(name)))).encode())


def test_a_note_that_somebody_else_wrote_is_made_anew(tmp_path):
    asked = Asked()
    prepared_in_a_new_process(tmp_path, asked, transformer())
    (note,) = tmp_path.glob("*.wanted.json")
    whole = note.read_bytes()
    (wanted,) = json.loads(json.loads(whole)["note"])
    fixed = wanted | {"inputs": [[hints, [False] * len(hints)] for hints, _ in wanted["inputs"]]}
    for forged in ([fixed], [wanted], {"note": json.dumps([fixed]), "signature": json.loads(whole)["signature"]}):
        note.write_text(json.dumps(forged))
        asked.times = 0
        compiled = prepared_in_a_new_process(tmp_path, asked, transformer())
        assert (asked.times, compiled.counters.from_disk) == (2, 1)
        assert note.read_bytes() == whole


def other_signatures(notes, count):
    """The same block, called with a number more, another one each time."""
    ((outline, *rest),) = [json.loads(notes[0]["signature"])]
    texts = [json.dumps([[*outline[:1], [*outline[1], [["str", "n"], ["int", n]]]], *rest]) for n in range(count)]
    return [notes[0] | {"signature": text} for text in texts]


@pytest.mark.parametrize(("count", "asks"), [(MAX_SIGNATURES, 2), (MAX_SIGNATURES + 1, 4), (300, 4)])
def test_a_note_of_more_graphs_than_a_block_may_have_is_made_anew(tmp_path, monkeypatch, count, asks):
    asked = Asked()
    prepared_in_a_new_process(tmp_path, asked, transformer())
    edit_note(tmp_path, lambda notes: other_signatures(notes, count))
    monkeypatch.setattr(GraphCache, "get_or_compile_all", lambda *_: iter(()))  # what is wanted is the question
    prepared_in_a_new_process(tmp_path, asked, transformer())
    assert asked.times == asks


def test_a_note_of_blocks_that_the_model_has_not_is_no_harm(tmp_path):
    asked, network = Asked(), transformer()
    prepared_in_a_new_process(tmp_path, asked, transformer())
    edit_note(tmp_path, lambda notes: [notes[0] | {"fingerprint": "another"}])
    (x,) = network.inputs(sizes())
    expected = network(x)
    assert prepared_in_a_new_process(tmp_path, asked, network).summary().waiting == 1
    torch.testing.assert_close(network(x), expected)


def test_what_a_call_by_name_wants_is_asked_once_while_the_model_lives_and_is_as_it_was(registry):
    network, asked = transformer(), []

    def counted(weightless, at):
        asked.append(at)
        call(weightless, at)

    for _ in range(2):
        install(network, registry).prepare(counted, name="forward")
    assert len(asked) == 2  # at two sizes, once
    install(network, registry).prepare(counted, name="another")
    assert len(asked) == 4
    compiled = install(network.double(), registry)
    compiled.prepare(counted, name="forward")
    assert (len(asked), compiled.summary().compiled) == (6, 1)
    gone = weakref.ref(network)
    del network, compiled
    gc.collect()
    assert gone() is None


def test_a_cancellation_while_a_running_call_compiles_reaches_the_host(registry):
    network = transformer()
    install(network, registry, host=Program(allowed=0), current_call=lambda: call)
    with pytest.raises(InterruptedError):
        network(*network.inputs(sizes()))


def test_progress_tells_each_graphs_place_source_and_region(registry):
    reports, again = [], []
    network = Pyramid()
    install(network, registry).prepare(call, reports.append)
    install(network, registry).prepare(call, again.append)
    assert [(report.done, report.total) for report in reports] == [(0, 2), (1, 2), (2, 2)]
    assert [report.source for report in reports + again] == ["", "compiled", "compiled", "", "memory", "memory"]
    assert reports[1].region == "TransformerBlock (first.blocks.0)"
    assert reports[1].seconds > 0


def test_the_models_own_error_comes_out_of_preparation_before_anything_is_compiled(registry):
    def failing(network, at):
        raise ZeroDivisionError

    network = transformer()
    compiled = install(network, registry)
    with compiled.counters.expect(compiles=0), pytest.raises(CannotCallAhead, match="ZeroDivisionError"):
        compiled.prepare(failing)


def test_preparation_inside_inference_mode_gives_graphs_that_run_in_it(registry):
    network = transformer()
    with torch.inference_mode():
        x = network.inputs(sizes())[0]
        expected = copy.deepcopy(network)(x)
        compiled = compile_network(network, registry)
        same(network(x), expected)
    assert compiled.summary().compiled == 1
    assert not compiled.counters.eager_calls


def test_a_summary_counts_kinds_of_region_not_blocks(registry):
    summary = compile_network(Pyramid(), registry).summary()
    assert (summary.regions, summary.compiled, summary.eager, summary.waiting) == (2, 2, 0, 0)
    assert summary.seconds > 0


def test_a_zero_size_parameter_is_no_obstacle(registry):
    network = transformer()
    for block in network.blocks:
        block.register_parameter("unused", nn.Parameter(torch.empty(0, WIDTH)))
    reference = copy.deepcopy(network)
    compiled = compile_network(network, registry)
    x = network.inputs(sizes())[0]
    same(network(x), reference(x))
    assert not compiled.counters.eager_calls


def test_a_tied_weight_is_no_obstacle(registry):
    network = transformer()
    for block in network.blocks:
        block.attention.out.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        block.extra = block.attention.out
    reference = copy.deepcopy(network)
    compiled = compile_network(network, registry)
    x = network.inputs(sizes())[0]
    same(network(x), reference(x))
    assert not compiled.counters.eager_calls


def test_forwards_name_the_regions(registry):
    network = ConvolutionNetwork()
    assert list(install(network, registry).forwards()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_region_whose_sizes_cannot_be_told_apart_does_not_keep_others_from_compiling(registry):
    def colliding(network, at):
        batch, tokens, others = (2, 2, 4) if at.batch == SMALL.batch else (3, 5, 3)
        network.first(*network.inputs(at))
        return network.second(torch.randn(batch, tokens, WIDTH), unused=torch.randn(others))

    network = Pyramid()
    network.second = Stack(KeywordBlock)
    compiled = install(network, registry)
    compiled.prepare(colliding)
    assert (compiled.summary().compiled, compiled.summary().waiting) == (1, 1)
    with entered(RunningCall(compiled, lambda: colliding)):
        network.second(torch.randn(2, 2, WIDTH), unused=torch.randn(4))
    (reason,) = compiled.counters.eager_calls
    assert reason.code is ReasonCode.SIZE_ARGUMENT


class Unreadable:
    @property
    def __dict__(self):
        raise RuntimeError("not for reading")


def test_a_block_that_cannot_be_described_runs_eagerly_with_the_reason(registry):
    network = transformer()
    x = network.inputs(sizes())[0]
    expected = network(x)
    network.blocks[0].secret = Unreadable()
    compiled = compile_network(network, registry)
    assert torch.allclose(network(x), expected, atol=1e-5)
    assert compiled.summary().compiled == 1
    (reason,) = compiled.counters.eager_calls
    assert reason == Reason(ReasonCode.OPAQUE_OBJECT, "secret: RuntimeError")


def written(network, trust):
    """A graph file of a network compiled elsewhere, and its graphs."""
    graphs = [StoredGraph.of(graph) for graph in compile_network(copy.deepcopy(network), Registry()).graphs()]
    return graphs, write_graphs(graphs, trust)


def test_graphs_of_a_file_serve_without_a_call_and_without_compiling(registry):
    network = transformer()
    graphs, _ = written(network, Trust())
    x = network.inputs(sizes())[0]
    expected = copy.deepcopy(network)(x)
    compiled = install(network, registry)
    with compiled.counters.expect(compiles=0, from_file=1):
        assert compiled.load(graphs) == []
        same(network(x), expected)
    assert not compiled.counters.eager_calls
    assert (compiled.summary().loaded, compiled.summary().compiled) == (1, 1)


def test_graphs_of_another_environment_are_not_loaded_and_the_field_that_differs_is_named(registry):
    network = Pyramid()
    graphs, _ = written(network, Trust())
    foreign = [replace(graph, environment={**graph.environment, "torch": "2.1"}) for graph in graphs]
    compiled = install(network, registry)
    (told,) = compiled.load(foreign)
    assert (
        told == f"2 graphs of the file were made for torch 2.1, and this is {torch.__version__}; compiled here instead"
    )
    assert compiled.summary().compiled == 0


def test_a_list_of_graphs_is_compiled_without_a_call_and_serves_it(registry, tmp_path):
    network = transformer()
    _, data = written(network, Trust(tmp_path / "elsewhere"))
    x = network.inputs(sizes())[0]
    expected = copy.deepcopy(network)(x)
    compiled = install(network, registry)
    told = []
    with compiled.counters.expect(compiles=1, from_file=0):
        compiled.compile_listed(read_manifest(data), told.append)
        same(network(x), expected)
    assert [(p.done, p.total, p.source) for p in told] == [(1, 1, "compiled")]
    assert not compiled.counters.eager_calls
    assert compiled.summary().compiled_here == ("TransformerBlock (blocks.0)",)


def test_what_a_list_leads_to_has_the_key_that_a_call_leads_to(registry):
    network = transformer()
    graphs, _ = written(network, Trust())
    install(network, registry).compile_listed(graphs)
    assert compile_network(network, registry).counters.from_memory == 1


@pytest.mark.parametrize(
    "change",
    [
        {"signature": "[]"},
        {"signature": "nonsense"},
        {"signature": '[["dict",[[["str","x"],["tensor",3,"torch.nonsense","cpu"]]]],[]]'},
        {"fingerprint": "another"},
        {"hints": (0, 7, WIDTH)},
        {"hints": (2**40, 7, WIDTH)},
        {"hints": ("2", 7, WIDTH)},
        {"hints": (2, 7)},
        {"symbolic": ()},
    ],
    ids=str,
)
def test_a_list_that_makes_no_sense_compiles_nothing(registry, change):
    network = transformer()
    graphs, _ = written(network, Trust())
    parts = {name: change.pop(name) for name in ("hints", "symbolic") if name in change}
    spec = graphs[0].spec
    bad = replace(graphs[0], spec=replace(spec, inputs=(replace(spec.inputs[0], **parts),)), **change)
    compiled = install(network, registry)
    with compiled.counters.expect(compiles=0):
        compiled.compile_listed([bad])
    compiled.prepare(call)
    assert compiled.summary().compiled == 1


def test_a_list_cannot_make_a_machine_compile_without_end(registry):
    network = transformer()
    graphs, _ = written(network, Trust())
    spec = graphs[0].spec
    texts = [graphs[0].signature.replace('"x"', f'"x{number}"') for number in range(50)]
    many = [replace(graphs[0], signature=text, spec=spec) for text in texts]
    compiled = install(network, registry)
    compiled.compile_listed(many)
    assert compiled.counters.compiles <= MAX_SIGNATURES
    assert len(compiled.summary().reasons) <= MAX_SIGNATURES


def test_a_cancelled_list_keeps_what_is_done(registry):
    class Cancelled(Exception):
        pass

    class Cancelling(Host):
        def check_cancelled(self):
            raise Cancelled

    graphs, _ = written(transformer(), Trust())
    network = transformer()
    compiled = install(network, registry, host=Cancelling())
    with pytest.raises(Cancelled):
        compiled.compile_listed(graphs)
    assert compiled.counters.compiles == 0


def test_calls_on_two_devices_run_at_the_same_time():
    """Each block waits until the other network is in one: no lock is held over a call."""
    networks, meet, results = [transformer(), transformer()], threading.Barrier(2), []
    for network in networks:
        compile_network(network, Registry(), verify=False)
    for network in networks:
        forward = network.blocks[0].forward
        network.blocks[0].forward = lambda x, forward=forward: (meet.wait(), forward(x))[1]
    x = torch.randn(2, 9, WIDTH)

    def run(network):
        with torch.no_grad(), entered(RunningCall(None)), call_lock.shared():
            results.append(network(x))

    threads = [threading.Thread(target=run, args=(network,)) for network in networks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2


def test_sizes_that_a_network_does_not_bear_leave_no_errors_in_the_log(registry, caplog):
    network = transformer()

    def odd(weightless, sizes):
        with suppress(RuntimeError):
            torch.ops.aten.mm(torch.empty(2, 3), torch.empty(4, 5))
        call(weightless, sizes)

    compiled = install(network, registry)
    compiled.prepare(odd)
    assert compiled.counters.compiles == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_network_that_calls_no_block_is_told_once(registry):
    network = transformer()
    compiled = install(network, registry)
    assert compiled.summary().calls_blocks, "nobody knows yet"
    calls = [RunningCall(compiled) for _ in range(3)]
    calls[2].regions = 1
    for running in calls:
        compiled.note_call(running)
        assert compiled.summary().calls_blocks == bool(running.regions)
    assert [running.had_setup for running in calls] == [True, False, False]
