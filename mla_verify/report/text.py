"""Plain text that several reports share. No rich: `mla-verify list` has to be instant."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mla_verify.against import is_against
from mla_verify.results import CaseResult, Location, RunReport

_TRACEBACK_LINES = 6  # of a failure's traceback; the JSON report has all of it


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows of cells as aligned text. `right`: the columns that are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def failure_lines(result: CaseResult) -> list[str]:
    """What the terminal shows of a wrong result, below the line that names it."""
    lines = [f"  claim   {result.claim}"] if result.claim else []
    # The checks say all that the reason of a FAIL sums up.
    lines += [f"  {line}" for line in failed_checks(result)] or [f"  reason  {result.reason}"]
    lines += [f"    {line}" for line in _short(result.traceback.rstrip().splitlines())]
    lines += [f"  ran     {result.ran}"] if result.ran else []
    return lines + ([f"  repeat  {result.repeat}"] if result.repeat else [])


def _short(trace: list[str]) -> list[str]:
    """The innermost calls of a traceback; they stand first in what a fault handler writes."""
    if len(trace) <= _TRACEBACK_LINES:
        return trace
    starts = ("Fatal Python error", "Stack (most recent call first)")
    fatal = [i for i, line in enumerate(trace) if line.startswith(starts)]
    if fatal:
        return [*trace[fatal[0] : fatal[0] + _TRACEBACK_LINES], "..."]
    return ["...", *trace[-_TRACEBACK_LINES:]]


def failed_checks(result: CaseResult) -> list[str]:
    """Each failed check of a result with value and limit, and the worst element of its tensor."""
    lines = []
    for comparison in result.comparisons:
        failed = [check for check in comparison.checks if not check.passed]
        for check in failed:
            detail = f" ({check.detail})" if check.detail else ""
            # Counts as they are, statistics to four digits.
            value = f"{check.value:.0f}" if check.limit == 0 and check.value < 1e15 else f"{check.value:.4g}"
            lines.append(f"{comparison.tensor}: {check.name} {value}, limit {check.limit:.4g}{detail}")
        if any(check.name == "nonfinite" for check in failed):
            lines.append("    (slots that no request references hold NaN, and so does the output before the call)")
        if failed and comparison.worst:
            lines.append(f"{comparison.tensor}: worst at {comparison.worst}")
    return lines


def worst_of(results: Sequence[CaseResult]) -> tuple[CaseResult, str, Location] | None:
    """The result, tensor and element with the largest |z| against the reference; a NaN is worse than any number."""
    found = [
        (result, comparison.tensor, comparison.worst)
        for result in results
        for comparison in result.comparisons
        if comparison.worst and not is_against(comparison)
    ]
    return max(found, key=lambda item: math.inf if math.isnan(item[2].z) else abs(item[2].z), default=None)


def bits_lines(report: RunReport) -> list[str]:
    """By kernel, in how many of the cases that were called again the bits were the same."""
    lines = []
    for kernel in dict.fromkeys(planned.kernel for planned in report.plan):
        parts = []
        for name, words in (("repeats", "repeat"), ("batch_invariant", "alone as in a batch")):
            seen = [r.observed[name] for r in report.results if r.kernel == kernel and name in r.observed]
            parts += [f"{words} {sum(seen)} of {len(seen)}"] if seen else []
        lines += [f"bits of {kernel}: {', '.join(parts)}"] if parts else []
    return [*lines, ""] if lines else []
