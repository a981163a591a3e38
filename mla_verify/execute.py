"""One call of a kernel on one case, in whatever process this is: what it returned, or why that is no result."""

from __future__ import annotations

import sysconfig
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import mla_verify
from mla_verify.compare import wrong_shape
from mla_verify.conventions import to_natural, wrong_empty_rows
from mla_verify.errors import FallbackError
from mla_verify.formats import FORMATS
from mla_verify.inputs import POISON, poison_unreferenced
from mla_verify.kernels.contract import Contract, Kernel
from mla_verify.layouts import place
from mla_verify.placed import Placed
from mla_verify.results import Verdict
from mla_verify.tensors import UNWRITTEN, AbsorbedInputs, Buffers, LayerInputs, MLAInputs, MLAOutput

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
    compile_seconds: float = 0.0  # in which compilers ran for it, in a worker; no part of `seconds`


def execute(kernel: Kernel, inputs: MLAInputs, dtype: str, layout: str = "split") -> Execution:
    """Run it on a copy of `inputs`, into buffers full of NaN. Never raises for what the kernel does, but for Ctrl-C."""
    out_dtype = kernel.contract.facts(dtype).out_dtype
    try:
        placed = private_copy(inputs, kernel.contract, layout)
        buffers = placed.buffers(FORMATS[out_dtype].torch_dtype)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return Execution(verdict=Verdict.NOT_RUN, reason=f"out of memory: {first_line(error)}")
    mine = placed.inputs
    _spoil_free_memory(buffers.output)
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
        if isinstance(error, FallbackError):
            reason = first_line(error) or "its library ran another kernel than the one asked for"
            return Execution(verdict=Verdict.FAIL, reason=reason, seconds=seconds)
        reason = f"the kernel raised {type(error).__name__}: {first_line(error)}{_where(error)}"
        return Execution(verdict=Verdict.ERROR, reason=reason, traceback=_format_exc(), seconds=seconds)
    done = replace(checked(output, mine, kernel.contract, out_dtype), ran=ran, seconds=seconds)
    return _held_to_rules(done, placed, buffers)


# Blocks of the output's size that a caching allocator is made to fill, and bytes of all of them together.
_SPOILED, _SPOILED_BYTES = 8, 1 << 30


def _spoil_free_memory(like: MLAOutput) -> None:
    """Free memory may hold a right answer, that of the kernel before: a kernel that writes nothing must not get it."""
    for tensor in (like.out, like.lse):
        if tensor is not None and tensor.numel():
            count = min(_SPOILED, _SPOILED_BYTES // (tensor.numel() * tensor.element_size()))
            # Of a copy any bits may be right, but for these.
            held = [torch.empty_like(tensor).view(torch.uint8).fill_(UNWRITTEN) for _ in range(count)]
            if like.lse is not None:
                for block in held:
                    block.view(tensor.dtype).fill_(float("nan"))
            del held


def _held_to_rules(done: Execution, placed: Placed, buffers: Buffers) -> Execution:
    """FAIL for a kernel that changed what it must not. The output becomes one on the plain inputs."""
    broken, output = placed.damage(), done.output
    if not broken and (overwritten := buffers.overwritten()):
        broken = f"the kernel wrote outside its output: {overwritten}"
    if output is not None:
        broken = broken or placed.spilled(output)
        done = replace(done, output=placed.result(output))
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


def private_copy(inputs: MLAInputs, contract: Contract, layout: str) -> Placed:
    """What this kernel is given: a copy in the case's layout, with the poison that its contract allows."""
    poison = POISON
    if contract.finite_tail and isinstance(inputs, AbsorbedInputs | LayerInputs):
        poison = HUGE
        inputs = poison_unreferenced(inputs, HUGE)
    return place(inputs, layout, poison=poison, contiguous=contract.strides == "contiguous")


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
