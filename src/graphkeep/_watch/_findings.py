"""Findings: what is wrong with the graphs that live, each with a stable id, and what to write instead.

Two equal windows after a warm-up decide what grows: a holder whose graph has parts from the steps of both, in like number,
gains one with every step. What is steady (the last loss, a window of k steps, a warm-up) has parts from one of them at most,
and is no finding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from graphkeep._units import format_bytes
from graphkeep._watch import _source
from graphkeep._watch._census import Held
from graphkeep._watch._finding import SEVERITIES, Finding
from graphkeep._watch._frames import Site, short
from graphkeep._watch._holders import Holder
from graphkeep._watch._timeline import Timeline

_FEW_STEPS = 6  # with fewer, no windows
_FEW_ELEMENTS = 4
_OFTEN = 3


@dataclass
class _Growth:
    """What a holder gains with each step: nodes, and bytes of saved tensors."""

    nodes: float
    bytes: float
    steps: int
    unit: str


def find(timeline: Timeline, census: list[Held], final: bool = False) -> list[Finding]:
    """All findings, the gravest first.

    Arguments:
        timeline: what was recorded.
        census: the graphs that are alive, by holder.
        final: the program is done: what has run no backward by now runs none.
    """
    found: list[Finding] = []
    for held, growth in _growing(timeline, census, final):
        found.append(_grows(timeline, held, growth, final))
    found += _retained(timeline)
    return sorted({(f.id, f.what): f for f in found}.values(), key=lambda f: SEVERITIES.index(f.severity))


# growth over steps ------------------------------------------------------------------------------------------------------------


def _growing(timeline: Timeline, census: list[Held], final: bool) -> Iterator[tuple[Held, _Growth]]:
    grown = [(held, growth) for held in census if (growth := _growth(timeline, held, final)) is not None]
    for held, growth in grown:
        if held.holder is not None and any(_is_nearer(other, held) for other, _ in grown if other is not held):
            continue  # it only leads to what another one holds
        yield held, growth


def _growth(timeline: Timeline, held: Held, final: bool) -> _Growth | None:
    steps = timeline.step
    if timeline.unrolls and held.holder is None and not final:
        return None  # in the middle of a forward, what C++ holds is held by nobody in Python
    if steps >= _FEW_STEPS:
        warm_up, end = max(1, steps // 6), steps - 1
        middle = (warm_up + end) // 2
        windows = [
            # a loop over layers or over time builds one graph, which grows; several graphs have a beginning each
            [part for step, part in held.parts.items() if low <= step < high and (not timeline.unrolls or step in held.starts)]
            for low, high in ((warm_up, middle), (end - (middle - warm_up), end))
        ]
        few, many = sorted(len(window) for window in windows)
        if few < min(2, middle - warm_up) or 2 * few < many:
            return None
        # a window that slides has lost its oldest parts; what grows has them all
        length = middle - warm_up
        oldest = min((step for step in held.parts if step >= warm_up), default=end)
        if oldest - warm_up > max(length / 4, 2 * length / max(len(windows[0]), 1)):
            return None
        parts = [part for window in windows for part in window]
        return _Growth(
            sum(p.nodes for p in parts) / len(parts), sum(p.bytes for p in parts) / len(parts), len(held.parts), "step"
        )
    # without steps nothing tells a leak from a loop that has not come to its backward yet
    return _growth_by_elements(held) if final and not timeline.step and not timeline.calls else None


def _growth_by_elements(held: Held) -> _Growth | None:
    """Without steps: a container with several graphs that were built one after the other."""
    if held.holder is None or len(held.roots) < _FEW_ELEMENTS or held.holder.kind == "local":
        return None
    new = [node for node, step in zip(held.roots, held.root_steps, strict=True) if step >= 0]  # built under the watch
    numbers = sorted({node._sequence_nr() for node in new})
    if len(numbers) < _FEW_ELEMENTS:
        return None
    gaps = [later - earlier for earlier, later in itertools.pairwise(numbers)]
    if min(gaps) * 8 < max(gaps):  # a model's outputs lie close together, those of a loop far apart
        return None
    return _Growth(held.nodes / len(numbers), held.bytes / len(numbers), len(numbers), "element")


def _is_nearer(other: Held, held: Held) -> bool:
    """Whether another holder keeps the same history and less besides."""
    if other.holder is None or held.holder is None or set(other.parts) != set(held.parts):
        return False
    same = sum(other.parts[s].nodes == part.nodes for s, part in held.parts.items())
    if other.nodes != held.nodes:
        return other.nodes < held.nodes and same >= len(held.parts) - 3
    # the same graph by two names: a container says more than a variable, and the first more than the second
    return (_rank(other), other.holder.what) < (_rank(held), held.holder.what)


def _rank(held: Held) -> int:
    kind = held.holder.kind if held.holder is not None else "unknown"
    order = [
        "cycle",
        "hook",
        "cache",
        "generator",
        "traceback",
        "element",
        "closure",
        "attribute",
        "global",
        "default",
        "local",
    ]
    return order.index(kind) if kind in order else len(order)


def _grows(timeline: Timeline, held: Held, growth: _Growth, final: bool) -> Finding:
    holder = held.holder
    severity = "bytes grow" if growth.bytes >= 1 else "nodes grow"
    nodes = f"+{growth.nodes:.0f} {'node' if round(growth.nodes) == 1 else 'nodes'}"
    each = "an element" if growth.unit == "element" else f"a {growth.unit}"
    amount = f"{nodes} and {format_bytes(round(growth.bytes))} of saved tensors {each}"
    if growth.bytes < 1:
        amount = f"{nodes} {each}, 0 B of saved tensors"
    built = _built_at(held)
    made_twice = [site for site, sums in timeline.calls.items() if sums[3]]
    if holder is None or holder.kind == "grad":
        if made_twice:
            line = made_twice[0]
            return Finding(
                "GK105",
                severity,
                f"graphs that are alive though unreachable: {amount}" + (f"; {holder.what}" if holder else ""),
                line.where,
                f"`{_source.line_text(line.file, line.line) or 'backward(create_graph=True)'}` stores gradients with a history "
                "in `.grad`: the leaf holds its gradient, whose graph leads to the leaf. No collector sees this cycle, it runs "
                "through C++",
                "torch.autograd.grad(loss, parameters, create_graph=True), which stores nothing; or set every `.grad` to None "
                "before the next step",
            )
        return Finding(
            "GK106",
            severity,
            f"graphs that are alive though unreachable: {amount}",
            built,
            "no Python name leads to them: a hook on an autograd node, or an attribute of one, holds a tensor whose graph "
            "leads back to that node; the cycle runs through C++, which no collector sees",
            "a hook that closes over no tensor of its own graph (use what it is given), or handle.remove() after use",
        )
    if _CONTEXT in holder.what:
        return _context(holder, growth, severity, amount)
    if holder.kind in ("cycle", "hook"):
        return _hook(timeline, held, growth, severity, amount, built)
    return _grows_in(timeline, held, growth, final, severity, amount, built)


_CONTEXT = "ctx of custom function"


def _context(holder: Holder, growth: _Growth, severity: str, amount: str) -> Finding:
    function = holder.what.rpartition(_CONTEXT)[2].strip(" )")
    attribute = holder.name.partition("[")[0]
    file, lines = _forward(function)
    store = next((s for s in _source.stores(file, holder.name, lines) if attribute in s.text), None) if file else None
    return Finding(
        "GK107",
        severity,
        f"{holder.what} keeps one graph more each {growth.unit}: {amount}",
        None if file is None else f"{short(file)}:{store.line if store else lines[0]}",
        f"`{attribute}` is an attribute of {function}'s ctx: torch frees it only with the node, and the function's own output "
        "there closes a cycle that waits for the collector",
        "ctx.save_for_backward(...) for tensors, and ctx.saved_tensors in backward",
    )


def _forward(function: str) -> tuple[str | None, tuple[int, int]]:
    """The file and lines of a custom function's forward."""
    for kind in reversed(torch.autograd.Function.__subclasses__()):
        forward = vars(kind).get("forward")
        code = getattr(getattr(forward, "__func__", None), "__code__", None)
        if kind.__name__ == function and code is not None:
            return code.co_filename, (code.co_firstlineno, code.co_firstlineno + 1_000)
    return None, (0, 0)


def _hook(timeline: Timeline, held: Held, growth: _Growth, severity: str, amount: str, built: str | None) -> Finding:
    holder = held.holder
    assert holder is not None
    hook = holder.what.partition("hook `")[2].partition("`")[0]
    store = _store_of(holder.file, holder.name, timeline, held) if holder.kind == "hook" else None
    files = [file for file in (holder.file, *(site.file for site in timeline.calls)) if file]
    at = next(((file, line) for file in files if hook and (line := _source.registered(file, hook))), None)
    on_graph = holder.kind == "cycle" or "autograd node" in holder.what or "tensor hook" in holder.what
    where = _where(holder.file, store.line if store and holder.file else holder.line) or built
    if on_graph and at is not None:
        where = _where(*at)
    closes = "what the hook holds leads back to the graph that the hook sits on, a cycle that no collector can free"
    return Finding(
        "GK106" if on_graph else "GK101",
        severity,
        f"{holder.what} keeps one graph more each {growth.unit}: {amount}",
        where,
        (f"{holder.detail}; " if holder.detail else "")
        + (closes if on_graph else "the hook stores tensors with their history"),
        (f"`{store.detached}`; or " if store and store.detached and not on_graph else "")
        + "a hook that closes over no tensor or module of its own: store `x.detach()` there, use a weak reference "
        "(weakref.ref), and call handle.remove() when done",
    )


def _grows_in(
    timeline: Timeline, held: Held, growth: _Growth, final: bool, severity: str, amount: str, built: str | None
) -> Finding:
    holder = held.holder
    assert holder is not None
    store = _store_of(holder.file, holder.name, timeline, held)
    where = f"{short(holder.file)}:{store.line}" if store and holder.file else _where(holder.file, holder.line) or built
    # one state, though it may be a tuple of tensors: all of them of the last step, and a history behind them
    chain = len(held.roots) == 1 or (len(held.parts) > 1 and min(held.root_steps) >= max(held.parts) - 1)
    kept_on_purpose = any(sums[2] for sums in timeline.calls.values())
    never = bool(held.sites) and not held.freed and not held.used and not any(site.by_backward for site in held.sites)
    tail = f", built at {built}" if built else ""
    detached = f"`{store.detached}`" if store and store.detached else f"`.detach()` on what is stored in `{holder.name}`"
    inside = _INSIDE.search(holder.name)
    if inside:  # what was stored is no tensor itself
        detached = f"`.detach()` on the tensors in what is stored in `{holder.name[: inside.end()]}`"
    unless = "" if severity == "nodes grow" else "; or `.item()` for a number"
    if severity == "nodes grow":
        why = f"links each {growth.unit}'s graph to the last" if chain else "stores a tensor with its history"
        return Finding(
            "GK102",
            severity,
            f"{holder.what} {'holds one chain of nodes for' if chain else 'keeps the nodes of one graph more'} each "
            f"{growth.unit}: {amount}",
            where,
            (f"`{store.text}` {why}" if store else f"what is stored there {why}")
            + "; a backward has freed what the nodes had saved,"
            " the nodes stay",
            f"{detached}; or `.item()` if only the number is needed",
        )
    if chain and kept_on_purpose:
        return Finding(
            "GK104",
            severity,
            f"{holder.what} carries the graphs of all earlier steps: {amount}",
            where,
            f"the loss of each step reaches the graphs of the steps before through `{holder.name}`, and retain_graph=True "
            "keeps them",
            f"`{holder.name} = {holder.name}.detach()` before the next step reads it (every k steps, to go back k steps), and "
            "then backward() without retain_graph",
        )
    special = _SPECIAL.get(holder.kind)
    if special is not None:
        outer = _outer(holder)
        held_by = "" if outer in holder.what else f", in `{outer}`,"
        what = f"{holder.what}{held_by} keeps one graph more each {growth.unit}: {amount}{tail}"
        return Finding("GK101", severity, what, where, *special(outer))
    if never:
        return Finding(
            "GK103",
            severity,
            f"{holder.what} keeps graphs on which no backward has run{'' if final else ' so far'}: {amount}{tail}",
            where,
            "the forward ran with gradients enabled, so what is kept of it keeps its whole graph; no backward has run on "
            "any of them",
            f"`with torch.no_grad():` (or torch.inference_mode()) around the forward if no backward will ever run on these; or "
            f"{detached}",
        )
    return Finding(
        "GK101",
        severity,
        f"{holder.what} keeps one graph more each {growth.unit}: {amount}{tail}",
        where,
        f"`{store.text}` stores a tensor with its history" if store else "what is stored there still has its history",
        f"{detached}{unless}",
    )


_INSIDE = re.compile(r"(?<=\.\.)\d+\](?=[\[.])")  # `memory[0..39][1]`: the second of a tuple in each element


def _outer(holder: Holder) -> str:
    """What holds a generator or a cache: ``streams[0..15]``."""
    return (holder.detail or holder.name).rpartition(" < ")[2].removeprefix("held by ").strip("`")


_SPECIAL: dict[str, Callable[[str], tuple[str, str]]] = {
    "cache": lambda name: (
        f"the cache of {name} keeps every result, and with it its graph",
        "a cached function that returns `.detach()`ed tensors, or runs under torch.no_grad(); or no lru_cache on what returns "
        "tensors",
    ),
    "generator": lambda name: (
        "a generator that is suspended keeps the locals of its frame, and their graphs",
        f"close it when done: `{name}.close()` (`.aclose()` of an async one), or run it to its end; or `del` the tensor, or "
        "`.detach()` it, before each yield",
    ),
    "traceback": lambda name: (
        "a stored exception keeps its traceback, that the frames, and those all their locals",
        "store str(error), or `error.with_traceback(None)` (and None in error.__context__), not the exception with its "
        "traceback",
    ),
}


def _store_of(file: str | None, name: str, timeline: Timeline, held: Held) -> _source.Store | None:
    holder = held.holder
    files = [file] if file else []
    files += [site.file for site in timeline.calls if site.file not in files]
    within = _source.function_lines(file, holder.line) if file and holder is not None and holder.line else None
    # a plain name is a variable of its own function, and another function's of the same name is another one; an attribute may
    # be stored anywhere
    local = within is not None and "." not in name.partition("[")[0] and holder is not None and "global" not in holder.what
    for candidate in files[:1] if local else files:
        found = _source.stores(candidate, name, within) if candidate == file and within else []
        if not found and local and within is not None:
            found = _source.stores(candidate, name, _source.outermost_function_lines(candidate, within[0]))
        found = found or ([] if local else _source.stores(candidate, name))
        if found:
            # the statement that adds says more than the one that made it empty; of several the next after the graph's last line
            lines = [site.line for site in held.sites if site.file == candidate]
            adding = [store for store in found if _adds(store)]
            if adding and lines:
                return min(adding, key=lambda store: _distance(store.line, max(lines)))
            return adding[0] if adding else found[-1]
    return None


def _distance(line: int, last: int) -> tuple[bool, int]:
    return line < last, abs(line - last)


def _adds(store: _source.Store) -> bool:
    name = store.text.partition("=")[0].strip()
    return store.detached is not None and (
        "+=" in store.text or "(" in name or "[" in name or name in store.text.partition("=")[2]
    )


def _built_at(held: Held) -> str | None:
    sites = [site for site in held.sites if site.code is not None]
    return max(sites, key=lambda site: site.tensors).where if sites else None


def _where(file: str | None, line: int | None) -> str | None:
    return None if file is None else short(file) if line is None else f"{short(file)}:{line}"


# the rest ------------------------------------------------------------------------------------------------------------------


def _retained(timeline: Timeline) -> Iterator[Finding]:
    for site, (calls, retained, reused, _, kept) in timeline.calls.items():
        if retained >= _OFTEN and 2 * retained > calls and not reused and kept:
            yield Finding(
                "GK301",
                "costs",
                f"retain_graph=True kept the graph {retained} times, and no later backward used it: up to "
                f"{format_bytes(kept)} more at the peak",
                site.where,
                f"`{_source.line_text(site.file, site.line)}` keeps every saved tensor until the last name of the graph goes, "
                "here until the next forward has built its own graph",
                "remove retain_graph=True",
            )


def sites_of(held: list[Held]) -> set[Site]:
    """All sites of the saved tensors of some graphs."""
    return set().union(*(one.sites for one in held)) if held else set()
