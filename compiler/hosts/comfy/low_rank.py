"""LoRAs on quantised weights as low-rank branches, for as long as a sampling lasts.

ComfyUI merges a LoRA into a quantised weight: it dequantises, adds and rounds again, which loses much of the LoRA. Here
the LoRA is taken out of the patcher before its weights are loaded. Its factors lie beside the layer, whose graph
computes the branch (`tracing/low_rank.py`), and eager code does, too. At the end the patcher gets its patches back.
ComfyUI merges whatever is no plain LoRA, no quantised weight or no layer of a region.
"""

from __future__ import annotations

import logging
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...common.inner_tensors import TENSOR_TYPES
from ...common.reason import Unsupported
from ...tracing.call_lock import call_lock
from ...tracing.low_rank import STEP, attach, detach
from . import comfy_compat
from .lora_loss import Losses, losses
from .read_weights import reads_weight
from .rules import gguf_weights
from .rules.host import HOST
from .rules.quantized_weights import INT8_LAYOUT

log = logging.getLogger(__name__)

PREFIX, WEIGHT = "diffusion_model.", ".weight"
UNPATCHED = uuid.uuid5(uuid.NAMESPACE_OID, "compiled graphs: no patches")
"""Tells ComfyUI that weights without any patch are what they were, whichever LoRAs run beside them."""

_LORA = "comfy.weight_adapter.lora"
_CHANGES = ("weight_wrapper_patches", "force_cast_weights")
"""Attributes of a patcher by which the weights that it loads are others, besides its patches."""
_INPUT_SCALE = "pre_quant_scale"
"""Attribute of a quantised layer that scales its input first. A branch would get the input unscaled."""


@dataclass(frozen=True, eq=False)
class Lora:
    """A LoRA on one weight: weight + scale * up @ down, in the whole weight or in a part of it."""

    up: torch.Tensor
    """[outputs, rank]"""
    down: torch.Tensor
    """[rank, inputs]"""
    scale: float
    part: tuple[int, int, int] | None
    """The dimension, the start and the length of the weight's part."""

    @classmethod
    def of(cls, patch: Sequence[Any]) -> Lora | None:
        """Return the LoRA that a patch of a ModelPatcher is; None for any other patch."""
        if len(patch) != 5:
            return None
        strength, value, strength_model, part, function = patch
        found = _weights_in(value)
        if found is None or strength_model != 1.0 or function is not None:
            return None
        up, down, alpha, *others = found
        if any(other is not None for other in others):  # mid weights, DoRA's scale, another shape
            return None
        up, down = up.flatten(1), down.flatten(1)
        if up.shape[1] != down.shape[0]:
            return None
        return cls(up, down, float(strength) * (1.0 if alpha is None else float(alpha) / down.shape[0]), part)

    @property
    def rank(self) -> int:
        """The number of columns of `up`."""
        return self.down.shape[0]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a LoRA on a weight of this shape."""
        sizes = list(shape)
        if self.part is not None:
            dimension, start, length = self.part
            if dimension not in (0, 1) or not 0 <= start <= start + length <= sizes[dimension]:
                return False
            sizes[dimension] = length
        return sizes == [self.up.shape[0], self.down.shape[1]]

    def write(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Write the factors, with the scale in `up`, into zeros: [rank, inputs] and [rank, outputs]."""
        if self.part is not None:
            dimension, start, length = self.part
            up, down = (up.narrow(1, start, length), down) if dimension == 0 else (up, down.narrow(1, start, length))
        down.copy_(self.down)
        up.copy_(self.up.to(up.device, torch.float32).t() * self.scale)


@dataclass(frozen=True, eq=False)
class Branched:
    """A layer that gets a branch."""

    path: str
    """Below the network."""
    shape: tuple[int, int]
    loras: tuple[Lora, ...]
    rank: int
    """Of the branch: that of the region's largest one, so that a graph has one rank."""

    def write(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Write the factors, with the scale in `up`: [rank, inputs] and [rank, outputs]."""
        down.zero_()
        up.zero_()
        start = 0
        for lora in self.loras:
            rows = slice(start, start + lora.rank)
            lora.write(down[rows], up[rows])
            start += lora.rank


class Factors:
    """The factors of one network's branches. They stay where they are: recorded steps hold their addresses."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._patches: Any = None
        """What they were made of, as ComfyUI tells patches apart."""
        self._attached: list[tuple[nn.Module, Any]] = []
        self.is_in_use = False
        """Whether a sampling has them."""

    def fill(self, branches: Iterable[Branched], patches: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Make the factors of these branches, in the places of earlier ones where they have their form."""
        before, self._patches = self._patches, None
        branches = list(branches)
        kept = [branch for branch in branches if self._has_place(branch, dtype, device)]
        missing = [branch for branch in branches if branch not in kept]
        self._pairs = {branch.path: self._pairs[branch.path] for branch in kept}
        if missing:
            comfy_compat.free_memory(device, sum(b.rank * sum(b.shape) for b in missing) * dtype.itemsize)
        with torch.inference_mode():  # only this mode can write to both inference tensors and normal ones
            self._allocate(missing, dtype, device)
            for branch in missing if patches == before else branches:
                self._write(branch)
        self._patches = patches

    def fill_without_values(self, branches: Iterable[Branched], dtype: torch.dtype) -> None:
        """Make factors that have a form only."""
        self._allocate(branches, dtype, torch.device("meta"))

    def attach(self, network: nn.Module) -> None:
        """Give the layers their branches, unless they have them."""
        with call_lock.shared():  # nobody looks at the network on another thread
            for path, pair in self._pairs.items() if not self._attached else ():
                layer = network.get_submodule(path)
                self._attached.append((layer, attach(layer, *pair)))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the factors for a while. At the end the layers lose their branches."""
        self.is_in_use = True
        try:
            yield
        finally:
            self.is_in_use = False
            attached, self._attached = self._attached, []
            with call_lock.shared():
                for layer, handle in attached:
                    detach(layer, handle)

    def clear(self) -> None:
        """Give the memory back."""
        self._pairs, self._patches = {}, None

    def losses(self, branch: Branched, patcher: Any, layer: nn.Module) -> Losses | None:
        """Return what the LoRAs of a branch lose, merged and beside the weight; None where that cannot be said."""
        pair = self._pairs[branch.path]
        try:
            exact = tuple(torch.empty_like(factor, dtype=torch.float32) for factor in pair)
            branch.write(*exact)
        except torch.cuda.OutOfMemoryError:
            return None
        return losses(patcher, f"{PREFIX}{branch.path}{WEIGHT}", layer, exact, pair)

    def _has_place(self, branch: Branched, dtype: torch.dtype, device: torch.device) -> bool:
        pair = self._pairs.get(branch.path)
        sizes = [(branch.rank, size) for size in reversed(branch.shape)]
        return pair is not None and [(*f.shape, f.dtype, f.device) for f in pair] == [
            (*s, dtype, device) for s in sizes
        ]

    def _allocate(self, branches: Iterable[Branched], dtype: torch.dtype, device: torch.device) -> None:
        for branch in branches:
            down, up = (torch.empty(branch.rank, n, dtype=dtype, device=device) for n in reversed(branch.shape))
            self._pairs[branch.path] = down, up

    def _write(self, branch: Branched) -> None:
        branch.write(*self._pairs[branch.path])


_factors: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Factors]] = weakref.WeakKeyDictionary()


def _factors_of(network: nn.Module) -> Factors:
    """Return a network's factors: one object for all patchers whose node asks for branches. It goes with the last."""
    known = _factors.get(network)
    factors = None if known is None else known()
    if factors is None:
        factors = Factors()
        _factors[network] = weakref.ref(factors)
    return factors


class LowRankBranches:
    """Put around the samplings of a patcher and of its clones. Holds the network weakly."""

    def __init__(self, network: nn.Module, regions: Iterable[str]) -> None:
        """`regions` are the paths of those that graphs are made for."""
        self._network = weakref.ref(network)
        self._regions = frozenset(regions)
        self.on_change: Callable[[], None] = lambda: None
        """Called when there is other news of the branches than in the sampling before."""
        self.count = 0
        """How many layers had a branch in the last sampling."""
        self.losses: Losses | None = None
        """What its LoRAs lost there, and would have lost in the weights, if that is known."""
        self._measured: Any = None
        """The patches that `losses` speaks of, as ComfyUI tells them apart, and the number of branches."""
        self._factors = _factors_of(network)

    def __call__(self, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample, with the LoRAs of the patcher that is sampled as branches where they can be."""
        patcher, network, factors = sample.class_obj.model_patcher, self._network(), self._factors
        if network is None or factors.is_in_use:
            return sample(*args, **kwargs)
        if not is_plain(sample.class_obj, network):
            self._note([], patcher, network)
            return sample(*args, **kwargs)
        with factors.in_use():
            branches = self._filled(branches_of(patcher, network, self._regions), patcher)
            self._note(branches, patcher, network)
            with without_patches(patcher, [f"{PREFIX}{branch.path}{WEIGHT}" for branch in branches]):
                return sample(*args, **kwargs)

    def begin(self) -> None:
        """The weights are loaded, and the steps begin."""
        if self._factors.is_in_use and (network := self._network()) is not None:
            self._factors.attach(network)

    def unloaded(self) -> None:
        """ComfyUI has unloaded the model, perhaps to load it anew for the sampling that begins."""
        if not self._factors.is_in_use:
            self._factors.clear()

    @contextmanager
    def ahead(self, patcher: Any) -> Iterator[None]:
        """Have the branches of a patcher's LoRAs there, without values, while its graphs are made."""
        network, factors = self._network(), Factors()
        factors.fill_without_values(branches_of(patcher, network, self._regions), _dtype_of(patcher))
        with factors.in_use():
            factors.attach(network)
            yield

    def _filled(self, branches: list[Branched], patcher: Any) -> list[Branched]:
        """Fill the factors; return the branches that have found memory: all or none."""
        try:
            self._factors.fill(branches, patcher.patches_uuid, _dtype_of(patcher), patcher.load_device)
        except torch.cuda.OutOfMemoryError:
            log.info("LoRAs are merged into quantised weights: there is no memory to keep them beside these.")
            self._factors.clear()
            return []
        return branches

    def _note(self, branches: list[Branched], patcher: Any, network: nn.Module) -> None:
        """Take note of a sampling's branches. What LoRAs lose is computed once for each set of them."""
        before = self.count, self.losses
        self.count = len(branches)
        if self._measured != (patcher.patches_uuid, self.count):
            self._measured = patcher.patches_uuid, self.count
            largest = max(branches, key=lambda branch: math.prod(branch.shape), default=None)
            layer = largest and network.get_submodule(largest.path)
            self.losses = largest and self._factors.losses(largest, patcher, layer)
        if (self.count, self.losses) != before:
            self.on_change()


def is_plain(guider: Any, network: nn.Module) -> bool:
    """Whether a guider samples this network with weights that are the same for all conditionings and devices."""
    patcher, options = guider.model_patcher, guider.model_options
    if getattr(patcher.model, "diffusion_model", None) is not network:
        return False
    if (
        getattr(patcher, "hook_patches", None)
        or getattr(patcher, "forced_hooks", None)
        or "registered_hooks" in options
    ):
        return False
    others = getattr(patcher, "get_additional_models_with_key", lambda key: ())("multigpu")
    return not others and not any("hooks" in cond for conds in guider.conds.values() for cond in conds)


def branches_of(patcher: Any, network: nn.Module, regions: frozenset[str]) -> list[Branched]:
    """Return the layers of regions whose LoRAs can be branches: quantised ones with plain LoRAs and nothing else."""
    by_region: dict[str, list[tuple[str, tuple[int, int], tuple[Lora, ...]]]] = {}
    for key, patches in patcher.patches.items():
        path = key.removeprefix(PREFIX).removesuffix(WEIGHT)
        region = _region_of(path, regions)
        if region is None or key != f"{PREFIX}{path}{WEIGHT}" or key in getattr(patcher, "weight_wrapper_patches", ()):
            continue
        shape = quantised_shape(network, region, path)
        loras = tuple(Lora.of(patch) for patch in patches) if shape is not None else ()
        if loras and all(lora is not None and lora.fits(shape) for lora in loras):
            by_region.setdefault(region, []).append((path, shape, loras))
    return [branch for found in by_region.values() for branch in _with_one_rank(found)]


def _with_one_rank(found: Sequence[tuple[str, tuple[int, int], tuple[Lora, ...]]]) -> list[Branched]:
    """Return the branches of one region, without those that would take more products than their layer."""
    while found:
        largest = max(sum(lora.rank for lora in loras) for _, _, loras in found)
        rank = -(-largest // STEP) * STEP
        kept = [each for each in found if rank * sum(each[1]) < each[1][0] * each[1][1]]
        if len(kept) == len(found):
            return [Branched(path, shape, loras, rank) for path, shape, loras in found]
        found = kept
    return []


def quantised_shape(network: nn.Module, region: str, path: str) -> tuple[int, int] | None:
    """Return the shape of a layer's weight if that is quantised, and if nobody but the layer's own code reads it."""
    try:
        layer = network.get_submodule(path)
    except AttributeError:
        return None
    weight = layer._parameters.get("weight")
    if weight is None or not type(layer).__name__.endswith("Linear") or len(weight.shape) != 2:
        return None
    if getattr(layer, _INPUT_SCALE, None) is not None or not _is_quantised(weight):
        return None
    is_int8 = getattr(weight, "_layout_cls", None) == INT8_LAYOUT
    return None if reads_weight(network, region, path, is_int8) else tuple(weight.shape)


def _is_quantised(weight: torch.Tensor) -> bool:
    if type(weight) in TENSOR_TYPES:
        return weight.is_floating_point() and weight.dtype.itemsize == 1
    if gguf_weights.is_known(type(weight)):  # perhaps with the LoRA of an earlier sampling
        return gguf_weights.type_name(weight) in gguf_weights.TYPES
    try:
        inner = HOST.inner_tensors(weight)
    except Unsupported:
        return False
    return inner is not None and not inner.is_the_weight


@contextmanager
def without_patches(patcher: Any, keys: Iterable[str]) -> Iterator[None]:
    """Leave patches out of a patcher for a while. ComfyUI tells what it has loaded by `patches_uuid`."""
    before, keys = (patcher.patches, patcher.patches_uuid), frozenset(keys)
    left = {key: patches for key, patches in patcher.patches.items() if key not in keys}
    is_changed = left or any(getattr(patcher, name, None) for name in _CHANGES)
    patcher.patches = left
    patcher.patches_uuid = uuid.uuid5(patcher.patches_uuid, "\n".join(sorted(left))) if is_changed else UNPATCHED
    try:
        yield
    finally:
        patcher.patches, patcher.patches_uuid = before


def _region_of(path: str, regions: frozenset[str]) -> str | None:
    parts = path.split(".")
    return next((found for n in range(1, len(parts)) if (found := ".".join(parts[:n])) in regions), None)


def _weights_in(value: Any) -> Sequence[Any] | None:
    """Return what a LoRA consists of, in ComfyUI's order, or None for any other patch."""
    if type(value).__module__ == _LORA:
        found = getattr(value, "weights", None)
    else:  # before 2025
        found = value[1] if isinstance(value, tuple) and len(value) == 2 and value[0] == "lora" else None
    if not isinstance(found, (tuple, list)) or len(found) < 3:
        return None
    are_factors = all(isinstance(factor, torch.Tensor) and factor.ndim >= 2 for factor in found[:2])
    return found if are_factors else None


def _dtype_of(patcher: Any) -> torch.dtype:
    """Return the dtype that a model computes in."""
    dtype = comfy_compat.compute_dtype(patcher) or patcher.model.get_dtype()
    return dtype if isinstance(dtype, torch.dtype) and dtype.itemsize > 1 else torch.bfloat16
