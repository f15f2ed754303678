"""Workflows as prompts: from the form that the frontend saves to the form that ComfyUI runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Prompt = dict[str, dict[str, Any]]
"""Nodes by id: `{"class_type", "inputs"}`. An input is a value, or `[id, slot]` of another node's output."""
NodeTypes = Mapping[str, Mapping[str, Any]]
"""What the server says of each class of node (`GET /object_info`)."""

NEVER, BYPASSED = 2, 4
"""Modes of a node."""
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
AFTER_SEED = {"fixed", "increment", "decrement", "randomize"}
"""Values of the widget that the frontend puts after a seed."""
SEEDS = {"seed", "noise_seed"}
INPUT_NODE = -10
"""The id that a subgraph's links have for what comes in."""


class WorkflowError(Exception):
    """This file is no workflow that can be run. The message is one sentence for people."""


@dataclass(frozen=True)
class _Link:
    origin: Any
    slot: int


@dataclass(frozen=True)
class _Graph:
    """The nodes of a workflow, or of one use of a subgraph in it."""

    nodes: Mapping[str, Mapping[str, Any]]
    links: Mapping[Any, _Link]
    subgraphs: Mapping[str, Mapping[str, Any]]
    prefix: str = ""
    """Stands before the ids of its nodes."""
    outputs: Mapping[int, _Link] = field(default_factory=dict)
    """What goes out of a subgraph, by slot."""
    around: _Graph | None = None
    instance: Mapping[str, Any] = field(default_factory=dict)
    """The node of `around` that this subgraph is."""


def to_prompt(workflow: Any, types: NodeTypes) -> Prompt:
    """Return a workflow as a prompt, if it is not one. Raises WorkflowError."""
    if not isinstance(workflow, Mapping):
        raise WorkflowError("it is not a workflow")
    if "nodes" not in workflow:
        prompt = workflow.get("prompt", workflow)
        if not prompt or not all(isinstance(node, Mapping) and "class_type" in node for node in prompt.values()):
            raise WorkflowError("it is neither a workflow nor a prompt in API format")
        return {name: {**node, "inputs": dict(node.get("inputs", {}))} for name, node in prompt.items()}
    try:
        subgraphs = {each["id"]: each for each in workflow.get("definitions", {}).get("subgraphs", ())}
        return dict(_nodes(_graph(workflow, subgraphs), types))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise WorkflowError(f"a part of it cannot be read ({type(error).__name__}: {error})") from None


def ancestors(prompt: Prompt, ends: Iterable[str]) -> Prompt:
    """Return these nodes and all that they need."""
    kept: Prompt = {}
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name not in kept and name in prompt:
            kept[name] = prompt[name]
            waiting += [str(value[0]) for value in prompt[name]["inputs"].values() if is_link(value)]
    return kept


def is_link(value: Any) -> bool:
    """Whether an input of a prompt comes from another node."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _graph(source: Mapping[str, Any], subgraphs: Mapping[str, Any], **place: Any) -> _Graph:
    links = [_link(link) for link in source.get("links", ())]
    outputs = {slot: link for _, link, target, slot in links if target == source.get("outputNode", {}).get("id")}
    nodes = {str(node["id"]): node for node in source["nodes"]}
    return _Graph(nodes, {name: link for name, link, _, _ in links}, subgraphs, outputs=outputs, **place)


def _link(link: Any) -> tuple[Any, _Link, Any, int]:
    """Return a link's id, its origin, and the node and the slot that it goes to. It is a list or, newer, an object."""
    if isinstance(link, Mapping):
        names = "id", "origin_id", "origin_slot", "target_id", "target_slot"
        name, origin, slot, target, into = (link[each] for each in names)
    else:
        name, origin, slot, target, into = link[:5]
    return name, _Link(origin, slot), target, into


def _inside(graph: _Graph, node: Mapping[str, Any]) -> _Graph:
    prefix = f"{graph.prefix}{node['id']}:"
    if prefix.count(":") > len(graph.subgraphs):
        raise ValueError("a subgraph that contains itself")
    return _graph(graph.subgraphs[node["type"]], graph.subgraphs, prefix=prefix, around=graph, instance=node)


def _nodes(graph: _Graph, types: NodeTypes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the nodes that run, those of subgraphs too."""
    for name, node in graph.nodes.items():
        if node.get("mode") in (NEVER, BYPASSED):
            continue
        if node["type"] in graph.subgraphs:
            yield from _nodes(_inside(graph, node), types)
        elif node["type"] in types:
            yield graph.prefix + name, {"class_type": node["type"], "inputs": _inputs(graph, node, types)}


def _inputs(graph: _Graph, node: Mapping[str, Any], types: NodeTypes) -> dict[str, Any]:
    inputs = _widget_values(node, types[node["type"]])
    for each in node.get("inputs") or ():
        if each.get("link") is None:
            continue
        source = _source(graph, graph.links[each["link"]], each.get("type"))
        if source is not None:
            inputs[each["name"]] = source
    return inputs


def _widget_values(node: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a node's widgets by name. A file has them in the order of the widgets."""
    values = node.get("widgets_values") or []
    if isinstance(values, Mapping):
        return dict(values)
    found: dict[str, Any] = {}
    values = list(values)
    for name, form in _forms(described):
        options = form[1] if len(form) > 1 else {}
        if not values:
            break
        if options.get("forceInput") or not (isinstance(form[0], list) or form[0] in WIDGETS):
            continue
        found[name] = values.pop(0)
        if (name in SEEDS or options.get("control_after_generate")) and values and values[0] in AFTER_SEED:
            values.pop(0)
    return found


def _forms(described: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for group in ("required", "optional"):
        yield from (described.get("input", {}).get(group) or {}).items()


def _source(graph: _Graph, link: _Link, kind: Any) -> Any:
    """Return what a link brings: `[id, slot]` of a node that runs, a value, or None if nothing comes."""
    if link.origin == INPUT_NODE and graph.around is not None:
        return _from_outside(graph, link.slot, kind)
    node = graph.nodes[str(link.origin)]
    if node.get("mode") == NEVER:
        return None
    if node["type"] == "PrimitiveNode":
        return (node.get("widgets_values") or [None])[0]
    if node.get("mode") == BYPASSED or node["type"] == "Reroute":
        passed = _passed_on(node, link.slot, kind)
        return None if passed is None else _source(graph, graph.links[passed], kind)
    if node["type"] in graph.subgraphs:
        inside = _inside(graph, node)
        out = inside.outputs.get(link.slot)
        return None if out is None else _source(inside, out, kind)
    return [graph.prefix + str(node["id"]), link.slot]


def _from_outside(graph: _Graph, slot: int, kind: Any) -> Any:
    """Return what comes into a subgraph: over a link, or from a widget that the subgraph shows."""
    given = (graph.instance.get("inputs") or [])[slot]
    if given.get("link") is not None:
        return _source(graph.around, graph.around.links[given["link"]], kind)
    shown = [each["name"] for each in graph.instance["inputs"] if each.get("widget")]
    values = graph.instance.get("widgets_values") or []
    if given["name"] in shown and len(values) >= len(shown):
        return values[shown.index(given["name"])]
    return None


def _passed_on(node: Mapping[str, Any], slot: int, kind: Any) -> Any:
    """Return the link that a node which does nothing passes on at a slot: the one of the same type."""
    inputs = node.get("inputs") or []
    if node["type"] == "Reroute":
        return inputs[0].get("link")
    outputs = node.get("outputs") or []
    kind = outputs[slot].get("type") if slot < len(outputs) else kind
    same = [each for each in inputs if each.get("type") == kind and each.get("link") is not None]
    at_slot = [each for each in inputs[slot : slot + 1] if each in same]
    return next((each["link"] for each in (*at_slot, *same)), None)
