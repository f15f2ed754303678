from __future__ import annotations

import pytest
from compiled_graphs.compiler.tracing.graph_request import _chunk_inputs

CHUNK = (1, 8, 4, 6, 10)


@pytest.mark.parametrize(
    ("shape", "sizes", "symbols"),
    [
        ((1, 8, 2, 6, 10), (1, 8, 2, 40, 56), (3, 4)),  # frames that were kept
        ((1, 8, 2, 12, 20), (1, 8, 2, 80, 112), (3, 4)),  # frames twice as large
        ((1, 8, 2, 8, 12), (1, 8, 2, 42, 58), (3, 4)),  # padded ones
        ((1, 8, 2, 14, 22), (1, 8, 2, 82, 114), (3, 4)),  # twice as large and padded
        ((1, 8, 1, 1, 1), (1, 8, 1, 1, 1), ()),  # one value for all pixels, such as a step of noise
        ((1, 32), (1, 32), ()),
    ],
)
def test_sides_of_what_comes_with_a_chunk_follow_it(shape, sizes, symbols):
    chunk, other = _chunk_inputs([CHUNK, shape])
    assert chunk == ((1, 8, 22, 40, 56), (False, False, True, True, True))
    assert other == (sizes, tuple(axis in symbols for axis in range(len(shape))))
