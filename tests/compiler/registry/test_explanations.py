"""The explanations of reasons, in each language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiled_graphs.compiler.common.reason import Reason, ReasonCode, ReasonedError, Unsupported, reason_of
from compiled_graphs.compiler.registry.explanations import EXPLANATIONS, explain, explained

ROOT = Path(__file__).resolve().parents[3]


def listed() -> list[str]:
    page = (ROOT / "docs" / "fallbacks.md").read_text(encoding="utf-8")
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [note for first in firsts for note in re.findall("`([^`]+)`", first)]


def codes_of(note: str) -> list[ReasonCode]:
    """Return the codes whose note begins with a note of docs/fallbacks.md, or the other way round."""
    beginnings = {code: code.value.split("{}")[0].strip() for code in ReasonCode}
    return [code for code, text in beginnings.items() if text and (note.startswith(text) or text.startswith(note))]


@pytest.mark.parametrize("code", ReasonCode, ids=lambda code: code.name)
def test_every_code_is_explained_in_both_languages(code):
    english, chinese = EXPLANATIONS[code].en, EXPLANATIONS[code].zh
    assert english.isascii()
    assert english.endswith(".")
    assert re.search("[\u4e00-\u9fff]", chinese)
    assert chinese.endswith("。")


def test_the_pages_reasons_exist():
    assert len(listed()) > 8
    assert [note for note in listed() if not codes_of(note)] == []


def test_notes_tell_codes_apart():
    notes = [code.value for code in ReasonCode if code.value != "{}"]
    assert len(set(notes)) == len(notes)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (Reason(ReasonCode.PATCH, "attn1_patch"), "HyperTile"),
        (Reason(ReasonCode.PATCH, "middle_patch"), "A node changes"),
        (Reason(ReasonCode.WEIGHT_DEVICE, "cpu while the model runs on cuda:0"), "memory is short"),
        (Reason(ReasonCode.WEIGHT_TYPE, "Packed"), "quantised"),
        (Reason(ReasonCode.WEIGHT_LAYOUT, "IQ4_NL of GGUF, which is not known"), "Another format"),
        (Reason(ReasonCode.TIMEOUT, "600 s"), "COMPILED_GRAPHS_COMPILE_LIMIT"),
        (reason_of(RuntimeError("ptxas fatal")), "cannot be traced or compiled"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_reason_is_explained_by_its_code(reason, words):
    assert words in explain(reason)


@pytest.mark.parametrize("language", ["zh", "zh-CN", "zh-TW"])
def test_chinese_is_chosen(language):
    assert explain(Reason(ReasonCode.GRADIENTS), language) == "模型正在训练。"


def test_english_stands_in_for_other_languages():
    assert explain(Reason(ReasonCode.GRADIENTS), "fr") == explain(Reason(ReasonCode.GRADIENTS))


def test_meanings_are_found_by_the_notes_of_a_report():
    reasons = [Reason(ReasonCode.GRADIENTS), Reason(ReasonCode.AUTOCAST)]
    assert list(explained(reasons)) == ["gradients are on", "autocast is on"]


def test_an_error_keeps_its_reason_through_pickling():
    import pickle

    again = pickle.loads(pickle.dumps(Unsupported(ReasonCode.WEIGHT_TYPE, "Packed")))
    assert isinstance(again, ReasonedError)
    assert again.reason == Reason(ReasonCode.WEIGHT_TYPE, "Packed")
    assert str(again) == "weights of type Packed"


def test_braces_in_a_detail_stay():
    assert str(Reason(ReasonCode.ERROR, "KeyError: {'a': {}}")) == "KeyError: {'a': {}}"
