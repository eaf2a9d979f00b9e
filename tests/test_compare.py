"""`graphkeep compare`: what grew, where, what is new; and the exit code that a CI job asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datafiles
import pytest
from datafiles import COSTS, FINDING, NOTE, Record

from graphkeep.cli import main
from graphkeep.report._figures import growth, saved_per_step
from graphkeep.report.compare import FLOOR, Comparison, compare

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def compared(folder: Path, a: list[Record], b: list[Record], **how: Any) -> Comparison:
    return compare([datafiles.run(folder / "a", a)], [datafiles.run(folder / "b", b)], **how)


def grown(comparison: Comparison) -> list[str]:
    return [figure.name for figure in comparison.figures if figure.grew]


def moved(records: list[Record], lines: int) -> list[Record]:
    """The same program with so many lines more at its top."""
    records = datafiles.changed(records, "source", text="# one more\n" * lines + datafiles.SOURCE)
    return [{**one, "line": one["line"] + lines} if one["type"] == "site" else one for one in records]


def test_a_run_and_itself_differ_in_nothing(tmp_path: Path):
    comparison = compared(tmp_path, datafiles.training(12, findings=(FINDING,)), datafiles.training(12, findings=(FINDING,)))
    assert not comparison.grew
    assert (comparison.lines, comparison.found, comparison.gone, comparison.notes) == ([], [], [], [])


def test_a_leak_that_is_new_grows_in_every_figure(tmp_path: Path):
    comparison = compared(tmp_path, datafiles.training(12, leak=0), datafiles.training(12))
    assert grown(comparison) == ["most held", "left at the end", "saved in a step", "more left with each step"]
    figures = {figure.name: (figure.a, figure.b) for figure in comparison.figures}
    assert figures == {
        "most held": (100_000, 700_000),
        "left at the end": (0, 600_000),
        "saved in a step": (100_000, 150_000),
        "more left with each step": (0, 50_000),
    }
    assert [(line.name, line.a, line.b, line.grew, line.code) for line in comparison.lines] == [
        ("train.py:6", None, 50_000, True, "loss = out(x)")
    ]


def test_a_leak_that_has_gone_is_no_growth(tmp_path: Path):
    comparison = compared(tmp_path, datafiles.training(12, findings=(FINDING,)), datafiles.training(12, leak=0))
    assert not comparison.grew
    assert [finding.id for finding in comparison.gone] == ["GK101"]
    assert [line.grew for line in comparison.lines] == [False]


@pytest.mark.parametrize(("share", "grew"), [(1.04, False), (1.06, True)])
def test_less_than_the_tolerance_is_noise(tmp_path: Path, share: float, grew: bool):
    a = datafiles.changed(datafiles.training(12, leak=0), "step", bytes=1_000_000)
    b = datafiles.changed(datafiles.training(12, leak=0), "step", bytes=int(share * 1_000_000))
    assert compared(tmp_path, a, b).grew is grew
    assert not compared(tmp_path, a, b, tolerance=0.5).grew
    assert compared(tmp_path, a, b, tolerance=0.0).grew


def test_a_few_bytes_are_noise_whatever_share_they_are(tmp_path: Path):
    a = datafiles.changed(datafiles.training(12, leak=0), "step", bytes=10)
    for size, grew in ((10 + FLOOR, False), (11 + FLOOR, True)):
        b = datafiles.changed(datafiles.training(12, leak=0), "step", bytes=size)
        assert compared(tmp_path, a, b).grew is grew


def test_a_little_more_left_with_each_step_is_much_in_the_end(tmp_path: Path):
    comparison = compared(tmp_path, datafiles.training(400, leak=0), datafiles.training(400, leak=300))
    assert "more left with each step" in grown(comparison)
    assert "saved in a step" not in grown(comparison)


def test_the_median_step_counts_and_a_merged_record_as_so_many_steps(tmp_path: Path):
    records = datafiles.training(5, leak=0)
    sizes = iter((900, 7, 5 * 4, 3, 1000))
    counts = iter((1, 1, 4, 1, 1))
    for record in records:
        if record["type"] == "step":
            record.update(bytes=next(sizes), count=next(counts))
    assert saved_per_step(datafiles.run(tmp_path / "a", records)) == 5


def test_a_state_that_is_carried_over_some_steps_is_no_growth(tmp_path: Path):
    records = datafiles.training(64, leak=0)
    for record in records:
        if record["type"] == "step":
            record["left"] = 10_000 * (record["first"] % 8)
    assert growth(datafiles.run(tmp_path / "a", records)) == 0
    assert growth(datafiles.run(tmp_path / "b", datafiles.training(64, leak=700))) == 700
    assert growth(datafiles.run(tmp_path / "c", datafiles.training(7, leak=700))) == 0


def test_lines_match_by_their_text_though_they_have_moved(tmp_path: Path):
    a, b = datafiles.training(12, findings=(FINDING,)), datafiles.training(12, findings=({**FINDING, "where": "train.py:10"},))
    comparison = compared(tmp_path, a, moved(b, 3))
    assert (comparison.lines, comparison.found, comparison.gone) == ([], [], [])


def test_lines_match_by_their_place_though_they_were_rewritten(tmp_path: Path):
    rewritten = datafiles.SOURCE.replace("out(x)", "head(x)").replace("losses.append(loss)", "kept.append(loss)")
    a = datafiles.training(12, findings=(FINDING,))
    comparison = compared(tmp_path, a, datafiles.changed(a, "source", text=rewritten))
    assert (comparison.lines, comparison.found, comparison.gone) == ([], [], [])


def test_lines_match_in_a_checkout_that_is_another_folder(tmp_path: Path):
    def at(folder: str) -> list[Record]:
        records = datafiles.training(12, findings=({**FINDING, "where": f"{folder}/train.py:7"},), cwd=folder)
        return datafiles.changed(datafiles.without(records, "source"), "site", file=f"{folder}/train.py")

    comparison = compared(tmp_path, at("/builds/1"), at("/builds/2"))
    assert (comparison.lines, comparison.found, comparison.gone) == ([], [], [])


def test_without_sources_lines_match_by_their_numbers(tmp_path: Path):
    a = datafiles.without(datafiles.training(12), "source")
    assert compared(tmp_path, a, a).lines == []
    names = [line.name for line in compared(tmp_path, a, datafiles.without(moved(a, 3), "source")).lines]
    assert sorted(names) == ["train.py:5", "train.py:6", "train.py:8", "train.py:9"]


def test_a_line_that_grew_while_another_shrank_is_shown_and_decides_nothing(tmp_path: Path):
    a, b = datafiles.training(12, leak=0), datafiles.training(12, leak=0)
    totals = next(record for record in b if record["type"] == "totals")
    totals["sites"] = [[1, "addmm", 96, 600_000, 0, 0, 96, 0], [2, None, 24, 600_000, 0, 0, 24, 0]]
    comparison = compared(tmp_path, a, b)
    assert not comparison.grew
    assert [(line.name, line.a, line.b, line.grew) for line in comparison.lines] == [
        ("train.py:5", 100_000, 50_000, False), ("train.py:6", None, 50_000, True),
    ]  # fmt: skip


def test_findings_and_failed_backwards_that_are_new_count(tmp_path: Path):
    a = datafiles.training(12, leak=0, findings=(FINDING,))
    other = {**FINDING, "where": "train.py:5"}
    comparison = compared(tmp_path, a, [*datafiles.training(12, leak=0, findings=(other, COSTS)), NOTE])
    assert comparison.grew
    assert grown(comparison) == []
    assert [finding.id for finding in comparison.found] == ["GK101", "GK301", "GK201"]
    assert [finding.where for finding in comparison.gone] == ["train.py:7"]


def test_runs_without_steps_are_compared_as_a_whole(tmp_path: Path):
    def whole(leak: int) -> list[Record]:
        return datafiles.without(datafiles.training(12, leak=leak), "step")

    comparison = compared(tmp_path, whole(0), whole(50_000))
    assert [figure.name for figure in comparison.figures] == ["most held", "left at the end", "saved in all"]
    assert [(figure.a, figure.b) for figure in comparison.figures][2] == (1_200_000, 1_800_000)
    assert [(line.a, line.b) for line in comparison.lines] == [(None, 600_000)]
    assert "A has no steps: sums of the whole runs are compared" in comparison.notes


def test_the_largest_of_all_ranks_counts(tmp_path: Path):
    def ranks(name: str, leaks: tuple[int, ...]) -> list[Any]:
        more = {"world_size": len(leaks), "group": name}
        return [
            datafiles.run(tmp_path / f"{name}{rank}", datafiles.training(12, leak=leak, rank=rank, **more))
            for rank, leak in enumerate(leaks)
        ]

    a, b = ranks("a", (0, 50_000, 0)), ranks("b", (50_000, 0, 60_000))
    comparison = compare(a, b)
    assert [(figure.a, figure.b) for figure in comparison.figures][1] == (600_000, 720_000)
    assert [(line.name, line.a, line.b) for line in comparison.lines] == [("train.py:6", 50_000, 60_000)]
    assert not compare(b, b).grew
    assert comparison.notes == []
    assert "B: no file that can be read of rank 1" in compare(a, [b[0], b[2]]).notes


def test_what_makes_a_comparison_doubtful_is_said(tmp_path: Path):
    a = datafiles.training(12, torch="2.6.0")
    comparison = compared(tmp_path, a, datafiles.without(datafiles.training(20, program="eval.py"), "end"))
    assert comparison.notes == [
        "program differs: train.py in A, eval.py in B", "torch differs: 2.6.0 in A, 2.13.0 in B",
        "B was cut off: no end was written", "A ran 12 steps, B 20",
    ]  # fmt: skip


# the command ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    a = datafiles.write(tmp_path / "a.graphkeep", datafiles.training(12, leak=0))
    b = datafiles.write(tmp_path / "b.graphkeep", datafiles.training(12, findings=(FINDING,)))
    return str(a), str(b)


def test_the_exit_code_is_0_if_nothing_grew_3_if_something_did_and_1_after_an_error(files: tuple[str, str], capsys: Capture):
    a, b = files
    assert main(["compare", a, a]) == 0
    assert capsys.readouterr().out.startswith("nothing grew\n")
    assert main(["compare", a, b]) == 3
    assert main(["compare", b, a]) == 0
    assert main(["compare", a, b + "x"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_first_line_says_what_grew_and_the_tables_where(files: tuple[str, str], capsys: Capture):
    main(["compare", *files])
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("grew: most held +585.9 KiB (+600%); left at the end +585.9 KiB; saved in a step +48.8 KiB (+50%); ")
    assert "new: GK101" in out.splitlines()[0]
    assert ["left", "at", "the", "end", "0", "B", "585.9", "KiB", "+585.9", "KiB"] in lines
    assert ["train.py:6", "-", "48.8", "KiB", "+48.8", "KiB", "loss", "=", "out(x)"] in lines
    assert "found in B and not in A:\nGK101 bytes grow: `losses`" in out
    assert f"  write instead: {FINDING['instead']}" in out


def test_json_has_all_of_it(files: tuple[str, str], capsys: Capture):
    assert main(["compare", *files, "--json"]) == 3
    whole = json.loads(capsys.readouterr().out)
    assert (whole["schema_version"], whole["a"], whole["b"], whole["grew"]) == (1, *files, True)
    assert whole["figures"][1] == {"name": "left at the end", "a": 0, "b": 600_000, "grew": True, "code": ""}
    assert whole["lines"][0]["code"] == "loss = out(x)"
    assert whole["found"] == [FINDING]
    assert (whole["gone"], whole["notes"]) == ([], [])


def test_names_of_the_program_s_are_neither_markup_nor_control_codes(tmp_path: Path, capsys: Capture):
    hostile = "[bold]x[/]\x1b[31m"
    finding = {**FINDING, "what": hostile}
    a = datafiles.write(tmp_path / "a", datafiles.training(12, leak=0))
    records = datafiles.training(12, findings=(finding,), program=hostile)
    b = datafiles.write(tmp_path / "b", datafiles.changed(records, "source", text=f"\n\n\n\n{hostile}\n{hostile}"))
    assert main(["compare", str(a), str(b)]) == 3
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(r"[bold]x[/]\x1b[31m") >= 3


@pytest.mark.parametrize("share", ["-1", "nan", "inf", "much"])
def test_a_tolerance_that_makes_no_sense_is_refused(files: tuple[str, str], share: str, capsys: Capture):
    with pytest.raises(SystemExit) as leaving:
        main(["compare", *files, "--tolerance", share])
    assert leaving.value.code == 2
    assert "--tolerance" in capsys.readouterr().err
