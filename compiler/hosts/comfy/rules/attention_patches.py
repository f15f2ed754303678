"""ComfyUI's attention patches that can be operators inside of a graph (see `tracing.patch_ops`).

`comfy.ldm.modules.attention.BasicTransformerBlock` looks them up: replacements of self- and cross-attention by
block, and patches of what attention or the block's middle gives. Blocks of other networks look up patches of what
attention gives (`comfy.ldm.flux.layers`). These take and give tensors of one shape.
Patches of what goes into attention (`attn1_patch`, `attn2_patch`) may change shapes, and are no operators.

An override (`optimized_attention_override`) takes the place of ComfyUI's attention function in one model. Each graph
calls it, if there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ....common.compare import disagreement
from ....identity.context_options import Patches, TracedOptions, Unknown, fresh
from ....tracing.attention_op import OVERRIDE, opaque_attention
from ....tracing.by_name import function_now
from ....tracing.patch_ops import placeholder
from ..comfy_compat import ATTENTION_OVERRIDE, BLOCK, OPTIONS, PATCHES
from ..comfy_compat import REPLACEMENTS as REPLACED

OUTPUTS = ("attn1_output_patch", "middle_patch", "attn2_output_patch")
REPLACEMENTS = ("attn1", "attn2")
PATCH_POINTS = frozenset({*OUTPUTS, *REPLACEMENTS})

PLACES = frozenset(
    {BLOCK, "block_index", "block_type", "total_blocks", "transformer_index", "activations_shape", "original_shape"}
)
"""Options that say where a call is. One graph serves equal blocks at several places, so they are unknown to it."""

UNNUMBERED = "unnumbered"
"""Stands among the patch points of a call that does not say its block's number: Krea 2 calls no patches there."""

_ALL = "*"
_NUMBER = "block_index"
_DEFAULTS = ("attn_precision", "skip_reshape", "skip_output_reshape")
"""Arguments of attention functions that a block need not give. An override may not know them."""
_SWITCH = {"True": True, "False": False}
_OF_UNETS = frozenset({"n_heads", "dim_head", "attn_precision", *PATCH_POINTS})
"""What the code of `BasicTransformerBlock` names."""


def operators_in(string_constants: frozenset[str]) -> frozenset[str]:
    """Return the patches that can be operators in code with these string constants.

    All of them in a UNet's block. In other code those of outputs: what "attn1" means there is not known.
    """
    return PATCH_POINTS if _is_of_unet(string_constants) else string_constants & {*OUTPUTS}


def patch_points_of(options: Mapping[str, Any], string_constants: frozenset[str]) -> str:
    """Return the patch points of a call in a canonical form, such as "attn2:0,1;middle_patch".

    Switches that code names are among them, such as "a2v_cross_attn=False".
    """
    switches = [f"{name}={options[name]}" for name in switches_in(options, string_constants)]
    return ";".join([*_patch_points(options, string_constants), *switches])


def switches_in(options: Mapping[str, Any], string_constants: frozenset[str]) -> list[str]:
    """Return the names of options that are True or False, and that the code looks up."""
    return sorted(
        name
        for name, value in options.items()
        if type(value) is bool and name in string_constants and name not in PLACES
    )


def _patch_points(options: Mapping[str, Any], string_constants: frozenset[str]) -> list[str]:
    patches, replaced = options.get(PATCHES) or {}, options.get(REPLACED)
    if not (patches or replaced):
        return []
    outputs = [name for name in OUTPUTS if patches.get(name)]
    if _is_of_unet(string_constants):
        places = {name: _where(replaced, name, options.get(BLOCK)) for name in REPLACEMENTS}
        return [*(f"{name}:{where}" for name, where in places.items() if where), *outputs]
    found = [name for name in outputs if name in string_constants]
    if found and _NUMBER in string_constants and _NUMBER not in options:
        found.append(UNNUMBERED)
    return found


def _is_of_unet(string_constants: frozenset[str]) -> bool:
    """Whether code with these string constants is that of `BasicTransformerBlock`, or has it inside."""
    return string_constants >= _OF_UNETS


def _where(replaced: Mapping[str, Mapping[tuple, Any]] | None, name: str, block: tuple | None) -> str:
    """Return which of a region's transformer blocks have a replacement: all, or their numbers."""
    blocks = (replaced or {}).get(name)
    if not blocks or block is None:
        return ""
    if tuple(block) in blocks:
        return _ALL
    return ",".join(str(n) for n in sorted(key[2] for key in blocks if key[:-1] == tuple(block) and len(key) == 3))


def traced_options(has_override: bool, patch_points: str) -> TracedOptions:
    """Return options to trace with: operators in place of patches, and of attention if it can be overridden.

    Raises ValueError for points that do not exist.
    """
    points = patch_points.split(";") if patch_points else []
    switches = _switches(points)
    places = PLACES - {_NUMBER} if UNNUMBERED in points else PLACES
    known = {ATTENTION_OVERRIDE, *PLACES, PATCHES, REPLACED, *switches} - {_NUMBER}  # the call's options say these
    own = {**switches, PATCHES: {}, REPLACED: {}}
    if has_override:  # a graph that computes attention itself serves no call with an override
        own[ATTENTION_OVERRIDE] = partial(
            opaque_attention, known=known, pass_by=lambda: options.reads.add(ATTENTION_OVERRIDE)
        )
    options = TracedOptions(own, places)
    replaced = {name: Patches() for name in REPLACEMENTS}
    for hook in points:
        if hook == UNNUMBERED or "=" in hook:
            continue
        name, _, where = hook.partition(":")
        if name not in PATCH_POINTS:
            raise ValueError(f"no hook is named {name}")
        if where and where != _ALL:
            where = ",".join(str(int(number)) for number in where.split(","))
        elif name in REPLACEMENTS and not where:
            raise ValueError(f"no block for {name}")
        patch = placeholder(name, known)
        if name in OUTPUTS:
            dict.__getitem__(options, PATCHES)[name] = [patch]
        else:
            replaced[name] = Patches(partial(_at, patch, where))
    dict.__getitem__(options, REPLACED).update(replaced)
    return options


def _switches(points: Sequence[str]) -> dict[str, bool]:
    """Return the switches among patch points. Raises ValueError for one that is neither True nor False."""
    values = dict(point.split("=", 1) for point in points if "=" in point)
    if not _SWITCH.keys() >= {*values.values()}:
        raise ValueError(f"no switch has a value of {', '.join(values.values())}")
    return {name: _SWITCH[value] for name, value in values.items()}


def _at(patch: Callable, where: str, key: Any) -> Callable | None:
    """Return the patch if code asks for it under this key: (place, number, transformer), or (place, number)."""
    if where == _ALL:
        return patch if isinstance(key, Unknown) else None
    return patch if isinstance(key, tuple) and len(key) == 3 and str(key[2]) in where.split(",") else None


class PatchCalls:
    """Calls a running call's patches for the operators of its graph, with the options they would be given.

    A block makes one dictionary of options for all its patches of a call, who may leave things in it for those
    after them. Some blocks leave the patches out of it. Here they are always in it.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._extra: dict[str, dict[str, Any]] = {}
        self._before: dict[int | None, dict[str, Any]] = {}
        """By a transformer's number: the options before an override left something there, as its patches get them."""
        self.unforeseen = _unforeseen(options)
        """Hooks that act although the graph does not name them."""

    def __call__(self, hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        if hook == OVERRIDE:
            return self._override(constants, tensors, **given)
        extra = self._extra_of(constants)
        if hook in REPLACEMENTS:
            number = constants.get(_NUMBER, 0)
            blocks, block = self._options[REPLACED][hook], tuple(self._options[BLOCK])
            return (blocks.get((*block, number)) or blocks[block])(*tensors, extra)
        (result,) = tensors
        for patch in self._options[PATCHES][hook]:
            result = patch(result, extra)
        return result

    def _extra_of(self, constants: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a block would give to a patch, as it left them for the patches before."""
        which = str(constants)
        if which not in self._extra:
            options = self._before.get(constants.get(_NUMBER), self._options)
            self._extra[which] = options | {name: fresh(value) for name, value in constants.items()}
        return self._extra[which]

    def _override(
        self,
        constants: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        function: str,
        heads: int,
        are_own: bool,
        **given: Any,
    ) -> torch.Tensor:
        """Call an override as the wrapper around ComfyUI's attention functions does (`wrap_attn`).

        With `are_own`, attention is given the call's own options, where an override may leave something.
        """
        self._before.setdefault(constants.get(_NUMBER), dict(self._options))
        options = self._options if are_own else dict(self._options)
        options.update({name: fresh(value) for name, value in constants.items()})
        given = {name: value for name, value in given.items() if name not in _DEFAULTS or value not in (None, False)}
        inner = function_now(function)
        inner = getattr(inner, "__wrapped__", inner)
        q, k, v, *rest = tensors
        given["mask"] = rest[0] if rest else None
        if ATTENTION_OVERRIDE not in options:  # it has removed itself
            return inner(q, k, v, heads, **given)
        call = options[ATTENTION_OVERRIDE]
        return call(inner, q, k, v, heads, **given, transformer_options=options, _inside_attn_wrapper=True)


def _unforeseen(options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset([OVERRIDE] if ATTENTION_OVERRIDE in options else [])


class RecordedPatches:
    """Calls patches for an eager block, and answers for them when its graph is checked.

    A patch may draw random numbers or count its calls: it is called once for each call of a block, checked or not.
    """

    def __init__(self, options: dict[str, Any], patch_points: str) -> None:
        names = {hook.partition(":")[0] for hook in patch_points.split(";")}
        self._seen: dict[tuple[str, int], list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]] = defaultdict(list)
        self._error = ""
        self._own = options
        self._inside = 0
        self.options = dict(options)
        self.unforeseen = _unforeseen(options)
        """Hooks that act although the graph does not name them."""
        if ATTENTION_OVERRIDE in options:
            self.options[ATTENTION_OVERRIDE] = self._overriding(options[ATTENTION_OVERRIDE])
        if PATCHES in options:
            recorded = {name: [self._output(name, given)] for name, given in options[PATCHES].items() if name in names}
            self.options[PATCHES] = {**options[PATCHES], **recorded}
        if REPLACED in options:
            replaced = options[REPLACED]
            recorded = {
                n: {k: self._replacement(n, p) for k, p in replaced[n].items()} for n in names & replaced.keys()
            }
            self.options[REPLACED] = {**replaced, **recorded}
        self._given = dict(self.options)

    @property
    def error(self) -> str:
        """How the calls of patches by a graph that has run differ from the block's; empty if they agree."""
        left = sorted({hook for (hook, _), calls in self._seen.items() if calls})
        return self._error or (f"no call of patch {left[0]}, which eager makes" if left else "")

    @property
    def context(self) -> dict[str, Any]:
        """The context arguments for the eager block."""
        return {OPTIONS: self.options}

    def hand_over(self) -> None:
        """Leave in the call's options what the block left in those that it was given."""
        for name in self._given.keys() - self.options.keys():
            self._own.pop(name, None)
        none = object()
        self._own.update({n: value for n, value in self.options.items() if value is not self._given.get(n, none)})

    def __call__(self, hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        """Return what a patch gave to the block, and note if the graph hands it something else.

        Calls that do not depend on one another may come in another order.
        """
        calls = self._seen[hook, constants.get(_NUMBER, self._own.get(_NUMBER, 0))]
        if not calls:
            self._error = self._error or f"a call of patch {hook} that eager does not make"
            return tensors[0].clone()
        differences = [disagreement(tensors, seen) or "" for seen, _ in calls]
        place = differences.index("") if "" in differences else 0
        self._error = self._error or differences[place]
        return calls.pop(place)[1].clone()

    def _overriding(self, override: Callable) -> Callable:
        def call(function: Callable, *arguments: Any, **given: Any) -> torch.Tensor:
            if self._inside:  # a patch's own attention
                return override(function, *arguments, **given)
            tensors = [value for value in (*arguments, given.get("mask")) if isinstance(value, torch.Tensor)]
            copies = tuple(tensor.clone() for tensor in tensors)
            options = given["transformer_options"]
            return self._note(OVERRIDE, options, copies, self._called(override, function, *arguments, **given))

        return call

    def _output(self, name: str, patches: Sequence[Callable]) -> Callable:
        def call(tensor: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            given = (tensor.clone(),)
            for patch in patches:
                tensor = self._called(patch, tensor, extra)
            return self._note(name, extra, given, tensor)

        return call

    def _replacement(self, name: str, patch: Callable) -> Callable:
        def call(*arguments: Any) -> torch.Tensor:
            *tensors, extra = arguments
            given = tuple(tensor.clone() for tensor in tensors)
            return self._note(name, extra, given, self._called(patch, *arguments))

        return call

    def _called(self, patch: Callable, *arguments: Any, **given: Any) -> torch.Tensor:
        self._inside += 1
        try:
            return patch(*arguments, **given)
        finally:
            self._inside -= 1

    def _note(
        self, name: str, extra: Mapping[str, Any], given: tuple[torch.Tensor, ...], result: torch.Tensor
    ) -> torch.Tensor:
        self._seen[name, extra.get(_NUMBER, 0)].append((given, result.clone()))
        return result


def patch_names(options: Mapping[str, Any], patch_points: str) -> frozenset[str]:
    """Return the names of the functions behind the patch points, and of an override."""
    names = {hook.partition(":")[0] for hook in patch_points.split(";")}
    patches = [p for name in names & {*OUTPUTS} for p in options[PATCHES][name]]
    patches += [p for name in names & {*REPLACEMENTS} for p in options[REPLACED][name].values()]
    patches += [options[ATTENTION_OVERRIDE]] if ATTENTION_OVERRIDE in options else []
    return frozenset(f"{p.__module__}.{getattr(p, '__qualname__', type(p).__qualname__)}" for p in patches)
