"""ComfyUI's attention patches that can be operators inside of a graph (see `tracing.patch_ops`).

`comfy.ldm.modules.attention.BasicTransformerBlock` looks them up: replacements of self- and cross-attention by
block, and patches of what attention or the block's middle gives. Blocks of other networks look up patches of what
attention gives (`comfy.ldm.flux.layers`). These take and give tensors of one shape.
Patches of what goes into attention (`attn1_patch`, `attn2_patch`) may change shapes, and are no operators.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ....common.compare import disagreement
from ....identity.context_options import Patches, TracedOptions, Unknown, fresh
from ....tracing.patch_ops import placeholder
from ..comfy_compat import BLOCK, OPTIONS, PATCHES
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
_OF_UNETS = frozenset({"n_heads", "dim_head", "attn_precision", *PATCH_POINTS})
"""What the code of `BasicTransformerBlock` names."""


def operators_in(string_constants: frozenset[str]) -> frozenset[str]:
    """Return the patches that can be operators in code with these string constants.

    All of them in a UNet's block. In other code those of outputs: what "attn1" means there is not known.
    """
    return PATCH_POINTS if _is_of_unet(string_constants) else string_constants & {*OUTPUTS}


def patch_points_of(options: Mapping[str, Any], string_constants: frozenset[str]) -> str:
    """Return the patch points of a call in a canonical form, such as "attn2:0,1;middle_patch"."""
    patches, replaced = options.get(PATCHES) or {}, options.get(REPLACED)
    if not (patches or replaced):
        return ""
    outputs = [name for name in OUTPUTS if patches.get(name)]
    if _is_of_unet(string_constants):
        places = {name: _where(replaced, name, options.get(BLOCK)) for name in REPLACEMENTS}
        return ";".join([*(f"{name}:{where}" for name, where in places.items() if where), *outputs])
    found = [name for name in outputs if name in string_constants]
    if found and _NUMBER in string_constants and _NUMBER not in options:
        found.append(UNNUMBERED)
    return ";".join(found)


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


def traced_options(own: Mapping[str, Any], patch_points: str) -> TracedOptions:
    """Return options to trace with: operators in place of patches. Raises ValueError for points that do not exist."""
    points = patch_points.split(";") if patch_points else []
    places = PLACES - {_NUMBER} if UNNUMBERED in points else PLACES
    options = TracedOptions({**own, PATCHES: {}, REPLACED: {}}, places)
    replaced = {name: Patches() for name in REPLACEMENTS}
    for hook in points:
        if hook == UNNUMBERED:
            continue
        name, _, where = hook.partition(":")
        if name not in PATCH_POINTS:
            raise ValueError(f"no hook is named {name}")
        if where and where != _ALL:
            where = ",".join(str(int(number)) for number in where.split(","))
        elif name in REPLACEMENTS and not where:
            raise ValueError(f"no block for {name}")
        patch = placeholder(name, {*own, *PLACES, PATCHES, REPLACED} - {_NUMBER})  # the call's options say the others
        if name in OUTPUTS:
            dict.__getitem__(options, PATCHES)[name] = [patch]
        else:
            replaced[name] = Patches(partial(_at, patch, where))
    dict.__getitem__(options, REPLACED).update(replaced)
    return options


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

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._extra: dict[str, dict[str, Any]] = {}

    def __call__(self, hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        which = str(constants)
        extra = self._extra.get(which)
        if extra is None:
            extra = self._extra[which] = dict(self._options) | {name: fresh(value) for name, value in constants.items()}
        if hook in REPLACEMENTS:
            number = constants.get(_NUMBER, 0)
            blocks, block = self._options[REPLACED][hook], tuple(self._options[BLOCK])
            return (blocks.get((*block, number)) or blocks[block])(*tensors, extra)
        (result,) = tensors
        for patch in self._options[PATCHES][hook]:
            result = patch(result, extra)
        return result


class RecordedPatches:
    """Calls patches for an eager block, and answers for them when its graph is checked.

    A patch may draw random numbers or count its calls: it is called once for each call of a block, checked or not.
    """

    def __init__(self, options: dict[str, Any], patch_points: str) -> None:
        names = {hook.partition(":")[0] for hook in patch_points.split(";")}
        self._seen: dict[tuple[str, int], deque[tuple[tuple[torch.Tensor, ...], torch.Tensor]]] = defaultdict(deque)
        self.error = ""
        """How what the graph gave to a patch differs from what the block gave."""
        self._own = options
        self.options = dict(options)
        if PATCHES in options:
            recorded = {name: [self._output(name, given)] for name, given in options[PATCHES].items() if name in names}
            self.options[PATCHES] = {**options[PATCHES], **recorded}
        if REPLACED in options:
            replaced = options[REPLACED]
            recorded = {
                n: {k: self._replacement(n, p) for k, p in replaced[n].items()} for n in names & replaced.keys()
            }
            self.options[REPLACED] = {**replaced, **recorded}

    @property
    def context(self) -> dict[str, Any]:
        """The context arguments for the eager block."""
        return {OPTIONS: self.options}

    def hand_over(self) -> None:
        """Leave in the call's options what the block left in those that it was given."""
        self._own.update({n: v for n, v in self.options.items() if n not in (PATCHES, REPLACED)})

    def __call__(self, hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        """Return what a patch gave to the block, and note if the graph hands it something else."""
        calls = self._seen[hook, constants.get(_NUMBER, self._own.get(_NUMBER, 0))]
        if not calls:
            self.error = self.error or f"a call of patch {hook} that eager does not make"
            return tensors[0].clone()
        given, result = calls.popleft()
        self.error = self.error or disagreement(tensors, given) or ""
        return result.clone()

    def _output(self, name: str, patches: Sequence[Callable]) -> Callable:
        def call(tensor: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            given = (tensor.clone(),)
            for patch in patches:
                tensor = patch(tensor, extra)
            return self._note(name, extra, given, tensor)

        return call

    def _replacement(self, name: str, patch: Callable) -> Callable:
        def call(*arguments: Any) -> torch.Tensor:
            *tensors, extra = arguments
            given = tuple(tensor.clone() for tensor in tensors)
            return self._note(name, extra, given, patch(*arguments))

        return call

    def _note(
        self, name: str, extra: Mapping[str, Any], given: tuple[torch.Tensor, ...], result: torch.Tensor
    ) -> torch.Tensor:
        self._seen[name, extra.get(_NUMBER, 0)].append((given, result.clone()))
        return result


def patch_names(options: Mapping[str, Any], patch_points: str) -> frozenset[str]:
    """Return the names of the functions behind the patch points."""
    names = {hook.partition(":")[0] for hook in patch_points.split(";")}
    patches = [p for name in names & {*OUTPUTS} for p in options[PATCHES][name]]
    patches += [p for name in names & {*REPLACEMENTS} for p in options[REPLACED][name].values()]
    return frozenset(f"{p.__module__}.{getattr(p, '__qualname__', type(p).__qualname__)}" for p in patches)
