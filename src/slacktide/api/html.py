"""Small pieces of HTML and SVG for notebooks, and plain tables; no library."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

WIDTH, NAME, ROW = 640, 220, 24
"""Pixels of a chart, of the names at its left, and of a row: fits the output cell of a notebook on a laptop."""
COLOUR = "#0072B2"
"""Okabe and Ito's blue: legible on light and dark ground, told apart with any colour vision."""

CELL = "padding:2px 8px"

Bar = tuple[str, float, float | None, float | None]
"""Name, value, and the ends of its interval where there is one."""


def title(text: str) -> str:
    """A column's title as one line."""
    return text.replace("- ", "").replace("_", " ")


def lines(texts: Sequence[str]) -> str:
    """Paragraphs."""
    return "".join(f"<p style='margin:2px 0'>{escape(text)}</p>" for text in texts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table; the first column is text, the others are numbers."""
    top = f"<caption style='text-align:left'>{escape(caption)}</caption>" if caption else ""
    heads = "".join(f"<th scope='col' style='{CELL}'>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<table>{top}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Sequence[str]) -> str:
    return "".join(
        f"<td style='{CELL};text-align:{'right' if i else 'left'}'>{escape(c)}</td>" for i, c in enumerate(row)
    )


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as plain text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    shown = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    ]
    return "\n".join(line.rstrip() for line in [shown[0], "-" * len(shown[0]), *shown[1:]])


def png(data: bytes, alternative: str) -> str:
    """An image within the page."""
    text = base64.b64encode(data).decode()
    return f"<img style='max-width:100%' alt='{escape(alternative, quote=True)}' src='data:image/png;base64,{text}'>"


def bars(found: Sequence[Bar], unit: str) -> str:
    """Horizontal bars with their values and intervals, as SVG; nothing where there is nothing to draw."""
    most = max((max(value, high or 0.0) for _, value, _, high in found), default=0.0)
    if most <= 0:
        return ""
    scale = (WIDTH - NAME - 90) / most
    parts = []
    for i, (name, value, low, high) in enumerate(found):
        y = i * ROW + 4
        short = name if len(name) <= 34 else f"{name[:31]}..."
        parts.append(f"<text x='{NAME - 6}' y='{y + 13}' text-anchor='end'>{escape(short)}</text>")
        parts.append(f"<rect x='{NAME}' y='{y}' width='{value * scale:.1f}' height='{ROW - 8}' fill='{COLOUR}'/>")
        end = max(value, high or 0.0) * scale + NAME
        if low is not None and high is not None:
            middle = y + (ROW - 8) / 2
            path = f"M{NAME + low * scale:.1f} {middle}H{NAME + high * scale:.1f}"
            parts.append(f"<path d='{path}' stroke='currentColor' fill='none'/>")
        parts.append(f"<text x='{end + 6:.1f}' y='{y + 13}'>{value:.4g} {escape(unit)}</text>")
    height = len(found) * ROW + 8
    style = "font:12px sans-serif;fill:currentColor;max-width:100%"
    return (
        f"<svg role='img' aria-label='{escape(unit, quote=True)} by policy' viewBox='0 0 {WIDTH} {height}' "
        f"width='{WIDTH}' height='{height}' style='{style}'>{''.join(parts)}</svg>"
    )
