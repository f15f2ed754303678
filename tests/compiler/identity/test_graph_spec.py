from __future__ import annotations

import dataclasses

import pytest
import torch
from compiled_graphs.compiler.identity.graph_spec import FEW_FRAMES, GraphSpec, InputSpec, WeightSpec, element_limit
from torch.utils import _pytree as pytree


def spec(*sizes, guards=(), outputs=(True,), result=0):
    return GraphSpec(
        region="Block",
        device="cpu",
        weights=(WeightSpec("linear.weight", (4, 3), (3, 1), "torch.bfloat16"),),
        inputs=tuple(InputSpec(row, "torch.float32", "contiguous") for row in sizes),
        guards=guards,
        mutated=(),
        outputs=outputs,
        tree=pytree.treespec_dumps(pytree.tree_structure(result)),
    )


@pytest.mark.parametrize("shape", [(1, 5, 16), (4, 1, 16), (3, 4096, 16)])
def test_any_size_fits_a_symbol(shape):
    assert spec(("s0", "s1", 16)).fits([shape])


@pytest.mark.parametrize("shape", [(2, 5, 17), (2, 5, 1), (2, 5), (2, 5, 16, 1), (0, 5, 16)])
def test_wrong_size_rank_or_empty_dimension_does_not_fit(shape):
    assert not spec(("s0", "s1", 16)).fits([shape])


def test_sizes_of_one_symbol_must_be_equal():
    shared = spec(("s0", 8), ("s0", 4))
    assert shared.fits([(3, 8), (3, 4)])
    assert not shared.fits([(3, 8), (2, 4)])


@pytest.mark.parametrize("shapes", [[], [(2, 8)], [(2, 8), (2, 8), (2, 8)]])
def test_another_number_of_inputs_does_not_fit(shapes):
    assert not spec(("s0", 8), ("s0", 8)).fits(shapes)


@pytest.mark.parametrize(("size", "fits"), [(8, True), (9, False), (4, False)])
def test_a_size_that_is_an_expression_must_have_its_value(size, fits):
    assert spec(("s0", "s1"), ("s0*s1 // 3",)).fits([(4, 6), (size,)]) is fits


@pytest.mark.parametrize(
    ("guard", "inside", "outside"),
    [("s0 % 2 == 0", 6, 7), ("s0 <= 64", 64, 65), ("max(s0, 8) == 8", 7, 9), ("math.floor(s0/2) > 1", 4, 3)],
)
def test_a_call_that_breaks_a_guard_does_not_fit(guard, inside, outside):
    guarded = spec(("s0",), guards=(guard,))
    assert guarded.fits([(inside,)])
    assert not guarded.fits([(outside,)])


@pytest.mark.parametrize(("size", "is_exceeded"), [(46340, False), (46342, True), (46343, False), (0, False)], ids=str)
def test_only_the_limit_of_elements_is_exceeded(size, is_exceeded):
    guarded = spec(("s0", "s0"), guards=("s0 % 2 == 0", element_limit("s0**2")))
    assert guarded.is_exceeded_by([(size, size)]) is is_exceeded


@pytest.mark.parametrize("guard", ["unknown > 1", "s0 // 0 == 1", "s0 < None"])
def test_a_guard_that_cannot_be_evaluated_does_not_fit(guard):
    assert not spec(("s0",), guards=(guard,)).fits([(4,)])


def test_expression_over_an_unknown_symbol_does_not_fit():
    assert not spec(("s0 + 2",)).fits([(4,)])


def test_a_multiple_of_a_symbol_gives_it_its_value():
    folded = spec(("3*s0", "s0"))
    assert folded.fits([(6, 2)])
    assert not folded.fits([(6, 3)])
    assert not folded.fits([(7, 2)])
    assert folded.small_sizes([(3, 1)]) == {"s0 = 1"}


def test_guards_cannot_reach_builtins():
    assert not spec(("s0",), guards=("len([s0]) == 1",)).fits([(4,)])


@pytest.mark.parametrize(
    ("shape", "small"), [((2, 3, 1), set()), ((1, 3, 1), {"s0 = 1"}), ((1, 1, 1), {"s0 = 1", "s1 = 1"})]
)
def test_small_sizes_leave_static_ones_out(shape, small):
    assert spec(("s0", "s1", 1)).small_sizes([shape]) == small


@pytest.mark.parametrize("frames", ["", "left"])
def test_few_frames_are_small_where_some_are_kept(frames):
    chunk = dataclasses.replace(spec((1, 8, "2*s0", "s1", "s2")), frames=frames)
    assert chunk.small_sizes([(1, 8, 10, 2, 3)]) == set()
    for length in (2, FEW_FRAMES):
        assert chunk.small_sizes([(1, 8, 2 * length, 2, 3)]) == ({f"s0 = {length}"} if frames else set())


@pytest.mark.parametrize(
    "result", [0, (1, None), [1, (2, None), 3], {"a": 1, "b": None, "c": (2, [3])}, (None, None, 1)]
)
def test_rebuild_gives_back_the_structure_of_the_result(result):
    leaves = pytree.tree_leaves(result)
    tensors = [torch.tensor(leaf) for leaf in leaves if leaf is not None]
    graph = spec((4,), outputs=tuple(leaf is not None for leaf in leaves), result=result)
    assert graph.rebuild(tensors) == result


def test_few_frames_are_the_small_sizes_over_time():
    video = spec(("s0", 4, "s1", "s2", "s3"), ("s0", 8))
    assert video.few_frames([(1, 4, 1, 6, 1), (1, 8)]) == {"s1 = 1"}
    assert video.few_frames([(1, 4, 3, 6, 1), (1, 8)]) == frozenset()


def test_weights_with_one_symbol_have_one_rank():
    ranked = tuple(
        WeightSpec(name, (rank, 3), (3, 1), "torch.float32") for name, rank in zip("abc", ("s2", "s2", "s3"))
    )
    shared = dataclasses.replace(spec((4,)), weights=ranked)
    one, other = torch.zeros(16, 3), torch.zeros(32, 3)
    assert shared.agrees_on_ranks([one, one, other])
    assert not shared.agrees_on_ranks([one, other, other])
    assert spec((4,)).agrees_on_ranks([torch.zeros(4, 3)])


def test_weight_layout_has_torch_types():
    assert spec((4,)).weight_layout == [((4, 3), (3, 1), torch.bfloat16, torch.device("cpu"))]


def test_specs_of_equal_content_are_equal():
    assert spec(("s0", 8)) == spec(("s0", 8))
    assert spec(("s0", 8)) != dataclasses.replace(spec(("s0", 8)), guards=("s0 > 1",))
