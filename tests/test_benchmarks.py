"""What the benchmarks count, they count right. No times here."""

import gc
import json
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import _measure, budget, budget_peers, watch, watch_jobs, watch_look, watch_memory
from benchmarks._budget_nets import MODELS, build
from benchmarks._measure import LiveBytes, Row, allocated_peak, graph_peak
from benchmarks._pages import PAGES, index, page
from benchmarks._pictures import PICTURES, points
from benchmarks.run import FOLDER, ROOT, known, texts

MIB = 1 << 20


def mebibyte() -> torch.Tensor:
    return torch.ones(MIB // 4)


def test_a_tensor_counts_until_it_is_freed() -> None:
    with LiveBytes() as live:
        x = mebibyte()
        assert live.now == MIB
        y = x + 1
        assert (live.now, live.peak) == (2 * MIB, 2 * MIB)
        del x
        assert (live.now, live.peak) == (MIB, 2 * MIB)
        del y
        assert (live.now, live.peak) == (0, 2 * MIB)


def test_a_view_counts_once_and_keeps_the_storage_alive() -> None:
    with LiveBytes() as live:
        x = mebibyte()
        views = [x[:5], x.view(2, -1), x.expand(3, -1), x.detach()]
        assert live.now == MIB
        del x
        assert live.now == MIB
        views.clear()
        assert live.now == 0


def test_an_in_place_op_adds_nothing() -> None:
    with LiveBytes() as live:
        x = mebibyte()
        x.add_(1).relu_()
        assert (live.now, live.peak) == (MIB, MIB)


def test_what_is_apart_is_never_counted() -> None:
    weight = torch.nn.Parameter(mebibyte())
    weight.grad = torch.zeros_like(weight)
    with LiveBytes([weight, weight.grad]) as live:
        alias = weight.view(2, -1).t()
        alias.sum().backward()
        del alias
        gc.collect()
        assert live.now == 0
    assert live.peak <= MIB + 4  # the gradient of this backward, before it is added


def test_what_only_a_graph_holds_counts_until_the_backward_frees_it() -> None:
    w = torch.ones(MIB // 4, requires_grad=True)
    w.grad = torch.zeros_like(w)
    with LiveBytes([w, w.grad]) as live:
        y = w.exp().sum()  # exp saves its result, and no name points at it
        assert live.now == MIB + 4
        y.backward()
        assert live.now == 4


def test_a_sparse_tensor_counts_its_indices_and_values() -> None:
    with LiveBytes() as live:
        indices, values = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, MIB // 4)
        x = torch.sparse_coo_tensor(indices, values, (2, MIB // 4), check_invariants=False)
        del indices, values
        assert live.now == 8 + MIB
        x = x.coalesce()
        assert live.now == 8 + MIB
        del x
        assert live.now == 0


def test_a_graph_counts_what_it_saves_once_and_neither_parameters_nor_the_batch() -> None:
    w, x = mebibyte().requires_grad_(), mebibyte()

    def step() -> None:
        y = (x * w).exp()  # saves the batch and the parameter, and its result
        (y * y).sum().backward()  # saves y again

    assert graph_peak(step, [w, x]) == MIB
    assert graph_peak(step, [w]) == 2 * MIB


def test_the_peak_of_a_graph_is_that_of_what_is_saved_at_once() -> None:
    w = mebibyte().requires_grad_()

    def step() -> None:
        for _ in range(3):
            w.exp().sum().backward()

    assert graph_peak(step, [w]) == MIB


def test_the_allocators_peak_has_what_no_graph_holds() -> None:
    def run() -> None:
        x = mebibyte()
        del x
        y = mebibyte()
        z = y + y
        del y, z

    assert 2 * MIB <= allocated_peak(run) < 2 * MIB + 1024


@pytest.mark.parametrize("model", MODELS)
def test_a_step_for_budget_with_the_same_number_gives_the_same_gradients(model: str) -> None:
    job = build(model, quick=True)
    found = []
    for number in (1, 2, 1):
        job.zero_grad()
        job.step(number)
        found.append([grad.clone() for grad in job.gradients()])
    assert all(map(torch.equal, found[0], found[2]))
    assert sum(bool(grad.any()) for grad in found[0]) > len(found[0]) / 2


def test_the_benchmark_of_budget_runs_and_what_does_not_depend_on_time_is_met() -> None:
    models = ("GPT", "UNet", "TreeLSTM")
    rows = [row for model in models for row in budget.of(model, quick=True)]
    counts = {(row.model, row.figure): (row.verdict, row.note) for row in rows if row.wanted == 0}
    assert len(counts) == 3 * len(models)
    assert {verdict for verdict, _ in counts.values()} == {"met"}, counts


def test_peers_of_budget_run_beside_it() -> None:
    rows = [*budget_peers.of("UNet", quick=True)]
    assert not [row for row in rows if row.figure.endswith("failed") and not row.figure.startswith("budget")]
    rows += [Row("budget", "UNet", f"at 50 %: {figure}", 1.0) for figure in ("time", "live bytes")]
    assert points(rows, "budget") == {"UNet": {"at 50 %": (1.0, 1.0)}}
    assert points(rows, "budget_peers")["UNet"].keys() == {"checkpoint", "checkpoint, two blocks", "selective checkpoint"}
    assert ">gk.budget<" in PICTURES["budget"].draw(rows)


def test_the_benchmark_of_watch_runs_and_what_does_not_depend_on_time_is_met() -> None:
    rows = [*watch.rows(quick=True), *watch_memory.rows(quick=True), *watch_look.rows(quick=True)]
    verdicts = {(row.model, row.figure): row.verdict for row in rows}
    assert verdicts["4 tiny layers", "watch: peak live bytes"] == "met"
    assert verdicts["4 tiny layers, 20 steps", "losses that are not the same bit for bit"] == "met"
    assert verdicts["after a watch", "functions of torch's that are still replaced"] == "met"
    assert {row.benchmark for row in rows} == {"watch", "watch_memory", "watch_look"}


@pytest.mark.parametrize("way", ["plain", "after", "watch"])
def test_a_process_that_is_timed_prints_its_seconds_last(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        watch_jobs.main("small", "2", way)
    finally:
        torch.set_num_threads(threads)
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) > 0


@pytest.mark.parametrize("path", texts(), ids=lambda path: path.name)
def test_what_is_written_from_the_figures_is_what_they_say(path: Path) -> None:
    written = path.read_text() if path.exists() else "nothing"
    assert written == texts()[path], f"python -m benchmarks.run --index writes {path.name} again"


def test_every_page_has_figures_a_place_in_the_navigation_and_the_picture_that_it_names() -> None:
    assert known().keys() == PAGES.keys()
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in ("index", *PAGES):
        assert f"benchmarks/{name}.md" in navigation
        for image in re.findall(r"!\[[^]]+\]\(([^)]+)\)", (FOLDER / f"{name}.md").read_text()):
            assert ElementTree.parse(FOLDER / image).getroot().tag.endswith("svg")


def test_the_index_lists_what_fell_short_and_nothing_else() -> None:
    rows = [
        Row("run_command", "a", "well: time", 0.9, wanted=1.0, low=0.8, high=1.1),
        Row("run_command", "b", "nearly: time", 1.1, wanted=1.0, low=0.9, high=1.2),
        Row("run_command", "c", "short: time", 1.2, wanted=1.0, low=1.1, high=1.3),
        Row("run_command", "d", "for comparison: time", 7.0),
    ]
    machine = {"cores": 2}
    text = index({"run": (machine, rows)})
    assert "| the program by itself | 1 | 1 | 1 | 1 |" in text
    assert "| c | short: time | ≤ 1.000x | 1.200x [1.100, 1.300] |" in text
    assert not [word for word in ("well", "nearly", "for comparison: time") if word in text]
    assert "Nothing." in index({"run": (machine, rows[:2])})
    assert "| **MISSED** |" in page("run", machine, rows)


def test_rounds_end_when_the_time_is_up_but_not_before_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(_measure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert list(_measure.rounds(3, least=5, seconds=0)) == [0, 1, 2]
    assert list(_measure.rounds(9, least=5, seconds=0)) == [0, 1, 2, 3, 4]
    assert list(_measure.rounds(9, least=2, seconds=3.5)) == [0, 1, 2, 3, 4]
