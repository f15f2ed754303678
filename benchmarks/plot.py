"""Pictures of measured times. Needs matplotlib.

    python benchmarks/plot.py benchmarks/current.json docs/gains.png

draws the gains that README and `RESULTS.md` show. Of a file that `benchmarks/step.py --json FILE` wrote it draws each
variant's step and the floor under it; of one made with --grow, how time and memory grow with the work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
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
    text = Path(source).read_text()
    if text.startswith("{\n"):
        figure, top = gains(json.loads(text).values()), 1
    else:
        rows = [json.loads(line) for line in text.splitlines()]
        figure, top = (growth(rows), 0.95) if "grows" in rows[0] else (bars(rows), 0.88)
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(picture)


def gains(tables: Iterable[dict]) -> pyplot.Figure:
    """Draw a panel per table: for each model the time with Compile Model, as a share of the time without."""
    tables = list(tables)
    heights = [len(table["rows"]) for table in tables]
    size = 8.8, 0.36 * sum(heights) + 0.8 * len(tables)
    figure, panels = pyplot.subplots(len(tables), 1, figsize=size, dpi=150, gridspec_kw={"height_ratios": heights})
    for axes, table in zip(panels, tables, strict=True):
        rows = table["rows"][::-1]
        places = range(len(rows))
        axes.barh(places, [1] * len(rows), 0.66, color="#dadce0")
        axes.barh(places, [row["compiled"] / row["normal"] for row in rows], 0.66, color="#1a56b0")
        for place, row in zip(places, rows, strict=True):
            times = f"{_figure(row['compiled'], table['unit'])}  ({row['normal'] / row['compiled']:.1f}x)"
            axes.text(0.01, place, times, va="center", fontsize=8, color="white")
            axes.text(1.01, place, _figure(row["normal"], table["unit"]), va="center", fontsize=8, color="#5f6368")
        axes.set_yticks(places, [row["model"].replace("`", "") for row in rows], fontsize=8)
        axes.set_xticks([])
        axes.set_xlim(0, 1.1)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{table['title']}. {table['on']}", fontsize=8, loc="left", x=-0.62, color="#202124")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in ("#1a56b0", "#dadce0")]
    labels = ["with Compile Model", "normal"]
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=2, loc="lower left")
    return figure


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


def _figure(value: float, unit: str) -> str:
    return f"{value:.2f} s" if unit == "s" else f"{value:.3g} ms"


def _value(what: str, size: list[int]) -> float:
    batch, height, width, tokens = size
    return {"megapixels": 64 * height * width / 1e6, "batch": batch, "tokens": tokens}[what]


def _size(row: dict) -> str:
    batch, height, width, tokens = row["size"]
    return f"{row['model'].upper()}\n{8 * width}x{8 * height}, batch {batch}\n{tokens} tokens"


if __name__ == "__main__":
    main(*sys.argv[1:3])
