"""Networks that look at values between their blocks are called all the same; blocks that do so are not."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.torch_compat import FakeTensorMode, needs_values
from compiled_graphs.compiler.tracing import answered_values
from compiled_graphs.compiler.tracing.answered_values import Guess, call_with_answers, constant, without_answers
from torch._subclasses.fake_tensor import DataDependentOutputException


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def asked(call):
    """Return what a call gets, and how often it was made."""
    got, tries = [], []

    def run(is_answered):
        tries.append(is_answered)
        got.append(call())

    call_with_answers(run)
    return got[0], tries


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: bool(torch.empty(3).min() != torch.empty(3).max()), False),
        (lambda: torch.empty(3, dtype=torch.long).sum().item(), 1),
        (lambda: float(torch.empty(())), 0.0),
        (lambda: tuple(torch.bincount(torch.empty(4, dtype=torch.long), minlength=5).shape), (5,)),
        (lambda: tuple(torch.bincount(torch.empty(4, dtype=torch.long), torch.empty(4), 3).shape), (3,)),
        (lambda: tuple(torch.empty(3, 4)[torch.empty(3, 4) > 0].shape), (12,)),
        (lambda: tuple(torch.empty(2, 3, 4)[:, torch.empty(3) > 0].shape), (2, 3, 4)),
        (lambda: int((torch.empty(3, 4) > 0).sum()), 12),
    ],
)
def test_what_a_network_asks_is_answered(ask, answer):
    assert asked(ask) == (answer, [False, True])


@pytest.mark.parametrize("answer", [False, True])
def test_a_guess_decides_what_a_boolean_is(answer):
    guess = Guess(lambda: found.append(asked(lambda: bool(torch.empty(3).min() != torch.empty(3).max()))), answer)
    found = []
    guess()
    assert found == [(answer, [False, True])]
    assert guess.was_asked


def test_a_guess_tells_whether_it_mattered():
    guess = Guess(lambda: asked(lambda: torch.empty(3, dtype=torch.long).sum().item()), True)
    guess()
    assert not guess.was_asked
    assert asked(lambda: bool(torch.empty(3).min() != torch.empty(3).max()))[0] is False, "later calls have no guess"


def test_a_loop_that_waits_for_another_guess_ends():
    asks = []

    def wait():
        while torch.empty(3).min() != torch.empty(3).max():
            asks.append(1)

    with pytest.raises(DataDependentOutputException):
        Guess(lambda: asked(wait), True)()
    assert len(asks) == answered_values.MAX_GUESSES


def test_a_call_that_asks_nothing_is_made_once():
    assert asked(lambda: tuple(torch.empty(2, 3).T.shape)) == ((3, 2), [False])


def test_blocks_get_no_answer():
    def block():
        with without_answers():
            return torch.empty(()).item()

    with pytest.raises(DataDependentOutputException) as failed:
        asked(block)
    assert needs_values(failed.value)
    assert asked(lambda: torch.empty(()).item())[0] == 0.0, "and the next one who asks does"


def test_another_error_with_answers_does_not_hide_the_first():
    def call():
        [1][torch.ones(2, dtype=torch.long).sum().item()]

    with pytest.raises(DataDependentOutputException) as failed:
        asked(call)
    assert needs_values(failed.value)


def test_an_error_that_is_not_about_values_is_raised_at_once():
    tries = []

    def call(is_answered):
        tries.append(is_answered)
        raise KeyError("absent")

    with pytest.raises(KeyError):
        call_with_answers(call)
    assert tries == [False]


def test_a_loop_that_waits_for_another_answer_ends(monkeypatch):
    monkeypatch.setattr(answered_values, "MAX_ANSWERS", 20)

    def wait():
        while not torch.empty((), dtype=torch.bool).item():
            pass

    with pytest.raises(DataDependentOutputException) as failed:
        asked(wait)
    assert needs_values(failed.value)


def test_a_constant_keeps_its_value():
    with answered_values.without_fake_tensors():
        real = torch.tensor([0.25])
    assert float(1.0 - constant(real)) == 0.75
