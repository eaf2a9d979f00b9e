"""Every example runs, ends well, complains about nothing, and prints the figures that README's table states."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# what README states, in the order in which the example prints it
FIGURES = {
    "when_is_it_freed.py": [
        "sample 0 is rejected",
        "sample 1 runs forward",
        "by reference count at `out = model(data[i : i + 1])`",
        "its saved tensors when total.backward() runs",
        "by the backward at `(total / n).backward()`",
        "the graph of the sum is freed now",
    ],
    "forward_all_backward_some.py": [
        "at most 33",
        "at most 32",
        "at most 16",
        "256 samples run forward, 169 asked for, 169 run",
    ],
    "backward_batch_by_batch.py": [
        "256 rows run backward",
        "second time",
        "2048 rows run backward",
        "1,290,240 bytes of graph",
        "128 rows run backward",
        " 0 bytes of graph",
    ],
    "train_within_a_budget.py": [
        "the graph holds 13,382,404 bytes at most",
        "the graph holds at most 5,352,961 bytes",
        "ops ran again",
        "budget 5.1 MiB, peak",
        "held when the last step was fullest",
        "bit for bit: True",
        "random number is the same: True",
        "says that it takes 3,145,728 bytes",
    ],
    "keep_part_of_a_graph.py": [
        "before, y1's graph saves 8000000 bytes, of which x's 4000000",
        "after the first head, y1's graph saves 8000000 bytes",
        "trunk: 2;",
        "after the first head, y1's graph saves 4000000 bytes, of which x's 4000000",
        "trunk: 2;",
        "after the first head, y1's graph saves 0 bytes, x's 4000000",
        "trunk: 1;",
    ],
}


def test_every_example_has_its_figures_here():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(FIGURES)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_example_runs_and_prints_what_readme_states(name: str):
    example = ROOT / "examples" / name
    done = subprocess.run([sys.executable, str(example)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rest = done.stdout
    for figure in FIGURES[name]:
        _, found, rest = rest.partition(figure)
        assert found, f"{figure!r} is missing, or not in this order, in\n{done.stdout}"
    assert ": False" not in done.stdout, "some gradients differ"
