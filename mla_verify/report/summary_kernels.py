"""What a summary says of one kernel: what it had to decide, what was measured, and the counts that its table makes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mla_verify.against import is_against
from mla_verify.errors import UsageError
from mla_verify.report.summary_table import Pair
from mla_verify.results import CaseResult, Comparison, Verdict

if TYPE_CHECKING:
    from mla_verify.plan import Plan


@dataclass(frozen=True)
class WorstZ:
    """The largest |z| of a kernel against the reference."""

    z: float  # not negative; infinite for a NaN that must not be
    limit: float | None  # None: the tensor is compared bit by bit
    tensor: str
    case: str


@dataclass(frozen=True)
class KernelFacts:
    """What the table does not tell."""

    lse: bool  # whether it returns one, which is compared as well
    named: bool
    required: bool
    unavailable: str | None
    claims: tuple[tuple[str, str], ...]  # ("phase", "decode"), ...: what the run had to decide
    worst: WorstZ | None
    rms_z: Mapping[str, Mapping[str, tuple[float, float]]]  # dtype -> tensor -> smallest and largest of a case
    observed: Mapping[str, Mapping[str, int]]  # "repeats" -> "yes" or "no" -> cases
    seconds: Mapping[str, float]  # by stage, of all cases

    def document(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Facts and counts as in the file. pairs: this kernel's."""
        elements = {pair.case: pair.elements(self.lse) for pair in pairs}
        largest = max(elements, key=lambda case: (elements[case], case), default=None)
        worst = self.worst
        return {
            "verdicts": dict(Counter(pair.verdict.value for pair in pairs)),
            "cases": len(elements),
            "elements": sum(elements.values()),
            "largest_case": None if largest is None else {"case": largest, "elements": elements[largest]},
            "worst_z": None if worst is None else vars(worst) | {"z": worst.z if math.isfinite(worst.z) else "inf"},
            "rms_z": {dtype: {name: list(pair) for name, pair in row.items()} for dtype, row in self.rms_z.items()},
            "observed": {name: dict(counts) for name, counts in self.observed.items()},
            "seconds": dict(self.seconds),
            "lse": self.lse,
            "named": self.named,
            "required": self.required,
            "unavailable": self.unavailable,
            "claims": [list(claim) for claim in self.claims],
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> KernelFacts:
        worst = document["worst_z"]
        return cls(
            lse=document["lse"],
            named=document["named"],
            required=document["required"],
            unavailable=document["unavailable"],
            claims=tuple((kind, value) for kind, value in document["claims"]),
            worst=None if worst is None else WorstZ(**dict(worst) | {"z": float(worst["z"])}),
            rms_z={
                dtype: {name: (low, high) for name, (low, high) in row.items()}
                for dtype, row in document["rms_z"].items()
            },
            observed=document["observed"],
            seconds=document["seconds"],
        )

    def contradicts(self, pairs: Sequence[Pair]) -> str | None:
        """How what was measured contradicts the verdicts, or None. pairs: this kernel's."""
        worst, letters = self.worst, {pair.letter for pair in pairs}
        if worst and all(pair.case != worst.case for pair in pairs):
            return f"the worst z is of {worst.case}, which it did not run"
        if worst and worst.limit is not None and not worst.z <= worst.limit and "F" not in letters:
            return f"|z| {worst.z} is over {worst.limit}, and nothing is a FAIL by comparison"
        for low, high in (pair for row in self.rms_z.values() for pair in row.values()):
            if not 0 <= low <= high:
                return f"an rms z goes from {low} to {high}"
        for name, counts in self.observed.items():
            if sum(counts.values()) > len(pairs) or not set(counts) <= {"yes", "no"}:
                return f"{name} was observed {dict(counts)} in {len(pairs)} cases"
        return None

    def merged(self, name: str, other: KernelFacts) -> KernelFacts:
        """Of two runs. Raises UsageError when they are of kernels that return different things."""
        if self.lse != other.lse:
            raise UsageError(f"{name} returns an LSE in one summary and none in another", "merge runs of one kernel")
        rms_z = {dtype: dict(row) for dtype, row in self.rms_z.items()}
        for dtype, row in other.rms_z.items():
            for tensor, (low, high) in row.items():
                mine = rms_z.setdefault(dtype, {}).get(tensor, (low, high))
                rms_z[dtype][tensor] = (min(mine[0], low), max(mine[1], high))
        observed = {
            what: dict(Counter(self.observed.get(what, {})) + Counter(other.observed.get(what, {})))
            for what in dict.fromkeys([*self.observed, *other.observed])
        }
        return replace(
            self,
            named=self.named or other.named,
            required=self.required or other.required,
            unavailable=self.unavailable or other.unavailable,
            claims=tuple(dict.fromkeys([*self.claims, *other.claims])),
            worst=max((w for w in (self.worst, other.worst) if w), key=lambda w: w.z, default=None),
            rms_z=rms_z,
            observed=observed,
            seconds=_added([self.seconds, other.seconds]),
        )


def kernel_facts(plan: Plan, results: Sequence[CaseResult]) -> dict[str, KernelFacts]:
    """Of every selected kernel, with results or without."""
    by_kernel: dict[str, list[CaseResult]] = {kernel.name: [] for kernel in plan.kernels}
    for result in results:
        by_kernel[result.kernel].append(result)
    return {
        kernel.name: KernelFacts(
            lse=kernel.contract.returns_lse,
            named=kernel.name in plan.named,
            required=kernel.name in plan.required,
            unavailable=plan.unavailable.get(kernel.name),
            claims=tuple(plan.claims.get(kernel.name, ())),
            worst=_worst(by_kernel[kernel.name]),
            rms_z=_rms_z(by_kernel[kernel.name]),
            observed=_observed(by_kernel[kernel.name]),
            seconds=_added([result.seconds for result in by_kernel[kernel.name]]),
        )
        for kernel in plan.kernels
    }


def _with_reference(results: Iterable[CaseResult]) -> list[tuple[CaseResult, Comparison]]:
    return [(r, c) for r in results for c in r.comparisons if not is_against(c)]


def _worst(results: Iterable[CaseResult]) -> WorstZ | None:
    found = []
    for result, comparison in _with_reference(results):
        if comparison.worst:
            z = math.inf if math.isnan(comparison.worst.z) else abs(comparison.worst.z)
            limit = next((check.limit for check in comparison.checks if check.name == "max_z"), None)
            limit = None if limit is None else _short(limit)
            found.append(WorstZ(_short(z), limit, comparison.tensor, result.case))
    return max(found, key=lambda worst: worst.z, default=None)


def _rms_z(results: Iterable[CaseResult]) -> dict[str, dict[str, tuple[float, float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for result, comparison in _with_reference(results):
        judged = result.verdict in (Verdict.PASS, Verdict.FAIL)
        if judged and math.isfinite(comparison.rms_z) and any(c.name == "max_z" for c in comparison.checks):
            found.setdefault(result.dtype, {}).setdefault(comparison.tensor, []).append(_short(comparison.rms_z))
    return {dtype: {name: (min(v), max(v)) for name, v in row.items()} for dtype, row in found.items()}


def _observed(results: Iterable[CaseResult]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for result in results:
        for name, held in result.observed.items():
            found.setdefault(name, Counter())["yes" if held else "no"] += 1
    return {name: dict(counts) for name, counts in found.items()}


def _added(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for stages in seconds:
        for stage, value in stages.items():
            total[stage] = total.get(stage, 0.0) + value
    return {stage: round(value, 3) for stage, value in total.items()}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
