"""`--summary PATH`: a run in a small JSON that counts, and from which each count can be made again.

The table (summary_table.py) has a letter for every planned pair. Counts, elements, decision and exit code follow from
it and from what the run was asked to decide; summary_read.py makes them again and refuses a file that says otherwise.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mla_verify.decision import Decision, decide
from mla_verify.report.json_report import plain
from mla_verify.report.summary_kernels import KernelFacts, kernel_facts
from mla_verify.report.summary_table import Pair, pairs_of, table_of
from mla_verify.results import CaseResult, RunReport

if TYPE_CHECKING:
    from mla_verify.kernels.contract import Kernel
    from mla_verify.plan import Plan

SUMMARY_VERSION = 1
# 200 reasons of 400 characters are 100 KB of the 1 MB that a summary may have.
_MAX_REASONS, _MAX_LENGTH = 200, 400
_OTHERS = "other reasons, which the report has (--json)"


@dataclass(frozen=True)
class Why:
    """Why `count` pairs of a kernel have a verdict that is not PASS."""

    kernel: str
    verdict: str
    reason: str
    tool_error: bool
    count: int


@dataclass(frozen=True)
class Summary:
    """A run, or several of one package hash that share no pair of case and kernel."""

    environments: tuple[Mapping[str, Any], ...]  # of each run, as in its report
    package_hash: str | None
    commit: str | None  # of the source that ran; None: unknown, or there was a change that no commit has
    interrupted: bool
    open_questions: tuple[str, ...]  # asked beside the plan's, as by --against
    unpaired: tuple[str, ...]  # named cases that no kernel was planned on
    pairs: tuple[Pair, ...]
    kernels: Mapping[str, KernelFacts]
    why: tuple[Why, ...]

    def pairs_of(self, kernel: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.kernel == kernel]

    def elements_by_case(self) -> Counter[str]:
        """Compared elements by case id, of all kernels together; see Pair.elements."""
        found: Counter[str] = Counter()
        for pair in self.pairs:
            found[pair.case] += pair.elements(self.kernels[pair.kernel].lse)
        return found

    def decide(self) -> Decision:
        """The decision that follows from the verdicts and from what was asked."""
        from mla_verify.plan import Plan

        kernels = self.kernels
        plan = Plan(
            entries=(),
            kernels=tuple(cast("Kernel", _Named(name)) for name in kernels),
            named=tuple(name for name, facts in kernels.items() if facts.named),
            required=tuple(name for name, facts in kernels.items() if facts.required),
            unavailable={name: facts.unavailable for name, facts in kernels.items() if facts.unavailable},
            named_cases=(*dict.fromkeys(pair.case for pair in self.pairs if pair.named), *self.unpaired),
            claims={name: facts.claims for name, facts in kernels.items()},
        )
        return decide(plan, self._results(), self.interrupted, self.open_questions)

    def _results(self) -> list[CaseResult]:
        # Which of a kernel's pairs had which reason makes no difference to the decision.
        left: dict[tuple[str, str], list[tuple[str, bool]]] = defaultdict(list)
        for why in reversed(self.why):
            left[why.kernel, why.verdict] += [(why.reason, why.tool_error)] * why.count
        results = []
        for p in self.pairs:
            stack = left[p.kernel, p.verdict.value]
            reason, tool_error = stack.pop() if stack else ("", False)
            made = CaseResult(p.case, p.kernel, p.verdict, reason, phase=p.phase, dtype=p.dtype, tool_error=tool_error)
            results.append(made)
        return results


@dataclass(frozen=True)
class _Named:
    """All that a decision asks of a kernel."""

    name: str


def to_summary(report: RunReport, plan: Plan, open_questions: Sequence[str]) -> str:
    """The summary of a run as JSON text. open_questions: those beside the plan's that stayed open."""
    named = set(plan.named_cases)
    environment: Mapping[str, Any] = plain(report.environment)
    summary = Summary(
        environments=(environment,),
        package_hash=environment.get("package_hash"),
        commit=None if environment.get("dirty") else environment.get("commit"),
        interrupted=report.decision == "interrupted",
        open_questions=tuple(open_questions),
        unpaired=tuple(case for case in plan.named_cases if all(result.case != case for result in report.results)),
        # In the table's order, in which the file is read again.
        pairs=tuple(pairs_of(table_of(Pair.of(result, result.case in named) for result in report.results))),
        kernels=kernel_facts(plan, report.results),
        why=_why(report.results),
    )
    return render(summary)


def _why(results: Iterable[CaseResult]) -> tuple[Why, ...]:
    counts = Counter(
        (r.kernel, r.verdict.value, r.reason[:_MAX_LENGTH], r.tool_error) for r in results if r.reason or r.tool_error
    )
    return limited(Why(*key, count) for key, count in counts.items())


def limited(reasons: Iterable[Why]) -> tuple[Why, ...]:
    """Each reason once; the rarest of very many together."""
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    for why in reasons:
        counts[why.kernel, why.verdict, why.reason, why.tool_error] += why.count
    kept = {key for key, _ in counts.most_common(_MAX_REASONS)}
    short: Counter[tuple[str, str, str, bool]] = Counter()
    for key, count in counts.items():
        kernel, verdict, _, tool_error = key
        short[key if key in kept else (kernel, verdict, _OTHERS, tool_error)] += count
    return tuple(Why(*key, count) for key, count in short.items())


def render(summary: Summary) -> str:
    """A summary as JSON text, with all that follows from it."""
    return json.dumps(_document(summary), indent=0, allow_nan=False) + "\n"


def _document(summary: Summary) -> dict[str, Any]:
    decision, exit_code, reasons = summary.decide()
    by_case = summary.elements_by_case()
    largest = max(by_case, key=lambda case: (by_case[case], case), default=None)
    return {
        "summary_version": SUMMARY_VERSION,
        "decision": decision,
        "exit_code": exit_code,
        "reasons": [reason[:_MAX_LENGTH] for reason in reasons[:_MAX_REASONS]],
        "num_reasons": len(reasons),
        "pairs": len(summary.pairs),
        "cases": len({pair.case for pair in summary.pairs}),
        "elements": by_case.total(),
        "largest_case": None if largest is None else {"case": largest, "elements": by_case[largest]},
        "interrupted": summary.interrupted,
        "open_questions": list(summary.open_questions),
        "unpaired": list(summary.unpaired),
        "commit": summary.commit,
        "package_hash": summary.package_hash,
        "environments": [dict(environment) for environment in summary.environments],
        "kernels": {name: facts.document(summary.pairs_of(name)) for name, facts in summary.kernels.items()},
        "why": [dict(vars(why)) for why in summary.why],
        "table": table_of(summary.pairs),
    }
