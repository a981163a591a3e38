"""One call of a kernel on one case, in whatever process this is: what it returned, or why that is no result."""

from __future__ import annotations

import sysconfig
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mla_verify
from mla_verify.compare import wrong_shape
from mla_verify.conventions import to_natural, wrong_empty_rows
from mla_verify.formats import FORMATS
from mla_verify.inputs import fuse, poison_unreferenced
from mla_verify.kernels.contract import Contract, Kernel
from mla_verify.results import Verdict
from mla_verify.tensors import AbsorbedInputs, MLAInputs, MLAOutput, output_buffers

# Not the author's: our files, and Python's own.
_NOT_THEIRS = (Path(mla_verify.__file__).parent, Path(sysconfig.get_path("stdlib")))
# In fp16's range, and far above any key.
HUGE = 32768.0


@dataclass(frozen=True)
class Execution:
    """An output in our conventions, or a verdict with its reason; both for an output whose kernel broke a rule."""

    output: MLAOutput | None = None
    verdict: Verdict | None = None
    reason: str = ""
    traceback: str = ""
    ran: str = ""
    seconds: float = 0.0


def execute(kernel: Kernel, inputs: MLAInputs, dtype: str, layout: str = "split") -> Execution:
    """Run it on a copy of `inputs`, into buffers full of NaN. Never raises for what the kernel does, but for Ctrl-C."""
    out_dtype = kernel.contract.facts(dtype).out_dtype
    mine = private_copy(inputs, kernel.contract, layout)
    pristine = private_copy(inputs, kernel.contract, layout)
    buffers = output_buffers(mine, FORMATS[out_dtype].torch_dtype)
    started = time.perf_counter()
    try:
        output = kernel.run(mine, buffers.output)
        if mine.device.type == "cuda":
            torch.cuda.synchronize(mine.device)
        seconds = time.perf_counter() - started
        ran = kernel.ran()
    except KeyboardInterrupt:
        raise
    # SystemExit too: a kernel that exits must not end the run, least of all with its exit code.
    except BaseException as error:
        seconds = time.perf_counter() - started
        if out_of_memory(error):
            reason = f"out of memory in the kernel: {first_line(error)}"
            return Execution(verdict=Verdict.NOT_RUN, reason=reason, seconds=seconds)
        reason = f"the kernel raised {type(error).__name__}: {first_line(error)}{_where(error)}"
        return Execution(verdict=Verdict.ERROR, reason=reason, traceback=_format_exc(), seconds=seconds)
    done = replace(checked(output, mine, kernel.contract, out_dtype), ran=ran, seconds=seconds)
    broken = _broken_rule(mine, pristine, buffers.overwritten())
    return replace(done, verdict=Verdict.FAIL, reason=broken) if broken else done


def _where(error: BaseException) -> str:
    """The innermost line of a file of the kernel's author, also in what the exception came from."""
    found = ""
    link: BaseException | None = error
    while link is not None:
        for frame in traceback.extract_tb(link.__traceback__):
            path = Path(frame.filename)
            installed = {"site-packages", "dist-packages"} & set(path.parts) or "<" in path.name
            if not installed and not any(path.is_relative_to(folder) for folder in _NOT_THEIRS):
                found = f" ({path.name}, line {frame.lineno})"
        link = link.__cause__ or link.__context__
    return found


def _format_exc() -> str:
    try:
        return traceback.format_exc()
    except Exception:
        return ""


def private_copy(inputs: MLAInputs, contract: Contract, layout: str) -> MLAInputs:
    """What this kernel is given: a copy in the case's layout, with the poison that its contract allows."""
    clones: dict[str, Any] = {name: tensor.clone() for name, tensor in inputs.named_tensors().items()}
    copy = replace(inputs, **clones)
    if contract.finite_tail and isinstance(copy, AbsorbedInputs):
        copy = poison_unreferenced(copy, HUGE)
    return fuse(copy) if layout == "fused" else copy


def checked(output: object, inputs: MLAInputs, contract: Contract, out_dtype: str) -> Execution:
    """What a kernel returned, in our conventions, or WRONG_SHAPE."""
    if not isinstance(output, MLAOutput):
        reason = f"run returned {type(output).__name__}, it must return MLAOutput(out, lse)"
        return Execution(verdict=Verdict.WRONG_SHAPE, reason=reason)
    wrong = wrong_shape(output, inputs, out_dtype, contract)
    if wrong:
        return Execution(verdict=Verdict.WRONG_SHAPE, reason=wrong)
    wrong = wrong_empty_rows(output, contract, inputs)
    if wrong:
        return Execution(verdict=Verdict.FAIL, reason=wrong)
    return Execution(to_natural(output, contract, inputs))


def _broken_rule(inputs: MLAInputs, pristine: MLAInputs, overwritten: str | None) -> str:
    damaged = changed_tensors(inputs, pristine)
    if damaged:
        return f"the kernel changed its input {' and '.join(damaged)} in place"
    return f"the kernel wrote outside its output: {overwritten}" if overwritten else ""


def changed_tensors(inputs: MLAInputs, pristine: MLAInputs) -> list[str]:
    """Names of the tensors that are not what they were."""
    before = pristine.named_tensors()
    # As bytes: NaN poison equals itself, and -0.0 is not 0.0. A kernel may also have transposed or resized in place.
    return [
        name
        for name, tensor in inputs.named_tensors().items()
        if tensor.shape != before[name].shape
        or not torch.equal(tensor.contiguous().view(torch.uint8), before[name].contiguous().view(torch.uint8))
    ]


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the CPU or a GPU."""
    # The CPU allocator raises a plain RuntimeError.
    texts = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut to a sensible length."""
    try:
        return str(error).strip().split("\n")[0][:300]
    except Exception:  # a kernel's own exception may not even have a text
        return "its text cannot be had"
