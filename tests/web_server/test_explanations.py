"""Explanations of reasons: every reason that the README lists has one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def explanations():
    """The module by its file, which needs neither torch nor ComfyUI."""
    spec = importlib.util.spec_from_file_location("explanations", ROOT / "web_server" / "explanations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## What stays uncompiled, and why")[1]
    firsts = [line.split("|")[1] for line in table.split("\n## ")[0].splitlines() if line.startswith("| `")]
    return [reason for first in firsts for reason in re.findall("`([^`]+)`", first)]


def test_the_readmes_reasons_are_explained(explanations):
    assert len(listed()) > 8
    unexplained = [reason for reason in listed() if explanations.explain(reason) == explanations._OTHERWISE]
    assert unexplained == []


def test_a_compilers_error_has_the_general_explanation(explanations):
    assert explanations.explain("RuntimeError: ptxas fatal") == explanations._OTHERWISE


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("patch attn1_patch", "HyperTile"),
        ("patch middle_patch", "A node changes"),
        ("weights on cpu while the model runs on cuda:0", "memory is short"),
        ("weights of type GGMLTensor", "quantised"),
        ("CompileTimeout: the compiler took more than 600 s", "COMPILED_GRAPHS_COMPILE_LIMIT"),
    ],
)
def test_the_nearest_explanation_is_given(explanations, reason, words):
    assert words in explanations.explain(reason)


def test_reasons_of_calls_and_graphs_are_explained(explanations):
    role = {"reasons": {"gradients are on": 3}, "graphs": [{"reason": ""}, {"reason": "autocast is on"}]}
    report = {"workflows": {"one": {"roles": {"node": role}}}}
    assert list(explanations.explained(report)) == ["gradients are on", "autocast is on"]
