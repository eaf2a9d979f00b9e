"""``%load_ext graphkeep`` in IPython: the cell magic, and what a notebook shows of findings."""

import asyncio
import html
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphkeep as gk
from graphkeep._ledger import LEDGER
from graphkeep.report._read import read

TRAIN = """\
%%graph

losses = []
for i in range(12):
    loss = net(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)
len(losses)
"""


class Notebook:
    """An IPython shell, and what its last cell showed."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.space = shell.user_ns

    def cell(self, source: str) -> Any:
        from IPython.utils.capture import capture_output

        with capture_output() as shown:
            result = self.shell.run_cell(source, store_history=True)
        self.text, self.errors = shown.stdout, shown.stderr
        self.pages = [output.data for output in shown.outputs]
        return result

    def html(self, source: str) -> str:
        """How the value of a cell is shown."""
        formatted: str = self.shell.display_formatter.format(self.cell(source).result)[0]["text/html"]
        return formatted


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Notebook]:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts its own there
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("builtins._", raising=False)  # where something else has put it there, IPython leaves `_` alone
    settings = Config()
    settings.HistoryManager.enabled = False
    settings.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=settings)
    try:
        made = Notebook(shell)
        assert made.cell("%load_ext graphkeep").success
        made.cell(
            "import torch\nnet = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))\n"
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)"
        )
        yield made
    finally:
        shell.reset(new_session=False)
        InteractiveShell.clear_instance()


def page(data: dict[str, str]) -> str:
    """The page in the frame that a cell showed."""
    return html.unescape(data["text/html"])


def test_a_cell_runs_as_without_the_magic_and_shows_its_page(notebook: Notebook):
    result = notebook.cell(TRAIN)
    assert result.success
    (shown,) = notebook.pages
    assert notebook.text == "Out[3]: 12\n"
    assert (result.result, notebook.space["_"]) == (12, 12)
    assert len(notebook.space["losses"]) == 12
    assert shown["text/plain"].startswith("verdict: GK102 nodes grow: `losses[0..11]` (list, global of __main__)")
    assert "<iframe" in shown["text/html"]
    assert "losses.append(loss.detach())" in page(shown)
    assert LEDGER.listeners == ()


def test_what_a_cell_raises_is_raised_with_its_own_lines_and_the_page_is_shown(notebook: Notebook):
    result = notebook.cell("%%graph\nx = net(torch.randn(4, 8)).sum()\n\ndef fail():\n    raise KeyError('own')\nfail()")
    assert isinstance(result.error_in_exec, KeyError)
    assert "Cell In[3], line 6\n" in notebook.text
    assert "line 5, in fail()" in notebook.text
    assert "jupyter.py" not in notebook.text
    assert "x" in notebook.space
    assert len(notebook.pages) == 1
    assert "the program raised KeyError" in page(notebook.pages[0])
    assert LEDGER.listeners == ()


def test_a_semicolon_an_await_and_other_magics_are_as_ever(notebook: Notebook):
    notebook.cell("%%graph\n1 + 1;")
    assert notebook.text == ""
    assert (
        notebook.cell("%%graph\nimport asyncio\nawait asyncio.sleep(0)\nw = torch.ones(2, requires_grad=True).exp()\n3").result
        == 3
    )
    assert "w" in notebook.space
    notebook.cell("%%capture out\n%%graph\n2 + 2")
    assert not notebook.pages
    assert len(notebook.space["out"].outputs) == 2
    notebook.cell("%%graph\n%%capture inner\nprint(7)")
    assert notebook.space["inner"].stdout == "7\n"
    assert len(notebook.pages) == 1
    result = notebook.cell("%%graph\n\nx +")
    assert isinstance(result.error_in_exec, SyntaxError)
    assert result.error_in_exec.lineno == 3


def test_an_await_inside_a_running_event_loop_is_refused_before_anything_runs(notebook: Notebook):
    async def kernel() -> None:
        notebook.cell("%%graph\nimport asyncio\nawait asyncio.sleep(0)\nnever = 1")

    asyncio.run(kernel())
    assert "UsageError: %%graph cannot await here" in notebook.errors
    assert "never" not in notebook.space
    assert notebook.pages == []


def test_o_keeps_the_data_file_and_without_it_none_is_left(notebook: Notebook, tmp_path: Path):
    notebook.cell("%%graph -o cell.graphkeep\nnet(torch.randn(4, 8)).sum().backward()")
    run = read(tmp_path / "cell.graphkeep")
    assert run.how == "stopped"
    assert len(run.backwards) == 1
    assert any("net(torch.randn" in text for text in run.sources.values())
    notebook.cell(TRAIN)
    assert [path.name for path in tmp_path.glob("*.graphkeep")] == ["cell.graphkeep"]
    notebook.cell("%%graph -o no/such/cell.graphkeep\nnever = 1")
    assert "UsageError: the data file cannot be written" in notebook.errors
    assert "never" not in notebook.space


def test_a_page_that_cannot_be_made_is_no_fault_of_the_cell_s(notebook: Notebook, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    def fault(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("graphkeep.report.html.render_fragment", fault)
    assert notebook.cell("%%graph\n5").result == 5
    assert "could not be shown" in caplog.text


def test_findings_postmortems_and_explanations_are_tables_with_everything_escaped(notebook: Notebook):
    notebook.space["gk"] = gk
    table = notebook.html("gk.Finding('GK101', 'bytes grow', '`<b>`', None, 'a & b', '<script>')")
    assert table.startswith("<table>")
    assert "GK101 bytes grow" in table
    assert "`&lt;b&gt;`" in table
    assert "a &amp; b" in table
    assert "&lt;script&gt;" in table
    assert "<b>" not in table
    assert "<script>" not in table
    assert ">where<" not in table
    table = notebook.html("gk.Postmortem('graphkeep GK201: <i>\\n  built:   train.py:8: `a: b`\\nno more')")
    assert "GK201: &lt;i&gt;" in table
    assert ">built</th>" in table
    assert ">train.py:8: `a: b`</td>" in table
    assert "no more" in table
    assert "<table>" in notebook.html("gk.explain(net(torch.randn(4, 8)))")


def test_loading_it_imports_no_torch():
    code = (
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
        "assert shell.run_cell('%load_ext graphkeep').success and 'graph' in shell.magics_manager.magics['cell']\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
