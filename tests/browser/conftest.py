"""Pages in chromium, each watched: a request that leaves it, an error or a dialog fails the test that opened it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from graphkeep.report._run import Run
from graphkeep.report.html import write

from .chromium import CHROMIUM, arguments

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments())
        yield started
        started.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """``show(runs, width=..., **options of a context)``: the page of these runs, loaded from a file."""
    wrong: list[str] = []
    contexts = []

    def opened(runs: list[Run], *, width: int = 1_100, height: int = 900, **options: Any) -> Page:
        file = tmp_path / "report.html"
        write(runs, file)
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5_000)
        page.on("request", lambda request: request.url in (file.as_uri(), "data:,") or wrong.append(f"request {request.url}"))
        page.on("console", lambda message: wrong.append(f"console {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
