"""One kernel's results against each other, bit by bit: in another layout, called again, a request alone.

Nothing here imports torch until results are compared. Other bits fail a case only where the contract claims the same
ones; an extra call that goes wrong always fails it, since it is the case itself or a part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mla_verify.calls import Job, execute_job
from mla_verify.cases import CaseSpec
from mla_verify.kernels.contract import Kernel
from mla_verify.results import Check, Verdict

if TYPE_CHECKING:
    from mla_verify.execute import Execution
    from mla_verify.tensors import MLAInputs, MLAOutput

# By layout, the name of its check and where else the same numbers lie.
_ELSEWHERE = {
    "fused": ("cat_free", "apart, not fused"),
    "transposed": ("layout", "contiguous, not transposed"),
    "far31": ("layout", "in a small cache, not past 2^31 elements"),
    "far32": ("layout", "in a small cache, not past 2^32 elements"),
}
# Of attention: what a copy must give is known bit by bit.
_FORMS = ("absorbed", "mha", "layer")
# Query times key times head. Larger cases are not called again: 2^24 is one query of 128 heads on 131,072 keys.
MAX_SCORES = 1 << 24
# In a process with this variable kernels may be interpreted, which takes as long again and says nothing about a GPU.
_INTERPRETER = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Observation:
    """What extra calls showed, by name ("repeats", "batch_invariant"), and the checks of what a contract claims."""

    observed: Mapping[str, bool] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    open: str = ""  # why a check that the case is for, or the contract claims, could not be made


def compare_layouts(kernel: Kernel, job: Job, inputs: MLAInputs | None, output: MLAOutput) -> Observation:
    """The same numbers in the job's layout and in the split one give the same bits: no place in memory may matter.

    output: the kernel's on the job.  inputs: the job's, if they are there.
    Nothing where there is nothing to compare: the kernel takes no split form, or does not even repeat itself.
    """
    name, elsewhere = _ELSEWHERE[job.layout]
    apart = execute_job(kernel, replace(job, layout="split"), inputs)
    if _went_wrong(apart):
        return Observation(checks=(Check(name, 1.0, 0.0, f"on the same tensors {elsewhere}: {apart.reason}"),))
    if apart.output is None:
        if apart.verdict is Verdict.UNSUPPORTED:
            return Observation()
        return Observation(open=f"no result on the same tensors {elsewhere}: {apart.reason}")
    changed = differing(output, apart.output)
    _forget(apart.output)
    if changed:
        again = execute_job(kernel, job, inputs)
        if _went_wrong(again):
            return Observation(checks=(Check(name, 1.0, 0.0, f"when the same call is made again: {again.reason}"),))
        if again.output is None:
            return Observation(open=f"no result when the same call is made again: {again.reason}")
        unsteady = differing(output, again.output)
        _forget(again.output)
        if unsteady:
            claim = Check("repeats", float(unsteady), 0.0, "elements have other bits when the same call is made again")
            return Observation(checks=(claim,) if kernel.contract.repeats else ())
    detail = f"elements differ from those of the same tensors {elsewhere}" if changed else "the same bits as apart"
    return Observation(checks=(Check(name, float(changed), 0.0, detail),))


def _went_wrong(done: Execution) -> bool:
    return done.verdict is not None and done.verdict.wrong


def observe(kernel: Kernel, job: Job, inputs: MLAInputs | None, output: MLAOutput) -> Observation:
    """Call the kernel again: on the same case, and on the first, the middle and the last request alone.

    output: what it gave on the job, in our conventions, in which rows that the contract leaves open are all alike.
    inputs: the job's, if they are there.
    """
    contract, spec = kernel.contract, job.spec
    if spec is None or spec.layout != "split" or spec.form not in _FORMS or spec.num_scores > MAX_SCORES:
        return Observation()
    claims = contract.repeats or contract.batch_invariant
    if _INTERPRETER in (kernel.own_process(job.device) or {}) and not claims:
        return Observation()
    again = _Differences("repeats", contract.repeats, "the same call is made again")
    again.add(_call(kernel, job, inputs), output)
    alone = _Differences("batch_invariant", contract.batch_invariant, "a request is alone")
    for request in some_requests(spec):
        start = sum(r.q_len for r in spec.requests[:request])
        rows = slice(start, start + spec.requests[request].q_len)
        alone.add(_call(kernel, replace(job, only=request), _alone(inputs, request)), _rows(output, rows))
    both = (again, alone)
    observed = {part.name: same for part in both if (same := part.same) is not None}
    unseen = "; ".join(part.unseen for part in both if part.unseen)
    return Observation(observed, tuple(check for part in both if (check := part.check())), unseen)


class _Differences:
    """Of calls that should give the bits of another one."""

    def __init__(self, name: str, claimed: bool, when: str) -> None:
        self.name, self._claimed, self._when = name, claimed, when
        self._changed: list[int | None] = []  # by call, elements with other bits; None: it gave no result
        self._wrong = self._lost = self._late = ""

    def add(self, done: Execution | None, output: MLAOutput) -> None:
        verdict = done.verdict if done else None
        if done is None or done.output is None or verdict is not None:
            if done is not None and _went_wrong(done):
                self._wrong = self._wrong or done.reason
            elif done is not None and verdict is Verdict.TIMEOUT:
                self._late = self._late or done.reason
            elif verdict is not Verdict.UNSUPPORTED:  # which is the kernel's to say, and breaks no claim
                self._lost = self._lost or (done.reason if done else "an error of the tool")
            self._changed.append(None)
            return
        self._changed.append(differing(output, done.output))
        _forget(done.output)

    @property
    def same(self) -> bool | None:
        """None where it was not seen: no call, or one without a result and no difference in the others."""
        if any(self._changed):
            return False
        return None if None in self._changed or not self._changed else True

    @property
    def unseen(self) -> str:
        """Why a claim was not decided, or that a call did not end; nothing where neither is so."""
        if self._late and not self._wrong:
            return f"no result when {self._when}: {self._late}"
        missing = self._claimed and not self._wrong and self._lost and self.same is None
        return f"{self.name} is claimed, and no result came when {self._when}: {self._lost}" if missing else ""

    def check(self) -> Check | None:
        """Where a call went wrong, or the contract claims it and it was seen."""
        if self._wrong:
            return Check(self.name, 1.0, 0.0, f"when {self._when}: {self._wrong}")
        if not self._claimed or self.same is None:
            return None
        count = sum(changed or 0 for changed in self._changed)
        detail = f"elements have other bits when {self._when}" if count else "none"
        return Check(self.name, float(count), 0.0, detail)


def _call(kernel: Kernel, job: Job, inputs: MLAInputs | None) -> Execution | None:
    """None for a call that our own part of it did not survive: there is a result already, which counts."""
    try:
        return execute_job(kernel, job, inputs)
    except Exception:
        return None


def _alone(inputs: MLAInputs | None, request: int) -> MLAInputs | None:
    from mla_verify.inputs import alone

    return None if inputs is None else alone(inputs, request)


def some_requests(spec: CaseSpec) -> Sequence[int]:
    """The first, the middle and the last of the requests that have queries and keys; none of fewer than two."""
    live = [b for b, r in enumerate(spec.requests) if r.q_len and r.kv_len]
    return sorted({live[0], live[len(live) // 2], live[-1]}) if len(live) > 1 else []


def _rows(output: MLAOutput, rows: slice) -> MLAOutput:
    return replace(output, out=output.out[rows], lse=None if output.lse is None else output.lse[rows])


def differing(a: MLAOutput, b: MLAOutput) -> int:
    """How many elements of out and lse have other bits. All NaN are alike."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    count = 0
    for x, y in ((a.out, b.out), (a.lse, b.lse)):
        if x is not None and y is not None:
            as_bits = bits[x.element_size()]
            y = y.to(x.device)
            count += int(((x.view(as_bits) != y.view(as_bits)) & ~(x.isnan() & y.isnan())).sum())
    return count


def _forget(output: MLAOutput) -> None:
    """Memory that is freed must not hold a right answer: the next kernel may get it, and leave it as it is."""
    for tensor in (output.out, output.lse):
        if tensor is not None:
            with contextlib.suppress(RuntimeError):  # an expanded tensor
                tensor.fill_(float("nan"))
