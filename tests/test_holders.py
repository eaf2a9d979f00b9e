"""Who holds a tensor: what each kind of holder is called, and that looking changes nothing."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphkeep._watch import _holders
from graphkeep._watch._holders import Holder, find


@pytest.fixture(autouse=True)
def all_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the process may have left a large heap, and two seconds may be too few on a busy machine."""
    monkeypatch.setitem(find.__kwdefaults__, "seconds", 60.0)


def grown() -> Tensor:
    """A tensor with a history."""
    return torch.ones(2, requires_grad=True) * 2


def line() -> int:
    """The line that calls it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def whats(*targets: object) -> list[str]:
    return [holder.what for holder in find(_of(targets), ignore={id(targets)})]


def _of(targets: tuple[object, ...]) -> list[object]:
    return list(targets)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a program from a file of its own, `train.py`; what it left in its globals."""
    spaces = []

    def run(program: str, file: str = "train.py", **names: Any) -> dict[str, Any]:
        path = tmp_path / file
        path.write_text(program)
        space = {"__name__": "train", "__file__": str(path), "find": find, "torch": torch, "nn": nn, "grown": grown}
        space.update(names)
        spaces.append(space)
        exec(compile(program, str(path), "exec"), space)
        return space

    yield run
    for space in spaces:
        space.clear()


Run = Callable[..., dict[str, Any]]


def told(run: Run, program: str, **names: Any) -> list[str]:
    """What is said of the holders that a program's `found` has."""
    return [holder.what for holder in run(program, **names)["found"]]


# variables


def test_a_local_is_named_with_its_function_and_the_line_it_is_at() -> None:
    def train() -> list[Any]:
        total_loss = grown()
        return find([total_loss])

    (holder,) = train()
    n = train.__code__.co_firstlineno + 2
    assert holder == Holder(
        f"local `total_loss` in train() at test_holders.py:{n}", "total_loss", "local", __file__, n, (0,), None
    )


def test_every_variable_that_holds_it_is_listed() -> None:
    a = b = grown()
    here = "in test_every_variable_that_holds_it_is_listed() at test_holders.py"
    assert whats(a) == [f"local `a` {here}:{line()}", f"local `b` {here}:{line()}"]
    assert a is b


def test_locals_of_other_threads() -> None:
    stop, ready = threading.Event(), threading.Event()
    seen = []

    def worker() -> None:
        loss = grown()
        seen.append(weakref.ref(loss))
        ready.set()
        stop.wait()

    thread = threading.Thread(target=worker)
    thread.start()
    try:
        ready.wait()
        n = worker.__code__.co_firstlineno + 4
        assert [h.what for h in find([seen[0]()])] == [f"local `loss` in worker() at test_holders.py:{n}"]
    finally:
        stop.set()
        thread.join()


def test_globals(run: Run) -> None:
    space = run("loss = grown()\nfound = find([loss])")
    (holder,) = space["found"]
    assert holder == Holder("global `loss` of train.py", "loss", "global", space["__file__"], None, (0,), None)


def test_globals_of_a_library_are_told_with_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.functional, "kept", [grown()], raising=False)
    assert whats(nn.functional.kept[0]) == ["`torch.nn.functional.kept[0]` (list, global)"]


# attributes


def test_an_attribute_is_told_with_its_whole_path(run: Run) -> None:
    program = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(2, 2)
        self.blocks = nn.Sequential(nn.Tanh(), nn.ModuleList([nn.Linear(2, 2)]))
        self.heads = nn.ModuleDict({"a": nn.Tanh()})

model = Net()
model.layer1.cache = grown()
model.blocks[1][0].cache = grown()
model.heads["a"].cache = grown()
model.layer1.register_buffer("state", grown())
found = find([model.layer1.cache, model.blocks[1][0].cache, model.heads["a"].cache, model.layer1.state])
"""
    found = run(program)["found"]
    assert [(h.what, h.kind, h.targets) for h in sorted(found, key=lambda h: h.targets)] == [
        ("`model.layer1.cache` (global of train.py)", "attribute", (0,)),
        ("`model.blocks[1][0].cache` (global of train.py)", "attribute", (1,)),
        ('`model.heads["a"].cache` (global of train.py)', "attribute", (2,)),
        ("`model.layer1.state` (global of train.py)", "attribute", (3,)),
    ]


class Plain:
    """Something of the user's."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)


@dataclass
class Record:
    x: Tensor


@dataclass
class SlottedRecord:
    __slots__ = ("x",)
    x: Tensor


def test_attributes_of_every_kind_of_object() -> None:
    def slotted() -> Any:
        thing = Slotted()
        thing.x = grown()
        return thing

    def materialized() -> Any:
        thing = Plain(grown())
        assert vars(thing)
        return thing

    for make in (lambda: Plain(grown()), materialized, slotted, lambda: Record(grown()), lambda: SlottedRecord(grown())):
        thing = make()
        assert [h.name for h in find([thing.x])] == ["thing.x"]


class Trainer:
    kept: Any = None

    def look(self) -> list[Any]:
        self.loss = grown()
        return find([self.loss])


def test_self_is_named_only_where_no_better_name_leads_to_it() -> None:
    n = Trainer.look.__code__.co_firstlineno + 2
    assert [h.what for h in Trainer().look()] == [f"`self.loss` (local in look() at test_holders.py:{n})"]
    trainer = Trainer()
    name = inspect.currentframe().f_code.co_name
    assert [h.what for h in trainer.look()] == [f"`trainer.loss` (local in {name}() at test_holders.py:{line()})"]
    run = Plain(Plain(trainer))
    del trainer
    assert [h.name for h in run.x.x.look()] == ["run.x.x.loss"]


def test_class_attributes() -> None:
    Trainer.kept = [grown()]
    assert [(h.what, h.name, h.kind) for h in find([Trainer.kept[0]])] == [
        ("`Trainer.kept[0]` (list, class attribute in test_holders.py)", "Trainer.kept[0]", "element")
    ]
    Trainer.kept = grown()
    assert [(h.what, h.kind) for h in find([Trainer.kept])] == [
        ("`Trainer.kept` (class attribute in test_holders.py)", "attribute")
    ]
    Trainer.kept = None


# elements


def test_elements_of_one_list_are_one_holder(run: Run) -> None:
    space = run("outs = [grown() for _ in range(37)]\nfound = find(outs[:])")
    assert space["found"] == [
        Holder(
            "`outs[0..36]` (list, global of train.py)",
            "outs[0..36]",
            "element",
            space["__file__"],
            None,
            tuple(range(37)),
            None,
        )
    ]
    assert told(run, "outs = [grown() for _ in range(9)]\nfound = find([outs[i] for i in (0, 3, 7, 8)])") == [
        "`outs[0, 3, 7, … (4 of them)]` (list, global of train.py)"
    ]
    assert told(run, "outs = [grown() for _ in range(9)]\nfound = find([outs[i] for i in (0, 3, 7)])") == [
        "`outs[0, 3, 7]` (list, global of train.py)"
    ]
    assert told(run, "out = grown()\nouts = [out, None, out]\ndel out\nfound = find([outs[0]])") == [
        "`outs[0, 2]` (list, global of train.py)"
    ]


Pair = namedtuple("Pair", "left right")


CONTAINERS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda t: [0, t], "`{}[1]` (list, global of train.py)"),
    (lambda t: (t,), "`{}[0]` (tuple, global of train.py)"),
    (lambda t: {"loss": t}, '`{}["loss"]` (dict, global of train.py)'),
    (lambda t: {3: t}, "`{}[3]` (dict, global of train.py)"),
    (lambda t: {("a", 1, None): t}, '`{}[("a", 1, None)]` (dict, global of train.py)'),
    (lambda t: {"a\n" * 30: t}, '`{}["' + "a\\n" * 13 + '…"]` (dict, global of train.py)'),
    (lambda t: {10**5000: t}, "`{}[<int>]` (dict, global of train.py)"),
    (lambda t: {Record: t}, "`{}[<type>]` (dict, global of train.py)"),
    (lambda t: {t: 1}, "a key of `{}` (dict, global of train.py)"),
    (lambda t: {t}, "an element of `{}` (set, global of train.py)"),
    (lambda t: frozenset([t]), "an element of `{}` (frozenset, global of train.py)"),
    (lambda t: deque([t]), "`{}[0]` (deque, global of train.py)"),
    (lambda t: defaultdict(list, a=[t]), '`{}["a"][0]` (list, global of train.py)'),
    (lambda t: OrderedDict(a=t), '`{}["a"]` (OrderedDict, global of train.py)'),
    (lambda t: Pair(1, t), "`{}.right` (global of train.py)"),
    (lambda t: {"out": [0, 1, 2, {"b": t}]}, '`{}["out"][3]["b"]` (dict, global of train.py)'),
    (lambda t: types.MappingProxyType({"a": t}), '`{}…["a"]` (dict, global of train.py)'),
]


def test_elements_of_every_container(run: Run) -> None:
    program = """\
targets = [grown() for _ in makes]
for i, make in enumerate(makes):
    globals()[f"kept{i}"] = make(targets[i])
found = find(targets)
"""
    found = run(program, makes=[make for make, _ in CONTAINERS])["found"]
    assert {h.targets: h.what for h in found} == {
        (i,): what.replace("{}", f"kept{i}") for i, (_, what) in enumerate(CONTAINERS)
    }


def test_a_container_is_not_told_by_what_it_holds_itself(run: Run) -> None:
    program = """\
class Log: pass
outs = [grown(), Log()]
outs[1].outs = outs
found = find([outs[0]])
"""
    assert told(run, program) == ["`outs[0]` (list, global of train.py)"]


def test_places_that_differ_in_an_index_are_one_holder(run: Run) -> None:
    program = """\
records = [{"log": {"loss": grown(), "aux": grown()}, "step": i} for i in range(20)]
grid = [[grown() for _ in range(3)] for _ in range(4)]
found = find([r["log"]["loss"] for r in records] + [t for row in grid for t in row])
"""
    found = run(program)["found"]
    assert [(h.what, len(h.targets)) for h in found] == [
        ("`grid[0..3][0..2]` (list, global of train.py)", 12),
        ('`records[0..19]["log"]["loss"]` (dict, global of train.py)', 20),
    ]


def test_a_container_with_two_names_is_told_by_both(run: Run) -> None:
    program = "class Log: pass\nlog = Log()\nouts = log.outs = [grown()]\nfound = find([outs[0]])"
    assert told(run, program) == ["`outs[0]` (list, global of train.py)", "`log.outs[0]` (list, global of train.py)"]


# functions


def test_thread_locals_and_attributes_of_functions(run: Run) -> None:
    program = """\
import threading
here = threading.local()
here.loss = grown()
def step(): pass
step.log = [grown()]
found = find([here.loss, step.log[0]])
"""
    assert sorted(told(run, program)) == ["`here.loss` (global of train.py)", "`step.log[0]` (list, global of train.py)"]


def test_closures_and_default_arguments(run: Run) -> None:
    program = """\
def make():
    acts, one = [grown()], grown()
    def f():
        return acts, one
    return f

def g(x, acc=[grown()], *, extra={"a": grown()}):
    pass

f = make()
found = find([f()[0][0], f()[1], g.__defaults__[0][0], g.__kwdefaults__["extra"]["a"]])
"""
    found = run(program)["found"]
    assert [(h.what, h.name, h.kind, h.line) for h in sorted(found, key=lambda h: h.targets)] == [
        ("`acts[0]` (list, closure variable of function f at train.py:3)", "acts[0]", "closure", 3),
        ("closure variable `one` of function f at train.py:3", "one", "closure", 3),
        ("`acc[0]` (list, default argument of function g at train.py:7)", "acc[0]", "default", 7),
        ('`extra["a"]` (dict, default argument of function g at train.py:7)', 'extra["a"]', "default", 7),
    ]


def test_what_a_function_is_known_by_is_the_detail(run: Run) -> None:
    program = """\
def make(t):
    return lambda: t
callbacks = {"end": [make(grown())]}
found = find([callbacks["end"][0]()])
"""
    (holder,) = run(program)["found"]
    assert holder.what == "closure variable `t` of function <lambda> at train.py:2"
    assert holder.detail == 'the function is `callbacks["end"][0]`'


def test_partials_and_bound_methods(run: Run) -> None:
    program = """\
import functools
class Log:
    def add(self): pass
log = Log()
log.last = grown()
callbacks = [functools.partial(print, grown(), end=grown()), log.add]
del log
found = find([callbacks[0].args[0], callbacks[0].keywords["end"], callbacks[1].__self__.last])
"""
    assert sorted(told(run, program)) == [
        "`callbacks[0].args[0]` (tuple, global of train.py)",
        '`callbacks[0].keywords["end"]` (dict, global of train.py)',
        "`callbacks[1].__self__.last` (global of train.py)",
    ]


def test_caches(run: Run) -> None:
    program = """\
import functools
@functools.cache
def features(i):
    return grown()
class Net:
    @functools.lru_cache(maxsize=8)
    def bias(self, n):
        return grown(), n
net = Net()
kept = [features(i) for i in range(3)] + [net.bias(1)[0]]
targets = kept[:]
kept.clear()
found = find(targets)
"""
    found = run(program)["found"]
    assert [(h.what, h.name, h.kind, h.targets) for h in found] == [
        ("cache of `features` (functools.lru_cache, 3 entries, train.py:2)", "features", "cache", (0, 1, 2)),
        ("cache of `Net.bias(…)[0]` (functools.lru_cache, 1 entry, train.py:6)", "Net.bias(…)[0]", "cache", (3,)),
    ]


# hooks


HOOKED = """\
model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

def watch(layer, register):
    acts = []
    def hook(*args):
        acts.append(args[-1])
    getattr(layer, register)(hook)
    return acts
"""


@pytest.mark.parametrize(
    ("register", "noun"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_hooks_of_modules(run: Run, register: str, noun: str) -> None:
    program = f"{HOOKED}t = grown()\nwatch(model[0], '{register}').append(t)\ntargets = [t]\ndel t\nfound = find(targets)"
    (holder,) = run(program)["found"]
    assert holder.what == f"`acts[0]` (list, closure variable of {noun} `hook` on model[0])"
    assert holder.detail == f"closure variable `acts` of {noun} `hook` on model[0]"
    assert (holder.name, holder.kind, holder.line) == ("acts[0]", "hook", 5)


def test_a_hook_with_a_name_of_its_own_is_still_told_as_a_hook(run: Run) -> None:
    program = """\
model = nn.Sequential(nn.Linear(2, 2))
def keep(module, args, out, store=[]):
    store.append(out)
model[0].register_forward_hook(keep)
model(torch.ones(1, 2)).sum()
found = find([keep.__defaults__[0][0]])
"""
    assert told(run, program) == ["`store[0]` (list, default argument of forward hook `keep` on model[0])"]


def test_hooks_that_are_bound_methods_or_partials(run: Run) -> None:
    program = """\
import functools
class Recorder:
    def __init__(self):
        self.seen = [grown()]
    def see(self, *args):
        pass
def note(record, *args):
    pass
model = nn.Sequential(nn.Linear(2, 2))
model[0].register_forward_hook(Recorder().see)
model.register_forward_hook(functools.partial(note, {"a": grown()}))
first, second = *model[0]._forward_hooks.values(), *model._forward_hooks.values()
targets = [first.__self__.seen[0], second.args[0]["a"]]
del first, second
found = find(targets)
"""
    assert sorted(told(run, program), reverse=True) == [
        "`self.seen[0]` (list, bound object of forward hook `see` on model[0])",
        '`note.args[0]["a"]` (dict, forward hook `note` on model)',
    ]


def test_hooks_of_tensors(run: Run) -> None:
    program = """\
def watch(register, t):
    def hook(grad):
        return t
    register(hook)
x = torch.ones(2, requires_grad=True)
y = x * 2
watch(y.register_hook, grown())
watch(x.register_post_accumulate_grad_hook, grown())
kept = [*y._backward_hooks.values(), *x._post_accumulate_grad_hooks.values()]
targets = [f(None) for f in kept]
kept.clear()
found = find(targets)
"""
    space = run(program)
    found = space["found"]
    # an older torch shows these hooks to nobody but itself
    seen = any(part is space["x"]._post_accumulate_grad_hooks for part in gc.get_referents(space["x"]))
    where = "post-accumulate hook `hook` on x" if seen else "hook `hook` on an autograd node"
    assert [(h.what, h.kind) for h in found] == [
        ("closure variable `t` of tensor hook `hook` on y", "hook"),
        (f"closure variable `t` of {where}", "hook"),
    ]


def test_a_hook_on_a_node_whose_closure_leads_back(run: Run) -> None:
    program = """\
class Kernel:
    def __init__(self):
        self.value = grown()
        def record(*args):
            self.norm = 1
        self.value.grad_fn.register_hook(record)
found = find([Kernel().value])
"""
    (holder,) = run(program)["found"]
    assert holder.what == "`self.value` (closure variable of hook `record` on an autograd node)"
    assert (holder.name, holder.kind, holder.line) == ("self.value", "hook", 4)
    assert holder.detail == "closure variable `self` of hook `record` on an autograd node"


def test_what_a_custom_function_keeps_on_its_ctx() -> None:
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.scale = x * 3
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    out = Mine.apply(torch.ones(2, requires_grad=True)).sum()
    targets = [out.grad_fn.next_functions[0][0].scale]
    assert [(h.what, h.kind) for h in find(targets)] == [("`ctx.scale` (ctx of custom function Mine)", "attribute")]


# frames that do not run


def test_suspended_generators(run: Run) -> None:
    program = """\
def rollout():
    hidden, trace = grown(), [grown()]
    yield hidden, trace

streams = [rollout() for _ in range(3)]
targets = []
for stream in streams:
    hidden, trace = next(stream)
    targets += [hidden, trace[0]]
del stream, hidden, trace
found = find(targets)
"""
    space = run(program)
    assert space["found"] == [
        Holder(
            f"suspended generator rollout() at train.py:3, local `{name}`",
            name,
            "generator",
            space["__file__"],
            3,
            targets,
            "held by `streams[0..2]`",
        )
        for name, targets in (("hidden", (0, 2, 4)), ("trace[0]", (1, 3, 5)))
    ]


def test_a_generator_that_only_a_loop_holds_and_whose_variable_a_function_uses(run: Run) -> None:
    program = """\
def rollout():
    seen = [grown()]
    def last():
        return seen[-1]
    yield seen[:]
for targets in rollout():
    found = find(targets)
"""
    (holder,) = run(program)["found"]
    assert holder.what == "suspended generator rollout() at train.py:5, local `seen[0]`"
    assert holder.detail is None


def test_suspended_coroutines_and_asynchronous_generators() -> None:
    class Wait:
        def __await__(self) -> Iterator[None]:
            yield

    async def fetch() -> None:
        x = grown()
        kept.append(x)
        del x
        y = kept.pop()
        await Wait()
        del y

    async def stream() -> AsyncIterator[Tensor]:
        x = grown()
        yield x
        del x

    kept: list[Tensor] = []
    waiting = fetch()
    waiting.send(None)
    frame = waiting.cr_frame
    target = frame.f_locals["y"]
    del frame
    first = fetch.__code__.co_firstlineno
    wanted = f"suspended coroutine fetch() at test_holders.py:{first + 5}, local `y`"
    assert wanted in [h.what for h in find([target])]
    waiting.close()
    agen = stream()
    step = agen.__anext__()
    with pytest.raises(StopIteration) as stopped:
        step.send(None)
    target = stopped.value.value
    n = stream.__code__.co_firstlineno + 2
    assert f"suspended generator stream() at test_holders.py:{n}, local `x`" in [h.what for h in find([target])]
    closing = agen.aclose()
    with pytest.raises(StopIteration):
        closing.send(None)


FAILS = """\
def fail(depth):
    x = grown()
    if depth:
        return fail(0) + x
    x = [x]
    raise ValueError("no")
errors = []
try:
    fail(1)
except ValueError as error:
    errors.append(error)
"""


def test_the_traceback_of_a_stored_exception(run: Run) -> None:
    program = f"""{FAILS}
def values(error):
    tb = error.__traceback__.tb_next
    return tb.tb_frame.f_locals["x"], tb.tb_next.tb_frame.f_locals["x"][0]
found = find([*values(errors[0])])
"""
    space = run(program)
    assert space["found"] == [
        Holder(
            "local `x` of fail() at train.py:4, kept by the traceback of ValueError in `errors[0]`",
            "x",
            "traceback",
            space["__file__"],
            4,
            (0,),
            "local `x` of frame fail() < traceback < ValueError < errors[0]",
        ),
        Holder(
            "`x[0]` (list, local of fail() at train.py:6, kept by the traceback of ValueError in `errors[0]`)",
            "x[0]",
            "traceback",
            space["__file__"],
            6,
            (1,),
            "local `x` of frame fail() < traceback < ValueError < errors[0]",
        ),
    ]


def test_the_context_and_the_cause_of_an_exception(run: Run) -> None:
    program = """\
def fail():
    x = grown()
    raise KeyError(0)
def log(cause):
    try:
        fail()
    except KeyError as inner:
        if cause:
            raise RuntimeError from inner
        raise RuntimeError
class Log: pass
logs = [Log(), Log()]
for i, one in enumerate(logs):
    try:
        log(cause=i)
    except RuntimeError as error:
        one.error = error
del one
found = find([e.error.__context__.__traceback__.tb_next.tb_frame.f_locals["x"] for e in logs])
"""
    assert [h.detail for h in run(program)["found"]] == [
        "local `x` of frame fail() < traceback < KeyError < logs[0..1].error.__context__"
    ]


def test_the_exception_that_is_being_handled_and_the_last_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """\
import sys, weakref
def fail():
    x = grown()
    refs.append(weakref.ref(x))
    raise ValueError
refs = []
try:
    fail()
except ValueError:
    handled = find([refs[0]()])
    last(sys.exc_info()[1])
found = find([refs[0]()])
"""
    space = run(program, last=lambda error: monkeypatch.setattr(sys, "last_value", error, raising=False))
    text = "local `x` of fail() at train.py:5, kept by the traceback of ValueError in `{}`"
    assert [h.what for h in space["handled"]] == [text.format("sys.exc_info()[1]")]
    assert [h.what for h in space["found"]] == [text.format("sys.last_value")]


# Jupyter, optimizers, gradients


def test_jupyter_shows_an_output_once(run: Run) -> None:
    program = """\
class Shell: pass
shell = Shell()
Out = _oh = shell.history = {5: grown()}
_ = _5 = Out[5]
__ = ''
found = find([Out[5]])
"""
    assert told(run, program, __name__="__main__") == ["`Out[5]` (dict, global of train.py)"]


def test_the_state_of_an_optimizer_is_told_by_its_parameter(run: Run) -> None:
    program = """\
model = nn.Sequential(nn.Linear(2, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
momentum = optimizer.state[model[0].weight]["momentum_buffer"] = grown()
targets = [momentum]
del momentum
found = find(targets)
"""
    found = run(program)["found"]
    assert [(h.what, h.kind) for h in found] == [
        ('`optimizer.state[model[0].weight]["momentum_buffer"]` (dict, global of train.py)', "optimizer")
    ]


def test_gradients_with_a_history(run: Run) -> None:
    program = """\
model = nn.Sequential(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(1, 2, requires_grad=True)
torch.autograd.backward(model(x).pow(2).sum(), create_graph=True)
found = find([model[0].weight.grad, x.grad])
model.zero_grad()
x.grad = None
"""
    found = run(program)["found"]
    assert [(h.what, h.kind, h.targets) for h in found] == [
        ("`model[0].weight.grad` (global of train.py)", "grad", (0,)),
        ("`x.grad` (global of train.py)", "grad", (1,)),
    ]


def test_the_gradient_of_a_tensor_without_a_name() -> None:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward((x * x).sum(), create_graph=True)
    grad = x.grad
    x = weakref.ref(x)
    assert "`.grad` of a tensor that no name leads to" in whats(grad)
    x().grad = None


# cycles, and what is no holder


def test_a_cycle_without_a_name_is_told(run: Run) -> None:
    program = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Tanh()
        self.kept = grown()
        def hook(*args):
            self.kept = args
        self.layer.register_forward_hook(hook)
class Node: pass
def ring():
    a, b = Node(), Node()
    a.next, b.prev, a.x = b, a, grown()
    return a.x
found = find([Net().kept, ring()])
"""
    gc.collect()
    gc.disable()
    try:
        found = run(program)["found"]
    finally:
        gc.enable()
    assert [(h.what, h.name, h.kind, h.detail) for h in found] == [
        (
            "`Net.kept` (cycle: Net → `.layer` → forward hook `hook` → closure variable `self` → Net)",
            "Net.kept",
            "cycle",
            "cycle: Net → `.layer` → forward hook `hook` → closure variable `self` → Net",
        ),
        ("`Node.x` (cycle: Node → `.next.prev` → Node)", "Node.x", "cycle", "cycle: Node → `.next.prev` → Node"),
    ]
    gc.collect()


def test_weak_references_never_count() -> None:
    values, keys = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()

    def look() -> list[Any]:
        t = grown()
        values["t"] = t
        keys[t] = 1
        ref = weakref.ref(t, lambda _: None)
        return [h.name for h in find([t])] + [str(type(ref) is weakref.ref)]

    assert look() == ["t", "True"]


def test_what_nothing_holds_has_no_holder() -> None:
    assert find([grown()]) == []
    assert find([]) == []


def test_what_only_a_running_loop_holds_is_said() -> None:
    for _ in [Plain(grown()), Plain(grown())]:
        alive = [o for o in gc.get_objects() if type(o) is Plain]
        targets = [o.x for o in alive]
        alive.clear()
        del _
        assert [(h.name, h.kind) for h in find(targets, ignore={id(targets)})] == [("…[0..1].x", "unknown")]
        break


def test_the_callers_and_what_is_ignored_never_count() -> None:
    kept = [grown()]
    assert find(kept) == []
    more = {"a": kept}
    assert find([kept[0]], ignore={id(kept)}) == []
    assert len(find([kept[0]])) == 2
    assert more

    def caller(find: Any, make: Any) -> Any:
        t = make()
        box = {"t": t}
        return find([t]), box

    ours = types.FunctionType(caller.__code__, vars(_holders))
    assert ours(find, grown)[0] == []


def test_what_graphkeep_has_itself_never_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> list[Any]:
        t = grown()
        monkeypatch.setattr(_holders, "_kept", [t], raising=False)
        monkeypatch.setattr(_holders.Holder, "kept", t, raising=False)
        return find([t])

    assert [h.name for h in look()] == ["t"]


def test_nodes_and_modules_have_holders_too(run: Run) -> None:
    program = """\
y = grown()
node = y.grad_fn
model = nn.Sequential(nn.Sequential(nn.Tanh()))
found = find([node, model[0][0]])
"""
    found = run(program)["found"]
    assert "global `node` of train.py" in [h.what for h in found]
    assert "`model[0][0]` (global of train.py)" in [h.what for h in found]


# the program's code never runs


class Alarm(BaseException):
    """Code of the program's ran."""


def alarm(*args: Any, **kwargs: Any) -> Any:
    raise Alarm


ALARMS = {
    f"__{name}__": alarm
    for name in ("repr", "str", "eq", "ne", "lt", "len", "bool", "iter", "getitem", "contains", "getattr", "getattribute")
}


class HostileKey:
    __hash__ = object.__hash__
    __eq__ = __repr__ = __str__ = alarm
    __class__ = property(alarm)  # type: ignore[assignment]


class HostileText(str):
    __slots__ = ()
    __hash__ = str.__hash__
    __eq__ = __repr__ = __str__ = __len__ = __iter__ = __getitem__ = isprintable = alarm


def hostile(name: str, base: type, **more: Any) -> tuple[Any, Any]:
    """A class of which every piece of code raises, its metaclass's too, and an instance."""
    meta = type(
        "Meta", (type(base),), {**ALARMS, "__hash__": object.__hash__, "__instancecheck__": alarm, "__subclasscheck__": alarm}
    )
    space = {**ALARMS, "__hash__": alarm, "__call__": alarm, "__class__": property(alarm), "__dict__": property(alarm), **more}
    cls = type.__new__(meta, name, (base,), space)
    return cls, base.__new__(cls)


def test_no_code_of_the_program_runs(run: Run) -> None:
    cls, thing = hostile("Thing", object, __slots__=("x", "__weakref__"))
    _, table = hostile("Table", dict, items=alarm, keys=alarm, values=alarm, get=alarm)
    _, row = hostile("Row", list)
    _, error = hostile("Error", Exception)
    _, net = hostile("Net", nn.Module)
    odd = torch.ones(2).as_subclass(type("Odd", (Tensor,), {"__torch_function__": classmethod(alarm), "__repr__": alarm}))
    slot = type.__dict__["__dict__"].__get__(cls)["x"]
    slot.__set__(thing, [grown()])
    dict.__setitem__(table, HostileKey(), grown())
    dict.__setitem__(table, HostileText("a"), grown())
    list.append(row, grown())
    error_dict = BaseException.__dict__["__dict__"].__get__(error)
    error_dict[HostileKey()] = error_dict["kept"] = grown()
    nn.Module.__dict__["__dict__"].__get__(net)["held"] = grown()
    mixed = {HostileKey(): cls, "thing": thing, cls: 1, "table": table, "row": row, "error": error, "net": net, "odd": odd}
    values = [slot.__get__(thing)[0], *dict.values(table), *list.__iter__(row), error_dict["kept"], odd]
    values.append(nn.Module.__dict__["__dict__"].__get__(net)["held"])
    del thing, table, row, error, net, odd, error_dict
    program = "globals()[Key()] = table = mixed\nfound = find(values, seconds=100, ignore=ignore)"
    space = run(program, mixed=mixed, values=values, Key=HostileKey, ignore={id(values)})
    mixed.clear()
    values.clear()
    assert sorted({h.name for h in space["found"]}) == [
        'mixed["error"].kept',
        'mixed["error"][<HostileKey>]',
        'mixed["net"].held',
        'mixed["odd"]',
        'mixed["row"][0]',
        'mixed["table"][<HostileKey>, <HostileText>]',
        'mixed["thing"].x[0]',
    ]
    assert "Table" in " ".join(h.what for h in space["found"])


# looking changes nothing


def test_nothing_is_left_behind(no_collector: None, run: Run) -> None:
    program = f"""{FAILS}
def stream():
    x = grown()
    yield x
def closure(t):
    return lambda: t
{HOOKED}
def everything():
    model[0].weight.grad = None
    x = grown()
    lists = [[grown()] for _ in range(400)]  # more than are looked up one by one
    gens = [stream()]
    watch(model[0], "register_forward_hook").append(x)
    targets = [x, *(one[0] for one in lists), next(gens[0])]
    refs = [weakref.ref(t) for t in targets]
    found.append(find(targets))
    model[0]._forward_hooks.clear()
    return refs
"""
    found: list[Any] = []
    space = run(program, weakref=weakref, found=found)
    gc.collect()
    alive = [ref() for ref in space["everything"]()]
    assert alive == [None] * 402
    assert gc.collect() == 0
    assert {h.name for h in found[0]} >= {"x", "lists[0..399][0]", "acts[0]"}


def test_a_variable_that_is_rebound_after_the_look_is_freed_at_once(no_collector: None) -> None:
    def inner(outer: Any) -> None:
        find([outer])

    def stream() -> Iterator[Any]:
        x = grown()
        yield weakref.ref(x)
        x = None
        yield x

    a = grown()
    ref = weakref.ref(a)
    inner(a)
    gen = stream()
    inside = next(gen)
    find([inside()])
    a = None
    assert ref() is None
    next(gen)
    assert inside() is None
    assert a is None


def test_locals_that_the_program_asked_for_are_not_emptied() -> None:
    loss = grown()
    kept = locals()
    find([loss])
    assert kept["loss"] is loss


def test_a_debugger_can_still_write_variables_back() -> None:
    seen = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_code is watched.__code__:
            seen.extend(value for name, value in frame.f_locals.items() if name == "x")
            find(seen)
        return trace

    def watched() -> Tensor:
        x = grown()
        y = x
        return y

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        out = watched()
    finally:
        sys.settrace(before)
    assert seen[-1] is out


def test_dicts_that_other_threads_change() -> None:
    table: dict[Any, Any] = dict.fromkeys(range(20_000))
    table["t"] = t = grown()
    stop = threading.Event()

    def change() -> None:
        i = 0
        while not stop.is_set():
            table[f"new{i}"] = table.pop(f"new{i - 1}", None)
            i += 1

    thread = threading.Thread(target=change)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(5):
            assert 'table["t"]' in [h.name for h in find([t], seconds=100)]
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()


def test_the_collector_is_as_it_was_before() -> None:
    find([grown()])
    assert gc.isenabled()
    gc.disable()
    find([grown()])
    assert not gc.isenabled()
    gc.enable()


def test_the_collector_does_not_run_meanwhile() -> None:
    class Ignore:
        def __contains__(self, _: object) -> bool:
            enabled.add(gc.isenabled())
            return False

    enabled: set[bool] = set()
    kept = [grown()]
    assert [h.name for h in find(kept[:], ignore=Ignore())] == ["kept[0]"]
    assert enabled == {False}


def test_a_search_that_runs_out_of_time_says_so() -> None:
    class Log:
        pass

    log = Log()
    log.outs = [grown() for _ in range(3)]
    x = log.outs[0]
    found = find(log.outs[:], seconds=0)
    assert [(h.what, h.kind, h.targets) for h in found[-1:]] == [("the search was stopped after 0 s", "unknown", (1, 2))]
    assert [h.name for h in found[:-1]] == ["x"]
    assert x is log.outs[0]


def test_thousands_of_targets(run: Run) -> None:
    program = """outs = [grown() for _ in range(3000)]
records = [{"loss": out, "step": i} for i, out in enumerate(outs)]
found = find(outs[:], seconds=60)
"""
    found = run(program)["found"]
    assert [(h.name, len(h.targets)) for h in found] == [("outs[0..2999]", 3000), ('records[0..2999]["loss"]', 3000)]


def test_deep_nesting(run: Run) -> None:
    program = """kept = [grown()]
targets = kept[:]
for _ in range(20):
    kept = [kept]
deep = targets[0]
found = find(targets, seconds=60)
"""
    assert sorted(h.name for h in run(program)["found"]) == ["deep", "kept" + "[0]" * 21]
    program = program.replace("20", "80").replace("deep = targets[0]", "")
    assert [(h.kind, h.what[-19:]) for h in run(program)["found"]] == [("unknown", " far from any name)")]
