from __future__ import annotations

import json
import threading

import pytest
import torch
from compiled_graphs.compiler.common.reason import Unsupported
from compiled_graphs.compiler.tracing.patch_ops import (
    PatchFailed,
    WrongOutput,
    calling,
    placeholder,
    register_operators,
)

CONSTANTS = json.dumps({"block_index": 3})


@pytest.fixture(autouse=True)
def _operators():
    register_operators()


def output(x, constants=CONSTANTS):
    return torch.ops.compiled_graphs.output_hook("middle", constants, [], x)


def replacement(q, k, v):
    return torch.ops.compiled_graphs.replacement_hook("attn2", CONSTANTS, [], q, k, v)


def test_an_operator_calls_what_is_there_now():
    x = torch.ones(2)
    for factor in (2, 3):
        with calling(lambda hook, constants, x, factor=factor: x * factor * constants["block_index"]):
            assert output(x).tolist() == [3 * factor] * 2


def test_a_result_that_is_an_input_is_a_tensor_of_its_own():
    q, k, v = torch.zeros(2, 4, 8), torch.ones(2, 4, 8), torch.ones(2, 4, 8)
    with calling(lambda hook, constants, q, k, v: v):
        result = replacement(q, k, v)
    assert torch.equal(result, v)
    assert result.data_ptr() != v.data_ptr()


def test_a_result_is_dense_whatever_the_patch_gives():
    with calling(lambda hook, constants, x: torch.zeros(3, 2).T):
        assert output(torch.zeros(2, 3)).is_contiguous()


@pytest.mark.parametrize("result", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_another_shape_or_dtype_is_no_result(result):
    refused = pytest.raises(PatchFailed, match="patch middle changes the shape or dtype")
    with refused as failed, calling(lambda *a: result):
        output(torch.zeros(2))
    assert isinstance(failed.value.error, WrongOutput)


def test_patch_error_is_raised_after_the_graph():
    called = []

    def fail(hook, constants, x):
        called.append(hook)
        raise KeyboardInterrupt

    with pytest.raises(PatchFailed) as failed, calling(fail):
        assert output(output(torch.ones(2))).tolist() == [0, 0]
    assert isinstance(failed.value.error, KeyboardInterrupt)
    assert called == ["middle"]


def test_calls_nest_and_threads_have_their_own():
    x = torch.ones(1)
    with calling(lambda *a: a[-1] * 2):
        with calling(lambda *a: a[-1] * 5):
            assert output(x) == 5
        assert output(x) == 2
        seen = []

        def other():
            with calling(lambda *a: a[-1] * 7):
                seen.append(output(x).item())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [7]


def test_a_stand_in_keeps_what_the_block_adds_to_the_options():
    patch = placeholder("attn2", {"sigmas": None})
    options = {"sigmas": torch.ones(1), "n_heads": 8, "attn_precision": torch.float32, "block_index": 2}

    def call(hook, constants, q, k, v):
        assert (hook, constants) == ("attn2", {"n_heads": 8, "attn_precision": torch.float32, "block_index": 2})
        return q + k + v

    q, k, v = torch.ones(1, 3, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4)
    with calling(call):
        assert patch(q, k, v, options).sum() == 36


@pytest.mark.parametrize("value", [torch.ones(1), [1, [torch.ones(1)]], {"a": 1}], ids=["tensor", "list", "dict"])
def test_options_that_no_graph_can_hold_are_named(value):
    with pytest.raises(Unsupported, match="a patch that is given mask, which is no plain value"):
        placeholder("attn2", {})(torch.ones(1), {"mask": value})


def test_sizes_stay_symbols_through_an_operator():
    class Block(torch.nn.Module):
        def forward(self, x):
            return placeholder("middle", {})(x * 2, {}) + 1

    batch = torch.export.Dim.AUTO
    program = torch.export.export(Block(), (torch.ones(3, 4),), dynamic_shapes=({0: batch},), strict=False)
    with calling(lambda hook, constants, x: x * 10):
        for size in (2, 9):
            assert program.module()(torch.ones(size, 4)).tolist() == [[21] * 4] * size


def where_the_image_is():
    class Block(torch.nn.Module):
        def forward(self, text, image):
            both = torch.cat((text, image), 1)
            options = {"img_slice": [text.shape[1], both.shape[1]], "grid": (2, (image.shape[1],)), "heads": 4}
            return placeholder("attn1_output", {})(both, options)

    tokens = torch.export.Dim.AUTO
    shapes = ({1: tokens}, {1: tokens})
    return torch.export.export(Block(), (torch.ones(2, 5, 4), torch.ones(2, 9, 4)), dynamic_shapes=shapes, strict=False)


def call_with_sizes(graph):
    seen = []
    for text, image in ((5, 9), (7, 30)):
        with calling(lambda hook, constants, x: (seen.append(constants), x + 1)[1]):
            assert graph(torch.ones(2, text, 4), torch.ones(2, image, 4)).shape == (2, text + image, 4)
    return seen


SEEN = [
    {"img_slice": [5, 14], "grid": (2, (9,)), "heads": 4},
    {"img_slice": [7, 37], "grid": (2, (30,)), "heads": 4},
]


def test_a_patch_is_given_the_sizes_of_its_call():
    assert call_with_sizes(where_the_image_is().module()) == SEEN


def test_a_compiled_patch_is_given_the_sizes_of_its_call(cpp_compiler, tmp_path):
    program = where_the_image_is()
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "graph.pt2"))
    assert call_with_sizes(torch._inductor.aoti_load_package(package)) == SEEN


def test_a_compiled_patch_without_sizes_is_called(cpp_compiler, tmp_path):
    class Block(torch.nn.Module):
        def forward(self, x):
            return placeholder("middle", {})(x * 2, {"heads": 4}) + 1

    program = torch.export.export(Block(), (torch.ones(3, 4),), strict=False)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "graph.pt2"))
    with calling(lambda hook, constants, x: x * constants["heads"]):
        assert torch._inductor.aoti_load_package(package)(torch.ones(3, 4)).tolist() == [[9] * 4] * 3
