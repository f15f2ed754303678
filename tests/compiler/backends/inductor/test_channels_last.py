"""Maps of videos that stay in channels_last_3d."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.backends.inductor.channels_last import keep_channels_last
from compiled_graphs.compiler.tracing.decompositions import group_norm_by_channel
from torch import nn
from torch.nn import functional

CHANNELS = 4
SIZES = [(3, 6, 8), (2, 5, 3), (5, 4, 4)]
MODES = ["constant", "replicate", "reflect", "circular"]
LAST = torch.channels_last_3d


class Block(nn.Module):
    """Convolves what an operator makes of a map and of the frames before it, and hands its last frames on."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.conv = nn.Conv3d(CHANNELS, CHANNELS, 2, bias=False)

    def forward(self, x, before):
        y = self.operator(functional.silu(x), before)
        return self.conv(y), y[:, :, -1:].clone()


OPERATORS = {
    **{f"pad {mode}": lambda x, _, mode=mode: functional.pad(x, (1, 1, 1, 1, 0, 0), mode) for mode in MODES},
    "pad one side of the frames": lambda x, _: functional.pad(x, (0, 0, 0, 0, 2, 0), "replicate"),
    "pad rows by another number": lambda x, _: functional.pad(x, (0, 0, 2, 3, 0, 0), "replicate"),
    "pad with a value": lambda x, _: functional.pad(x, (1, 0), value=2.0),
    "frames before": lambda x, before: torch.cat([before, x], 2),
    "frames before, padded": lambda x, before: functional.pad(
        torch.cat([before, x], 2), (1, 1, 1, 1, 0, 0), "replicate"
    ),
    "rows": lambda x, _: torch.cat([x, x], -2),
    "contiguous": lambda x, _: torch.cat([x, x], 3).contiguous(),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def maps(frames, height, width):
    x = torch.randn(1, CHANNELS, frames, height, width)
    return x.contiguous(memory_format=LAST), torch.randn(1, CHANNELS, 2, height, width).contiguous(memory_format=LAST)


def traced(block, sizes=SIZES[0]):
    dims = dict.fromkeys((2, 3, 4), torch.export.Dim.AUTO)
    return torch.export.export(block, maps(*sizes), dynamic_shapes=(dims, {3: dims[3], 4: dims[4]}), strict=False)


def values(program, x):
    return program.graph_module(*(tensor for _, tensor in program.named_parameters()), *x)


def targets(program):
    return [node.target for node in program.graph_module.graph.nodes]


def assert_stays(program):
    before = targets(program)
    assert keep_channels_last(program.graph_module) == 0
    assert targets(program) == before


@pytest.mark.parametrize("name", OPERATORS)
def test_values_are_the_same_at_every_size_and_maps_stay_in_channels_last(name):
    block = Block(OPERATORS[name])
    program = traced(block)
    assert keep_channels_last(program.graph_module) >= 2
    assert torch.ops.aten.clone.default not in targets(program)
    (conv,) = (node for node in program.graph_module.graph.nodes if node.target is torch.ops.aten.conv3d.default)
    assert conv.args[0].meta["val"].is_contiguous(memory_format=LAST)
    for sizes in SIZES:
        x = maps(*sizes)
        for ours, theirs in zip(values(program, x), block(*x), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


def test_padding_and_joining_copy_each_value_once():
    """A map that is already in channels_last_3d is not copied before a convolution."""
    program = traced(Block(OPERATORS["frames before, padded"]))
    keep_channels_last(program.graph_module)
    nodes = program.graph_module.graph.nodes
    for node in nodes:
        if node.target in (torch.ops.aten.permute.default, torch.ops.aten.contiguous.default):
            assert node.meta["val"].untyped_storage()._cdata == node.args[0].meta["val"].untyped_storage()._cdata


def test_frames_that_are_handed_on_keep_no_others_in_memory():
    program = traced(Block(OPERATORS["frames before"]))
    keep_channels_last(program.graph_module)
    _, frames = values(program, maps(*SIZES[0]))
    assert frames.untyped_storage().nbytes() == frames.nbytes


def test_compiled_by_inductor_the_values_are_the_same(cpp_compiler):
    block = Block(OPERATORS["frames before, padded"])
    program = traced(block)
    keep_channels_last(program.graph_module)
    x = maps(*SIZES[0])
    weights = [tensor for _, tensor in program.named_parameters()]
    for ours, theirs in zip(torch.compile(program.graph_module)(*weights, *x), block(*x), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


class Unchanged(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.conv, self.run = nn.Conv3d(CHANNELS, CHANNELS, 1), forward

    def forward(self, x, before):
        return self.run(self, x, before)


OTHERS = {
    "no convolution of frames": lambda self, x, before: functional.pad(torch.cat([before, x], 2), (1, 1)),
    "maps of images": lambda self, x, before: torch.cat([x[:, :, 0], before[:, :, 0]]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_stay_as_they_are(name):
    program = traced(Unchanged(OTHERS[name]))
    assert_stays(program)


WRITES = {
    "flatten": lambda y: y.flatten(1).mul_(2),
    "reshape": lambda y: y.reshape(y.shape[0], -1)[:, 1:].mul_(2),
    "contiguous": lambda y: y.contiguous(memory_format=LAST).mul_(2),
    "to": lambda y: y.to(torch.float32, memory_format=LAST).mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_graph_that_writes_where_strides_decide_stays_as_it_is(name):
    def run(self, x, before):
        y = torch.cat([before.contiguous(), x.contiguous()], 2)
        WRITES[name](y)
        return self.conv(y)

    program = traced(Unchanged(run))
    assert_stays(program)


UNSEEN = {
    "a map in another order": lambda y: (
        y.reshape(1, 2, 2, *y.shape[2:]).movedim(1, -1).reshape(1, 2, -1)[:, :, 1:].mul_(2)
    ),
    "a flat one": lambda y: y.contiguous().flatten(1).mul_(2),
    "what was read before": lambda y: (y.sum(), y.reshape(1, -1).mul_(2))[1],
    "a part of it, read as a whole": lambda y: ((flat := y.reshape(1, -1)).split(5, 1)[0].mul_(2), flat)[1],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_graph_that_writes_to_what_nobody_else_reads_is_changed(name):
    """The upsampling blocks of LTX-2's VAE add their input so to frames that they have put in another order."""
    module = Unchanged(lambda self, x, before: UNSEEN[name](self.conv(torch.cat([before, x], 2))))
    program = traced(module)
    assert keep_channels_last(program.graph_module) == 2
    for sizes in SIZES:
        x = maps(*sizes)
        assert torch.allclose(values(program, x)[0], module(*x), atol=1e-6)


SEEN = {
    "the map": lambda y: (y.reshape(1, -1).mul_(2), y.sum()),
    "a view of it": lambda y: (y[:, :1].reshape(1, -1).mul_(2), y[:, :, 1:].sum()),
    "a part, through a split": lambda y: (y.split([1, CHANNELS - 1], 1)[0].reshape(1, -1).mul_(2), y.sum()),
    "what was reshaped": lambda y: (y.reshape(1, -1)[:, 1:].mul_(2), y.sum()),
    "what was reshaped before": lambda y: (y.reshape(1, -1), y.mul_(2)),
    "a split of what was reshaped": lambda y: (y.reshape(1, -1).split([96, y[0].numel() - 96], 1)[0].mul_(2), y.sum()),
    "what was ravelled": lambda y: (y.ravel().mul_(2), y.sum()),
    "what was reshaped like another": lambda y: (y.reshape_as(torch.empty(y.numel())).mul_(2), y.sum()),
    "a dropout that drops nothing": lambda y: (functional.dropout(y, 0.1, False).reshape(1, -1).mul_(2), y.sum()),
    "an einsum of one": lambda y: (torch.einsum("bcthw->bcthw", y).reshape(1, -1).mul_(2), y.sum()),
    "the place of a result": lambda y: (torch.add(y.sum(), 1, out=y.reshape(1, -1)[0, :1]), y.sum()),
    "what is repeated": lambda y: (functional.silu(y).expand(2, -1, -1, -1, -1).movedim(1, -1).reshape(2, -1).mul_(2),),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_graph_that_reads_what_it_wrote_to_stays_as_it_is(name):
    def run(self, x, before):
        return sum(each.sum() for each in SEEN[name](self.conv(torch.cat([before, x], 2))))

    program = traced(Unchanged(run))
    assert_stays(program)


def test_a_graph_that_writes_to_a_map_itself_is_changed():
    module = Unchanged(lambda self, x, before: self.conv(torch.cat([before, x], 2)).mul_(2))
    program, x = traced(module), maps(*SIZES[0])
    assert keep_channels_last(program.graph_module) == 2
    assert torch.allclose(values(program, x)[0], module(*x), atol=1e-6)


class Normalised(nn.Module):
    """The first half of a residual block, as in HunyuanVideo's VAE."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, CHANNELS), nn.Conv3d(CHANNELS, CHANNELS, 3)

    def forward(self, x, before):
        y = group_norm_by_channel(x, 2, self.norm.weight, self.norm.bias)
        y = torch.cat([before, functional.silu(y, inplace=True)], 2)
        return self.conv(functional.pad(y, (1, 1, 1, 1, 0, 0), "replicate"))


def test_group_norm_and_an_activation_in_place_hinder_nothing():
    block = Normalised()
    program = traced(block)
    assert keep_channels_last(program.graph_module) == 3
    for sizes in SIZES:
        x = maps(*sizes)
        assert torch.allclose(values(program, x)[0], block(*x), atol=1e-5)


BY_STRIDES = {
    "a part of a map": lambda y: y.as_strided((2, 2), (2, 1)),
    "another layout": lambda y: (y.sum((2, 3, 4)) * 2).as_strided((CHANNELS, 1), (1, 1)),
    "the layout of a view": lambda y: y[0, 0, 0].as_strided((6, 8), (8, 1)),
    "the layout of what is written to": lambda y: (
        (p := y[0, 0, 0] * 2).as_strided((6, 8), (8, 1)).mul_(2).sum() + p.sum()
    ),
    "the layout of a weight": lambda y: torch.ones(2, 2).as_strided((2, 2), (2, 1)),
    "in place": lambda y: (y * 1).as_strided_((2, 2), (2, 1)),
    "another place": lambda y: (y[0, 0, 0] * 2).as_strided((6, 8), (8, 1), 1),
}


def test_a_result_that_is_read_in_its_own_layout_hinders_nothing():
    """A part of a map gets other strides, and what is computed of it gets them, too."""

    def run(self, x, before):
        y = torch.cat([before, x], 2)
        part = (y[0, :, 0, 0] * 2).contiguous() + 1
        return self.conv(y) + part.as_strided((CHANNELS, 8), (8, 1)).cumsum(0).sum(1).view(1, -1, 1, 1, 1)

    module, x = Unchanged(run), maps(*SIZES[0])
    program = torch.export.export(module, x, strict=False)
    assert keep_channels_last(program.graph_module) == 2
    assert torch.allclose(values(program, x)[0], module(*x), atol=1e-5)


@pytest.mark.parametrize("name", BY_STRIDES)
def test_a_graph_that_reads_by_strides_stays_as_it_is(name):
    def run(self, x, before):
        return self.conv(torch.cat([before, x], 2)) + BY_STRIDES[name](x.contiguous()).sum()

    program = torch.export.export(Unchanged(run), maps(*SIZES[0]), strict=False)
    assert_stays(program)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_view_that_the_new_strides_do_not_allow_becomes_a_copy(batch):
    def run(self, x, before):
        y = functional.pad(x.contiguous(), (1, 1, 0, 0, 0, 0), "replicate")
        return self.conv(y.view(x.shape[0], -1).view(y.shape))

    module, x = Unchanged(run), maps(*SIZES[0])
    x = [each.expand(batch, *each.shape[1:]).clone() for each in x]
    program = torch.export.export(module, tuple(x), strict=False)
    assert keep_channels_last(program.graph_module) == 2
    assert torch.allclose(values(program, x)[0], module(*x), atol=1e-6)


REST = {
    "no side": lambda self, x, before: self.conv(functional.pad(x, (0, 0, 0, 0, 0, 0), "replicate")),
    "cut off": lambda self, x, before: self.conv(functional.pad(x, (-1, 1))),
    "channels": lambda self, x, before: self.conv(functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, 1:]),
    "an empty tensor without a shape": lambda self, x, before: self.conv(torch.cat([x.new_empty(0), x], 2)),
    "a copy of all frames": lambda self, x, before: self.conv(x.clone()),
}


@pytest.mark.parametrize("name", REST)
def test_what_is_not_known_is_left_to_the_compiler(name):
    module = Unchanged(REST[name])
    program = traced(module)
    assert keep_channels_last(program.graph_module) == 1, "the convolution"
    x = maps(*SIZES[0])
    (ours,) = values(program, x)
    assert torch.allclose(ours, module(*x), atol=1e-6)
