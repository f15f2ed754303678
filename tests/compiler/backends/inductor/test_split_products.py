from __future__ import annotations

import copy

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import split_products
from compiled_graphs.compiler.backends.inductor.split_products import can_split, split_linears
from compiled_graphs.compiler.common.torch_compat import MissingName, mm_with_dtype, tuned_mm
from torch import fx, nn
from torch._subclasses import FakeTensorMode

ROWS, WIDTH = 24, 256


class Layers(nn.Module):
    """Two layers of one input, and one behind them, with weights in a dtype, as ComfyUI's layers cast them."""

    def __init__(self, dtype, scale=None, width=WIDTH):
        super().__init__()
        shapes = (width, WIDTH), (width, WIDTH), (WIDTH, width)
        self.weights = nn.ParameterList(nn.Parameter((torch.randn(s) / 16).to(dtype), False) for s in shapes)
        self.bias = nn.Parameter(torch.randn(width).to(torch.bfloat16))
        self.scale = None if scale is None else nn.Parameter(torch.as_tensor(scale))

    def weight(self, number, dtype):
        weight = self.weights[number].to(dtype)
        return weight if self.scale is None else weight * self.scale.to(dtype)

    def forward(self, x):
        one = nn.functional.linear(x, self.weight(0, x.dtype), self.bias.to(x.dtype))
        other = nn.functional.linear(x, self.weight(1, x.dtype))
        return nn.functional.linear(one * other, self.weight(2, x.dtype))


class OnCPU(fx.Interpreter):
    """Runs a graph on a CPU, which multiplies bfloat16 to float32 by way of float32: the same terms."""

    def call_function(self, target, args, kwargs):
        if target is mm_with_dtype.get():
            one, other, dtype = args
            assert (one.dtype, other.dtype, dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
            return one.float() @ other.float()
        return super().call_function(target, args, kwargs)


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def traced(block, x):
    """Return a graph with any number of rows."""
    rows = torch.export.Dim.AUTO
    return torch.export.export(block, (x,), dynamic_shapes=({1: rows},), strict=False)


def run(program, x):
    values = [*(tensor for _, tensor in program.named_parameters()), x]
    (result,) = OnCPU(program.graph_module).run(*values)
    return result


def inputs(rows=ROWS):
    """Rows with values of very different sizes, as transformers have them."""
    return torch.randn(1, rows, WIDTH) * torch.randn(1, 1, WIDTH).mul(3).exp()


def targets(program):
    return [node.target for node in program.graph_module.graph.nodes]


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.bfloat16, None), (torch.float8_e4m3fn, 0.37), (torch.float8_e5m2, 0.37)],
    ids=["bfloat16", "scaled float8", "scaled float8 e5m2"],
)
def test_products_are_those_of_float32_at_any_number_of_rows(dtype, scale):
    block = Layers(dtype, scale)
    program = traced(block, inputs())
    assert split_linears(program.graph_module) == 3
    assert torch.ops.aten.linear.default not in targets(program)
    for rows in (ROWS, 7):
        x = inputs(rows)
        exact = block(x.double())
        ours, eager = (((each - exact).norm() / exact.norm()).item() for each in (run(program, x), block(x)))
        assert ours < 4 * eager < 1e-5


def test_layers_of_one_input_share_its_parts():
    program = traced(Layers(torch.bfloat16), inputs())
    split_linears(program.graph_module)
    assert targets(program).count(torch.ops.aten.cat.default) == 2
    assert targets(program).count(mm_with_dtype.get()) == 3


def test_inductor_keeps_every_digit_of_the_parts():
    """Graphs of text encoders were wrong by 3e-3 on a GPU: Inductor removes casts that cut parts off."""
    graph, x = fx.Graph(), inputs().reshape(-1, WIDTH)
    node = graph.placeholder("x")
    node.meta["val"] = FakeTensorMode().from_tensor(x)
    graph.output(split_products._parts(graph, node))
    compiled = torch.compile(fx.GraphModule({}, graph), fullgraph=True)(x)
    assert compiled.dtype == torch.bfloat16
    assert compiled.double().view(split_products.PARTS, *x.shape).sum(0).equal(x.double())


OTHERS = {
    "float16 has more digits": ((torch.float16,), torch.float32),
    "weights of float32": ((torch.float32,), torch.float32),
    "computed in bfloat16": ((torch.bfloat16,), torch.bfloat16),
    "a scale for each column": ((torch.bfloat16, torch.ones(WIDTH)), torch.float32),
    "an odd width": ((torch.bfloat16, None, WIDTH + 4), torch.float32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name):
    settings, dtype = OTHERS[name]
    program = traced(Layers(*settings), inputs().to(dtype))
    before = targets(program)
    assert split_linears(program.graph_module) == 0
    assert targets(program) == before


@pytest.mark.parametrize("lacking", [mm_with_dtype, tuned_mm], ids=lambda name: name.path)
def test_nothing_is_split_where_it_cannot_run(lacking, monkeypatch):
    def get(self):
        if self is lacking:
            raise MissingName(self.path)
        return get_name(self)

    get_name, gpu = type(lacking).get, torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not can_split(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert can_split(gpu)
    assert not can_split(torch.device("cpu"))
    monkeypatch.setattr(type(lacking), "get", get)
    assert not can_split(gpu)


def test_a_copy_is_split_and_the_graph_itself_stays_for_a_compiler_that_refuses_it():
    block, x = Layers(torch.bfloat16), inputs()
    program = traced(block, x)
    before, copied = targets(program), copy.deepcopy(program.graph_module)
    assert split_linears(copied) == 3
    assert targets(program) == before
    values = [node.meta["val"] for node in copied.graph.nodes if node.op == "placeholder"]
    assert [value.shape for value in values[:-1]] == [weight.shape for _, weight in program.named_parameters()]
    (result,) = OnCPU(copied).run(*(weight for _, weight in program.named_parameters()), x)
    assert (result - block(x)).norm() < 1e-5 * result.norm()
