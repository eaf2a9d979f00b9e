"""Bytes as people write and read them. Nothing here needs torch."""

from __future__ import annotations

import re

from graphkeep._errors import ArgumentError

_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def format_bytes(count: int) -> str:
    """Bytes for people: ``12.4 MiB``."""
    power = min((max(count.bit_length(), 1) - 1) // 10, len(_NAMES) - 1)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_NAMES[power]}"


def parse_bytes(limit: int | str, argument: str) -> int:
    """``2**30``, ``"1GiB"``, ``"512 MB"``: a number of bytes."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
        return limit
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", limit) if isinstance(limit, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ArgumentError(
            f"{argument}={limit!r} is no number of bytes", instead='an int, or a string such as "512MiB" or "1.5GiB"'
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])
