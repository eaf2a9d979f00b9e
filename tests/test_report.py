"""`graphkeep report`: what it says of one run and of several ranks, in four formats, to whomever."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import datafiles
import pytest
from datafiles import COSTS, FINDING, NOTE
from rich.console import Console

from graphkeep.cli import main
from graphkeep.report import html, text
from graphkeep.report._plain import safe, spark

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py.4711.graphkeep"


def said(capsys: Capture, *args: object, code: int = 0) -> str:
    assert main(["report", *map(str, args)]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def program(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphkeep", "report", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


# text -------------------------------------------------------------------------------------------------------------------------


def test_verdict_why_and_next_are_the_first_three_lines_and_all_findings_stand_below(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(12, findings=(COSTS, FINDING)))
    lines = said(capsys, path).splitlines()
    assert lines[0].startswith("verdict: GK101 bytes grow: `losses` (list, global of train.py) keeps one graph more each step")
    assert "(and 1 more)" in lines[0]
    assert lines[1] == "why:     `losses.append(loss)` stores a tensor with its history"
    assert lines[2] == "next:    `losses.append(loss.detach())`"
    assert lines[4] == "train.py --lr 0.1: 12 steps (ended by optimizer.step()), 6.0 s, ran to its end"
    assert lines[5] == "torch 2.13.0, Python 3.11.7, graphkeep 0.1.0; started 2026-11-30T12:00:00+00:00 on box"
    whole = "\n".join(lines)
    for finding in (FINDING, COSTS):
        assert f"{finding['id']} {finding['severity']}: {finding['what']} ({finding['where']})" in whole
        assert f"  why: {finding['why']}" in whole
        assert f"  write instead: {finding['instead']}" in whole


def test_the_tables_say_who_holds_where_it_was_saved_and_what_freed_it(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(12))
    out = said(capsys, path)
    rows = [line.split() for line in out.splitlines()]
    assert out.index("\ntrain.py:6 ") < out.index("\ntrain.py:5 "), "what holds most comes first"
    assert ["`losses`", "(list,", "global", "of", "train.py)", "585.9", "KiB", "84", "0", "to", "11"] in rows
    assert ["train.py:6", "585.9", "KiB", "585.9", "KiB", "585.9", "KiB", "24", "0", "0", "loss", "=", "out(x)"] in rows
    assert ["train.py:5", "1.1", "MiB", "97.7", "KiB", "0", "B", "96", "96", "0", "x", "=", "hidden(x)"] in rows
    assert ["train.py:5", "12", "96", "1.1", "MiB", "the", "backward", "at", "train.py:8"] in rows


def test_what_is_left_after_each_step_is_drawn(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(8))
    out = said(capsys, path)
    assert "  left  ▂▃▄▅▆▇██  390.6 KiB after the last step" in out
    assert "488.3 KiB, in step 7" in out


@pytest.mark.parametrize(("group", "rows"), [("module", ["Linear", "(no module)"]), ("op", ["addmm", "(not asked)"])])
def test_rows_of_the_table_may_be_modules_or_ops(path: Path, capsys: Capture, group: str, rows: list[str]):
    datafiles.write(path, datafiles.training(12))
    out = said(capsys, path, "--group-by", group)
    for row in rows:
        assert any(line.startswith(row) for line in out.splitlines())
    assert "x = hidden(x)" not in out


def test_a_run_that_was_cut_off_says_so(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.without(datafiles.training(12), "end", "look", "totals"))
    out = said(capsys, path)
    assert "cut off here: no end was written" in out
    assert out.startswith("verdict: 48.8 KiB more is left with each step\n")  # nobody looked, yet so much is known
    assert "verdict: nothing grows" not in out
    # without sums: what was held when it was last looked at
    assert any(line.split()[:6] == ["train.py:6", "0", "B", "585.9", "KiB", "585.9"] for line in out.splitlines())


def test_a_run_at_which_nobody_looked_is_not_said_to_be_well(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.without(datafiles.training(3, leak=0), "end", "look"))
    assert said(capsys, path).startswith("verdict: nothing is known of who holds graphs\n")


def test_a_run_without_steps_is_shown(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(0))
    assert "0 steps, 0.0 s, ran to its end" in said(capsys, path)


def test_a_backward_that_failed_is_the_verdict_and_its_note_is_shown(path: Path, capsys: Capture):
    records = datafiles.changed(datafiles.training(3, findings=(COSTS,)), "end", how="raised", error=NOTE["error"])
    datafiles.write(path, [*records[:-1], NOTE, records[-1]])
    out = said(capsys, path)
    assert out.startswith("verdict: GK201: this loss reaches a part of the graph that has been freed before\n")
    assert "next:    `hidden = hidden.detach()`\n" in out
    assert f"a backward failed: {NOTE['error']}\n{NOTE['text']}\n" in out
    assert f"raised {NOTE['error']}" in out


def test_a_damaged_file_is_shown_as_far_as_it_goes_and_says_so(path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(40), flushed=True)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b"\xff" * 64
    path.write_bytes(data)
    out = said(capsys, path)
    assert f"{path.name} is damaged: 1 line or more could not be read" in out


# names of the program's -------------------------------------------------------------------------------------------------------


HOSTILE = "[bold]x[/] :smile: \x1b[31mred\x1b]0;title\x07 \u202edrowssap\n\r\tnew\udc80 <script>"


def test_what_a_program_calls_its_things_is_neither_markup_nor_a_control_code(path: Path, capsys: Capture):
    finding = {**FINDING, "what": HOSTILE, "why": HOSTILE, "instead": HOSTILE, "where": HOSTILE + ":7"}
    records = datafiles.training(12, findings=(finding,), program=HOSTILE, argv=["x", HOSTILE], host=HOSTILE, torch=HOSTILE)
    records = datafiles.changed(records, "site", file=HOSTILE, module=HOSTILE, function=HOSTILE)
    records = datafiles.changed(records, "source", file=HOSTILE, text=f"\n\n\n\n{HOSTILE}\n{HOSTILE}")
    records = datafiles.changed(records, "end", error=HOSTILE)
    holder = {**next(one for one in records if one["type"] == "look")["holders"][0], "holder": HOSTILE}
    records = datafiles.changed(records, "look", holders=[holder])
    datafiles.write(path, [*records, {**NOTE, "text": HOSTILE, "error": HOSTILE, "id": HOSTILE}])
    for group in text.GROUPS:
        out = said(capsys, path, "--group-by", group)
        assert all(c.isprintable() for c in out.replace("\n", ""))
        assert r"[bold]x[/] :smile: \x1b[31mred\x1b]0;title\x07 \u202edrowssap" in out
        assert r"\udc80 <script>" in out


def test_no_console_takes_names_for_markup(path: Path):
    records = datafiles.changed(
        datafiles.training(12, findings=(FINDING,)), "site", file="[bold]:smile:[/]", module="[red]x[/]"
    )
    console = Console(file=io.StringIO(), width=200)  # one that would
    text.write([datafiles.run(path, records)], console)
    text.write([datafiles.run(path, records)], console, "module")
    assert "[bold]:smile:[/]:5" in console.file.getvalue()
    assert "[red]x[/]" in console.file.getvalue()


def test_a_list_that_has_grown_since_somebody_looked_is_one_holder(path: Path, capsys: Capture):
    records = datafiles.training(12)
    look = next(one for one in records if one["type"] == "look")
    holder = look["holders"][0]
    look["holders"] = [{**holder, "holder": "`losses[0..11]`", "name": "losses[0..11]"}]
    earlier = {**look, "final": False, "holders": [{**holder, "holder": "`losses[0..7]`", "name": "losses[0..7]"}]}
    datafiles.write(path, [*records[:-3], earlier, *records[-3:]])
    out = said(capsys, path)
    assert "`losses[0..11]`" in out
    assert "`losses[0..7]`" not in out


def test_text_that_is_fit_for_a_terminal_stays_as_it_is():
    assert safe("é 漢字 `x`[0]") == "é 漢字 `x`[0]"
    assert safe("a\x1b\x9b\x00\u2028b") == r"a\x1b\x9b\x00\u2028b"
    assert safe("a\nb") == r"a\nb"
    assert safe("a\nb\x07", keep="\n") == "a\nb\\x07"


def test_bars_show_the_highest_of_neighbours_that_share_one():
    assert spark([], 10) == ""
    assert spark([0, 0], 10) == "▁▁"
    assert spark([1, 2, 4, 8], 4, fancy=False) == ".:=#"
    assert spark([0, 9, 0, 0], 2) == "█▁"
    assert spark([-5, 2**62], 2) == "▁█"
    assert len(spark(range(10_000), 60)) == 60


# where it goes ----------------------------------------------------------------------------------------------------------------


def test_where_there_is_no_terminal_nothing_is_wrapped_coloured_or_cut(path: Path, capsys: Capture):
    long = "model." + ".".join(["layer"] * 60) + ".py"
    datafiles.write(path, datafiles.changed(datafiles.training(12, findings=(FINDING,)), "site", file=long))
    out = said(capsys, path)
    assert f"{long}:5" in out
    assert "\x1b" not in out
    assert "…" not in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    assert "─" not in out


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int):
    datafiles.write(path, datafiles.training(12, findings=(FINDING, COSTS)))
    monkeypatch.setenv("COLUMNS", str(width))
    out = said(capsys, path)
    assert max(map(len, out.splitlines())) <= width
    if width >= 80:
        assert "585.9 KiB" in out
    assert ("by backward" in out) is (width >= 100)


def test_a_terminal_gets_colours_and_under_no_color_none(path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    datafiles.write(path, datafiles.training(12, findings=(FINDING,)))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mGK101 bytes grow\x1b[0m" in said(capsys, path)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in said(capsys, path)


def test_a_stdout_that_knows_few_characters_gets_those(path: Path):
    datafiles.write(path, datafiles.training(12, findings=({**FINDING, "what": "`café` 漢"},)))
    done = program(path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"`caf\xe9` \u6f22" in done.stdout
    assert "  left  _.::-==+**##  585.9 KiB" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(path: Path):
    datafiles.write(path, datafiles.training(2000))
    command = [sys.executable, "-m", "graphkeep", "report", "--json", str(path)]
    # an unbuffered stdout takes a part of a write for all of it, and does not notice
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_reading_a_run_imports_neither_torch_nor_what_other_formats_need(path: Path):
    datafiles.write(path, datafiles.training(3))
    code = (
        "import sys; from graphkeep.cli import main\n"
        "for args in (['report', sys.argv[1], '--text'], ['rule', 'GK101'], ['compare', sys.argv[1], sys.argv[1]]):\n"
        "    assert main(args) == 0\n"
        "assert not {'torch', 'jinja2', 'numpy', 'webbrowser'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, stdout=subprocess.DEVNULL)


# ranks ------------------------------------------------------------------------------------------------------------------------


def launch(folder: Path, each: list[list[dict[str, Any]]]) -> list[Path]:
    of = {"world_size": len(each), "group": "launch/29500"}
    return [
        datafiles.write(folder / f"train.py.77.rank{rank}.graphkeep", datafiles.changed(records, "header", rank=rank, **of))
        for rank, records in enumerate(each)
    ]


def test_what_all_ranks_have_is_said_once(tmp_path: Path, capsys: Capture):
    paths = launch(tmp_path, [datafiles.training(12, findings=(FINDING,))] * 4)
    out = said(capsys, paths[2])
    assert "train.py --lr 0.1: 4 ranks, 12 steps" in out
    assert out.count(FINDING["why"]) == 2  # in the verdict, and whole
    assert "(train.py:7), on all 4 ranks" in out
    assert "differ" not in out
    assert out.count("who holds a graph") == 1


def test_a_rank_that_differs_is_named(tmp_path: Path, capsys: Capture):
    usual = datafiles.training(12, leak=0)
    paths = launch(tmp_path, [usual, usual, datafiles.training(9, findings=(FINDING,)), usual])
    out = said(capsys, *paths)
    assert out.startswith("verdict: GK101 bytes grow")
    assert "(train.py:7), on rank 2 of 4" in out
    assert "rank 2 differs: 9 steps; the others: 12 steps" in out
    assert "rank 2 differs: findings: GK101; the others: findings: none" in out
    assert "rank 2 differs: 537.1 KiB at most, the median is 97.7 KiB" in out
    assert next(line for line in out.splitlines() if line.startswith("rank ")).split()[:3] == ["rank", "steps", "most"]
    # the tables of one of those that are alike, and of the one that is not
    assert [line for line in out.splitlines() if line in ("rank 0", "rank 1", "rank 2", "rank 3")] == ["rank 0", "rank 2"]


def test_a_rank_without_a_readable_file_is_named(tmp_path: Path, capsys: Capture):
    paths = launch(tmp_path, [datafiles.training(12, findings=(FINDING,))] * 4)
    paths[1].write_bytes(b"")
    paths[3].unlink()
    out = said(capsys, paths[0])
    assert "no file that can be read of ranks 1, 3" in out
    assert "4 ranks, 12 steps" in out


def test_runs_that_do_not_belong_together_are_reported_one_after_the_other(tmp_path: Path, capsys: Capture):
    a = datafiles.write(tmp_path / "a", datafiles.training(3, program="a.py"))
    b = datafiles.write(tmp_path / "b", datafiles.training(3, program="b.py", findings=(FINDING,)))
    out = said(capsys, a, b)
    assert out.count("verdict:") == 2
    assert out.index("a.py") < out.index("b.py")
    assert "rank" not in out


# JSON, trace, page ------------------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_the_keys_of_the_data_file(path: Path, capsys: Capture):
    records = datafiles.training(3, findings=(COSTS, FINDING))
    datafiles.write(path, records)
    whole = json.loads(said(capsys, path, "--json"))
    assert (whole["format"], whole["schema_version"], len(whole["runs"])) == ("graphkeep", 1, 1)
    run = whole["runs"][0]
    assert run["header"] == records[0]
    assert run["findings"] == [FINDING, COSTS]
    for kind, key in (
        ("step", "steps"),
        ("sample", "samples"),
        ("life", "lives"),
        ("backward", "backwards"),
        ("look", "looks"),
    ):
        written = [{k: v for k, v in record.items() if k != "type"} for record in records if record["type"] == kind]
        assert run[key] == written
    assert run["end"] == {"how": "finished", "error": None, "s": 1.5}
    assert run["sites"][0] == {
        "id": 1, "file": "train.py", "line": 5, "function": "train", "module": "Linear", "op": "addmm", "tensors": 24,
        "bytes": 300_000, "live_tensors": 0, "live_bytes": 0, "by_backward": 24, "by_count": 0,
    }  # fmt: skip
    datafiles.write(path, datafiles.without(records, "end"))
    assert json.loads(said(capsys, path, "--json"))["runs"][0]["end"] is None


def test_a_trace_has_a_process_a_rank_with_steps_backwards_graphs_and_bytes(tmp_path: Path, capsys: Capture):
    paths = launch(tmp_path, [datafiles.training(3), datafiles.training(3, started="2026-11-30T12:00:02+00:00")])
    out = tmp_path / "trace.json"
    assert main(["report", str(paths[0]), "--trace", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "https://ui.perfetto.dev" in printed.err
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0: train.py", "rank 1: train.py"]
    steps = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    second = 1_000_000
    assert steps[:3] == [(0, "step 0", 0, second / 2), (0, "step 1", second / 2, second / 2), (0, "step 2", second, second / 2)]
    assert steps[3] == (1, "step 0", 2 * second, second / 2)  # it started two seconds later
    calls = [event["ts"] for event in events if event["ph"] == "i" and event["pid"] == 0]
    assert calls == [0.2 * second, 0.7 * second, 1.2 * second]
    begun, ended = ([e for e in events if e["ph"] == ph] for ph in "be")
    assert [event["id"] for event in begun] == [event["id"] for event in ended]
    assert len({event["id"] for event in begun}) == 6
    assert all(a["ts"] < b["ts"] for a, b in zip(begun, ended, strict=True))
    assert begun[0]["args"] == {"freed by": "backward 1", "at": "train.py:8", "bytes": 100_000, "tensors": 8}
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert held == [150_000, 50_000, 200_000, 100_000, 250_000, 150_000]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "write", lambda runs, out: Path(out).write_text(f"{len(runs)} runs"))


@pytest.mark.usefixtures("page")
def test_a_page_is_written_and_the_next_step_is_said(path: Path, tmp_path: Path, capsys: Capture):
    datafiles.write(path, datafiles.training(3))
    assert main(["report", str(path), "--html", str(tmp_path / "out.html")]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"wrote {tmp_path / 'out.html'}: open it in a browser\n"
    assert (tmp_path / "out.html").read_text() == "1 runs"


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("opens", [True, False])
def test_a_browser_is_opened_or_the_address_is_said(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, opens: bool
):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or opens)
    datafiles.write(path, datafiles.training(3))
    assert main(["report", str(path), "--html", str(tmp_path / "a b.html"), "--open"]) == 0
    address = tmp_path.as_uri() + "/a%20b.html"
    assert opened == [address]
    assert (f"no browser could be opened here; the page is {address}" in capsys.readouterr().err) is not opens


@pytest.mark.parametrize("kind", ["--html", "--trace"])
def test_a_place_that_cannot_be_written_is_an_error(path: Path, tmp_path: Path, capsys: Capture, kind: str):
    datafiles.write(path, datafiles.training(3))
    for out in (tmp_path / "no" / "folder", tmp_path):
        assert main(["report", str(path), kind, str(out)]) == 1
        assert f"the report cannot be written: {'No such' if out.name == 'folder' else 'Is a'}" in capsys.readouterr().err
    before = path.read_bytes()
    assert main(["report", str(path), kind, str(path)]) == 1
    assert "would overwrite what it is made of" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_formats_exclude_each_other_and_open_needs_a_page(path: Path, capsys: Capture):
    with pytest.raises(SystemExit) as leaving:
        main(["report", str(path), "--json", "--text"])
    assert leaving.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
    assert main(["report", str(path), "--open"]) == 1
    assert "--html OUT --open" in capsys.readouterr().err


def test_a_file_that_is_none_is_an_error_on_stderr(tmp_path: Path, capsys: Capture):
    foreign = tmp_path / "foreign"
    foreign.write_text("hello")
    for file in (foreign, tmp_path / "none"):
        assert main(["report", str(file)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("graphkeep report: ")
        assert str(file) in printed.err
