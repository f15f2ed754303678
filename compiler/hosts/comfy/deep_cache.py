"""DeepCache for ComfyUI's UNets: some steps compute the outer blocks only and take the rest from an earlier step.

Between neighbouring steps the features of the deep blocks change little (Ma, Fang and Wang, "DeepCache", CVPR 2024).
A *whole* step computes everything and keeps what comes up from the deep blocks; a *shallow* one computes the outer
blocks around it. It is ComfyUI's own code that runs: in a shallow step the deep layers have forwards that compute
nothing, for as long as the call lasts. So blocks that are compiled stay compiled.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...common.compare import relative_error
from ...common.words import Words, join, say
from . import comfy_compat
from .comfy_compat import CONDITIONINGS, NETWORK_WRAPPERS, OPTIONS, PATCHES, STEP, WRAPPERS

MARK = "compiled_graphs.deep_cache"
"""Transformer option of calls that go through a DeepCache: no two of them need be alike."""

_numbers = itertools.count()
TOO_OLD = say("this ComfyUI does not say when a sampling begins. Update it to 0.3.10 or newer.")

_ACT_BETWEEN_BLOCKS = frozenset(
    {
        "input_block_patch",
        "input_block_patch_after_skip",
        "middle_patch",
        "middle_block_after_patch",
        "output_block_patch",
        "forward_timestep_embed_patch",
    }
)
"""Patches that would be given what deep blocks hand on in a shallow step, which is nothing."""
_PARTS_OF_FRAMES = ("context_window", "ad_params")
"""Options of calls that have some of the frames only, by ComfyUI's context windows and by AnimateDiff-Evolved."""


@dataclass(frozen=True)
class Settings:
    """What a person chooses, in the terms of OneDiff's nodes."""

    interval: int = 3
    """Every so many steps one is whole."""
    layer: int = 0
    """Level of the UNet in which shallow steps turn around, 0 for full resolution."""
    block: int = 1
    """Block in that level. OneDiff counts without the blocks that only halve the resolution."""
    start: int = 0
    """Where in the schedule it begins, of 1000; every step is whole before."""
    end: int = 1000
    """Where it ends."""


@dataclass(frozen=True)
class Comparison:
    """The first shallow step beside the same step computed whole."""

    whole: float
    """Seconds."""
    shallow: float
    difference: float
    """||shallow - whole|| / ||whole||."""


def unusable(network: nn.Module) -> str | None:
    """Return why a network's steps cannot be shallow, or None."""
    if not all(hasattr(network, name) for name in ("input_blocks", "output_blocks", "num_res_blocks")):
        return say("{name} is not a UNet, and only a UNet has deep blocks to skip.", name=type(network).__name__)
    if network.middle_block is None or len(network.input_blocks) != len(network.output_blocks):
        return say("this UNet has no middle block to take from an earlier step.")
    return None


def use_deep_cache(patcher: Any, settings: Settings, on_end: Callable[[str], None]) -> tuple[Any, str]:
    """Return a clone of a ModelPatcher whose steps are whole and shallow in turn, and what to tell the person.

    `on_end` is told after each sampling what it did. A model that has no deep blocks comes back as it is, with the
    reason, and so does any model where nobody says that a sampling begins: what an interrupted one has kept must not
    get into the next.
    """
    if not comfy_compat.announces_samplings(patcher):
        return patcher, say("Without DeepCache: {reason}", reason=TOO_OLD)
    network = getattr(patcher.model, "diffusion_model", None)
    clone = patcher.clone()
    inner = clone.model_options.get(comfy_compat.FUNCTION_WRAPPER)
    try:
        cache = DeepCache(network, settings, inner.inner if isinstance(inner, DeepCache) else inner)
    except ValueError as reason:
        return patcher, say("Without DeepCache: {reason}", reason=reason.args[0])
    clone.set_model_unet_function_wrapper(cache)
    if isinstance(inner, DeepCache):  # another one, within somebody else's wrapper, goes on
        comfy_compat.forget_callbacks(clone, inner.callbacks_key)
    comfy_compat.call_around_samplings(clone, cache.callbacks_key, cache.begin, cache.end)
    cache.on_end = on_end
    return clone, cache.text()


class DeepCache:
    """A `model_function_wrapper` of ComfyUI's ModelPatcher. Belongs to one patched clone."""

    keeps_network = True
    """It changes nothing in the network."""

    def __init__(self, network: nn.Module, settings: Settings, inner: Callable | None = None) -> None:
        """`inner` is the wrapper that was there before.

        Raises ValueError with the reason if the network is no such UNet.
        """
        if reason := unusable(network):
            raise ValueError(reason)
        self.settings = settings
        self.inner = inner
        self.callbacks_key = f"{MARK} {next(_numbers)}"
        above = sum(list(network.num_res_blocks)[: settings.layer])
        self.depth = min(above + settings.block + 1, len(network.input_blocks) - 1)
        """Number of the last input block that a shallow step computes."""
        self.whole = self.shallow = 0
        """Steps of the sampling that runs, or ran last."""
        self.comparison: Comparison | None = None
        self.on_end: Callable[[str], None] = lambda text: None
        self.reason = ""
        """Why the last step was whole although its turn was to be shallow."""
        self._network = weakref.ref(network)
        self._features: dict[Any, torch.Tensor] = {}
        self._sampling: Callable[[], Any] = lambda: None
        """Returns the `model_sampling` of the model that samples."""
        self._sigmas: Any = None
        self._step = -1
        self._calls = 0

    def __call__(self, apply_model: Callable, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Run one call of the model, whole or shallow. A copy of the model for another GPU runs whole."""
        if self._is_of_other(apply_model):
            return self._forward(apply_model, arguments)
        options = arguments["c"].get(OPTIONS, {})
        self._note_step(apply_model, arguments["timestep"], options)
        which = tuple(arguments.get("cond_or_uncond", ())), tuple(options.get(CONDITIONINGS, ()))
        key = (self._calls, arguments["input"].shape, which)
        self._calls += 1
        feature = self._features.get(key)
        self.reason = self._reason(options)
        if self._step < 0 or self._step % self.settings.interval == 0 or feature is None or self.reason:
            return self._run_whole(apply_model, arguments, key)
        inside = options.get(WRAPPERS, {}).get(NETWORK_WRAPPERS)  # such as EasyCache, to which four runs are four steps
        if self.comparison is None and not inside:
            return self._compare(apply_model, arguments, key, feature)
        return self._run_shallow(apply_model, arguments, feature)

    def _is_of_other(self, apply_model: Callable) -> bool:
        network = getattr(getattr(apply_model, "__self__", None), "diffusion_model", None)
        return network is not None and network is not self._network()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepCache:
        """ComfyUI of 2024 copies a patcher's options whole when it clones it."""
        return self

    def begin(self, patcher: Any = None) -> None:
        """Forget all of the last sampling, which may not have come to its end."""
        sampling = getattr(getattr(patcher, "model", None), "model_sampling", None)
        self._sampling = weakref.ref(sampling) if sampling is not None else lambda: None
        self._features.clear()
        self._sigmas, self._step, self.whole, self.shallow = None, -1, 0, 0

    def end(self, *_: Any) -> None:
        """Free what a sampling kept, and tell what it did."""
        self._features.clear()
        self.on_end(self.text())

    def text(self) -> str:
        """Return what the last sampling did, for people."""
        count = len(self._network().input_blocks)
        sentences = [
            say("DeepCache: a shallow step computes {depth} of {count} levels.", depth=self.depth + 1, count=count)
        ]
        if steps := self.whole + self.shallow:
            sentences.append(say("{shallow} of {steps} steps were shallow.", shallow=self.shallow, steps=steps))
        if self.reason:
            sentences.append(say("The last step was whole because of {reason}.", reason=self.reason))
        if (found := self.comparison) is not None:
            sentences.append(_comparison_text(found))
        return join(sentences, " ")

    def _note_step(self, apply_model: Callable, timestep: torch.Tensor, options: Mapping[str, Any]) -> None:
        """See whether this call begins a step: those of one step are given the same tensor."""
        sigmas = options.get(STEP, timestep)
        if sigmas is not self._sigmas:
            self._step = self._step + 1 if self._is_in_window(apply_model, timestep) else -1
            self._calls = 0
        self._sigmas = sigmas

    def _is_in_window(self, apply_model: Callable, timestep: torch.Tensor) -> bool:
        start, end = self.settings.start, self.settings.end
        if start <= 0 and end >= 1000:
            return True  # without waiting for the GPU to tell
        model = getattr(apply_model, "__self__", None)  # none where a wrapper around this one hands on its own function
        sampling = getattr(model, "model_sampling", None) or self._sampling()
        if sampling is None:
            return False
        return start <= 999 - float(sampling.timestep(timestep[:1])[0]) <= end

    def _reason(self, options: Mapping[str, Any]) -> str:
        if not options.keys().isdisjoint(_PARTS_OF_FRAMES):
            return "context windows"
        found = [name for name, patches in options.get(PATCHES, {}).items() if patches and name in _ACT_BETWEEN_BLOCKS]
        return f"patch {found[0]}" if found else ""

    def _run_whole(self, apply_model: Callable, arguments: Mapping[str, Any], key: Any) -> torch.Tensor:
        self.whole += self._calls == 1
        with self._keeping(key):
            return self._forward(apply_model, arguments)

    def _run_shallow(self, apply_model: Callable, arguments: Mapping[str, Any], feature: torch.Tensor) -> torch.Tensor:
        self.shallow += self._calls == 1
        if control := arguments["c"].get("control"):
            arguments = {**arguments, "c": {**arguments["c"], "control": self._outer_control(control)}}
        with self._skipping(feature):
            return self._forward(apply_model, arguments)

    def _forward(self, apply_model: Callable, arguments: Mapping[str, Any]) -> torch.Tensor:
        options = {**arguments["c"].get(OPTIONS, {}), MARK: True}
        arguments = {**arguments, "c": {**arguments["c"], OPTIONS: options}}
        if self.inner is not None:
            return self.inner(apply_model, arguments)
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    def _compare(
        self, apply_model: Callable, arguments: Mapping[str, Any], key: Any, feature: torch.Tensor
    ) -> torch.Tensor:
        """Run a step both ways, once. Hand on the shallow one, and keep its feature, as in every other sampling."""
        device = arguments["input"].device
        seconds, results = [], []
        for run, with_what in ((self._run_shallow, feature), (self._run_whole, key)) * 2:
            _wait(device)
            start = time.perf_counter()
            results.append(run(apply_model, _own_control(arguments), with_what))
            _wait(device)
            seconds.append(time.perf_counter() - start)
        self._features[key] = feature
        self.whole, self.shallow = self.whole - 2 * (self._calls == 1), self.shallow - (self._calls == 1)
        self.comparison = Comparison(seconds[3], seconds[2], relative_error(results[2], results[3]))
        return results[2]

    @contextmanager
    def _keeping(self, key: Any) -> Iterator[None]:
        """Keep what comes up from the deep blocks in this call."""

        def keep(module: nn.Module, arguments: Any, result: torch.Tensor) -> None:
            self._features[key] = result.clone()  # a ControlNet's residuals are added in place

        hook = self._deepest()[-1].register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _skipping(self, feature: torch.Tensor) -> Iterator[None]:
        """Have the deep blocks compute nothing, and the last of them hand on what an earlier step kept."""
        deep = self._deepest()
        before = [(layer.__dict__, layer.__dict__.get("forward")) for layer in deep]
        for layer in deep:
            layer.__dict__["forward"] = _nothing
        deep[-1].__dict__["forward"] = lambda *args, **kwargs: feature.clone()
        try:
            yield
        finally:
            for attributes, forward in before:
                if forward is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = forward

    def _deepest(self) -> list[nn.Module]:
        """Return the layers that a shallow step leaves out, in the order in which they are called."""
        network = self._network()
        count = len(network.output_blocks) - self.depth - 1
        blocks = [*network.input_blocks[self.depth + 1 :], network.middle_block, *network.output_blocks[:count]]
        return [layer for block in blocks for layer in block]

    def _outer_control(self, control: Mapping[str, list]) -> dict[str, list]:
        """Return a ControlNet's residuals without those for blocks that are left out. Each block takes the last."""
        count = len(self._network().output_blocks) - self.depth - 1
        outer = {name: list(residuals) for name, residuals in control.items()}
        inputs, outputs = outer.get("input", []), outer.get("output", [])
        inputs[: max(0, len(inputs) - self.depth - 1)] = [None] * max(0, len(inputs) - self.depth - 1)
        outputs[max(0, len(outputs) - count) :] = [None] * min(count, len(outputs))
        if count:
            outer["middle"] = [None] * len(outer.get("middle", []))
        return outer


def _comparison_text(found: Comparison) -> Words:
    factor, difference = found.whole / found.shallow, found.difference
    if factor < 1:
        return say(
            "A shallow step is {factor:.1f}x slower than a whole one, and its result differs by {difference:.1%}.",
            factor=1 / factor,
            difference=difference,
        )
    return say(
        "A shallow step is {factor:.1f}x faster than a whole one, and its result differs by {difference:.1%}.",
        factor=factor,
        difference=difference,
    )


def _nothing(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Hand on one channel: blocks after this one are joined with it, and no more is looked at."""
    return x[:, :1]


def _own_control(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments whose lists of residuals a call may empty."""
    control = arguments["c"].get("control")
    own = {name: list(residuals) for name, residuals in control.items()} if control else control
    return {**arguments, "c": {**arguments["c"], "control": own}}


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
