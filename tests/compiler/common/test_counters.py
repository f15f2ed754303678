from __future__ import annotations

import pytest
from compiled_graphs.compiler.common.counters import Counters
from compiled_graphs.compiler.common.reason import Reason, ReasonCode


def test_counts_travel_to_every_parent():
    top = Counters()
    middle = Counters(parent=top)
    Counters(parent=middle).add("compiles", 2)
    assert (middle.compiles, top.compiles) == (2, 2)


def test_a_parents_counts_stay_out_of_its_children():
    top = Counters()
    child = Counters(parent=top)
    top.add("calls")
    assert child.calls == 0


def test_eager_calls_are_counted_by_reason_here_and_above():
    top = Counters()
    child = Counters(parent=top)
    hook, dtype = Reason(ReasonCode.HOOK), Reason(ReasonCode.TENSOR_TYPE, "Scaled")
    for reason in (hook, hook, dtype):
        child.add_eager(reason)
    assert child.eager_calls == top.eager_calls == {hook: 2, dtype: 1}


def test_two_counters_do_not_share_their_reasons():
    Counters().add_eager(Reason(ReasonCode.HOOK))
    assert not Counters().eager_calls


def test_expect_accepts_exactly_the_named_changes():
    counters = Counters(compiles=5)
    with counters.expect(compiles=1, retired=0):
        counters.add("compiles")
        counters.add("calls")


@pytest.mark.parametrize("amount", [0, 2])
def test_expect_rejects_any_other_change(amount):
    counters = Counters()
    with pytest.raises(AssertionError, match=f"compiles changed by {amount}, expected 1"), counters.expect(compiles=1):
        counters.add("compiles", amount)


def test_expect_lets_the_blocks_own_error_through():
    with pytest.raises(KeyError), Counters().expect(compiles=1):
        raise KeyError("own")
