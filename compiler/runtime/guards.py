"""Guards: they detect what can change in a region between two calls without notice.

They run on every call. So each guard remembers the last state that it found valid, and first asks, cheaply, whether
anything has changed since.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain, starmap
from operator import getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..common.host import Host
from ..common.inner_tensors import TENSOR_TYPES, plain_and_owners, plain_names
from ..common.reason import ReasonCode, Unsupported
from ..common.tensor_slots import owned_tensor_slots, tensor_slots
from ..common.torch_compat import global_forward_hooks, global_forward_pre_hooks
from ..common.weight_source import RESIDENT, NetworkWeights, WeightSource
from ..identity.call_signature import STATIC_TYPES
from ..identity.graph_spec import GraphSpec
from ..identity.low_rank import sizes_of
from ..identity.memory_format import has_layouts
from ..tracing.low_rank import Branch

_FORWARD_HOOKS, _PRE_HOOKS = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")


class Changed(Exception):
    """A region has changed since it was described: its modules, settings, shapes or dtypes differ."""


class ModuleGuard:
    """Whether the modules inside a region still run the code that was traced."""

    def __init__(self, region: nn.Module, host: Host, in_place: bool = False) -> None:
        """With `in_place`, weight functions may act only if what they make lies where the weights lie."""
        self._host = host
        self._in_place = in_place
        # The guard keeps dictionaries, not modules: a reference to the region itself would keep it alive.
        self._modules = [(weakref.ref(m), m.__dict__) for m in region.modules() if m is not region]
        self._attributes = [attributes for _, attributes in self._modules]
        tables = [module._modules for module in region.modules()]
        self._child_tables = [table for table in tables if table]
        self._empty_child_tables = [table for table in tables if not table]
        self._children = self._current_children()
        self._sizes: list[int] | None = None
        self._weight_hooks: list[tuple[dict[str, Any], str]] = []
        self._settings = [
            (module.__dict__, name, _snapshot(module.__dict__[name]))
            for module in region.modules()
            for name in host.settings & module.__dict__.keys()
        ]

    def check(self) -> bool:
        """Return whether weight functions act inside the region, which the host applies.

        Raises Unsupported if a hook, a replaced forward or any other weight function is inside the region. Raises
        Changed if its modules, or settings that people change according to the host, have changed.
        """
        if global_forward_hooks or global_forward_pre_hooks:
            raise Unsupported(ReasonCode.GLOBAL_HOOK)
        # Read anew each time: people remove all hooks of a module by giving it another dictionary.
        hooks = [*map(_FORWARD_HOOKS, self._attributes), *map(_PRE_HOOKS, self._attributes)]
        if any(hooks) and any(map(self._acts, chain.from_iterable(map(dict.values, hooks)))):
            raise Unsupported(ReasonCode.HOOK)
        if any(self._empty_child_tables) or self._current_children() != self._children:
            raise Changed
        if any(_snapshot(attributes.get(name)) != before for attributes, name, before in self._settings):
            raise Changed
        # A new attribute changes its dictionary's size. The values of attributes that existed before are read below.
        if list(map(len, self._attributes)) != self._sizes:
            self._rescan()
        if not any(starmap(getitem, self._weight_hooks)):
            return False
        for attributes, name in self._weight_hooks:
            if attributes[name] and not self._host.applies_weight_function(attributes, name, self._in_place):
                raise Unsupported(ReasonCode.WEIGHT_FUNCTION, name)
        return True

    def _acts(self, hook: Any) -> bool:
        """Whether a hook does what a graph does not. A graph has the branches of the factors that it takes."""
        return type(hook) is not Branch and self._host.hook_acts(hook)

    def _current_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._child_tables)))

    def _rescan(self) -> None:
        self._sizes = None
        for reference, attributes in self._modules:
            if "forward" in attributes and not self._host.module_is_clean(reference()):
                raise Unsupported(ReasonCode.FORWARD_REPLACED)
        self._weight_hooks = [(a, name) for a in self._attributes for name in self._host.weight_hooks_of(a)]
        if not any("forward" in attributes for attributes in self._attributes):
            self._sizes = list(map(len, self._attributes))


def _snapshot(value: Any, depth: int = 3) -> Any:
    """Return the form in which settings are compared: plain values, their containers, objects with their attributes."""
    if isinstance(value, dict) and depth:
        return {key: _snapshot(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set) and depth:
        return [_snapshot(item, depth - 1) for item in value]
    if hasattr(value, "__dict__") and depth and not isinstance(value, torch.Tensor | type):
        return value, {n: _snapshot(item, depth - 1) for n, item in vars(value).items() if not n.startswith("_")}
    return value if isinstance(value, STATIC_TYPES) else id(value)


class WeightGuard:
    """Gets a region's weights from their source, and checks whether a graph can take them."""

    def __init__(self, region: nn.Module, host: Host, device: torch.device, source: WeightSource) -> None:
        """`device` is where the region runs. The modules may hold its weights elsewhere."""
        named = list(owned_tensor_slots(region))
        self._slots = [slot for _, _, slot in named]
        self._layers = [weakref.ref(layer) for _, layer, _ in named]
        self._host = host
        self._source = source
        self._device = device if host.weights_say_device else None
        held = self._current()
        self._has_inner = any(type(weight) not in TENSOR_TYPES for weight in held)
        """Whether some weights consist of other tensors."""
        self._names = self._names_of([name for name, _, _ in named], held)
        self._forms = self._forms_of(held)
        self._seen: _Weights | None = None
        """What the modules hold in this call. Nobody keeps it longer: a host that moves a model drops its tensors."""
        self._checked = _Tensors([])
        self._fit: tuple[GraphSpec, bool] | None = None
        """The spec that the last weights fitted as they were, and whether the modules held these."""
        self._acquired = _Tensors([])
        """Those weights, if the source brought them."""

    def check(self) -> None:
        """Raise Changed if shapes or dtypes have changed, or if the weights' device shows that the model has moved."""
        held = self._current()
        self._seen = seen = self._look_into(held)
        if self._checked.are(seen.plain, seen.owners):
            return
        self._fit = None
        if any(weight is None for weight in held) or self._forms_of(held) != self._forms:
            raise Changed
        if self._device is not None and any(weight.device != self._device for weight in held):
            raise Changed
        are_plain = all(type(weight) in TENSOR_TYPES for weight in seen.plain)
        self._checked = _Tensors(seen.plain, seen.owners) if are_plain else _Tensors([])

    def acquire(self, spec: GraphSpec, have_functions: bool) -> Sequence[torch.Tensor]:
        """Return the weights that `check` found right, where the model runs and in the layout of `spec`.

        `have_functions` says whether weight functions act. The weights are valid until `release`. Raises Unsupported
        with the reason if they do not match `spec`.
        """
        seen = self._seen or self._look_into(self._current())
        if self._fit == (spec, True) and not have_functions:
            return seen.plain
        acquired = self._source.acquire(seen.held)
        is_held = acquired is seen.held
        got = seen if is_held else self._look_into(acquired)
        weights = got.plain
        fit = spec, is_held
        if fit == self._fit and (is_held or self._acquired.are(weights, got.owners)):
            return weights
        self._fit = None
        if not is_held and self._has_inner and list(map(self._layout, acquired)) != list(map(self._layout, seen.held)):
            raise _other_weights(next(iter(self._names), "none"))
        if self._names != spec.weight_names or len(weights) != len(self._names) or not spec.agrees_on_ranks(weights):
            raise _other_weights(next(iter(self._names), "none"))
        arranged = [self._in_layout(*each) for each in zip(weights, self._names, spec.weight_layout, strict=True)]
        if all(map(is_, weights, arranged)):
            self._fit, self._acquired = fit, _Tensors([]) if is_held else _Tensors(weights, got.owners)
        return arranged

    def release(self) -> None:
        """Say that the call is over."""
        self._seen = None
        self._source.release()

    def _current(self) -> list[torch.Tensor | None]:
        return list(starmap(dict.get, self._slots))

    def _look_into(self, held: Sequence[torch.Tensor | None]) -> _Weights:
        if not self._has_inner:
            return _Weights(held, held, held)
        return _Weights(held, *plain_and_owners(held, self._host.inner_tensors))

    def _layout(self, weight: torch.Tensor) -> tuple[Any, ...] | None:
        inner = self._host.inner_tensors(weight)
        return None if inner is None else inner.layout

    def _names_of(self, names: list[str], held: Sequence[torch.Tensor]) -> tuple[str, ...]:
        try:
            return tuple(plain_names(zip(names, held, strict=True), self._host.inner_tensors))
        except Unsupported:  # the region is eager for that reason
            return tuple(names)

    def _forms_of(self, held: Sequence[torch.Tensor | None]) -> list[Any]:
        names = [name for _, name in self._slots]
        return [
            None if tensor is None else self._form(layer(), name, tensor)
            for layer, name, tensor in zip(self._layers, names, held, strict=True)
        ]

    def _form(self, layer: nn.Module, name: str, weight: torch.Tensor) -> tuple[Any, ...]:
        form = self._host.weight_dtype(layer, name, weight), sizes_of(name, weight.shape)
        try:
            inner = self._host.inner_tensors(weight)
        except Unsupported:
            return *form, type(weight)
        return form if inner is None else (*form, inner.form)

    @staticmethod
    def _in_layout(weight: Any, name: str, layout: tuple) -> torch.Tensor:
        shape, stride, dtype, device = layout
        if type(weight) not in TENSOR_TYPES:
            raise Unsupported(ReasonCode.WEIGHT_TYPE, type(weight).__name__)
        if weight.device != device:
            raise Unsupported(ReasonCode.WEIGHT_DEVICE, f"{weight.device} while the model runs on {device}")
        if weight.dtype != dtype or sizes_of(name, weight.shape) != sizes_of(name, shape):
            raise _other_weights(name)
        if weight.stride() == stride:
            return weight
        # A removed LoRA leaves contiguous weights where the model had channels_last ones.
        return torch.empty_strided(weight.shape, stride, dtype=dtype, device=device).copy_(weight)


def _other_weights(path: str) -> Unsupported:
    name = path.rpartition(".")[2]
    return Unsupported(ReasonCode.WEIGHT_FORM, name)


class _Weights(NamedTuple):
    """The weights of a region in one call."""

    held: Sequence[torch.Tensor | None]
    plain: Sequence[torch.Tensor | None]
    """The same, with inner tensors in the place of weights that consist of them."""
    owners: Sequence[torch.Tensor | None]
    """For each of these the tensor that lasts as long as its memory."""


class _Tensors:
    """Remembers tensors without keeping them alive. `owners` last as long as the memory of each."""

    def __init__(self, tensors: Sequence[torch.Tensor], owners: Sequence[torch.Tensor] | None = None) -> None:
        owners = tensors if owners is None else owners
        self._identities = list(map(id, owners))
        # Hosts move weights by replacing the data that a Parameter points to.
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        # A change of layout leaves weights at the same address.
        self._layout_places = [place for place, tensor in enumerate(tensors) if has_layouts(tensor)]
        self._strides = self._strides_of(tensors)
        # Another tensor can get the identity and the address of one that was freed.
        self._gone: list[weakref.ref] = []
        self._alive = [weakref.ref(owner, self._gone.append) for owner in owners]

    def are(self, tensors: Sequence[torch.Tensor | None], owners: Sequence[torch.Tensor | None] | None = None) -> bool:
        """Whether these are the remembered tensors, at the same addresses and in the same layout."""
        if self._gone or list(map(id, tensors if owners is None else owners)) != self._identities:
            return False
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self._pointers and self._strides_of(tensors) == self._strides
        )

    def _strides_of(self, tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
        return [tensors[place].stride() for place in self._layout_places]


class TensorGuard:
    """Checks that a network's weights have not moved, and that its own attributes are unchanged."""

    def __init__(self, network: nn.Module, host: Host, device: torch.device, weights: NetworkWeights) -> None:
        self._attributes = network.__dict__
        self._values = self._current_values()
        self._seen = [ref for name in self._values if (ref := _weakly(self._attributes[name])) is not None]
        """Those that are objects. One that is gone may have left its identity to another."""
        self._host = host
        self._weights = weights
        self._places = weights.places
        self._slots = [slot for _, slot in tensor_slots(network)] if self._places is RESIDENT else []
        self._has_inner = any(type(group[name]) not in TENSOR_TYPES for group, name in self._slots)
        tensors, owners = self._current()
        self.is_usable = all(type(t) in TENSOR_TYPES and t.device == device for t in tensors)
        self._known = _Tensors(tensors, owners) if self.is_usable else _Tensors([])

    def holds(self) -> bool:
        """Return whether nothing has moved or changed. Always False if a tensor was not on the device at first."""
        is_same = self._weights.places == self._places and self.has_same_attributes
        return self.is_usable and is_same and self._known.are(*self._current())

    @property
    def has_same_attributes(self) -> bool:
        """Whether the network's own attributes are unchanged. They can decide what its code does."""
        return self._current_values() == self._values and all(ref() is not None for ref in self._seen)

    def _current(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        held = list(starmap(dict.get, self._slots))
        if not self._has_inner:
            return held, held
        try:
            return plain_and_owners(held, self._host.inner_tensors)
        except Unsupported:  # of a type that no graph takes: there is no capture
            return held, held

    def _current_values(self) -> dict[str, int]:
        # Each clone of a host's patcher has a stand-in of its own for the network's method.
        values = self._attributes.items()
        return {name: id(value) for name, value in values if not getattr(type(value), "stands_in", False)}


def _weakly(value: Any) -> weakref.ref | None:
    """Return a weak reference, or None for numbers, texts and containers, which have none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None
