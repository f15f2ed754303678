"""Reasons in plain words: every reason that the README lists has some."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reasons():
    """The module by its file: its package wants a ComfyUI, and it does not."""
    spec = importlib.util.spec_from_file_location("reasons", ROOT / "nodes" / "reasons.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## What stays uncompiled, and why")[1]
    firsts = [line.split("|")[1] for line in table.split("\n## ")[0].splitlines() if line.startswith("| `")]
    return [reason for first in firsts for reason in re.findall("`([^`]+)`", first)]


def test_the_readmes_reasons_are_explained(reasons):
    assert len(listed()) > 8
    unexplained = [reason for reason in listed() if reasons.explain(reason) == reasons._OTHERWISE]
    assert unexplained == []


def test_what_a_compiler_says_is_explained_in_general(reasons):
    assert reasons.explain("RuntimeError: ptxas fatal") == reasons._OTHERWISE


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
def test_the_nearest_explanation_is_given(reasons, reason, words):
    assert words in reasons.explain(reason)


def test_reasons_of_calls_and_of_graphs_are_explained(reasons):
    role = {"reasons": {"gradients are on": 3}, "graphs": [{"reason": ""}, {"reason": "autocast is on"}]}
    report = {"workflows": {"one": {"roles": {"node": role}}}}
    assert list(reasons.explained(report)) == ["gradients are on", "autocast is on"]
