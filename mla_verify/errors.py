"""Errors a user can act on: what was wrong, and a hint on its own line. Anything else is a bug, with its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """A wrong argument, file or setting. The command exits 2 and prints message and hint without a traceback."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[UsageError], tuple[str, str]]:
        return type(self), (self.message, self.hint)  # a worker's comes through a pickle

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}"


class FallbackError(Exception):
    """Raised by a kernel's adapter when the library silently ran another kernel than the one asked for: a FAIL."""


def did_you_mean(value: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that names the closest known values, or `otherwise` when none is close."""
    close = difflib.get_close_matches(value, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else otherwise
