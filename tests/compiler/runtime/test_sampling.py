"""When a network is checked for changes."""

from __future__ import annotations

import torch
from compiled_graphs.compiler.runtime.canary import CALLS, REPLAYS, Canary
from compiled_graphs.compiler.runtime.running_call import RunningCall
from compiled_graphs.compiler.runtime.sampling import Announced, Beside, EachCall, Scheduled


def count_checks(sampling, calls):
    """Return how many of these calls check the network."""
    seen = 0
    for _ in range(calls):
        if not sampling.covers_call():
            seen += 1
            sampling.note()
    return seen


def test_each_call_is_checked_without_samplings():
    assert count_checks(EachCall(), 3) == 3


def test_announced_sampling_is_checked_once():
    sampling = Announced()
    for _ in range(2):
        sampling.begin()
        assert count_checks(sampling, 20) == 1
    sampling.end()
    assert count_checks(sampling, 3) == 3, "calls outside of a sampling"


def test_schedule_is_checked_once():
    schedule = [torch.arange(5)]
    sampling = Scheduled(lambda: schedule)
    assert count_checks(sampling, 5) == 1
    schedule[0] = torch.arange(5)
    assert count_checks(sampling, 5) == 1


def test_new_schedule_after_an_aborted_one_is_checked():
    schedule = [torch.arange(5)]
    sampling = Scheduled(lambda: schedule)
    assert count_checks(sampling, 2) == 1
    schedule[0] = torch.arange(5)
    assert count_checks(sampling, 1) == 1


def test_schedule_used_again_is_checked_again():
    schedule = [torch.arange(5)]
    sampling = Scheduled(lambda: schedule)
    assert count_checks(sampling, 10) == 2


def test_each_call_is_checked_without_a_schedule():
    assert count_checks(Scheduled(list), 3) == 3


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


def test_a_network_beside_another_is_checked_once_in_each_of_its_samplings():
    other, beside = Announced(), Beside()
    assert not beside.covers_call()
    beside.note()
    assert not beside.covers_call(), "no sampling runs"
    for _ in range(2):
        other.begin()
        assert not beside.covers_call()
        beside.note()
        assert beside.covers_call()
        other.end()
        assert not beside.covers_call()
    other.begin(checks_each=True)
    beside.note()
    assert not beside.covers_call(), "code runs around the calls"
    other.end()
