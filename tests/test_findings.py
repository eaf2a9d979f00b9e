"""What `gk.watch` finds, and what a failed backward's note says, for each of the shapes in `leaks.py`; and no false alarms."""

from __future__ import annotations

import gc
import inspect
import re
import runpy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import leaks
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import graphkeep as gk

Text = str | tuple[str, ...]  # a tuple: one of these

STOP_GRADIENT = (".detach()", "torch.no_grad()")
SECOND_BACKWARD = "Trying to backward through the graph a second time"
IN_PLACE = "modified by an inplace operation"


@dataclass
class Case:
    """A program, and what the text about it has to say.

    ``ids`` are the ids that the text may bear: none for a program that is well. In the texts, ``"@HERE"`` is any line of the
    program with the comment ``# HERE``. ``fix`` holds alternatives.
    """

    name: str
    program: Callable[[Any, leaks.Look], None] | str
    ids: tuple[str, ...] = ()
    contains: tuple[Text, ...] = ()
    fix: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    severity: tuple[str, ...] = ()
    step_between: bool = False  # an optimizer's step lies between the two backwards
    collector: bool = True  # False: the cycle is one that Python's collector can free, so it has to be off for a leak

    @property
    def kind(self) -> str:
        return "none" if not self.ids else "note" if self.ids[0].startswith("GK2") else "finding"


GROWS, NODES, COSTS = ("bytes grow",), ("nodes grow",), ("costs",)
EITHER = ("bytes grow", "nodes grow")
NO_BYTES = ("0 B", "0 bytes", "no bytes", "no saved")
NO_BACKWARD = "no backward"
KEPT = ("GK101", "GK103")

CASES = [
    # a chain of nodes that grows with the history of a value, and saves nothing
    Case(
        "D1 total += loss",
        leaks.d1_total,
        ("GK102",),
        ("total", "@HERE", "step", NO_BYTES),
        ("total += loss.detach()", "loss.detach()", "loss.item()"),
        severity=NODES,
    ),
    Case("D1 meter", leaks.d1_meter, ("GK102",), ("meter.sum", "@HERE", NO_BYTES), (".detach()", ".item()"), severity=NODES),
    Case(
        'D1 running["loss"]',
        leaks.d1_dict,
        ("GK102",),
        (('running["loss"]', "running['loss']"), "@HERE", NO_BYTES),
        ("loss.detach()", "loss.item()"),
        ("acc",),
        severity=NODES,
    ),
    Case(
        "D1 nonlocal",
        leaks.d1_nonlocal,
        ("GK102",),
        ("epoch_loss", "@HERE", NO_BYTES),
        (".detach()", ".item()"),
        severity=NODES,
    ),
    Case(
        "D1 list of losses", leaks.d1_list, ("GK102",), ("losses", "@HERE", NO_BYTES), (".detach()", ".item()"), severity=NODES
    ),
    Case(
        "D1 script",
        leaks.D1_SCRIPT,
        ("GK102",),
        ("running_loss", "@HERE", NO_BYTES),
        ("loss.detach()", "loss.item()"),
        severity=NODES,
    ),
    # outputs of an evaluation
    Case("D2 outs", leaks.d2_outs, KEPT, ("outs", "@HERE", NO_BACKWARD), ("torch.no_grad()",), severity=GROWS),
    Case("D2 metric", leaks.d2_metric, KEPT, ("metric.preds", "@HERE", NO_BACKWARD), ("torch.no_grad()",), severity=GROWS),
    Case("D2 torch.cat", leaks.d2_cat, KEPT, ("all_scores", "@HERE", NO_BACKWARD), ("torch.no_grad()",), severity=GROWS),
    Case(
        "D2 validation in each epoch",
        leaks.d2_validation,
        KEPT,
        (("self.val_outputs", "val_outputs"), "logits", "@HERE", NO_BACKWARD),
        ("torch.no_grad()",),
        severity=GROWS,
    ),
    Case("D2 script", leaks.D2_SCRIPT, KEPT, ("predictions", "@HERE", NO_BACKWARD), ("torch.no_grad()",), severity=GROWS),
    # what a step returns
    Case(
        "D3 outputs of an epoch",
        leaks.d3_outputs,
        ("GK101", "GK102", "GK103"),
        ("outputs", ("aux_logits", "loss"), "@HERE"),
        STOP_GRADIENT,
        severity=EITHER,
    ),
    Case(
        "D3 dict of dicts",
        leaks.d3_trainer,
        ("GK101", "GK102"),
        ("step_results", ("logits", "loss"), "@HERE"),
        STOP_GRADIENT,
        ('["batch"]', "['batch']"),
        severity=EITHER,
    ),
    Case(
        "D3 dataclass",
        leaks.d3_dataclass,
        ("GK101", "GK102", "GK103"),
        ("epoch_end", ("hidden", "loss"), "@HERE"),
        STOP_GRADIENT,
        severity=EITHER,
    ),
    # a moving average
    Case("D4 ema", leaks.d4_ema, ("GK102",), ("ema", "@HERE", "step", NO_BYTES), (".detach()", ".item()"), severity=NODES),
    Case(
        "D4 baseline of an agent",
        leaks.d4_attribute,
        ("GK102",),
        ("agent.baseline", "@HERE", NO_BYTES),
        (".detach()", ".item()"),
        severity=NODES,
    ),
    Case(
        "D4 in place",
        leaks.d4_in_place,
        ("GK102",),
        (('stats["smooth"]', "stats['smooth']"), "@HERE", NO_BYTES),
        (".detach()", ".item()"),
        ("best",),
        severity=NODES,
    ),
    # replay buffers
    Case("D5 deque", leaks.d5_deque, KEPT, ("buffer", "@HERE"), STOP_GRADIENT, severity=GROWS),
    Case("D5 ring", leaks.d5_ring, KEPT, ("replay.memory", "q_taken", "@HERE"), STOP_GRADIENT, severity=GROWS),
    Case(
        "D5 preallocated",
        leaks.d5_preallocated,
        ("GK101", "GK103", "GK104"),
        ("episode.data", "values", "@HERE"),
        STOP_GRADIENT,
        severity=GROWS,
    ),
    # backward(create_graph=True)
    Case(
        "D6 inputs",
        leaks.d6_inputs,
        ("GK105",),
        ("create_graph=True", "@HERE", ("cycle", "unreachable"), ".grad"),
        ("autograd.grad",),
    ),
    Case(
        "D6 a model in each task",
        leaks.d6_fresh_model,
        ("GK105",),
        ("create_graph=True", "@HERE", ("cycle", "unreachable"), ".grad"),
        ("autograd.grad",),
        severity=GROWS,
    ),
    Case(
        "D6 steps by hand",
        leaks.d6_by_hand,
        ("GK105", "GK101"),
        ("create_graph=True", "@HERE", ".grad"),
        ("autograd.grad",),
        severity=GROWS,
    ),
    # hooks on a graph
    Case(
        "D7 hook closes over the owner",
        leaks.d7_owner,
        ("GK106",),
        ("record_norm", "self", "hook", "@HERE", ("cycle", "unreachable")),
        ("weakref", ".detach()", ".remove()"),
    ),
    Case(
        "D7 tensor hook closes over its tensor",
        leaks.d7_tensor_hook,
        ("GK106",),
        ("grad_cam", "feat", "hook", "@HERE", ("cycle", "unreachable")),
        ("weakref", ".detach()", ".remove()"),
    ),
    Case(
        "D7 partial",
        leaks.d7_partial,
        ("GK106",),
        ("log_grad", ("record", "partial", "out"), "hook", "@HERE", ("cycle", "unreachable")),
        ("weakref", ".detach()", ".remove()"),
    ),
    # forward hooks that collect
    Case(
        "D8 capture",
        leaks.d8_capture,
        ("GK101", "GK103"),
        ("acts", "capture", "hook", "encoder", "@HERE"),
        STOP_GRADIENT,
        severity=GROWS,
    ),
    Case(
        "D5 transitions",
        leaks.d5_transitions,
        KEPT,
        ("memory", "@HERE"),
        ("`.detach()` on the tensors in what is stored in `replay.memory[0..",),
        absent=("transition.detach()",),
        severity=GROWS,
    ),
    Case("D12 kept", leaks.d12_kept, ("GK101", "GK301"), ("losses", "@HERE"), STOP_GRADIENT, severity=(*GROWS, *COSTS)),
    Case("D8 per sample", leaks.d8_per_sample, KEPT, ("activations", "@HERE"), STOP_GRADIENT, severity=GROWS),
    Case(
        "D8 default argument", leaks.d8_default_argument, KEPT, ("keep_output", "store", "@HERE"), STOP_GRADIENT, severity=GROWS
    ),
    # stored exceptions
    Case(
        "D9 errors",
        leaks.d9_errors,
        KEPT,
        ("errors", "ValueError", "traceback", "forward_one", "hidden", ("@HERE", "@KEPT")),
        ("with_traceback(None)", "__traceback__", "clear_frames", "format_exc", "str("),
        severity=GROWS,
    ),
    Case(
        "D9 failures of a runner",
        leaks.d9_log,
        KEPT,
        ("failures", "ArithmeticError", "traceback", "compute", "logits", ("@HERE", "@KEPT")),
        ("with_traceback(None)", "__traceback__", "clear_frames", "format_exc", "str("),
        severity=GROWS,
    ),
    Case(
        "D9 futures",
        leaks.d9_futures,
        KEPT,
        ("futures", "KeyError", "traceback", "score", "activation", ("@HERE", "@KEPT")),
        ("with_traceback(None)", "__traceback__", "clear_frames", "format_exc", "str("),
        severity=GROWS,
    ),
    # caches
    Case(
        "D10 method",
        leaks.d10_method,
        KEPT,
        ("position_bias", "lru_cache", "@HERE"),
        (*STOP_GRADIENT, "cache_clear()", "maxsize"),
        severity=GROWS,
    ),
    Case(
        "D10 function",
        leaks.d10_function,
        KEPT,
        ("teacher_logits", ("lru_cache", "functools.cache"), "@HERE"),
        (*STOP_GRADIENT, "cache_clear()", "maxsize"),
        severity=GROWS,
    ),
    Case("D10 by hand", leaks.d10_by_hand, KEPT, ("seen", "@HERE"), STOP_GRADIENT, severity=GROWS),
    # suspended generators
    Case(
        "D11 streams",
        leaks.d11_streams,
        KEPT,
        ("streams", "rollout", "hidden", "suspended", ("@HERE", "@KEPT")),
        (".close()",),
        severity=GROWS,
    ),
    Case(
        "D11 trace",
        leaks.d11_trace,
        KEPT,
        ("tracker", "trace", "suspended", "@HERE"),
        (".close()", *STOP_GRADIENT),
        severity=GROWS,
    ),
    Case(
        "D11 async generator",
        leaks.d11_async,
        KEPT,
        ("pending", "episode", "action_logits", "suspended", ("@HERE", "@KEPT")),
        (".aclose()", ".close()"),
        severity=GROWS,
    ),
    Case(
        "D11 script",
        leaks.D11_SCRIPT,
        KEPT,
        ("workers", "sample_actions", "scores", "suspended", "@HERE"),
        (".close()",),
        severity=GROWS,
    ),
    # retain_graph=True that nobody used
    Case("D12 left on", leaks.d12_left_on, ("GK301",), ("retain_graph=True", "@HERE"), ("remove", "drop"), severity=COSTS),
    Case("D12 trainer", leaks.d12_trainer, ("GK301",), ("retain_graph=True", "@HERE"), ("remove", "drop"), severity=COSTS),
    Case(
        "D12 second of two",
        leaks.d12_second_of_two,
        ("GK301",),
        ("retain_graph=True", "@HERE"),
        ("remove", "drop"),
        ("@NEEDED",),
        severity=COSTS,
    ),
    Case("D12 autograd.grad", leaks.d12_grad, ("GK301",), ("retain_graph=True", "@HERE"), ("remove", "drop"), severity=COSTS),
    # modules that are built anew, each in a cycle with its hook
    Case(
        "D13 closure",
        leaks.d13_rebuilt,
        ("GK106", "GK101", "GK103"),
        ("save_features", "self", ("cycle", "unreachable"), "hook", "@HERE"),
        ("weakref", ".remove()", ".detach()"),
        collector=False,
    ),
    Case(
        "D13 bound method",
        leaks.d13_bound_method,
        ("GK106", "GK101", "GK103"),
        ("on_forward", ("self", "Probe"), ("cycle", "unreachable"), "hook", "@HERE"),
        ("weakref", ".remove()", ".detach()"),
        collector=False,
    ),
    # a state carried between the steps
    Case(
        "GK104 state",
        leaks.carried_state,
        ("GK104",),
        ("h", ("@HERE", "@CALL"), ("earlier", "previous", "before")),
        ("h.detach()", "h = h.detach()"),
        severity=("bytes grow", "will raise"),
    ),
    Case(
        "GK104 attribute",
        leaks.carried_attribute,
        ("GK104",),
        ("snn.membrane", ("@HERE", "@CALL"), ("earlier", "previous", "before")),
        (".detach()",),
        severity=("bytes grow", "will raise"),
    ),
    # attributes of ctx
    Case(
        "GK107 output",
        leaks.ctx_output,
        ("GK107",),
        ("ctx.y", "Exp", "@HERE"),
        ("save_for_backward",),
        collector=False,
    ),
    Case(
        "GK107 dict",
        leaks.ctx_dict,
        ("GK107",),
        ("ctx.cache", "result", "SquareSum", "@HERE"),
        ("save_for_backward",),
        collector=False,
    ),
    # a second backward
    Case("D14 RNN", leaks.d14_rnn, ("GK201",), ("h", "@BUILT", "@FREED"), ("h.detach()", "h = h.detach()")),
    Case("D14 LSTM", leaks.d14_lstm, ("GK201",), ("hidden", "@BUILT", "@FREED"), (".detach()",)),
    Case("D14 agent", leaks.d14_agent, ("GK201",), ("self.memory", "@BUILT", "@FREED"), ("self.memory.detach()",)),
    Case("D14 memories", leaks.d14_memories, ("GK201",), ("mems", "@BUILT", "@FREED"), (".detach()",)),
    Case(
        "D15 a step between",
        leaks.d15_step_between,
        ("GK201",),
        ("h", "@BUILT", "@FREED"),
        ("h.detach()",),
        step_between=True,
    ),
    Case(
        "D15 the popular answer",
        leaks.d15_popular_answer,
        ("GK202",),
        (("cell.weight_hh", 'model["cell"].weight_hh', "model['cell'].weight_hh"), "SGD", "step", "@CHANGED", "@SAVED"),
        (".detach()",),
        step_between=True,
    ),
    Case(
        "D15 class",
        leaks.d15_class,
        ("GK201",),
        (("model.level", "self.level"), "@BUILT", "@FREED"),
        (".detach()",),
        step_between=True,
    ),
    Case(
        "D16 past keys",
        leaks.d16_past,
        ("GK201",),
        ("past_keys", "attn", "@BUILT", "@FREED", ("step 1", "first step", "step 0", "1 step")),
        (".detach()",),
    ),
    Case(
        "D16 computed when first asked",
        leaks.d16_lazy,
        ("GK201",),
        ("model._prompt", "@BUILT", "@FREED"),
        (".detach()", "each step", "every step", "in the loop", "again", "gk.cut"),
        step_between=True,
    ),
    Case(
        "D16 buffer",
        leaks.d16_buffer,
        ("GK201",),
        ("layer.cache_k", "@BUILT", "@FREED"),
        (".detach()",),
    ),
    Case(
        "D17 features",
        leaks.d17_features,
        ("GK201",),
        ("features", "@BUILT", "@FREED"),
        (".detach()", "each step", "every step", "in the loop", "inside the loop", "again", "gk.cut"),
        step_between=True,
    ),
    Case(
        "D17 penalty",
        leaks.d17_penalty,
        ("GK201",),
        ("weight_decay", "@BUILT", "@FREED"),
        (".detach()", "each step", "every step", "in the loop", "inside the loop", "again", "gk.cut"),
    ),
    Case(
        "D17 old log-probabilities",
        leaks.d17_ratio,
        ("GK201",),
        ("old_logp", "@BUILT", "@FREED"),
        ("old_logp.detach()", ".detach()"),
        step_between=True,
    ),
    Case(
        "D17 script",
        leaks.D17_SCRIPT,
        ("GK201",),
        ("node_embeddings", "@BUILT", "@FREED"),
        (".detach()", "each step", "every step", "in the loop", "inside the loop", "again", "gk.cut"),
    ),
    Case("D18 GAN", leaks.d18_gan, ("GK201",), ("fake", "@BUILT", "@FREED"), ("fake.detach()",), step_between=True),
    Case("D18 pix2pix", leaks.d18_pix2pix, ("GK201",), ("fake_B", "@BUILT", "@FREED"), ("fake_B.detach()",)),
    Case(
        "D18 actor and critic",
        leaks.d18_actor_critic,
        ("GK201",),
        (("value", "advantage"), "@BUILT", "@FREED"),
        ("value.detach()", "advantage.detach()"),
    ),
    # something was changed in place
    Case(
        "D19 GAN",
        leaks.d19_gan,
        ("GK202",),
        (("D.2.weight", "D[2].weight"), "Adam", "step", "@CHANGED", "@SAVED"),
        ("before", "after", "again", ".detach()"),
        step_between=True,
    ),
    Case(
        "D19 shared trunk",
        leaks.d19_shared_trunk,
        ("GK202",),
        (("trunk.2.weight", "trunk[2].weight"), "RMSprop", "step", "@CHANGED", "@SAVED"),
        ("before", "after", "again"),
        step_between=True,
    ),
    Case(
        "D19 by hand",
        leaks.d19_by_hand,
        ("GK202",),
        (("model.2.weight", "model[2].weight"), "@CHANGED", "@SAVED"),
        ("before", "after", "again"),
        step_between=True,
    ),
    Case(
        "D19 weights drawn anew",
        leaks.d19_clamp,
        ("GK202",),
        (("critic.2.weight", "critic[2].weight"), "uniform_", "@CHANGED", "@SAVED"),
        ("before", "after", "again"),
    ),
    Case("D20 residual", leaks.d20_residual, ("GK202",), ("tanh", "@SAVED", "@CHANGED"), ("x = x + r",)),
    Case(
        "D20 mask", leaks.d20_mask, ("GK202",), ("gate", "sigmoid", "@SAVED", "@CHANGED"), ("clone()", "where(", "masked_fill(")
    ),
    Case(
        "D20 relu in place",
        leaks.d20_relu,
        ("GK202",),
        ("exp", ("relu_", "ReLU", "relu"), "@SAVED", "@CHANGED"),
        ("inplace=False", "relu(", "clone()"),
    ),
    Case(
        "D20 state",
        leaks.d20_state,
        ("GK202",),
        ("potential", "mul", "@SAVED", "@CHANGED"),
        ("self.potential = self.potential * 0.5", "self.potential = self.potential.mul(0.5)"),
    ),
    Case("D20 script", leaks.D20_SCRIPT, ("GK202",), ("exp", "@SAVED", "@CHANGED"), ("h = h + r",)),
    # no false alarm
    Case("D21 full backward hooks", leaks.d21_full_backward_hooks),
    Case("D21 full backward pre-hooks", leaks.d21_pre_hooks),
    Case("D21 hooks that are removed", leaks.d21_removed_hooks),
    Case("D22 loop variables", leaks.d22_loop_variables),
    Case("D22 attribute", leaks.d22_attribute),
    Case("D22 validation", leaks.d22_validation_out),
    Case("D22 script", leaks.D22_SCRIPT),
    Case("D23 pool", leaks.d23_pool),
    Case("D23 data that is cached", leaks.d23_dataset),
    Case("D23 batches that get longer", leaks.d23_longer_batches),
    Case("D24 gradient accumulation", leaks.d24_accumulation),
    Case("D24 sum, then backward", leaks.d24_sum_then_backward),
    Case("D24 pending losses", leaks.d24_pending),
    Case("D24 script", leaks.D24_SCRIPT),
    Case("D25 optimizer state", leaks.d25_optimizer_state),
    Case("D25 a window fills", leaks.d25_window_fills),
    Case("D25 position cache", leaks.d25_position_cache),
    Case("D25 L-BFGS", leaks.d25_lbfgs),
    Case("D26 window", leaks.d26_window),
    Case("D26 step by step", leaks.d26_step_by_step),
    Case("D26 sliding window", leaks.d26_sliding),
    Case("D26 script", leaks.D26_SCRIPT),
    *(
        Case(name.removeprefix("ok_").replace("_", " "), program)
        for name, program in vars(leaks).items()
        if name.startswith("ok_")
    ),
]


def of(*kinds: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if c.kind in kinds])


@dataclass
class Run:
    """A case's program, ready to run: with the lines that its comments mark."""

    case: Case
    folder: Path

    def __post_init__(self) -> None:
        if isinstance(self.case.program, str):
            self.path = self.folder / "train.py"
            self.path.write_text(self.case.program)
            source, first = self.case.program.splitlines(), 1
        else:
            self.path = Path(leaks.__file__)
            source, first = inspect.getsourcelines(self.case.program)
        self.marks: dict[str, list[int]] = {}
        for number, line in enumerate(source, first):
            if mark := re.search(r"  # ([A-Z]+)$", line.rstrip()):
                self.marks.setdefault(mark[1], []).append(number)

    def __call__(self, w: Any, look: leaks.Look) -> None:
        if isinstance(self.case.program, str):
            runpy.run_path(str(self.path), init_globals={"w": w, "look": look})
        else:
            self.case.program(w, look)

    def spelled(self, text: Text) -> list[str]:
        """The strings of which one has to occur."""
        strings = []
        for alternative in (text,) if isinstance(text, str) else text:
            if alternative.startswith("@"):
                strings += [f"{self.path.name}:{line}" for line in self.marks[alternative[1:]]]
            else:
                strings.append(alternative)
        return strings


def position(text: str, strings: list[str]) -> int | None:
    """Where the first of these occurs, as whole words."""
    found = [
        re.search((r"(?<!\w)" if s[0].isalnum() else "") + re.escape(s) + (r"(?!\w)" if s[-1].isalnum() else ""), text)
        for s in strings
    ]
    return min((m.start() for m in found if m), default=None)


def missing(run: Run, text: str, advice: str) -> list[Text]:
    wanted = [(text, want) for want in run.case.contains] + [(advice, run.case.fix)]
    return [want for where, want in wanted if position(where, run.spelled(want)) is None]


def unwanted(run: Run, text: str) -> list[str]:
    return [bad for bad in run.case.absent if position(text, run.spelled(bad)) is not None]


def advice_to_retain(text: str) -> list[int]:
    """Where a text advises `retain_graph=True`: not where it reports it, or says that it will not do."""
    places = []
    for sentence in re.finditer(r"(?:[^.;!?\n]|[.;!?](?=\S))+", text):
        said = sentence[0]
        advises = re.search(r"\b(pass|use|give|set|add|specify|try|write|call|with|need)\b", said, re.IGNORECASE)
        denies = re.search(
            r"\b(not|no|never|nobody|remove|drop|without|cannot|instead of|used|was|had)\b|n't", said, re.IGNORECASE
        )
        if "retain_graph=True" in said and advises and not denies:
            places.append(sentence.start() + said.index("retain_graph=True"))
    return places


class Slot:
    """What a node holds in place of a tensor that it saved."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Census:
    """Stands in for a watch, to show that a program is as its case says: graph nodes and saved tensors alive at each step."""

    def __init__(self) -> None:
        self.saved: weakref.WeakSet[Any] = weakref.WeakSet()
        self.counts: list[tuple[int, int, int]] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        slot = Slot(tensor.detach())
        self.saved.add(slot)
        return slot

    def step(self) -> None:
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.grad_fn is not None]
        todo, nodes = [t.grad_fn for t in tensors], set()
        while todo:
            node = todo.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                todo += [after for after, _ in node.next_functions]
        self.counts.append((len(nodes), len(self.saved), len(tensors)))

    def thirds(self) -> Iterator[list[int]]:
        """For each of the three counts, its maximum in each third of the steps."""
        third = len(self.counts) // 3
        for values in zip(*self.counts, strict=True):
            yield [max(values[:third]), max(values[third : 2 * third]), max(values[2 * third : 3 * third])]


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def collector(request: pytest.FixtureRequest, frozen: None) -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what others have left (some graphs can never be freed) is not looked at, which also is ten times as fast
    if not request.getfixturevalue("case").collector:
        gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector")
@of("finding", "none")
def test_without_graphkeep_the_program_grows_or_is_steady_as_its_case_says(case: Case, tmp_path: Path) -> None:
    census, looked = Census(), []
    handle = register_optimizer_step_post_hook(lambda *_: census.step())
    try:
        with torch.autograd.graph.saved_tensors_hooks(census.pack, lambda slot: slot.value):
            Run(case, tmp_path)(census, lambda: looked.append(1))
    finally:
        handle.remove()
    nodes, saved, tensors = (first < middle < last for first, middle, last in census.thirds())
    assert (nodes or saved or tensors) == (bool(case.ids) and case.severity != COSTS), list(census.thirds())
    if case.severity in (GROWS, NODES) and case.program is not leaks.d9_futures:  # hooks see one thread
        assert saved == (case.severity == GROWS), list(census.thirds())
    assert looked == [1]
    assert len(census.counts) >= 12


@of("note")
def test_without_graphkeep_the_program_raises_as_its_case_says(case: Case, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=SECOND_BACKWARD if case.ids == ("GK201",) else IN_PLACE):
        Run(case, tmp_path)(SimpleNamespace(step=lambda: None), lambda: pytest.fail("it ended"))


@pytest.mark.usefixtures("collector")
@of("finding")
def test_what_grows_is_found_with_its_holder_its_line_its_cause_and_what_to_write_instead(case: Case, tmp_path: Path) -> None:
    run, findings = Run(case, tmp_path), []
    with gk.watch() as w:
        run(w, lambda: findings.extend(w.findings))
    assert findings, "nothing was found"
    assert {f.id for f in findings} <= set(case.ids), "\n\n".join(map(str, findings))
    lacks = {str(f): missing(run, str(f), f.instead) for f in findings}
    assert [] in lacks.values(), lacks
    for f in findings:
        assert not unwanted(run, str(f)), str(f)
        assert not case.severity or f.severity in case.severity, str(f)
        assert f.what, str(f)
        assert f.why, str(f)
        assert f.where is None or re.fullmatch(r".+\.py:\d+", f.where), f.where
        assert all(part in str(f) for part in (f.id, f.what, f.why, f.instead)), str(f)
        assert not advice_to_retain(str(f)), str(f)


@pytest.mark.usefixtures("collector")
@of("note")
def test_a_failed_backward_is_explained_by_a_note(case: Case, tmp_path: Path) -> None:
    run = Run(case, tmp_path)
    with gk.watch() as w:
        with pytest.raises(RuntimeError, match=SECOND_BACKWARD if case.ids == ("GK201",) else IN_PLACE) as caught:
            run(w, lambda: None)
    note = "\n".join(getattr(caught.value, "__notes__", []))
    assert position(note, list(case.ids)) is not None, note or "no note"
    assert not missing(run, note, note), note
    advice = advice_to_retain(note)
    if case.step_between:
        assert not advice, note
    fix = position(note, run.spelled(case.fix))
    assert not advice or (fix is not None and fix < advice[0]), note


@pytest.mark.usefixtures("collector")
@of("none")
def test_a_program_that_is_well_gives_no_finding(case: Case, tmp_path: Path) -> None:
    findings = []
    with gk.watch() as w:
        Run(case, tmp_path)(w, lambda: findings.extend(w.findings))
        findings.extend(w.findings)
    assert findings == [], "\n\n".join(map(str, findings))


@pytest.mark.parametrize(
    ("text", "advises"),
    [
        ("Specify retain_graph=True if you need to.", True),
        ("Write `h = h.detach()`. Or pass retain_graph=True at train.py:3.", True),
        ("`loss.backward(retain_graph=True)` at train.py:3 freed nothing.", False),
        ("retain_graph=True would not help: opt.step() lies between.", False),
        ("Remove retain_graph=True at train.py:12.", False),
    ],
)
def test_advice_is_told_from_report(text: str, advises: bool) -> None:
    assert bool(advice_to_retain(text)) == advises
