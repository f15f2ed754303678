"""The texts that ComfyUI's frontend looks up, in English and in other languages."""

from __future__ import annotations

import filecmp
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCALES = ROOT / "locales"
FILES = ["main.json", "nodeDefs.json", "settings.json"]
LANGUAGES = ["en", "zh"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that `scripts/make_locales.py` writes now, and its complaints."""
    folder = tmp_path_factory.mktemp("locales")
    command = [sys.executable, str(ROOT / "scripts" / "make_locales.py"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert not done.stderr or done.returncode == 0, done.stderr[-2000:]
    return folder, done.stdout


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", FILES)
def test_the_files_say_what_the_code_says(made, language, name):
    assert filecmp.cmp(made[0] / language / name, LOCALES / language / name, shallow=False), (
        "run scripts/make_locales.py and commit what it writes"
    )


def test_translations_are_complete_without_leftovers(made):
    assert made[1] == ""


def test_there_are_no_other_files(made):
    written = {path.relative_to(made[0]) for path in made[0].rglob("*.json")}
    assert written == {path.relative_to(LOCALES) for path in LOCALES.glob("*/*")}
    assert written == {Path(language, name) for language in LANGUAGES for name in FILES}


def test_the_chinese_is_chinese():
    nodes = json.loads((LOCALES / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    sentences = [node["description"] for node in nodes.values()]
    tooltips = [item.get("tooltip") for node in nodes.values() for item in node["inputs"].values()]
    sentences += [text for text in tooltips if text]
    assert len(sentences) > 100
    assert [text for text in sentences if not re.search("[\u4e00-\u9fff]", text)] == []


def test_the_panel_has_its_chinese():
    said = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.js") if path.stem != "words")
    used = set(re.findall(r'\bsay\(\s*"((?:[^"\\]|\\.)*)"', said))
    words = (ROOT / "web" / "words.js").read_text(encoding="utf-8")
    known = dict(re.findall(r'^  "((?:[^"\\]|\\.)*)": "((?:[^"\\]|\\.)*)",$', words, re.MULTILINE))
    kinds = {
        "base UNet",
        "refiner UNet",
        "diffusion model",
        "VAE",
        "ControlNet",
        "text encoder",
    }  # the server says these
    assert len(used) > 50
    assert used | kinds == known.keys()
    values = {english: re.findall(r"\{\w+\}", english) for english in known}
    assert [english for english, names in values.items() if sorted(names) != placeholders(known[english])] == []


def test_translations_keep_every_value():
    texts = json.loads((LOCALES / "zh.json").read_text(encoding="utf-8"))
    assert [english for english, chinese in texts.items() if placeholders(english) != placeholders(chinese)] == []


def placeholders(text):
    return sorted(re.findall(r"\{\w*(?::[^}]*)?\}", text))


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_has_a_placeholder_of_the_frontend(language):
    texts = "".join((LOCALES / language / name).read_text(encoding="utf-8") for name in FILES)
    values = re.findall(r': "((?:[^"\\]|\\.)*)"', texts)
    assert len(values) > 100
    assert [text for text in values if set(text) & set("{}@|")] == []


def test_every_input_has_a_name_and_a_tooltip(server):
    """This test reads the nodes of a real server, and not the generator's list of them."""
    ours = {name: node for name, node in server.get("/object_info").items() if name.startswith("CG_")}
    assert len(ours) >= 5
    for language in LANGUAGES:
        texts = json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))
        for name, node in ours.items():
            inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
            assert texts[name]["inputs"].keys() == inputs.keys()
            assert len(texts[name].get("outputs", {})) == len(node["output"])
            assert all(spec[1]["tooltip"] for spec in inputs.values())
            assert node["description"]
            if node.get("output_tooltips"):
                assert [item["tooltip"] for item in texts[name].get("outputs", {}).values()]


def test_what_this_machine_lacks_is_said_in_chinese_too(server):
    optional = [
        node["input"].get("optional", {}) for name, node in server.get("/object_info").items() if name[:3] == "CG_"
    ]
    choices = [inputs["backend"][1] for inputs in optional if "backend" in inputs]
    assert len(choices) >= 5
    for options in choices:
        english, chinese = options["tooltip"].splitlines(), options["translations"]["zh"].splitlines()
        assert len(chinese) == len(english)
        assert [line for line in chinese if not re.search("[\u4e00-\u9fff]", line)] == []


def test_a_server_hands_the_texts_out(server):
    try:
        texts = server.get("/i18n")
    except OSError:
        pytest.skip("this ComfyUI has no texts of extensions")
    for language in LANGUAGES:
        main, nodes, settings = (json.loads((LOCALES / language / name).read_text(encoding="utf-8")) for name in FILES)
        assert texts[language]["settings"].items() >= settings.items()
        assert texts[language]["nodeDefs"].items() >= nodes.items()
        assert texts[language]["settingsCategories"].items() >= main["settingsCategories"].items()
