from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.compile_cache.graph_cache import MAX_SIGNATURES, GraphCache
from compiled_graphs.compiler.identity import graph_spec
from compiled_graphs.compiler.identity.graph_spec import element_limit
from compiled_graphs.compiler.registry.registry import Registry
from compiled_graphs.compiler.runtime import region_forward
from compiled_graphs.compiler.runtime.region_kind import MAX_BRANCHES
from compiled_graphs.compiler.runtime.region_kinds import MAX_STATES
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.tracing import export
from networks import (
    WIDTH,
    ConvolutionNetwork,
    DictBlock,
    HostedBlock,
    KeywordBlock,
    OptionsBlock,
    PairBlock,
    ResidualBlock,
    Stack,
    StreamBlock,
    StreamNetwork,
    TableBlock,
    TransformerBlock,
    call,
    call_with,
    compile_network,
    install,
    said,
    sizes,
    transformer,
    weights_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("traced_once")

Tokens = namedtuple("Tokens", "x mask")


class Scaled(torch.Tensor):
    """A tensor that may stand for something else, as a quantised one does."""


class AlteredExecutable:
    """Passes results of a graph through a function of (results, number of the call)."""

    def __init__(self, executable, alter):
        self.executable, self.alter, self.calls = executable, alter, 0

    def __call__(self, *tensors):
        self.calls += 1
        return self.alter(self.executable(*tensors), self.calls)

    def to_bytes(self):
        return self.executable.to_bytes()


class AlteredBackend(EagerBackend):
    def __init__(self, alter):
        self.alter = alter

    def compile(self, exported):
        return AlteredExecutable(super().compile(exported), self.alter)

    def load(self, data, spec):
        return AlteredExecutable(super().load(data, spec), self.alter)


def fail_from(first, error):
    def alter(outputs, number):
        if number >= first:
            raise error
        return outputs

    return AlteredBackend(alter)


def wrong():
    return AlteredBackend(lambda outputs, number: [output * 2 for output in outputs])


def tokens(batch=2, count=7):
    return torch.randn(batch, count, WIDTH)


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs)


def pair(network, registry, **options):
    """A network, compiled, and a copy that is not."""
    reference = copy.deepcopy(network)
    compiled = compile_network(network, registry, **options)
    return reference, compiled


def reasons(compiled):
    return [str(reason) for reason in compiled.counters.eager_calls]


# Weights.


def add_in_place(network):
    for block in network.blocks:
        block.mlp[0].weight.add_(torch.linspace(-1, 1, WIDTH))


def replace_parameters(network):
    torch.manual_seed(1)
    for block in network.blocks:
        block.mlp[0].weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH), requires_grad=False)


def assign_data(network):
    torch.manual_seed(1)
    for block in network.blocks:
        block.mlp[0].weight.data = torch.randn(2 * WIDTH, WIDTH)


def load_weights(network):
    torch.manual_seed(1)
    network.load_state_dict({name: torch.randn_like(t) for name, t in network.state_dict().items()}, assign=True)


def transposed_layout(network):
    torch.manual_seed(1)
    for block in network.blocks:
        block.mlp[0].weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())


@pytest.mark.parametrize("change", [add_in_place, replace_parameters, assign_data, load_weights, transposed_layout])
def test_changed_weights_are_used_by_the_next_call_with_nothing_compiled(registry, change):
    network = transformer()
    reference, compiled = pair(network, registry)
    x = tokens()
    before = network(x)
    with compiled.counters.expect(compiles=0, retired=0):
        change(network)
        change(reference)
        same(network(x), reference(x))
    assert not torch.allclose(network(x), before)
    assert not reasons(compiled)


def test_weights_moved_to_another_layout_reach_the_graph_in_the_one_it_was_compiled_for(registry):
    seen = []

    class Watching(EagerBackend):
        def compile(self, exported):
            executable = super().compile(exported)

            def run(*tensors):
                seen.append([t.stride() for t in tensors[: len(exported.spec.weights)]])
                return executable(*tensors)

            return AlteredExecutable(run, lambda outputs, number: outputs)

    network = ConvolutionNetwork().to(memory_format=torch.channels_last)
    strides = [weight.stride() for weight in weights_of(network.blocks[0])]
    reference, compiled = pair(network, registry, backend=Watching())
    network.to(memory_format=torch.contiguous_format)
    assert [weight.stride() for weight in weights_of(network.blocks[0])] != strides
    inputs = network.inputs(sizes())
    same(network(*inputs), reference(*inputs))
    assert len(seen) >= len(network.blocks)
    assert all(found == strides for found in seen)
    assert not reasons(compiled)


@pytest.mark.parametrize("spread", ["at first", "later"])
def test_a_buffer_of_repeated_numbers_is_served_after_a_move_to_a_gpu_or_from_there(registry, spread):
    """A host that moves it makes it contiguous. Nothing can be copied to a tensor of repeated numbers."""
    network = Stack(TableBlock)
    spread_tables = [block.table for block in network.blocks]
    tables = [table.clone() for table in spread_tables]
    first, second = (spread_tables, tables) if spread == "at first" else (tables, spread_tables)
    for block, table in zip(network.blocks, first, strict=True):
        block.table = table
    reference, compiled = pair(network, registry)
    inputs = network.inputs(sizes())
    same(network(*inputs), reference(*inputs))
    for block, table in zip(network.blocks, second, strict=True):
        block.table = table
    same(network(*inputs), reference(*inputs))
    assert compiled.counters.compiles == 1
    assert not reasons(compiled)


def test_a_weight_that_is_not_finite_passes_verification(registry):
    network = transformer()
    for block in network.blocks:
        block.gate[3] = float("nan")
    reference, compiled = pair(network, registry)
    x = tokens()
    torch.testing.assert_close(network(x), reference(x), equal_nan=True)
    assert (compiled.counters.verifications, compiled.counters.retired) == (1, 0)


def test_a_buffer_set_anew_is_used_by_the_next_call(registry):
    class Buffered(TransformerBlock):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x) * self.table

    network = Stack(Buffered)
    reference, compiled = pair(network, registry)
    for block in (*network.blocks, *reference.blocks):
        block.table = torch.full((WIDTH,), 3.0)
    x = tokens()
    same(network(x), reference(x))
    assert not reasons(compiled)


# Eager calls and their reasons.


def wrapped_weight(block):
    block.gate = nn.Parameter(torch.ones(WIDTH).as_subclass(Scaled), requires_grad=False)


def hook_inside(block):
    block.mlp.register_forward_hook(lambda module, args, output: output * 2)


def hook_before_inside(block):
    block.mlp[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def forward_inside(block):
    block.mlp[1].forward = torch.neg


def other_dtype(block):
    block.gate = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.bfloat16))


def other_shape(block):
    block.gate = nn.Parameter(torch.full((1,), 0.5))


def other_module(block):
    block.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
    torch.nn.init.constant_(block.mlp[0].weight, 0.1)
    torch.nn.init.constant_(block.mlp[0].bias, 0.1)


def other_module_of_the_same_class(block):
    block.mlp[0] = nn.Linear(WIDTH, 2 * WIDTH)
    torch.nn.init.constant_(block.mlp[0].weight, 0.1)
    torch.nn.init.constant_(block.mlp[0].bias, 0.1)


def parametrized_weight(block):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    nn.utils.parametrize.register_parametrization(block.mlp[0], "weight", Doubled())


def removed_weight(block):
    block.mlp[0].bias = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (wrapped_weight, Reason(ReasonCode.WEIGHT_TYPE, "Scaled")),
        (hook_inside, Reason(ReasonCode.HOOK)),
        (hook_before_inside, Reason(ReasonCode.HOOK)),
        (forward_inside, Reason(ReasonCode.FORWARD_REPLACED)),
    ],
)
def test_a_block_changed_after_compiling_runs_eagerly_for_a_counted_reason(registry, change, reason):
    network = transformer()
    reference, compiled = pair(network, registry)
    x = tokens()
    unchanged = network(x)
    change(network.blocks[-1])
    change(reference.blocks[-1])
    with compiled.counters.expect(compiles=0, calls=2, retired=0):
        same(network(x), reference(x))
    assert compiled.counters.eager_calls == {reason: 1}
    assert not torch.allclose(network(x), unchanged) or change is wrapped_weight


@pytest.mark.parametrize("change", [other_dtype, other_shape, other_module, parametrized_weight, removed_weight])
def test_a_block_that_becomes_another_block_gets_the_graph_of_that(registry, change):
    network = transformer()
    reference, compiled = pair(network, registry, current_call=lambda: call)
    x = tokens()
    unchanged = network(x)
    change(network.blocks[-1])
    change(reference.blocks[-1])
    with compiled.counters.expect(compiles=1, retired=0, calls=4):
        for _ in range(2):
            same(network(x), reference(x))
    assert not reasons(compiled)
    assert not torch.allclose(network(x), unchanged)


def test_a_module_replaced_by_its_like_needs_no_other_graph(registry):
    network = transformer()
    reference, compiled = pair(network, registry)
    other_module_of_the_same_class(network.blocks[-1])
    other_module_of_the_same_class(reference.blocks[-1])
    x = tokens()
    with compiled.counters.expect(compiles=0):
        same(network(x), reference(x))
    assert not reasons(compiled)


def test_a_block_that_goes_back_to_what_it_was_needs_no_other_graph(registry):
    def call_in_its_dtype(network, sizes):
        network(*(x.to(network.blocks[0].gate.dtype) for x in network.inputs(sizes)))

    network = transformer()
    reference, compiled = pair(network, registry, current_call=lambda: call_in_its_dtype)
    x = tokens()
    with compiled.counters.expect(compiles=1):
        for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
            network.to(dtype)
            reference.to(dtype)
            same(network(x.to(dtype)), reference(x.to(dtype)))
    assert not reasons(compiled)


def test_a_model_that_moves_gets_graphs_for_where_it_is(registry):
    network = transformer()
    reference = copy.deepcopy(network)
    compiled = install(network, registry, device=torch.device("meta"), current_call=lambda: call)
    x = tokens()
    with compiled.counters.expect(compiles=1, calls=4):
        for _ in range(2):
            same(network(x), reference(x))
    assert not reasons(compiled)
    assert compiled.device == torch.device("cpu")


class Broken(Host):
    """A host that raises an error when it is asked whether a call has patches."""

    def __init__(self):
        self.error = None

    def patch_points(self, context, string_constants):
        if self.error:
            raise self.error
        return super().patch_points(context, string_constants)

    def is_cancellation(self, error):
        return isinstance(error, InterruptedError)


def test_an_error_while_a_graph_is_chosen_leaves_the_call_to_the_regions_own_code(registry, caplog):
    network, host, x = transformer(), Broken(), tokens()
    reference, compiled = pair(network, registry, host=host)
    host.error = RuntimeError("a stride that nobody knows")
    same(network(x), reference(x))
    assert reasons(compiled) == ["RuntimeError: a stride that nobody knows"]
    assert "TransformerBlock: a call runs uncompiled because of an error" in caplog.text
    host.error = None
    same(network(x), reference(x))
    assert sum(compiled.counters.eager_calls.values()) == len(network.blocks)


OTHERS_ERRORS = {
    "too little memory": torch.cuda.OutOfMemoryError("none left"),
    "too little memory, told by CUDA": RuntimeError("CUDA error: out of memory"),
    "cancelled": InterruptedError(),
    "interrupted": KeyboardInterrupt(),
}


@pytest.mark.parametrize("error", OTHERS_ERRORS.values(), ids=OTHERS_ERRORS)
def test_cancellations_and_lack_of_memory_are_for_the_host_to_handle(registry, error):
    network, host = transformer(), Broken()
    compiled = compile_network(network, registry, host=host)
    host.error = error
    with pytest.raises(type(error)):
        network(tokens())
    assert not reasons(compiled)


def test_an_error_within_a_capture_ends_the_capture(registry, monkeypatch):
    """The block's own code may wait for the GPU, and no capture bears that."""
    network, host = transformer(), Broken()
    compiled = compile_network(network, registry, host=host)
    host.error = RuntimeError("a stride that nobody knows")
    monkeypatch.setattr(region_forward, "_is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="a stride that nobody knows"):
        network(tokens())
    assert not reasons(compiled)


def test_a_setting_that_the_host_watches_is_followed(registry):
    class Scaled(TransformerBlock):
        def forward(self, x):
            return super().forward(x) * self.factor["now"]

    class Watching(Host):
        settings = frozenset({"factor"})

    network = Stack(Scaled)
    for block in network.blocks:
        block.factor = {"now": 1.0}
    reference, compiled = pair(network, registry, host=Watching(), current_call=lambda: call)
    x = tokens()
    for factor in (2.0, 3.0, 2.0):
        for model in (network, reference):
            model.blocks[0].factor["now"] = factor
        for _ in range(2):
            same(network(x), reference(x))
    assert compiled.counters.compiles == 3
    assert not reasons(compiled)


def test_a_change_that_comes_with_a_replaced_forward_is_not_forgotten_when_that_goes(registry):
    network = transformer()
    reference, compiled = pair(network, registry, current_call=lambda: call)
    x = tokens()
    for model in (network, reference):
        model.blocks[0].mlp.append(nn.LeakyReLU(0.5))
    inside = network.blocks[0].mlp[0]
    inside.forward = lambda x: type(inside).forward(inside, x)
    network(x)
    del inside.forward
    for _ in range(2):
        same(network(x), reference(x))
    assert reasons(compiled) == ["a replaced forward inside the region"]


def test_only_what_regions_are_now_is_told(registry):
    network = transformer()
    _, compiled = pair(network, registry, current_call=lambda: call)
    for block in network.blocks:
        block.mlp.append(nn.LeakyReLU(0.5))
    network(tokens())
    assert (compiled.summary().regions, compiled.summary().compiled) == (1, 1)
    assert len(compiled.graphs()) == 2


def test_a_block_that_keeps_changing_is_not_compiled_again_and_again(registry):
    network = transformer()
    _, compiled = pair(network, registry, current_call=lambda: call)
    for number in range(MAX_STATES + 2):
        network.blocks[0].mlp.append(nn.LeakyReLU(number / 100))
        network(tokens())
    assert compiled.counters.compiles == 1 + MAX_STATES
    assert reasons(compiled) == [f"a block that keeps changing (more than {MAX_STATES} times)"]
    compiled.counters.eager_calls.clear()
    for _ in range(MAX_STATES + 2):  # back to what has its graph
        del network.blocks[0].mlp[-1]
    network(tokens())
    assert not reasons(compiled)


def test_blocks_of_many_kinds_that_change_together_have_one_limit(registry):
    network = transformer()
    network.blocks[1].mlp.append(nn.Tanh())
    _, compiled = pair(network, registry, current_call=lambda: call)
    for number in range(MAX_STATES + 4):
        for block in network.blocks:
            block.mlp.append(nn.LeakyReLU(number / 100))
        network(tokens())
    assert compiled.counters.compiles == 2 + 2 * MAX_STATES


def test_a_deep_copy_of_a_module_runs_eagerly_on_its_own_weights(registry):
    network = transformer()
    _, compiled = pair(network, registry)
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied.blocks[0].gate.fill_(0.5)
        reference = transformer()
        reference.load_state_dict(copied.state_dict())
    x = tokens()
    with compiled.counters.expect(calls=0):
        same(copied(x), reference(x))


def test_a_hook_that_is_removed_makes_room_for_the_graph_again(registry):
    network = transformer()
    _, compiled = pair(network, registry)
    handle = network.blocks[0].mlp.register_forward_hook(lambda *args: None)
    network(tokens())
    handle.remove()
    before = compiled.counters.eager_calls.total()
    network(tokens())
    assert compiled.counters.eager_calls.total() == before == 1


def test_a_hook_in_a_new_table_of_hooks_acts(registry):
    """People remove all hooks of a layer by giving it another table."""
    network = transformer()
    reference, compiled = pair(network, registry)
    network(tokens())
    for each in (network, reference):
        layer = each.blocks[0].mlp
        layer._forward_hooks = OrderedDict()
        layer.register_forward_hook(lambda module, args, output: output * 2)
    x = tokens()
    same(network(x), reference(x))
    assert reasons(compiled) == [str(Reason(ReasonCode.HOOK))]


def test_a_change_that_a_missing_graph_had_described_is_followed(registry):
    """A graph that is missing in mid-sampling has all blocks described, also those that have changed before."""
    network = transformer()
    reference, compiled = pair(network, registry)
    network(tokens())
    network.blocks[0].eps = reference.blocks[0].eps = 0.5
    compiled._kinds.describe_again()
    assert compiled._kinds.are_unchanged()
    assert compiled.refresh()
    x = tokens()
    same(network(x), reference(x))
    assert not compiled.refresh()


def test_a_changed_block_whose_path_is_gone_runs_eagerly(registry):
    """Nodes that cache a first block put another list there, whose one member runs the blocks that were there."""
    network = transformer()
    reference, compiled = pair(network, registry)
    network(tokens())
    blocks, others = network.blocks, reference.blocks
    network.blocks = nn.ModuleList([nn.Sequential(*blocks)])
    for each in (blocks[1], others[1]):
        each.mlp[1] = nn.ReLU()
    x = tokens()
    same(network(x), reference(x))
    assert str(Reason(ReasonCode.MODULE_REPLACED)) in reasons(compiled)


def test_a_setting_of_a_block_whose_path_is_gone_is_followed(registry):
    """The block runs eagerly from the next look at the network on, until its path leads to it again."""
    network = transformer()
    reference, compiled = pair(network, registry)
    network(tokens())
    blocks = network.blocks
    network.blocks = nn.Sequential(OrderedDict(all=nn.Sequential(*blocks)))
    for each in (blocks[1], reference.blocks[1]):
        each.eps = 0.5
    x = tokens()
    assert compiled.refresh()
    same(network(x), reference(x))
    assert str(Reason(ReasonCode.MODULE_REPLACED)) in reasons(compiled)
    assert not compiled.refresh()
    network.blocks = blocks
    for each in (blocks[1], reference.blocks[1]):
        each.eps = blocks[0].eps
    assert compiled.refresh()
    before = compiled.counters.eager_calls.total()
    same(network(x), reference(x))
    assert compiled.counters.eager_calls.total() == before


def test_hooks_on_the_region_itself_run_around_the_graph(registry):
    network = transformer()
    reference, compiled = pair(network, registry)
    for model in (network, reference):
        model.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
    x = tokens()
    same(network(x), reference(x))
    assert not reasons(compiled)


def test_weights_wrapped_before_compiling_keep_the_kind_eager(registry):
    network = transformer()
    for block in network.blocks:
        wrapped_weight(block)
    compiled = compile_network(network, registry)
    for block in network.blocks:
        block(tokens())
    assert compiled.counters.compiles == 0
    assert compiled.counters.eager_calls == {Reason(ReasonCode.WEIGHT_TYPE, "Scaled"): 2}
    assert compiled.summary().eager == 1


def test_weights_without_storage_are_left_to_eager(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    network.blocks[0].to("meta")
    with pytest.raises(RuntimeError):
        network(tokens())
    assert reasons(compiled) == ["weights on meta while the model runs on cpu"]


def test_a_tensor_subclass_as_input_runs_eagerly(registry):
    network = transformer()
    reference, compiled = pair(network, registry)
    x = tokens().as_subclass(Scaled)
    same(network(x), reference(x))
    assert compiled.counters.eager_calls == {Reason(ReasonCode.TENSOR_TYPE, "Scaled"): 2}


def test_a_parameter_as_input_is_served(registry):
    network = transformer()
    reference, compiled = pair(network, registry)
    x = nn.Parameter(tokens(), requires_grad=False)
    same(network(x), reference(x))
    assert not reasons(compiled)


def test_gradients_run_eagerly_and_flow(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    with torch.enable_grad():
        network(tokens()).sum().backward()
    assert network.blocks[0].gate.grad is not None
    assert compiled.counters.eager_calls == {Reason(ReasonCode.GRADIENTS): 2}


def test_autocast_runs_eagerly(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(tokens())
    assert compiled.counters.eager_calls == {Reason(ReasonCode.AUTOCAST): 2}


@pytest.mark.parametrize(
    ("argument", "kind"),
    [(object(), "object"), ({1}, "set"), (OrderedDict(a=1), "OrderedDict"), (Tokens(tokens(), 1), "Tokens")],
    ids=["object", "set", "ordered dict", "named tuple"],
)
def test_an_argument_no_graph_can_take_runs_eagerly_and_is_named(registry, argument, kind):
    network = Stack(KeywordBlock)
    reference, compiled = pair(network, registry, current_call=lambda: call_with(extra=argument))
    x = tokens()
    same(network(x, extra=argument), reference(x, extra=argument))
    assert compiled.counters.eager_calls == {Reason(ReasonCode.ARGUMENT_TYPE, kind): 2}


def test_an_argument_no_graph_can_take_is_not_kept_alive(registry):
    class Patch:
        pass

    network = Stack(KeywordBlock)
    compile_network(network, registry)
    patch = Patch()
    network(tokens(), extra=patch)
    gone = weakref.ref(patch)
    del patch
    gc.collect()
    assert gone() is None


class Halves(TransformerBlock):
    """Its code takes another branch beyond 1000 tokens, and one for each length beyond 2000."""

    def forward(self, x):
        count = x.shape[1]
        if count > 2000:
            return super().forward(x).roll(int(count), 1)
        return super().forward(x).flip(1) if count > 1000 else super().forward(x)


def test_code_that_branches_on_a_size_gets_a_graph_for_each_branch(registry):
    network = Stack(Halves)
    reference, compiled = pair(network, registry)
    for count, compiles in ((1000, 1), (1001, 2), (1002, 2), (999, 2)):
        x = tokens(count=count)
        same(network(x), reference(x))
        assert compiled.counters.compiles == compiles
    assert compiled.counters.eager_calls == {}


def test_branches_without_end_run_eagerly(registry):
    network = Stack(Halves)
    reference, compiled = pair(network, registry)
    for count in (7, 2001, 2002, 2003, 2004, 2005, 7):
        x = tokens(count=count)
        same(network(x), reference(x))
    assert compiled.counters.compiles == MAX_BRANCHES
    assert compiled.counters.eager_calls == {Reason(ReasonCode.SIZES_OUTSIDE): 4}


class ImageOrVideo(nn.Module):
    """A block of a video's network that does something else for one frame, as CogVideoX's encoder does."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x) if x.shape[2] > 1 else x - self.conv(x)


class VideoNetwork(Stack):
    def inputs(self, at):
        return (torch.randn(at.batch, 4, at.tokens, at.height, at.width),)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("lengths", [(1, 1, 7, 5, 1), (5, 1, 9, 1)])
def test_one_frame_gets_a_graph_of_its_own_where_the_code_differs(registry, verify, lengths):
    network = VideoNetwork(ImageOrVideo)
    reference, compiled = pair(network, registry, verify=verify)
    for length in lengths:
        x = torch.randn(2, 4, length, 6, 9)
        same(network(x), reference(x))
    assert compiled.counters.compiles == 2
    assert compiled.counters.retired == 0
    assert compiled.counters.eager_calls == {}


class Turned(TransformerBlock):
    """Its code takes another branch beyond 1000 tokens."""

    def forward(self, x):
        return super().forward(x.flip(1) if x.shape[1] > 1000 else x)


def test_a_call_with_too_many_elements_compiles_nothing(registry, monkeypatch):
    def limits(request, inputs):
        return (element_limit(str(inputs[0].numel())),)

    monkeypatch.setattr(graph_spec, "MAX_ELEMENTS", 2100 * WIDTH)
    monkeypatch.setattr(export, "_chunk_limits", limits)  # a CPU's graphs have no limits of their own
    network = Stack(Turned)
    reference, compiled = pair(network, registry)
    for batch, count, compiles in ((2, 1000, 1), (3, 1000, 1), (4, 900, 1), (2, 1001, 2), (3, 1001, 2)):
        x = tokens(batch, count)
        same(network(x), reference(x))
        assert compiled.counters.compiles == compiles, (batch, count)
    assert compiled.counters.eager_calls == {Reason(ReasonCode.TOO_LARGE): 6}


def test_an_empty_input_runs_eagerly(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    assert network(tokens(batch=0)).shape == (0, 7, WIDTH)
    assert reasons(compiled) == ["sizes outside of what the graph was traced for"]


class Accompanied(PairBlock):
    """Adds a sound to a video, if there is one. Its code takes another branch for long videos."""

    def forward(self, video, sound):
        video = self.query(video.flip(1) if video.shape[1] > 1000 else video)
        return video + sound.mean(1, keepdim=True) if sound.numel() else video


@pytest.mark.parametrize("first", [0, 5], ids=["silent first", "sound first"])
def test_a_call_with_an_empty_input_has_a_graph_of_its_own(first, registry):
    def with_sound(length):
        return call_with(sound=lambda at: torch.ones(at.batch, length and at.height, WIDTH))

    network, running = Stack(Accompanied), [with_sound(first)]
    reference, compiled = pair(network, registry, probe=with_sound(first), current_call=lambda: running[-1])
    calls = (7, first, 1), (9, 5 - first, 2), (11, 6, 2), (5, 0, 2), (1001, 0, 3), (1002, 0, 3), (1001, 6, 4)
    for count, length, compiles in calls:
        x, sound = tokens(count=count), torch.randn(2, length, WIDTH)
        running.append(with_sound(length))
        same(network(x, sound=sound), reference(x, sound=sound))
        assert compiled.counters.compiles == compiles
    assert compiled.counters.eager_calls == {}


class Louder(PairBlock):
    """Writes to a sound, which may be empty."""

    def forward(self, video, sound, noise):
        sound.add_(noise)
        return self.query(video)


def test_empty_inputs_do_not_share_memory(registry):
    def silence(at):
        return torch.ones(at.batch, 0, WIDTH)

    network = Stack(Louder)
    reference, compiled = pair(network, registry, probe=call_with(sound=silence, noise=silence))
    x, nothing = tokens(), [torch.ones(2, 0, WIDTH) for _ in range(2)]
    same(network(x, *nothing), reference(x, *nothing))
    assert compiled.counters.compiles == 1
    assert compiled.counters.eager_calls == {}


def test_a_number_that_changes_at_every_call_compiles_a_bounded_number_of_times(registry):
    network = Stack(OptionsBlock)
    reference = copy.deepcopy(network)
    running = []
    compiled = install(network, registry, current_call=lambda: running[-1])
    x = tokens()
    for step in range(MAX_SIGNATURES + 4):
        scale = 1.0 + step / 8
        running.append(call_with(scale=scale))
        same(network(x, scale=scale), reference(x, scale=scale))
    assert compiled.counters.compiles == MAX_SIGNATURES
    (reason,) = compiled.counters.eager_calls
    assert reason.code is ReasonCode.MANY_SIGNATURES
    assert compiled.counters.eager_calls[reason] == 8


def test_static_arguments_choose_their_own_graphs(registry):
    network = Stack(OptionsBlock)
    reference = copy.deepcopy(network)
    running = []
    compiled = install(network, registry, current_call=lambda: running[-1])
    x = tokens()
    for _ in range(2):
        for options in ({"reverse": True}, {"shift": 1}, {"reverse": 1}, {"scale": 2.0}, {"scale": 2}, {}):
            running.append(call_with(**options))
            same(network(x, **options), reference(x, **options))
    assert not reasons(compiled)
    assert compiled.counters.compiles == 6


# The host.


class Program(Host):
    context_arguments = frozenset({"host_options"})
    weight_hooks = frozenset({"weight_function"})
    volatile_attributes = frozenset({"weight_function"})

    def placeholder_for(self, name, string_constants, patch_points):
        return {}

    def unsupported_patch(self, context, string_constants):
        patched = string_constants & (context.get("host_options") or {}).keys()
        return Reason(ReasonCode.PATCH, ", ".join(sorted(patched))) if patched else None


def hosted(registry):
    network = Stack(HostedBlock)
    reference = copy.deepcopy(network)
    return network, reference, compile_network(network, registry, host=Program(), probe=call_with(host_options={}))


@pytest.mark.parametrize("positional", [True, False])
def test_bookkeeping_may_change_at_every_call(registry, positional):
    network, reference, compiled = hosted(registry)
    x = tokens()
    for step in range(12):
        options = {"step": step, "sigmas": object()}
        args, kwargs = ((x, options), {}) if positional else ((x,), {"host_options": options})
        same(network(*args, **kwargs), reference(*args, **kwargs))
    assert compiled.counters.compiles == 1
    assert not reasons(compiled)


@pytest.mark.parametrize("positional", [True, False])
def test_a_patch_that_reaches_into_the_region_runs_eagerly(registry, positional):
    network, reference, compiled = hosted(registry)
    x, options = tokens(), {"block_patches": [torch.neg]}
    args, kwargs = ((x, options), {}) if positional else ((x,), {"host_options": options})
    network(x, host_options={})
    same(network(*args, **kwargs), reference(*args, **kwargs))
    assert compiled.counters.eager_calls == {Reason(ReasonCode.PATCH, "block_patches"): 2}


def test_functions_on_weights_run_eagerly_while_they_are_there(registry):
    network, _, compiled = hosted(registry)
    network.blocks[0].linear[0].weight_function = [torch.neg]
    network(tokens(), host_options={})
    network.blocks[0].linear[0].weight_function = []
    network(tokens(), host_options={})
    assert compiled.counters.eager_calls == {Reason(ReasonCode.WEIGHT_FUNCTION, "weight_function"): 1}


def test_a_forward_the_host_knows_to_be_clean_does_not_matter(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    activation = network.blocks[0].mlp[1]
    activation.forward = activation.forward
    network(tokens())
    assert not reasons(compiled)


# Inputs.


def test_one_tensor_given_twice_is_not_taken_for_two_later(registry):
    network = Stack(PairBlock)
    reference, compiled = pair(network, registry, probe=call_with(context=lambda at: tokens(at.batch, at.tokens)))
    x, other = tokens(), tokens()
    for arguments in ((x, x), (x, other), (other, x), (other, other)):
        same(network(*arguments), reference(*arguments))
    assert not reasons(compiled)


def test_keywords_in_another_order_reach_their_own_inputs(registry):
    network = Stack(PairBlock, depth=2)
    reference, compiled = pair(network, registry, probe=call_with(context=lambda at: tokens(at.batch, at.tokens)))
    x, other = tokens(), tokens()
    for block, plain in zip(network.blocks, reference.blocks, strict=True):
        same(block(context=other, x=x), plain(x, other))
        same(block(x=other, context=x), plain(other, x))
        same(block(context=x, x=x), plain(x, x))
        same(block(context=other, x=x), plain(x, other))
    assert not reasons(compiled)


STRIDED = {
    "transposed": lambda: torch.randn(2, WIDTH, 7).transpose(1, 2),
    "sliced": lambda: torch.randn(2, 14, WIDTH)[:, ::2],
    "offset": lambda: torch.randn(3, 7, WIDTH)[1:],
    "expanded": lambda: torch.randn(1, 7, WIDTH).expand(2, 7, WIDTH),
    "odd stride of a size of one": lambda: torch.randn(7 * WIDTH).as_strided((1, 7, WIDTH), (3, WIDTH, 1)),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_inputs_in_any_layout_are_served(registry, make):
    network = transformer()
    reference, compiled = pair(network, registry)
    for _ in range(2):
        x = make()
        same(network(x), reference(x))
    assert not reasons(compiled)


@pytest.mark.parametrize("make", [STRIDED["transposed"], STRIDED["sliced"], STRIDED["offset"], tokens])
@pytest.mark.parametrize("calls", [1, 2])
def test_inputs_the_region_writes_to_are_written_as_eager_does_in_any_layout(registry, make, calls):
    network = StreamNetwork()
    reference, compiled = pair(network, registry)
    for _ in range(calls):
        image, text = make(), tokens(count=5)
        theirs = image.clone()
        same(network(image, text), reference(theirs, text))
        same(image, theirs)
    assert not reasons(compiled)


def test_a_written_input_that_shares_memory_with_another_runs_eagerly(registry):
    network = StreamNetwork()
    reference, compiled = pair(network, registry)
    base = torch.randn(2, 12, WIDTH)
    copied = base.clone()
    same(network(base[:, :7], base[:, 5:]), reference(copied[:, :7], copied[:, 5:]))
    same(base, copied)
    assert compiled.counters.eager_calls[Reason(ReasonCode.ALIASED_INPUT)] == 1


def test_inputs_that_share_memory_unwritten_are_served(registry):
    network = Stack(PairBlock)
    reference, compiled = pair(network, registry, probe=call_with(context=lambda at: tokens(at.batch, at.tokens)))
    x = torch.randn(2, 14, WIDTH)
    same(network(x[:, :7], x[:, 7:]), reference(x[:, :7], x[:, 7:]))
    assert not reasons(compiled)


def test_channels_last_inputs_are_served(registry):
    network = ConvolutionNetwork()
    reference, compiled = pair(network, registry)
    x, emb = network.inputs(sizes())
    x = x.contiguous(memory_format=torch.channels_last)
    same(network(x, emb), reference(x, emb))
    assert not reasons(compiled)


@pytest.mark.parametrize("stride", [(16, 1, 16, 16), (112, 1, 112, 16), (112, 7, 7, 1)])
def test_a_graph_in_channels_last_gets_all_strides_of_a_map_of_one_row(registry, monkeypatch, stride):
    """cuDNN goes by those of sizes of one, too. `is_contiguous` does not."""
    seen = set()

    class Watching(EagerBackend):
        def compile(self, exported):
            executable = super().compile(exported)

            def run(*tensors):
                seen.add(tensors[len(exported.spec.weights)].stride())
                return executable(*tensors)

            return AlteredExecutable(run, lambda outputs, number: outputs)

    monkeypatch.setattr(
        export, "input_format", lambda module, shape, device: "channels_last" if len(shape) == 4 else "contiguous"
    )
    network = ConvolutionNetwork(16)  # no other test traces this one
    reference, _ = pair(network, registry, backend=Watching())
    x, emb = torch.empty_strided((1, 16, 1, 7), stride).copy_(torch.randn(1, 16, 1, 7)), torch.randn(1, 12)
    for _ in range(2):
        same(network.blocks[0](x, emb), reference.blocks[0](x, emb))
    assert seen == {(112, 1, 112, 16)}


class ActivatedInPlace(nn.Module):
    """Writes to its map, as some residual blocks do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(12, 12, 1)

    def forward(self, x):
        return self.conv(nn.functional.silu(x, inplace=True))


def test_a_graph_in_channels_last_writes_to_a_row_of_a_longer_map(registry, monkeypatch):
    monkeypatch.setattr(export, "input_format", lambda module, shape, device: "channels_last")
    network = Stack(ActivatedInPlace)
    network.inputs = lambda sizes: (torch.randn(1, 12, sizes.height, sizes.width),)
    reference, compiled = pair(network, registry)
    whole = torch.randn(1, 12, 4, 7).contiguous(memory_format=torch.channels_last)
    for rows in (whole[:, :, :1].clone(), whole[:, :, 1:2], whole[:, :, 2:3], whole[:, :, :1].contiguous()):
        theirs = rows.clone()
        same(network(rows), reference(theirs))
        same(rows, theirs)
    assert not reasons(compiled)


# Results.


def test_results_of_dicts_tuples_and_none_come_back_as_eager_gives_them(registry):
    class Dicts(Stack):
        def forward(self, x):
            return [block(x) for block in self.blocks]

    network = Dicts(DictBlock)
    reference, compiled = pair(network, registry)
    x = tokens()
    for _ in range(2):
        for ours, theirs in zip(network(x), reference(x), strict=True):
            assert ours.keys() == theirs.keys()
            assert ours["nothing"] is None
            assert isinstance(ours["pair"], tuple)
            same(ours, theirs)
    assert not reasons(compiled)


def test_a_result_that_is_an_input_comes_back_with_what_was_written(registry):
    network = StreamNetwork()
    reference, _ = pair(network, registry)
    for _ in range(2):
        image, text = network.inputs(sizes())
        ours, theirs = network.blocks[0](image.clone(), text), reference.blocks[0](image.clone(), text)
        assert ours[2] is None
        same(ours[:2], theirs[:2])


# Graphs that fail.


def test_a_wrong_graph_is_retired_at_its_first_call_and_the_result_is_eagers(registry, caplog):
    changes = []
    network = transformer()
    reference, compiled = pair(network, registry, backend=wrong(), on_change=lambda: changes.append(1))
    x = tokens()
    for _ in range(2):
        same(network(x), reference(x))
    assert (compiled.counters.retired, compiled.counters.verifications) == (1, 1)
    assert changes == [1]
    (reason,) = compiled.counters.eager_calls
    assert "the graph of TransformerBlock failed its check: relative error" in str(reason)
    assert compiled.counters.eager_calls[reason] == 4
    assert compiled.summary().compiled == 0
    assert compiled.summary().reasons == (reason,)
    assert len(said(caplog)) == 1


def test_a_graph_that_is_wrong_only_at_a_size_of_one_is_retired_there(registry):
    backend = AlteredBackend(lambda outputs, number: [t * 2 if t.shape[0] == 1 else t for t in outputs])
    network = transformer()
    reference, compiled = pair(network, registry, backend=backend)
    for batch in (2, 1, 1, 2):
        x = tokens(batch)
        same(network(x), reference(x))
    assert compiled.counters.retired == 1


def test_a_graph_that_writes_wrongly_into_an_input_is_retired(registry):
    class Forgetful(EagerBackend):
        def compile(self, exported):
            executable = super().compile(exported)
            return AlteredExecutable(lambda *tensors: executable(*[t.clone() for t in tensors]), lambda out, _: out)

    network = StreamNetwork()
    reference, compiled = pair(network, registry, backend=Forgetful())
    image, text = network.inputs(sizes())
    theirs = image.clone()
    same(network(image, text), reference(theirs, text))
    same(image, theirs)
    assert compiled.counters.retired == 1


def test_a_graph_that_is_retired_in_one_model_is_not_used_by_another(registry):
    backend = wrong()
    one, two = transformer(), transformer()
    reference = copy.deepcopy(two)
    compile_network(one, registry, backend)
    compiled = compile_network(two, registry, backend)
    one(tokens())
    x = tokens()
    same(two(x), reference(x))
    assert compiled.counters.retired == 0
    assert "failed its check" in reasons(compiled)[0]


def test_a_graph_that_raises_at_its_first_call_is_retired(registry):
    network = transformer()
    reference, compiled = pair(network, registry, backend=fail_from(1, RuntimeError("launch failed")))
    x = tokens()
    same(network(x), reference(x))
    assert compiled.counters.retired == 1
    assert "RuntimeError: launch failed" in reasons(compiled)[0]


def test_a_graph_that_raises_later_falls_back_to_eager(registry):
    changes = []
    network = transformer()
    backend = fail_from(3, RuntimeError("launch failed\nat address 1"))
    reference, compiled = pair(network, registry, backend=backend, on_change=lambda: changes.append(1))
    x = tokens()
    for _ in range(3):
        same(network(x), reference(x))
    assert compiled.counters.retired == 1
    assert changes == [1]
    assert reasons(compiled) == ["the graph of TransformerBlock failed its check: RuntimeError: launch failed"]


@pytest.mark.parametrize(("first", "stays"), [(1, False), (3, True)], ids=["at its check", "later"])
def test_a_loaded_graph_stays_in_the_store_if_it_was_right_before_it_raised(tmp_path, first, stays):
    caches = [GraphCache(FolderStore(tmp_path)) for _ in range(2)]
    compile_network(transformer(), Registry(caches[0]), AlteredBackend(lambda outputs, number: outputs))
    network = transformer()
    reference, compiled = pair(network, Registry(caches[1]), backend=fail_from(first, RuntimeError("launch failed")))
    assert compiled.counters.from_disk == 1
    kept, x = caches[1].stored_keys(), tokens()
    evicted = []
    caches[1].store.discard = evicted.append
    for _ in range(2):
        same(network(x), reference(x))
    assert kept
    assert evicted == ([] if stays else list(kept))
    assert compiled.counters.retired == 1


def test_an_error_without_a_message_is_a_reason_too(registry):
    network = transformer()
    reference, compiled = pair(network, registry, backend=fail_from(2, AssertionError()))
    x = tokens()
    same(network(x), reference(x))
    assert "AssertionError" in reasons(compiled)[0]


def test_a_graph_that_raises_while_it_writes_to_an_input_is_not_run_a_second_time(registry):
    network = StreamNetwork()
    compile_network(network, registry, fail_from(2, RuntimeError("launch failed")))
    with pytest.raises(RuntimeError, match="launch failed"):
        network(*network.inputs(sizes()))


def test_running_out_of_memory_reaches_the_host_and_retires_nothing(registry):
    network = transformer()
    compiled = compile_network(network, registry, fail_from(2, torch.cuda.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        network(tokens())
    assert compiled.counters.retired == 0


def test_a_check_without_memory_gives_eagers_result(registry):
    network = transformer()
    out_of_memory = fail_from(1, torch.cuda.OutOfMemoryError("out of memory"))
    reference, compiled = pair(network, registry, backend=out_of_memory)
    x = tokens()
    same(network(x), reference(x))
    assert (compiled.counters.retired, compiled.counters.verifications) == (0, 0)


class LittleMemory(TorchDispatchMode):
    """A GPU with no room for copies, or with none for a product while one is alive."""

    def __init__(self, has_room_for_copies):
        super().__init__()
        self.has_room_for_copies, self.copies, self.raised = has_room_for_copies, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_copy = func is torch.ops.aten.clone.default
        is_full = any(copy() is not None for copy in self.copies) and func is torch.ops.aten.addmm.default
        if is_full or (is_copy and not self.has_room_for_copies):
            self.raised += 1
            raise torch.cuda.OutOfMemoryError("out of memory")
        result = func(*args, **(kwargs or {}))
        if is_copy:
            self.copies.append(weakref.ref(result))
        return result


@pytest.mark.parametrize("has_room_for_copies", [True, False])
def test_a_check_takes_no_memory_that_eager_needs(has_room_for_copies, registry):
    network, x = transformer(), tokens()
    reference, compiled = pair(network, registry)
    with LittleMemory(has_room_for_copies) as memory:
        result = network(x)
    same(result, reference(x))
    assert memory.raised
    assert (compiled.counters.retired, compiled.counters.verifications) == (0, 0)
    same(network(x), reference(x))
    assert compiled.counters.verifications


def test_an_error_of_eager_itself_reaches_the_caller(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    with pytest.raises(RuntimeError):
        network(torch.randn(2, 7, WIDTH + 1))
    assert compiled.counters.retired == 0


def test_a_call_that_does_not_fit_the_signature_raises_what_the_block_would(registry):
    network = transformer()
    compile_network(network, registry)
    with pytest.raises(TypeError, match="unexpected keyword"):
        network(tokens(), unknown=1)


# Timing.


def timings(compiled):
    return [entry.timing for kind in compiled.kinds() for entry in kind.graphs]


def test_a_graph_is_timed_against_eager_once_after_its_check(registry):
    network = transformer()
    compiled = compile_network(network, registry)
    assert timings(compiled) == [None]
    network(tokens())
    (first,) = timings(compiled)
    assert first.eager > 0
    assert first.graph > 0
    network(tokens(batch=1))  # checked again: a symbol is 1 now
    assert compiled.counters.verifications == 2
    assert timings(compiled) == [first]


def test_without_verification_nothing_is_timed(registry):
    network = transformer()
    compiled = compile_network(network, registry, verify=False)
    network(tokens())
    assert timings(compiled) == [None]


def test_a_graph_that_is_retired_is_not_timed(registry):
    network = transformer()
    compiled = compile_network(network, registry, backend=wrong())
    network(tokens())
    assert [entry.timing for kind in compiled.kinds() for entry in kind.entries] == [None]


def test_timing_writes_nothing_to_the_persons_inputs(registry):
    network = StreamNetwork()
    reference, compiled = pair(network, registry)
    image, text = tokens(), tokens(count=5)
    theirs = image.clone()
    same(network(image, text), reference(theirs, text))
    same(image, theirs)
    assert [timing.eager > 0 for timing in timings(compiled)] == [True]


# What a forward holds.


def test_a_forward_does_not_keep_its_block_alive(registry):
    network = transformer()
    compiled = install(network, registry)
    forwards = compiled.forwards()
    gone = weakref.ref(network.blocks[0])
    del network
    gc.collect()
    assert gone() is None
    assert len(forwards) == 2


def test_calls_are_counted_whether_they_are_compiled_or_not(registry):
    network = transformer(depth=3)
    compiled = compile_network(network, registry, probe=call)
    network(tokens())
    network(tokens(), torch.zeros(2, 1, 7, 7))
    assert compiled.counters.calls == 6
    assert compiled.counters.eager_calls.total() == 3


def test_unlike_blocks_keep_to_their_own_graphs(registry):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([StreamBlock(), TransformerBlock(), StreamBlock(), TransformerBlock()])
            self.spare = ResidualBlock()

        def forward(self, image, text):
            image, text, _ = self.blocks[0](image, text)
            image, text, _ = self.blocks[2](self.blocks[1](image), self.blocks[3](text))
            return image, text

        def inputs(self, at):
            return StreamNetwork().inputs(at)

    network = Mixed()
    reference, compiled = pair(network, registry)
    image, text = network.inputs(sizes())
    same(network(image.clone(), text), reference(image.clone(), text))
    assert compiled.counters.compiles == 2
    assert not reasons(compiled)
