"""Each verb in each way of running, precision and compiler, on 2 and on 4 ranks (gloo); and the table of it in the docs.

`docs/distributed.md` holds what these tests find: ``GRAPHKEEP_WRITE=1 python -m pytest tests/test_matrix.py`` writes it there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import PRECISIONS, VERBS, WAYS

PAGE = Path(__file__).parent.parent / "docs" / "distributed.md"
EAGER, COMPILED = "Not compiled", "With `torch.compile`"
Table = dict[str, dict[str, str]]  # by way and verb


def found(ranks: int, compiler: str | None) -> Table:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__).with_name("matrix.py")), ";".join(WAYS), *([compiler] if compiler else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [json.loads(line.removeprefix("CELL ")) for line in done.stdout.splitlines() if line.startswith("CELL ")]
    faults = [cell for cell in cells if cell["verdict"].startswith("FAULT")]
    assert not faults, "\n".join(map(str, faults))
    table: Table = {}
    for cell in cells:
        known = table.setdefault(cell["way"], {}).setdefault(cell["verb"], cell["verdict"])
        assert known == cell["verdict"], f"another verdict with {cell['precision']}: {cell}"
    assert len(cells) == len(WAYS) * len(PRECISIONS) * len(VERBS) - len(VERBS)  # no float16 in Accelerate on a CPU
    return table


def written(heading: str) -> Table:
    """The table of the docs under a heading."""
    section = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    verbs = [verb.strip("`") for verb in rows[0][1:]]
    return {row[0]: dict(zip(verbs, row[1:], strict=True)) for row in rows[2:]}


def shown(table: Table) -> str:
    lines = ["| | " + " | ".join(f"`{verb}`" for verb in VERBS) + " |", "|---" * (len(VERBS) + 1) + "|"]
    lines += [f"| {way} | " + " | ".join(table[way][verb] for verb in VERBS) + " |" for way in WAYS]
    return "\n".join(lines)


def write(heading: str, table: Table) -> None:
    text = PAGE.read_text()
    pattern = rf"(### {re.escape(heading)}\n\n)(\|.*\n)*"
    assert re.search(pattern, text), heading
    PAGE.write_text(re.sub(pattern, lambda match: match[1] + shown(table) + "\n", text))


@pytest.mark.parametrize(
    ("ranks", "compiler"),
    [(2, None), (4, None), (2, "aot_eager"), (2, "inductor")],
    ids=["2 ranks", "4 ranks", "2 ranks, aot_eager", "2 ranks, inductor"],
)
def test_every_cell_is_right_or_refused_and_is_what_the_docs_say(ranks: int, compiler: str | None) -> None:
    table = found(ranks, compiler)
    heading = COMPILED if compiler else EAGER
    if os.environ.get("GRAPHKEEP_WRITE"):
        write(heading, table)
    assert table == written(heading)
