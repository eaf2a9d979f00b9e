"""The pytest plugin: the markers `graph_limit` and `no_graph_growth`, and the fixture `graph_watch`.

pytest loads it in every run where graphkeep is installed, so it imports nothing heavy, torch least of all, until a test asks.

https://docs.pytest.org/en/stable/how-to/writing_plugins.html
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import pytest

from graphkeep._errors import ArgumentError, WatchFailedWarning
from graphkeep._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from graphkeep.integrations._test_watch import TestWatch

_T = TypeVar("_T")
_STEPS = 8
_FEWEST = 6
_WATCH = pytest.StashKey["TestWatch"]()
_MARKERS = (
    'graph_limit(bytes): fail if the test holds more bytes of graph at once; an int, or a string such as "10 MiB".',
    f"no_graph_growth(steps={_STEPS}): fail if a holder gains a graph with each step of the test; a step ends with an "
    "optimizer's step or with graph_watch.step().",
)


class _Asked(NamedTuple):
    """What a test's markers ask for."""

    limit: int | None = None
    steps: int | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known, so that ``--strict-markers`` takes them."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A marker with a bad argument is told before anything of the test runs."""
    _asked(item)


@pytest.fixture
def graph_watch(request: pytest.FixtureRequest) -> Iterator[TestWatch]:
    """A running `gk.watch()`, which the test's markers use as well. It stops when the test function has returned."""
    item = request.node
    running = _begin(item, looks=True)
    try:
        yield running
    finally:
        running.stop()
        del item.stash[_WATCH]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, _T, _T]:
    """Run the test under the watch that its markers or its fixture ask for."""
    asked = _asked(item)
    running = item.stash.get(_WATCH, None)
    if running is None and asked == _Asked():
        return (yield)
    own = running is None
    if running is None:
        running = _begin(item, looks=asked.steps is not None)
    try:
        try:
            result = yield
        except BaseException:
            # what the traceback holds is held by the failure
            running.stop(look=False)
            _add_section(item, running, asked)
            raise
        running.stop()
    finally:
        if own:
            del item.stash[_WATCH]
    if asked != _Asked():
        _judge(item, running, asked)
    return result


def _begin(item: pytest.Item, looks: bool) -> TestWatch:
    from graphkeep.integrations._test_watch import TestWatch

    running = item.stash[_WATCH] = TestWatch(_asked(item).steps, looks)
    running.start()
    return running


def _judge(item: pytest.Item, running: TestWatch, asked: _Asked) -> None:
    if running.failed_inside:
        names = " and ".join(marker.name for marker in _marks(item))
        warnings.warn(
            WatchFailedWarning(f"{item.nodeid}: {names} was not checked, a fault inside graphkeep ended the watch"),
            stacklevel=2,
        )
        return
    said = _complaints(running, asked)
    if asked.steps is not None and running.steps < asked.steps:
        said.append(_too_few(running.steps, asked.steps))
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)


def _add_section(item: pytest.Item, running: TestWatch, asked: _Asked) -> None:
    said = _complaints(running, asked)
    if said:
        item.add_report_section("call", "graphkeep", "\n\n".join(said))


def _complaints(running: TestWatch, asked: _Asked) -> list[str]:
    said = []
    if asked.limit is not None and running.timeline.peak > asked.limit:
        said.append(_too_much(running, asked.limit))
    if asked.steps is not None and running.growth:
        many = "1 finding" if len(running.growth) == 1 else f"{len(running.growth)} findings"
        said.append("\n".join([f"no_graph_growth: {many} in {running.steps} steps", *map(str, running.growth)]))
    return said


def _too_much(running: TestWatch, limit: int) -> str:
    peak = running.timeline.peak
    title, lines = running.heaviest()
    width = max((len(line.where) for line in lines), default=0)
    text = [
        f"graph_limit: the test held {format_bytes(peak)} of graph at once, its limit is {format_bytes(limit)}",
        f"  {title}:",
    ]
    for line in lines:
        module = f", in {line.module}" if line.module else ""
        text.append(f"    {line.where.ljust(width)}  {format_bytes(line.bytes):>9}  {line.text}{module}")
    advice = running.growth[0].instead if running.growth else (
        "`with torch.no_grad():` where no backward will run, a smaller batch, gk.infer(model, data, chunk_size=...) or "
        "torch.utils.checkpoint around these lines"
    )  # fmt: skip
    text.append(f"  write instead: {advice}; or, if it may hold that much, @pytest.mark.graph_limit({peak})")
    return "\n".join(text)


def _too_few(seen: int, wanted: int) -> str:
    return (
        f"no_graph_growth: {seen} {'step' if seen == 1 else 'steps'} ended in this test, {wanted} are asked for; it says "
        "nothing about growth\n"
        "  write instead: a test that goes on for as many; a step ends with an optimizer's step, or where the test says "
        f"graph_watch.step(). Or fewer: @pytest.mark.no_graph_growth(steps=...), at least {_FEWEST}"
    )


# arguments of the markers --------------------------------------------------------------------------------------------------


def _marks(item: pytest.Item) -> list[pytest.Mark]:
    found = (item.get_closest_marker(name) for name in ("graph_limit", "no_graph_growth"))
    return [mark for mark in found if mark is not None]


def _asked(item: pytest.Item) -> _Asked:
    asked = _Asked()
    for mark in _marks(item):
        if mark.name == "graph_limit":
            asked = asked._replace(limit=_limit(item, mark))
        else:
            asked = asked._replace(steps=_steps(item, mark))
    return asked


def _limit(item: pytest.Item, mark: pytest.Mark) -> int:
    given = _argument(item, mark, "bytes", None)
    try:
        return parse_bytes(given, "bytes")
    except ArgumentError as error:
        what = error.what
    _refuse(item, mark, what, '@pytest.mark.graph_limit("10 MiB"), or an int')


def _steps(item: pytest.Item, mark: pytest.Mark) -> int:
    steps = _argument(item, mark, "steps", _STEPS)
    if type(steps) is not int:
        _refuse(item, mark, f"steps={steps!r} is no whole number", f"@pytest.mark.no_graph_growth(steps={_STEPS})")
    if steps < _FEWEST:
        _refuse(
            item,
            mark,
            f"steps={steps} is too few: growth shows in two windows of steps after a warm-up, which takes {_FEWEST} or more",
            f"@pytest.mark.no_graph_growth(steps={_STEPS})",
        )
    return steps


def _argument(item: pytest.Item, mark: pytest.Mark, name: str, default: Any) -> Any:
    given = [*mark.args, *(value for key, value in mark.kwargs.items() if key == name)]
    others = [key for key in mark.kwargs if key != name]
    if others:
        _refuse(item, mark, f"there is no argument {others[0]!r}", f"@pytest.mark.{mark.name}({name}=...)")
    if len(given) > 1 or (not given and default is None):
        _refuse(item, mark, f"it takes one argument, {name}; given were {len(given)}", f"@pytest.mark.{mark.name}({name}=...)")
    return given[0] if given else default


def _refuse(item: pytest.Item, mark: pytest.Mark, what: str, instead: str) -> NoReturn:
    arguments = ", ".join([*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())])
    pytest.fail(f"{item.nodeid}: @pytest.mark.{mark.name}({arguments}): {what}\n  write instead: {instead}", pytrace=False)
