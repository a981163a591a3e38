"""The values that leave a run: Comparison, CaseResult, RunReport. No torch: reports are made from these alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SCHEMA_VERSION = 1


class Verdict(str, Enum):
    PASS = "PASS"
    FAIL = "FAIL"  # ran, and the numbers are wrong
    WRONG_SHAPE = "WRONG_SHAPE"  # shape, dtype or device of a result is not what the contract says
    ERROR = "ERROR"  # the kernel raised
    CRASH = "CRASH"  # the kernel took its process down
    TIMEOUT = "TIMEOUT"
    UNSUPPORTED = "UNSUPPORTED"  # the kernel says it cannot take the case
    NOT_RUN = "NOT_RUN"  # stopped early, out of memory, a vacuous case, or an error of the tool

    @property
    def decided(self) -> bool:
        """Whether the kernel's numbers or behaviour were judged."""
        return self is Verdict.PASS or self.wrong

    @property
    def wrong(self) -> bool:
        return self in (Verdict.FAIL, Verdict.WRONG_SHAPE, Verdict.ERROR, Verdict.CRASH)


@dataclass(frozen=True)
class Location:
    """One element of a result. dim is None for the LSE."""

    request: int
    token: int  # within the request
    head: int
    dim: int | None
    actual: float
    expected: float
    z: float

    def __str__(self) -> str:
        where = f"request {self.request}, token {self.token}, head {self.head}"
        where += "" if self.dim is None else f", dim {self.dim}"
        return f"{where}: actual {self.actual:.9g}, expected {self.expected:.9g}, z {self.z:.3g}"


# The detail of a max_z whose cause is not known.
LARGEST_Z = "largest |z|"


@dataclass(frozen=True)
class Check:
    """One statistic of a comparison and the limit it was held against."""

    name: str  # "nonfinite", "max_z", "rms_z", "slope", ...
    value: float
    limit: float
    detail: str  # what it means here; where, e.g. "head 3"

    @property
    def passed(self) -> bool:
        # Written so that a NaN statistic fails.
        return self.value <= self.limit


@dataclass(frozen=True)
class Comparison:
    """One tensor of the kernel's against the reference's."""

    tensor: str  # "out" or "lse"
    checks: tuple[Check, ...]
    max_abs_error: float
    max_rel_error: float
    rms_z: float  # over all elements
    worst: Location | None  # largest |z|, or the first non-finite mismatch; None where there is no element

    @classmethod
    def of_bits(cls, tensor: str, checks: Iterable[Check], worst: Location | None) -> Comparison:
        """Of a copy, which has no error but wrong bits."""
        return cls(tensor, tuple(checks), max_abs_error=0.0, max_rel_error=0.0, rms_z=0.0, worst=worst)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def max_z(self) -> float:
        return abs(self.worst.z) if self.worst else 0.0


@dataclass(frozen=True)
class Planned:
    case: str  # id
    kernel: str


@dataclass(frozen=True)
class CaseResult:
    case: str
    kernel: str
    verdict: Verdict
    reason: str  # one sentence; empty for PASS
    comparisons: tuple[Comparison, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage: inputs, kernel, compile, reference, compare
    repeat: str = ""  # the command that repeats this result
    claim: str = ""  # what the case is for
    phase: str = ""
    dtype: str = ""
    ran: str = ""  # what really executed
    # Measured and no part of the verdict unless the contract claims it: "repeats", "batch_invariant".
    observed: Mapping[str, bool] = field(default_factory=dict)
    traceback: str = ""  # of an ERROR, or of an error of the tool
    tool_error: bool = False


@dataclass(frozen=True)
class RunReport:
    """A finished or interrupted run. Cannot be built while a planned case lacks its one verdict."""

    plan: tuple[Planned, ...]
    results: tuple[CaseResult, ...]
    environment: Mapping[str, Any]
    decision: str  # "pass", "wrong", "inconclusive" or "interrupted"
    exit_code: int
    reasons: tuple[str, ...]  # why the decision is not "pass"

    def __post_init__(self) -> None:
        planned = Counter((p.case, p.kernel) for p in self.plan)
        decided = Counter((r.case, r.kernel) for r in self.results)
        if planned != decided:
            missing, extra = planned - decided, decided - planned
            raise ValueError(f"verdicts do not match the plan: missing {dict(missing)}, too many {dict(extra)}")
