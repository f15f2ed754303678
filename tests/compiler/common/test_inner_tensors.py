from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.inner_tensors import InnerTensors, plain_names, plain_tensors
from compiled_graphs.compiler.common.reason import Unsupported

VALUES, SCALE, PLAIN = torch.zeros(2, 3), torch.ones(()), torch.zeros(4)


def look(tensor):
    return InnerTensors(("values", "scale"), (VALUES, SCALE), ("a layout", 8)) if tensor is VALUES else None


def test_inner_tensors_take_the_place_of_their_weight():
    assert list(map(id, plain_tensors([PLAIN, VALUES], look))) == list(map(id, [PLAIN, VALUES, SCALE]))
    assert plain_names([("bias", PLAIN), ("weight", VALUES)], look) == ["bias", "weight.values", "weight.scale"]


def test_an_absent_weight_stays_absent():
    assert plain_tensors([None, PLAIN], look) == [None, PLAIN]


def test_a_form_is_the_layout_with_dtypes_and_shapes():
    assert look(VALUES).form == (("a layout", 8), (torch.float32, (2, 3)), (torch.float32, ()))


def test_a_host_that_knows_no_such_weights_names_their_type():
    class Strange(torch.Tensor):
        pass

    assert Host().inner_tensors(torch.nn.Parameter(PLAIN)) is None
    with pytest.raises(Unsupported, match="weights of type Strange"):
        Host().inner_tensors(torch.zeros(2).as_subclass(Strange))
