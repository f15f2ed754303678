"""Machines that share an object store take turns: each graph is compiled once, and nobody waits for the dead."""

from __future__ import annotations

import threading
import time

import pytest
from compiled_graphs.compiler.storage import claims
from compiled_graphs.compiler.storage.claims import claimed

LIMIT = 60.0


class Memory:
    """One object of a store that many machines use."""

    def __init__(self):
        self.data = None
        self.writes = 0

    def read(self):
        return self.data

    def write(self, data):
        self.data = data
        self.writes += 1

    def delete(self):
        self.data = None


class Failing(Memory):
    def read(self):
        raise OSError("no answer")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("SETTLE", 0.1), ("BEAT", 0.05), ("STALE", 2.0), ("POLL", 0.02)):
        monkeypatch.setattr(claims, name, seconds)


def test_of_many_that_come_at_once_one_compiles():
    place, made, inside = Memory(), [], []

    def machine(number):
        with claimed(place, LIMIT) as is_held:
            assert is_held
            inside.append(number)
            assert inside == [number], "two at once"
            if not made:
                time.sleep(0.3)
                made.append(number)
            inside.remove(number)

    machines = [threading.Thread(target=machine, args=(number,)) for number in range(6)]
    for each in machines:
        each.start()
    for each in machines:
        each.join()
    assert len(made) == 1
    assert place.data is None, "nothing stays claimed"


def test_those_who_wait_go_on_together_once_it_is_made():
    place, made, free = Memory(), threading.Event(), []
    place.write(b"another")

    def machine():
        with claimed(place, LIMIT, made.is_set) as is_held:
            free.append(is_held)

    machines = [threading.Thread(target=machine) for _ in range(6)]
    for each in machines:
        each.start()
    made.set()
    for each in machines:
        each.join()
    assert free == [False] * 6
    assert (place.data, place.writes) == (b"another", 1), "nobody takes a claim that is not needed"


def test_a_claim_that_goes_on_is_waited_for_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(claims, "STALE", 0.5)
    place, entered, order = Memory(), threading.Event(), []

    def slow():
        with claimed(place, LIMIT):
            entered.set()
            time.sleep(1.5)
            order.append("slow")

    thread = threading.Thread(target=slow)
    thread.start()
    entered.wait()
    with claimed(place, LIMIT):
        order.append("second")
    thread.join()
    assert order == ["slow", "second"]
    assert place.writes > 5


def test_a_dead_machines_claim_is_taken_over(monkeypatch):
    monkeypatch.setattr(claims, "STALE", 0.2)
    place = Memory()
    place.write(b"somebody who died")
    with claimed(place, LIMIT) as is_held:
        assert is_held


def test_after_the_limit_the_caller_goes_on_without():
    place = Memory()
    place.write(b"somebody")
    with claimed(place, 0.1) as is_held:
        assert not is_held
    assert place.data == b"somebody"


def test_a_store_that_fails_keeps_nobody_from_compiling():
    with claimed(Failing(), LIMIT) as is_held:
        assert not is_held


def test_an_error_inside_gives_the_claim_back():
    place = Memory()
    with pytest.raises(ZeroDivisionError), claimed(place, LIMIT):
        raise ZeroDivisionError
    assert place.data is None
