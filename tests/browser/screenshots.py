"""The pictures of docs/report.md: ``python -m tests.browser.screenshots [FOLDER]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from graphkeep.report._read import read_all
from graphkeep.report.html import write

from . import sample_run
from .chromium import CHROMIUM, arguments

_SHOTS = {
    "report-light": (1_100, 1_000, "light", "main", 0),
    "report-time": (1_100, 1_250, "light", "[data-part=time]", 0),
    "report-dark": (1_100, 1_250, "dark", "[data-part=time]", 20),
    "report-narrow": (390, 1_000, "light", "[data-part=time]", 20),
}


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        page_file = Path(made, "report.html")
        write(read_all([sample_run.write(Path(made, "train.py.4711.graphkeep"), 1_000)]), page_file)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments())
        for name, (width, height, scheme, top, steps) in _SHOTS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            page.goto(page_file.as_uri())
            page.wait_for_selector("path.band")
            if steps:
                page.get_by_role("button", name=f"Last {steps}").click()
            page.evaluate("top => document.querySelector(top).closest('section, body').scrollIntoView()", top)
            page.mouse.move(0, 0)
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs" / "images")
