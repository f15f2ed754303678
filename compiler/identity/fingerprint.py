"""The fingerprint of a region: a hash of its code, its settings and the shapes of its parameters.

Two blocks with the same fingerprint compute the same function of (weights, inputs), so they share a graph,
whatever checkpoint, file, process or day they come from. A description follows the functions that a block's
classes name, and reads every value that those functions can read: attributes, closures, globals, class
attributes. Each place that is read goes into a `Watch`, so everything that the fingerprint depends on is also
compared before each sampling. A value that cannot be described makes the block `obscure`: it shares no graph.
`code_walk.py` follows the code, `value_description.py` describes the values.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..common.attached import attached
from ..common.host import Host
from ..common.reason import Reason, Unsupported
from .code_walk import Code, CodeWalk
from .libraries import is_outside
from .low_rank import sizes_of
from .memory_format import has_layouts, stride_in, unrepeated_stride
from .source import qualified_name
from .value_description import Values
from .watch import Watch

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_BASES = (nn.Module, object)
"""Their code reads no attribute that a derived class adds."""


@dataclass(frozen=True)
class Description:
    """What identifies a region."""

    fingerprint: str
    """A hex digest that processes, hash seeds, devices, loading and offloading do not change."""
    string_constants: frozenset[str]
    """Every string constant in its code."""
    obscure: Reason | None = None
    """Why the fingerprint is incomplete; None if it is not. A region with a reason here must not use a graph."""


_DESCRIBED = "description of the whole network"


def describe_network(network: nn.Module, host: Host) -> tuple[Description, Watch]:
    """Describe a whole network, which takes half a second, and remember that while nothing changes."""
    describer = Describer(host)
    description = describer.describe(network)
    attached(network)[_DESCRIBED] = host, description, describer.watch
    return description, describer.watch


def network_code(network: nn.Module, host: Host) -> tuple[frozenset[str], Watch]:
    """Return the string constants of a network's code, and a watch that holds now."""
    known_host, description, watch = attached(network).get(_DESCRIBED, (None, None, None))
    if known_host is not host or not watch.holds():
        description, watch = describe_network(network, host)
    return description.string_constants, watch


def fingerprint(module: nn.Module, host: Host) -> str:
    """Return the identity of a region as a hex digest (see `Description`)."""
    return Describer(host).describe(module).fingerprint


def string_constants_of(module: nn.Module, host: Host) -> frozenset[str]:
    """Return every string constant in the code that a module can run."""
    return Describer(host).describe(module).string_constants


def tensor_attributes(module: nn.Module, host: Host) -> list[str]:
    """Return the paths of tensors that a region holds outside its parameters and buffers.

    A graph would hold such a tensor as a constant, and would then belong to one checkpoint.
    """
    return [
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        for name, value in settings_of(child, host).items()
        if isinstance(value, torch.Tensor)
    ]


def settings_of(module: nn.Module, host: Host, read_by_others: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the attributes of a module that can decide what it computes.

    For a layer of the host's own, they are the attributes that the host lists, those that the code of others reads,
    and methods that replace the class's.
    """
    attributes = module.__dict__
    listed = host.layer_settings(module)
    if listed is not None:
        cls = type(module)
        return {
            name: value
            for name, value in attributes.items()
            if name in listed
            or (not host.is_volatile(name) and name != "forward" and (name in read_by_others or _is_method(cls, name)))
        }
    return {
        name: value
        for name, value in attributes.items()
        if name not in _MODULE_INTERNALS
        and name != "forward"
        and not host.is_volatile(name)
        and not getattr(type(value), "stands_in", False)  # our stand-in for a method leads to our whole package
    }


def _numbers_of(module: nn.Module, settings: Mapping[str, Any], host: Host) -> list[str]:
    """Return the names of a module's settings that are ints, such as the number of a layer.

    The code of a library's class is not read, so all its settings count.
    """
    if any(is_outside(base.__module__ or "builtins", host) for base in type(module).__mro__ if base not in _BASES):
        return []
    return [name for name in settings if type(module.__dict__.get(name)) is int]


class Describer:
    """Describes the regions of a network at one moment. Reads code that several regions share only once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._watch = Watch(functools.partial(settings_of, host=host))
        self._codes: dict[frozenset, Code] = {}

    def describe(self, module: nn.Module) -> Description:
        """Describe a region."""
        names: frozenset[str] = frozenset()
        before = self._watch.mark()
        while True:
            description, code = self._describe(module, names)
            if code.read_by_others <= names:
                return description
            names |= code.read_by_others
            self._watch.rewind(before)  # the next pass reads the same modules, and more of each

    def _describe(self, module: nn.Module, read_by_others: frozenset[str]) -> tuple[Description, Code]:
        """Describe a region, given the names that the code of others reads; return its code as well."""
        settings_in = functools.partial(settings_of, host=self._host, read_by_others=read_by_others)
        values = Values(self._host, self._watch, {id(child): path for path, child in module.named_modules()})
        record: list[Any] = []
        numbers: set[tuple[int, str]] = set()
        roots: set[Any] = set()
        is_arranged = self._host.uses_channels_last(module)
        for path, child in module.named_modules(remove_duplicate=False):
            if values.paths[id(child)] != path:  # the module also stands at an earlier path
                record.append([path, values.paths[id(child)]])
                continue
            found = self._watch.module(child, settings_in)
            roots.add(type(child))
            settings = {
                name: values.describe(self._host.setting(name, value), f"{path}.{name}" if path else name)
                for name, value in found.items()
            }
            numbers |= {(len(record), name) for name in _numbers_of(child, settings, self._host)}
            tensors = {
                name: self._weight(child, name, t, values, is_arranged)
                for group in (child._parameters, child._buffers)
                for name, t in group.items()
                if t is not None  # a layer that is filled from a file has no entry for an absent tensor
            }
            record.append([path, qualified_name(type(child)), settings, tensors])
        code = self.code(frozenset(roots | values.code))
        for place, name in numbers:
            if not code.reads(name):
                del record[place][2][name]
        text = json.dumps([code.digest, record], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Description(digest, code.string_constants, values.obscure or code.obscure), code

    def _weight(self, layer: nn.Module, name: str, weight: torch.Tensor, values: Values, is_arranged: bool) -> list:
        """Describe a weight by its form, or by the layout and forms of what it consists of."""
        form = [list(sizes_of(name, weight.shape)), str(self._host.weight_dtype(layer, name, weight))]
        try:
            inner = self._host.inner_tensors(weight)
        except Unsupported:  # the region is eager for that reason
            return form
        if inner is None or inner.is_the_weight:
            return [*form, _stride(weight if inner is None else inner.tensors[0], is_arranged)]
        forms = [[n, list(t.shape), str(t.dtype)] for n, t in zip(inner.names, inner.tensors, strict=True)]
        return [*form, values.describe(inner.layout, name), forms]

    def code(self, roots: frozenset) -> Code:
        """Describe functions and classes, and all code that they lead to."""
        if roots not in self._codes:
            self._codes[roots] = CodeWalk(self._host, self._watch).of(roots)
        return self._codes[roots]

    @property
    def watch(self) -> Watch:
        """The places that were read so far."""
        return self._watch


def _is_method(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


def _stride(tensor: torch.Tensor, is_arranged: bool) -> list[int]:
    if is_arranged and has_layouts(tensor):
        return list(stride_in(tensor, torch.contiguous_format))
    return list(unrepeated_stride(tensor))
