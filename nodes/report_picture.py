"""The picture that Compile Report draws. Plain data in, a picture out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

WIDTH = 1024
MARGIN = 28
LABELS = 330
"""Pixels for the names of rows."""
FIGURES = 230
"""Pixels for what stands behind the bars."""
ROW, BAR = 44, 14
INK, FAINT, PAPER = "#202124", "#5f6368", "#ffffff"
EAGER, COMPILED = "#9aa0a6", "#1a56b0"


@dataclass(frozen=True)
class Row:
    """Blocks of one kind."""

    label: str
    eager: float | None
    """Milliseconds that all of them take in one call of the network, uncompiled; None if they were not timed."""
    compiled: float | None
    note: str
    """Where their graph comes from, or why there is none."""


@dataclass(frozen=True)
class Section:
    """One model, VAE or ControlNet."""

    title: str
    lines: Sequence[str]
    rows: Sequence[Row]


def draw(sections: Sequence[Section]) -> Image.Image:
    """Return a picture of the sections, one below the other, as high as they need."""
    heights = [_height(section) for section in sections]
    picture = Image.new("RGB", (WIDTH, MARGIN + sum(heights)), PAPER)
    canvas = ImageDraw.Draw(picture)
    y = MARGIN
    for section, height in zip(sections, heights, strict=True):
        _draw_section(canvas, section, y)
        y += height
    return picture


def _height(section: Section) -> int:
    return 40 + 24 * len(section.lines) + 34 + ROW * len(section.rows) + MARGIN


def _draw_section(canvas: ImageDraw.ImageDraw, section: Section, y: int) -> None:
    canvas.text((MARGIN, y), section.title, INK, _font(26))
    y += 40
    for line in section.lines:
        canvas.text((MARGIN, y), _cut(canvas, line, WIDTH - 2 * MARGIN, 16), FAINT, _font(16))
        y += 24
    _draw_legend(canvas, y)
    y += 34
    longest = max((max(row.eager or 0.0, row.compiled or 0.0) for row in section.rows), default=0.0)
    for row in section.rows:
        _draw_row(canvas, row, y, longest)
        y += ROW


def _draw_legend(canvas: ImageDraw.ImageDraw, y: int) -> None:
    x = LABELS
    for color, text in ((EAGER, "uncompiled"), (COMPILED, "compiled")):
        canvas.rectangle((x, y + 5, x + 14, y + 19), color)
        canvas.text((x + 22, y + 3), text, FAINT, _font(14))
        x += 130
    canvas.text((x, y + 3), "milliseconds in one call of the network", FAINT, _font(14))


def _draw_row(canvas: ImageDraw.ImageDraw, row: Row, y: int, longest: float) -> None:
    canvas.text((MARGIN, y), _cut(canvas, row.label, LABELS - MARGIN - 12, 16), INK, _font(16))
    canvas.text((MARGIN, y + 20), _cut(canvas, row.note, LABELS - MARGIN - 12, 12), FAINT, _font(12))
    if row.eager is None or row.compiled is None:
        canvas.text((LABELS, y + 8), "not timed", FAINT, _font(14))
        return
    scale = (WIDTH - LABELS - FIGURES - MARGIN) / longest if longest else 0.0
    for number, (value, color) in enumerate(((row.eager, EAGER), (row.compiled, COMPILED))):
        top, end = y + number * (BAR + 3), LABELS + max(1, round(value * scale))
        canvas.rectangle((LABELS, top, end, top + BAR), color)
        canvas.text((end + 8, top - 1), _figure(value), INK, _font(13))
    if row.compiled:
        canvas.text((WIDTH - MARGIN - 90, y + 5), f"{row.eager / row.compiled:.2f}x", INK, _font(20))


def _figure(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _cut(canvas: ImageDraw.ImageDraw, text: str, width: int, size: int) -> str:
    """Return as much of a text as fits."""
    font = _font(size)
    if canvas.textlength(text, font) <= width:
        return text
    while text and canvas.textlength(f"{text}…", font) > width:
        text = text[:-1]
    return f"{text}…"


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    try:
        return ImageFont.load_default(size)
    except TypeError:  # a Pillow before 10.1 has one size
        return ImageFont.load_default()
