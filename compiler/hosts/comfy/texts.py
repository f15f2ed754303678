"""What a node tells the person of a compiled model, in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import nn

from ...common.reason import Reason, ReasonCode
from ...common.timing import Gain
from ...common.words import Words, join, say
from ...identity.regions import is_torch_compiled
from ...registry.explanations import explanation_words, reason_words
from ...runtime.network_wrapper import NetworkWrapper
from ...runtime.speed_trial import SpeedTrial
from ...runtime.summary import Summary
from .low_rank import LowRankBranches

WITHOUT_BLOCKS = {
    "decode": say("Decoding runs as before: the decoder has no block that can be compiled."),
    "encode": say("Encoding runs as before: the encoder has no block that can be compiled."),
}
"""By the method of a VAE that runs no block."""
SAME = 0.05
"""A gain or a loss of less than this share is none: it would be shown as 1.0x."""


def status_text(summary: Summary, source: str = "", is_busy: bool = False, samples: bool = False) -> Words:
    """Return how a model stands, such as "Ready: 14 of 14 block types compiled (55 s, once per model type).".

    `source` is what people call the file whose graphs it was given, if any. `is_busy` says that it compiles in the
    background, `samples` that its calls are steps of a sampling.
    """
    sentences = [_state(summary, source, is_busy), _rest(summary, is_busy)]
    if summary.gain is not None and summary.compiled:
        sentences.append(gain_text(summary.gain, samples))
    return join([join(sentences, " "), *_missing_in(summary, source), *_uncompiled(summary)])


def counts_text(summary: Summary) -> str:
    """Return the counts for the log, such as "14 regions, 14 compiled (14 graphs, 3 from memory), 0 eager, 12.4 s"."""
    sources = [(summary.from_memory, "memory"), (summary.from_disk, "disk"), (summary.from_file, "a file")]
    found = "".join(f", {count} from {place}" for count, place in sources if count)
    return (
        f"{summary.regions} regions, {summary.compiled} compiled ({summary.variants} graphs{found}), "
        f"{summary.eager} eager, {summary.waiting} waiting, {summary.seconds:.1f} s"
    )


def gain_text(gain: Gain, samples: bool) -> Words:
    """Return what was measured, such as "About 1.6x faster per step."."""
    factor = gain.factor
    if abs(factor - 1) < SAME:
        return say("About as fast as without this node.")
    if factor > 1:
        if not gain.is_whole:
            return say("The compiled blocks run about {factor:.1f}x faster.", factor=factor)
        return say("About {factor:.1f}x faster per step." if samples else "About {factor:.1f}x faster.", factor=factor)
    slower = 1 / factor
    if not gain.is_whole:
        return say("The compiled blocks run about {factor:.1f}x slower.", factor=slower)
    return say("About {factor:.1f}x slower per step." if samples else "About {factor:.1f}x slower.", factor=slower)


def with_measured(summary: Summary, trial: SpeedTrial) -> Summary:
    """Return a summary with the gain of steps that were timed both ways, if they were; without, if a model is left."""
    if trial.factor is None:
        return summary
    return replace(summary, gain=None if trial.has_fallen_back else Gain(trial.factor, True))


def slower_line(trial: SpeedTrial | None) -> Words | str:
    """Return why a model goes on uncompiled, and how it is compiled anyway; nothing for one that is compiled."""
    if trial is None or not trial.has_fallen_back:
        return ""
    return say(
        "Left uncompiled: compiled, it ran at {factor:.2f}x the normal speed here. "
        "Choose the backend inductor to compile anyway.",
        factor=trial.factor,
    )


def _state(summary: Summary, source: str, is_busy: bool) -> Words:
    counts = {"done": summary.compiled, "total": summary.regions}
    took = duration(summary.seconds)
    if is_busy:
        return say("Compiling in the background: {done} of {total} block types done.", **counts)
    if source:
        return _loaded(summary, source, took)
    if not summary.compiled:
        if summary.waiting and not summary.calls_blocks:
            return say("Not compiled: this model runs the parts of its blocks one by one, and never a whole block.")
        if summary.waiting:
            return say("Compiled when the model first runs: {types}.", types=block_types(summary.waiting))
        return say("None of the {total} block types is compiled.", total=summary.regions)
    places = _places(summary)
    if not summary.compiles and places:
        if summary.compiled == summary.regions:
            return say("Ready (loaded from {places}, {took}).", places=places, took=took)
        return say(
            "Ready: {done} of {total} block types loaded from {places} ({took}).", **counts, places=places, took=took
        )
    if places:
        found = summary.from_memory + summary.from_disk
        return say(
            "Ready: {done} of {total} block types compiled "
            "({found} loaded from {places}; {took}, once per model type).",
            **counts,
            found=found,
            places=places,
            took=took,
        )
    return say("Ready: {done} of {total} block types compiled ({took}, once per model type).", **counts, took=took)


def _loaded(summary: Summary, source: str, took: Words) -> Words:
    counts = {"done": summary.loaded, "total": summary.regions, "source": source, "took": took}
    if not summary.compiles:
        return say("Ready: {done} of {total} block types loaded from {source} ({took}).", **counts)
    return say(
        "Ready: {done} of {total} block types loaded from {source}, {compiled} compiled here ({took}).",
        **counts,
        compiled=summary.compiles,
    )


def _places(summary: Summary) -> Words:
    found = [(summary.from_memory, say("memory")), (summary.from_disk, say("disk"))]
    return join([place for count, place in found if count], " + ")


def _rest(summary: Summary, is_busy: bool) -> Words:
    """Return what is said of block types without a graph."""
    if is_busy:
        return say("The model runs at normal speed until then.")
    sentences = []
    if summary.waiting and summary.compiled:
        sentences.append(say("Compiled when first used: {types}.", types=block_types(summary.waiting)))
    if summary.eager == 1:
        sentences.append(say("1 block type runs at normal speed:"))
    elif summary.eager:
        sentences.append(say("{count} block types run at normal speed:", count=summary.eager))
    return join(sentences, " ")


def _missing_in(summary: Summary, source: str) -> list[Words]:
    if not source or not summary.compiled_here:
        return []
    names = join(dict.fromkeys(in_words(region) for region in summary.compiled_here), ", ")
    return [say("Not in the file, compiled here: {names}.", names=names)]


def _uncompiled(summary: Summary) -> list[Words]:
    """Return a line for each reason: what runs uncompiled, why, and what to do about it."""
    return [
        uncompiled_line(reason, join(map(in_words, summary.regions_by_reason.get(reason, ())), ", "))
        for reason in summary.reasons
        if reason.code is not ReasonCode.BACKGROUND  # said already
    ]


def uncompiled_line(reason: Reason, what: str) -> Words:
    """Return what runs uncompiled for a reason, and what to do."""
    meaning, note = explanation_words(reason), reason_words(reason)
    if not what:
        return say("Not compiled: {meaning} ({note})", meaning=meaning, note=note)
    return say("Not compiled: {what}. {meaning} ({note})", what=what, meaning=meaning, note=note)


def block_types(count: int) -> Words:
    """Return a number of block types."""
    return say("1 block type") if count == 1 else say("{count} block types", count=count)


def duration(seconds: float, digits: int = 1) -> Words:
    """Return a time for people, such as "1.2 s", "40 s" or "3 min"; `digits` are those of short times."""
    if seconds >= 90:
        return say("{number:.0f} min", number=seconds / 60)
    if seconds >= 9.95 or not digits:
        return say("{number:.0f} s", number=seconds)
    return say("{number:.1f} s", number=max(seconds, 0.1))


def in_words(region: str) -> str:
    """Return a region's class, or a label such as "SpatialTransformer (input_blocks.4.1)", as "spatial transformer"."""
    name = region.partition(" (")[0]
    return re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name.replace("UNet", "Unet")).lower()


def untouched_lines(taken: int, network: nn.Module, set_aside: bool) -> list[Words]:
    """Return what is left alone or set aside, each as a line."""
    lines = []
    if taken == 1:
        lines.append(say("1 block is left to another node, which replaces its code."))
    elif taken:
        lines.append(say("{count} blocks are left to another node, which replaces their code.", count=taken))
    if any(map(is_torch_compiled, network.modules())):
        lines.append(say("Parts that torch.compile has compiled already stay as they are."))
    if set_aside:
        lines.append(say("TorchCompileModel before this node is not used: this node compiles instead."))
    return lines


def capture_line(wrapper: NetworkWrapper) -> Words | str:
    """Return how the steps of the last sampling were run; nothing before the first one."""
    replay = wrapper.step_replay
    if replay is None:
        return ""
    if replay.reason:
        return say("Steps run without CUDA graphs: {reason}.", reason=reason_words(replay.reason))
    return say("Steps run as CUDA graphs.") if replay.has_replayed else ""


def no_branches() -> Words:
    """Return why LoRAs do not run beside quantised weights."""
    return say("LoRAs are merged into quantised weights: this ComfyUI does not say when a sampling begins.")


def branches_line(branches: LowRankBranches | None) -> Words | str:
    """Return how the LoRAs of the last sampling were run; nothing if none ran beside quantised weights."""
    if branches is None or not branches.count:
        return ""
    line = say("LoRAs run beside the quantised weights of {count} layers.", count=branches.count)
    if (losses := branches.losses) is None:
        return line
    lost = say(
        "Merged and rounded, their effect would be off by {merged:.0%}. Beside the weights it is off by {beside:.1%}.",
        merged=losses.merged,
        beside=losses.beside,
    )
    return join([line, lost], " ")


def network_kind(model: nn.Module) -> str:
    """Return what people call a network in a workflow."""
    if type(model).__name__ == "SDXLRefiner":
        return "refiner UNet"
    return "base UNet" if type(model.diffusion_model).__name__ == "UNetModel" else "diffusion model"


def no_network_text(control_net: Any) -> Words:
    """Return why a ControlNet that has no network of its own is not compiled."""
    name = type(control_net).__name__
    if hasattr(control_net, "control_weights"):
        return say("a {name} is made anew from the model's own weights for every image", name=name)
    return say("a {name} runs once per image, and there is nothing to gain", name=name)
