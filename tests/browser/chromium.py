"""Which browser the tests drive: Debian's chromium."""

from __future__ import annotations

import os

from playwright.sync_api import Locator

CHROMIUM = "/usr/bin/chromium"


def press(mark: Locator) -> None:
    """Click where a mark really is: the middle of a band's box may lie on another band."""
    spot = mark.evaluate(
        """mark => {
            mark.scrollIntoView({block: "center"});
            const box = mark.getBoundingClientRect();
            for (let x = box.left + 2; x < box.right; x += 3)
                for (let y = box.top + 2; y < box.bottom; y += 3)
                    if (document.elementFromPoint(x, y) === mark) return [x, y];
            return null;
        }"""
    )
    assert spot is not None
    mark.page.mouse.click(*spot)


def arguments() -> list[str]:
    """Chromium's own sandbox refuses to start as root, as in a container."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []
