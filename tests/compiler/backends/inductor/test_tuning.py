from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import sympy
import torch
from compiled_graphs.compiler.backends.inductor import tuning
from compiled_graphs.compiler.common.torch_compat import (
    InductorChoices,
    ReductionHint,
    inductor_config,
    inductor_globals,
)
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


def test_preferences_hold_only_during_a_compile():
    from torch._inductor import config
    from torch._inductor.virtualized import V

    before = config.triton.autotune_pointwise
    with tuning.preferences():
        assert type(V.choices) is not InductorChoices.get()
        config.triton.autotune_pointwise = not before
    assert type(V.choices) is InductorChoices.get()
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
def test_rows_of_known_length_are_reduced_in_registers(monkeypatch, values, hint, in_registers):
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices.get(), "should_use_persistent_reduction", staticmethod(lambda *_: False))
    row = SimpleNamespace(
        reduction_numel=sympy.sympify(values), get_reduction_hint=lambda: getattr(ReductionHint.get(), hint)
    )
    with tuning.preferences():
        assert V.choices.should_use_persistent_reduction(row, False) == in_registers


class TheirChoices:
    """A stand-in for the part of Inductor's choices that ours call."""

    def should_use_persistent_reduction(self, features, cooperative=False):
        return False

    def triton_kernel_kwargs(self, kernel, features, groups):
        return {"groups": groups}


class ByThemselves(tuning._LongerRows, tuning._OneForm, TheirChoices):
    """Our choices on top of the stand-in."""


@pytest.mark.parametrize("name", [InductorChoices, ReductionHint, inductor_config, inductor_globals])
def test_without_a_torch_name_the_other_choices_stay(take_away, name):
    from torch._inductor import choices, config
    from torch._inductor.virtualized import V

    before = config.triton.autotune_pointwise
    take_away(name.path)
    with tuning.preferences():
        assert isinstance(V.choices, choices.InductorChoices)
        assert isinstance(V.choices, tuning._LongerRows) == (name in (ReductionHint, inductor_config))
        assert isinstance(V.choices, tuning._OneForm) == (name is ReductionHint)
    assert type(V.choices) is choices.InductorChoices
    assert config.triton.autotune_pointwise is before


def test_unknown_kernels_are_left_to_inductor():
    changed = SimpleNamespace()
    assert ByThemselves().should_use_persistent_reduction(changed, cooperative=True) is False
    with tuning.preferences():
        assert ByThemselves().triton_kernel_kwargs(type, changed, [1]) == {"groups": [1]}


def test_a_missing_name_is_logged_once(caplog, take_away):
    tuning._say_once.cache_clear()
    take_away(InductorChoices.path)
    with caplog.at_level("INFO", logger=tuning.log.name):
        for _ in range(2):
            with tuning.preferences():
                pass
    (record,) = caplog.records
    assert "torch._inductor.choices.InductorChoices" in record.getMessage()


def test_settings_are_restored_and_unknown_skipped():
    from torch._inductor import config

    before = config.max_autotune
    with tuning.settings({"max_autotune": not before}):
        assert config.max_autotune is not before
    assert config.max_autotune is before
    with tuning.settings({"no_such_setting": 1}):
        assert not hasattr(config, "no_such_setting")


def test_errors_of_a_compile_are_raised():
    with pytest.raises(KeyError), tuning.preferences():
        raise KeyError


def kernel_that_reads(*reads):
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=reads))
    return SimpleNamespace(scheduler_nodes=lambda: [node])


def test_kernels_that_read_distant_values_gather():
    row, column = places = sympy.symbols("row column", integer=True)
    neighbours, one_a_row, pairs = (
        MemoryDep("x", index, places, (sympy.Integer(9), sympy.Integer(64)))
        for index in (64 * row + column, row, 128 * row + 2 * column)
    )
    assert not tuning._gathers(kernel_that_reads(neighbours, one_a_row, StarDep("x")))
    assert tuning._gathers(kernel_that_reads(neighbours, pairs))


class TurningBlock(nn.Module):
    """Rotates pairs of values, as rotary embeddings do."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.turns = nn.Parameter(torch.randn(width // 2, 2, 2))

    def forward(self, x):
        pairs = self.linear(torch.sigmoid(x)).unflatten(-1, (-1, 1, 2))
        return (self.turns[..., 0] * pairs[..., 0] + self.turns[..., 1] * pairs[..., 1]).flatten(-2)


@on_gpu
def test_only_kernels_that_gather_are_autotuned():
    data = compiled_on_gpu(Stack(TurningBlock).to("cuda")).executable.to_bytes()
    kernels = re.findall(rb"'kernel_name': '(\w+)'.*?'autotune_pointwise': (\w+)", data)
    assert {is_timed for name, is_timed in kernels if b"sigmoid" in name} == {b"False"}
    assert {is_timed for name, is_timed in kernels if b"select" in name} == {b"True"}


def test_inductors_caches_are_told_of_other_choices():
    """Inductor's keys hold its settings, and not what we put in the place of its functions."""
    before = torch.compiler.config.cache_key_tag
    with tuning.preferences():
        assert torch.compiler.config.cache_key_tag == tuning.TAG
    assert torch.compiler.config.cache_key_tag == before
