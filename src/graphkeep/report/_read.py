"""Reading a data file.

What is read is data of somebody else's. Every value is checked for its type before it is used, nothing is executed, and a file
that was cut off gives what had been written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphkeep._errors import DataFileError
from graphkeep._watch._datafile import FORMAT, SCHEMA_VERSION
from graphkeep._watch._finding import Finding
from graphkeep.report._lines import Unpacker
from graphkeep.report._run import Backward, Holder, Life, Look, Note, Run, Sample, Site, Step

_BLOCK = 1 << 20
_LARGEST = 1 << 63  # a larger number is no number of bytes, and does not fit into a float for long


def read(path: str | os.PathLike[str]) -> Run:
    """Read one data file.

    Raises:
        DataFileError: it does not exist, is no data file, is of a newer graphkeep, or is damaged from its first line on.
    """
    builder = Builder(Path(path))
    try:
        with builder.path.open("rb") as file:
            while not builder.damaged and (block := file.read(_BLOCK)):
                builder.feed(block)
    except OSError as error:
        raise unreadable(builder.path, error) from error
    if builder.run is None:
        raise foreign(builder.path)
    return builder.run


class Builder:
    """A run, put together out of a file's pieces.

    Attributes:
        run: None until the first line is there.
        damaged: whether nothing behind what was read can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: Run | None = None
        self._unpacker = Unpacker(path)

    @property
    def damaged(self) -> bool:
        return self._unpacker.damaged

    def feed(self, data: bytes) -> None:
        """Take in the next piece.

        Raises:
            DataFileError: this is no data file, or one of a newer graphkeep.
        """
        for line in self._unpacker.feed(data):
            record = _record(line)
            if self.run is None:
                self.run = _begin(self.path, record)
            elif record is None or not add(self.run, record):
                self.run.unread += 1
        if self._unpacker.damaged:
            if self.run is None:
                raise foreign(self.path)
            self.run.unread += 1  # at least: what lies behind cannot be counted


def _begin(path: Path, header: dict[str, Any] | None) -> Run:
    if header is None or header.get("type") != "header" or header.get("format") != FORMAT:
        raise foreign(path)
    version = header.get("schema_version")
    if not isinstance(version, int) or not _is_number(version):
        raise foreign(path)
    if version > SCHEMA_VERSION:
        writer = header.get("graphkeep")
        raise DataFileError(
            f"it is of a newer graphkeep: schema_version is {version}, this graphkeep reads up to {SCHEMA_VERSION}",
            where=str(path),
            instead=f"the graphkeep that wrote it{f' ({writer[:40]!r})' if isinstance(writer, str) else ''}, or a newer one",
        )
    return Run(path, {key: value for key, value in header.items() if _HEADER.get(key, _is_plain)(value)})


def foreign(path: Path) -> DataFileError:
    return DataFileError(
        "this is no data file of graphkeep's, or it is damaged from its first line on",
        where=str(path),
        instead="the path of a file that `graphkeep run` has written",
    )


def unreadable(path: Path, error: OSError) -> DataFileError:
    return DataFileError(
        f"it cannot be read: {error.strerror or error}", where=str(path), instead="the path that `graphkeep run` has printed"
    )


def read_all(paths: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Read data files, and for the file of one rank those of the others beside it, if they can be read; sorted by rank.

    Raises:
        DataFileError: one of `paths` cannot be read.
    """
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        run = read(path)
        found[path.resolve()] = run
        if _int(run.header.get("world_size")) > 1:
            for other in siblings(path):
                if other.resolve() not in found:
                    with contextlib.suppress(DataFileError):  # of a rank that was killed before its first line, or foreign
                        candidate = read(other)
                        if candidate.header.get("group") == run.header.get("group"):
                            found[other.resolve()] = candidate
    return sorted(found.values(), key=lambda run: (run.rank, str(run.path)))


def siblings(path: Path) -> list[Path]:
    """The files of the other ranks, by their names: ``train.py.12345.rank0.graphkeep``."""
    stem, _, ending = path.name.rpartition(".rank")
    if not stem or not ending.partition(".")[0].isdigit():
        return []
    suffix = ending.partition(".")[2]
    try:
        beside = list(path.parent.iterdir())
    except OSError:  # a folder may let its files be read and not be listed
        return []
    named = (p for p in beside if p.name.startswith(stem + ".rank") and p.name.endswith("." + suffix))
    return sorted(p for p in named if p.name[len(stem) + 5 :].partition(".")[0].isdigit())


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)  # of 1e999: infinity
    if math.isinf(value):
        raise ValueError(text)
    return value


def add(run: Run, record: dict[str, Any]) -> bool:
    """Take one record in; False if it is not as the format says. Types that are not known are skipped."""
    try:
        _ADD.get(record.get("type"), _skip)(run, record)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return False
    return True


def _skip(run: Run, record: dict[str, Any]) -> None:
    pass


def _int(value: Any) -> int:
    return value if type(value) is int else 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | float) or _is_number(value)


# What a header's keys have to be; others are left out, so that nobody who shows them has to ask again.
_HEADER: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("graphkeep", "torch", "python", "program", "cwd", "host", "started", "group"), _is_text),
    **dict.fromkeys(("pid", "rank", "world_size"), _is_number),
    "argv": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}


def _number(value: Any) -> int:
    if not _is_number(value):
        raise TypeError
    return int(value)


def _maybe(value: Any) -> int | None:
    return None if value is None else _number(value)


def _float(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _maybe_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _header(run: Run, r: dict[str, Any]) -> None:
    run.how = run.error = None  # a watch that was started again


def _source(run: Run, r: dict[str, Any]) -> None:
    run.sources[_text(r["file"])] = _text(r["text"])


def _site(run: Run, r: dict[str, Any]) -> None:
    number = _number(r["id"])
    run.sites[number] = Site(number, _text(r["file"]), _number(r["line"]), _text(r["function"]), _maybe_text(r["module"]))


def _steps_begin(run: Run, r: dict[str, Any]) -> None:
    run.boundary, run.begun_at = _text(r["boundary"]), _number(r["at"])
    run.steps.clear()
    run.samples.clear()
    run.looks.clear()


_STEP = ("count", "at", "tensors", "bytes", "peak", "left", "backwards")


def _step(run: Run, r: dict[str, Any]) -> None:
    step = Step(_number(r["first"]), s=_float(r["s"]), **{key: _number(r[key]) for key in _STEP})
    if step.count < 1:
        raise ValueError
    run.steps.append(step)
    run.peak = max(run.peak, step.peak)
    run.seconds = max(run.seconds, step.s)


def _sample(run: Run, r: dict[str, Any]) -> None:
    sites = [(_number(site), _number(size)) for site, size in r["sites"]]
    run.samples.append(Sample(_number(r["step"]), _number(r["at"]), _float(r["s"]), _number(r["bytes"]), sites))
    run.peak = max(run.peak, run.samples[-1].bytes)
    run.seconds = max(run.seconds, run.samples[-1].s)


_LIFE = ("born_first", "born_last", "died_at", "died_step", "tensors", "bytes")


def _life(run: Run, r: dict[str, Any]) -> None:
    optional = {key: _maybe(r[key]) for key in ("born", "died", "backward")}
    run.lives.append(Life(**optional, **{key: _number(r[key]) for key in _LIFE}))  # type: ignore[arg-type]


def _backward(run: Run, r: dict[str, Any]) -> None:
    said = {key: r[key] is True for key in ("retain_graph", "create_graph", "failed", "reused")}
    numbers = {key: _number(r[key]) for key in ("number", "step", "at", "kept_bytes")}
    run.backwards.append(Backward(site=_maybe(r["site"]), **said, **numbers))  # type: ignore[arg-type]


def _reused(run: Run, r: dict[str, Any]) -> None:
    number = _number(r["number"])
    for backward in reversed(run.backwards):
        if backward.number <= number:
            backward.reused = backward.reused or backward.number == number
            return


def _optimizer_step(run: Run, r: dict[str, Any]) -> None:
    run.optimizer_steps.append(
        {"optimizer": _text(r["optimizer"]), "site": _maybe(r["site"]), "step": _number(r["step"]), "at": _number(r["at"])}
    )


def _mutation(run: Run, r: dict[str, Any]) -> None:
    run.mutations.append(
        {"saved": _maybe(r["saved"]), "seen": _maybe(r["seen"]), "step": _number(r["step"]), "at": _number(r["at"])}
    )


def _look(run: Run, r: dict[str, Any]) -> None:
    run.looks.append(
        Look(
            _number(r["step"]),
            _number(r["at"]),
            _float(r["s"]),
            r["final"] is True,
            [_holder(h) for h in r["holders"]],
            [_finding(f) for f in r["findings"]],
        )
    )


def _holder(h: dict[str, Any]) -> Holder:
    return Holder(
        _text(h["holder"]),
        _text(h["kind"]),
        _text(h["name"]),
        _maybe_text(h["file"]),
        _maybe(h["line"]),
        _number(h["nodes"]),
        _number(h["bytes"]),
        [(_number(step), _number(nodes), _number(size)) for step, nodes, size in h["parts"]],
        [_number(site) for site in h["sites"]],
    )


def _finding(f: dict[str, Any]) -> Finding:
    return Finding(
        _text(f["id"]), _text(f["severity"]), _text(f["what"]), _maybe_text(f["where"]), _text(f["why"]), _text(f["instead"])
    )


def _note(run: Run, r: dict[str, Any]) -> None:
    if not _text(r["text"]).strip():
        raise ValueError
    run.notes.append(Note(_text(r["id"]), _text(r["text"]), _text(r["error"])))


def _totals(run: Run, r: dict[str, Any]) -> None:
    sites = [_summed(run, *row) for row in r["sites"]]
    deaths = [(_number(a), _number(b), c is True, _number(d), _number(e), _number(f)) for a, b, c, d, e, f in r["deaths"]]
    calls = [(_number(a), _number(b), _number(c), _number(d), _number(e), _number(f)) for a, b, c, d, e, f in r["calls"]]
    run.peak = max(run.peak, _number(r["peak"]))
    run.sites.update((site.id, site) for site in sites)
    run.deaths, run.calls = deaths, calls


def _summed(run: Run, number: Any, op: Any, *counts: Any) -> Site:
    site = replace(run.sites.get(_number(number), Site(number)), op=_maybe_text(op))
    site.tensors, site.bytes, site.live_tensors, site.live_bytes, site.by_backward, site.by_count = map(_number, counts)
    return site


def _end(run: Run, r: dict[str, Any]) -> None:
    run.how, run.error = _text(r["how"]), _maybe_text(r["error"])
    run.torch = r.get("torch") is not False
    run.seconds = max(run.seconds, _float(r["s"]))


_ADD: dict[Any, Callable[[Run, dict[str, Any]], None]] = {
    "header": _header,
    "source": _source,
    "site": _site,
    "steps_begin": _steps_begin,
    "step": _step,
    "sample": _sample,
    "life": _life,
    "backward": _backward,
    "reused": _reused,
    "optimizer_step": _optimizer_step,
    "mutation": _mutation,
    "look": _look,
    "note": _note,
    "totals": _totals,
    "end": _end,
}
