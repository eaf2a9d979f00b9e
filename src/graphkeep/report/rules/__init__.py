"""What each finding means: one page an id, with a program that shows it and the program mended.

`docs/findings.md` says the same in one page; `tests/test_rule.py` holds them together, and runs every program.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


def ids() -> list[str]:
    """All of them, in order."""
    return sorted(file.name.removesuffix(".md") for file in files(__name__).iterdir() if file.name.endswith(".md"))


@cache
def text(rule: str) -> str:
    """The page, in Markdown."""
    return files(__name__).joinpath(f"{rule}.md").read_text(encoding="utf-8")


def title(rule: str) -> str:
    """Its first line, without the id."""
    return text(rule).partition("\n")[0].partition(": ")[2]
