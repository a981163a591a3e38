"""What the tool asks of a kernel, answered in the kernel's own process: the tool's, or a worker's (workers.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mla_verify.cases import CaseSpec
from mla_verify.kernels import load_kernel_here
from mla_verify.kernels.contract import Kernel
from mla_verify.workers import WorkerDiedError, ask, retire

if TYPE_CHECKING:
    from mla_verify.execute import Execution
    from mla_verify.tensors import MLAInputs

_T = TypeVar("_T")


@dataclass(frozen=True)
class Availability:
    """Why a kernel cannot run on a device at all, and of which dtypes it can run no case there."""

    why_not: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)  # dtype -> why not


@dataclass(frozen=True)
class Job:
    """One case, as a value that any process can make the inputs of."""

    spec: CaseSpec | None  # None: the case of `inputs_file`
    inputs_file: Path | None
    dtype: str
    device: str
    layout: str

    def inputs(self) -> MLAInputs:
        """In the split layout: kernels get private copies in their own."""
        import torch

        torch.set_default_dtype(torch.float32)  # a kernel that ran here before may have changed it
        if self.spec is not None:
            from mla_verify.inputs import make_inputs

            return make_inputs(replace(self.spec, layout="split"), self.device)
        from mla_verify.inputs import move
        from mla_verify.inputs_file import read_inputs_file

        assert self.inputs_file is not None
        return move(read_inputs_file(self.inputs_file).load(), self.device)


def availability(kernel: Kernel, device: str) -> Availability:
    """The kernel's own answers. One whose library breaks on import is unavailable: it must not cost the others' run."""
    missing = kernel.missing()
    if missing:
        return Availability(missing)
    try:
        return _in_its_process(kernel, device, _availability, device)
    except WorkerDiedError as death:
        return Availability(f"asking whether it is available ended its process: {death.how}")
    except Exception as error:
        return Availability(f"it does not load in its own process: {type(error).__name__}: {error}")


def _availability(kernel: Kernel, device: str) -> Availability:
    try:
        why_not = kernel.why_unavailable(device)
        if why_not:
            return Availability(why_not)
        reasons = {dtype: kernel.why_not_dtype(dtype, device) for dtype in kernel.contract.dtypes}
        return Availability(None, {dtype: why for dtype, why in reasons.items() if why})
    except Exception as error:
        return Availability(f"asking whether it is available raised {type(error).__name__}: {error}")


def execute_job(kernel: Kernel, job: Job, inputs: MLAInputs | None = None) -> Execution:
    """Run the kernel on the job's case, in its process. inputs: the job's, if they are there already."""
    from mla_verify.execute import Execution
    from mla_verify.results import Verdict

    if inputs is not None and kernel.own_process(job.device) is None:
        return _execute(kernel, job, inputs)
    try:
        return _in_its_process(kernel, job.device, _execute, job)
    except WorkerDiedError as death:
        hint = ", as an address outside a tensor does" if "SIGSEGV" in death.how else ""
        reason = f"the kernel's process ended: {death.how}{hint}"
        return Execution(verdict=Verdict.CRASH, reason=reason, traceback=death.log)


def _execute(kernel: Kernel, job: Job, inputs: MLAInputs | None = None) -> Execution:
    """UNSUPPORTED when the kernel will not take the case."""
    from mla_verify.execute import Execution, execute
    from mla_verify.results import Verdict

    why_not = kernel.why_not(job.spec, job.device) if job.spec else None
    if why_not:
        return Execution(verdict=Verdict.UNSUPPORTED, reason=why_not)
    done = execute(kernel, inputs or _inputs(job), job.dtype, job.layout)
    if done.verdict is Verdict.ERROR and job.device == "cuda":
        retire()  # an illegal access or a trap leaves no use of the device to this process
    return done


@lru_cache(maxsize=1)  # kernels of one case follow each other, in both layouts
def _split_inputs(job: Job) -> MLAInputs:
    return job.inputs()


def _inputs(job: Job) -> MLAInputs:
    return _split_inputs(replace(job, layout="split"))


def _in_its_process(kernel: Kernel, device: str, function: Callable[..., _T], *args: object) -> _T:
    environment = kernel.own_process(device)
    if environment is None:
        return function(kernel, *args)
    answer: _T = ask(environment, _by_name, function, kernel.name, args)
    return answer


_kernel = lru_cache(load_kernel_here)


def _by_name(function: Callable[..., _T], name: str, args: tuple[object, ...]) -> _T:
    return function(_kernel(name), *args)
