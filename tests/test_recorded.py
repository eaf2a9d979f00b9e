"""What a data file says of a program that has ended, its variables gone: what is wrong, and nothing of one that is well."""

import types
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_findings import CASES, Case, collector, frozen, missing  # noqa: F401 two are fixtures
from test_findings import Run as Program
from torch import Tensor, nn

import graphkeep as gk
from graphkeep.report._read import read
from graphkeep.report._run import Run
from graphkeep.report._verdict import verdict

# what a look in the middle cannot tell, and a program of its own does: the generator runs then, so it is not suspended; the
# module that is gone when the function has returned waits for the collector, which `graphkeep run` calls before the last look
RUNNING = {"D11 trace": "suspended"}
WAITS = {"D8 per sample"}


def recorded(tmp_path: Path, program, *arguments: object) -> Run:
    """As `graphkeep run` does it."""
    file = tmp_path / "run.graphkeep"
    watch, error = gk.watch(file=file), None
    watch.start()
    try:
        program(*arguments)
    except Exception as raised:
        error = raised
        watch._end("raised", error)
    watch._end("finished")
    return read(file)


@pytest.mark.usefixtures("collector")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_is_judged_without_its_help(case: Case, tmp_path: Path) -> None:
    program = Program(case, tmp_path)
    run = recorded(tmp_path, program, types.SimpleNamespace(step=lambda: None), lambda: None)
    found = {f.id for f in run.findings} | {note.id for note in run.notes}
    if not case.ids:
        assert found == set(), run.findings
        assert verdict(run).verdict.startswith("nothing")
        return
    allowed = {*case.ids, "GK106"} if case.name in WAITS else set(case.ids)
    assert found, run.looks
    assert found <= allowed, run.findings
    text = "\n".join([*map(str, run.findings), *(note.text for note in run.notes)])
    lacks = missing(program, text, "\n".join([*(f.instead for f in run.findings), *(note.text for note in run.notes)]))
    assert lacks in ([], [RUNNING.get(case.name)]), text
    assert verdict(run).verdict.split()[0].rstrip(":") in allowed


# --- programs that are well, in which a loop is no loop over steps --------------------------------------------------------


def layers() -> None:
    feats, x = [], torch.randn(4, 8)
    for layer in [nn.Linear(8, 8) for _ in range(24)]:
        x = torch.relu(layer(x))
        feats.append(x)


def encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    nn.TransformerEncoder(layer, 12)(torch.randn(2, 5, 16)).sum().item()


def residual() -> None:
    x, blocks = torch.randn(2, 8), [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(24)]
    for block in blocks:
        x = x + block(x)


def over_time() -> None:
    cell, h, seen = nn.GRUCell(8, 8), torch.zeros(1, 8), []
    for _ in range(40):
        h = cell(torch.randn(1, 8), h)
        seen.append(h)


def unrolled() -> None:
    w, lr = torch.ones(4, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    v = w * 1
    for _ in range(40):
        (g,) = torch.autograd.grad(v.exp().sum(), v, create_graph=True)
        v = v - lr * g
    v.sum().backward()


def train(steps: int, kept: "list[Tensor] | deque[Tensor]") -> None:
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        loss = net(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss)


def losses_of_an_epoch() -> None:
    for _ in range(3):
        train(100, [])


def last_losses() -> None:
    train(400, deque(maxlen=100))


def a_window() -> None:
    train(32, deque(maxlen=20))


def memory_runs_out_in_the_first_forward() -> None:
    x, kept = torch.randn(4, 8), []
    for i in range(40):
        x = torch.relu(F.linear(x, torch.ones(8, 8, requires_grad=True)))
        kept.append(x)
        if i == 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


WELL = [
    layers, encoder, residual, over_time, unrolled, losses_of_an_epoch, last_losses, a_window,
    memory_runs_out_in_the_first_forward,
]  # fmt: skip


@pytest.mark.parametrize("program", WELL, ids=lambda program: program.__name__)
def test_a_loop_that_builds_one_graph_and_a_list_that_is_emptied_are_no_leaks(program, tmp_path: Path) -> None:
    run = recorded(tmp_path, program)
    assert run.findings == []
    expected = "out of memory" if program is memory_runs_out_in_the_first_forward else "nothing grows"
    assert verdict(run).verdict.startswith(expected)


def test_several_graphs_of_such_a_loop_that_are_kept_are_a_leak(tmp_path: Path) -> None:
    def evaluate() -> float:
        net, outs = [nn.Linear(8, 8) for _ in range(3)], []
        for _ in range(30):
            x = torch.randn(4, 8)
            for layer in net:
                x = torch.relu(layer(x))
            outs.append(x)
        return sum(float(out.detach().sum()) for out in outs)

    (finding,) = recorded(tmp_path, evaluate).findings
    assert finding.id == "GK103"
    assert "`outs[0.." in finding.what


def test_a_leak_of_a_local_variable_is_found_though_the_last_look_was_early(tmp_path: Path) -> None:
    def train_and_keep(watch: gk.watch) -> None:
        net, kept = nn.Linear(8, 8), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for i in range(400):
            loss = net(torch.randn(4, 8)).exp().mean()
            kept.append(net(torch.randn(4, 8)).exp())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i == 100:
                watch._look_at = 10**9  # no time for more

    watch = gk.watch(file=tmp_path / "run.graphkeep")
    with watch:
        train_and_keep(watch)
    run = read(tmp_path / "run.graphkeep")
    assert [look.step for look in run.looks if not look.final][-1] < 200
    (finding,) = run.findings
    assert "`kept[0.." in finding.what


def test_a_loop_over_layers_is_none_of_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    watch = gk.watch(file=tmp_path / "run.graphkeep")
    watch._last_step = 3
    with watch:
        for _ in range(6):
            x = torch.randn(4, 8)
            for _ in range(20):
                x = layer(x).tanh()
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step()
    run = read(tmp_path / "run.graphkeep")
    assert (run.how, run.steps_done, run.boundary) == ("steps", 3, "optimizer")


def test_a_schedule_counts_no_loop_over_layers(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    asked: list[int] = []

    def schedule(step: int) -> torch.profiler.ProfilerAction:
        asked.append(step)
        return torch.profiler.ProfilerAction.RECORD

    with gk.watch(schedule=schedule):
        for _ in range(3):
            x = torch.randn(4, 8)
            for _ in range(20):
                x = layer(x).tanh()
            optimizer.zero_grad()
            x.sum().backward()
            optimizer.step()
    assert asked == [0, 1, 2, 3]
