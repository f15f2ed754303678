from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import sympy
import torch
from compiled_graphs.compiler.backends.inductor import tuning
from gpu_graphs import compiled_on_gpu, on_gpu
from networks import WIDTH, Stack, TransformerBlock
from torch import nn
from torch._inductor.dependencies import MemoryDep, StarDep


class WideStack(Stack):
    def inputs(self, at):
        return (torch.randn(at.batch, at.tokens, 2048),)


@on_gpu
def test_long_rows_are_normalised_in_one_pass():
    data = compiled_on_gpu(WideStack(TransformerBlock, width=2048, heads=32).to("cuda")).executable.to_bytes()
    assert b"triton_per_fused" in data
    assert b"triton_red_fused" not in data


def test_what_we_prefer_holds_only_while_a_graph_is_compiled():
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    before = config.triton.autotune_pointwise
    with tuning.preferences():
        assert type(V.choices) is not InductorChoices
        config.triton.autotune_pointwise = not before
    assert type(V.choices) is InductorChoices
    assert config.triton.autotune_pointwise is before


@pytest.mark.parametrize(
    ("values", "hint", "in_registers"),
    [
        (4096, "INNER", True),
        (4097, "INNER", False),
        (256, "DEFAULT", True),
        (257, "DEFAULT", False),
        (64, "OUTER", False),
        (sympy.Symbol("tokens"), "INNER", False),
    ],
)
def test_rows_and_heads_of_known_length_are_reduced_in_registers(monkeypatch, values, hint, in_registers):
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False))
    row = SimpleNamespace(
        reduction_numel=sympy.sympify(values), get_reduction_hint=lambda: getattr(ReductionHint, hint)
    )
    with tuning.preferences():
        assert V.choices.should_use_persistent_reduction(row, False) == in_registers


def kernel_that_reads(*reads):
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=reads))
    return SimpleNamespace(scheduler_nodes=lambda: [node])


def test_a_kernel_gathers_if_values_that_follow_each_other_lie_apart_in_something_it_reads():
    row, column = places = sympy.symbols("row column", integer=True)
    neighbours, one_a_row, pairs = (
        MemoryDep("x", index, places, (sympy.Integer(9), sympy.Integer(64)))
        for index in (64 * row + column, row, 128 * row + 2 * column)
    )
    assert not tuning._gathers(kernel_that_reads(neighbours, one_a_row, StarDep("x")))
    assert tuning._gathers(kernel_that_reads(neighbours, pairs))


class TurningBlock(nn.Module):
    """Turns pairs of values, as rotary embeddings do."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.turns = nn.Parameter(torch.randn(width // 2, 2, 2))

    def forward(self, x):
        pairs = self.linear(torch.sigmoid(x)).unflatten(-1, (-1, 1, 2))
        return (self.turns[..., 0] * pairs[..., 0] + self.turns[..., 1] * pairs[..., 1]).flatten(-2)


@on_gpu
def test_only_kernels_that_gather_are_timed_in_two_forms():
    data = compiled_on_gpu(Stack(TurningBlock).to("cuda")).executable.to_bytes()
    kernels = re.findall(rb"'kernel_name': '(\w+)'.*?'autotune_pointwise': (\w+)", data)
    assert {is_timed for name, is_timed in kernels if b"sigmoid" in name} == {b"False"}
    assert {is_timed for name, is_timed in kernels if b"select" in name} == {b"True"}
