"""A picture of what `benchmarks/step.py --json FILE` measured: each variant's step, and the floor under it.

    python benchmarks/plot.py FILE PICTURE.png

Of a file made with --grow, how time and memory grow with the work. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

VARIANTS = {
    "eager": "eager",
    "eager_graph": "eager as a CUDA graph",
    "channels_last": "eager, channels_last",
    "channels_last_graph": "eager, channels_last, as a CUDA graph",
    "blocks": "torch.compile per block",
    "blocks_graph": "torch.compile per block, as a CUDA graph",
    "dynamic": "torch.compile, dynamic",
    "dynamic_graph": "torch.compile, dynamic, as a CUDA graph",
    "core": "TorchCompileModel",
    "static": "torch.compile, static",
    "static_graph": "torch.compile, static, as a CUDA graph",
    "called": "Compiled Graphs",
    "called_graph": "Compiled Graphs, the network alone as a CUDA graph",
    "recorded": "Compiled Graphs, CUDA graphs",
}
COLORS = (
    *("#80868b", "#9aa0a6", "#bdc1c6", "#dadce0", "#fdeecb", "#fbe0a8"),
    *("#f9d58b", "#f6c26b", "#f3b05c", "#f29f4c", "#e2711d", "#a8c7fa", "#5b8def", "#1a56b0"),
)
GROWN = {"megapixels": "megapixels", "batch": "batch", "tokens": "tokens of text"}


def main(source: str, picture: str) -> None:
    """Draw what a file holds."""
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    figure, top = (growth(rows), 0.95) if "grows" in rows[0] else (bars(rows), 0.88)
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(picture)


def bars(rows: list[dict]) -> pyplot.Figure:
    """Draw a panel per size, each with an axis of its own."""
    figure, panels = pyplot.subplots(1, len(rows), figsize=(max(4, 2.6 * len(rows)), 4.8), dpi=150, squeeze=False)
    for axes, row in zip(panels[0], rows, strict=True):
        shown = [name for name in VARIANTS if row.get(name)]
        colors = [COLORS[[*VARIANTS].index(name)] for name in shown]
        drawn = axes.bar(range(len(shown)), [row[name] for name in shown], 0.9, color=colors)
        axes.bar_label(drawn, [f"{row[name]:.0f}" if row[name] >= 20 else f"{row[name]:.1f}" for name in shown],
                       fontsize=6, padding=1)  # fmt: skip
        if row.get("floor"):
            axes.axhline(row["floor"], color="#202124", linestyle="dashed", lw=1)
        axes.set_xticks([])
        axes.set_xlabel(_size(row), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("milliseconds a step")
    met = [name for name in VARIANTS if any(row.get(name) for row in rows)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[[*VARIANTS].index(name)]) for name in met]
    floor = pyplot.Line2D([], [], color="#202124", linestyle="dashed", lw=1)
    labels = [*(VARIANTS[name] for name in met), "matrix products alone"]
    figure.legend([*handles, floor], labels, frameon=False, fontsize=7, ncols=4, loc="upper center")
    return figure


def growth(rows: list[dict]) -> pyplot.Figure:
    """Draw milliseconds and gibibytes over what grows."""
    figure, panels = pyplot.subplots(2, len(GROWN), figsize=(9, 5), dpi=150, sharex="col")
    for (what, label), column in zip(GROWN.items(), panels.T, strict=True):
        grown = [row for row in rows if row["grows"] == what]
        values = [_value(what, row["size"]) for row in grown]
        for name in ("eager", "called", "recorded"):
            style = {"label": VARIANTS[name], "color": COLORS[[*VARIANTS].index(name)], "marker": "o", "ms": 3}
            column[0].plot(values, [row[name] for row in grown], **style)
            column[1].plot(values, [row[f"{name}_peak"] for row in grown], **style)
        column[1].set_xlabel(label)
        for axes in column:
            axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("milliseconds a step")
    panels[1][0].set_ylabel("peak GiB, weights included")
    figure.legend(*panels[0][0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=3, loc="upper center")
    return figure


def _value(what: str, size: list[int]) -> float:
    batch, height, width, tokens = size
    return {"megapixels": 64 * height * width / 1e6, "batch": batch, "tokens": tokens}[what]


def _size(row: dict) -> str:
    batch, height, width, tokens = row["size"]
    return f"{row['model'].upper()}\n{8 * width}x{8 * height}, batch {batch}\n{tokens} tokens"


if __name__ == "__main__":
    main(*sys.argv[1:3])
