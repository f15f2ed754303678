"""What the nodes that compile have in common: one object in, the same object with compiled blocks out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from ..compiler.backends import NAMES
from ..web_server import events
from . import inputs
from .node_text import NodeText

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request


class CompileNode(ABC):
    """The base of such nodes. A node says what its socket and its own widgets are, and how it compiles."""

    SOCKET: tuple[str, str]
    """The name of the required input, and its tooltip. Its type is that of the output."""
    WIDGETS_BEFORE: dict[str, Any] = {}
    """Widgets before `backend`: saved workflows have values by their order."""
    WIDGETS_AFTER: dict[str, Any] = {}
    """Widgets after `verify`."""
    RETURN_TYPES: tuple[str, ...]
    FUNCTION = "compile"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        name, tooltip = cls.SOCKET
        common = {"backend": inputs.backend(), "verify": inputs.VERIFY}
        return {
            "required": {name: (cls.RETURN_TYPES[0], {"tooltip": tooltip})},
            "optional": {**cls.WIDGETS_BEFORE, **common, **cls.WIDGETS_AFTER},
            "hidden": inputs.HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, backend: str = NAMES[0]) -> bool | str:  # noqa: N802  ComfyUI's name
        return inputs.check_backend(backend)

    def compile(
        self,
        backend: str = NAMES[0],
        verify: bool = True,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
        shown: NodeText | None = None,
        **own: Any,
    ) -> dict[str, Any]:
        """Return the object with compiled blocks, and the text the node shows. `own` are the socket and own widgets.

        `shown` is the text of a node that does more than this.
        """
        from ..compiler.hosts.comfy.process import warm_up

        warm_up(backend)  # Where no server says when a prompt is queued, the warm-up begins here at the latest.
        tell = partial((shown or NodeText(unique_id)).show, self.SOCKET[0])
        request = events.request(backend, verify, unique_id, prompt, extra_pnginfo, tell)
        compiled, text = self.compile_with(request, **own)
        return {"ui": {"text": [tell(text)]}, "result": (compiled,)}

    @abstractmethod
    def compile_with(self, request: Request, **own: Any) -> tuple[Any, str]:
        """Return the object with compiled blocks, and what to tell the person."""
