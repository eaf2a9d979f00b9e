"""What is shown of a run in a terminal, made harmless and short."""

from __future__ import annotations

from collections.abc import Sequence

from graphkeep.report._run import Run, Site

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.:-=+*#"


def safe(value: object, keep: str = "") -> str:
    """Text of somebody else's, fit for a terminal: what is no visible character is written as Python's `repr` writes it."""
    text = str(value).replace("\t", "    ")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def count(number: int, what: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def where(run: Run, site: int | None) -> str:
    """``train.py:12``, or a dash."""
    found = None if site is None else run.sites.get(site)
    return "-" if found is None else safe(found.where)


def code(run: Run, site: Site) -> str:
    """The program's line at a site, or nothing."""
    return line_of(run, site.file, site.line).strip()


def line_of(run: Run, file: str, line: int) -> str:
    """A line of the program's source, as it was; or nothing."""
    lines = run.sources.get(file, "").splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def spark(values: Sequence[int], width: int, fancy: bool = True) -> str:
    """Figures as a row of bars, the highest one full; of neighbours that share one, the largest."""
    if not values or width < 1:
        return ""
    bars = _BLOCKS if fancy else _ASCII
    width = min(width, len(values))
    shown = [max(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    most = max(*shown, 1)
    return "".join(bars[min(max(value, 0) * len(bars) // most, len(bars) - 1)] for value in shown)
