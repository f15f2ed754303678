"""What a node tells the person of a compiled model, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...identity.regions import is_torch_compiled
from ...runtime.network_wrapper import NetworkWrapper
from ...runtime.summary import Summary
from .low_rank import LowRankBranches


def status_text(summary: Summary, source: str) -> str:
    """Return how a model stands; `source` is what people call the file whose graphs it was given, if any."""
    return loaded_text(summary, source) if source else summary_text(summary)


def summary_text(summary: Summary) -> str:
    """Return what the node shows, such as "14 regions, 14 compiled (3 from memory), 0 eager, 12.4 s"."""
    sources = [(summary.from_memory, "memory"), (summary.from_disk, "disk")]
    found = ", ".join(f"{count} from {place}" for count, place in sources if count)
    text = f"{summary.regions} regions, {summary.compiled} compiled{f' ({found})' if found else ''}, "
    text += f"{summary.eager} eager, {summary.seconds:.1f} s"
    return _with_rest(text, summary)


def loaded_text(summary: Summary, source: str) -> str:
    """Return what Load Graph shows, such as "14 of 14 regions from sdxl_00001_, 0 compiled, 0.9 s"."""
    text = f"{summary.loaded} of {summary.regions} regions from {source}, "
    text += f"{summary.from_disk} from disk, " if summary.from_disk else ""
    text += f"{summary.compiles} compiled, {summary.seconds:.1f} s"
    return _with_rest(text, summary, [f"compiled here: {region}" for region in summary.compiled_here])


def _with_rest(text: str, summary: Summary, lines: Sequence[str] = ()) -> str:
    if summary.waiting:
        text += f"; {summary.waiting} compile when first used"
    return "\n".join([text, *lines, *(f"eager: {reason}" for reason in summary.reasons)])


def left_text(taken: int, network: nn.Module, set_aside: bool) -> str:
    """Return what is left alone or set aside, each on a line of its own that begins with a line break."""
    lines = [f"{taken} blocks left alone: another patch replaces their forward"] if taken else []
    if any(map(is_torch_compiled, network.modules())):
        lines.append("what torch.compile has compiled in this model already is left so")
    if set_aside:
        lines.append("torch.compile of an earlier node is set aside: this node compiles instead")
    return "".join(f"\n{line}" for line in lines)


def capture_line(entrance: NetworkWrapper) -> str:
    """Return how the steps of the last sampling were run; nothing before the first one."""
    replay = entrance.step_replay
    if replay is None:
        return ""
    if replay.reason:
        return f"steps without CUDA graphs: {replay.reason}"
    return "steps as CUDA graphs" if replay.has_replayed else ""


NO_BRANCHES = "LoRAs are merged into quantised weights: this ComfyUI does not say when a sampling begins"


def branches_line(branches: LowRankBranches | None) -> str:
    """Return how the LoRAs of the last sampling were run; nothing if none ran beside quantised weights."""
    if branches is None or not branches.count:
        return ""
    return f"LoRAs beside the quantised weights of {branches.count} layers, which stay as they are"


def network_kind(model: nn.Module) -> str:
    """Return what people call a network in a workflow."""
    if type(model).__name__ == "SDXLRefiner":
        return "refiner UNet"
    return "base UNet" if type(model.diffusion_model).__name__ == "UNetModel" else "diffusion model"


def no_network_text(control_net: Any) -> str:
    """Return why a ControlNet that has no network of its own is not compiled."""
    name = type(control_net).__name__
    if hasattr(control_net, "control_weights"):
        return f"a {name} is made anew from the model's own weights for every image"
    return f"a {name} runs once per image, and there is nothing to gain"
