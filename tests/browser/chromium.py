"""Which browser the tests drive: Debian's chromium."""

from __future__ import annotations

import os

CHROMIUM = "/usr/bin/chromium"


def arguments() -> list[str]:
    """Chromium's own sandbox refuses to start as root, as in a container."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []
