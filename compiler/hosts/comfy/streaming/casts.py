"""ComfyUI's own cast: it brings the weights of layers to the device and makes of them what each layer's code gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from ....common.host import Host
from ....common.inner_tensors import TENSOR_TYPES
from ....common.reason import Reason, ReasonCode, Unsupported
from ....identity.low_rank import is_factor
from .. import comfy_compat
from .hidden_errors import memory_errors_raised
from .vbar_places import ARRIVED, FUNCTIONS, LORA_FUNCTIONS, PLACE, SIGNATURE, fault, is_same, unpin

SMALL_BYTES = 16 * 2**10
"""Layers up to this size get no place: `ModelPatcherDynamic.load` moves their weights as they are."""
CAST = "comfy.ops.cast_modules_with_vbar"
NO_BUFFER = ("VRAM grow failed", "VRAM reservation failed")
"""How comfy-aimdo's `VRAMBuffer` says that a buffer for casts finds no memory, with a plain RuntimeError."""


class Cast:
    """The weights of some layers on their way, by ComfyUI's own cast. Their pages stay pinned until `end`.

    Weights without room in their pages come into a stream's buffer, which the next cast over that stream overwrites. So
    they are copied out at once. Otherwise a layer that is cast later, between blocks or within one, would overwrite
    them.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.has_room = True
        """Whether all weights found room in their pages."""
        # Some networks bring a block's weights themselves (`comfy.model_prefetch`), and let them go themselves.
        self._theirs = [layer for layer in layers if "_prefetch" in vars(layer)]
        self._own = [layer for layer in layers if "_prefetch" not in vars(layer)]
        self._device = device
        self._weights: list[tuple[nn.Module, dict[str, Any]]] = []
        self._host: Host | None = None
        self._refused: Reason | None = None
        self._is_done = self._has_waited = False
        self.stream = None
        with self.ended_if_it_fails():
            if self._own:
                self.stream = comfy_compat.find(CAST)(self._own, None, device, None, True)

    def resolve(self, host: Host, take: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        """Have the weights made of what comes, over the same stream.

        `take` moves bytes out of a stream's buffer and returns where they are. Raises torch.cuda.OutOfMemoryError; then
        nothing stays pinned.
        """
        self._host = host
        brought = {id(layer): vars(layer)["_prefetch"] for layer in (*self._own, *self._theirs)}
        self.has_room = all(prefetch["signature"] is not None for prefetch in brought.values())
        with self.ended_if_it_fails():
            for layer in self._own:
                prefetch = brought[id(layer)]
                buffer = prefetch.get("xfer_dest") if prefetch["signature"] is None else None
                # Weights that change their dtype are converted out of the buffer below.
                if buffer is not None and self.stream is not None and not prefetch.get("needs_cast"):
                    prefetch["xfer_dest"] = take(buffer, self.stream)
            self._resolve_own()
        # Eager code that runs a layer without room meanwhile brings the weights for itself.
        clean_up([layer for layer in self._own if brought[id(layer)]["signature"] is None])
        self._own = [layer for layer in self._own if brought[id(layer)]["signature"] is not None]

    def _resolve_own(self) -> None:
        has_functions = any(vars(layer).get(name) for layer in self._own for name in FUNCTIONS)
        if has_functions and self.stream is not None:  # they may read what was launched before
            self.stream.wait_stream(comfy_compat.current_stream(self._device))
        try:
            with comfy_compat.on_stream(self.stream):
                for layer in self._own:
                    self._weights.append((layer, _resolved(layer, self._host, self._device)))
        except Unsupported as error:  # `arrived` says so: this may be ahead of the region's call
            self._refused = error.reason

    def arrived(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return each layer's weights, for which what is launched from now on waits. Raises Unsupported."""
        self._wait()
        if self._refused is not None:
            raise Unsupported.of(self._refused)
        return [*self._weights, *((layer, self._resolved_theirs(layer)) for layer in self._theirs)]

    def _resolved_theirs(self, layer: nn.Module) -> dict[str, Any]:
        """Return weights that the network has brought. Others find them as they were brought, without LoRAs."""
        prefetch = vars(layer)["_prefetch"]
        brought = prefetch.get("xfer_dest")
        if brought is None or prefetch["signature"] is not None or not any(map(vars(layer).get, LORA_FUNCTIONS)):
            return _resolved(layer, self._host, self._device)
        prefetch["xfer_dest"] = brought.clone()  # LoRAs are added in place
        try:
            return _resolved(layer, self._host, self._device)
        finally:
            prefetch["xfer_dest"] = brought

    def end(self) -> None:
        """Unpin the pages. Other weights are gone once the GPU has passed this point."""
        if not self._is_done:
            self._is_done = True
            self._wait()  # ComfyUI takes these pages for filled even if nobody has asked for the weights
            clean_up(self._own)
            if self.stream is not None:
                self.stream.wait_stream(comfy_compat.current_stream(self._device))

    def _wait(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            comfy_compat.wait_for_stream(self._device, self.stream)

    @contextmanager
    def ended_if_it_fails(self) -> Iterator[None]:
        """Unpin the pages after an error. Raises torch.cuda.OutOfMemoryError where ComfyUI's buffer cannot grow."""
        try:
            yield
        except BaseException as error:
            comfy_compat.join_offload_streams(self._device)  # the same pages may be filled again over another stream
            _unpin_unfinished(error)
            self.end()
            if isinstance(error, RuntimeError) and str(error).startswith(NO_BUFFER):
                raise torch.cuda.OutOfMemoryError(str(error)) from error
            raise


@contextmanager
def cast(layers: Sequence[nn.Module], device: torch.device) -> Iterator[Any]:
    """Bring the weights of layers; yield the stream over which they come."""
    made = Cast(layers, device)
    with made.ended_if_it_fails():
        yield made.stream
    made.end()


def _resolved(layer: nn.Module, host: Host, device: torch.device) -> dict[str, Any]:
    weight, bias = resolve(layer, host, device)
    return {ARRIVED["weight"]: weight, ARRIVED["bias"]: bias}


def resolve(layer: nn.Module, host: Host, device: torch.device, returns: bool = True) -> tuple[Any, Any]:
    """Have ComfyUI make the weights of a layer of what it has brought, in the dtypes that the layer's code gets."""
    attributes, tensors = vars(layer), layer._parameters
    dtypes = [None if tensors.get(name) is None else host.weight_dtype(layer, name, tensors[name]) for name in ARRIVED]
    function = comfy_compat.find("comfy.ops.resolve_cast_module_with_vbar")
    has_loras = any(attributes.get(name) for name in LORA_FUNCTIONS)
    try:
        with memory_errors_raised() if has_loras else nullcontext():
            made = function(layer, dtypes[0], device, dtypes[1], None, True, return_weights=returns)
    except BaseException:
        declare_outdated([layer])
        raise
    if not returns:
        return None, None
    is_in_page = attributes["_prefetch"]["signature"] is not None
    if not is_in_page and attributes.get("_full_precision_mm") and attributes.get(LORA_FUNCTIONS[0]):
        if type(tensors["weight"]) not in TENSOR_TYPES:  # the layer itself would not round the weight again
            raise Unsupported(ReasonCode.WEIGHT_FUNCTION, "a LoRA on a quantised weight that is not on the GPU")
    if is_in_page and not any(attributes.get(name) for name in FUNCTIONS):
        return attributes[ARRIVED["weight"]], attributes[ARRIVED["bias"]]
    return made


def cast_one(
    layer: nn.Module, own: dict[str, torch.Tensor], functions: dict[str, Any], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a layer's weights as ComfyUI's `cast_bias_weight` brings them, in their own dtypes."""
    function = comfy_compat.find("comfy.ops.cast_bias_weight")
    if function is None or not hasattr(layer, "comfy_cast_weights") or "weight" not in own:
        for name in own:
            if functions[name]:
                raise Unsupported(ReasonCode.WEIGHT_FUNCTION, f"{name}_function")
        where = next(tensor.device for tensor in own.values() if tensor.device != device)
        raise Unsupported(ReasonCode.WEIGHT_DEVICE, f"{where} while the model runs on {device}")
    for name, tensor in own.items():
        if functions[name] and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2):
            raise Unsupported(ReasonCode.WEIGHT_FUNCTION, f"{name}_function")
    like = torch.empty(0, dtype=own["weight"].dtype, device=device)
    with memory_errors_raised() if any(functions.values()) else nullcontext():
        weight, bias = function(layer, like)[:2]
    made = {"weight": weight, "bias": bias}
    return {name: made[name].to(tensor.dtype) for name, tensor in own.items()}


def has_arrived(layer: nn.Module, keep: bool = False) -> bool:
    """Whether a layer's weights are in its pages. With `keep`, these are then left pinned."""
    attributes = vars(layer)
    signature = fault(attributes[PLACE])
    is_there = is_same(signature, attributes.get(SIGNATURE))
    if signature is not None and not (keep and is_there):
        unpin(attributes[PLACE])
    return is_there


def clean_up(layers: Sequence[nn.Module]) -> None:
    """Unpin what ComfyUI has brought for these layers, and forget that it did."""
    comfy_compat.find("comfy.model_prefetch.cleanup_prefetched_modules")(None, layers)


def _unpin_unfinished(error: BaseException) -> None:
    """Unpin the pages of the layer at which ComfyUI's cast has failed.

    ComfyUI notes a layer's fault once the layer is done. Until then only the function that has raised knows of it.
    """
    code = getattr(comfy_compat.find(CAST), "__code__", None)
    for frame, _ in walk_tb(error.__traceback__):
        known = frame.f_locals if frame.f_code is code else {}
        layer, prefetch = known.get("s"), known.get("prefetch")
        if not isinstance(layer, nn.Module) or not isinstance(prefetch, dict) or PLACE not in vars(layer):
            continue
        # After a fault that raises, this still is what was noted of the layer before.
        is_noted = any(vars(each).get("_prefetch") is prefetch for each in known.get("comfy_modules", ()))
        if not is_noted and prefetch.get("signature") is not None:
            unpin(vars(layer)[PLACE])


def declare_outdated(layers: Iterable[nn.Module]) -> None:
    """Have the weights of layers brought again, whatever is in their pages.

    ComfyUI notes that a layer's weights have arrived before it adds LoRAs to them, which can fail for lack of memory.
    """
    for layer in layers:
        vars(layer)[SIGNATURE] = None


def dtype_of(layer: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a weight reaches its layer: the model's, or the file's for small layers of ComfyUI."""
    attributes = vars(layer)
    dtype = attributes.get(f"{name}_comfy_model_dtype")
    if not isinstance(dtype, torch.dtype):
        return tensor.dtype
    if not hasattr(layer, "comfy_cast_weights") or PLACE in attributes:
        return dtype
    is_loaded = SIGNATURE in attributes
    groups = layer._parameters, layer._buffers
    own = [t for group in groups for name, t in group.items() if t is not None and not is_factor(name)]
    return dtype if not is_loaded and sum(t.nbytes for t in own) > SMALL_BYTES else tensor.dtype
