"""The work that starts when a prompt is queued, and does not start at other times."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from comfy_server import PromptFailed
from compiled_graphs.web_server import prompt_server

OURS = {"CG_CompileModel", "CG_DeepCache"}


@pytest.fixture
def queued_prompt(monkeypatch):
    """The module, with a stand-in for ComfyUI's folders."""
    monkeypatch.setitem(sys.modules, "folder_paths", sys.modules.get("folder_paths") or ModuleType("folder_paths"))
    from compiled_graphs.web_server import queued_prompt

    return queued_prompt


@pytest.mark.parametrize(
    "request_body",
    [None, [], {}, {"prompt": None}, {"prompt": []}, {"prompt": {"1": None, "2": {"class_type": ["CG_DeepCache"]}}},
     {"prompt": {"1": {"class_type": "CG_DeepCache"}, "2": {"class_type": "CG_DeepCache", "inputs": 3}}},
     {"prompt": {"1": {"class_type": "KSampler", "inputs": {}}}}],
)  # fmt: skip
def test_a_request_without_nodes_of_ours_has_none(queued_prompt, request_body):
    assert queued_prompt.nodes_in(request_body, OURS) == []


def test_nodes_of_ours_are_found_with_their_inputs(queued_prompt):
    nodes = {"1": {"class_type": "KSampler", "inputs": {}}, "2": {"class_type": "CG_CompileModel", "inputs": {"a": 1}}}
    assert queued_prompt.nodes_in({"prompt": nodes}, OURS) == [("CG_CompileModel", {"a": 1})]


@pytest.mark.parametrize(
    ("inputs", "backend"),
    [({}, "auto"), ({"backend": "eager"}, "eager"), ({"backend": "nonsense"}, None), ({"backend": ["4", 0]}, None)],
)
def test_only_a_backend_that_exists_is_warmed_up(queued_prompt, inputs, backend):
    assert queued_prompt.backend_of(inputs) == backend


def test_a_server_without_such_handlers_is_left_alone(queued_prompt, monkeypatch):
    for server in (None, SimpleNamespace()):
        monkeypatch.setattr(queued_prompt, "prompt_server", lambda server=server: server)
        queued_prompt.register(OURS, OURS)


def test_the_handler_prepares_and_hands_the_request_on(queued_prompt, monkeypatch):
    handlers, prepared = [], []
    server = SimpleNamespace(add_on_prompt_handler=handlers.append)
    monkeypatch.setattr(queued_prompt, "prompt_server", lambda: server)
    monkeypatch.setattr(queued_prompt, "_prepare", lambda *what: prepared.append(what))
    queued_prompt.register(OURS, {"CG_CompileModel"}, {"CG_DeepCache"})
    (handler,) = handlers
    compiled = {"prompt": {"1": {"class_type": "CG_CompileModel", "inputs": {"backend": "eager"}}}}
    cached = {"prompt": {"1": {"class_type": "CG_DeepCache", "inputs": {}}}}
    for request in (compiled, cached, {"prompt": {}}):
        assert handler(request) is request
    assert prepared == [(["eager"], False), ([], True)]


def test_comfyuis_server_module_is_not_ours():
    """ComfyUI's module is called `server`. A folder of that name here would hide it if Python starts in this folder."""
    root = Path(prompt_server.__file__).resolve().parents[1]
    assert (root / "web_server").is_dir()
    assert not (root / "server").exists()
    assert not (root / "server.py").exists()
    assert prompt_server.__name__ == "compiled_graphs.web_server.prompt_server"


def test_reading_the_registry_changes_nothing(fresh, workflow):
    first, second = (fresh.get("/compiled_graphs/registry") for _ in range(2))
    assert first == second
    assert first["workflows"] == {}
    prompt = workflow()
    prompt["2"]["inputs"]["backend"] = "nonsense"
    with pytest.raises(PromptFailed, match="nonsense"):
        fresh.run(prompt)
    assert "3 of 3 block types compiled" in fresh.run(workflow())["2"]["text"][0]
    assert "on_prompt_handler" not in fresh.log.read_text(), "ComfyUI logs what a handler raises"
