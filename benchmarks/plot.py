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
    "channels_last": "eager, channels_last",
    "blocks": "torch.compile per block",
    "dynamic": "torch.compile, dynamic",
    "core": "TorchCompileModel",
    "static": "torch.compile, static",
    "static_graph": "torch.compile, static, CUDA graph",
    "called": "Compiled Graphs",
    "recorded": "Compiled Graphs, CUDA graphs",
}
COLORS = ("#9aa0a6", "#bdc1c6", "#fbe0a8", "#f6c26b", "#f3b05c", "#f29f4c", "#e2711d", "#7aa6e8", "#1a56b0")
GROWN = {"megapixels": "megapixels", "batch": "batch", "tokens": "tokens of text"}


def main(source: str, picture: str) -> None:
    """Draw what a file holds."""
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    figure = growth(rows) if "grows" in rows[0] else bars(rows)
    figure.tight_layout()
    figure.savefig(picture)


def bars(rows: list[dict]) -> pyplot.Figure:
    """Draw one group of bars per size."""
    shown = [name for name in VARIANTS if any(name in row for row in rows)]
    width = 0.8 / len(shown)
    figure, axes = pyplot.subplots(figsize=(max(7, 1.9 * len(rows)), 4.2), dpi=150)
    for number, name in enumerate(shown):
        places = [place + (number - (len(shown) - 1) / 2) * width for place in range(len(rows))]
        heights = [row.get(name) or 0 for row in rows]
        drawn = axes.bar(places, heights, width * 0.94, label=VARIANTS[name], color=COLORS[[*VARIANTS].index(name)])
        axes.bar_label(drawn, [f"{height:.0f}" if height else "" for height in heights], fontsize=7, padding=1)
    for place, row in enumerate(rows):
        if row.get("floor"):
            label = "matrix products alone" if place == 0 else None
            axes.hlines(row["floor"], place - 0.42, place + 0.42, "#202124", linestyles="dashed", lw=1, label=label)
    axes.set_xticks(range(len(rows)), [_size(row) for row in rows], fontsize=8)
    axes.set_ylabel("milliseconds a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
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
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("milliseconds a step")
    panels[1][0].set_ylabel("peak GiB, weights included")
    panels[0][0].legend(frameon=False, fontsize=8)
    return figure


def _value(what: str, size: list[int]) -> float:
    batch, height, width, tokens = size
    return {"megapixels": 64 * height * width / 1e6, "batch": batch, "tokens": tokens}[what]


def _size(row: dict) -> str:
    batch, height, width, tokens = row["size"]
    return f"{row['model'].upper()}\n{8 * width}x{8 * height}, batch {batch}\n{tokens} tokens"


if __name__ == "__main__":
    main(*sys.argv[1:3])
