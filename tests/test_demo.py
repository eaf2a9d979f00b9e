"""`graphkeep demo`: four ways, the same gradients, and what each costs. Nothing here asserts a time."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphkeep.cli import _digits, demo, main

WAYS = ["retain", "retain_and_del", "joint", "cut"]


def result(**figures: Any) -> _digits.Result:
    return _digits.Result(**{field.name: figures[field.name] for field in dataclasses.fields(_digits.Result)})


@pytest.fixture(scope="module")
def ways() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "graphkeep", "demo", "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["steps"] == 2
    assert [way["way"] for way in answer["ways"]] == WAYS
    return {way["way"]: way for way in answer["ways"]}


def test_all_ways_have_the_gradients_of_the_joint_backward(ways: dict[str, dict[str, float]]) -> None:
    assert ways["joint"]["gradient_difference"] == 0
    assert all(way["gradient_difference"] < 1e-5 for way in ways.values())


def test_cut_holds_less_graph_than_the_joint_backward_and_the_retaining_loop(ways: dict[str, dict[str, float]]) -> None:
    assert ways["cut"]["graph_bytes"] < 0.5 * ways["joint"]["graph_bytes"]
    assert ways["cut"]["graph_bytes"] < 0.5 * ways["retain"]["graph_bytes"]
    # with the names deleted one head lives at a time there, too; what it costs then is time
    assert ways["cut"]["graph_bytes"] <= ways["retain_and_del"]["graph_bytes"]


def test_every_figure_is_there(ways: dict[str, dict[str, float]]) -> None:
    assert ways["joint"]["time_ratio"] == 1
    for way in ways.values():
        assert way["process_peak"] > way["graph_bytes"] > 1 << 20
        assert way["step_seconds"] > 0
        assert 0 <= way["accuracy"] <= 1


def test_the_table_is_printed_without_control_codes_and_the_last_line_says_what_it_shows(
    ways: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # the run itself is not repeated: capsys is no terminal, which is what this is about
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(_digits, "compare", lambda *_: [result(**way) for way in ways.values()])
    page = tmp_path / "page.html"
    assert main(["demo", "--page", str(page)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert "\r" not in printed.out
    assert "…" not in printed.out
    for name in demo.NAMES.values():
        assert name in printed.out
    *_, shows, _, opens, where = printed.out.splitlines()
    assert "gk.cut takes" in shows
    assert "gradients agree" in shows
    assert "Open it in a browser" in opens
    assert where.strip() == page.as_uri()
    text = page.read_text(encoding="utf-8")
    assert "GK101" in text
    assert "losses.append(loss)" in text


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip install 'graphkeep[demo]'" in printed.err


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_a_number_of_steps_that_makes_no_sense_is_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["demo", "--steps", steps])
    assert leaving.value.code == 2
    assert "--steps" in capsys.readouterr().err


def test_a_child_that_dies_is_a_bug_and_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="ended with exit code"):
        main(["demo", "--steps", "1", "--json"])


def test_importing_graphkeep_imports_neither_rich_nor_scikit_learn() -> None:
    code = "import sys, graphkeep; assert not {'rich', 'sklearn', 'graphkeep.cli'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_closing_line_says_so_if_gradients_differ() -> None:
    figures = dict.fromkeys(("step_seconds", "time_ratio", "graph_bytes", "process_peak", "accuracy"), 1.0)
    results = [result(way=way, gradient_difference=1e-2 if way == "cut" else 0.0, **figures) for way in WAYS]
    assert "GRADIENTS DIFFER" in demo.closing(results)
