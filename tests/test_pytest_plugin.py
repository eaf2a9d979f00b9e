"""The pytest plugin: what the markers and the fixture do to tests as people write them, each in a pytest run of its own."""

import subprocess
import sys

import pytest
import torch._dynamo  # noqa: F401 `pytester` forgets what is first imported inside, and this cannot be imported twice

import graphkeep.integrations._test_watch  # noqa: F401

pytest_plugins = ["pytester"]

HEAD = """
import pytest, torch

net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def train(steps, keep=id):
    for _ in range(steps):
        loss = net(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(loss)

"""
LEAKS = """
@pytest.mark.no_graph_growth
def test_leaks():
    losses = []
    for _ in range(8):
        loss = net(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
"""


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    """The outcome of a pytest run over some tests."""
    pytester.makepyfile(HEAD + source)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *options)


def test_a_test_that_leaks_fails_and_the_finding_is_shown_whole(pytester: pytest.Pytester):
    result = run(pytester, LEAKS)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "no_graph_growth: 1 finding in 8 steps",
        "GK102 nodes grow: `losses[[]0..6]` (list, local in test_leaks() at *) keeps the nodes of one graph more each step*",
        "  why: `losses.append(loss)` stores a tensor with its history; *",
        "  write instead: `losses.append(loss.detach())`; or `.item()` if only the number is needed",
    ])  # fmt: skip
    assert "Traceback" not in result.stdout.str()


def test_tests_that_are_well_pass(pytester: pytest.Pytester):
    result = run(pytester, """
    @pytest.mark.no_graph_growth
    def test_numbers():
        losses = []
        train(8, lambda loss: losses.append(loss.item()))

    @pytest.mark.no_graph_growth(steps=6)
    @pytest.mark.graph_limit("1 KiB")
    def test_both():
        train(6)

    @pytest.mark.graph_limit(bytes=2**20)
    def test_a_limit_alone():
        held = [net(torch.randn(4, 8)) for _ in range(3)]

    @pytest.mark.no_graph_growth(6)
    def test_what_fills_at_first_and_then_stays():
        window = []
        train(24, lambda loss: window.append(loss) if len(window) < 6 else None)

    def test_without_a_marker():
        train(8, kept.append)

    kept = []
    """.replace("\n    ", "\n"))  # fmt: skip
    result.assert_outcomes(passed=5)


def test_growth_that_a_global_holds_is_found_where_steps_are_the_test_s_own(pytester: pytest.Pytester):
    result = run(pytester, """
outputs = []

@pytest.mark.no_graph_growth(steps=6)
def test_evaluates(graph_watch):
    for _ in range(11):
        outputs.append(net(torch.randn(4, 8)))
        graph_watch.step()
""")  # fmt: skip
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["GK103 bytes grow: `outputs[[]*", "*`with torch.no_grad():`*"])


def test_growth_that_began_late_is_found_at_the_end_where_a_global_holds_it(pytester: pytest.Pytester):
    result = run(pytester, """
losses = []

@pytest.mark.no_graph_growth(steps=6)
def test_begins_late():
    train(3)
    train(8, losses.append)
""")  # fmt: skip
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["GK102 nodes grow: `losses[[]0..7]`*"])


def test_nobody_looks_for_holders_where_no_marker_asks_who_they_are(pytester: pytest.Pytester):
    result = run(pytester, """
@pytest.fixture(autouse=True)
def no_look(monkeypatch):
    def fault(*args, **kwargs): raise ZeroDivisionError
    monkeypatch.setattr("graphkeep._watch._census.take", fault)

@pytest.mark.graph_limit("1 MiB")
def test_a_limit():
    train(8)

@pytest.mark.no_graph_growth
def test_fails():
    train(2)
    raise KeyError("own")
""")  # fmt: skip
    result.assert_outcomes(passed=1, failed=1)
    assert "ZeroDivisionError" not in result.stdout.str()


def test_a_limit_says_what_was_held_where_and_what_to_write_instead(pytester: pytest.Pytester):
    result = run(pytester, """
@pytest.mark.graph_limit("20 KiB")
def test_holds_too_much():
    x = torch.ones(10_000, requires_grad=True)
    y = x.exp()
    y.sin().sum().backward()
""")  # fmt: skip
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "graph_limit: the test held 39.1 KiB of graph at once, its limit is 20.0 KiB",
        "  lines that held most of it then:",
        "    test_a_limit_says_what_was_held_where_and_what_to_write_instead.py:*  39.1 KiB  `y = x.exp()`",
        "  write instead: *@pytest.mark.graph_limit(40000)",
    ])  # fmt: skip


def test_a_limit_that_no_backward_came_to_names_the_lines_that_saved_most(pytester: pytest.Pytester):
    result = run(pytester, """
@pytest.mark.graph_limit(0)
def test_forward_only():
    x = torch.ones(1000, requires_grad=True)
    for _ in range(2):
        x.exp()
""")  # fmt: skip
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  lines that saved most, over the whole test:", "*:*  *  `x.exp()`"])


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ('graph_limit("ten")', "bytes='ten' is no number of bytes"),
        ("graph_limit", "it takes one argument, bytes; given were 0"),
        ("graph_limit(1, 2)", "it takes one argument, bytes; given were 2"),
        ("graph_limit(limit=1)", "there is no argument 'limit'"),
        (
            "no_graph_growth(5)",
            "steps=5 is too few: growth shows in two windows of steps after a warm-up, which takes 6 or more",
        ),
        ("no_graph_growth(steps=True)", "steps=True is no whole number"),
    ],
)
def test_a_bad_argument_is_an_error_that_names_the_test(pytester: pytest.Pytester, marker: str, says: str):
    result = run(pytester, f"@pytest.mark.{marker}\ndef test_a(): raise SystemExit\n\ndef test_b(): pass")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines([f"*.py::test_a: @pytest.mark.{marker.partition('(')[0]}(*): {says}", "  write instead: *"])
    assert "During handling" not in result.stdout.str()


def test_too_few_steps_are_no_proof(pytester: pytest.Pytester):
    result = run(pytester, """
@pytest.mark.no_graph_growth
def test_three():
    train(3)

@pytest.mark.no_graph_growth
def test_layers_that_run_one_after_another_are_no_steps():
    x = torch.ones(4, requires_grad=True)
    for _ in range(20):
        x = x.sin()
""")  # fmt: skip
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([
        "no_graph_growth: 3 steps ended in this test, 8 are asked for; it says nothing about growth",
        "*graph_watch.step()*at least 6",
        "no_graph_growth: 0 steps ended in this test*",
    ])  # fmt: skip


def test_the_closest_marker_wins_and_parameters_and_classes_are_as_ever(pytester: pytest.Pytester):
    result = run(pytester, """
import unittest

pytestmark = pytest.mark.graph_limit(0)

def test_of_the_module():
    train(1)

@pytest.mark.graph_limit("1 MiB")
class TestA:
    @pytest.mark.parametrize("steps", [1, 2])
    def test_of_the_class(self, steps):
        train(steps)

    @pytest.mark.graph_limit(0)
    def test_of_its_own(self):
        train(1)

class Old(unittest.TestCase):
    def test_of_unittest(self):
        train(1)
""")  # fmt: skip
    result.assert_outcomes(failed=3, passed=2)
    result.stdout.fnmatch_lines(["FAILED *::test_of_the_module*", "FAILED *::test_of_its_own*", "FAILED *::test_of_unittest*"])


def test_a_test_s_own_failure_stays_and_what_was_seen_is_a_section(pytester: pytest.Pytester):
    result = run(pytester, """
@pytest.mark.graph_limit(0)
@pytest.mark.no_graph_growth
def test_own_failure():
    losses = []
    train(8, losses.append)
    assert losses == 3

@pytest.mark.no_graph_growth
def test_what_the_traceback_holds_is_no_growth():
    held = []
    train(7, held.append)
    raise KeyError("own")

@pytest.mark.no_graph_growth
def test_nor_is_it_in_the_next_test():
    train(8)
""")  # fmt: skip
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines([
        "E   *assert *", "* Captured graphkeep call *", "graph_limit: the test held*", "no_graph_growth: 1 finding*",
        "E   *KeyError: 'own'",
    ])  # fmt: skip
    assert result.stdout.str().count("Captured graphkeep call") == 1


def test_skips_and_expected_failures_are_as_ever(pytester: pytest.Pytester):
    result = run(pytester, """
pytestmark = [pytest.mark.no_graph_growth, pytest.mark.graph_limit("1 MiB")]

@pytest.mark.skip
def test_skipped(): pass

def test_skips_itself():
    train(2)
    pytest.skip("no")

@pytest.mark.xfail(strict=True)
def test_expected():
    losses = []
    train(8, losses.append)

@pytest.mark.xfail(strict=True, raises=ValueError)
def test_another_expected():
    raise ValueError
""")  # fmt: skip
    result.assert_outcomes(skipped=2, xfailed=2)


def test_async_tests_are_watched(pytester: pytest.Pytester):
    result = run(pytester, """
import asyncio

pytestmark = [pytest.mark.anyio, pytest.mark.no_graph_growth]

@pytest.fixture
def anyio_backend(): return "asyncio"

async def test_clean():
    train(8)
    await asyncio.sleep(0)

async def test_leaks():
    losses = []
    for _ in range(8):
        train(1, losses.append)
        await asyncio.sleep(0)
""")  # fmt: skip
    result.assert_outcomes(passed=1, failed=1)


def test_the_fixture_is_the_watch_that_the_markers_use_and_stops_with_the_test(pytester: pytest.Pytester):
    result = run(pytester, """
import graphkeep as gk
from graphkeep._ledger import LEDGER
from torch.optim import optimizer as hooks

@pytest.fixture
def after(graph_watch):
    assert LEDGER.listeners == (graph_watch,)
    yield graph_watch
    assert LEDGER.listeners == ()
    assert graph_watch.timeline.step == 8

@pytest.mark.no_graph_growth
@pytest.mark.graph_limit("1 MiB")
def test_same(after, graph_watch):
    assert after is graph_watch and isinstance(graph_watch, gk.watch) and len(LEDGER.listeners) == 1
    train(8)

def test_findings_of_an_unmarked_test(graph_watch):
    losses = []
    train(8, losses.append)
    assert [finding.id for finding in graph_watch.findings] == ["GK102"]

def test_another_watch_inside(graph_watch):
    with gk.watch() as inner:
        train(2)
    graph_watch.stop()

@pytest.mark.no_graph_growth
def test_fails(): raise ValueError

def test_nothing_stays():
    assert LEDGER.listeners == () and not hooks._global_optimizer_post_hooks
""")  # fmt: skip
    result.assert_outcomes(passed=4, failed=1)


@pytest.mark.parametrize(("filtered", "outcomes"), [("default", {"passed": 1}), ("error", {"failed": 1})])
def test_a_fault_inside_graphkeep_is_shown(pytester: pytest.Pytester, filtered: str, outcomes: dict[str, int]):
    result = run(pytester, """
@pytest.mark.no_graph_growth
def test_a(monkeypatch):
    import graphkeep._watch._timeline as timeline
    space = {}
    exec(compile("def fault(*args): raise ZeroDivisionError", timeline.__file__, "exec"), space)
    monkeypatch.setattr("graphkeep._watch._timeline.Timeline.optimizer_stepped", space["fault"])
    train(8)
""", "-W", filtered)  # fmt: skip
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(["*WatchFailedWarning: *::test_a: no_graph_growth was not checked, *"])


def test_it_works_in_the_processes_of_xdist(pytester: pytest.Pytester):
    pytester.makepyfile(HEAD + LEAKS + "\n@pytest.mark.graph_limit('1 MiB')\ndef test_clean(): train(2)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--strict-markers", "-n", "1")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["GK102 nodes grow: *"])


def test_a_run_that_does_not_use_it_does_not_import_torch(pytester: pytest.Pytester):
    pytester.makepyfile("import sys\n\ndef test_a(): assert 'torch' not in sys.modules\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--markers", "-p", "no:randomly")
    result.stdout.fnmatch_lines(["@pytest.mark.graph_limit(bytes): *", "@pytest.mark.no_graph_growth(steps=8): *"])
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    code = "import sys, graphkeep.integrations.pytest; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
