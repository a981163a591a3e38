"""Plan and results -> the decision of a run and its exit code. Green only when everything asked for was decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mla_verify.results import CaseResult, Verdict

if TYPE_CHECKING:
    from mla_verify.plan import Plan

EXIT_PASS, EXIT_WRONG, EXIT_USAGE, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class Decision(NamedTuple):
    decision: str
    exit_code: int
    reasons: tuple[str, ...]  # one sentence each; empty for "pass"


def decide(plan: Plan, results: Sequence[CaseResult], interrupted: bool, more: Sequence[str] = ()) -> Decision:
    """The first that holds of interrupted, wrong, inconclusive and pass, with all that speaks against a pass.

    more: questions that the run was asked beside the plan's and that stay open.
    """
    wrong = _wrong(plan, results)
    open_questions = [*_inconclusive(plan, results), *more]
    if interrupted:
        return Decision("interrupted", EXIT_INTERRUPTED, ("The run was interrupted.", *wrong, *open_questions))
    if wrong:
        return Decision("wrong", EXIT_WRONG, (*wrong, *open_questions))
    if open_questions:
        return Decision("inconclusive", EXIT_INCONCLUSIVE, tuple(open_questions))
    return Decision("pass", EXIT_PASS, ())


def _of(kernel: str, results: Sequence[CaseResult]) -> list[CaseResult]:
    return [result for result in results if result.kernel == kernel]


def _wrong(plan: Plan, results: Sequence[CaseResult]) -> list[str]:
    reasons = []
    for kernel in plan.kernels:
        mine = _of(kernel.name, results)
        verdicts = Counter(result.verdict.value for result in mine if result.verdict.wrong)
        if verdicts:
            kinds = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            reasons.append(f"{kernel.name} is wrong in {verdicts.total()} of {_cases(len(mine))}: {kinds}.")
    return reasons


def _inconclusive(plan: Plan, results: Sequence[CaseResult]) -> list[str]:
    reasons = []
    if not any(result.verdict.decided for result in results):
        reasons.append("No case was decided.")
    elif plan.named_cases:
        decided = {result.case for result in results if result.verdict.decided}
        reasons += [f"No kernel decided {case}." for case in plan.named_cases if case not in decided]
    for kernel in plan.kernels:
        mine = _of(kernel.name, results)
        reasons += _without_verdict(kernel.name, mine)
        reasons += _undecided(plan, kernel.name, mine)
    return reasons


def _without_verdict(kernel: str, results: Sequence[CaseResult]) -> list[str]:
    """TIMEOUT, NOT_RUN and whatever an error of the tool left behind, by reason."""
    open_results = [r for r in results if r.tool_error or r.verdict in (Verdict.TIMEOUT, Verdict.NOT_RUN)]
    kinds = Counter((result.verdict.value, result.reason.rstrip(".")) for result in open_results)
    return [
        f"{kernel}: {_cases(count)} {verdict}" + (f" ({reason})." if reason else ".")
        for (verdict, reason), count in kinds.items()
    ]


def _undecided(plan: Plan, kernel: str, results: Sequence[CaseResult]) -> list[str]:
    """What of this kernel was asked for and stays open."""
    decided = [result for result in results if result.verdict.decided]
    if not decided and kernel in plan.named:
        asked = "required" if kernel in plan.required else "selected"
        none = "none of its cases was decided" if results else "no selected case is of its form"
        why = plan.unavailable.get(kernel)
        return [f"{kernel} was {asked}, and {none}" + (f": {why.rstrip('.')}." if why else ".")]
    done = {("phase", result.phase) for result in decided} | {("dtype", result.dtype) for result in decided}
    left = [claim for claim in plan.claims.get(kernel, ()) if claim not in done]
    return [
        f"{kernel} claims {what} {', '.join(values)}, of which no case was decided."
        for what in ("phase", "dtype")
        if (values := [value for kind, value in left if kind == what])
    ]


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"
