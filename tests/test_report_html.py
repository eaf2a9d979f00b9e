"""The page of a run: one file that needs nothing else, in which everything from a data file is text."""

import base64
import gzip
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from browser import sample_run

from graphkeep.report._page import page
from graphkeep.report._page_ranks import ranks
from graphkeep.report._page_source import Sources
from graphkeep.report._page_time import Axis, alive, bands, thin
from graphkeep.report._read import read, read_all
from graphkeep.report._run import Holder, Life, Look, Run, Sample, Site, Step
from graphkeep.report.html import _ASSETS, render, render_fragment, write

MOST = 2_000_000  # bytes


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[str, str]] = []  # (type, text)
        self.styles: list[str] = []
        self.text = ""
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._in = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type", ""), ""))
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._in == "style":
            self.styles[-1] += data
        else:
            self.text += data

    def data(self) -> list[dict]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]

    def code(self) -> list[str]:
        return [text for kind, text in self.scripts if not kind]


def header(**more) -> dict:
    return {"type": "header", "program": "train.py", "argv": ["train.py"], "graphkeep": "0.1.0", **more}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read(sample_run.write(tmp_path / "train.py.1.graphkeep", 12))


@pytest.fixture
def hostile(tmp_path: Path) -> Run:
    return read(sample_run.write(tmp_path / "train.py.1.graphkeep", 12, hostile=True, raised=True))


def long_run(steps: int, sites: int) -> Run:
    """As the writer leaves it: every step has two samples, each of which names every site."""
    made = Run(Path("train.py.1.graphkeep"), header())
    text = "\n".join(
        f"        x = self.layer_with_a_rather_long_name_{i}(x, mask)  # and a comment of some length" for i in range(6_000)
    )
    for file in range(10):
        made.sources[f"/home/me/project/package/module_{file}.py"] = text
    for i in range(sites):
        where = f"/home/me/project/package/module_{i % 10}.py"
        made.sites[i] = Site(
            i, where, 10 * i + 1, f"forward_of_some_function_{i}", f"ModuleWithALongName{i % 90}", "addmm", 9, 2 << 30
        )
    full, empty = [(i, 3_000_000_000 + i) for i in range(sites)], [(0, 1_000_000)]
    for k in range(steps):
        made.samples.append(Sample(k, 90 * k + 90, k / 7, sum(size for _, size in full), full))
        made.samples.append(Sample(k, 90 * k + 90, k / 7, 1_000_000, empty))
        made.lives += [Life(i, i + 1, 90 * k, 90 * k + 80, 90 * k + 90, k, 80, 3_000_000_000, k + 1) for i in range(3)]
        made.steps.append(Step(k, 1, 90 * k, k / 7, 90, 10_000, 3_000_000_000 * sites, 1_000_000, 1))
    name = "losses"
    parts = [(k, 7, 50_000) for k in range(steps)]
    holders = [Holder(f"{name} {i}", "list", f"{name}{i}", "module_1.py", 9, 7, 9, parts, [*range(sites)]) for i in range(150)]
    made.looks.append(Look(steps, 90 * steps, 9.0, True, holders, []))
    return made


def test_names_paths_and_source_are_text(hostile):
    found = Parsed(render([hostile]))
    assert len(found.code()) == 6  # the page's own scripts, and no other
    assert not [tag for tag, _ in found.tags if tag in ("img", "b", "iframe", "object", "embed")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert sample_run.HOSTILE in found.text
    assert "</script><script>window.hacked=1</script>" in found.text  # in the source lines of a finding


def test_a_template_in_a_name_is_text(run):
    run.header["program"] = "{{ 7 * 7 }}{% raise %}"
    assert "{{ 7 * 7 }}{% raise %}" in Parsed(render([run])).text


def test_nothing_in_the_page_leads_out_of_it(hostile):
    found = Parsed(render([hostile]))
    leading = {"href", "src", "srcset", "action", "formaction", "data", "poster", "background", "ping", "xlink:href"}
    assert {value for _, attrs in found.tags for name, value in attrs.items() if name in leading} == {"#main", "data:,"}
    ours = [text for text in found.code() if not text.startswith("// https://d3js.org")]
    assert len(ours) == 5
    for text in [*found.styles, *ours]:
        assert "http" not in text
        assert "@import" not in text
        assert not re.findall(r"url\((?!#)", text)
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|\.html\(", text)


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else(hostile):
    found = Parsed(render([hostile]))
    policy = next(attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    said = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    hashed = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found.code()}
    assert said["default-src"] == "'none'"
    assert set(said["script-src"].split()) == hashed
    assert len(said["style-src"].split()) == len(found.styles) == 1
    assert "unsafe" not in policy


def test_the_data_of_a_run_comes_back_as_it_was(hostile):
    text = render([hostile])
    (data,) = Parsed(text).data()
    modules = {row[4] for row in data["sites"]}
    assert sample_run.HOSTILE in modules
    assert {row[1] for row in data["sites"]} == {"/home/me/project/model.py", "/home/me/project/train.py"}
    assert data["source"]["/home/me/project/train.py"]["19"].startswith("        self.losses.append(penalty)")
    block = text[text.index('<script type="application/json"') :].partition(">")[2].partition("</script>")[0]
    assert not set(block) & set("<>&\u2028\u2029")
    assert json.loads(block) == data


@pytest.mark.parametrize("by", ["line", "module"])
def test_bands_add_up_to_what_was_held(run, by):
    found = bands(run, Axis(run), 600, str)
    assert found["total"][1:] == [sample.bytes for sample in run.samples]
    assert [sum(values) for values in zip(*(band["v"] for band in found[by]), strict=True)] == found["total"]


def test_many_bands_are_eleven_and_the_others():
    found = bands(long_run(3, 40), Axis(long_run(3, 40)), 600, str)
    assert len(found["line"]) == 12
    assert found["line"][-1]["name"] == "29 others"
    assert sum(band["v"][1] for band in found["line"]) == found["total"][1]


def test_thinned_samples_have_every_peak():
    samples = [Sample(k // 2, k, k / 9, 1_000 + 7 * (k % 50) if k % 2 else k % 13, []) for k in range(40_000)]
    samples[23_456].bytes = 10**9
    chosen, first, last = thin(samples, 600)
    assert len(chosen) <= 600
    assert samples[23_456] in chosen
    assert chosen[:first] == samples[:first]
    assert chosen[last:] == samples[-len(chosen[last:]) :]
    assert [s.at for s in chosen] == sorted(s.at for s in chosen)
    assert thin(samples[:600], 600) == (samples[:600], 0, 0)


def test_a_holder_of_many_graphs_has_few_bars_that_stand_for_all(tmp_path):
    run = read(sample_run.write(tmp_path / "train.py.1.graphkeep", 1_000))
    found = alive(run, Axis(run))["holders"][0]
    assert len(found["parts"]) == 16
    assert sum(part[2] for part in found["parts"]) == found["steps"] == 1_000
    assert sum(part[4] for part in found["parts"]) == found["bytes"] == 1_000 * sample_run.LEAK_BYTES
    assert found["parts"][0][0] == 0
    assert found["parts"][-1][1] == 999


def test_a_holder_of_the_end_is_not_shown_a_second_time(run):
    names = [(row["holder"], row["final"]) for row in alive(run, Axis(run))["holders"]]
    assert [final for _, final in names] == [True, False]
    assert names[1][0] == "local `loss` in Trainer.train()"


def test_a_run_of_a_thousand_steps_takes_less_than_two_megabytes(tmp_path):
    run = read(sample_run.write(tmp_path / "train.py.1.graphkeep", 1_000))
    write([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < MOST


def test_so_do_twenty_thousand_steps_with_five_hundred_sites():
    assert len(render([long_run(20_000, 500)]).encode()) < MOST


def test_source_is_found_by_the_end_of_its_name():
    run = Run(Path("x"), header(cwd="/home/me/project"))
    run.sources["/home/me/project/a/train.py"] = "one\ntwo\f\nthree"
    run.sources["/home/me/project/b/train.py"] = "other"
    sources = Sources(run, 1_000)
    assert [(line.number, line.text, line.hit) for line in sources.around("a/train.py:3")] == [
        (1, "one", False),
        (2, "two\f", False),
        (3, "three", True),
    ]
    assert sources.around("/home/me/project/b/train.py:1")[0].text == "other"
    assert (
        sources.around("rain.py:1") == sources.around("train.py:99") == sources.around("train.py") == sources.around(None) == []
    )
    assert sources.short("/home/me/project/a/train.py") == "a/train.py"
    assert sources.short("/usr/lib/python3/site-packages/pkg/file.py") == "…/site-packages/pkg/file.py"


def test_a_finding_shows_its_line_among_its_neighbours(run):
    found = Parsed(render([run]))
    marked = [attrs for tag, attrs in found.tags if tag == "mark"]
    assert len(marked) == 4  # two findings, two holders
    assert "        self.losses.append(penalty)\n" in found.text
    assert "graphkeep rule GK101" in found.text


def test_a_run_without_a_record_says_that_no_graph_was_seen():
    found = Parsed(render([Run(Path("train.py.1.graphkeep"), header())]))
    assert "no graph was seen" in found.text
    assert "cut off" in found.text


def test_a_run_that_was_cut_off_before_a_look_is_not_called_good(tmp_path):
    (made,) = page([read(sample_run.write(tmp_path / "train.py.1.graphkeep", 12, cut=True))])
    assert made.tone == "none"
    assert any("cut off" in remark for remark in made.remarks)


def test_a_backward_that_failed_comes_first(tmp_path):
    (made,) = page([read(sample_run.write(tmp_path / "train.py.1.graphkeep", 12, raised=True, leaks=False))])
    assert made.tone == "bad"
    assert made.verdict[0][1].startswith("GK201: this loss reaches a part")
    assert [article.id for article in made.articles] == ["GK201"]
    assert made.articles[0].instead == "`hidden = hidden.detach()` before line 14"


def test_no_step_leaves_an_axis_from_first_to_last(run):
    run.steps.clear()
    axis = Axis(run)
    assert (axis.first, axis.last) == (0.0, 1.0)
    assert "No step has ended" in Parsed(render([run])).text


def test_half_a_surrogate_pair_is_no_fault(run, tmp_path):
    run.header["program"] = "\ud800.py"
    run.sites[1].module = "\udfff"
    write([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("seed", range(12))
def test_a_file_with_any_values_in_its_records_is_a_page(tmp_path, seed):
    random = Random(seed)
    odd = [0, -1, 2**62, 10**30, 1e308, True, None, "", "x" * 3_000, "\ud800", "a`b`\x00\r\n", [], {}]

    def changed(value):
        if isinstance(value, dict):
            return {key: inner if key == "type" else changed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return random.choice(odd) if random.random() < 0.03 else value

    path = sample_run.write(tmp_path / "train.py.1.graphkeep", 8, raised=True)
    first, *others = gzip.decompress(path.read_bytes()).splitlines()
    lines = [first.decode(), *(json.dumps(changed(json.loads(line))) for line in others)]
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n"))
    (data,) = Parsed(render([read(path)])).data()
    json.dumps(data, allow_nan=False)


def test_the_rank_that_differs_is_marked(tmp_path):
    for rank in range(4):
        path = tmp_path / f"train.py.1.rank{rank}.graphkeep"
        sample_run.write(path, 9 if rank == 2 else 12, rank=rank, world_size=4, leaks=rank == 2)
    runs = read_all([tmp_path / "train.py.1.rank0.graphkeep"])
    assert [row.differs for row in ranks(runs)] == [[], [], ["9 steps, most have 12", "other findings"], []]
    found = Parsed(render(runs))
    assert len(found.data()) == 4
    assert [attrs.get("class") for tag, attrs in found.tags if tag == "tr"][1:5] == [None, None, "differs", None]
    assert "There is no file of rank 3" in " ".join(Parsed(render(runs[:3])).text.split())


def test_many_ranks_share_the_room(tmp_path):
    one = long_run(300, 500)
    runs = [Run(**{**vars(one), "header": header(rank=rank, world_size=32)}) for rank in range(32)]
    assert len(render(runs).encode()) < 4 * MOST


def test_no_run_is_a_page_that_says_so():
    assert "There is no run to show" in render([])


def test_a_notebook_gets_the_page_in_a_sandbox(hostile):
    ((tag, attrs),) = Parsed(render_fragment([hostile])).tags
    assert tag == "iframe"
    assert attrs["sandbox"] == "allow-scripts"
    assert attrs["srcdoc"] == render([hostile])


def test_rendering_needs_no_torch(tmp_path):
    path = sample_run.write(tmp_path / "train.py.1.graphkeep", 3)
    code = (
        "import sys; from graphkeep.report._read import read; from graphkeep.report.html import render\n"
        "render([read(sys.argv[1])]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_the_bundled_library_comes_with_its_licence():
    assert (_ASSETS / "d3.min.js").read_text().startswith("// https://d3js.org v7.")
    assert "Mike Bostock" in (_ASSETS / "d3.LICENSE").read_text()
