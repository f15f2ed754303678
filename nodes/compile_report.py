"""Compile Report: what compiling gains, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ..compiler.common.words import Words, join, say
from ..web_server import events
from .inputs import ANY
from .preview import save_preview
from .report_picture import Row, Section, draw

if TYPE_CHECKING:
    from ..compiler.runtime.compiled_model import CompiledModel
    from ..compiler.runtime.summary import KindInUse

NOT_COMPILED = say(
    "Not compiled: connect what comes from Compile Model, VAE Speedup, ControlNet Speedup, CLIP Speedup or Load Graph"
)
NOT_TIMED = say(
    "Blocks are timed on their first run, with verify on. Connect an image that this model made to the input named "
    "'after'."
)


class CompileReport:
    """Put behind a sampler. Draws what each kind of block takes compiled and uncompiled."""

    ID = "CG_CompileReport"
    TITLE = "Compile Report"
    CATEGORY = "compiled graphs"
    FUNCTION = "report"
    OUTPUT_NODE = True
    RETURN_TYPES = ("IMAGE",)
    OUTPUT_TOOLTIPS = ("The picture, for Save Image or Preview Image.",)
    DESCRIPTION = (
        "Draws for each kind of block what it takes compiled and uncompiled, how many calls ran compiled, and the "
        "seconds that compiling and loading took. Works without a browser, too."
    )
    SEARCH_ALIASES = ["compile statistics", "benchmark", "speed report", "profile"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {},
            "optional": {
                "model": ("MODEL", {"tooltip": "A model from Compile Model or Load Graph."}),
                "vae": ("VAE", {"tooltip": "A VAE from VAE Speedup or Load Graph."}),
                "control_net": ("CONTROL_NET", {"tooltip": "A ControlNet from ControlNet Speedup or Load Graph."}),
                "after": (
                    ANY,
                    {"tooltip": "Connect an IMAGE or LATENT: the report is drawn after it is made."},
                ),
                "clip": ("CLIP", {"tooltip": "A CLIP from CLIP Speedup or Load Graph."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:  # noqa: N802  ComfyUI's name
        """Draw each time: what the picture shows changes with every prompt."""
        return float("nan")

    def report(
        self,
        model: Any = None,
        vae: Any = None,
        control_net: Any = None,
        after: Any = None,
        clip: Any = None,
        unique_id: str = "",
    ) -> dict[str, Any]:
        """Return the picture, [1, height, width, 3] from 0 to 1, and show it on the node."""
        things = ((say("Model"), model), ("VAE", vae), ("ControlNet", control_net), ("CLIP", clip))
        sections = [_section(name, thing) for name, thing in things if thing is not None]
        sections = sections or [Section(say("Compile Report"), [NOT_COMPILED], [])]
        picture = draw(sections, _language())
        text = join([say("{name}: {text}", name=section.title, text=section.lines[0]) for section in sections])
        events.show(unique_id, text)
        image = torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255)[None]
        return {"ui": {"images": [save_preview(picture, "compile_report")], "text": [text]}, "result": (image,)}


def _language() -> str:
    from ..compiler.hosts.comfy.comfy_compat import user_directory
    from ..compiler.hosts.comfy.settings import chosen_language

    folder = user_directory()
    return chosen_language(Path(folder)) if folder else "en"


def _section(name: str, thing: Any) -> Section:
    from ..compiler.hosts.comfy.compile import compiled_model

    compiled = compiled_model(thing)
    if compiled is None:
        return Section(name, [NOT_COMPILED], [])
    kinds = compiled.kinds()
    rows = [row for kind in kinds for row in _rows(kind)]
    rows.sort(key=lambda row: -(row.eager or 0.0))
    return Section(_title(name, compiled, rows), _lines(compiled, kinds, rows), rows)


def _title(name: str, compiled: CompiledModel, rows: list[Row]) -> Words:
    timed = [row for row in rows if row.eager and row.compiled]
    network = compiled.network_name()
    if not timed:
        return say("{name}: {network}", name=name, network=network)
    factor = sum(row.eager for row in timed) / sum(row.compiled for row in timed)
    if factor < 1:
        return say("{name}: {network}, its blocks {factor:.2f}x slower", name=name, network=network, factor=1 / factor)
    return say("{name}: {network}, its blocks {factor:.2f}x faster", name=name, network=network, factor=factor)


def _lines(compiled: CompiledModel, kinds: list[KindInUse], rows: list[Row]) -> list[Words]:
    calls, eager = compiled.counters.calls, compiled.counters.eager_block_calls
    counts = {"done": sum(bool(kind.graphs) for kind in kinds), "total": len(kinds)}
    first = say("{done} of {total} block types compiled", **counts)
    if calls:
        share = 1 - eager / calls
        first = say("{first}, {share:.0%} of {calls:,} calls ran compiled", first=first, share=share, calls=calls)
    lines = [first]
    entries = [entry for kind in kinds for entry in kind.graphs]
    for source in ("compiled", "disk", "file"):
        seconds = [entry.seconds for entry in entries if entry.source == source]
        if seconds:
            lines.append(say("Graphs {origin}: {count}", origin=_origin(source, sum(seconds)), count=len(seconds)))
    if rows and not any(row.eager for row in rows):
        lines.append(NOT_TIMED)
    return lines


def _rows(kind: KindInUse) -> list[Row]:
    """Return a row for each graph of a kind, or one that says why there is none."""
    from ..compiler.hosts.comfy.texts import in_words
    from ..compiler.registry.explanations import reason_words

    name = in_words(kind.region)
    label = say("{name} ({count} blocks)", name=name, count=kind.blocks) if kind.blocks > 1 else name
    if not kind.graphs:
        return [Row(label, None, None, reason_words(kind.reasons[0]) if kind.reasons else say("not run yet"))]
    return [
        Row(
            label,
            entry.timing and entry.timing.eager * kind.blocks * 1000,
            entry.timing and entry.timing.graph * kind.blocks * 1000,
            _origin(entry.source, entry.seconds),
        )
        for entry in kind.graphs
    ]


def _origin(source: str, seconds: float) -> Words:
    from ..compiler.hosts.comfy.texts import duration

    took = duration(seconds)
    if source == "disk":
        return say("loaded from disk, {took}", took=took)
    if source == "file":
        return say("loaded from a file, {took}", took=took)
    return say("compiled, {took}", took=took)
