"""What a notebook shows of a finding, and of why a backward failed: small tables. Nothing here needs torch."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphkeep._explain import Postmortem
    from graphkeep._watch._finding import Finding


def finding(shown: Finding) -> str:
    """A finding as HTML."""
    rows = [("what", shown.what), ("where", shown.where or ""), ("why", shown.why), ("write instead", shown.instead)]
    return _table(f"{shown.id} {shown.severity}", [row for row in rows if row[1]])


def postmortem(shown: Postmortem) -> str:
    """Why a backward failed, as HTML."""
    headline, *lines = shown.note.splitlines() or [""]
    parts = (line.strip().partition(": ") for line in lines)
    return _table(headline, [(name, value.strip()) if separator else ("", name) for name, separator, value in parts])


def _table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th style='text-align:left;vertical-align:top;white-space:nowrap'>{html.escape(name)}</th>"
        f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption style='text-align:left'>{html.escape(caption)}</caption>{cells}</table>"
