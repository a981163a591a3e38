"""What the terminal says of a comparison with another build's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mla_verify.against import is_against
from mla_verify.results import CaseResult, Comparison, RunReport


def against_lines(report: RunReport) -> list[str]:
    """Which build it was, in how many outputs all bits are equal, and the largest differences; nothing without one."""
    other: Mapping[str, Any] | None = report.environment.get("against")
    if other is None:
        return []
    compared = [(r, c) for r in report.results for c in r.comparisons if is_against(c)]
    results = [result for result in report.results if any(map(is_against, result.comparisons))]
    lines = [f"against {other['folder']} ({_build(other)}):"]
    if results:
        lines[0] += f" {sum(map(_bit_equal, results))} of {len(results)} outputs bit-equal"
    worst_ulp = _worst(compared, lambda c: _value(c, "ulp"))
    if worst_ulp and worst_ulp[2]:
        lines.append(f"  worst distance {worst_ulp[2]:.0f} ULP: {worst_ulp[1].tensor} of {worst_ulp[0].case}")
    worst_z = _worst(compared, lambda c: abs(c.worst.z) if c.worst else 0.0)
    if worst_z and worst_z[2] and worst_z[1].worst:
        result, comparison, z = worst_z
        lines.append(f"  worst z {z:.3g}, by the roundings of both: {comparison.tensor} of {result.case}")
        lines.append(f"    {comparison.worst} (expected: the other build's)")
    return [*lines, *_notes(report, other, compared), ""]


def _build(other: Mapping[str, Any]) -> str:
    """The other build in a few words: the versions of its kernels, and of the tool."""
    versions = other.get("versions") or {}
    kernels = [str(versions[name]) for name in other["kernels"].values() if versions.get(name)]
    tool = f"mla-verify {(other.get('commit') or other.get('package_hash') or 'unknown')[:10]}"
    return ", ".join([*dict.fromkeys(kernels), tool])


def _notes(report: RunReport, other: Mapping[str, Any], compared: Sequence[tuple[CaseResult, Comparison]]) -> list[str]:
    notes = [f"{here} here is held against {there} there" for here, there in other["kernels"].items() if here != there]
    for what in ("device", "package_hash"):
        here, there = report.environment.get(what), other.get(what)
        if here != there:
            notes.append(f"{what.replace('_', ' ')} {str(here)[:12]} here, {str(there)[:12]} there")
    gpus = [(gpu or {}).get("name") for gpu in (report.environment.get("gpu"), other.get("gpu"))]
    if all(gpus) and gpus[0] != gpus[1]:
        notes.append(f"{gpus[0]} here, {gpus[1]} there")
    dtypes = {k.detail for _, c in compared for k in c.checks if k.name == "ulp" and " here, " in k.detail}
    notes += sorted(dtypes)
    if other.get("lse_missing"):
        notes.append(f"{other['lse_missing']} outputs have an LSE in one build only, which is not compared")
    return [f"  note: {note}" for note in notes]


def _bit_equal(result: CaseResult) -> bool:
    return all(_value(c, "bits") == 0 for c in result.comparisons if is_against(c))


def _value(comparison: Comparison, check: str) -> float:
    # Of other shapes there are no bits to compare, and no distance.
    return next((c.value for c in comparison.checks if c.name == check), 0.0 if check == "ulp" else math.inf)


def _worst(
    compared: Sequence[tuple[CaseResult, Comparison]], size: Callable[[Comparison], float]
) -> tuple[CaseResult, Comparison, float] | None:
    found = [(result, comparison, size(comparison)) for result, comparison in compared]
    return max(found, key=lambda item: math.inf if math.isnan(item[2]) else item[2], default=None)
