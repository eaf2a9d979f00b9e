"""Why a backward failed: what torch's two riddles do not say.

"Trying to backward through the graph a second time" names neither the variable through which this loss reaches the freed part
nor the call that freed it; "modified by an inplace operation" names neither the line that changed the tensor nor the one that
had saved it. Both can be read off the graph, the source, and, under `watch`, the timeline.

``retain_graph=True`` is never the advice: it hides the first fault, makes every step slower than the last, and after an
optimizer's step it only leads to the second.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from graphkeep import _graph, _saved
from graphkeep._errors import library_file
from graphkeep._frame import frame_locals
from graphkeep._ledger import Mismatch
from graphkeep._watch import _census, _changed, _source
from graphkeep._watch._frames import Place, Site, short
from graphkeep._watch._holders import Holder, find
from graphkeep._watch._timeline import Backward, OptimizerStep, Timeline

SECOND = "backward through the graph a second time"


def annotate(error: RuntimeError, outputs: Any, timeline: Timeline, mismatch: Mismatch | None) -> str | None:
    """Add a note to an error of torch's that a backward raised, and return it; other errors stay as they are."""
    places = _places(sys._getframe(1))
    note = None
    if mismatch is not None and _changed.CHANGED in str(error):
        note = _changed.changed(mismatch, places, timeline)
    elif SECOND in str(error):
        note = second(nodes_of(outputs), places, timeline)
    if note:
        add_note(error, note)
    return note


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`; on Python 3.10 the note joins the text."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _places(frame: FrameType | None) -> list[Place]:
    places = []
    while frame is not None:
        if not library_file(frame.f_code.co_filename, frame):
            places.append(place(frame, frame.f_lineno))
        frame = frame.f_back
    return places


def place(frame: FrameType, line: int) -> Place:
    """A frame as a place."""
    is_module = frame.f_locals is frame.f_globals if frame.f_code.co_name == "<module>" else False
    variables = list(dict.items(frame.f_globals)) if is_module else frame_locals(frame)
    names = frozenset(name for name, value in variables if _has_history(value))
    return Place(frame.f_code.co_filename, line, frame.f_code.co_name, names)


def _has_history(value: object) -> bool:
    members: Any = value if type(value) in (tuple, list) else (value,)
    with torch._C.DisableTorchFunction():
        return any(issubclass(type(member), torch.Tensor) and _census.grad_fn(member) is not None for member in members)


def carried(places: Sequence[Place]) -> list[tuple[str, int]]:
    """What the loops around carry from one turn to the next, and has a history: names, and where they are read."""
    return [(name, line) for p in places for name, line in _source.carried(p.file, p.line) if name in p.histories]


def nodes_of(outputs: Any) -> list[Node]:
    members = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [
        member.node if isinstance(member, GradientEdge) else get_gradient_edge(member).node
        for member in members
        if isinstance(member, GradientEdge) or (isinstance(member, torch.Tensor) and member.requires_grad)
    ]


# a second backward ------------------------------------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """The freed part that a loss reaches.

    Attributes:
        nodes: its nodes, those that saved nothing too.
        top: the nodes of it that the new part leads to directly.
        freed: those that had saved something.
    """

    nodes: set[Node]
    top: set[Node]
    freed: set[Node]


def second(roots: Sequence[Node], places: Sequence[Place], timeline: Timeline | None = None) -> str | None:
    """What to say about a graph, or a part of one, that has been freed before."""
    nodes = _census.walk(roots)
    now = timeline.backwards[-1] if timeline is not None and timeline.backwards else None
    freed = {node for node in nodes if any(slot.state is _saved.State.FREED for slot in _saved.slots(node))}
    before = {node for node in freed if now is None or node._sequence_nr() not in now.freed}
    if not before:
        return None
    newest, by = _newest(before, timeline)
    shared = _shared(nodes, roots, before, by, now)
    built = _built_at(newest, by)
    between = [] if by is None or timeline is None else [step for step in timeline.optimizer_steps if step.built >= by.built]
    whole = any(root in shared.nodes for root in roots) or _all_freed(nodes, freed, now, places)
    holder = None if whole else _who(shared, roots, places)
    lines = [_headline(holder, whole, now is not None)]
    if built is not None:
        when = f" in step {timeline.step_of_node(newest._sequence_nr())}" if timeline is not None else ""
        text = _source.line_text(built.file, built.line)
        lines.append(f"  built:   {built.where}{when}" + (f": `{text}`" if text else ""))
    elif now is not None:
        lines.append(f"  built:   {_graph.op(newest)} is the last op in it that had saved something")
    if by is not None:
        text = _source.line_text(by.site.file, by.site.line)
        lines.append(
            f"  freed:   by backward {by.number}, in step {by.step}, at {by.site.where}" + (f": `{text}`" if text else "")
        )
    if between:
        step = between[-1]
        lines.append(f"  between: {step.kind}.step() at {step.site.where}, so what was freed belongs to weights of before")
    lines.append(f"  write instead: {_advice(holder, whole, shared, built, by, now, between, places)}")
    return "\n".join(lines)


def _all_freed(nodes: set[Node], freed: set[Node], now: Backward | None, places: Sequence[Place]) -> bool:
    """Whether nothing of a graph is left; without a watch, the failing call's own part looks freed too."""
    if now is not None:
        return not now.freed and not any(_holds(node) for node in nodes - freed)
    return not carried(places) and not any(_holds(node) for node in nodes - freed)


def _holds(node: Node) -> bool:
    return any(slot.state not in (_saved.State.EMPTY, _saved.State.FREED) for slot in _saved.slots(node))


def _headline(holder: Holder | None, whole: bool, watched: bool) -> str:
    if whole and not watched:
        return "graphkeep GK201: this graph, or one that it leads to, has been freed by an earlier backward"
    if whole:
        return "graphkeep GK201: this very graph has been freed by an earlier backward"
    through = (
        f"through {_quoted(holder.what)}"
        if holder is not None
        else "through a tensor of an earlier step that no name holds now"
    )
    return f"graphkeep GK201: this loss reaches a part of the graph that has been freed before, {through}"


def _quoted(what: str) -> str:
    return what if "`" in what else f"`{what}`"


def _newest(freed: set[Node], timeline: Timeline | None) -> tuple[Node, Backward | None]:
    """The freed node that was built last, of those of which the timeline knows what freed them."""
    ordered = sorted(freed, key=_graph.number, reverse=True)
    recorded = {} if timeline is None else {n: b for b in list(timeline.backwards)[:-1] for n in b.freed}
    node = next((node for node in ordered if node._sequence_nr() in recorded), ordered[0])
    return node, _freed_by(node, timeline)


def _freed_by(node: Node, timeline: Timeline | None) -> Backward | None:
    number = node._sequence_nr()
    earlier = [] if timeline is None else list(timeline.backwards)[:-1]
    found = [b for b in earlier if number in b.freed]
    if found:
        return found[-1]
    # it saved no more than views of weights: the first backward after it was built
    return next((b for b in earlier if b.built > number and not b.retain_graph and not b.failed), None)


def _built_at(node: Node, by: Backward | None) -> Site | None:
    return None if by is None else by.freed.get(node._sequence_nr())


def _shared(nodes: set[Node], roots: Iterable[Node], before: set[Node], by: Backward | None, now: Backward | None) -> _Shared:
    """The part that existed when it was freed: all that leads to a freed node and was built by then."""
    limit = by.built if by is not None else max(node._sequence_nr() for node in before) + 1
    parents = _graph.parents(nodes)
    part, todo = set(before), list(before)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            # what this call has just freed, or still holds something, was no part of what was freed before
            new = (now is not None and parent._sequence_nr() in now.freed) or _holds(parent)
            if parent not in part and parent._sequence_nr() < limit and not new:
                part.add(parent)
                todo.append(parent)
    top = {node for node in part if any(parent not in part for parent in parents.get(node, ()))}
    return _Shared(part, top | {root for root in roots if root in part}, before)


def _who(shared: _Shared, roots: Sequence[Node], places: Sequence[Place]) -> Holder | None:
    """The variable through which the loss reaches the freed part."""
    tensors = _census.live_tensors()
    try:
        fns = [_census.grad_fn(tensor) for tensor in tensors]
        for wanted in (shared.top, shared.nodes):
            held = _best([t for t, fn in zip(tensors, fns, strict=True) if fn in wanted], places)
            if held is not None:
                return held
        # the name was bound anew: what it holds now leads there
        root = set(roots)
        leads = [
            t for t, fn in zip(tensors, fns, strict=True) if fn is not None and fn not in root and _meets(fn, shared.nodes)
        ]
        return _best(leads, places, rebound=True)
    finally:
        tensors.clear()


def _meets(node: Node, wanted: set[Node]) -> bool:
    return not wanted.isdisjoint(_census.walk([node], 50_000))


def _best(tensors: list[torch.Tensor], places: Sequence[Place], rebound: bool = False) -> Holder | None:
    if not tensors:
        return None
    holders = [h for h in find(tensors, seconds=1.0) if h.kind not in ("unknown", "traceback")]
    names = {name for name, _ in carried(places)} if rebound else set()

    def rank(holder: Holder) -> tuple[bool, bool, str]:
        base = holder.name.partition("[")[0].partition(".")[0]
        return (holder.name not in names and base not in names, holder.kind == "local" if rebound else False, holder.what)

    holders.sort(key=rank)
    return holders[0] if holders else None


def _advice(
    holder: Holder | None,
    whole: bool,
    shared: _Shared,
    built: Site | None,
    by: Backward | None,
    now: Backward | None,
    between: Sequence[OptimizerStep],
    places: Sequence[Place],
) -> str:
    if whole:
        if between:
            return "compute the loss anew after the step: its graph belongs to the weights of before"
        return (
            "one backward of the sum of what you need from this graph, or compute the loss anew; to free only a part of it, "
            "gk.backward(loss, keep=x) in the earlier call"
        )
    if holder is None:
        names = carried(places)
        if not names:
            return "`.detach()` on what is carried from one step to the next"
        name, line = names[0]
        return f"`{name} = {name}.detach()` before line {line}, where the next step reads it"
    name = holder.name
    plain = name.partition("[")[0]
    here = places[0] if places else None
    same_line = by is not None and here is not None and (by.site.file, by.site.line) == (here.file, here.line)
    same_step = by is not None and now is not None and by.step == now.step
    read = dict(carried(places))
    if plain in read or plain.partition(".")[0] in read:
        line = read.get(plain) or read[plain.partition(".")[0]]
        return f"`{_detach(name)}` before line {line}, where the next step reads it"
    file = holder.file or (here.file if here else None)
    again = _source.stores(built.file, name, (built.line, built.line)) if built is not None else []
    if built is not None and again and again[0].detached and _reads(again[0]):
        target = again[0].text.partition("=")[0].strip()
        return (
            f"`{target} = {target}.detach()` before line {again[0].line} of {short(built.file)}, where the next step reads it"
        )
    if between and not same_line and _belongs_to_others(shared, between):
        call = _call_with(name, built, by)
        return f"`{call}` in the loss of backward {by.number if by else 1}, which is not meant to reach what made `{name}`"
    state = holder.kind in ("attribute", "element", "global", "closure", "default", "cache") or name != plain or "." in name
    once = built is not None and here is not None and built.file == here.file
    once = once and _source.made_before_loop(here.file, here.line, name, built.line)  # type: ignore[union-attr]
    if state and not once and (same_line or by is None or not same_step):
        store = next((s for s in _source.stores(file, name) if s.detached), None) if file else None
        if store is not None and file is not None:
            return f"`{store.detached}` at {short(file)}:{store.line}: what is kept for a later step must carry no graph"
        return f"`.detach()` where `{name}` is stored: what is kept for a later step must carry no graph"
    if same_line:
        if between:
            return (
                f"compute `{name}` inside the loop, after each step; or `{name} = {name}.detach()` before the loop if what is "
                "below it is not trained"
            )
        return (
            f"`with gk.cut({name}) as {name}:` around the loop: each backward frees its own part, and what leads to `{name}` "
            "runs once; or gk.infer, where each backward runs its own rows alone"
        )
    if between:
        return (
            f"compute `{name}` again after the step; or `{name}.detach()` in the loss that is not meant to reach what made it"
        )
    detached = _call_with(name, built, by)
    return (
        f"one backward of the sum of both losses; or `{detached}` in the one that is not meant to reach what made it; or "
        f"gk.backward(loss, keep={name}) in the earlier call, which frees the rest"
    )


def _reads(store: _source.Store) -> bool:
    """Whether a statement reads what it assigns: ``h = cell(x, h)``."""
    target, _, value = store.text.partition("=")
    return re.search(rf"(?<![\w.]){re.escape(target.strip())}\b", value) is not None


def _detach(name: str) -> str:
    if "[" in name:  # a tuple of states
        plain = name.partition("[")[0]
        return f"{plain} = tuple(t.detach() for t in {plain})"
    return f"{name} = {name}.detach()"


def _belongs_to_others(shared: _Shared, steps: Sequence[OptimizerStep]) -> bool:
    """Whether the optimizers that stepped own none of the weights of the freed part: the first loss reached it by mistake."""
    leaves = {id(leaf) for node in _census.walk(shared.top) if (leaf := _graph.leaf(node)) is not None}
    stepped = {
        id(p) for step in steps if (o := step.optimizer()) is not None for group in o.param_groups for p in group["params"]
    }
    return bool(stepped) and not leaves & stepped


def _call_with(name: str, built: Site | None, by: Backward | None) -> str:
    """A call in the source that passes a name on, with the name detached."""
    if by is not None:
        first = built.line if built is not None and built.file == by.site.file else max(1, by.site.line - 15)
        found = _source.call_with(by.site.file, min(first, by.site.line), by.site.line, name)
        if found:
            return found
    return f"{name}.detach()"
