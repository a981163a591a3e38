"""A progress bar with a running count of passed and failed, for a person who watches; nothing for a log file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mla_verify.results import CaseResult

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar(total: int, console: Console | None = None) -> Iterator[Callable[[CaseResult], None]]:
    """Gives what to call with each result. Draws on `console`, by default on stderr where that is a terminal."""
    # Not rich's own test, which FORCE_COLOR overrides: CI services set that for their log files.
    if console is None and not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts: Counter[str] = Counter()
    shown = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Transient: the report that follows says it all.
    with Progress(*shown, console=console or Console(stderr=True), transient=True) as progress:
        task = progress.add_task(_counts(counts), total=total)

        def show(result: CaseResult) -> None:
            verdict = result.verdict
            counts["failed" if verdict.wrong else "passed" if verdict.decided else "open"] += 1
            progress.update(task, advance=1, description=_counts(counts))

        yield show


def _counts(counts: Counter[str]) -> str:
    text = f"{counts['passed']} passed, {counts['failed']} failed"
    return text + (f", {counts['open']} open" if counts["open"] else "")
