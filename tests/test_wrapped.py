"""Two processes (gloo): what models that are wrapped for them can bear, and what is refused before a gradient has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wrapped_programs import PROGRAMS

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def programs() -> subprocess.CompletedProcess[str]:
    """All programs in one launch, since each takes as long to start as several to run."""
    program = Path(__file__).with_name("wrapped_programs.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [*LAUNCH, str(program), *PROGRAMS], capture_output=True, text=True, check=False, env=environment, timeout=240
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks(name: str, programs: subprocess.CompletedProcess[str]) -> None:
    assert programs.stdout.count(f": {name} ok\n") == 2, programs.stdout + programs.stderr


def test_the_launch_ends_well(programs: subprocess.CompletedProcess[str]) -> None:
    assert programs.returncode == 0, programs.stderr
