from __future__ import annotations

import threading
import time

import pytest
import torch
from compiled_graphs.compiler.common.jobs import CompileJobs, CompileTimeout, side_by_side


def test_a_jobs_result_comes_back():
    assert CompileJobs().run("sum", lambda: 1 + 1) == 2


def test_a_jobs_own_exception_comes_back():
    with pytest.raises(ZeroDivisionError):
        CompileJobs().run("division", lambda: 1 / 0)


def test_an_exit_inside_a_job_comes_back_as_well():
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        CompileJobs().run("exit", leave)


def test_a_failed_job_does_not_stop_the_next():
    jobs = CompileJobs()
    with pytest.raises(ZeroDivisionError):
        jobs.run("division", lambda: 1 / 0)
    assert jobs.run("next", lambda: "done") == "done"


def test_a_job_is_free_of_the_callers_inference_mode():
    with torch.inference_mode():
        assert CompileJobs().run("mode", torch.is_inference_mode_enabled) is False


def test_jobs_from_many_threads_run_one_at_a_time():
    jobs, running, most = CompileJobs(), [], []

    def job():
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()

    threads = [threading.Thread(target=jobs.run, args=("job", job)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize("limit", ["", "soon"])
def test_invalid_limit_is_the_default(limit, monkeypatch):
    monkeypatch.setenv("COMPILED_GRAPHS_COMPILE_LIMIT", limit)
    assert CompileJobs().run("sum", lambda: 1 + 1) == 2


@pytest.fixture
def hanging():
    release = threading.Event()
    yield release
    release.set()


def test_a_job_past_its_limit_is_given_up(hanging):
    with pytest.raises(CompileTimeout, match=r"took more than 0\.05 s"):
        CompileJobs().run("slow block", hanging.wait, limit=0.05)


def test_the_limit_can_be_set_from_outside(hanging, monkeypatch):
    monkeypatch.setenv("COMPILED_GRAPHS_COMPILE_LIMIT", "0.05")
    with pytest.raises(CompileTimeout):
        CompileJobs().run("slow block", hanging.wait)


def test_hanging_job_refuses_later_jobs_until_it_ends(hanging):
    jobs, ran = CompileJobs(), []
    with pytest.raises(CompileTimeout):
        jobs.run("slow block", hanging.wait, limit=0.05)
    with pytest.raises(CompileTimeout, match="still hangs on slow block"):
        jobs.run("next", lambda: ran.append(1))
    assert not ran
    hanging.set()
    for thread in threading.enumerate():
        if thread.name == "compile slow block":
            thread.join()
    assert jobs.run("next", lambda: "done") == "done"


@pytest.mark.parametrize("ends", [True, False])
def test_the_next_job_waits_for_one_that_goes_on_after_an_interruption(hanging, ends):
    waits = []

    def wait(thread, limit):
        waits.append(thread.name)
        if len(waits) == 1:
            raise KeyboardInterrupt
        if ends:
            hanging.set()
        thread.join(limit if ends else 0.01)

    jobs = CompileJobs(wait)
    with pytest.raises(KeyboardInterrupt):
        jobs.run("slow block", hanging.wait)
    if ends:
        assert jobs.run("next", lambda: "done") == "done"
        assert waits == ["compile slow block", "compile slow block", "compile next"]
    else:
        with pytest.raises(CompileTimeout, match="still hangs on slow block"):
            jobs.run("next", lambda: "done")


def test_a_hanging_job_does_not_keep_the_process_alive(hanging):
    with pytest.raises(CompileTimeout):
        CompileJobs().run("slow block", hanging.wait, limit=0.05)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "compile slow block")


def test_side_by_side_yields_results_as_they_come():
    first = threading.Event()

    def slow():
        first.wait()
        return "slow"

    results = side_by_side([slow, lambda: first.set() or "fast"], 2)
    assert list(results) == ["fast", "slow"]


def test_one_thread_keeps_the_order():
    assert list(side_by_side([lambda number=number: number for number in range(5)], 1)) == [0, 1, 2, 3, 4]


def test_no_jobs_are_no_threads():
    before = threading.active_count()
    assert list(side_by_side([], 4)) == []
    assert threading.active_count() == before


def test_raising_check_starts_no_further_jobs():
    started, release = [], threading.Event()

    def job():
        started.append(1)
        release.wait()

    def check():
        if started:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side([job] * 5, 1, check))
    release.set()
    assert started == [1]


def test_failing_job_ends_the_wait_for_the_others():
    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side([cancel, lambda: 1], 2))
