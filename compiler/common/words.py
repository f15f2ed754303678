"""What a person is told: English in the code, and other languages from `locales/LANGUAGE.json`.

`Words` are the English text, so whoever knows nothing of languages can use them as one. A catalogue is looked up when
somebody asks for its language. `scripts/make_locales.py` finds the calls of `say` and complains of texts that a
catalogue lacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

LOCALES = Path(__file__).resolve().parents[2] / "locales"
SEPARATORS = (" ", ", ", " + ")
"""What stands between texts and is another in other languages: Chinese writes no space between sentences."""


class Words(str):
    """An English text that can be had in other languages."""

    __slots__ = ("_translate",)

    def __new__(cls, english: str, translate: Callable[[str], str] | None = None) -> Words:
        """`translate` takes a language such as "zh" and returns the text in it."""
        words = super().__new__(cls, english)
        words._translate = translate
        return words

    def __deepcopy__(self, memo: dict[int, Any]) -> Words:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A pickle has the English text alone."""
        return str, (str(self),)

    def in_language(self, language: str) -> str:
        """Return the text in a language, in English where its catalogue lacks a part."""
        return self._translate(language) if self._translate else str(self)

    def translations(self) -> dict[str, str]:
        """Return the text in each language besides English."""
        return {language: self.in_language(language) for language in languages()}


def say(template: str, **values: Any) -> Words:
    """Return a text with values in it, which may be `Words` themselves."""

    def translate(language: str) -> str:
        return (
            _catalogue(language)
            .get(template, template)
            .format(**{name: in_language(value, language) for name, value in values.items()})
        )

    return Words(template.format(**values), translate)


def join(parts: Iterable[str], separator: str = "\n") -> Words:
    """Return texts one after the other, without those that are empty."""
    kept = [part for part in parts if part]

    def translate(language: str) -> str:
        between = _catalogue(language).get(separator, separator)
        return between.join(in_language(part, language) for part in kept)

    return Words(separator.join(kept), translate)


def in_language(value: Any, language: str) -> Any:
    """Return a text in a language if it has one, or whatever else it is as it is."""
    return value.in_language(language) if isinstance(value, Words) else value


def translations(text: str) -> dict[str, str]:
    """Return a text in each language besides English; nothing for a text that has none."""
    return text.translations() if isinstance(text, Words) else {}


@lru_cache(maxsize=1)
def languages() -> tuple[str, ...]:
    """Return the languages that have a catalogue."""
    return tuple(sorted(path.stem for path in LOCALES.glob("*.json")))


@lru_cache(maxsize=8)
def _catalogue(language: str) -> Mapping[str, str]:
    if language not in languages():  # a request names the language, and must not name a file
        return {}
    try:
        return json.loads((LOCALES / f"{language}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
