"""What needs a GPU: ``pytest -m cuda``. The script for it is run on the CPU everywhere, so that it works when there is one."""

from __future__ import annotations

import pytest
import torch

import graphkeep as gk
from benchmarks import cuda

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_script_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.main(["--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("ok  ") >= 20
    assert "| GPT | plain | 1.000 | 1.000 |" in printed


@gpu
@pytest.mark.cuda
@pytest.mark.parametrize("spill", ["recompute", "host", "both"])
def test_a_step_within_a_budget_is_as_in_eager(spill: str) -> None:
    bench = cuda.Bench("GPT", torch.device("cuda"))
    plain = bench.gradients(bench.plain)
    with gk.budget("1TiB") as wide:
        bench.gradients(bench.plain)
    with gk.budget(wide.peak // 2, spill=spill) as b:  # type: ignore[arg-type]
        for _ in range(3):
            ours = bench.gradients(bench.plain)
    assert all(map(torch.equal, ours, plain))
    assert b.peak <= wide.peak // 2


@gpu
@pytest.mark.cuda
def test_device_memory_caps_what_the_allocator_gives() -> None:
    bench = cuda.Bench("ResNet-50", torch.device("cuda"))
    bench.gradients(bench.plain)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.gradients(bench.plain)
    full = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    limit = full * 3 // 4
    with gk.budget(device_memory=limit):
        bench.gradients(bench.plain)
    assert torch.cuda.max_memory_allocated() - before <= limit


@gpu
@pytest.mark.cuda
def test_what_is_spilled_is_pinned_and_comes_back_on_the_streams_that_wait_for_it() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    y = x
    for _ in range(8):
        y = y.sin()
    y.sum().backward()
    plain, x.grad = x.grad, None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), gk.budget(3 << 22, spill="host"):
        y = x
        for _ in range(8):
            y = y.sin()
        y.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    assert plain is not None
    assert x.grad is not None
    assert torch.equal(x.grad, plain)
