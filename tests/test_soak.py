"""A short soak; `make soak` runs the long one, of 20,000 steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_hundreds_of_steps_with_every_verb_and_exceptions_in_two_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("soak.py")), "400"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 2
