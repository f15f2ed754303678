"""A picture of what `benchmarks/step.py --json FILE` measured: each variant's step, and the floor under it.

    python benchmarks/plot.py FILE PICTURE.png

Needs matplotlib.
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
    "static": "torch.compile, static",
    "static-cuda-graphs": "torch.compile, static, CUDA graphs",
    "called": "Compiled Graphs",
    "recorded": "Compiled Graphs, CUDA graphs",
}
COLORS = ("#9aa0a6", "#bdc1c6", "#f6c26b", "#f29f4c", "#e2711d", "#7aa6e8", "#1a56b0")


def main(source: str, picture: str) -> None:
    """Draw one group of bars per size."""
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    shown = [name for name in VARIANTS if any(name in row for row in rows)]
    width = 0.8 / len(shown)
    figure, axes = pyplot.subplots(figsize=(max(7, 1.9 * len(rows)), 4.2), dpi=150)
    for number, name in enumerate(shown):
        places = [place + (number - (len(shown) - 1) / 2) * width for place in range(len(rows))]
        heights = [row.get(name) or 0 for row in rows]
        bars = axes.bar(places, heights, width * 0.94, label=VARIANTS[name], color=COLORS[[*VARIANTS].index(name)])
        axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=7, padding=1)
    for place, row in enumerate(rows):
        if row.get("floor"):
            label = "matrix products alone" if place == 0 else None
            axes.hlines(row["floor"], place - 0.42, place + 0.42, "#202124", linestyles="dashed", lw=1, label=label)
    axes.set_xticks(range(len(rows)), [_size(row) for row in rows], fontsize=8)
    axes.set_ylabel("milliseconds a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture)


def _size(row: dict) -> str:
    batch, height, width, tokens = row["size"]
    return f"{row['model'].upper()}\n{8 * width}x{8 * height}, batch {batch}\n{tokens} tokens"


if __name__ == "__main__":
    main(*sys.argv[1:3])
