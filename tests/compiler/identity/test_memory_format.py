"""Memory formats of graphs' inputs and weights."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.identity.memory_format import (
    has_format,
    has_layouts,
    in_format,
    input_format,
    laid_out,
    stride_in,
)
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


FRAMES, LAST = (1, 8, 1, 5, 7), torch.channels_last_3d
OF_ONE_FRAME = {
    "channels last": (stride_in(torch.empty(FRAMES), LAST), LAST, True),
    "an odd stride of the one frame": ((280, 1, 8, 56, 8), LAST, False),
    "an odd stride of the one video": ((3, 1, 280, 56, 8), LAST, False),
    "contiguous": (stride_in(torch.empty(FRAMES), torch.contiguous_format), LAST, False),
    "contiguous, and is to be": ((280, 35, 7, 7, 1), torch.contiguous_format, True),
}


@pytest.mark.parametrize("name", OF_ONE_FRAME)
def test_a_map_of_one_frame_gets_the_strides_that_convolutions_go_by(name):
    stride, memory_format, has = OF_ONE_FRAME[name]
    frames = torch.empty_strided(FRAMES, stride).copy_(torch.randn(FRAMES))
    assert has_format(frames, memory_format) == has
    ours = in_format(frames, memory_format)
    assert torch.equal(ours, frames)
    assert has_format(ours, memory_format)
    is_shared = ours.untyped_storage().data_ptr() == frames.untyped_storage().data_ptr()
    assert is_shared == (name != "contiguous")


def test_laid_out_changes_only_maps_on_a_gpu():
    on_cpu, rows = torch.zeros(MAP), on_absent_gpu(torch.zeros(ROWS))
    assert laid_out(on_cpu) is on_cpu
    assert laid_out(rows) is rows
    already = on_absent_gpu(torch.zeros(MAP).contiguous(memory_format=torch.channels_last))
    assert laid_out(already).is_contiguous(memory_format=torch.channels_last)
