from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends.inductor.stride_order import _answering, _original, comparing_strides
from compiled_graphs.compiler.common.torch_compat import inductor_globals
from torch import nn

sympy = pytest.importorskip("sympy")
FRAMES, HEIGHT, WIDTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("frames", "height", "width"))
ROW = WIDTH + 2
MAP = (HEIGHT + 2) * (WIDTH + 2)
VIDEO = (FRAMES + 2) * (HEIGHT + 2) * (WIDTH + 2)


class Padded(nn.Module):
    """A convolution of a video that is padded on all sides, as video VAEs have them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3)

    def forward(self, x):
        return self.conv(nn.functional.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"))


class NothingIsSure:
    """What Inductor knows of sizes: nothing."""

    @staticmethod
    def guard_or_false(question):
        return question == True  # noqa: E712  sympy


@pytest.fixture
def is_at_least():
    """The comparison, in a graph whose sizes could be any."""

    def original(left, right):
        raise AssertionError("torch fails here")

    with inductor_globals.get().set_graph_handler(SimpleNamespace(sizevars=NothingIsSure)):
        yield _answering(original)


@pytest.fixture
def original():
    """What torch compares strides by."""
    method = _original()[1]
    if method is None:
        pytest.skip(f"torch {torch.__version__} compares strides otherwise")
    return method


def test_a_stride_that_another_divides_is_at_least_as_long(is_at_least):
    assert is_at_least(VIDEO * (HEIGHT + 2), sympy.expand(MAP) * (HEIGHT + 2))


def test_a_stride_that_is_part_of_another_is_not_at_least_as_long(is_at_least):
    assert not is_at_least(MAP, VIDEO)


def test_a_stride_is_not_at_least_as_long_as_a_multiple_of_one_of_its_factors(is_at_least):
    assert not is_at_least(VIDEO, 4 * MAP)  # one frame: 3 of 4


def test_questions_without_fractions_are_left_to_torch():
    asked = []
    answering = _answering(lambda left, right: bool(asked.append((left, right))))
    questions = [(8, 4), (8, 0), (ROW, 0), (ROW, 1), (MAP, ROW), (HEIGHT, WIDTH)]
    for left, right in questions:
        assert not answering(left, right)
    assert asked == questions


def test_torch_compares_strides_again_once_a_graph_is_compiled(original):
    with comparing_strides():
        assert _original()[1] is not original
        with comparing_strides():  # another thread's
            pass
        assert _original()[1] is not original
    assert _original()[1] is original


def test_a_torch_that_compares_strides_otherwise_stays_as_it_is(monkeypatch):
    layout, method = _original()
    if method is not None:
        monkeypatch.delattr(layout, method.__func__.__name__)
    before = dict(vars(layout))
    with comparing_strides():
        assert dict(vars(layout)) == before


def test_maps_that_are_padded_on_all_sides_are_compiled(cpp_compiler, tmp_path):
    """Torch 2.13 fails here by itself. Where no supported torch does any more, `stride_order` can go."""
    sides = {axis: torch.export.Dim(name, min=2, max=4096) for axis, name in ((2, "t"), (3, "h"), (4, "w"))}
    module, example = Padded(), torch.randn(1, 4, 6, 40, 56)
    program = torch.export.export(module, (example,), dynamic_shapes=(sides,))
    with comparing_strides():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "padded.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for shape in [(1, 4, 6, 40, 56), (1, 4, 3, 9, 8)]:
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), module(x))
