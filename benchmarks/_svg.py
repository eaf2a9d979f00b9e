"""Charts as SVG, by hand: small, the same on every machine, and readable in the dark.

A chart has a background of its own and two sets of colours; the browser takes the one that its reader has set. Names of ours
are blue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 280, 232  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 30  # its margins
OUTSIDE = 26  # room for the label of an axis
ROW = 27  # of a strip
LINE = 20  # of the legend
PLAIN = "plain"

OURS = ("#1f5fbf", "#7fb2ff")  # by light, in the dark
LIGHT = ("#b3541e", "#7a4fa3", "#2c8c5a", "#8a7a10", "#c2447e", "#20808d", "#5c6670")
DARK = ("#f0955e", "#c79bf0", "#63cf95", "#d6c54a", "#f48fbd", "#5cc7d4", "#a9b4bf")
SHAPES = (
    "M-4-4h8v8h-8z",
    "M0-5.5 5 0 0 5.5-5 0z",
    "M0-5 5 4H-5z",
    "M0 5 5-4H-5z",
    "M-1.6-5h3.2v3.4H5v3.2H1.6V5h-3.2V1.6H-5v-3.2h3.4z",
    "M-5 0 4-5V5z",
    "M5 0-4 5V-5z",
)
DISC = "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0z"
OURS_SHAPES = (DISC, *SHAPES)


@dataclass
class Panel:
    """Time over memory. Plain torch is at 1 and 1.

    Attributes:
        title: of what.
        points: by name.
        lines: the same, joined by a line.
    """

    title: str
    points: dict[str, Point] = field(default_factory=dict)
    lines: dict[str, list[Point]] = field(default_factory=dict)


@dataclass
class Strip:
    """Figures on one axis: by name, the figure and its bracket."""

    title: str
    figures: dict[str, tuple[float, float, float]]


def panels(given: Sequence[Panel], ours: Sequence[str], plain: str, across: str, up: str) -> str:
    """A chart of panels.

    Arguments:
        given: the panels.
        ours: names that are graphkeep's.
        plain: what is at 1 and 1.
        across, up: labels of the axes.
    """
    columns = min(4, len(given))
    names = list(dict.fromkeys(name for panel in given for name in (*panel.lines, *panel.points)))
    look = _Look(names, ours)
    width, height = OUTSIDE + columns * WIDTH, -(-len(given) // columns) * HEIGHT
    body = []
    for i, panel in enumerate(given):
        body += _panel(panel, OUTSIDE + i % columns * WIDTH, i // columns * HEIGHT, look)
    body.append(f'<text class="m" x="{(width + OUTSIDE) / 2:.0f}" y="{height + 14}">{escape(across)}</text>')
    body.append(f'<text class="m" transform="translate(16 {height / 2:.0f}) rotate(-90)">{escape(up)}</text>')
    legend, height = look.legend(height + OUTSIDE, width, plain)
    return look.document(width, height, [*body, *legend])


def _panel(panel: Panel, left: float, top: float, look: _Look) -> list[str]:
    points = [*panel.points.values(), *(point for line in panel.lines.values() for point in line), (1.0, 1.0)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    pad = 0.06 * (max(ys) - min(ys))  # so that no mark is cut off
    right, low, high = max(1.1, 1.06 * max(xs)), min(0.95, min(ys) - pad), max(1.2, max(ys) + pad)
    x0, x1, y0, y1 = left + LEFT, left + WIDTH - RIGHT, top + HEIGHT - BOTTOM, top + TOP

    def at(point: Point) -> Point:
        return x0 + point[0] / right * (x1 - x0), y0 + (point[1] - low) / (high - low) * (y1 - y0)

    out = [f'<text class="t m" x="{(x0 + x1) / 2:.0f}" y="{top + 18:.0f}">{escape(panel.title)}</text>']
    for tick in _ticks(0, right):
        x, _ = at((tick, low))
        out.append(f'<path class="g" d="M{x:.1f} {y0:.0f}V{y1:.0f}"/>')
        out.append(f'<text class="m" x="{x:.1f}" y="{y0 + 16:.0f}">{tick:.0%}</text>')
    for tick in _ticks(low, high):
        _, y = at((0, tick))
        out.append(f'<path class="g" d="M{x0:.0f} {y:.1f}H{x1:.0f}"/>')
        out.append(f'<text class="e" x="{x0 - 6:.0f}" y="{y + 4:.1f}">{tick:.4g}x</text>')
    out.append(f'<path class="a" d="M{x0:.0f} {y1:.0f}V{y0:.0f}H{x1:.0f}"/>')
    for name, line in panel.lines.items():
        path = "L".join("{:.1f} {:.1f}".format(*at(point)) for point in line)
        out.append(f'<path class="l {look.colour[name]}" d="M{path}"/>')
        out += [look.mark(name, *at(point), small=True) for point in line]
    out.append(look.mark(PLAIN, *at((1.0, 1.0))))
    out += [look.mark(name, *at(point)) for name, point in panel.points.items()]
    return out


def strips(given: Sequence[Strip], ours: Sequence[str], across: str) -> str:
    """A chart with one row for each strip, on one axis; plain torch is at 1."""
    names = list(dict.fromkeys(name for strip in given for name in strip.figures))
    look = _Look(names, ours)
    width, x0 = 820, 16 + 6.6 * max(len(strip.title) for strip in given)
    x1, y0 = width - 24, 10 + ROW * len(given)
    values = [value for strip in given for figure in strip.figures.values() for value in figure] + [1.0]
    low, high = min(values) - 0.03, max(values) + 0.03

    def at(value: float) -> float:
        return x0 + (value - low) / (high - low) * (x1 - x0)

    body = []
    for tick in _ticks(low, high):
        body.append(f'<path class="{"a" if tick == 1 else "g"}" d="M{at(tick):.1f} 6V{y0}"/>')
        body.append(f'<text class="m" x="{at(tick):.1f}" y="{y0 + 16}">{tick:.4g}x</text>')
    for i, strip in enumerate(given):
        y = 10 + ROW * (i + 0.5)
        body.append(f'<text class="e" x="{x0 - 10:.0f}" y="{y + 4:.1f}">{escape(strip.title)}</text>')
        body.append(f'<path class="g" d="M{x0:.0f} {y:.1f}H{x1}"/>')
        for j, (name, (value, least, most)) in enumerate(strip.figures.items()):
            shifted = y + 3.2 * (j - (len(strip.figures) - 1) / 2)  # so that brackets do not hide one another
            body.append(f'<path class="l {look.colour[name]}" d="M{at(least):.1f} {shifted:.1f}H{at(most):.1f}"/>')
            body.append(look.mark(name, at(value), shifted))
    body.append(f'<text class="m" x="{(x0 + x1) / 2:.0f}" y="{y0 + 34}">{escape(across)}</text>')
    legend, height = look.legend(y0 + 46, width, None)
    return look.document(width, height, [*body, *legend])


class _Look:
    """Which colour and shape each name has."""

    def __init__(self, names: Iterable[str], ours: Sequence[str]) -> None:
        self.names = [*(name for name in names if name in ours), *(name for name in names if name not in ours)]
        mine = [name for name in self.names if name in ours]
        others = [name for name in self.names if name not in ours]
        self.colour = {PLAIN: "p"} | dict.fromkeys(mine, "o")
        self.colour |= {name: f"c{i % len(LIGHT)}" for i, name in enumerate(others)}
        self.shape = {PLAIN: DISC} | {name: OURS_SHAPES[i % len(OURS_SHAPES)] for i, name in enumerate(mine)}
        self.shape |= {name: SHAPES[i % len(SHAPES)] for i, name in enumerate(others)}
        self.number = {name: i for i, name in enumerate(self.shape)}

    def mark(self, name: str, x: float, y: float, small: bool = False) -> str:
        scale = " scale(.6)" if small else ""
        colour = self.colour[name]
        return f'<use href="#s{self.number[name]}" class="{colour}" transform="translate({x:.1f} {y:.1f}){scale}"/>'

    def legend(self, top: float, width: float, plain: str | None) -> tuple[list[str], float]:
        """Its elements, and where it ends."""
        x, y, out = 24.0, top + 10, []
        for name in [*([PLAIN] if plain else []), *self.names]:
            said = plain if name == PLAIN and plain else name
            room = 34 + 6.6 * len(said)
            if x + room > width and x > 24:
                x, y = 24.0, y + LINE
            out += [self.mark(name, x, y), f'<text x="{x + 10:.0f}" y="{y + 4:.0f}">{escape(said)}</text>']
            x += room
        return out, y + 16

    def document(self, width: float, height: float, body: Iterable[str]) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
                f'width="{width:.0f}" height="{height:.0f}">',
                f"<style>{_STYLE}</style>",
                "<defs>",
                *(f'<path id="s{number}" d="{self.shape[name]}"/>' for name, number in self.number.items()),
                "</defs>",
                '<rect class="b" width="100%" height="100%" rx="6"/>',
                *body,
                "</svg>\n",
            ]
        )


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers."""
    step = next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50) if (high - low) / step <= 6)
    return [round(i * step, 4) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _colours(ink: str, back: str, grid: str, ours: str, others: Sequence[str]) -> str:
    rules = [
        f"text{{fill:{ink}}}.b{{fill:{back}}}.g{{stroke:{grid}}}.a{{stroke:{ink}}}.o{{fill:{ours};stroke:{ours}}}",
        f".p{{fill:{back};stroke:{ink};stroke-width:1.6}}",
        *(f".c{i}{{fill:{colour};stroke:{colour}}}" for i, colour in enumerate(others)),
    ]
    return "".join(rules)


_STYLE = (
    "text{font:12px system-ui,sans-serif}.t{font-weight:600;font-size:13px}.m{text-anchor:middle}.e{text-anchor:end}"
    + _colours("#24292f", "#ffffff", "#e3e7eb", OURS[0], LIGHT)
    + f"@media(prefers-color-scheme:dark){{{_colours('#d7dee6', '#1b2028', '#343c47', OURS[1], DARK)}}}"
    + "path.a,path.g,path.l{fill:none}path.l{stroke-width:1.8}"
)
