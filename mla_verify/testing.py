"""The same eyes in pytest: `assert_mla` for a result that you have, the `mla_case` fixture for cases to run.

    @pytest.mark.mla_cases(CONTRACT)
    def test_my_kernel(mla_case):
        assert_mla(my_kernel(mla_case.inputs), mla_case, CONTRACT)

The fixture comes with the package (its pytest plugin); nothing needs to be imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mla_verify.cases import CaseSpec
from mla_verify.errors import UsageError
from mla_verify.kernels.contract import Contract, facts_on
from mla_verify.results import CaseResult, Verdict
from mla_verify.suites import SuiteCase, suite_cases

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.judge import Judgement
    from mla_verify.tensors import MLAInputs, MLAOutput

__all__ = ["InconclusiveError", "MLACase", "assert_mla", "mla_cases"]


class InconclusiveError(AssertionError):
    """The inputs cannot tell a right kernel from a wrong one, so that nothing was shown."""


def assert_mla(
    actual: MLAOutput | Tensor | tuple[Tensor, Tensor],
    inputs: MLAInputs | MLACase,
    contract: Contract | None = None,
) -> None:
    """Assert that `actual` is what attention over `inputs` gives, within the roundings that the contract declares.

    actual: out, or (out, lse), in the conventions of the contract; of a cache write the cache after it.
    inputs: tensors, or an `mla_case`, whose inputs must also be able to show the faults that they are made for.
    contract: without one, fp32 arithmetic with one rounding at the end, and no LSE.
    Raises AssertionError with the failed checks and where the worst element is; InconclusiveError when the inputs
    could not show a fault; UsageError for inputs that the contract does not take.
    """
    contract = contract or Contract()
    case = inputs if isinstance(inputs, MLACase) else None
    tensors = inputs.inputs if isinstance(inputs, MLACase) else inputs
    judgement = _judgement(_as_output(actual), tensors, contract, case)
    if judgement.verdict is Verdict.PASS:
        return
    if judgement.verdict is Verdict.NOT_RUN:
        raise InconclusiveError(judgement.reason)
    from mla_verify.report.text import failure_lines

    claim, name = (case.claim, f"  {case}") if case else ("", "")
    result = CaseResult(name, "", judgement.verdict, judgement.reason, judgement.comparisons, claim=claim)
    raise AssertionError("\n".join([f"{judgement.verdict.value}{name}", *failure_lines(result)]))


@dataclass(frozen=True)
class MLACase:
    """One case of a suite, for a test: its spec, what it is for, and its inputs, made when they are asked for."""

    spec: CaseSpec
    claim: str
    device: str

    @cached_property
    def inputs(self) -> MLAInputs:
        """A function of the case alone. The test must not change them."""
        from mla_verify.inputs import make_inputs

        return make_inputs(self.spec, self.device)

    def __str__(self) -> str:
        return self.spec.id


def mla_cases(
    contract: Contract, *, suite: str = "smoke", cases: Sequence[str] = (), phases: Sequence[str] = ()
) -> tuple[SuiteCase, ...]:
    """The cases of a suite, or those named, that a contract takes; of some phases only, if any are given.

    Raises UsageError for an unknown name, a named case outside the contract, and when nothing is left.
    """
    named = [SuiteCase(CaseSpec.parse(case), "named by the test") for case in cases]
    for case in named:
        why = _why_not(contract, case.spec)
        if why:
            raise UsageError(
                f"case {case.spec.id} is outside the contract: {why}", "name another, or mend the contract"
            )
    taken = tuple(
        case
        for case in named or suite_cases(suite)
        if _why_not(contract, case.spec) is None and (not phases or case.spec.phase in phases)
    )
    if not taken:
        raise UsageError(f"no case of suite {suite} is left for this contract", "widen its dtypes, phases or pages")
    return taken


def _why_not(contract: Contract, spec: CaseSpec) -> str | None:
    for what, value, known in (
        ("form", spec.form, (contract.form,)),
        ("dtype", spec.dtype, contract.dtypes),
        ("phase", spec.phase, contract.phases),
    ):
        if value not in known:
            return f"{what} {value} is not among {', '.join(known)}"
    return contract.why_not(spec)


def _as_output(actual: object) -> object:
    from torch import Tensor

    from mla_verify.tensors import MLAOutput

    if isinstance(actual, Tensor):
        return MLAOutput(actual, None)
    if isinstance(actual, tuple) and len(actual) == 2:
        return MLAOutput(*actual)
    return actual


def _judgement(output: object, inputs: MLAInputs, contract: Contract, case: MLACase | None) -> Judgement:
    from mla_verify.execute import checked
    from mla_verify.expected import expect
    from mla_verify.formats import format_of
    from mla_verify.judge import Judgement, judge_attention, judge_write
    from mla_verify.regimes import REGIME_TABLE
    from mla_verify.tensors import AbsorbedInputs, MHAInputs, WriteInputs
    from mla_verify.vacuity import fault_sizes

    form = {AbsorbedInputs: "absorbed", MHAInputs: "mha", WriteInputs: "write"}[type(inputs)]
    if form != contract.form:
        raise UsageError(f"inputs of form {form}, a contract of form {contract.form}", "they must be of one form")
    source = inputs.ckv if isinstance(inputs, WriteInputs) else inputs.queries
    fmt = format_of(source.dtype)
    if fmt is None or fmt.name not in contract.dtypes:
        raise UsageError(f"inputs of dtype {source.dtype}", f"the contract takes {', '.join(contract.dtypes)}")
    facts = facts_on(contract, fmt.name, inputs.device.type)
    done = checked(output, inputs, contract, facts.out_dtype)
    if done.output is None:
        assert done.verdict is not None
        return Judgement(done.verdict, done.reason, ())
    if isinstance(inputs, WriteInputs):
        return judge_write(done.output, inputs)
    expected = expect(inputs, [facts])
    # Real activations claim nothing but that they are not all zero.
    faults = REGIME_TABLE[case.spec.regime].shows if case else ("zeros",)
    return judge_attention(done.output, inputs, expected, facts, fault_sizes(inputs, expected, faults))


def run_case(case: SuiteCase, device: str) -> Iterator[MLACase]:
    """The body of the fixture: the case, and after the test, whether it left the inputs as they were."""
    from mla_verify.execute import changed_tensors
    from mla_verify.inputs import make_inputs

    mine = MLACase(case.spec, case.claim, device)
    yield mine
    if "inputs" in vars(mine):
        changed = changed_tensors(mine.inputs, make_inputs(mine.spec, device))
        assert not changed, f"the test changed {' and '.join(changed)} of its inputs in place"
