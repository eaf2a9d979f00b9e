"""The program's source lines on the page: those around a place, as the data file has them."""

from __future__ import annotations

from dataclasses import dataclass

from graphkeep.report._run import Run

AROUND = 4  # lines before and after
_LONGEST = 240  # characters of a line


@dataclass(frozen=True)
class Line:
    """One source line; ``hit`` is the one that is meant."""

    number: int
    text: str
    hit: bool


class Sources:
    """The sources of one run, found by the end of their names: a finding says ``train.py:12``, the data file has the path.

    Arguments:
        run: the run.
        limit: how many characters the page may take.
    """

    def __init__(self, run: Run, limit: int) -> None:
        self._texts = run.sources
        self._cwd = str(run.header.get("cwd") or "").replace("\\", "/").rstrip("/")
        self._split: dict[str, list[str]] = {}
        self._names: dict[str, str | None] = {}
        self._left = limit
        self.taken: dict[str, dict[int, str]] = {}

    def short(self, file: str) -> str:
        """As the program's user knows it: below the working directory without it, elsewhere the last three parts."""
        name = file.replace("\\", "/")
        if self._cwd and name.startswith(self._cwd + "/"):
            return name[len(self._cwd) + 1 :]
        parts = name.split("/")
        return "/".join(["…", *parts[-3:]]) if len(parts) > 4 else file  # noqa: PLR2004

    def around(self, where: str | None) -> list[Line]:
        """The lines around ``train.py:12``; empty where the data file has none."""
        file, _, digits = (where or "").rpartition(":")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 10):  # noqa: PLR2004
            return []
        number, lines = int(digits), self._lines(file)
        if not 1 <= number <= len(lines):
            return []
        first, last = max(number - AROUND, 1), min(number + AROUND, len(lines))
        return [Line(i, shorten(lines[i - 1], _LONGEST), i == number) for i in range(first, last + 1)]

    def take(self, file: str, line: int) -> None:
        """Put the lines around a place among those that the page's script may show, while there is room."""
        if self._left <= 0:
            return
        of_file = self.taken.setdefault(file, {})
        for found in self.around(f"{file}:{line}"):
            if found.number not in of_file:
                of_file[found.number] = found.text
                self._left -= len(found.text) + 8

    def _lines(self, file: str) -> list[str]:
        name = self._name(file)
        if name is None:
            return []
        if name not in self._split:  # `splitlines` would end lines where Python's own numbers do not: at a form feed
            self._split[name] = self._texts[name].replace("\r\n", "\n").split("\n")
        return self._split[name]

    def _name(self, file: str) -> str | None:
        if file not in self._names:
            self._names[file] = file if file in self._texts else _best(file, self._texts)
        return self._names[file]


def _best(file: str, names: dict[str, str]) -> str | None:
    """The name that has the most last parts in common, if one of the two ends with the other."""
    wanted = _parts(file)
    found = [
        (min(len(parts), len(wanted)), -len(parts), name)
        for name, parts in ((name, _parts(name)) for name in names)
        if wanted and parts[-len(wanted) :] == wanted[-len(parts) :]
    ]
    return max(found)[2] if found else None


def _parts(file: str) -> list[str]:
    return [part for part in file.replace("\\", "/").split("/") if part not in ("", ".")]


def shorten(text: str, length: int) -> str:
    """At most so many characters."""
    return text if len(text) <= length else text[: length - 1] + "…"
