"""Reading data files: whole, cut off, damaged, foreign, hostile, growing, and those of several ranks."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import datafiles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import graphkeep as gk
from graphkeep._watch._datafile import DataFile
from graphkeep.report import _lines, live, text, trace
from graphkeep.report import json as as_json
from graphkeep.report._follow import Follower
from graphkeep.report._read import read, read_all, siblings
from graphkeep.report._run import Run
from graphkeep.report.compare import compare


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py.4711.graphkeep"


def show(run: Run, out: Path) -> None:
    """Everything that can be made of a run; no value in it may be one that a report stumbles over."""
    console = Console(file=io.StringIO(), width=200)
    for group in text.GROUPS:
        text.write([run], console, group)
    console.print(live.frame(run, console, 0))
    json.loads(as_json.dumps([run]), parse_constant=pytest.fail)
    trace.write([run], out)
    json.loads(out.read_text(), parse_constant=pytest.fail)
    compare([run], [run])


def same(a: Run, b: Run) -> bool:
    return as_json.as_dict(a) | {"path": ""} == as_json.as_dict(b) | {"path": ""}


# sound files ------------------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(path: Path):
    run = datafiles.run(path, datafiles.training(3, findings=(datafiles.FINDING,)))
    assert (run.how, run.unread, run.steps_done, run.peak, run.seconds) == ("finished", 0, 3, 250_000, 1.5)
    assert [finding.id for finding in run.findings] == ["GK101"]
    assert run.sites[1].where == "train.py:5"
    assert (run.sites[1].op, run.sites[1].bytes) == ("addmm", 300_000)
    assert run.sources == {"train.py": datafiles.SOURCE}
    assert [len(kind) for kind in (run.samples, run.lives, run.backwards, run.optimizer_steps, run.mutations)] == [
        3,
        3,
        3,
        3,
        1,
    ]


def test_types_and_keys_that_are_not_known_are_skipped(path: Path):
    records = datafiles.changed(datafiles.training(3), "step", colour="red")
    plain = datafiles.run(path.with_name("plain"), datafiles.training(3))
    run = datafiles.run(path, [*records[:5], {"type": "weather", "rain": True}, {"no": "type"}, *records[5:]])
    assert run.unread == 0
    assert same(run, plain)


def test_steps_that_are_counted_anew_make_what_was_before_no_step(path: Path):
    records = datafiles.training(3)
    run = datafiles.run(path, [*records[:-1], {"type": "steps_begin", "at": 30, "boundary": "own"}])
    assert (run.boundary, run.begun_at, run.steps, run.samples, run.looks) == ("own", 30, [], [], [])


def test_a_backward_that_is_used_later_is_marked(path: Path):
    run = datafiles.run(path, [*datafiles.training(3), {"type": "reused", "number": 2}, {"type": "reused", "number": 99}])
    assert [call.reused for call in run.backwards] == [False, True, False]


def test_a_watch_that_was_started_again_adds_to_its_file(path: Path):
    first, second = datafiles.training(3), datafiles.training(5)
    datafiles.write(path, first)
    more = DataFile(path.with_name("more"))
    for record in [second[0], *second[-10:-1]]:
        more.write(record)
    more.close()
    path.write_bytes(path.read_bytes() + path.with_name("more").read_bytes())
    run = read(path)
    assert (run.unread, run.steps_done) == (0, 5)
    assert run.how is None  # the second part was cut off


# cut off and damaged ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_off_anywhere_gives_what_had_been_written(path: Path):
    datafiles.write(path, datafiles.training(6), flushed=True)
    data, whole = path.read_bytes(), read(path)
    cut = path.with_name("cut")
    before = -1
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        try:
            run = read(cut)
        except gk.DataFileError:
            assert before == -1, "a longer file says less"
            continue
        assert run.steps == whole.steps[: len(run.steps)]
        assert run.lives == whole.lives[: len(run.lives)]
        assert run.unread == 0, "a line that was being written is no damage"
        now = sum(map(len, (run.steps, run.samples, run.lives, run.sites, run.looks)))
        assert now >= before
        before = now
    assert before > 20
    assert length > 500


def test_a_flipped_bit_is_never_anything_but_less_data_or_a_clear_error(path: Path, tmp_path: Path):
    datafiles.write(path, datafiles.training(6, findings=(datafiles.FINDING,)), flushed=True)
    data, whole = path.read_bytes(), read(path)
    damaged = path.with_name("damaged")
    runs = 0
    for seed in range(300):
        chance = random.Random(seed)
        flipped = bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 5))):
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged.write_bytes(flipped)
        try:
            run = read(damaged)
        except gk.DataFileError:
            continue
        # some bits of gzip's own head mean nothing
        assert run.unread > 0 or run.how is None or same(run, whole), f"seed {seed}: nothing says that the file is damaged"
        runs += 1
        if seed % 10 == 0:
            show(run, tmp_path / "out")
    assert runs > 150


def test_what_lies_before_the_damage_is_read(path: Path):
    datafiles.write(path, datafiles.training(40), flushed=True)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = b"\xff" * 64
    path.write_bytes(data)
    run = read(path)
    assert 10 < len(run.steps) < 30
    assert (run.unread, run.how) == (1, None)


def test_a_wrong_checksum_is_damage_and_rubbish_behind_the_end_is_too(path: Path):
    datafiles.write(path, datafiles.training(3))
    data = path.read_bytes()
    path.write_bytes(data[:-8] + b"\0" * 8)
    assert (read(path).unread, read(path).how) == (1, "finished")
    path.write_bytes(data + b"rubbish")
    assert (read(path).unread, read(path).how) == (1, "finished")


# foreign, newer, too large ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n", b"hello", b"{}", bytes(range(256)), b"\x1f\x8b", b"\x80\x04\x95pickle", b"PK\x03\x04" + b"\0" * 100,
        gzip.compress(b""), gzip.compress(b"hello\n"), gzip.compress(b"\n\n\n"), gzip.compress(b"[1, 2]\n"),
        gzip.compress(b'{"type": "header", "format": "somebody else\'s", "schema_version": 1}\n'),
        gzip.compress(b'{"type": "step", "format": "graphkeep"}\n'), gzip.compress(b'{"traceEvents": []}'),
        gzip.compress(json.dumps(datafiles.header()).encode()),  # without an end: it was being written
        json.dumps(datafiles.header()).encode() + b"\n",  # no gzip
    ],
    ids=map(str, range(17)),  # not their bytes: gzip writes the time, and two processes have to agree
)  # fmt: skip
def test_a_foreign_file_is_an_error_that_says_what_to_give(path: Path, content: bytes):
    path.write_bytes(content)
    with pytest.raises(gk.DataFileError) as raised:
        read(path)
    assert "no data file of graphkeep's" in str(raised.value)
    assert str(path) in str(raised.value)
    assert "graphkeep run" in str(raised.value)


def test_a_folder_and_a_missing_file_are_errors(tmp_path: Path):
    with pytest.raises(gk.DataFileError, match="cannot be read: Is a directory"):
        read(tmp_path)
    with pytest.raises(gk.DataFileError, match="cannot be read: No such file"):
        read(tmp_path / "none")


def test_a_newer_schema_is_an_error_that_names_the_writer(path: Path):
    with pytest.raises(gk.DataFileError, match=r"schema_version is 2, this graphkeep reads up to 1") as raised:
        datafiles.run(path, datafiles.changed(datafiles.training(2), "header", schema_version=2, graphkeep="9.0.0"))
    assert "'9.0.0'" in str(raised.value)


@pytest.mark.parametrize("version", [None, True, "1", 1.0, [], 10**30])
def test_a_version_that_is_no_number_is_foreign(path: Path, version: Any):
    with pytest.raises(gk.DataFileError, match="no data file"):
        datafiles.run(path, datafiles.changed(datafiles.training(2), "header", schema_version=version))


def test_a_header_with_a_number_that_no_json_has_is_damaged(path: Path):
    path.write_bytes(gzip.compress(json.dumps(datafiles.header(rate=0.5)).replace("0.5", "1e999").encode() + b"\n"))
    with pytest.raises(gk.DataFileError, match="damaged from its first line on"):
        read(path)


def test_a_small_file_that_unpacks_to_any_size_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch):
    head = json.dumps(datafiles.header()).encode() + b"\n"
    monkeypatch.setattr(_lines, "_MOST", 1 << 20)
    path.write_bytes(gzip.compress(head + b"{}\n" * (1 << 19)))
    assert path.stat().st_size < 1 << 16
    with pytest.raises(gk.DataFileError, match="unpacks to more than"):
        read(path)
    monkeypatch.undo()
    monkeypatch.setattr(_lines, "_LONGEST", 2 << 20)
    path.write_bytes(gzip.compress(head + b" " * (4 << 20)))
    with pytest.raises(gk.DataFileError, match="a line of more than"):
        read(path)


def test_what_zlib_keeps_back_for_the_next_call_is_not_lost(path: Path):
    # the text ends right where the reader's buffer does
    head = json.dumps(datafiles.header()).encode() + b"\n"
    end = json.dumps({"type": "end", "how": "finished", "error": None, "s": 1.0}).encode() + b"\n"
    for length in ((1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2 << 20):
        path.write_bytes(gzip.compress(head + b" " * (length - len(head) - len(end) - 1) + b"\n" + end))
        assert read(path).how == "finished"


# values -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "3", "null", '"text"', '{"type": "end", "how": "finished", "error": null, "s": NaN}',
        '{"type": "end", "how": "finished", "error": null, "s": Infinity}',
        '{"type": "end", "how": "finished", "error": null, "s": 1e999}',
        '{"type": "end", "how": "finished", "error": null, "s": ' + "9" * 400 + "}",
        '{"type": "end", "how": "finished", "error": null, "s": ' + "9" * 5000 + "}",
        '{"type": "end", "how": 1, "error": null, "s": 1}', '{"type": "end"}', '{"type": ["end"]}',
        '{"type": "steps_begin", "at": ' + str(1 << 64) + ', "boundary": "own"}',
        '{"type": "step", "first": 0, "count": 0, "at": 0, "s": 0, "tensors": 0, "bytes": 0, "peak": 0, "left": 0, '
        '"backwards": 0}',
        '{"type": "note", "id": "GK201", "text": " ", "error": "RuntimeError"}',
        '{"type": "look", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"type": "totals", "sites": [[1]], "deaths": [], "calls": [], "peak": 5}',
        '{"type": "totals", "sites": "abc", "deaths": {}, "calls": [], "peak": 5}',
        '{"type": "sample", "step": 0, "at": 0, "s": 0, "bytes": 0, "sites": [1]}',
        b"\xed\xa0\x80".decode("latin-1"),
    ],
)  # fmt: skip
def test_a_line_that_is_not_as_the_format_says_is_counted_and_left_out(path: Path, line: str):
    lines = [json.dumps(record) for record in datafiles.training(3)]
    path.write_bytes(gzip.compress("\n".join([*lines, line, ""]).encode("latin-1", "replace")))
    run = read(path)
    assert run.unread == 1
    run.unread = 0
    assert same(run, datafiles.run(path.with_name("plain"), datafiles.training(3)))


def test_half_a_surrogate_pair_can_be_shown(path: Path, tmp_path: Path):
    # a file's name that is no text comes like this
    show(datafiles.run(path, datafiles.changed(datafiles.training(3), "site", file="\udc80.py")), tmp_path / "out")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**62, -(2**62), 2**80, 1e308, -1.5]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
KINDS = sorted({record["type"] for record in datafiles.training(2)} | {"note"})


@settings(max_examples=400)
@given(st.sampled_from(KINDS), st.data(), ANYTHING)
def test_any_value_at_any_key_is_read_or_left_out_and_can_be_shown(tmp_path_factory, kind: str, data: Any, value: Any):
    folder = tmp_path_factory.getbasetemp()
    records = [*datafiles.training(9, findings=(datafiles.FINDING, datafiles.COSTS)), datafiles.NOTE]
    record = data.draw(st.sampled_from([one for one in records if one["type"] == kind]))
    where = record
    key = data.draw(st.sampled_from(sorted(record)))
    while isinstance(where[key], list | dict) and where[key] and data.draw(st.booleans()):  # deeper
        where = where[key]
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
    before, where[key] = where[key], value
    try:
        run = datafiles.run(folder / "any", records)
    except gk.DataFileError:
        assert kind == "header"
    else:
        assert run.unread in (0, 1)
        show(run, folder / "out")
    finally:
        where[key] = before  # the findings are shared


# growing ----------------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_read_byte_by_byte_as_it_grows_is_the_same_run(path: Path):
    data = datafiles.write(path.with_name("whole"), datafiles.training(3), flushed=True).read_bytes()
    follower = Follower(path)
    assert not follower.poll()  # it does not exist yet
    with path.open("wb", buffering=0) as file:
        for i in range(len(data)):
            file.write(data[i : i + 1])
            assert follower.poll()
            assert not follower.poll()
    follower.close()
    assert follower.run is not None
    assert same(follower.run, read(path))


def test_a_file_that_another_run_writes_anew_is_an_error(path: Path):
    follower = Follower(datafiles.write(path, datafiles.training(3)))
    follower.poll()
    path.write_bytes(b"")
    with pytest.raises(gk.DataFileError, match="another run writes it"):
        follower.poll()
    follower.close()


def test_a_foreign_file_cannot_be_followed(path: Path):
    path.write_bytes(b"hello")
    follower = Follower(path)
    with pytest.raises(gk.DataFileError, match="no data file"):
        follower.poll()
    follower.close()


# ranks ------------------------------------------------------------------------------------------------------------------------


def ranks(folder: Path, number: int, **more: Any) -> list[Path]:
    of = {"world_size": number, "group": "launch/29500", **more}
    return [
        datafiles.write(folder / f"train.py.77.rank{rank}.graphkeep", datafiles.training(3, rank=rank, **of))
        for rank in range(number)
    ]


def test_the_file_of_one_rank_brings_those_of_the_others(tmp_path: Path):
    paths = ranks(tmp_path, 12)
    assert [run.rank for run in read_all([paths[5]])] == list(range(12))
    assert [run.rank for run in read_all(paths)] == list(range(12))
    assert len(siblings(paths[0])) == 12


def test_files_of_another_launch_or_program_are_not_brought(tmp_path: Path):
    paths = ranks(tmp_path, 3)
    datafiles.write(paths[2], datafiles.training(3, rank=2, world_size=3, group="another/29500"))
    datafiles.write(tmp_path / "other.py.77.rank7.graphkeep", datafiles.training(3, rank=7, world_size=3, group="launch/29500"))
    datafiles.write(tmp_path / "train.py.77.rankx.graphkeep", datafiles.training(3, rank=8, world_size=3, group="launch/29500"))
    assert [run.rank for run in read_all([paths[0]])] == [0, 1]


def test_a_rank_whose_file_cannot_be_read_is_left_out_but_not_if_it_was_asked_for(tmp_path: Path):
    paths = ranks(tmp_path, 3)
    paths[1].write_bytes(b"")  # killed before its first line
    assert [run.rank for run in read_all([paths[0]])] == [0, 2]
    with pytest.raises(gk.DataFileError):
        read_all([paths[1]])


def test_a_folder_that_cannot_be_listed_has_no_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = ranks(tmp_path, 3)

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert [run.rank for run in read_all([paths[0]])] == [0]


def test_a_process_that_ran_alone_brings_nobody(tmp_path: Path):
    paths = ranks(tmp_path, 3)
    datafiles.write(paths[0], datafiles.training(3))
    assert len(read_all([paths[0]])) == 1


def test_every_sync_flush_is_a_place_that_can_be_read_up_to(path: Path):
    file = DataFile(path)
    file.write(datafiles.header())
    file.flush()
    assert read(path).how is None
    file.write({"type": "end", "how": "finished", "error": None, "s": 1.0})
    assert read(path).how is None
    file.close()
    assert read(path).how == "finished"
    assert zlib.decompress(path.read_bytes(), wbits=31).count(b"\n") == 2
