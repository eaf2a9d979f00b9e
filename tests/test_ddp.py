"""L8, L19, L20: two processes (gloo): equal gradients on both, one synchronisation a step, also if a rank keeps nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_programs import PROGRAMS

RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks(name: str) -> None:
    program = Path(__file__).with_name("ddp_programs.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*RUN, str(program), name], capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{name} ok") == 2
