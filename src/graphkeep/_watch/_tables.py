"""Tables of a timeline as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphkeep._errors import ArgumentError
from graphkeep._units import format_bytes
from graphkeep._watch._frames import Site
from graphkeep._watch._timeline import Timeline

_SORTS = ("bytes", "live", "tensors", "name")
_GROUPS: dict[str, Callable[[Site], str]] = {
    "line": lambda site: site.where,
    "module": lambda site: site.module_type or "(no module)",
    "op": lambda site: site.op or "(not asked)",
}


def overview(timeline: Timeline) -> str:
    """What was saved and freed, in a few lines."""
    tensors = sum(site.tensors for site in timeline.sites)
    by_backward = sum(site.by_backward for site in timeline.sites)
    by_count = sum(site.by_count for site in timeline.sites)
    lines = [
        f"{timeline.step:,} steps, {tensors:,} saved tensors of {format_bytes(timeline.saved_bytes)} (parameters apart)",
        f"freed: {by_backward:,} by a backward, {by_count:,} by reference count; "
        f"held now: {tensors - by_backward - by_count:,} of {format_bytes(timeline.live)}; "
        f"most at once: {format_bytes(timeline.peak)}",
    ]
    deaths = sorted(timeline.deaths.items(), key=lambda item: -item[1][0])[:8]
    if deaths:
        lines.append("lives of graphs:")
    for (born, died, backward), (lives, count, size) in deaths:
        how = (
            f"the backward at {died.where}"
            if backward
            else f"reference count at {died.where} (the last name was bound anew or went)"
        )
        lines.append(f"  {lives:,} built at {born.where}, freed by {how}: {count:,} tensors, {format_bytes(size)}")
    return "\n".join(lines)


def table(timeline: Timeline, held: list[dict[str, Any]], group_by: str, sort_by: str, row_limit: int) -> str:
    """A table of what was saved, by line, module or op; or of what is held, by holder."""
    if sort_by not in _SORTS:
        raise ArgumentError(f"`sort_by` is {sort_by!r}", instead="one of " + ", ".join(map(repr, _SORTS)))
    if group_by == "holder":
        holders = [(one["holder"], f"{one['nodes']:,}", format_bytes(one["bytes"])) for one in held[:row_limit]]
        return _format(("holder", "nodes", "held"), holders)
    if group_by not in _GROUPS:
        raise ArgumentError(f"`group_by` is {group_by!r}", instead="'line', 'module', 'op' or 'holder'")
    sums = group(timeline, group_by)
    column = {"bytes": 1, "live": 2, "tensors": 0}.get(sort_by)
    ordered = sorted(sums.items(), key=lambda item: (0 if column is None else -item[1][column], item[0]))
    rows = [
        (name, f"{tensors:,}", format_bytes(size), format_bytes(live), f"{backward:,}", f"{count:,}")
        for name, (tensors, size, live, backward, count) in ordered[:row_limit]
    ]
    left = len(ordered) - len(rows)
    text = _format((group_by, "tensors", "saved", "held now", "by backward", "by count"), rows)
    return text + (f"\n… {left} more" if left > 0 else "")


def group(timeline: Timeline, group_by: str) -> dict[str, list[int]]:
    """Tensors, bytes, live bytes, freed by a backward, freed by reference count: of each line, module or op."""
    sums: dict[str, list[int]] = {}
    for site in timeline.sites:
        if site.tensors:
            row = sums.setdefault(_GROUPS[group_by](site), [0, 0, 0, 0, 0])
            for i, value in enumerate((site.tensors, site.bytes, site.live_bytes, site.by_backward, site.by_count)):
                row[i] += value
    return sums


def _format(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        first, *others = row
        lines.append("  ".join([first.ljust(widths[0]), *(text.rjust(w) for text, w in zip(others, widths[1:], strict=True))]))
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
