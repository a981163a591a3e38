"""Plain text that several reports share. No rich: `mla-verify list` has to be instant."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mla_verify.results import CaseResult, Location


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


def failed_checks(result: CaseResult) -> list[str]:
    """Each failed check of a result with value and limit, and the worst element of its tensor."""
    lines = []
    for comparison in result.comparisons:
        failed = [check for check in comparison.checks if not check.passed]
        for check in failed:
            detail = f" ({check.detail})" if check.detail else ""
            lines.append(f"{comparison.tensor}: {check.name} {check.value:.4g}, limit {check.limit:.4g}{detail}")
        if failed and comparison.worst:
            lines.append(f"{comparison.tensor}: worst at {comparison.worst}")
    return lines


def worst_of(results: Sequence[CaseResult]) -> tuple[CaseResult, str, Location] | None:
    """The result, tensor and element with the largest |z|; a NaN is worse than any number."""
    found = [
        (result, comparison.tensor, comparison.worst)
        for result in results
        for comparison in result.comparisons
        if comparison.worst
    ]
    return max(found, key=lambda item: math.inf if math.isnan(item[2].z) else abs(item[2].z), default=None)
