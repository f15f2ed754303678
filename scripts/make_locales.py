"""Write `locales/LANGUAGE/`: what the nodes and the settings are called, as ComfyUI's frontend looks it up.

English is what the code says. Every other language has a catalogue, `locales/LANGUAGE.json`, written by people: from
each English text to its own, so that a text that changes here is missing there until it is translated again. What nodes
say while they run (`compiler/common/words.py`) is looked up in the catalogue itself. ComfyUI is not needed.

    python scripts/make_locales.py
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCALES = ROOT / "locales"
ENGLISH = "en"

Translate = Callable[[str], str]


class Catalogue:
    """A language's texts by the English ones; notes which of them were asked for."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._asked: dict[str, None] = {}

    def __call__(self, english: str) -> str:
        """Return the text, or the English one if there is none."""
        self._asked[english] = None
        return self._texts.get(english, english)

    def missing(self) -> list[str]:
        """Return English texts that were asked for and are not there."""
        return [text for text in self._asked if text not in self._texts]

    def gone(self) -> list[str]:
        """Return English texts that are there and that nobody asked for."""
        return [text for text in self._texts if text not in self._asked]


def content(translate: Translate) -> dict[str, dict[str, Any]]:
    """Return the content of each file of a language's folder, by name."""
    nodes, titles = _nodes()
    chosen = settings()
    groups = {name for setting in chosen for name in setting["category"][:2]}
    categories = {name for node in nodes.values() for name in node.CATEGORY.split("/")}
    return {
        "main.json": {
            "settingsCategories": {name: translate(name) for name in sorted(groups)},
            "nodeCategories": {name: translate(name) for name in sorted(categories)},
            "dataTypes": {name: translate(name) for name in sorted(_own_types(nodes))},
        },
        "nodeDefs.json": {name: _node(node, titles[name], translate) for name, node in nodes.items()},
        "settings.json": {
            setting["id"].replace(".", "_"): {key: translate(setting[key]) for key in ("name", "tooltip")}
            for setting in chosen
        },
    }


def _own_types(nodes: Mapping[str, Any]) -> set[str]:
    """Return the types of outputs that ComfyUI itself does not have: it names an output after its type."""
    return {kind for node in nodes.values() for kind in node.RETURN_TYPES if "booster" in kind.lower()}


def catalogues() -> dict[str, Catalogue]:
    """Return the languages besides English."""
    return {path.stem: Catalogue(json.loads(path.read_text(encoding="utf-8"))) for path in LOCALES.glob("*.json")}


def settings() -> list[dict[str, Any]]:
    """Return the settings as `web/settings.js` gives them to ComfyUI's frontend."""
    text = (ROOT / "web" / "settings.js").read_text(encoding="utf-8")
    return json.loads(re.search(r"const SETTINGS = (\[.*?\n\]);", text, re.DOTALL)[1])


def said(folder: Path = ROOT) -> list[str]:
    """Return the texts of all calls of `say`, what `join` puts between texts, and the notes of reasons.

    Raises ValueError for a call whose text stands elsewhere: nobody could find it.
    """
    from compiled_graphs.compiler.common.reason import ReasonCode
    from compiled_graphs.compiler.common.words import SEPARATORS

    texts: dict[str, None] = {}
    for path in sorted(path for part in ("compiler", "nodes", "web_server") for path in (folder / part).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "say" or path.name in _OWN_TEXTS:
                continue
            found = [leaf.value for leaf in _choices(call.args[0]) if isinstance(leaf, ast.Constant)]
            if not found:
                raise ValueError(f"{path.name}:{call.lineno}: the text of say is not written there")
            texts.update(dict.fromkeys(found))
    notes = [code.value.replace("{}", "{detail}") for code in ReasonCode]
    return [*texts, *SEPARATORS, *(note for note in notes if note != "{detail}")]


def _choices(text: ast.expr) -> list[ast.expr]:
    return [text.body, text.orelse] if isinstance(text, ast.IfExp) else [text]


_OWN_TEXTS = ("explanations.py",)
"""Files whose calls of `say` have notes of reasons, which are listed besides."""


def _node(node: Any, title: str, translate: Translate) -> dict[str, Any]:
    groups = node.INPUT_TYPES()
    inputs = {name: spec for group in ("required", "optional") for name, spec in groups.get(group, {}).items()}
    names = getattr(node, "RETURN_NAMES", node.RETURN_TYPES)
    outputs = {str(place): {"name": translate(name)} for place, name in enumerate(names)}
    for place, tooltip in enumerate(getattr(node, "OUTPUT_TOOLTIPS", ())):
        outputs[str(place)]["tooltip"] = translate(tooltip)
    entry = {
        "display_name": translate(title),
        "description": translate(node.DESCRIPTION),
        "inputs": {name: {"name": translate(name)} | _tooltip(spec, translate) for name, spec in inputs.items()},
        "outputs": outputs,
    }
    return {key: value for key, value in entry.items() if value}


def _tooltip(spec: tuple, translate: Translate) -> dict[str, str]:
    """A tooltip that names what this very machine lacks is not in the files: it comes with its own translations."""
    options = spec[1]
    return {} if "translations" in options else {"tooltip": translate(options["tooltip"])}


def _nodes() -> tuple[dict[str, Any], dict[str, str]]:
    """Import the nodes without ComfyUI, and return their classes and titles."""
    folders = ModuleType("folder_paths")
    folders.models_dir = ""
    folders.add_model_folder_path = lambda *_: None
    folders.get_filename_list = lambda _: []
    sys.modules.setdefault("folder_paths", folders)
    import compiled_graphs.nodes as nodes

    return nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS


def _write(folder: Path, files: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, fields in files.items():
        text = json.dumps(fields, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=LOCALES)
    out = parser.parse_args().out
    _write(out / ENGLISH, content(lambda text: text))
    wrong = False
    for language, catalogue in catalogues().items():
        for text in said():
            catalogue(text)
        _write(out / language, content(catalogue))
        for label, texts in (("is missing", catalogue.missing()), ("is used no more", catalogue.gone())):
            for text in texts:
                wrong = True
                print(f"locales/{language}.json: {label}: {json.dumps(text, ensure_ascii=False)}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(_main())
