"""Saved workflows depend on ids, the order of inputs, and outputs. Validators start nothing."""

from __future__ import annotations

import json
from pathlib import Path

KEPT = Path(__file__).with_name("node_definitions.json")
WORDS = ("OUTPUT_TOOLTIPS", "DESCRIPTION", "SEARCH_ALIASES")
WORDS_OF_INPUTS = ("tooltip", "translations")


def without_words(definition):
    """Return a definition without its texts, which may be reworded or may name what a machine lacks."""
    inputs = {group: [_without_its_words(field) for field in fields] for group, fields in definition["inputs"].items()}
    return {name: value for name, value in definition.items() if name not in WORDS} | {"inputs": inputs}


def _without_its_words(field):
    name, kind = field
    if isinstance(kind, list) and len(kind) == 2:
        kind = [kind[0], {key: value for key, value in kind[1].items() if key not in WORDS_OF_INPUTS}]
    return [name, kind]


def test_definitions_fit_saved_workflows(described_nodes):
    found = {name: without_words(node) for name, node in described_nodes["definitions"].items()}
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert found == kept
    assert [*found] == [*kept]


def test_a_validator_starts_nothing(described_nodes):
    assert described_nodes["validators"] == {"threads": [], "loaded": []}
