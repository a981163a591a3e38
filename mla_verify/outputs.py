"""What a run does with the outputs it obtains beside judging them: `--dump` writes them, `--against` compares them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mla_verify.against import Against, build_sentence
from mla_verify.dump import DumpWriter, inputs_digest
from mla_verify.results import CaseResult, Comparison, RunReport, Verdict

if TYPE_CHECKING:
    from mla_verify.expected import Expected
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.plan import PlanEntry
    from mla_verify.tensors import MLAInputs, MLAOutput


@dataclass(frozen=True)
class Obtained:
    """One kernel's output of one case, in our conventions, also a wrong one."""

    entry: PlanEntry
    inputs: MLAInputs
    output: MLAOutput
    facts: RoundingFacts
    expected: Expected | None  # None: the form's outputs are compared bit by bit, and have no noise


class Outputs:
    """Sees every output of a run, once it has been judged."""

    def __init__(self, writer: DumpWriter | None, against: Against | None) -> None:
        self._writer, self._against = writer, against
        self._digest = ("", "")  # of the case at hand, whose kernels follow each other

    @property
    def are_wanted(self) -> bool:
        """Whether anybody writes them or compares them."""
        return self._writer is not None or self._against is not None

    def other_facts(self, entries: Iterable[PlanEntry]) -> list[RoundingFacts]:
        """The roundings that the other build declared of these pairs: their noise is needed as well."""
        if self._against is None:
            return []
        found = [self._against.facts_there(entry.case_id, entry.kernel.name) for entry in entries]
        return [facts for facts in found if facts is not None]

    def take(self, obtained: Obtained, result: CaseResult) -> CaseResult:
        """Its result, with what the other build makes of it."""
        case_id = obtained.entry.case_id
        if self._digest[0] != case_id:
            try:
                self._digest = (case_id, inputs_digest(obtained.inputs))
            except Exception as error:  # out of memory, say
                if self._writer is not None:
                    self._writer.failed(error)
                if self._against is not None:
                    why = f"the digest of its inputs raised {type(error).__name__}: {error}"
                    self._against.why_not[case_id, obtained.entry.kernel.name] = why
                return result
        if self._writer is not None:
            self._writer.write(obtained, self._digest[1])
        if self._against is None:
            return result
        return with_other_build(result, self._against.compare(obtained, self._digest[1]), self._against.arguments)

    def open_questions(self, results: Sequence[CaseResult]) -> list[str]:
        """Why the comparison with the other build decided less than was asked, one sentence each."""
        return [] if self._against is None else self._against.open_questions(results)

    def described(self) -> dict[str, Any]:
        """For the report's environment."""
        return {} if self._against is None else {"against": self._against.described()}

    def finish(self, report: RunReport) -> None:
        """Make the dump whole. Raises OSError when it, or an output before, could not be written."""
        if self._writer is not None:
            self._writer.finish(report)


def with_other_build(result: CaseResult, comparisons: Sequence[Comparison], arguments: str) -> CaseResult:
    """A difference that both builds' roundings do not explain is FAIL, also of a case that cannot tell on its own.

    arguments: what the command that repeats it needs besides.
    """
    vacuous = result.verdict is Verdict.NOT_RUN and bool(result.comparisons)
    failed = [build_sentence(comparison) for comparison in comparisons if not comparison.passed]
    result = replace(result, comparisons=(*result.comparisons, *comparisons))
    if failed and (result.verdict in (Verdict.PASS, Verdict.FAIL) or vacuous):
        before = [result.reason] if result.verdict is Verdict.FAIL else []
        repeat = f"{result.repeat} {arguments}"
        return replace(result, verdict=Verdict.FAIL, reason="; ".join([*before, *failed]), repeat=repeat)
    return result
