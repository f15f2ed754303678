"""The same nodes in the V3 schema of ComfyUI, where the core has it.

A node is described once, by its class: `INPUT_TYPES`, `RETURN_TYPES` and so on. Where the core's `io.Schema` has all
fields of such a description, `as_v3` makes one of its nodes of the class, with the same id, sockets and values.
Elsewhere ComfyUI gets the class itself.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)

NEEDED = {"node_id", "display_name", "category", "inputs", "outputs", "hidden", "description", "search_aliases",
          "is_output_node", "is_deprecated", "not_idempotent"}  # fmt: skip
"""Fields of `io.Schema` that a description fills. The V3 of 2025 lacks some, and V1 loses nothing there."""
WIDGETS = {"BOOLEAN": "Boolean", "INT": "Int", "FLOAT": "Float", "STRING": "String"}


def latest() -> Any:
    """Return ComfyUI's `comfy_api.latest` if its nodes can say all that ours say, or else None.

    A ComfyUI that has it has imported it before it imports extensions.
    """
    module = sys.modules.get("comfy_api.latest")
    try:
        fields = {field.name for field in dataclasses.fields(module.io.Schema)}
    except (AttributeError, TypeError):
        return None
    return module if fields >= NEEDED and hasattr(module, "ComfyExtension") else None


def extension(nodes: Iterable[type]) -> Any:
    """Return the `ComfyExtension` that has these nodes."""
    api = latest()
    listed = [node for node in (as_v3(api.io, node) for node in nodes) if _is_taken(node)]

    class CompiledGraphs(api.ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return listed

    return CompiledGraphs()


def _is_taken(node: Any) -> bool:
    """Whether the core takes this node's schema. One that it refuses would keep the nodes after it from loading."""
    try:
        node.GET_SCHEMA()
    except Exception as error:  # of a V3 that is newer than this module
        log.warning("This ComfyUI's V3 schema refuses the node %s, so it is not there: %r", node.__name__, error)
        return False
    return True


def as_v3(io: Any, node: type) -> type:
    """Return a V3 node that does what a V1 node does. ComfyUI hands it hidden inputs as attributes of `hidden`."""

    def define_schema(cls: type) -> Any:
        return _schema(io, node)

    def execute(cls: Any, **given: Any) -> Any:
        hidden = {name: getattr(cls.hidden, name) for name in node.INPUT_TYPES().get("hidden", ())}
        return getattr(node(), node.FUNCTION)(**given, **hidden)

    members: dict[str, Any] = {
        "__doc__": node.__doc__,
        "__module__": node.__module__,
        "define_schema": classmethod(define_schema),
        "execute": classmethod(execute),
    }
    for old, new in (("VALIDATE_INPUTS", "validate_inputs"), ("IS_CHANGED", "fingerprint_inputs")):
        if method := getattr(node, old, None):
            members[new] = classmethod(method.__func__)  # the core looks at its arguments
    return type(node.__name__, (io.ComfyNode,), members)


def _schema(io: Any, node: Any) -> Any:
    described = node.INPUT_TYPES()
    groups = (("required", False), ("optional", True))
    return io.Schema(
        node_id=node.ID,
        display_name=node.TITLE,
        category=node.CATEGORY,
        description=getattr(node, "DESCRIPTION", ""),
        search_aliases=list(getattr(node, "SEARCH_ALIASES", [])),
        is_output_node=getattr(node, "OUTPUT_NODE", False),
        is_deprecated=getattr(node, "DEPRECATED", False),
        # With V1 a node that wants its id never gets what an equal node made. V3 has to be told.
        not_idempotent="unique_id" in described.get("hidden", {}),
        inputs=[
            _input(io, name, form, optional)
            for group, optional in groups
            for name, form in described.get(group, {}).items()
        ],
        outputs=_outputs(io, node),
        hidden=[io.Hidden[name] for name in described.get("hidden", {})],
    )


def _input(io: Any, name: str, form: tuple, optional: bool) -> Any:
    """Return an input as V3 has it: a choice, a widget, or a socket."""
    kind, options = form[0], dict(form[1]) if len(form) > 1 else {}
    words = ("tooltip", "lazy", "default", *(["multiline"] if kind == "STRING" else []))
    known = {key: options.pop(key) for key in words if key in options}
    rest = {"optional": optional, "extra_dict": options or None}  # the frontend's words, which V1 and V3 share
    if isinstance(kind, list):
        return io.Combo.Input(name, options=kind, **known, **rest)
    if widget := WIDGETS.get(kind):
        return getattr(io, widget).Input(name, **known, **rest)
    cls = io.AnyType if kind == "*" else io.Custom(str(kind))
    return cls.Input(name, **known, **rest)


def _outputs(io: Any, node: Any) -> list[Any]:
    tooltips = getattr(node, "OUTPUT_TOOLTIPS", ())
    names = getattr(node, "RETURN_NAMES", node.RETURN_TYPES)
    found = zip(node.RETURN_TYPES, names, [*tooltips, *[None] * (len(names) - len(tooltips))], strict=True)
    return [io.Custom(str(kind)).Output(display_name=str(name), tooltip=tooltip) for kind, name, tooltip in found]
