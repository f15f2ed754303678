"""Texts for people, in English and in other languages."""

from __future__ import annotations

import copy
import os
import pickle

from compiled_graphs.compiler.common import words
from compiled_graphs.compiler.common.words import join, say, translations


def in_catalogue(monkeypatch, **texts):
    monkeypatch.setattr(words, "_catalogue", lambda language: texts if language == "zh" else {})


def test_a_text_is_english_and_knows_its_translation(monkeypatch):
    in_catalogue(monkeypatch, **{"{count} blocks": "{count} 个块"})
    text = say("{count} blocks", count=3)
    assert text == "3 blocks"
    assert text.in_language("zh") == "3 个块"
    assert text.in_language("de") == "3 blocks"


def test_values_are_translated_where_they_stand(monkeypatch):
    in_catalogue(monkeypatch, **{"took {time}": "耗时 {time}", "{n} s": "{n} 秒"})
    text = join([say("took {time}", time=say("{n} s", n=2)), "", "plain"])
    assert text == "took 2 s\nplain"
    assert text.in_language("zh") == "耗时 2 秒\nplain"


def test_languages_are_those_with_a_catalogue_and_plain_texts_have_none():
    assert "zh" in words.languages()
    assert translations("plain") == {}
    assert translations(say("no such text in any catalogue"))["zh"] == "no such text in any catalogue"


def test_a_copy_still_knows_its_translation(monkeypatch):
    in_catalogue(monkeypatch, hello="你好")
    assert copy.deepcopy(say("hello")).in_language("zh") == "你好"


def test_a_pickle_is_the_english_text():
    assert pickle.loads(pickle.dumps(say("hello"))) == "hello"


def test_what_stands_between_sentences_is_translated(monkeypatch):
    in_catalogue(monkeypatch, **{"One.": "一。", "Two.": "二。", " ": ""})
    text = join([say("One."), say("Two.")], " ")
    assert text == "One. Two."
    assert text.in_language("zh") == "一。二。"


def test_a_language_is_no_path(tmp_path):
    (tmp_path / "evil.json").write_text('{"yes": "no"}')
    text = say("yes")
    for language in (str(tmp_path / "evil"), os.path.relpath(tmp_path / "evil", words.LOCALES)):
        assert text.in_language(language) == "yes"
