"""What a run comes to, in three lines: verdict, why, next."""

from __future__ import annotations

from typing import NamedTuple

from graphkeep._units import format_bytes
from graphkeep.report._figures import growth
from graphkeep.report._run import Run

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun", "accelerate", "deepspeed")


class Verdict(NamedTuple):
    """Three lines."""

    verdict: str
    why: str
    next: str

    def __str__(self) -> str:
        return f"verdict: {self.verdict}\nwhy:     {self.why}\nnext:    {self.next}"


def verdict(run: Run) -> Verdict:
    """Of one run: the backward that ended it, what was found, what filled the memory, or that all is well."""
    findings = run.findings
    if run.notes and run.error is not None and run.notes[-1].error.startswith(run.error.split("\n")[0][:200]):
        return _of_note(run)
    if findings:
        first = findings[0]
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        return Verdict(f"{first.id} {first.severity}: {first.what}{first.place}{more}", first.why, first.instead)
    if not run.sites:
        return _nothing(run)
    if run.error is not None and _out_of_memory(run.error):
        return _memory(run)
    if run.notes:
        return _of_note(run)
    if not run.looks and run.error is None:
        return _unseen(run)
    ended = {None: "it was cut off", "raised": f"the program raised {(run.error or '').splitlines()[0]}" if run.error else ""}
    how = ended.get(run.how, "")
    return Verdict(
        "nothing grows" + (f"; {how}" if how else ""),
        f"in {run.steps_done} steps no holder gained a graph with each, and no graph was kept for nothing; "
        f"at most {format_bytes(run.peak)} of graph were held",
        "nothing",
    )


def _of_note(run: Run) -> Verdict:
    note = run.notes[-1]
    first, *lines = note.text.splitlines()
    said = [" ".join(line.split()) for line in lines]
    instead = [line.removeprefix("write instead: ") for line in said if line.startswith("write instead: ")]
    why = [line for line in said if not line.startswith("write instead: ")]
    return Verdict(first.removeprefix("graphkeep "), "; ".join(why) or note.error, instead[0] if instead else "see the note")


def _unseen(run: Run) -> Verdict:
    """Nobody has looked at what was alive; so that nothing was found says nothing."""
    grown = growth(run)
    if grown > 0:
        return Verdict(
            f"{format_bytes(grown)} more is left with each step",
            "the file ends before anybody looked at who holds it",
            "the table by line says where it was saved",
        )
    return Verdict(
        "nothing is known of who holds graphs",
        "the file ends before anybody looked at what was alive",
        "a run of more steps, or one that ends by itself",
    )


def _nothing(run: Run) -> Verdict:
    program = str(run.header.get("program", ""))
    if any(name in program for name in _LAUNCHERS):
        return Verdict(
            "no graph was seen: this is a launcher, and the graphs are in the processes that it starts",
            "they are other processes, which `graphkeep run` does not follow",
            "the launcher first: torchrun ... -m graphkeep run train.py ...",
        )
    if run.how == "raised":
        first = (run.error or "").splitlines()[0] if run.error else "an exception"
        return Verdict(
            "no graph was seen", f"the program raised {first} before anything was saved for a backward", "mend that first"
        )
    why = "nothing was saved for a backward in this process"
    if run.torch is False:
        why = "the program did not import torch"
    return Verdict("no graph was seen", why, "run the process that trains: processes that a program starts are not followed")


def _out_of_memory(error: str) -> bool:
    text = error.lower()
    return "outofmemory" in text or "out of memory" in text or "not enough memory" in text or "memoryerror" in text


def _memory(run: Run) -> Verdict:
    largest = max(run.samples, key=lambda sample: sample.bytes, default=None)
    first = max(largest.sites, key=lambda one: one[1], default=None) if largest is not None else None
    site = run.sites.get(first[0]) if first is not None else None
    most = f"; most of it at {site.where} ({format_bytes(first[1])})" if site is not None and first is not None else ""
    return Verdict(
        f"out of memory: {(run.error or '').splitlines()[0][:200]}",
        f"nothing grows with the steps; graphs held {format_bytes(run.peak)} at most{most}",
        "a smaller batch, or gk.infer with a chunk_size, torch.utils.checkpoint, or mixed precision",
    )
