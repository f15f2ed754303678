"""Nodes in ComfyUI's V3 schema: the same ids, sockets, values and texts as in V1."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

NOT_SET = (("multiline", False), ("multiselect", False))
"""What V3 writes down although nobody has set it."""
MODULE = Path(__file__).resolve().parents[2] / "nodes" / "v3_schema.py"


@pytest.fixture(scope="module")
def v3_schema():
    spec = importlib.util.spec_from_file_location("v3_schema", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def common_form(kind, options=None):
    """Return an input as either schema describes it. V3 leaves out what is not set, and names a choice."""
    options = {key: value for key, value in (options or {}).items() if value is not None}
    if kind == "COMBO":
        kind = options.pop("options")
    options = {key: value for key, value in options.items() if (key, value) not in NOT_SET}
    if "translations" in options:  # says what this machine has
        del options["tooltip"], options["translations"]
    return kind, options


def test_a_server_has_the_nodes_as_they_are_described(server, described_nodes):
    info, described = server.get("/object_info"), described_nodes["definitions"]
    assert described.keys() <= info.keys()
    for name, ours in described.items():
        theirs = info[name]
        for group in ("required", "optional"):
            wanted = {key: common_form(*form) for key, form in ours["inputs"].get(group, [])}
            found = {key: common_form(*form) for key, form in theirs["input"].get(group, {}).items()}
            assert list(found) == list(wanted), (name, group)
            assert {key: form[1] for key, form in found.items()} == {key: form[1] for key, form in wanted.items()}, name
            assert {key: str(form[0]) for key, form in found.items() if not isinstance(form[0], list)} == {
                key: str(form[0]) for key, form in wanted.items() if not isinstance(form[0], list)
            }
        assert theirs["input"].get("hidden", {}).keys() >= dict(ours["inputs"].get("hidden", [])).keys()
        assert theirs["output"] == ours["RETURN_TYPES"]
        assert theirs["output_name"] == ours.get("RETURN_NAMES", ours["RETURN_TYPES"])
        assert theirs["display_name"] == ours["title"]
        assert theirs["category"] == ours["CATEGORY"]
        assert theirs["description"] == ours.get("DESCRIPTION", "")
        assert theirs["output_node"] == ours.get("OUTPUT_NODE", False)
        if any("deprecated" in node for node in info.values()):  # ComfyUI since August 2024 says so
            assert theirs.get("deprecated", False) == ours.get("DEPRECATED", False)


def test_a_core_of_today_gets_v3(server):
    node = server.get("/object_info/CG_CompileModel")["CG_CompileModel"]
    if "has_intermediate_output" not in node:
        pytest.skip("this ComfyUI's V3 says less than our nodes")
    kind, options = node["input"]["optional"]["when"]
    assert kind == "COMBO"
    assert options["options"] == ["before sampling", "in background"]
    assert node["search_aliases"]


def test_v3_is_taken_where_it_says_as_much(v3_schema, monkeypatch):
    whole = make_dataclass("Schema", sorted(v3_schema.NEEDED))
    less = make_dataclass("Schema", sorted(v3_schema.NEEDED - {"search_aliases"}))
    for schema, is_taken in ((whole, True), (less, False), (object, False)):
        api = SimpleNamespace(io=SimpleNamespace(Schema=schema), ComfyExtension=object)
        monkeypatch.setitem(sys.modules, "comfy_api.latest", api)
        assert v3_schema.latest() is (api if is_taken else None)
    for nothing in (None, ModuleType("comfy_api.latest")):
        monkeypatch.setitem(sys.modules, "comfy_api.latest", nothing)
        assert v3_schema.latest() is None


def test_a_node_that_the_core_refuses_does_not_take_the_others_with_it(v3_schema, monkeypatch, caplog):
    class ComfyNode:
        @classmethod
        def GET_SCHEMA(cls):
            if cls.__name__ == "Refused":
                raise TypeError("no such field")

    schema = make_dataclass("Schema", sorted(v3_schema.NEEDED))
    api = SimpleNamespace(io=SimpleNamespace(Schema=schema, ComfyNode=ComfyNode), ComfyExtension=object)
    monkeypatch.setitem(sys.modules, "comfy_api.latest", api)
    nodes = [type(name, (), {}) for name in ("First", "Refused", "Last")]
    taken = asyncio.run(v3_schema.extension(nodes).get_node_list())
    assert [node.__name__ for node in taken] == ["First", "Last"]
    assert "refuses the node Refused" in caplog.text
