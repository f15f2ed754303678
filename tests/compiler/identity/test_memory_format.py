"""Memory formats of graphs' inputs and weights."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.identity.memory_format import has_layouts, input_format, laid_out, stride_in
from recorders import on_absent_gpu
from torch import nn

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MAP, VIDEO, ROWS = (2, 8, 5, 7), (1, 8, 3, 5, 7), (2, 35, 8)


@pytest.mark.parametrize(
    ("module", "shape", "device", "memory_format"),
    [
        (nn.Conv2d(8, 8, 3), MAP, GPU, "channels_last"),
        (nn.GroupNorm(2, 8), MAP, GPU, "channels_last"),
        (nn.Linear(7, 7), MAP, GPU, "contiguous"),
        (nn.Conv2d(8, 8, 3), ROWS, GPU, "contiguous"),
        (nn.Conv2d(8, 8, 3), MAP, CPU, "contiguous"),
        (nn.Conv3d(8, 8, 3), VIDEO, GPU, "channels_last_3d"),
        (nn.Conv2d(8, 8, 3), VIDEO, GPU, "channels_last_3d"),
        (nn.Linear(7, 7), VIDEO, GPU, "contiguous"),
        (nn.Conv3d(8, 8, 3), MAP, GPU, "contiguous"),
        (nn.Conv3d(8, 8, 3), VIDEO, CPU, "contiguous"),
    ],
)
def test_input_format_of_maps_on_gpus_is_channels_last(module, shape, device, memory_format):
    assert input_format(nn.Sequential(module), shape, device) == memory_format


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (torch.zeros(8, 4, 3, 3), True),
        (torch.zeros(8, 4, 3, 3).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(8, 4, 3, 6)[..., ::2], False),
        (torch.zeros(8, 4, 1, 1), False),
        (torch.zeros(8, 1, 3, 3), False),
        (torch.zeros(8, 4), False),
    ],
)
def test_has_layouts_only_where_the_two_differ(weight, expected):
    assert has_layouts(weight) == expected


def test_stride_in_matches_a_converted_weight():
    weight = torch.zeros(8, 4, 3, 3)
    for layout in (torch.contiguous_format, torch.channels_last):
        assert stride_in(weight, layout) == weight.contiguous(memory_format=layout).stride()


def test_laid_out_changes_only_maps_on_a_gpu():
    on_cpu, rows = torch.zeros(MAP), on_absent_gpu(torch.zeros(ROWS))
    assert laid_out(on_cpu) is on_cpu
    assert laid_out(rows) is rows
    already = on_absent_gpu(torch.zeros(MAP).contiguous(memory_format=torch.channels_last))
    assert laid_out(already).is_contiguous(memory_format=torch.channels_last)
