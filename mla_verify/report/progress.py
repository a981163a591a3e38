"""How a run goes on: for a person who watches, a bar with a running count of passed and failed, and who compiles what.

A log file gets a line when a kernel has compiled for a while, and one when that is over: no other silence is as long.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mla_verify.results import CaseResult
from mla_verify.watch import compilations

if TYPE_CHECKING:
    from rich.console import Console

LOGGED_SECONDS = 5.0  # of a compilation that is worth a line in a log file: Triton's take less than one


@contextmanager
def progress_bar(total: int, console: Console | None = None) -> Iterator[Callable[[CaseResult], None]]:
    """Gives what to call with each result. Draws on `console`, by default on stderr where that is a terminal."""
    # Not rich's own test, which FORCE_COLOR overrides: CI services set that for their log files.
    if console is None and not sys.stderr.isatty():
        with compilations(_Log().tell):
            yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts: Counter[str] = Counter()
    compiling: dict[str, str] = {}  # kernel -> what it is at
    shown = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Transient: the report that follows says it all.
    with Progress(*shown, console=console or Console(stderr=True), transient=True) as progress:
        task = progress.add_task(_counts(counts), total=total)

        def describe() -> str:
            return ", ".join([_counts(counts), *tuple(compiling.values())])

        def show(result: CaseResult) -> None:
            verdict = result.verdict
            counts["failed" if verdict.wrong else "passed" if verdict.decided else "open"] += 1
            progress.update(task, advance=1, description=describe())

        def tell(kernel: str, compiler: str | None, seconds: float) -> None:
            if compiler is None:
                compiling.pop(kernel, None)
            else:
                compiling[kernel] = f"{kernel} compiling ({compiler}) {seconds:.0f} s"
            progress.update(task, description=describe())

        with compilations(tell):
            yield show


class _Log:
    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # kernel -> seconds, the last that were seen

    def tell(self, kernel: str, compiler: str | None, seconds: float) -> None:
        if compiler is None:
            if self._told.pop(kernel, None) is not None:
                print(f"note: {kernel} has compiled for {seconds:.0f} s", file=sys.stderr, flush=True)
        elif seconds >= LOGGED_SECONDS:
            if kernel not in self._told:
                print(f"note: {kernel} is compiling ({compiler}), as at its first call", file=sys.stderr, flush=True)
            self._told[kernel] = seconds


def _counts(counts: Counter[str]) -> str:
    text = f"{counts['passed']} passed, {counts['failed']} failed"
    return text + (f", {counts['open']} open" if counts["open"] else "")
