"""The steps of a program: their streams, plans for those that come again, and the limit where it is a share of the first."""

from __future__ import annotations

from graphkeep._budget._plan import PATIENCE, Plan, inputs, plan, smallest
from graphkeep._budget._slack import Saved
from graphkeep._budget._sparse import Schedule
from graphkeep._budget._trace import Trace
from graphkeep._budget._values import Value

_PLANS = 16  # streams that are known at a time
_SEEN = 64
_IN_VAIN = 3  # plans that were made and not followed; then only a stream that has come twice is planned
_PATIENCE = 2  # times a step's forward may its plan take
_SHORTEST = 0.02  # seconds
_STEADY = 3  # steps in a row like the one before, after which the next need not be written down
_UNSTEADY = 1000  # steps that are, after one was not as expected
_AGAIN = (1, 4)  # times that a plan has been followed, after which it is made anew from better timings


class Steps:
    """What is known of the steps before, and where in which of them we are.

    Arguments:
        limit: bytes; None for none yet.
        share: of what the first step needed, to become the limit.
        plans: whether to make any.

    Attributes:
        plan: the one that is being followed.
        too_small: the smallest limit in bytes, if the share of the first step is less.
        last: the trace of the last step that has ended.
        count: steps that have ended.
        followed: those of them that went by a plan to their end.
    """

    def __init__(self, limit: int | None, share: float | None, plans: bool = True) -> None:
        self.limit = limit
        self.share = share
        self.planning = plans
        self.plan: Plan | None = None
        self.last: Trace | None = None
        self.count = self.followed = 0
        self.plans: list[Plan] = []  # the one followed last comes last
        self.calls: list[Saved] = []  # what was saved in this step, as in `Plan.calls`
        self._used: dict[int, int] = {}  # how often each was followed, by id
        self._seen: dict[int, None] = {}  # streams, by hash, the latest last
        self._saves: list[tuple[int, int]] = []
        self.too_small = 0
        self._in_vain = 0
        self._steady = 0  # steps in a row that followed a plan

    def drops(self, value: Value) -> bool:
        """Whether the plan drops what is saved now; while the stream is another than the plan's, there is none."""
        save = (value.number, value.nbytes)
        place = len(self._saves)
        self._saves.append(save)
        if place == 0:
            self.plan = self.plans[-1] if self.plans else None
        found = self.plan
        if found is not None and (place >= len(found.saves) or found.saves[place] != save):
            n = place + 1
            found = self.plan = next((plan for plan in reversed(self.plans) if plan.saves[:n] == self._saves), None)
        return found is not None and found.fits and save[0] in found.dropped

    @property
    def following(self) -> Plan | None:
        """The plan to go by, if there is one that fits."""
        return self.plan if self.plan is not None and self.plan.fits else None

    def end(self, trace: Trace, peak: int, carried: int, ran: bool) -> None:
        """A step has ended: learn from it.

        Arguments:
            peak: bytes that were held at most.
            carried: bytes that are held still, by graphs that live on.
            ran: whether a backward has ended it.
        """
        saves, followed, calls = self._saves, self.plan, tuple(self.calls)
        self._saves, self.plan, self.calls = [], None, []
        if not trace.events or trace.closed:
            return
        self.count += 1
        self.last = trace
        if ran and self.share is not None:
            self._share(trace, peak)
        if self.limit is None or not self.planning or not saves:
            return
        if followed is not None and len(followed.saves) == len(saves) and followed.limit <= self.limit - carried:
            again = self.plans[-1].saves == saves  # steps that take turns are not taken for granted
            self._follow(followed, trace, calls)
            self._steady = self._steady + 1 if again or self._steady < 0 else 1
        elif self._comes_again(saves):
            self._steady = min(self._steady, 0)
            self._learn(self._plan(trace, carried, calls))
        if self.plans and self.plans[-1].saves == saves:
            self.plans[-1].calls = calls

    def _share(self, trace: Trace, peak: int) -> None:
        """Make the share a limit; a step that needs more than those before raises it."""
        assert self.share is not None
        if self.limit is None:
            self.limit = max(int(self.share * peak), 1)
            least = smallest(trace)
            self.too_small = least if self.planning and least > self.limit else 0
        elif self.plan_of(trace) is None:
            self.limit = max(self.limit, int(self.share * trace.peak(())[0]))

    def slack(self) -> tuple[tuple[Saved, ...], Schedule | None]:
        """What the next step will save, if it is like the last, and which of its ops are written down; empty: all of them."""
        plan = self.plans[-1] if self.plans and self._steady >= _STEADY else None
        if plan is None or not (plan.slack or plan.schedule):
            return (), None
        return plan.calls, None if plan.slack else plan.schedule

    def end_slack(self, whole: bool) -> None:
        """A step that was not written down has ended; as it was expected, or not."""
        self._saves, self.plan, self.calls = [], None, []
        self.count += 1
        self.followed += whole
        if not whole:
            self._steady = -_UNSTEADY

    def _follow(self, followed: Plan, trace: Trace, calls: tuple[Saved, ...]) -> None:
        self.followed += 1
        self._in_vain = 0
        self.plans = [*[plan for plan in self.plans if plan is not followed], followed]
        used = self._used[id(followed)] = self._used.get(id(followed), 0) + 1
        if used > max(_AGAIN) or len(trace.ops) != len(followed.trace.ops):
            return
        pairs = zip(trace.ops, followed.trace.ops, strict=True)
        trace.ops = [new._replace(seconds=min(new.seconds, old.seconds)) for new, old in pairs]
        followed.trace = trace
        if used in _AGAIN:
            self._learn(self._plan(trace, (self.limit or 0) - followed.limit, calls), used)
            self._in_vain = 0

    def _plan(self, trace: Trace, carried: int, calls: tuple[Saved, ...]) -> Plan:
        assert self.limit is not None
        forward = sum([op.seconds for op in trace.ops])
        patience = min(max(_PATIENCE * forward, _SHORTEST), PATIENCE)
        return plan(trace, max(self.limit - carried, 1), patience, inputs(calls))

    def _comes_again(self, saves: list[tuple[int, int]]) -> bool:
        key = hash(tuple(saves))
        known = key in self._seen
        self._seen.pop(key, None)
        self._seen[key] = None
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        return known or self._in_vain < _IN_VAIN

    def _learn(self, new: Plan, used: int = 0) -> None:
        self._in_vain += 1
        self.plans = [*[old for old in self.plans if old.saves != new.saves][1 - _PLANS :], new]
        counts = {id(old): self._used.get(id(old), 0) for old in self.plans}
        self._used = counts | {id(new): used}

    def plan_of(self, trace: Trace) -> Plan | None:
        """The plan for a trace's stream."""
        saves = trace.saves
        return next((plan for plan in self.plans if plan.saves == saves), None)

    def smallest(self, trace: Trace) -> int:
        """The smallest limit in bytes for a step that has come so far; for the whole step, if it is like the last so far."""
        last = self.last.saves if self.last is not None else []
        whole = [trace, *([self.last] if self.last is not None and last[: len(self._saves)] == self._saves else [])]
        return max(smallest(one) for one in whole)
