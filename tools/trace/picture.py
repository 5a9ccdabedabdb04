"""A picture of a replay as SVG: pages, Host bytes and waiting requests, over the requests that were submitted."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pagedkv.tools.trace.replay import Sample

WIDTH, HEIGHT, LEFT, GAP = 900, 150, 120, 46
GREY, BLUE, LIGHT, ORANGE, GREEN = "#666", "#1f6fb4", "#a9cfee", "#d9822b", "#2d8a4e"


def picture(samples: Sequence[Sample], *, pages: int, host_bytes: int, title: str) -> str:
    """Return the SVG text of three panels, one below the other.

    Args:
        samples: in the order of time.
        pages, host_bytes: capacities, the tops of the first two panels.
        title: a line above them.
    """
    waiting = max((sample.waiting for sample in samples), default=0)
    panels = [
        ("pages: of rows (dark), and kept beside them (light)", pages, [
            ([sample.pages for sample in samples], LIGHT), ([sample.active_pages for sample in samples], BLUE)]),
        ("bytes on the Host", host_bytes, [([sample.host_bytes for sample in samples], ORANGE)]),
        ("requests that wait for pages or a row", waiting, [([sample.waiting for sample in samples], GREEN)]),
    ]
    last = max((sample.requests for sample in samples), default=1)
    across = [LEFT + WIDTH * sample.requests / max(last, 1) for sample in samples]
    parts = [_text(LEFT, 22, title, size=15)]
    for number, (name, top, curves) in enumerate(panels):
        base = 60 + number * (HEIGHT + GAP) + HEIGHT
        parts.append(_text(LEFT, base - HEIGHT - 8, name))
        parts.append(_text(LEFT - 8, base - HEIGHT + 10, f"{top:,}", anchor="end"))
        parts.append(_text(LEFT - 8, base, "0", anchor="end"))
        for values, colour in curves:
            up = [base - HEIGHT * min(value / max(top, 1), 1) for value in values]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True))
            if points:
                parts.append(f'<polygon points="{across[0]:.1f},{base} {points} {across[-1]:.1f},{base}" '
                             f'fill="{colour}"/>')
        parts.append(f'<rect x="{LEFT}" y="{base - HEIGHT}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
                     f'stroke="{GREY}"/>')
    bottom = 60 + len(panels) * (HEIGHT + GAP)
    parts.append(_text(LEFT, bottom - 22, "0"))
    parts.append(_text(LEFT + WIDTH, bottom - 22, f"{last:,} requests submitted", anchor="end"))
    size = f'width="{LEFT + WIDTH + 20}" height="{bottom}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
