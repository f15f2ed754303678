"""The picture that Compile Report draws. Plain data in, a picture out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from PIL import Image, ImageDraw, ImageFont

from ..compiler.common.words import Words, in_language, say

WIDTH = 1024
MARGIN = 28
LABELS = 330
"""Pixels for the names of rows."""
FIGURES = 230
"""Pixels for what stands behind the bars."""
ROW, BAR = 44, 14
INK, FAINT, PAPER = "#202124", "#5f6368", "#ffffff"
EAGER, COMPILED, SLOWER = "#9aa0a6", "#1a56b0", "#b3261e"
FONTS = {
    "zh": (
        *("NotoSansCJK-Regular.ttc", "NotoSansSC-Regular.otf", "SourceHanSansSC-Regular.otf", "wqy-microhei.ttc"),
        *("msyh.ttc", "simhei.ttf", "PingFang.ttc", "Hiragino Sans GB.ttc"),
    )
}
"""Fonts of Linux, Windows and macOS for languages whose characters Pillow's own font lacks."""


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
    """One model, VAE, ControlNet or text encoder."""

    title: str
    lines: Sequence[str]
    rows: Sequence[Row]


def draw(sections: Sequence[Section], language: str = "en") -> Image.Image:
    """Return a picture of the sections, one below the other, as high as they need.

    It is in English where this machine has no font for the language.
    """
    pen = Pen(language if language == "en" or font_face(language)[0] else "en")
    heights = [_height(section) for section in sections]
    picture = Image.new("RGB", (WIDTH, MARGIN + sum(heights)), PAPER)
    canvas = ImageDraw.Draw(picture)
    y = MARGIN
    for section, height in zip(sections, heights, strict=True):
        _draw_section(pen, canvas, section, y)
        y += height
    return picture


class Pen:
    """Writes texts in one language."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._file, self._face = font_face(language)

    def write(
        self,
        canvas: ImageDraw.ImageDraw,
        place: tuple[float, float],
        text: str,
        size: int,
        color: str = INK,
        width: float = 0,
    ) -> None:
        """Write a text at a place in pixels, and as much of it as fits into a width if there is one."""
        font, text = self._font(size), in_language(text, self.language)
        while width and canvas.textlength(text, font) > width:
            text = f"{text.removesuffix('…')[:-1]}…"
        x, y = place
        canvas.text((x, y - self._rise(font, size)), text, color, font)

    def _font(self, size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
        if self._file:
            return ImageFont.truetype(self._file, size, self._face)
        try:
            return ImageFont.load_default(size)
        except TypeError:  # a Pillow before 10.1 has one size
            return ImageFont.load_default()

    def _rise(self, font: ImageFont.FreeTypeFont, size: int) -> int:
        """Return by how much a font's letters begin lower than those of Pillow's own font."""
        return font.getmetrics()[0] - size if self._file else 0


@lru_cache(maxsize=8)
def font_face(language: str) -> tuple[str, int]:
    """Return a font of this machine that has the characters of a language, and its face; "" if none is needed."""
    for name in FONTS.get(language, ()):
        try:
            ImageFont.truetype(name, 16)
        except OSError:
            continue
        return name, _simplified_face(name)
    return "", 0


def _simplified_face(name: str) -> int:
    """Return which face of a file of several has the forms of simplified Chinese: the first is often Japanese."""
    for number in count():
        try:
            family, _ = ImageFont.truetype(name, 16, number).getname()
        except OSError:
            return 0
        if family.endswith(" SC"):
            return number
    return 0


def _height(section: Section) -> int:
    return 40 + 24 * len(section.lines) + 34 + ROW * len(section.rows) + MARGIN


def _draw_section(pen: Pen, canvas: ImageDraw.ImageDraw, section: Section, y: int) -> None:
    pen.write(canvas, (MARGIN, y), section.title, 26, width=WIDTH - 2 * MARGIN)
    y += 40
    for line in section.lines:
        pen.write(canvas, (MARGIN, y), line, 16, FAINT, WIDTH - 2 * MARGIN)
        y += 24
    _draw_legend(pen, canvas, y)
    y += 34
    longest = max((max(row.eager or 0.0, row.compiled or 0.0) for row in section.rows), default=0.0)
    for row in section.rows:
        _draw_row(pen, canvas, row, y, longest)
        y += ROW


def _draw_legend(pen: Pen, canvas: ImageDraw.ImageDraw, y: int) -> None:
    x = LABELS
    for color, text in ((EAGER, say("uncompiled")), (COMPILED, say("compiled"))):
        canvas.rectangle((x, y + 5, x + 14, y + 19), color)
        pen.write(canvas, (x + 22, y + 3), text, 14, FAINT)
        x += 130
    pen.write(canvas, (x, y + 3), say("milliseconds in one call of the network"), 14, FAINT)


def _draw_row(pen: Pen, canvas: ImageDraw.ImageDraw, row: Row, y: int, longest: float) -> None:
    pen.write(canvas, (MARGIN, y), row.label, 16, width=LABELS - MARGIN - 12)
    pen.write(canvas, (MARGIN, y + 20), row.note, 12, FAINT, LABELS - MARGIN - 12)
    if row.eager is None or row.compiled is None:
        pen.write(canvas, (LABELS, y + 8), say("not timed"), 14, FAINT)
        return
    scale = (WIDTH - LABELS - FIGURES - MARGIN) / longest if longest else 0.0
    for number, (value, color) in enumerate(((row.eager, EAGER), (row.compiled, COMPILED))):
        top, end = y + number * (BAR + 3), LABELS + max(1, round(value * scale))
        canvas.rectangle((LABELS, top, end, top + BAR), color)
        pen.write(canvas, (end + 8, top - 1), _figure(value), 13)
    if row.compiled:
        is_slower = row.eager < row.compiled
        pen.write(canvas, (WIDTH - MARGIN - 130, y + 5), _factor(row), 18, SLOWER if is_slower else INK)


def _factor(row: Row) -> Words:
    if row.eager < row.compiled:
        return say("{factor:.2f}x slower", factor=row.compiled / row.eager)
    return say("{factor:.2f}x faster", factor=row.eager / row.compiled)


def _figure(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
