"""Two processes (gloo): unequal work, a rank that raises, checkpoints, Accelerate, reports over all ranks, and the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks_programs import EXAMPLES, PROGRAMS

from graphkeep.cli import main

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXAMPLE_LINES = {
    "backward_batch_by_batch.py": "4 backwards, the last one synchronised",
    "forward_all_backward_some.py": "of 64 rows have run backward",
    "keep_part_of_a_graph.py": "DDP, two heads and one backward of the trunk",
    "keep_part_of_a_graph.py --fsdp": "FSDP2, two heads and one backward of the trunk",
    "train_within_a_budget.py": "DDP, at most",
    "train_within_a_budget.py --fsdp": "FSDP2, at most",
}


def launch(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*LAUNCH, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=240, cwd=folder
    )


@pytest.fixture(scope="module")
def programs() -> subprocess.CompletedProcess[str]:
    """All programs in one launch, since each takes as long to start as several to run."""
    return launch(str(Path(__file__).with_name("ranks_programs.py")), *PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks(name: str, programs: subprocess.CompletedProcess[str]) -> None:
    assert programs.stdout.count(f": {name} ok\n") == 2, programs.stdout + programs.stderr


def test_the_launch_ends_well(programs: subprocess.CompletedProcess[str]) -> None:
    assert programs.returncode == 0, programs.stderr


@pytest.fixture(scope="module")
def examples() -> subprocess.CompletedProcess[str]:
    return launch(str(Path(__file__).with_name("ranks_programs.py")), "examples", *EXAMPLE_LINES)


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {line.split()[0] for line in EXAMPLE_LINES}


@pytest.mark.parametrize("line", EXAMPLE_LINES)
def test_an_example_ends_well_on_both_ranks(line: str, examples: subprocess.CompletedProcess[str]) -> None:
    assert examples.returncode == 0, examples.stdout + examples.stderr
    for rank in range(2):
        (said,) = re.findall(rf"rank {rank}: .*{EXAMPLE_LINES[line]}.*", examples.stdout)
        assert "of one process" in said


SHARDED = """
    import gc, torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    import graphkeep as gk

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    logs = []
    for i in range(20):
        with gk.cut(net(torch.full((4, 8), 1.0 + dist.get_rank()))) as y:
            loss = y.pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank():
            logs.append(loss)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    """


def test_one_report_over_all_ranks_names_the_one_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SHARDED))
    done = launch("-m", "graphkeep", "run", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (first,) = tmp_path.glob("*.rank0.graphkeep")
    assert main(["report", str(first)]) == 0
    said = " ".join(capsys.readouterr().out.split())  # as wide as a terminal is
    assert said.startswith(
        "verdict: GK102 nodes grow: `logs[0..19]` (list, global of train.py) keeps the nodes of one graph more"
    )
    assert "on rank 1 of 2" in said
    assert "2 ranks, 20 steps" in said
    assert "rank 0: findings: none; rank 1: findings: GK102" in said
    page = tmp_path / "report.html"
    assert main(["report", str(first), "--html", str(page)]) == 0
    assert "GK102" in page.read_text()
