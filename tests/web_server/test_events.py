"""Which workflow a prompt belongs to."""

from __future__ import annotations

import pytest
from compiled_graphs.web_server.events import NO_ID, workflow_id

PROMPT = {
    "1": {"class_type": "Loader", "inputs": {"name": "a"}},
    "2": {"class_type": "Node", "inputs": {"in": ["1", 0]}},
}
OTHER = {**PROMPT, "3": {"class_type": "Node", "inputs": {"in": ["2", 0]}}}


def test_a_saved_workflow_has_the_frontends_id():
    assert workflow_id(PROMPT, {"workflow": {"id": "abc"}}) == "abc"


@pytest.mark.parametrize(
    "sent",
    [None, {}, [], "text", {"workflow": None}, {"workflow": "{}"}, {"workflow": []}, {"workflow": {"id": NO_ID}}],
)
def test_whatever_a_client_sends_a_prompt_is_known_by_its_nodes(sent):
    """ComfyUI does not look at what it passes on."""
    assert workflow_id(PROMPT, sent) == workflow_id(PROMPT, None) != workflow_id(OTHER, sent)
