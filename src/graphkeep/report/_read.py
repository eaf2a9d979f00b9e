"""Reading a data file.

What is read is data of somebody else's. Every value is checked for its type before it is used, nothing is executed, and a file
that was cut off gives what had been written.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphkeep._errors import DataFileError
from graphkeep._watch._datafile import FORMAT, SCHEMA_VERSION
from graphkeep._watch._finding import Finding
from graphkeep.report._run import Backward, Holder, Life, Look, Note, Run, Sample, Site, Step

_MOST = 2 << 30  # bytes of text that a file may unpack to: a small file can unpack to any size
_BLOCK = 1 << 20
_OURS = "the path of a file that `graphkeep run` has written"


def read(path: str | os.PathLike[str]) -> Run:
    """Read one data file.

    Raises:
        DataFileError: it does not exist, is no data file, is of a newer graphkeep, or is damaged from its first line on.
    """
    path = Path(path)
    lines = _lines(path)
    first = next(lines, b"")
    header = _record(first)
    if header is None or header.get("type") != "header" or header.get("format") != FORMAT:
        raise DataFileError(
            "this is no data file of graphkeep's, or it is damaged from its first line on",
            where=str(path),
            instead=_OURS,
        )
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version > SCHEMA_VERSION:
        raise DataFileError(
            f"schema_version is {version!r}, this graphkeep reads up to {SCHEMA_VERSION}",
            where=str(path),
            instead=f"the graphkeep that wrote it ({header.get('graphkeep')!r}), or a newer one",
        )
    run = Run(path, header)
    for line in lines:
        record = _record(line)
        if record is None or not add(run, record):
            run.unread += 1
    return run


def read_all(paths: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Read data files, and for the file of one rank those of the others beside it; sorted by rank."""
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        run = read(path)
        found[path.resolve()] = run
        if _int(run.header.get("world_size")) > 1:
            for other in siblings(path):
                if other.resolve() not in found:
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
    named = (p for p in path.parent.iterdir() if p.name.startswith(stem + ".rank") and p.name.endswith("." + suffix))
    return sorted(p for p in named if p.name[len(stem) + 5 :].partition(".")[0].isdigit())


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines, as far as the file can be unpacked; a last line without an end is one that was being written."""
    unpack = zlib.decompressobj(wbits=31)
    rest, size = b"", 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                while block:
                    try:
                        text = unpack.decompress(block, _BLOCK)
                    except zlib.error:
                        return  # damaged here: what came before is sound, for lines are whole
                    size += len(text)
                    if size > _MOST:
                        raise DataFileError(
                            "it unpacks to more than 2 GiB", where=str(path), instead="a file that graphkeep wrote"
                        )
                    block = unpack.unconsumed_tail
                    *lines, rest = (rest + text).split(b"\n")
                    yield from lines
                    if unpack.eof:
                        return
    except OSError as error:
        raise DataFileError(
            f"it cannot be read: {error.strerror or error}",
            where=str(path),
            instead="the path that `graphkeep run` has printed",
        ) from error


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(name)


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


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


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
    run.seconds = max(run.seconds, _float(r["s"]))


_ADD: dict[Any, Callable[[Run, dict[str, Any]], None]] = {
    "source": _source,
    "site": _site,
    "steps_begin": _steps_begin,
    "step": _step,
    "sample": _sample,
    "life": _life,
    "backward": _backward,
    "optimizer_step": _optimizer_step,
    "mutation": _mutation,
    "look": _look,
    "note": _note,
    "totals": _totals,
    "end": _end,
}
