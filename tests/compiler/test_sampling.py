"""When a network is looked at again."""

from __future__ import annotations

import torch
from compiled_graphs.compiler.canary import CALLS, REPLAYS, Canary
from compiled_graphs.compiler.running_call import RunningCall
from compiled_graphs.compiler.sampling import Announced, EachCall, Scheduled


def looks(sampling, calls):
    """How many of these calls are looked at."""
    seen = 0
    for _ in range(calls):
        if not sampling.is_known():
            seen += 1
            sampling.note()
    return seen


def test_a_call_that_nobody_counts_is_looked_at():
    assert looks(EachCall(), 3) == 3


def test_an_announced_sampling_is_looked_at_once():
    sampling = Announced()
    for _ in range(2):
        sampling.begin()
        assert looks(sampling, 20) == 1
    sampling.end()
    assert looks(sampling, 3) == 3, "calls outside of a sampling"


def test_a_schedule_is_looked_at_once():
    schedule = [torch.arange(5)]
    sampling = Scheduled(lambda: schedule)
    assert looks(sampling, 5) == 1
    schedule[0] = torch.arange(5)
    assert looks(sampling, 5) == 1


def test_a_new_schedule_is_looked_at_though_the_last_one_was_broken_off():
    schedule = [torch.arange(5)]
    sampling = Scheduled(lambda: schedule)
    assert looks(sampling, 2) == 1
    schedule[0] = torch.arange(5)
    assert looks(sampling, 1) == 1


def test_a_schedule_used_again_is_looked_at_again():
    schedule = [torch.arange(5)]
    sampling = Scheduled(lambda: schedule)
    assert looks(sampling, 10) == 2


def test_without_a_schedule_each_call_is_looked_at():
    assert looks(Scheduled(list), 3) == 3


class Forward:
    check_next = False


def ran(regions=0, was_replayed=False):
    call = RunningCall(None)
    call.regions, call.was_replayed = regions, was_replayed
    return call


def test_a_canary_takes_each_block_in_turn():
    forwards = [Forward(), Forward(), Forward()]
    canary = Canary()
    assert not canary.is_due()
    chosen = []
    for _ in range(6):
        canary.note(ran(CALLS))
        assert canary.is_due()
        chosen.append(canary.choose(forwards))
        assert not canary.is_due()
    assert {id(forward) for forward in chosen[:3]} == {id(forward) for forward in forwards}
    assert chosen[3:] == chosen[:3]


def test_replayed_steps_count_for_the_canary():
    canary = Canary()
    for _ in range(REPLAYS // 2):
        canary.note(ran(was_replayed=True))
    canary.note(ran(CALLS // 4))
    assert not canary.is_due()
    for _ in range(REPLAYS // 4 + 1):
        canary.note(ran(was_replayed=True))
    assert canary.is_due()
