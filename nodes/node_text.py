"""What a node shows: a text of parts, each of which can change later without the others."""

from __future__ import annotations

from collections.abc import Mapping

from ..compiler.common.words import join, say
from ..web_server import events

HEADINGS = {"vae": "VAE", "control_net": "ControlNet", "clip": "CLIP"}
"""What a part is headed by on a node with several objects. The model's has no heading."""


class NodeText:
    """The text of one node. Its parts are in the order in which they were first said."""

    def __init__(self, node_id: str, headings: Mapping[str, str] | None = None) -> None:
        """`headings` are by part."""
        self._node_id = node_id
        self._headings = headings or {}
        self._parts: dict[str, str] = {}

    def put(self, part: str, text: str) -> str:
        """Say something else in one part, and return the whole text."""
        name = self._headings.get(part)
        self._parts[part] = say("{name}: {text}", name=name, text=text) if name and text else text
        return join(self._parts.values())

    def show(self, part: str, text: str, workflow: str = "") -> str:
        """Do what `put` does, and show the text in the workflow that runs, or in another one."""
        whole = self.put(part, text)
        events.show(self._node_id, whole, workflow)
        return whole
