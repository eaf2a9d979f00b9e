"""What `make docs` needs beside mkdocs.yml: pages from outside docs/, and docstrings as griffe reads them.

Pages of docs/ are read on GitHub, too, so their links are GitHub's: ``../README.md``. On the site such a file is a page of its
own, and the link leads there. A link to a file that is not in `_outside` is left as it is, and mkdocs, being strict, complains.
"""

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_FOLDERS = {
    "examples": ("Examples", "python"),
    "examples/distributed": ("Examples for several ranks", "torchrun --nproc-per-node 2"),
}
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def _outside() -> dict[str, str]:
    """Files of the repository that are pages of the site: path in the repository, path in the site."""
    pages = {name: name.lower() for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
    pages["LICENSE"] = "licence.md"
    for folder in _FOLDERS:
        for example in sorted((ROOT / folder).glob("*.py")):
            pages[f"{folder}/{example.name}"] = f"{folder}/{example.stem}.md"
        pages[folder] = f"{folder}/index.md"
    return pages


def _content(path: str) -> str:
    if path in _FOLDERS:
        scripts = sorted((ROOT / path).glob("*.py"))
        listed = "\n".join(f"- [{script.name}]({script.name}): {_summary(script)}" for script in scripts)
        title, command = _FOLDERS[path]
        return f"# {title}\n\nEach runs as it stands: `{command} {path}/{scripts[0].name}`.\n\n{listed}\n"
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = "python" if path.endswith(".py") else ""
    return f"# {Path(path).name}\n\n```{language}\n{text.rstrip()}\n```\n"


def _summary(script: Path) -> str:
    return script.read_text(encoding="utf-8").partition('"""')[2].partition("\n\n")[0].replace("\n", " ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in the pages from outside docs/."""
    in_nav = str(config.nav)
    for path, page in _outside().items():
        file = File.generated(config, page, content=_content(path))
        if f"'{page}'" not in in_nav:
            file.inclusion = file.inclusion.NOT_IN_NAV  # found by links and by search
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave or enter docs/ into links between pages of the site."""
    site = page.file.src_uri
    by_page = {there: path for path, there in _outside().items()}
    here = by_page.get(site, f"docs/{site}")
    folder = here if here in _FOLDERS else posixpath.dirname(here)

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found["target"]))
        there = path.removeprefix("docs/") if path.startswith("docs/") else _outside().get(path)
        if there is None:
            return found[0]
        return f"{found['before']}{posixpath.relpath(there, posixpath.dirname(site) or '.')}{found['anchor'] or ''})"

    parts = _CODE.split(markdown)  # every second one is code
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


class Docstrings(griffe.Extension):
    """What docstrings here say in other words than griffe knows.

    ``Example:``, and ``Example::`` before code that no doctest runs, are ``Examples:``; ``args, kwargs:`` is one entry for two.
    """

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"^( +)args, kwargs: ", r"\1args: see `kwargs`.\n\1kwargs: ", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(
            r"^Example::\n\n((?: {4}.*\n|\n)+)",
            lambda found: f"Examples:\n    ```python\n{found[1].rstrip()}\n    ```\n\n",
            text + "\n",
            flags=re.MULTILINE,
        )
