"""A network that is slower with its graphs goes on without them: when that is decided, and how often."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.common.timing import CallTime, Gain
from compiled_graphs.compiler.runtime.speed_trial import (
    DOUBTED,
    MARGIN,
    MAX_ALONE,
    MAX_SAMPLINGS,
    MIN_ALONE,
    MIN_CALLS,
    SpeedTrial,
)

SMALL, LARGE = (1, 4, 8, 8), (1, 4, 16, 16)
SLOWER, FASTER = Gain(0.9, True), Gain(DOUBTED + 0.01, True)


def figure(seconds, shape=SMALL, calls=MIN_CALLS):
    return CallTime("forward", shape, seconds, calls)


def brought(seconds):
    return replace(figure(seconds, calls=MIN_ALONE), brings_weights=True)


class Fed:
    """Stands in for a tracker that has timed calls."""

    def __init__(self, *figures):
        self._figures = list(figures)

    def timed(self, *call, **where):
        return nullcontext()

    def figures(self):
        return self._figures


def doubted(*compiled):
    trial = SpeedTrial()
    trial.end_sampling(SLOWER, compiled or [figure(1.0)])
    return trial


def after(trial, *plain):
    """What became of it, after a sampling with such uncompiled calls."""
    trial.latency = Fed(*plain)
    trial.end_sampling(None, [])
    return trial


def test_a_network_that_is_faster_is_not_doubted():
    trial = SpeedTrial()
    trial.end_sampling(FASTER, [figure(1.0)])
    assert (trial.runs_eagerly, trial.has_fallen_back, trial.factor) == (False, False, None)


@pytest.mark.parametrize(
    ("gain", "figures"),
    [(None, [figure(1.0)]), (SLOWER, []), (SLOWER, [figure(1.0, calls=MIN_CALLS - 1)])],
    ids=["nothing final", "no calls", "too few calls"],
)
def test_there_is_no_doubt_without_figures(gain, figures):
    trial = SpeedTrial()
    trial.end_sampling(gain, figures)
    assert not trial.runs_eagerly


def test_a_text_encoder_is_doubted_however_fast_its_blocks_are():
    trial = SpeedTrial.of_encoder()
    trial.end_sampling(FASTER, [figure(1.0, calls=MIN_ALONE - 1)])
    assert not trial.runs_eagerly
    trial.end_sampling(FASTER, [figure(1.0, calls=MIN_ALONE)])
    assert trial.runs_eagerly
    assert after(trial, figure(0.5, calls=MIN_ALONE)).has_fallen_back


def test_calls_that_belong_to_no_sampling_are_as_many_each_way():
    trial = SpeedTrial.of_calls()
    trial.end_sampling(SLOWER, [figure(1.0, calls=MIN_CALLS)])
    for calls in range(1, MIN_CALLS):
        assert after(trial, figure(0.5, calls=calls)).runs_eagerly
        assert not trial.has_fallen_back
    assert after(trial, figure(0.5, calls=MIN_CALLS)).has_fallen_back


def test_blocks_that_seem_slower_are_no_reason_to_leave():
    trial = doubted()
    assert trial.runs_eagerly
    assert not trial.has_fallen_back
    assert trial.reason.code is ReasonCode.TIMED_UNCOMPILED


@pytest.mark.parametrize(
    ("seconds", "is_left"), [(0.5, True), (MARGIN - 0.01, True), (MARGIN + 0.01, False), (1.0, False), (2.0, False)]
)
def test_whole_calls_decide_by_more_than_noise(seconds, is_left):
    trial = after(doubted(), figure(seconds))
    assert (trial.has_fallen_back, trial.runs_eagerly, trial.factor) == (is_left, is_left, seconds)


def test_a_decision_is_for_good():
    left, kept = after(doubted(), figure(0.5)), after(doubted(), figure(2.0))
    for trial, other, gain in ((left, figure(5.0), FASTER), (kept, figure(0.1), SLOWER)):
        factor, runs_eagerly = trial.factor, trial.runs_eagerly
        for _ in range(5):
            trial.latency = Fed(other)
            trial.end_sampling(gain, [figure(1.0)])
            assert (trial.factor, trial.runs_eagerly) == (factor, runs_eagerly)


def test_the_reason_has_the_figure():
    reason = after(doubted(), figure(0.904)).reason
    assert reason.code is ReasonCode.SLOWER
    assert "0.90x" in str(reason)


def test_only_a_size_that_was_called_both_ways_decides():
    trial = after(doubted(figure(1.0), figure(4.0, LARGE)), figure(0.1, calls=MIN_CALLS - 1), figure(3.6, LARGE))
    assert trial.factor == pytest.approx(0.9)


def test_short_samplings_add_up():
    trial = after(doubted(), figure(0.5, calls=4))
    assert trial.runs_eagerly
    assert not trial.has_fallen_back
    assert after(trial, figure(0.5, calls=8)).has_fallen_back


def test_a_search_without_end_ends_compiled():
    trial = doubted()
    for _ in range(MAX_SAMPLINGS):
        assert trial.runs_eagerly
        after(trial, figure(0.1, LARGE))
    assert (trial.runs_eagerly, trial.has_fallen_back, trial.factor) == (False, False, None)
    assert not after(trial, figure(0.1)).runs_eagerly


def test_calls_that_bring_weights_are_compared_with_such_calls_alone():
    """A text encoder brings its weights for the first prompt, and has them for the second: copies take the most."""
    trial = SpeedTrial.of_encoder()
    trial.end_sampling(FASTER, [brought(0.42), figure(0.02, calls=MIN_ALONE)])
    after(trial, figure(0.07, calls=MIN_ALONE))
    assert (trial.has_fallen_back, trial.factor) == (False, pytest.approx(3.5))
    trial = SpeedTrial.of_encoder()
    trial.end_sampling(FASTER, [brought(0.42)])
    for _ in range(MAX_ALONE):
        assert trial.runs_eagerly
        after(trial, figure(0.07, calls=MIN_ALONE))
    assert (trial.runs_eagerly, trial.has_fallen_back, trial.factor) == (False, False, None)
