"""Run every benchmark, and write pages, figures as JSON and pictures into ``docs/benchmarks/`` and ``docs/images/``.

``python -m benchmarks.run infer`` runs one page. ``python -m benchmarks.run --index`` runs nothing: it writes all pages and
pictures again from the JSON files.

Each benchmark has a process of its own, with an allocator that keeps what is freed: else the cost of fetching memory from the
system again comes and goes with the layout of the heap. One runs at a time; but those whose figures are no times run beside
them, on the other core.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import _pages
from benchmarks._measure import ROOT, Row, in_child
from benchmarks._pages import PAGES, Machine, rows_of
from benchmarks._pictures import PICTURES

UNTIMED = ("infer_peaks", "watch_memory", "budget_optimum")
FOLDER, IMAGES = ROOT / "docs" / "benchmarks", ROOT / "docs" / "images"


def main(names: Iterable[str]) -> None:
    begin = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = list(names)
    with ThreadPoolExecutor(1) as timed, ThreadPoolExecutor(1) as untimed:
        running = {
            name: [(untimed if benchmark in UNTIMED else timed).submit(_run, benchmark) for benchmark in PAGES[name].benchmarks]
            for name in names
        }
        for name, futures in running.items():
            try:
                done = [future.result() for future in futures]
            except BaseException:  # what waits is not begun
                timed.shutdown(cancel_futures=True)
                untimed.shutdown(cancel_futures=True)
                raise
            machine = _machine(sum(seconds for seconds, _ in done))
            figures = [vars(row) | {"verdict": row.verdict} for _, rows in done for row in rows]
            (FOLDER / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": figures}, indent=1) + "\n")
            print(f"{name}: {machine['seconds']} s", file=sys.stderr, flush=True)
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    missed = sum(row.verdict == "MISSED" for _, rows in known().values() for row in rows)
    print(f"{FOLDER.relative_to(ROOT)}/index.md: {missed} figures fell short; {time.monotonic() - begin:.0f} s in all")


def _run(benchmark: str) -> tuple[float, list[Row]]:
    """How long it took, and its rows."""
    start = time.monotonic()
    print(f"{benchmark} ...", file=sys.stderr, flush=True)
    rows = [Row(**row) for row in in_child(f"benchmarks.{benchmark}", steady=True)]
    return time.monotonic() - start, rows


def _machine(seconds: float) -> Machine:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": 1,
        "seconds": round(seconds),
    }


def known() -> dict[str, tuple[Machine, Sequence[Row]]]:
    """What the JSON files say, by page."""
    found: dict[str, tuple[Machine, Sequence[Row]]] = {}
    for name in PAGES:
        file = FOLDER / f"{name}.json"
        if file.exists():
            said = json.loads(file.read_text())
            found[name] = said["machine"], rows_of(said["rows"])
    return found


def texts() -> dict[Path, str]:
    """What is written from the JSON files: pages, pictures, the index."""
    found = {FOLDER / "index.md": _pages.index(known())}
    for name, (machine, rows) in known().items():
        found[FOLDER / f"{name}.md"] = _pages.page(name, machine, rows)
        if name in PICTURES:
            found[IMAGES / f"{name}.svg"] = PICTURES[name].draw(rows)
    return found


if __name__ == "__main__":
    main([] if sys.argv[1:] == ["--index"] else sys.argv[1:] or PAGES)
