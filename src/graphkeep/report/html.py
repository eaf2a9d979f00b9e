"""A report as one HTML page that needs nothing else: no network, no other file, no server.

What comes from the data file is text. It gets into the page by jinja's escaping or as JSON, and the page's script puts it in by
``textContent``; a Content-Security-Policy allows the page's own scripts by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from graphkeep._units import format_bytes
from graphkeep.report._page import page
from graphkeep.report._page_ranks import ranks
from graphkeep.report._ranks import missing
from graphkeep.report._run import Run

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("d3.min.js", "base.js", "bands.js", "lives.js", "table.js", "page.js")


def write(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Write runs, the ranks of one launch or a single one, as one page.

    Arguments:
        runs: as `graphkeep.report._read.read_all` gives them.
        path: where to; a file there is replaced.

    Raises:
        OSError: the path cannot be written.
    """
    Path(path).write_bytes(render(runs).encode())


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    css, scripts = _text("page.css"), [_text(name) for name in _SCRIPTS]
    pages = page(runs)
    made = _environment().get_template("page.html")
    text = made.render(
        title=pages[0].program if pages else "no run",
        policy=_policy(css, scripts),
        css=Markup(css),
        scripts=[Markup(script) for script in scripts],
        runs=[(one, _json(one.data)) for one in pages],
        ranks=ranks(runs) if len(runs) > 1 else [],
        missing=missing(runs) if runs else [],
    )
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is a string to Python and no text in a file


def render_fragment(runs: Sequence[Run], height: int = 720) -> str:
    """The page in a frame, for a notebook: ``IPython.display.HTML(render_fragment(runs))``.

    The frame is a sandbox: the page's script cannot reach the notebook.

    Arguments:
        runs: as for `write`.
        height: of the frame, in pixels.
    """
    page_text = html.escape(render(runs), quote=True)
    return (
        f'<iframe title="graphkeep report" sandbox="allow-scripts" srcdoc="{page_text}" '
        f'style="width:100%;height:{int(height)}px;border:1px solid #8888;border-radius:6px"></iframe>'
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["bytes"] = format_bytes
    made.filters["count"] = lambda number: f"{number:,}"
    made.filters["code"] = _code
    return made


@cache
def _text(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")  # with \n, whatever the checkout has: the hashes are of this


def _policy(css: str, scripts: list[str]) -> str:
    """Nothing from anywhere; of scripts and styles only these."""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(css)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: dict[str, Any]) -> Markup:
    """JSON that ends no script element and starts no comment."""
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # U+2028 and U+2029 are escaped already, as is all that is not ASCII


def _code(text: str) -> Markup:
    """What stands between backticks as code, all of it escaped."""
    parts = re.split(r"(`[^`]+`)", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part[1:-1]) if len(part) > 2 and part[0] == part[-1] == "`" else escape(part)  # noqa: PLR2004
        for part in parts
    )
