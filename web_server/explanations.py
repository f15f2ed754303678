"""Explanations, for somebody who connects nodes, of why blocks run uncompiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_EXPLAINED = (
    (
        ("patch attn1_patch", "patch attn2_patch"),
        "A node changes what goes into attention, as HyperTile, token merging and hypernetworks do. The blocks that it "
        "reaches run uncompiled while it is connected.",
    ),
    (
        ("patch ", "replacement patch "),
        "A node changes what happens inside of these blocks. They run uncompiled while it is connected.",
    ),
    (
        ("weights changed on the fly",),
        "A LoRA lies on weights that did not fit into GPU memory, and is added to them at each use. With more free "
        "memory, or without the LoRA, these blocks run compiled.",
    ),
    (
        ("weights on ",),
        "GPU memory is short, so ComfyUI brings the weights of these blocks when they are used. With more free memory "
        "they run compiled.",
    ),
    (
        ("weights of type ",),
        "The weights are quantised in a form of their own, such as GGUF, that a graph cannot read.",
    ),
    (
        ("weights of another shape or dtype",),
        "Something has changed the weights of these blocks since the model was compiled. Queue the workflow again from "
        "its loader.",
    ),
    (
        ("a replaced forward inside", "a hook on a module inside", "a hook on every module"),
        "Another extension has changed these blocks, so its version of them runs.",
    ),
    (
        ("transformer option ", "a result that depends on the transformer option", "code that looks through all"),
        "A node sets an option that the code of these blocks reads. They follow it, uncompiled.",
    ),
    (
        (
            "a tensor outside parameters and buffers",
            "a layer that the block reads and does not contain",
            "code that remembers things in a global",
            "an iterator",
            "an array of objects",
            "an object ",
            "an attribute that leads to",
        ),
        "What these blocks compute depends on something that cannot be written down, so no graph is shared for them.",
    ),
    (
        ("a region that writes to a list or dictionary",),
        "These blocks remember earlier frames from one call to the next, which a graph cannot.",
    ),
    (("a region that draws random numbers",), "These blocks draw random numbers, and a graph would draw others."),
    (("sizes outside of what",), "The code of these blocks has a limit at another size than this one."),
    (
        ("an argument that changes with the size", "its sizes cannot be told apart"),
        "The code of these blocks does not say which of its numbers are sizes.",
    ),
    (
        ("an argument that keeps changing", "a block that keeps changing"),
        "Something in these blocks changes with every image, so that each would need a graph of its own.",
    ),
    (("gradients are on",), "The model is being trained."),
    (("autocast is on",), "A node runs the model under autocast, which decides about dtypes while it runs."),
    (("compiling in the background",), "The graph is being made. These blocks run uncompiled until it is ready."),
    (
        ("a block that changes while it is compiled",),
        "Another extension changes these blocks while the model runs, so that no graph can be made of them.",
    ),
    (
        ("the graph of ",),
        "The graph gave another result than the uncompiled block, by more than rounding, so it is not used.",
    ),
    (
        ("a compiled image with values",),
        "The compiled VAE gave values that are not finite, so the image was made again uncompiled.",
    ),
    (
        ("CompileTimeout",),
        "The compiler took too long and was given up. COMPILED_GRAPHS_COMPILE_LIMIT sets the seconds it may take.",
    ),
)
_OTHERWISE = "These blocks cannot be traced or compiled here. They run as they would without this extension."


def explain(reason: str) -> str:
    """Return what a reason of the registry means, and what to do about it where something can be done."""
    reason = reason.removeprefix("WorkerError: ").removeprefix("Unsupported: ")
    return next((text for beginnings, text in _EXPLAINED if reason.startswith(beginnings)), _OTHERWISE)


def explained(report: dict[str, Any]) -> dict[str, str]:
    """Return the meaning of each reason in a report of the registry."""
    return {reason: explain(reason) for reason in _reasons(report)}


def _reasons(report: dict[str, Any]) -> Iterable[str]:
    roles = [role for workflow in report["workflows"].values() for role in workflow["roles"].values()]
    counted = [reason for role in roles for reason in role["reasons"]]
    return dict.fromkeys([*counted, *(row["reason"] for role in roles for row in role["graphs"] if row["reason"])])
