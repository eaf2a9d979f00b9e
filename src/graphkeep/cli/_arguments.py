"""Kinds of arguments that several commands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is smaller.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
