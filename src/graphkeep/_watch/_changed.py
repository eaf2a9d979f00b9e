"""A saved tensor was changed in place: which op had saved it and where, what changed it, and what to write instead.

Under `watch` the ledger knows the entry, and with it the line; an optimizer's step is known exactly. Any other change is looked
for in the source, between the line that saved the tensor and the next one that was seen to save the changed memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from graphkeep import _graph, _modules, _saved
from graphkeep._ledger import Entry, Mismatch
from graphkeep._watch import _census, _source
from graphkeep._watch._frames import Place, Site, short
from graphkeep._watch._holders import find
from graphkeep._watch._timeline import OptimizerStep, Timeline

CHANGED = "modified by an inplace operation"
_COMMON = ("p", "w", "b", "weight", "bias")  # what loops over parameters call them


def changed(mismatch: Mismatch, places: Sequence[Place], timeline: Timeline) -> str:
    """What to say about a saved tensor that was changed in place, as seen under a watch."""
    entry = mismatch.entry
    op = mismatch.op or "an op"
    site = _saved_at(entry)
    if not entry.number or (entry.tensor is not None and entry.tensor.is_leaf and entry.tensor.requires_grad):
        return _changed_parameter(entry, site, op, places, timeline)
    saved = f"  saved:   by {op}"
    if site is not None:
        text = _source.line_text(site.file, site.line)
        saved += f" at {site.where}" + (f" in {site.module_type}" if site.module_type else "") + (f": `{text}`" if text else "")
    seen = next((m.seen for m in timeline.mutations if m.saved is site and m.at > entry.number), None)
    line, statement, instead = _statement(site, seen, entry.tensor, places)
    lines = ["graphkeep GK202: a tensor that this backward needs was changed in place", saved]
    if line:
        lines.append(f"  changed: at {line}" + (f": `{statement}`" if statement else ""))
    lines.append(f"  write instead: {instead}")
    return "\n".join(lines)


def changed_unwatched(roots: Sequence[Node], places: Sequence[Place]) -> str | None:
    """The same afterwards, from the graph and the source alone."""
    for node in sorted(_census.walk(roots), key=_graph.number, reverse=True):
        try:
            _saved.check(node)
        except RuntimeError as error:
            if CHANGED not in str(error):
                continue
        else:
            continue
        saved = [slot.value for slot in _saved.slots(node) if isinstance(slot.value, torch.Tensor)]
        leaves = [
            leaf for tensor in saved for leaf in _aliases(tensor) if leaf.is_leaf and leaf.requires_grad and leaf._version
        ]
        names = "; or ".join(sorted({_modules.describe(leaf) for leaf in leaves}))
        lines = [f"graphkeep GK202: {names or 'a tensor that this backward needs'} was changed in place"]
        lines.append(f"  saved:   by {_graph.op(node)}")
        found = [c for tensor in saved for c in _candidates(None, tensor, places)]
        if leaves:
            instead = "every backward before optimizer.step(), or the forward of this loss again after it"
        elif found:
            file, line, statement, better = found[0]
            lines.append(f"  changed: at {short(file)}:{line}: `{statement}`, most likely")
            instead = f"`{better}`" if better else "that change out of place, or on a .clone()"
        else:
            instead = "the op that changes it out of place (`x = x + r`, not `x += r`), or on a .clone()"
        lines.append(f"  write instead: {instead}")
        lines.append("  more:    run it under `with gk.watch():`, which names the line that saved it")
        return "\n".join(lines)
    return None


def _saved_at(entry: Entry) -> Site | None:
    """The site of an entry; of a view of a weight that of what the same node, or the one before it, saved besides."""
    if entry.mark is not None and entry.number:
        site: Site = entry.mark[0]
        return site
    others = [e for e in _census.instances(Entry) if e.node <= entry.node and e.number and e.mark is not None]
    found: Site | None = max(others, key=lambda e: e.node).mark[0] if others else None
    return found


def _statement(
    site: Site | None, seen: Site | None, tensor: torch.Tensor | None, places: Sequence[Place]
) -> tuple[str | None, str | None, str]:
    """The line that changed the tensor, its text, and what to write instead."""
    candidates = _candidates(site, tensor, places)
    if seen is not None and site is not None:
        # it was changed by the time the next tensor of that memory was saved
        low, high = sorted((site.line, seen.line))
        between = [c for c in candidates if c[0] == seen.file == site.file and low <= c[1] <= high]
        module = seen.module() if seen.module is not None else None
        if module is not None and module.__dict__.get("inplace"):
            text = _source.line_text(seen.file, seen.line)
            return f"{seen.where} in {seen.module_type}", text, f"`{seen.module_type}(inplace=False)`: the op out of place"
        candidates = between or candidates
        if not candidates:
            return f"{site.where} or later, and by {seen.where}", None, "the op out of place, or on a .clone()"
    if candidates:
        file, line, statement, instead = candidates[0]
        return (
            f"{short(file)}:{line}",
            statement,
            f"`{instead}`" if instead else "the change out of place, or before the tensor is used, or on a .clone()",
        )
    return None, None, "the op that changes it out of place (`x = x + r`, not `x += r`), or on a .clone()"


def _candidates(
    site: Site | None, tensor: torch.Tensor | None, places: Sequence[Place]
) -> list[tuple[str, int, str, str | None]]:
    """Statements that change in place what a name of the saved tensor stands for, the likeliest first."""
    found: list[tuple[str, int, str, str | None]] = []
    if site is not None and site.code is not None:
        names = {*_source.assigned_names(site.file, site.line), *_source.used_names(site.file, site.line)}
        lines = _source.function_lines(site.file, site.line) or (1, 10**6)
        changes = [c for c in _source.changes_in_place(site.file, *lines) if c[2] in names]
        changes.sort(key=lambda change: (change[0] < site.line, change[0]))
        found += [(site.file, line, text, instead) for line, text, _, instead in changes]
    names = {h.name for h in find(_aliases(tensor), seconds=1.0)} if tensor is not None else set()
    last = {name.rpartition(".")[2].partition("[")[0] for name in names}
    for place in places:
        lines = _source.function_lines(place.file, place.line) or (1, 10**6)
        for line, text, name, instead in _source.changes_in_place(place.file, *lines):
            if name in names or name.rpartition(".")[2].partition("[")[0] in last:
                found.append((place.file, line, text, instead))
    return found


def _aliases(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The live tensors that stand on the same memory."""
    with torch._C.DisableTorchFunction():
        return [other for other in _census.instances(torch.Tensor) if _alias(other, tensor)]


def _alias(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    try:
        return other.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return False


def _changed_parameter(entry: Entry, site: Site | None, op: str, places: Sequence[Place], timeline: Timeline) -> str:
    tensor, node = entry.tensor, entry.node
    leaves = [other for other in _aliases(tensor) if other.is_leaf and other.requires_grad] if tensor is not None else []
    leaf = leaves[0] if leaves else tensor
    name = _called(leaf) if leaf is not None else "a parameter"
    lines = [f"graphkeep GK202: {name} was changed in place after a forward whose backward still needs it"]
    step = next((s for s in timeline.optimizer_steps if s.built > node and leaf is not None and _owns(s, leaf)), None)
    text = _source.line_text(site.file, site.line) if site is not None else ""
    lines.append(
        f"  saved:   by {op}, in step {timeline.step_of_node(node)}"
        + (f", at {site.where}" if site is not None else "")
        + (f": `{text}`" if text else "")
    )
    if step is not None:
        text = _source.line_text(step.site.file, step.site.line)
        lines.append(f"  changed: by {step.kind}.step() at {step.site.where}" + (f": `{text}`" if text else ""))
        earlier = timeline.step_of_node(node) < timeline.step and timeline.step_of_node(node) <= step.step
        carried = [
            (name, line) for p in places for name, line in _source.carried(p.file, p.line) if earlier and name in p.histories
        ]
        if carried:
            names = " or ".join(f"`{name} = {name}.detach()` before line {line}" for name, line in carried[:2])
            lines.append(
                f"  write instead: {names}: this loss reaches the graph of a step before that one, whose weights are gone"
            )
            return "\n".join(lines)
        lines.append(
            f"  write instead: this backward before {step.kind}.step() (all backwards first, then the steps), or the forward "
            "of this loss again after it"
        )
        return "\n".join(lines)
    last = name.partition("`")[2].partition("`")[0].rpartition(".")[2]
    for place in places:
        within = _source.function_lines(place.file, place.line) or (1, 10**6)
        for line, text, changed_name, _ in _source.changes_in_place(place.file, *within):
            if changed_name.rpartition(".")[2] == last or changed_name in _COMMON or "param" in changed_name:
                lines.append(f"  changed: at {short(place.file)}:{line}: `{text}`")
                lines.append("  write instead: that change after this backward, or the forward again after it")
                return "\n".join(lines)
    lines.append("  write instead: the change after this backward, or the forward again after it")
    return "\n".join(lines)


def _called(leaf: torch.Tensor) -> str:
    """A parameter as the program calls it, ``D.2.weight``; else as its module does."""
    described = _modules.describe(leaf)
    last = described.partition("`")[2].partition("`")[0].rpartition(".")[2]
    names = [h.name for h in find([leaf], seconds=1.0) if last and h.name.endswith(f".{last}")]
    if not names:
        return described
    shortest = min(names, key=lambda name: (name.startswith("self"), len(name)))
    return f"`{shortest}` ({described.replace('`', '')})"


def _owns(step: OptimizerStep, leaf: torch.Tensor) -> bool:
    optimizer = step.optimizer()
    return optimizer is not None and any(p is leaf for group in optimizer.param_groups for p in group["params"])
