"""What README and docs show runs: code blocks, doctests, links.

The blocks of a page share a namespace and run in order. A block after ``<!-- fails -->`` has to raise. A text block that
follows a Python block is what that block prints, or a part of the error that it raises; in both, a place in the page itself
is written as ``train.py:12``. The pages in `SAVED` run as if their Python blocks, one below the other with two empty lines in
between, had been saved as ``train.py``: what they print has the file's name and its true line numbers.
"""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import graphkeep

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
MODULES = ["graphkeep", *(module.name for module in pkgutil.walk_packages(graphkeep.__path__, "graphkeep."))]
SAVED = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FAILS = "<!-- fails -->"
RANKS = "<!-- ranks -->"

pytestmark = pytest.mark.usefixtures("heap_of_its_own")


@dataclass
class Block:
    line: int  # of its first line of code, from 1
    language: str
    code: str
    fails: bool
    ranks: bool


def blocks(text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""
    for number, line in lines:
        if line.startswith("```"):
            body = []
            for _, inner in lines:
                if inner == "```":
                    break
                body.append(inner)
            else:
                raise ValueError(f"the block at line {number} has no end")
            yield Block(number + 1, line.removeprefix("```").strip(), "\n".join(body), before == FAILS, before == RANKS)
        if line.strip():
            before = line.strip()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def elsewhere(text: str, page: Path, file: Path) -> str:
    if file != page:
        return text.replace(str(file), file.name)
    return re.sub(re.escape(str(page)) + r":\d+", "train.py:12", text)


def saved(found: list[Block], file: Path) -> dict[int, int]:
    """Save a page's Python blocks as one program; where each block of the page begins in it."""
    lines: list[str] = []
    begins = {}
    for block in found:
        if block.language == "python":
            begins[block.line] = len(lines) + 1
            lines += [*block.code.splitlines(), "", ""]
    file.write_text("\n".join(lines))
    return begins


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_code_block_runs(page: Path, tmp_path: Path):
    found = list(blocks(page.read_text()))
    file, begins = page, {block.line: block.line for block in found}
    if page in SAVED:
        file = tmp_path / "train.py"
        begins = saved(found, file)
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": str(file)}
    for block, after in zip(found, [*found[1:], None], strict=False):
        if block.language != "python" or block.ranks:
            continue
        expected = after.code if after is not None and after.language == "text" else None
        # empty lines before it, so that a traceback shows the page's own line
        code = compile("\n" * (begins[block.line] - 1) + block.code, str(file), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if block.fails:
                with pytest.raises(Exception) as raised:  # noqa: PT011  the text block says which
                    exec(code, namespace)
                notes = getattr(raised.value, "__notes__", [])
                says = elsewhere("\n".join([f"{type(raised.value).__name__}: {raised.value}", *notes]), page, file)
                assert expected is None or expected in says, f"line {block.line} raises\n{says}"
            else:
                exec(code, namespace)
        if expected is not None and not block.fails:
            assert elsewhere(printed.getvalue(), page, file).strip() == expected.strip(), (
                f"line {block.line} prints something else"
            )


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_doctests_of(name: str):
    # not in the module's own name: what graphkeep's own modules hold is no holder
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS, extraglobs={"__name__": "__main__"})
    assert result.failed == 0


def heading_anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=relative)
def test_every_relative_link_points_at_something(page: Path):
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in heading_anchors(target.read_text()), f"{link}: no such heading"


def test_every_page_can_be_reached_from_the_index():
    index = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path == "index.md" or f"({path})" in index, f"docs/index.md does not link {path}"


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: graphkeep\.(\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(graphkeep.__all__)


def test_every_recipe_compares_with_plain_torch():
    for page in (ROOT / "docs/recipes").glob("*.md"):
        last = [block.code for block in blocks(page.read_text()) if block.language == "python"][-1]
        assert "torch.testing.assert_close(" in last, f"{relative(page)} ends without a comparison"


def test_no_file_names_a_path_of_somebody_s_machine():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    paths = [f"/{folder}/" for folder in ("work", "root")] + ["/tmp" + "/venv"]  # put together here, or this file is one
    for name in listed.stdout.decode().split("\0"):
        file = ROOT / name
        if file.is_file():
            text = file.read_text(errors="ignore")
            assert not [path for path in paths if path in text], f"{name} names a path of a machine"
