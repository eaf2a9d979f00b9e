"""What the benchmarks count, they count right. No times here."""

import gc
import json

import pytest
import torch

from benchmarks import watch, watch_jobs, watch_look, watch_memory
from benchmarks._measure import LiveBytes

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
