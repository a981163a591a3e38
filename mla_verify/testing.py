"""The same eyes in pytest: `assert_mla` for a result that you have, the `mla_case` fixture for cases to run.

    @pytest.mark.mla_cases(CONTRACT)
    def test_my_kernel(mla_case):
        assert_mla(my_kernel(mla_case.inputs), mla_case)

The fixture comes with the package (its pytest plugin); nothing needs to be imported for it. Nothing here needs pytest.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from mla_verify.cases import PHASES, CaseSpec
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.formats import DTYPES
from mla_verify.kernels.contract import Contract, Form, facts_on
from mla_verify.results import CaseResult, Verdict
from mla_verify.suites import SUITES, SuiteCase, suite_cases

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.judge import Judgement
    from mla_verify.placed import Placed
    from mla_verify.tensors import Buffers, MLAInputs, MLAOutput

__all__ = ["InconclusiveError", "MLACase", "assert_mla", "mla_cases"]

# pytest leaves a frame with this out of a traceback that ends in a UsageError: the message says all, and the line that
# matters is the caller's.
_HIDDEN_FOR_USAGE = operator.methodcaller("errisinstance", UsageError)


class InconclusiveError(AssertionError):
    """The inputs cannot tell a right kernel from a wrong one, so that nothing was shown."""


def assert_mla(
    actual: MLAOutput | Tensor | tuple[Tensor, Tensor],
    inputs: MLAInputs | MLACase,
    contract: Contract | None = None,
) -> None:
    """Assert that `actual` is what attention over `inputs` gives, within the roundings that the contract declares.

    actual: out, or (out, lse), in the shapes of MLAOutput and the conventions of the contract; of a cache write the
    cache after it, which must be a copy of the one in `inputs`; of a concatenation its result. Both hold bit for bit.
    inputs: tensors as they were before the kernel, or an `mla_case`. A case must also be able to show the faults that
    it is made for, and its kernel must have left its inputs, and what lies around its output buffers, as they were.
    contract: a case has its own; for tensors without one: fp32 arithmetic with one rounding at the end, and no LSE.
    Raises AssertionError with the failed checks and where the worst element is; InconclusiveError when the inputs
    could not show a fault; UsageError for inputs of another form or dtype than the contract's.

    Of a fused case this shows that the result is right; that it has the same bits as the split one needs the kernel:
    `mla-verify kernels` compares them.
    """
    __tracebackhide__ = True  # a failure points at the caller's line
    case = inputs if isinstance(inputs, MLACase) else None
    judgement = _judgement(actual, case.inputs if case else inputs, contract, case)
    if judgement.verdict is Verdict.PASS:
        return
    from mla_verify.report.text import failure_lines

    claim, name = (case.claim, f"  {case}") if case else ("", "")
    result = CaseResult(name, "", judgement.verdict, judgement.reason, judgement.comparisons, claim=claim)
    if judgement.verdict is Verdict.NOT_RUN:
        # Its checks all passed; what there is to say is why that means nothing.
        raise InconclusiveError("\n".join([f"INCONCLUSIVE{name}", f"  {judgement.reason}"]))
    raise AssertionError("\n".join([f"{judgement.verdict.value}{name}", *failure_lines(result)]))


class MLACase:
    """One case for a test: its spec, the contract it is judged by, its claim, and its tensors, made when asked for.

    By hand: MLACase(CaseSpec.parse("decode-absorbed-h16-q1.kv500-p64-bf16-needle-s0"), CONTRACT)
    """

    def __init__(self, spec: CaseSpec, contract: Contract, claim: str = "", device: str = "cpu") -> None:
        self.spec = spec
        self.contract = contract
        self.claim = claim  # what a kernel that passes is known to do
        self.device = device
        self._buffers: list[Buffers] = []

    @property
    def inputs(self) -> MLAInputs:
        """AbsorbedInputs, MHAInputs, ... by the contract's form (mla_verify/tensors.py): a function of the case alone.
        What no request references is poisoned. Neither kernel nor test may change them.
        """
        return self._placed.inputs

    def output_buffers(self) -> MLAOutput:
        """New buffers for a kernel to write into, full of NaN; of a cache write, a copy of the cache.

        out [T, H, v_dim] in the dtype that the contract's facts declare, lse [T, H] float32; of a concatenation out
        [T, H, D + P]. What a kernel writes right before or after them is found by `assert_mla`.
        """
        from mla_verify.formats import FORMATS

        dtype = self.contract.facts(self.spec.dtype).out_dtype
        self._buffers.append(self._placed.buffers(FORMATS[dtype].torch_dtype))
        return self._buffers[-1].output

    def broken_rule(self) -> str | None:
        """What was done to the inputs or around the output buffers that nobody may do, or None. Told once."""
        if "_placed" not in vars(self):
            return None
        broken = self._placed.damage()
        spilled = [where for buffers in self._buffers if (where := buffers.overwritten())]
        if not broken and not spilled:
            return None
        # The fixture asks again after the test. It need not say what the test has failed with.
        del self._placed
        self._buffers.clear()
        return broken or f"the kernel wrote outside its output: {spilled[0]}"

    def settled(self, output: MLAOutput) -> tuple[MLAOutput, MLAInputs, str | None]:
        """An output on `inputs` as one on the same numbers in the split layout, these, and what it left elsewhere."""
        placed = self._placed
        return placed.result(output), placed.plain, placed.spilled(output)

    @cached_property
    def _placed(self) -> Placed:
        from mla_verify.execute import private_copy
        from mla_verify.inputs import make_inputs

        split = make_inputs(replace(self.spec, layout="split"), self.device)
        return private_copy(split, self.contract, self.spec.layout)

    def __str__(self) -> str:
        return self.spec.id

    def __repr__(self) -> str:
        return f"MLACase({self.spec.id})"


def mla_cases(
    contract: Contract,
    *,
    suite: str | None = None,
    cases: Sequence[str] = (),
    phases: Sequence[str] = (),
    dtypes: Sequence[str] = (),
) -> tuple[SuiteCase, ...]:
    """The cases of a suite ("smoke" unless given), or those named, that a contract takes, in their order.

    phases, dtypes: only these, if any are given. Where several names can stand, a single one needs no tuple.
    Raises UsageError for an unknown name, a named case outside the contract, and when nothing is left.
    """
    if not isinstance(contract, Contract):
        of = "its contract, my_kernel.contract" if hasattr(contract, "contract") else "Contract(...)"
        raise UsageError(f"{type(contract).__name__} is no contract", f"give {of}, of mla_verify.kernels")
    if suite is not None and cases:
        raise UsageError("suite and cases exclude each other", "a case is named in full: leave out suite")
    suite = suite or "smoke"
    _names("suite", suite, tuple(SUITES))
    phases, dtypes = _names("phases", phases, PHASES), _names("dtypes", dtypes, DTYPES)
    chosen = _named(contract, _names("cases", cases)) if cases else suite_cases(suite)
    # A dict: each case once, however often it was named.
    why_not = {case: _why_not(contract, case.spec, phases, dtypes) for case in chosen}
    taken = tuple(case for case, why in why_not.items() if why is None)
    if not taken:
        # Cases of other forms are no news, unless there is nothing else.
        counts = Counter(why for case, why in why_not.items() if why and case.spec.form == contract.form)
        reasons = "; ".join(f"{count} x {why}" for why, count in counts.most_common(3)) or "none has its form"
        which = "those named" if cases else f"suite {suite}"
        hint = "take another suite, widen phases or dtypes, or name cases: cases=(...)"
        raise UsageError(f"no case of {which} is left for this contract: {reasons}", hint)
    return taken


def _names(what: str, given: Sequence[str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """One name or several as a tuple. known: all that there are; none: any will do."""
    if not isinstance(given, str | tuple | list):
        raise UsageError(f"{what} is {given!r}", "a name, or a tuple of names")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if known and name not in known:
            singular = what.removesuffix("s")
            hint = did_you_mean(str(name), known, f"known: {', '.join(known)}")
            raise UsageError(f"unknown {singular} {name!r}", hint)
    return names


def _named(contract: Contract, ids: Sequence[str]) -> list[SuiteCase]:
    claims = {case.spec: case.claim for suite in SUITES for case in suite_cases(suite)}
    specs = [CaseSpec.parse(case_id) for case_id in ids]
    for spec in specs:
        why = _why_not(contract, spec)
        if why:
            raise UsageError(f"case {spec.id} is outside the contract: {why}", "name another, or mend the contract")
    return [SuiteCase(spec, claims.get(spec, "named by the test, in no suite")) for spec in specs]


def _why_not(contract: Contract, spec: CaseSpec, phases: Sequence[str] = (), dtypes: Sequence[str] = ()) -> str | None:
    """Why a case is outside the contract or not among the phases and dtypes that were asked for, or None."""
    for what, value, known in (
        ("form", spec.form, (contract.form,)),
        ("dtype", spec.dtype, contract.dtypes),
        ("phase", spec.phase, contract.phases),
        ("dtype", spec.dtype, dtypes or DTYPES),
        ("phase", spec.phase, phases or PHASES),
    ):
        if value not in known:
            return f"{what} {value} is not among {', '.join(known)}"
    return contract.why_not(spec)


def _judgement(actual: object, inputs: object, contract: Contract | None, case: MLACase | None) -> Judgement:
    __tracebackhide__ = _HIDDEN_FOR_USAGE
    from torch import Tensor

    from mla_verify.execute import checked
    from mla_verify.expected import expect
    from mla_verify.judge import Judgement, judge_attention, judge_copy
    from mla_verify.regimes import REGIME_TABLE
    from mla_verify.tensors import ConcatInputs, MLAOutput, WriteInputs
    from mla_verify.vacuity import fault_sizes

    tensors, form, dtype = _read(inputs)
    contract = contract or (case.contract if case else Contract(form=form))
    if form != contract.form:
        raise UsageError(f"inputs of form {form}, a contract of form {contract.form}", "they must be of one form")
    if dtype not in contract.dtypes:
        raise UsageError(f"inputs of dtype {dtype}", f"the contract takes {', '.join(contract.dtypes)}")
    broken = case.broken_rule() if case else None
    if broken:
        return Judgement(Verdict.FAIL, broken, ())
    if isinstance(actual, Tensor):
        actual = MLAOutput(actual, None)
    elif isinstance(actual, tuple) and len(actual) == 2:
        actual = MLAOutput(*actual)
    if not isinstance(actual, MLAOutput):
        reason = f"the result is {type(actual).__name__}, it must be out, (out, lse) or MLAOutput(out, lse)"
        return Judgement(Verdict.WRONG_SHAPE, reason, ())
    facts = facts_on(contract, dtype, tensors.device.type)
    done = checked(actual, tensors, contract, facts.out_dtype)
    if done.output is None:
        assert done.verdict is not None
        return Judgement(done.verdict, done.reason, ())
    output = done.output
    if case:
        output, tensors, spilled = case.settled(output)
        if spilled:
            return Judgement(Verdict.FAIL, spilled, ())
    if isinstance(tensors, WriteInputs):
        if output.out.data_ptr() == tensors.kv_cache.data_ptr():
            raise UsageError(
                "the cache that was written is inputs.kv_cache itself: what else changed in it cannot be seen",
                "write into a copy, e.g. mla_case.output_buffers().out or inputs.kv_cache.clone()",
            )
        return judge_copy(output, tensors)
    if isinstance(tensors, ConcatInputs):
        return judge_copy(output, tensors)
    expected = expect(tensors, [facts])
    # Real activations claim nothing but that they are not all zero.
    faults = REGIME_TABLE[case.spec.regime].shows if case else ("zeros",)
    return judge_attention(output, tensors, expected, facts, fault_sizes(tensors, expected, faults))


def _read(inputs: object) -> tuple[MLAInputs, Form, str]:
    """The inputs, their form, and the dtype of all their floating tensors."""
    __tracebackhide__ = _HIDDEN_FOR_USAGE
    from mla_verify.formats import format_of
    from mla_verify.tensors import AbsorbedInputs, ConcatInputs, LayerInputs, MHAInputs, WriteInputs

    forms: dict[type, Form] = {
        AbsorbedInputs: "absorbed",
        MHAInputs: "mha",
        WriteInputs: "write",
        ConcatInputs: "concat",
        LayerInputs: "layer",
    }
    if not isinstance(inputs, AbsorbedInputs | MHAInputs | WriteInputs | ConcatInputs | LayerInputs):
        known = ", ".join(kind.__name__ for kind in forms)
        raise UsageError(
            f"inputs are {type(inputs).__name__}, not {known} or MLACase",
            "assert_mla(actual, inputs): the result first, then what it was computed from",
        )
    floating = {name: t.dtype for name, t in inputs.named_tensors().items() if t.dtype.is_floating_point}
    formats = {format_of(dtype) for dtype in floating.values()}
    only = formats.pop()
    if formats or only is None:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in floating.items())
        raise UsageError(f"inputs of other dtypes than one: {listed}", f"all must have one of {', '.join(DTYPES)}")
    return inputs, next(form for kind, form in forms.items() if isinstance(inputs, kind)), only.name
