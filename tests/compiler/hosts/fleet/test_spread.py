"""Items that workers refuse, are lost with, or are slow with: each is done elsewhere, in order, and it is said."""

from __future__ import annotations

import threading

import pytest
from compiled_graphs.compiler.hosts.fleet.spread import ATTEMPTS, REPLACEMENTS, Lost, Progress, Refused, Spread


class Worker:
    """Does what a function says; `again` is what takes its place."""

    def __init__(self, name, do, again=None):
        self.name, self.run, self._again = name, do, again

    def replaced(self):
        if isinstance(self._again, Exception):
            raise self._again
        return self._again

    def close(self): ...


@pytest.fixture
def told():
    return []


def spread(items, told, *workers):
    return list(Spread(items, workers, told.append))


def squared(item):
    return item * item


def refuse(item):
    raise Refused("it lacks a model")


def lose(item):
    raise Lost("its process ended")


def test_results_come_in_order_and_progress_is_told(told):
    outcomes = spread(range(20), told, Worker("a", squared), Worker("b", squared))
    assert [outcome.result for outcome in outcomes] == [n * n for n in range(20)]
    assert {outcome.worker for outcome in outcomes} <= {"a", "b"}
    assert not any(outcome.error or outcome.attempts for outcome in outcomes)
    assert [progress.done for progress in told] == list(range(1, 21))
    assert str(told[-1]) == "20 of 20 done, 2 working"


def test_a_slow_worker_does_one_item_while_another_does_the_rest(told):
    rest_is_done = threading.Event()

    def slow(item):
        rest_is_done.wait()
        return item

    def quick(item):
        has_begun.wait()  # the slow one has its item
        done.append(item)
        if len(done) == 9:
            rest_is_done.set()
        return item

    has_begun, done = threading.Event(), []
    first = Worker("slow", lambda item: (has_begun.set(), slow(item))[1])
    outcomes = spread(range(10), told, first, Worker("quick", quick))
    assert [outcome.result for outcome in outcomes] == list(range(10))
    assert [outcome.worker for outcome in outcomes].count("slow") == 1


def test_what_one_refuses_another_does(told):
    outcomes = spread(range(4), told, Worker("a", refuse), Worker("b", squared))
    assert [outcome.result for outcome in outcomes] == [0, 1, 4, 9]
    assert {outcome.worker for outcome in outcomes} == {"b"}
    refused = [outcome for outcome in outcomes if outcome.attempts]
    assert all(outcome.attempts == ("a: it lacks a model",) for outcome in refused)
    assert len(refused) == sum("a refuses item" in str(progress) for progress in told)


@pytest.mark.parametrize("give_up", [refuse, lose])
def test_a_worker_that_waits_gets_what_another_gives_back(told, give_up):
    waits, first = threading.Event(), threading.Lock()

    class Told(Spread):
        def _next(self, worker):
            with self._change:  # until it waits
                if self._waiting:
                    return super()._next(worker)
                waits.set()
                return super()._next(worker)

    def run(item):
        if not first.acquire(blocking=False):
            return squared(item)
        waits.wait()
        with items._change:
            pass
        return give_up(item)

    class Unreplaced(Worker):
        def replaced(self):
            is_done.wait(20)  # a server that restarts takes its time
            return super().replaced()

    is_done, outcomes = threading.Event(), []
    items = Told([3], [Unreplaced("a", run), Unreplaced("b", run)], told.append)
    reader = threading.Thread(target=lambda: (outcomes.extend(items), is_done.set()), daemon=True)
    reader.start()
    reader.join(10)
    assert [outcome.result for outcome in outcomes] == [9]


def test_what_all_refuse_has_no_result_and_says_why(told):
    (outcome,) = spread([1], told, Worker("a", refuse), Worker("b", refuse))
    assert outcome.result is None
    assert "a: it lacks a model" in outcome.error
    assert "b: it lacks a model" in outcome.error


def test_what_an_item_raises_is_its_own_and_the_others_are_done(told):
    def divide(item):
        return 6 // item

    outcomes = spread([1, 0, 3], told, Worker("a", divide))
    assert [outcome.result for outcome in outcomes] == [6, None, 2]
    assert outcomes[1].error.startswith("ZeroDivisionError")
    assert any("Item 2 has failed" in str(progress) for progress in told)


def test_a_lost_workers_item_is_done_by_another(told):
    begun = threading.Event()

    def lose_once(item):
        begun.set()
        raise Lost("its process ended")

    def wait_and_square(item):
        begun.wait()
        return squared(item)

    outcomes = spread(range(4), told, Worker("a", lose_once), Worker("b", wait_and_square))
    assert [outcome.result for outcome in outcomes] == [0, 1, 4, 9]
    assert [outcome.attempts for outcome in outcomes if outcome.attempts] == [("a: its process ended",)]
    assert any("a is lost: its process ended. Item" in str(progress) for progress in told)
    assert told[-1].working == 1


def test_a_lost_worker_is_replaced(told):
    (outcome,) = spread([3], told, Worker("a", lose, again=Worker("c", squared)))
    assert (outcome.result, outcome.worker) == (9, "c")
    assert any("c takes the place of a." in str(progress) for progress in told)


def test_an_item_that_takes_its_workers_with_it_is_given_up(told):
    dangerous = Worker("a", lambda item: lose(item) if item == 0 else squared(item))
    dangerous._again = dangerous
    outcomes = spread(range(3), told, dangerous)
    assert outcomes[0].error.startswith(f"it was lost {ATTEMPTS} times")
    assert [outcome.result for outcome in outcomes[1:]] == [1, 4]


@pytest.mark.parametrize("again", [None, Lost("it has another torch")])
def test_without_workers_the_rest_has_no_result(again, told):
    outcomes = spread(range(3), told, Worker("a", lose, again))
    assert all(outcome.error.startswith("no worker is left for it") for outcome in outcomes)
    assert (again is not None) == any("a is not replaced: it has another torch." in str(each) for each in told)


def test_replacements_end(told):
    worker = Worker("a", lose)
    worker._again = worker
    outcomes = spread(range(10), told, worker)
    assert sum(bool(outcome.attempts) for outcome in outcomes) <= REPLACEMENTS + 1
    assert all(outcome.error for outcome in outcomes)


def test_what_is_left_is_not_begun_when_nobody_wants_it(told):
    began, go = [], threading.Event()

    def first_only(item):
        began.append(item)
        if item:
            go.wait()
        return item

    outcomes = iter(Spread(range(100), [Worker("a", first_only)], told.append))
    next(outcomes)
    outcomes.close()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "spread a":
            thread.join()
    assert len(began) <= 2


def test_a_callback_that_fails_ends_no_work(caplog):
    def fail(progress):
        raise OSError("the screen is gone")

    assert [outcome.result for outcome in Spread(range(3), [Worker("a", squared)], fail)] == [0, 1, 4]
    assert "the screen is gone" in caplog.text


def test_the_time_left_is_estimated():
    assert str(Progress(2, 8, 3, 10.0, "")) == "2 of 8 done, 3 working, about 30 s left"
    assert str(Progress(0, 8, 3, 10.0, "A is lost.")) == "0 of 8 done, 3 working. A is lost."


def test_a_worker_that_cannot_be_made_again_ends_no_batch(told):
    def fail():
        raise RuntimeError("CUDA out of memory")

    worker = Worker("a", lose)
    worker.replaced = fail
    (outcome,) = spread([1], told, worker)
    assert "no worker is left for it" in outcome.error
    assert "a is not replaced: RuntimeError: CUDA out of memory." in str(told[0]) + str(told[1])
