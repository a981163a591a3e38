"""Numbers -> verdict: what the comparisons of one result with the reference mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_verify.results import LARGEST_Z, Check, Comparison, Verdict

if TYPE_CHECKING:
    from mla_verify.expected import Expected
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.tensors import AttentionInputs, CopyInputs, MLAOutput
    from mla_verify.vacuity import FaultSizes


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reason: str  # one sentence; empty for PASS
    comparisons: tuple[Comparison, ...]


def judge_attention(
    output: MLAOutput,
    inputs: AttentionInputs,
    expected: Expected,
    facts: RoundingFacts,
    sizes: FaultSizes,
    more: Iterable[Check] = (),
) -> Judgement:
    """PASS, FAIL, or NOT_RUN for inputs that cannot tell. `more`: checks of the output that were made elsewhere."""
    from mla_verify.compare import compare_output
    from mla_verify.merge_bases import wrong_base
    from mla_verify.vacuity import unseen_faults

    found = _judged(compare_output(output, expected, facts, inputs), more)
    cause = wrong_base(output, inputs, expected, facts) if found.verdict is Verdict.FAIL else None
    if cause:
        out = found.comparisons[0]
        named = replace(out, checks=(*out.checks, Check("merge_base", 1.0, 0.0, cause)))
        found = replace(found, reason=f"{cause}; {found.reason}", comparisons=(named, *found.comparisons[1:]))
    unseen = unseen_faults(sizes, expected, facts)
    if found.verdict is Verdict.PASS and unseen:
        reason = f"the case cannot tell: it would pass a kernel that {' or that '.join(unseen)}"
        return replace(found, verdict=Verdict.NOT_RUN, reason=reason)
    return found


def judge_copy(output: MLAOutput, inputs: CopyInputs, more: Iterable[Check] = ()) -> Judgement:
    """PASS or FAIL of a cache write or a concatenation, bit by bit."""
    from mla_verify.compare_concat import compare_concat
    from mla_verify.compare_write import compare_cache
    from mla_verify.tensors import WriteInputs

    if isinstance(inputs, WriteInputs):
        return _judged((compare_cache(output.out, inputs),), more)
    return _judged((compare_concat(output.out, inputs),), more)


def _judged(comparisons: tuple[Comparison, ...], more: Iterable[Check]) -> Judgement:
    first = replace(comparisons[0], checks=(*comparisons[0].checks, *more))
    comparisons = (first, *comparisons[1:])
    failed = [c for c in comparisons if not c.passed]
    if not failed:
        return Judgement(Verdict.PASS, "", comparisons)
    return Judgement(Verdict.FAIL, "; ".join(failure_sentence(c) for c in failed), comparisons)


def failure_sentence(comparison: Comparison) -> str:
    """What a failed comparison says, in one sentence."""
    check = next(check for check in comparison.checks if not check.passed)
    where = f" at {comparison.worst}" if comparison.worst else ""
    if comparison.tensor in ("kv_cache", "concat"):  # a copy: its checks are counts
        details = [check.detail for check in comparison.checks if not check.passed]
        return f"{comparison.tensor}: {'; '.join(details)}" + (f"; first{where}" if where else "")
    if check.name == "nonfinite":
        return (
            f"{comparison.tensor}: NaN or infinity where it must not be, or not where it must: {check.detail};{where}"
        )
    if check.name == "max_z":
        cause = "" if check.detail == LARGEST_Z else f", {check.detail};"
        return f"{comparison.tensor}: |z| {check.value:.4g} is over {check.limit:.3g}{cause}{where}"
    return (
        f"{comparison.tensor}: {check.name} {check.value:.4g} is over {check.limit:.3g}, {check.detail}; worst{where}"
    )
