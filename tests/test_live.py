"""`graphkeep live`: a run is followed while it writes, and its end is noticed whatever it is. Nothing here asserts a time."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import datafiles
import pytest
from datafiles import FINDING, NOTE, Record

from graphkeep._watch._datafile import DataFile
from graphkeep.cli import live as command
from graphkeep.cli import main
from graphkeep.report import live
from graphkeep.report._follow import is_gone

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py.4711.graphkeep"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PAUSE", 0.01)
    monkeypatch.setattr(command, "_LINE", 0.0)
    monkeypatch.setattr(command, "_WAIT", 0.2)
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def lines(capsys: Capture) -> list[str]:
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def test_a_run_that_has_ended_is_one_line_and_how_it_ended(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(12, findings=(FINDING,)))
    assert main(["live", str(path)]) == 0
    assert lines(capsys) == [
        "12 steps in 6.0 s, 2.0 steps/s, graphs hold 585.9 KiB, 683.6 KiB at most, 585.9 KiB left after the last step; "
        "found: GK101",
        "ran to its end",
    ]


def test_a_run_is_followed_while_it_writes(path: Path, capsys: Capture):
    records = datafiles.training(30)
    file = DataFile(path)

    def program() -> None:
        for i, record in enumerate(records):
            file.write(record)
            if i % 40 == 20:
                file.flush()
                time.sleep(0.1)
        file.close()

    writing = threading.Thread(target=program)
    writing.start()
    assert main(["live", str(path)]) == 0
    writing.join()
    said = lines(capsys)
    steps = [int(found[1]) for line in said if (found := re.match(r"(\d+) steps? ", line))]
    assert steps == sorted(set(steps)), "a line is printed when something is new"
    assert steps[-1] == 30
    assert len(steps) > 1
    assert said[-1] == "ran to its end"


def test_a_file_that_never_appears_or_never_begins_is_an_error(path: Path, capsys: Capture):
    assert main(["live", str(path)]) == 1
    assert "there is no such file" in capsys.readouterr().err
    path.write_bytes(b"")
    assert main(["live", str(path)]) == 1
    assert "its first line has not been written yet" in capsys.readouterr().err
    path.write_bytes(b"hello")
    assert main(["live", str(path)]) == 1
    assert "no data file" in capsys.readouterr().err


def cut_off(path: Path, pid: int) -> list[Record]:
    records = datafiles.without(datafiles.training(12, pid=pid, host=socket.gethostname()), "end")
    datafiles.write(path, records)
    return records


def test_a_process_that_is_gone_is_said_to_have_been_killed(path: Path, capsys: Capture, child: subprocess.Popen[bytes]):
    cut_off(path, child.pid)
    child.kill()
    if sys.platform != "linux":
        child.wait()  # elsewhere one that nobody has waited for looks alive
    assert main(["live", str(path)]) == 0
    assert lines(capsys)[-1] == f"the process {child.pid} is gone, and no end was written: it was killed"


def test_only_a_process_of_this_machine_is_asked_for(path: Path, child: subprocess.Popen[bytes]):
    cut_off(path, child.pid)
    run = datafiles.run(path, cut_off(path, child.pid))
    assert not is_gone(run)
    child.kill()
    child.wait()
    assert is_gone(run)
    run.header["host"] = "another"
    assert not is_gone(run)
    for pid in (0, -1, None):
        run.header.update(host=socket.gethostname(), pid=pid)
        assert not is_gone(run)
    run.header["pid"] = 1 << 62
    assert not is_gone(run)


def test_ctrl_c_ends_the_command_quietly(path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    cut_off(path, os.getpid())

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert main(["live", str(path)]) == 130
    assert len(lines(capsys)) == 1


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_in_a_process_of_its_own(path: Path):
    cut_off(path, os.getpid())
    command_line = [sys.executable, "-m", "graphkeep", "live", str(path)]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("12 steps")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, out, err) == (130, "", "")


def test_a_reader_that_has_gone_ends_it(path: Path):
    cut_off(path, os.getpid())
    command_line = [sys.executable, "-m", "graphkeep", "live", str(path)]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        cut_off(path.with_name("more"), os.getpid())
        with path.open("ab") as file:
            more = DataFile(path.with_name("more"))
            more.write(next(one for one in datafiles.training(20) if one["type"] == "step"))
            more.close()
            file.write(path.with_name("more").read_bytes())
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_damage_ends_it(path: Path, capsys: Capture):
    cut_off(path, os.getpid())
    with path.open("ab") as file:
        file.write(b"rubbish")
    assert main(["live", str(path)]) == 0
    assert lines(capsys)[-1] == "the file is damaged here; nothing behind can be read"


def test_a_terminal_gets_a_screen_that_fits(path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")
    more = {"world_size": 3, "group": "launch/29500"}
    for rank in range(3):
        file = path.with_name(f"train.py.77.rank{rank}.graphkeep")
        records = datafiles.training(12, findings=(FINDING,) * 9, rank=rank, **more)
        datafiles.write(file, [*records[:-1], NOTE, records[-1]])
    assert main(["live", str(file)]) == 0
    out = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    screen = [line.rstrip() for line in out.splitlines()]
    assert "train.py, rank 2 (2 others)" in screen
    assert any(line.startswith("left: ▁▂") for line in screen)
    assert any(line.startswith("GK101 bytes grow: ") and line.endswith("…") for line in screen)
    assert "train.py:6                585.9 KiB" in screen
    assert screen[-1] == "ran to its end"
    assert max(map(len, screen)) <= 60


def test_figures_of_a_run_that_has_just_begun(path: Path):
    run = datafiles.run(path, [datafiles.header()])
    assert live.line(run) == "0 steps in 0.0 s, graphs hold 0 B, 0 B at most"
    run = datafiles.run(path, datafiles.training(1))
    assert (live.speed(run), live.now(run)) == (0.0, 50_000)
    run = datafiles.run(path, datafiles.without(datafiles.training(3), "step"))
    assert live.now(run) == 250_000
