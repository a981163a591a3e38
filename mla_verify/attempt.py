"""One kernel on one case, on its way to a verdict: does it take the case, what does it return, is that right?"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_verify.plan import PlanEntry, why_unavailable
from mla_verify.results import CaseResult, Comparison, Verdict

if TYPE_CHECKING:
    from mla_verify.expected import Expected
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.tensors import MLAInputs, MLAOutput
    from mla_verify.vacuity import FaultSizes


@dataclass
class Attempt:
    """One kernel on one case, on its way to a verdict."""

    entry: PlanEntry
    result: CaseResult
    output: MLAOutput | None = None
    facts: RoundingFacts | None = None


def settle(attempt: Attempt, verdict: Verdict, reason: str) -> None:
    """Give the attempt its verdict."""
    attempt.result = replace(attempt.result, verdict=verdict, reason=reason)


def check_support(attempt: Attempt, device: str) -> None:
    """UNSUPPORTED with the reason when the kernel cannot take the case."""
    entry = attempt.entry
    kernel = entry.kernel
    why = why_unavailable(kernel, device)
    if why is None and entry.dtype not in kernel.contract.dtypes:
        why = f"dtype {entry.dtype} is not among {', '.join(kernel.contract.dtypes)}"
    if why is None and entry.phase not in kernel.contract.phases:
        why = f"phase {entry.phase} is not among {', '.join(kernel.contract.phases)}"
    if why is None and entry.spec is not None:
        pages = kernel.contract.page_sizes
        if pages is not None and entry.spec.page_size not in pages:
            why = f"page size {entry.spec.page_size} is not among {', '.join(map(str, pages))}"
        else:
            why = kernel.why_not(entry.spec)
    if why is not None:
        attempt.result = replace(attempt.result, verdict=Verdict.UNSUPPORTED, reason=why)


def run_kernel(attempt: Attempt, inputs: MLAInputs) -> None:
    """Run it into buffers full of NaN. Sets the output, or ERROR, WRONG_SHAPE or the reason why there is none."""
    from mla_verify.compare import wrong_shape
    from mla_verify.formats import FORMATS
    from mla_verify.tensors import MLAOutput, output_buffers

    entry = attempt.entry
    contract = entry.kernel.contract
    facts = contract.facts(entry.dtype)
    buffers = output_buffers(inputs, FORMATS[facts.out_dtype].torch_dtype)
    started = time.perf_counter()
    try:
        output = entry.kernel.run(inputs, buffers)
        _synchronize(inputs)
        attempt.result = replace(attempt.result, ran=entry.kernel.ran())
    except KeyboardInterrupt:
        raise
    # SystemExit too: a kernel that exits must not end the run, least of all with its exit code.
    except BaseException as error:
        if out_of_memory(error):
            attempt.result = replace(attempt.result, reason=f"out of memory in the kernel: {first_line(error)}")
            return
        settle(attempt, Verdict.ERROR, f"the kernel raised {type(error).__name__}: {first_line(error)}")
        attempt.result = replace(attempt.result, traceback=traceback.format_exc())
        return
    finally:
        attempt.result = replace(attempt.result, seconds={"kernel": time.perf_counter() - started})
    if not isinstance(output, MLAOutput):
        settle(
            attempt, Verdict.WRONG_SHAPE, f"run returned {type(output).__name__}, it must return MLAOutput(out, lse)"
        )
        return
    wrong = wrong_shape(output, inputs, facts.out_dtype, contract.returns_lse)
    if wrong:
        settle(attempt, Verdict.WRONG_SHAPE, wrong)
        return
    attempt.output, attempt.facts = output, facts


def judge(attempt: Attempt, inputs: MLAInputs, expected: Expected, sizes: FaultSizes) -> None:
    """PASS, FAIL, or NOT_RUN for a case that cannot tell."""
    from mla_verify.compare import compare_output
    from mla_verify.vacuity import unseen_faults

    assert attempt.output is not None and attempt.facts is not None
    if attempt.result.verdict is not Verdict.NOT_RUN:
        return  # it damaged its inputs
    comparisons = compare_output(attempt.output, expected, attempt.facts, inputs)
    attempt.result = replace(attempt.result, comparisons=comparisons)
    failed = [c for c in comparisons if not c.passed]
    unseen = unseen_faults(sizes, expected, attempt.facts)
    if failed:
        settle(attempt, Verdict.FAIL, "; ".join(failure_sentence(c) for c in failed))
    elif unseen:
        reason = f"the case cannot tell: it would pass a kernel that {' or that '.join(unseen)}"
        attempt.result = replace(attempt.result, reason=reason)
    else:
        settle(attempt, Verdict.PASS, "")


def failure_sentence(comparison: Comparison) -> str:
    """What a failed comparison says, in one sentence."""
    check = next(check for check in comparison.checks if not check.passed)
    where = f" at {comparison.worst}" if comparison.worst else ""
    if check.name == "nonfinite":
        return (
            f"{comparison.tensor}: NaN or infinity where it must not be, or not where it must: {check.detail};{where}"
        )
    if check.name == "max_z":
        return f"{comparison.tensor}: |z| {check.value:.4g} is over {check.limit:.3g}{where}"
    return (
        f"{comparison.tensor}: {check.name} {check.value:.4g} is over {check.limit:.3g}, {check.detail}; worst{where}"
    )


def _synchronize(inputs: MLAInputs) -> None:
    if inputs.device.type == "cuda":
        import torch

        torch.cuda.synchronize(inputs.device)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or a GPU."""
    import torch

    # The CPU allocator raises a plain RuntimeError.
    texts = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut to a sensible length."""
    return str(error).strip().split("\n")[0][:300]
