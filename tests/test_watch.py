"""`watch`: the timeline, its tables and files, its steps, and that it lets the program be."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphkeep as gk
from graphkeep import _ledger


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def line_of(text: str) -> int:
    """The line of this file on which a text stands first."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line)


# the first question -----------------------------------------------------------------------------------------------------------


def test_the_first_question_is_answered_for_each_sample() -> None:
    """Rejected: by reference count, once the next forward has built its own graph. Contributing: by the sum's backward."""
    model, data = net(), torch.randn(6, 8)
    kept = [0, 2, 5]
    with gk.watch() as w:
        total: Any = 0.0
        for i in range(6):
            out = model(data[i : i + 1])  # forward
            if i not in kept:
                continue
            total = total + out.square().sum()
        answer = str(gk.explain(total))
        total.backward()  # the sum's backward
    lives = [life for life in w.lives if life.born.line != 0]
    rejected = [
        life for life in lives if life.backward is None and life.died.line == line_of("model(data[i : i + 1])  # forward")
    ]
    assert len(rejected) == 3  # samples 1, 3 and 4
    for life in rejected:
        assert life.born.line == life.died.line
        # when it died, the next sample's graph had been built: as many tensors more had been saved as it has itself
        assert life.died_at == life.born_last + life.tensors
    backward = [life for life in lives if life.backward == w.timeline.backwards[-1].number]
    assert len(backward) == 1
    assert backward[0].died.line == line_of("total.backward()  # the sum's backward")
    assert backward[0].tensors > 3 * rejected[0].tensors
    assert "local `total`" in answer
    assert "its saved tensors when total.backward() runs; all of it when" in answer
    assert w.findings == []
    summary = w.summary()
    assert "3 built at" in summary
    assert "freed by reference count at" in summary
    assert "freed by the backward at" in summary


# steps ------------------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_step_ends_with_the_first_optimizer_that_steps() -> None:
    one, two = net(), net()
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters())
    with gk.watch() as w:
        for _ in range(5):
            (one(torch.ones(1, 8)) + two(torch.ones(1, 8))).sum().backward()
            first.step()
            second.step()
    assert w.timeline.step == 5
    assert [step.kind for step in w.timeline.optimizer_steps] == ["SGD", "Adam"] * 5


def test_the_next_optimizer_ends_steps_when_the_first_one_has_gone() -> None:
    with gk.watch() as w:
        for _ in range(3):
            train(net(), 2)
    assert w.timeline.step == 6


def test_own_steps_take_the_place_of_the_optimizers() -> None:
    with gk.watch() as w:
        w.step()
        train(net(), 4)
        w.step()
    assert w.timeline.step == 2


def test_a_schedule_says_which_steps_are_recorded() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with gk.watch(schedule=schedule) as w:
        train(net(), 9)
    assert [step.tensors > 0 for step in w.timeline.steps][:7] == [False, True, True, False, True, True, False]
    assert _ledger.LEDGER.listeners == ()


def test_start_and_stop_do_as_the_block_does_and_may_be_repeated() -> None:
    w = gk.watch()
    w.start()
    train(net(), 2)
    w.stop()
    w.stop()
    train(net(), 2)
    w.start()
    train(net(), 2)
    w.stop()
    assert w.timeline.step == 4


def test_starting_twice_is_refused() -> None:
    with gk.watch() as w, pytest.raises(gk.ArgumentError, match="running already"):
        w.start()


def test_a_schedule_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(gk.ArgumentTypeError, match=r"torch\.profiler\.schedule"):
        gk.watch(schedule=3)  # type: ignore[arg-type]


# the same program -------------------------------------------------------------------------------------------------------------


def test_ten_thousand_steps_have_the_same_losses_and_the_watch_does_not_grow() -> None:
    def run(sizes: list[int] | None = None, w: gk.watch | None = None) -> list[float]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for step in range(10_000):
            loss = model(torch.full((2, 8), float(step % 7))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if sizes is not None and w is not None and step in (4_999, 9_999):
                gc.collect()
                timeline = w.timeline
                sizes += [len(gc.get_objects()), len(timeline.sites), len(timeline.steps), len(timeline.deaths)]
        return losses

    sizes: list[int] = []
    with gk.watch() as w:
        watched = run(sizes, w)
    assert w.timeline.step == 10_000
    assert w.findings == []
    assert watched == run()
    objects, sites, steps, deaths, objects_later, sites_later, steps_later, deaths_later = sizes
    assert (sites, deaths) == (sites_later, deaths_later)
    assert max(steps, steps_later) <= 1024
    assert objects_later - objects < 600  # the losses are floats, and what is kept of steps is bounded


def test_after_the_block_nothing_of_it_is_left() -> None:
    with gk.watch() as w:
        train(net(), 3)
    assert _ledger._top() is None
    assert w.timeline.live == 0
    assert _ledger.LEDGER.listeners == ()
    assert threading.Thread._bootstrap_inner.__module__ == "threading"  # type: ignore[attr-defined]


def test_an_exception_in_the_block_is_the_programs_own() -> None:
    with pytest.raises(ZeroDivisionError), gk.watch():
        net()(torch.ones(1, 8))
        _ = 1 / 0
    assert _ledger._top() is None


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_is_dropped_in_the_block_dies_at_once() -> None:
    x = torch.ones(100, requires_grad=True)
    with gk.watch():
        y = x.exp()
        storage = weakref.ref(y.untyped_storage())
        z = y.sin()
        del y
        assert storage() is not None
        del z
        assert storage() is None


@pytest.mark.usefixtures("no_collector")
def test_looking_leaves_no_cycle_behind() -> None:
    x = torch.ones(100, requires_grad=True)
    with gk.watch() as w:
        outs = [x.exp() for _ in range(5)]
        alive = [weakref.ref(out) for out in outs]
        _ = w.findings
    str(gk.explain(outs))
    del outs
    assert [ref() for ref in alive] == [None] * 5


@pytest.mark.usefixtures("no_collector")
def test_a_watch_that_ended_before_any_backward_is_no_cycle() -> None:
    def run(how: str) -> weakref.ref[object]:
        with gk.watch() as w:
            ref = weakref.ref(w)
            kept.append(net()(torch.randn(3, 8)))
            if how == "raises":
                raise KeyError(ref)
        return ref

    kept: list[Tensor] = []
    assert run("ends")() is None
    with pytest.raises(KeyError) as raised:
        run("raises")
    ref = raised.value.args[0]
    del raised
    assert ref() is None


def test_watches_nest_and_may_end_in_any_order() -> None:
    a, b = gk.watch(), gk.watch()
    a.start()
    train(net(), 2)
    b.start()
    train(net(), 2)
    a.stop()
    train(net(), 2)
    b.stop()
    assert (a.timeline.step, b.timeline.step) == (4, 4)
    assert _ledger._top() is None


def test_a_graph_built_before_the_watch_and_one_run_after_it_are_right() -> None:
    x = torch.randn(5, requires_grad=True)
    before = x.exp()
    with gk.watch():
        after = before.sin()
    after.sum().backward()
    assert torch.equal(x.grad, before.detach().cos() * before.detach())  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["saved", "died", "used", "reused", "begins", "ends", "next_step", "optimizer_stepped"])
def test_a_fault_inside_ends_the_watch_with_one_warning_and_not_the_program(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = gk.watch()
    space: dict[str, Any] = {}
    # what a file of graphkeep's raises; what one of the program's does is the program's
    exec(compile("def broken(*_args): raise KeyError('broken')", gk._watch._timeline.__file__, "exec"), space)
    monkeypatch.setattr(w.timeline, where, space["broken"])
    losses: list[Tensor] = []

    def run() -> None:
        with w:
            x = torch.ones(2, requires_grad=True).exp().sum()
            x.backward(retain_graph=True)
            x.backward()  # what was kept is used again
            losses.extend(train(net(), 3))

    with pytest.warns(gk.WatchFailedWarning, match="the program goes on") as warned:
        run()
    assert len(warned) == 1
    assert [loss.item() for loss in losses] == [loss.item() for loss in train(net(), 3)]
    assert _ledger._top() is None


@pytest.mark.parametrize("where", ["saved", "used", "begins", "ends", "next_step"])
def test_what_a_signal_handler_of_the_programs_raises_reaches_the_program(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class TimeLimit(Exception):
        pass

    def handler(*_args: object) -> None:  # it runs wherever the main thread is, in graphkeep's code, too
        raise TimeLimit

    w = gk.watch()
    monkeypatch.setattr(w.timeline, where, handler)
    with pytest.raises(TimeLimit), w:
        train(net(), 1)
    assert _ledger._top() is None


@pytest.mark.parametrize("alive", [True, False])
def test_an_optimizer_that_has_retired_ends_no_steps_any_more(alive: bool) -> None:
    model, kept = net(), []
    with gk.watch() as w:
        for _ in range(16):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            kept += [optimizer] if alive else []
    assert w.timeline.step == (13 if alive else 16)


def test_threads_that_start_in_the_block_are_seen() -> None:
    seen = []

    def work() -> None:
        train(net(), 1)

    with gk.watch() as w:
        before = w.timeline.number
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        seen.append(w.timeline.number - before)
    assert seen[0] > 0
    assert w.timeline.live == 0


def test_hooks_of_the_programs_own_stay_the_innermost() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), gk.watch() as w:
        x.exp().sum().backward()
    assert len(packed) == 1
    assert sum(site.tensors for site in w.timeline.sites) == 0
    with gk.watch() as w:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = x.exp()
        explanation = gk.explain(y)
        z = y.sin()
    assert len(packed) == 2
    assert explanation.packed_tensors == 1
    assert "save_on_cpu, checkpoint" in str(explanation)
    z.sum().backward()


def test_contexts_that_cross_leave_each_others_hooks_alone() -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    w = gk.watch()
    hooks.__enter__()
    w.start()
    hooks.__exit__(None, None, None)
    torch.ones(3, requires_grad=True).exp()
    w.stop()
    assert _ledger._top() is None
    assert sum(site.tensors for site in w.timeline.sites) > 0


# with the other verbs ---------------------------------------------------------------------------------------------------------


def test_the_other_verbs_free_and_refuse_under_a_watch_as_without() -> None:
    w = torch.tensor(1.0, requires_grad=True)
    with gk.watch() as seen:
        x = w + 10
        y1 = (x * x) ** 2
        gk.backward(y1, keep=x)
        assert gk.explain(y1).saved_bytes == 0
        (torch.sqrt(x) / 2).backward()
        big = torch.ones(1000, requires_grad=True).exp()
        out = big.sin().cos().sum()
        freed = gk.discard(out)
        assert int(freed) == 4000
        assert "result of exp" in freed.kept[0].what
        with pytest.raises(gk.FreedGraphError, match=r"freed by gk\.discard"):
            out.backward()
        trunk = torch.ones(1000, requires_grad=True).exp()
        with gk.cut(trunk) as stand_in:
            stand_in.sin().sum().backward()
    assert w.grad == torch.tensor(5324.0) + 1 / (4 * torch.tensor(11.0).sqrt())
    assert seen.timeline.live == 0


def test_infer_under_a_watch_gives_the_same_gradients() -> None:
    model, data = net(), torch.randn(12, 8)
    gk.infer(model, data, chunk_size=4)[[1, 7]].sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with gk.watch() as w:
        gk.infer(model, data, chunk_size=4)[[1, 7]].sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert w.timeline.live == 0


# tables and files -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> gk.watch:
    with gk.watch() as w:
        train(net(), 8)
        kept = net()(torch.ones(4, 8))
        w.table("holder")
    del kept
    return w


@pytest.mark.parametrize("group_by", ["line", "module", "op", "holder"])
@pytest.mark.parametrize("sort_by", ["bytes", "live", "tensors", "name"])
def test_a_table_has_a_row_for_each(seen: gk.watch, group_by: str, sort_by: str) -> None:
    text = seen.table(group_by=group_by, sort_by=sort_by)
    assert text.splitlines()[0].startswith(group_by)
    wanted = {"line": "test_watch.py:", "module": "Linear", "op": "tanh", "holder": "local `kept`"}
    assert wanted[group_by] in text


def test_a_table_is_cut_at_its_limit(seen: gk.watch) -> None:
    text = seen.table(row_limit=1)
    assert text.splitlines()[-1].endswith("more")


def test_another_group_or_order_is_refused(seen: gk.watch) -> None:
    with pytest.raises(gk.ArgumentError, match="'module'"):
        seen.table(group_by="file")
    with pytest.raises(gk.ArgumentError, match="'tensors'"):
        seen.table(sort_by="size")


def test_bytes_are_those_of_unique_storages_parameters_apart() -> None:
    x = torch.ones(10, 100, requires_grad=True)
    layer = nn.Linear(100, 7)
    with gk.watch() as w:
        y = layer(x)  # saves x, which is a leaf that wants a gradient, and W.t()
        assert w.timeline.live == 0
        z = y.exp()
        assert w.timeline.live == z.nbytes
        s = z.view(-1).sin().sum() + z.cos().sum()
        assert w.timeline.live == z.nbytes
        del s, z
        assert w.timeline.live == 0
    del y


def test_the_json_says_its_version_and_all_that_was_seen(seen: gk.watch, tmp_path: Path) -> None:
    seen.export_json(tmp_path / "w.json")
    record = json.loads((tmp_path / "w.json").read_text())
    assert record["schema_version"] == 1
    assert sum(step["backwards"] for step in record["steps"]) == 8
    assert {"line", "module", "op"} == set(record["tables"])
    assert any(life["freed_by"] == "backward" for life in record["lives"])
    assert record["optimizer_steps"][0]["optimizer"] == "SGD"


def test_the_trace_is_what_trace_viewers_read(seen: gk.watch, tmp_path: Path) -> None:
    seen.export_trace(tmp_path / "w.trace")
    events = json.loads((tmp_path / "w.trace").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "C", "i", "b", "e"}
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    assert all(event["ts"] >= begun[event["id"]] for event in events if event["ph"] == "e")


def test_a_file_that_cannot_be_written_raises_its_own_error(seen: gk.watch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        seen.export_json(tmp_path / "none" / "w.json")


# hostile programs -------------------------------------------------------------------------------------------------------------


class Hostile:
    """An object that breaks whoever touches it."""

    def __repr__(self) -> str:
        raise AssertionError("repr was called")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("eq was called")

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise AssertionError("len was called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


def test_objects_of_the_program_are_never_asked() -> None:
    hostile = Hostile()
    object.__setattr__(hostile, "kept", [])
    with gk.watch() as w:
        for _ in range(8):
            object.__getattribute__(hostile, "__dict__")["kept"].append(net()(torch.ones(1, 8)))
            w.step()
        findings = w.findings
        text = str(gk.explain(object.__getattribute__(hostile, "__dict__")["kept"][0]))
    assert "hostile.kept" in str(findings[0])
    assert "hostile.kept" in text


def test_source_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    program = (
        "import torch, graphkeep as gk\n"
        "w = torch.ones(3, requires_grad=True)\n"
        "outs = []\n"
        "with gk.watch() as seen:\n"
        "    for _ in range(8):\n"
        "        outs.append(w.exp()); seen.step()\n"
        "print(seen.findings[0].id, 'outs' in seen.findings[0].what)\n"
        "h = w.exp(); h.sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["GK103", "True"]
    assert done.stderr == ""
    file = tmp_path / "gone.py"
    file.write_text(program.replace("with gk.watch", "import os; os.remove(__file__)\nwith gk.watch"))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["GK103", "True"]


def test_a_program_that_sets_its_own_trace_function_keeps_it() -> None:
    calls = []

    def trace(frame: Any, event: str, _arg: Any) -> Any:
        if frame.f_code.co_name == "forward":
            calls.append(event)
            _ = frame.f_locals
        return trace

    before = sys.gettrace()
    with gk.watch() as w:
        sys.settrace(trace)
        try:
            train(net(), 2)
        finally:
            sys.settrace(before)
    assert calls
    assert w.timeline.live == 0
