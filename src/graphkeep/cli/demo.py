"""Train one trunk with eight heads on handwritten digits in four ways, and show what each costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from graphkeep import __version__
from graphkeep._errors import GraphkeepError
from graphkeep._units import format_bytes
from graphkeep.cli._arguments import count

if TYPE_CHECKING:
    from rich.table import Table

    from graphkeep.cli._digits import Result

HELP = "train on handwritten digits in four ways, and show what each costs"
NAMES = {
    "retain": "retain_graph=True in a loop",
    "retain_and_del": "the same, with del",
    "joint": "one joint backward",
    "cut": "gk.cut",
}

# float32's epsilon is 1.2e-7, and sums in another order differ by some tens of it
_TOLERANCE = 1e-5


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="timed steps each way (default: 20)")
    parser.add_argument(
        "--page", default="graphkeep-demo.html", metavar="OUT", help="where the report page goes (default: graphkeep-demo.html)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table; no page")


def run(args: argparse.Namespace) -> int:
    """Run the job, then print the table or the JSON object."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from graphkeep.cli import _digits

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=args.json or not errors.is_terminal) as progress:
        task = progress.add_task("starting four processes", total=len(NAMES) * (args.steps + 1))
        results = _digits.compare(
            args.steps,
            lambda way: progress.update(task, advance=1, description=f"training: {NAMES.get(way, way)}"),
        )
    if args.json:
        ways = [dataclasses.asdict(result) | {"name": NAMES[result.way]} for result in results]
        print(json.dumps({"graphkeep": __version__, "steps": args.steps, "batch": _digits.BATCH, "ways": ways}))
        return 0
    console = Console()
    console.print(_table(results))
    console.print(closing(results), highlight=False, soft_wrap=True)
    with errors.status("watching a run of its own, for the page"):
        page = _page(Path(args.page).absolute())
    console.print(f"\nA report page of a run of its own is written. Open it in a browser:\n  {page.as_uri()}", soft_wrap=True)
    return 0


def _page(path: Path) -> Path:
    """Run a program under `graphkeep run` and write its page."""
    from graphkeep.report import html
    from graphkeep.report._read import read

    with tempfile.TemporaryDirectory(prefix="graphkeep-demo-") as folder:
        program, file = Path(folder, "train.py"), Path(folder, "train.graphkeep")
        program.write_text(Path(__file__).with_name("train.py.txt").read_text(encoding="utf-8"), encoding="utf-8")
        command = [sys.executable, "-m", "graphkeep", "run", "-q", "-o", file.name, program.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GraphkeepError(
                f"the demo's own run ended with exit code {done.returncode}",
                where=done.stderr.strip(),
                instead="graphkeep demo --json",
            )
        html.write([read(file)], path)
    return path


def _table(results: list[Result]) -> Table:
    from rich import box
    from rich.table import Table

    from graphkeep.cli._digits import BATCH, LOOK_ALIKES

    table = Table(
        title=f"One trunk, {len(LOOK_ALIKES)} heads, handwritten digits, batch {BATCH}",
        caption="time: median of a training step, the joint backward's is 1\n"
        "gradient difference: from the joint backward, over its largest gradient\naccuracy: on held-out digits",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("way", no_wrap=True)
    for header in ("time", "peak graph\nbytes", "process\npeak", "gradient\ndifference", "accuracy\nreached"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            NAMES[result.way],
            f"{result.time_ratio:.2f}x",
            format_bytes(result.graph_bytes),
            format_bytes(result.process_peak),
            f"{result.gradient_difference:.1e}" if result.gradient_difference else "0",
            f"{result.accuracy:.1%}",
            style="bold" if result.way == "cut" else None,
        )
    return table


def closing(results: list[Result]) -> str:
    """What the table shows, in one line."""
    by_way = {result.way: result for result in results}
    cut, joint, retain = by_way["cut"], by_way["joint"], by_way["retain"]
    worst = max(result.gradient_difference for result in results)
    gradients = f"all gradients agree to {worst:.0e}" if worst < _TOLERANCE else f"GRADIENTS DIFFER by up to {worst:.0e}"
    return (
        f"Beside one joint backward, gk.cut takes {cut.time_ratio:.2f}x the time and "
        f"{cut.graph_bytes / joint.graph_bytes:.2f}x the graph memory; retain_graph=True in a loop takes "
        f"{retain.time_ratio:.2f}x the time and {retain.graph_bytes / joint.graph_bytes:.2f}x the graph memory; {gradients}."
    )
