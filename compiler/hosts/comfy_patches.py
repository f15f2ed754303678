"""ComfyUI's attention patches that can be operators inside of a graph (see `compiler.patches`).

`comfy.ldm.modules.attention.BasicTransformerBlock` looks them up: replacements of self- and cross-attention by
block, and patches of what attention or the block's middle gives. These take and give tensors of one shape.
Patches of what goes into attention (`attn1_patch`, `attn2_patch`) may change shapes, and are no operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..patches import stand_in

OUTPUTS = ("attn1_output_patch", "middle_patch", "attn2_output_patch")
REPLACEMENTS = ("attn1", "attn2")
HOOKS = frozenset({*OUTPUTS, *REPLACEMENTS})

_BLOCK = ("region", 0)
"""What a block is told of its place while it is traced: one graph serves equal blocks at several."""
_ALL = "*"
_LOOKED_UP = frozenset({"n_heads", "dim_head", "attn_precision", *HOOKS})
"""What the code of that block names."""


def can_be_operators(literals: frozenset[str]) -> bool:
    """Whether code with these string constants is that block's, or has it inside."""
    return literals >= _LOOKED_UP


def hooks_of(options: Mapping[str, Any], literals: frozenset[str]) -> str:
    """Return the hooks of a call in a canonical form, such as "attn2:0,1;middle_patch"."""
    patches, replaced = options.get("patches"), options.get("patches_replace")
    if not (patches or replaced) or not can_be_operators(literals):
        return ""
    found = [f"{name}:{where}" for name in REPLACEMENTS if (where := _where(replaced, name, options.get("block")))]
    return ";".join([*found, *(name for name in OUTPUTS if (patches or {}).get(name))])


def _where(replaced: Mapping[str, Mapping[tuple, Any]] | None, name: str, block: tuple | None) -> str:
    """Return which of a region's transformer blocks have a replacement: all, or their numbers."""
    blocks = (replaced or {}).get(name)
    if not blocks or block is None:
        return ""
    if tuple(block) in blocks:
        return _ALL
    return ",".join(str(n) for n in sorted(key[2] for key in blocks if key[:-1] == tuple(block) and len(key) == 3))


def traced_options(own: Mapping[str, Any], hooks: str) -> dict[str, Any]:
    """Return transformer options with operators in place of patches. Raises ValueError if `hooks` make no sense."""
    options: dict[str, Any] = {**own, "block": _BLOCK, "patches": {}, "patches_replace": {}}
    known = {**own, "block": None, "activations_shape": None}
    for hook in hooks.split(";"):
        name, _, where = hook.partition(":")
        patch = stand_in(name, known)
        if name in OUTPUTS:
            options["patches"][name] = [patch]
        elif name in REPLACEMENTS:
            numbers = [()] if where == _ALL else [(int(number),) for number in where.split(",")]
            options["patches_replace"][name] = {(*_BLOCK, *number): patch for number in numbers}
        else:
            raise ValueError(f"no hook is named {name}")
    return options


def patch_call(options: Mapping[str, Any], shape: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Return what calls a running call's patches, with the options they would be given.

    `shape` is that of the region's feature map, [batch, channels, height, width].
    """
    given = {name: value for name, value in options.items() if name not in ("patches", "patches_replace")}
    given["activations_shape"] = list(shape)

    def call(hook: str, constants: Mapping[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        extra = given | constants
        if hook in REPLACEMENTS:
            blocks, block = options["patches_replace"][hook], tuple(options["block"])
            patch = blocks.get((*block, constants.get("block_index", 0)))
            return (patch or blocks[block])(*tensors, extra)
        (result,) = tensors
        for patch in options["patches"][hook]:
            result = patch(result, extra)
        return result

    return call


def patch_names(options: Mapping[str, Any], hooks: str) -> frozenset[str]:
    """Return the names of the functions behind the hooks."""
    names = {hook.partition(":")[0] for hook in hooks.split(";")}
    patches = [p for name in names & {*OUTPUTS} for p in options["patches"][name]]
    patches += [p for name in names & {*REPLACEMENTS} for p in options["patches_replace"][name].values()]
    return frozenset(f"{p.__module__}.{getattr(p, '__qualname__', type(p).__qualname__)}" for p in patches)
