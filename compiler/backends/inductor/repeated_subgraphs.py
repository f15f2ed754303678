"""Equal stretches of one graph become calls of a single subgraph, so Inductor compiles them only once.

A transformer of ten equal blocks is one region: the host does nothing between its blocks, and kernels fuse across
them. But Inductor's compile time grows with every node, and nine of the ten blocks tell it nothing new.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...common.torch_compat import (
    MissingName,
    free_symbols,
    invoke_subgraph,
    invoke_subgraph_gen_schema,
    is_mutable,
    storage_address,
    tree_map,
)

MIN_REPEATS = 4
"""At least this many equal stretches are worth folding."""
MIN_PERIOD = 12
"""A stretch has at least this many operators."""
_NAME = "repeated"
_FIRST = frozenset({torch.ops.aten.linear.default})
"""A stretch begins with one of these. A matrix product ends a fused kernel anyway, so a cut before it is free."""

_HANDING_ON = frozenset({torch.ops.aten.dropout.default})
"""Operators that may return their input itself. Their fake tensors do not show that."""


@dataclass(frozen=True)
class RepeatedSpan:
    """Consecutive nodes of a graph."""

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    """The earlier nodes that it reads, in order of use."""
    results: tuple[int, ...]
    """Indices of its nodes that later nodes read."""
    form: Any
    """Equal for two stretches that compute the same function of their operands."""

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> RepeatedSpan:
        places = {node: place for place, node in enumerate(nodes)}
        operands: dict[fx.Node, int] = {}

        def reference(node: fx.Node) -> str:
            return f"own {places[node]}" if node in places else f"operand {operands.setdefault(node, len(operands))}"

        rows = [(node.target, str(fx.map_arg((node.args, node.kwargs), reference)), _form(node)) for node in nodes]
        results = tuple(place for node, place in places.items() if any(user not in places for user in node.users))
        form = rows, [_form(node) for node in operands], results
        return cls(tuple(nodes), tuple(operands), results, form)

    def is_pure(self) -> bool:
        """Whether it writes to no tensor, and returns only new tensors, each with memory of its own."""
        if any(is_mutable(node.target) for node in self.nodes):
            return False
        results = [self.nodes[place] for place in self.results]
        values = [node.meta["val"] for node in results]
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            return False
        if any(node.target in _HANDING_ON for node in results):
            return False
        memory = [_memory(value) for value in values]
        taken = {_memory(node.meta["val"]) for node in self.operands if isinstance(node.meta["val"], torch.Tensor)}
        return len(set(memory)) == len(memory) and taken.isdisjoint(memory)


def folded(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return an equal module with the repeated stretch as a subgraph, or None if no stretch is repeated.

    The module calls the subgraph through `torch.ops.higher_order.invoke_subgraph`, as
    `torch.compiler.nested_compile_region` does. Nodes carry fake tensors as `meta["val"]`, as `torch.export` leaves
    them.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    stretches = _repeated([node for node in graph.nodes if node.op == "call_function"])
    symbols = _symbol_nodes(graph, stretches[0]) if stretches else None
    if symbols is None:
        return None
    result = fx.GraphModule(module, graph)
    result.add_submodule(_NAME, fx.GraphModule(module, _subgraph(stretches[0], symbols)))
    _call_instead(graph, stretches, symbols)
    graph.lint()
    result.recompile()
    return result


_SCHEMAS = threading.Lock()


@contextmanager
def tracing_once() -> Iterator[None]:
    """While this thread compiles a folded module, make torch trace the subgraph only once to find what it writes to.

    torch asks twice for every call, and each time traces the subgraph to see whether it writes to its operands
    (`InvokeSubgraphHOP.gen_schema`). With torch 2.12 and older, this takes a third of the compile time of a transformer
    of ten blocks. Here one answer is enough: every call is of the same subgraph, its operands have the same form, and
    it writes to none of them.
    """
    try:
        invoke_subgraph_gen_schema.get()
    except MissingName:  # this torch does not trace it for that
        yield
        return
    operators, thread, schemas = type(invoke_subgraph.get()), threading.get_ident(), {}

    def gen_schema(self: Any, subgraph: Any, identifier: str, *operands: Any) -> Any:
        if identifier != _NAME or threading.get_ident() != thread:
            return original(self, subgraph, identifier, *operands)
        if len(operands) not in schemas:
            schemas[len(operands)] = original(self, subgraph, identifier, *operands)
        return schemas[len(operands)]

    with _SCHEMAS:
        original = operators.gen_schema
        operators.gen_schema = gen_schema
        try:
            yield
        finally:
            operators.gen_schema = original


def _repeated(nodes: list[fx.Node]) -> list[RepeatedSpan]:
    """Return equal stretches that follow one another, or an empty list."""
    period, begin, end = _longest_run([_loose_form(node) for node in nodes])
    for first in range(begin, min(begin + period, end)):
        cuts = range(first, end - period + 1, period)
        if len(cuts) < MIN_REPEATS or nodes[first].target not in _FIRST:
            continue
        stretches = [RepeatedSpan.of(nodes[cut : cut + period]) for cut in cuts]
        equal = [stretch for stretch in stretches if stretch.form == stretches[0].form]
        if len(equal) == len(stretches) and all(stretch.is_pure() for stretch in stretches):
            return stretches
    return []


def _longest_run(forms: list[Any]) -> tuple[int, int, int]:
    """Return a period, and the begin and end of the longest run that repeats with that period."""
    best = (1, 0, 0)
    for period in range(MIN_PERIOD, len(forms) // MIN_REPEATS + 1):
        length = 0
        for i in range(period, len(forms)):
            length = length + 1 if forms[i] == forms[i - period] else 0
            if length >= (MIN_REPEATS - 1) * period and length + period > best[2] - best[1]:
                best = (period, i + 1 - length - period, i + 1)
    return best


def _loose_form(node: fx.Node) -> Any:
    """Return what nodes at the same place of equal stretches have in common, whatever their arguments are."""
    return node.target, str(fx.map_arg((node.args, node.kwargs), lambda _: "a node")), _form(node)


def _form(node: fx.Node) -> str:
    def describe(value: Any) -> Any:
        return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value

    return str(tree_map(describe, node.meta.get("val")))


def _memory(value: torch.Tensor) -> int:
    return storage_address(value)


def _symbol_nodes(graph: fx.Graph, stretch: RepeatedSpan) -> list[fx.Node] | None:
    """Return nodes for the symbols in the operands' shapes, or None if one of them is not the size of an input.

    The subgraph takes these nodes as operands, because Inductor cannot derive `h` and `w` from a dimension of `h * w`.
    """
    wanted = {str(symbol) for node in stretch.operands for symbol in _symbols(node.meta["val"])}
    found: dict[str, fx.Node] = {}
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for place, dim, size in _input_sizes(graph):
            if str(size) in wanted - found.keys():
                found[str(size)] = graph.call_function(torch.ops.aten.sym_size.int, (place, dim))
                found[str(size)].meta["val"] = size
    return list(found.values()) if found.keys() == wanted else None


def _symbols(value: Any) -> set[Any]:
    return free_symbols(value) if isinstance(value, torch.Tensor | torch.SymInt) else set()


def _input_sizes(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, Any]]:
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            yield from ((node, dim, size) for dim, size in enumerate(node.meta["val"].shape))


def _subgraph(stretch: RepeatedSpan, symbols: list[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate([*symbols, *stretch.operands]):
        inside[node] = graph.placeholder(f"operand_{number}")
        inside[node].meta = dict(node.meta)
    for node in stretch.nodes:
        inside[node] = graph.node_copy(node, inside.__getitem__)
    graph.output(tuple(inside[stretch.nodes[place]] for place in stretch.results))
    return graph


def _call_instead(graph: fx.Graph, stretches: list[RepeatedSpan], symbols: list[fx.Node]) -> None:
    """Replace the stretches by calls of the subgraph."""
    now: dict[fx.Node, fx.Node] = {}
    for stretch in stretches:
        operands = [now.get(node, node) for node in stretch.operands]
        results = [stretch.nodes[place] for place in stretch.results]
        with graph.inserting_before(stretch.nodes[0]):
            subgraph = graph.get_attr(_NAME)
            call = graph.call_function(invoke_subgraph.get(), (subgraph, _NAME, *symbols, *operands))
            call.meta["val"] = tuple(node.meta["val"] for node in results)
            for number, node in enumerate(results):
                now[node] = graph.call_function(operator.getitem, (call, number))
                now[node].meta["val"] = node.meta["val"]
        own = set(stretch.nodes)
        for node in results:
            node.replace_all_uses_with(now[node], delete_user_cb=lambda user, own=own: user not in own)
        for node in reversed(stretch.nodes):
            graph.erase_node(node)
