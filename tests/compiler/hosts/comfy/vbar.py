"""Dynamic VRAM without a GPU: a VBAR in the CPU's memory, which a core's own casts fill and empty.

Only the library below ComfyUI is replaced (`comfy_aimdo`), and what `ModelPatcherDynamic.load` does to layers is done
here: on a CPU the core does not use that patcher.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy.streaming import vbar_places
from torch import nn

PAGE = 64 * 1024


class VBAR:
    """Pages of memory with a fixed address. Counts pins, and refuses pages from `limit` or `watermark` on.

    `make_room` lowers the watermark until it has emptied enough, or as far as `kept`. It passes pages that are pinned:
    these go once nobody pins them. Each load raises the watermark again.
    """

    def __init__(self, size: int) -> None:
        self.max_size = self.watermark = size
        self._ptr = 1
        self.kept = self.waits = 0
        self.memory = torch.frombuffer(mmap.mmap(-1, size + PAGE), dtype=torch.uint8)  # takes only what is written to
        self.base = -(-self.memory.data_ptr() // PAGE) * PAGE
        self.size = 0
        self.limit = size
        self.serials: dict[int, int] = {}
        self.filled: set[int] = set()
        self.pins: dict[int, int] = {}
        self.faults = 0
        self.fails = False

    def alloc(self, size: int) -> tuple[VBAR, int, int]:
        place = self, self.base + self.size, size
        self.size += -(-size // 512) * 512
        return place

    def pages(self, place: tuple[VBAR, int, int]) -> range:
        _, address, size = place
        return range((address - self.base) // PAGE, math.ceil((address - self.base + size) / PAGE))

    def fault(self, place: tuple[VBAR, int, int]) -> Any:
        self.faults += 1
        if self.fails:
            raise RuntimeError("Fault failed: 2")
        pages = self.pages(place)
        if pages.stop * PAGE > min(self.limit, self.watermark):
            return None
        for page in pages:
            if page not in self.filled:
                self.filled.add(page)
                self.serials[page] = self.serials.get(page, 0) + 1
            self.pins[page] = self.pins.get(page, 0) + 1
        return (ctypes.c_uint32 * len(pages))(*(self.serials[page] for page in pages))

    @property
    def base_addr(self) -> int:
        return self.base

    def get_residency(self) -> list[int]:
        return [int(page in self.filled) for page in range(self.memory.numel() // PAGE)]

    def unpin(self, place: tuple[VBAR, int, int]) -> None:
        for page in self.pages(place):
            assert self.pins.get(page, 0) > 0, "unpinned more often than faulted"
            self.pins[page] -= 1
        self._empty([page for page in self.pages(place) if page * PAGE >= self.watermark])

    def evict(self, share: float = 1.0) -> None:
        """Empty pages that nobody has pinned, from the end."""
        self._empty(sorted(self.filled)[int(len(self.filled) * (1 - share)) :])

    def _empty(self, pages: Iterable[int]) -> int:
        """Empty those of these pages that nobody has pinned; return how many."""
        gone = [page for page in pages if page in self.filled and not self.pins.get(page)]
        if gone:
            self.wait()
        for page in gone:
            self.filled.discard(page)
            ctypes.memset(self.base + page * PAGE, 0xFF, PAGE)  # not a number
        return len(gone)

    def wait(self) -> None:
        """Wait for the GPU."""

    def set_watermark_limit(self, size: int) -> None:
        assert self._ptr, "the library would write to an address that is not there"
        self.kept = size

    def make_room(self, size: int) -> None:
        """Do what the library does before an allocation that would leave less than the headroom."""
        if self.watermark <= self.kept:
            return
        self.waits += 1
        needed = math.ceil(size / PAGE)
        while needed > 0 and self.watermark > self.kept:
            self.watermark -= PAGE
            needed -= self._empty([self.watermark // PAGE])

    @property
    def pinned(self) -> int:
        return sum(self.pins.values())


@pytest.fixture
def vbar(monkeypatch: pytest.MonkeyPatch) -> VBAR:
    """A VBAR that the core's functions use."""
    library = pytest.importorskip("comfy_aimdo.model_vbar")
    pytest.importorskip("comfy.memory_management", reason="this ComfyUI does not stream weights")
    import comfy.cli_args
    import comfy_aimdo.torch

    monkeypatch.setattr(vbar_places, "PAGE_BYTES", PAGE)
    made = VBAR(256 * 2**20)
    monkeypatch.setattr(library, "ModelVBAR", VBAR)
    monkeypatch.setattr(library, "vbar_fault", lambda place: place[0].fault(place))
    monkeypatch.setattr(library, "vbar_unpin", lambda place: place and place[0].unpin(place))
    monkeypatch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", _tensor_at)
    monkeypatch.setattr(comfy.cli_args.args, "disable_pinned_memory", True)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    return made


class Stream:
    """A stream on which everything is done at once, with the buffer into which each cast over it writes."""

    def __init__(self) -> None:
        self.buffer = bytearray(64 * 2**20)
        self.casts = 0

    def as_context(self, _: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_stream(self, _: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def get(self, size: int, offset: int) -> tuple[Stream, int, int]:
        """Return a place in the buffer, as `comfy_aimdo.vram_buffer.VRAMBuffer` does."""
        self.casts += not offset
        return self, ctypes.addressof(ctypes.c_uint8.from_buffer(self.buffer)) + offset, size


@pytest.fixture
def streams(vbar: VBAR, monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Two streams that take turns, over which the core's casts bring what has no room in its pages."""
    import comfy.model_management as management

    made, device = [Stream(), Stream()], torch.device("cpu")
    monkeypatch.setattr(management, "NUM_STREAMS", len(made))
    monkeypatch.setattr(management, "STREAMS", {device: made})
    monkeypatch.setattr(management, "stream_counters", {device: 0})
    monkeypatch.setattr(management, "STREAM_AIMDO_CAST_BUFFERS", {stream: stream for stream in made})
    return made


def _tensor_at(place: tuple[Any, int, int], device: torch.device) -> torch.Tensor:
    _, address, size = place
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def stream(patcher: Any, vbar: VBAR) -> Any:
    """Make a patcher of the CPU stream its weights: each load does what `ModelPatcherDynamic.load` does."""
    from comfy.model_management import module_size

    cls = type(patcher)

    class Dynamic(cls):
        """What a patcher of the CPU would be if it streamed."""

        def is_dynamic(self) -> bool:
            return True

        def load(self, *args: Any, **kwargs: Any) -> None:
            dirty = getattr(self.model, "streams", None) != self.patches_uuid
            self.model.streams = self.patches_uuid
            vbar.watermark = vbar.max_size
            for path, layer in self.model.named_modules():
                if not hasattr(layer, "comfy_cast_weights"):
                    _move(layer, _dtype)
                elif module_size(layer) > 16 * 1024:
                    _load_layer(self, path, layer, vbar, dirty)
                else:
                    layer.comfy_cast_weights, layer._v_signature = True, None
                    _move(layer, lambda layer, name, tensor: tensor.dtype)
            self.model.device, self.model.current_weight_patches_uuid = self.load_device, self.patches_uuid

        def partially_load(self, *args: Any, **kwargs: Any) -> int:
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            self.load()
            return 0

        patch_model_lowvram = None

    patcher.__class__ = Dynamic
    return patcher


def pin(patcher: Any) -> None:
    """Keep the weights of layers that have a place in pinned memory, too, as after a first sampling."""
    from comfy.memory_management import interpret_gathered_like, vram_aligned_size

    for layer in patcher.model.modules():
        if "_v" not in vars(layer):
            continue
        tensors = [layer.weight, layer.bias]
        pinned = torch.zeros(vram_aligned_size(tensors), dtype=torch.uint8)
        for target, source in zip(interpret_gathered_like(tensors, pinned), tensors, strict=True):
            if source is not None:
                target.copy_(source)
        layer._pins = {"weights": {"pin": pinned, "registered": True}}


def _load_layer(patcher: Any, path: str, layer: nn.Module, vbar: VBAR, dirty: bool) -> None:
    from comfy.memory_management import TensorGeometry, vram_aligned_size
    from comfy.model_patcher import LowVramPatch

    layer.comfy_cast_weights, layer.seed_key, layer._pin_state = True, path, {}
    if dirty or not hasattr(layer, "_v_signature"):
        layer._v_signature = None
    size = 0
    for name in ("weight", "bias"):
        key, weight = f"{path}.{name}", getattr(layer, name)
        if weight is None:
            continue
        patch = LowVramPatch(key, patcher.patches) if key in patcher.patches else None
        if patch is not None:
            patch._pin_state = {}
        setattr(layer, f"{name}_lowvram_function", patch)
        setattr(layer, f"{name}_function", [])
        weight._model_dtype = _dtype(layer, name, weight)
        size += vram_aligned_size(TensorGeometry(shape=weight.shape, dtype=weight._model_dtype))
    if not hasattr(layer, "_v"):
        layer._v = vbar.alloc(size)


def _move(layer: nn.Module, dtype: Callable[[nn.Module, str, torch.Tensor], torch.dtype]) -> None:
    """Small weights are other tensors after each load."""
    for group in (layer._parameters, layer._buffers):
        for name, tensor in group.items():
            if tensor is not None:
                moved = tensor.detach().to(dtype(layer, name, tensor), copy=True)
                group[name] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def _dtype(layer: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    return getattr(layer, f"{name}_comfy_model_dtype", None) or tensor.dtype
