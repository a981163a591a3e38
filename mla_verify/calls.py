"""What the tool asks of a kernel, answered in the kernel's own process: the tool's, or a worker's (workers.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mla_verify.cases import CaseSpec
from mla_verify.kernels import load_kernel_here
from mla_verify.kernels.contract import Kernel
from mla_verify.watch import DEFAULT_TIMEOUT, Watch, says_when_slow
from mla_verify.worker_main import kernel_call
from mla_verify.workers import WorkerDiedError, WorkerMemoryError, WorkerTimeoutError, ask, retire

if TYPE_CHECKING:
    from mla_verify.execute import Execution
    from mla_verify.tensors import MLAInputs, MLAOutput

_T = TypeVar("_T")

# A reference is a few thousand operations, each 7 us for a GPU however small. So many scores take a core as long.
_SMALL_SCORES = 1 << 14


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
    timeout: float = DEFAULT_TIMEOUT  # seconds of one kernel call in a worker, without compilation
    only: int | None = None  # one request of the case, as a batch of its own

    @property
    def judged_on(self) -> str:
        """The device of the reference and the comparison: small ones take a GPU longer to launch than a CPU to do."""
        small = self.spec is not None and self.spec.num_scores <= _SMALL_SCORES
        return "cpu" if small else self.device

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
    with says_when_slow(kernel.name):
        return _asked(kernel, device)


def _asked(kernel: Kernel, device: str) -> Availability:
    try:
        return _in_its_process(kernel, device, _availability, device, watch=Watch(kernel.name))
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

    if inputs is not None and inputs.device.type == job.device and kernel.own_process(job.device) is None:
        return _execute(kernel, job, inputs)
    watch = Watch(kernel.name, job.timeout)
    try:
        done = _in_its_process(kernel, job.device, _execute, job, watch=watch)
    except WorkerTimeoutError as death:
        return Execution(verdict=Verdict.TIMEOUT, reason=death.how, traceback=death.log, compile_seconds=watch.compiled)
    except WorkerMemoryError as death:
        return Execution(verdict=Verdict.NOT_RUN, reason=death.how, compile_seconds=watch.compiled)
    except WorkerDiedError as death:
        reason = f"the kernel's process ended: {death.how}{_hint(death.how)}"
        return Execution(verdict=Verdict.CRASH, reason=reason, traceback=death.log, compile_seconds=watch.compiled)
    # The time that is told is that of the first call; a compiler may also have run elsewhere.
    compiled = watch.compiled_in_call[0] if watch.compiled_in_call else 0.0
    return replace(done, seconds=max(0.0, done.seconds - compiled), compile_seconds=watch.compiled)


def _hint(how: str) -> str:
    if "SIGSEGV" in how:
        return ", as an address outside a tensor does"
    # We did not do it: that would be a TIMEOUT.
    return ", not by mla-verify; the system does so when memory runs out (dmesg)" if "SIGKILL" in how else ""


def _execute(kernel: Kernel, job: Job, inputs: MLAInputs | None = None) -> Execution:
    """UNSUPPORTED when the kernel will not take the case."""
    from mla_verify.execute import Execution, execute
    from mla_verify.memory import give_back_gpu_memory
    from mla_verify.results import Verdict

    spec = job.spec if job.spec is None or job.only is None else job.spec.alone(job.only)
    try:
        why_not = kernel.why_not(spec, job.device) if spec else None
    except Exception as error:
        reason = f"asking whether it takes the case raised {type(error).__name__}: {error}"
        return Execution(verdict=Verdict.NOT_RUN, reason=reason)
    if why_not:
        return Execution(verdict=Verdict.UNSUPPORTED, reason=why_not)
    try:
        done = execute(cast(Kernel, _Timed(kernel)), inputs or _inputs(job), job.dtype, job.layout)
    except Exception:
        retire()  # what our own code stumbled over may be a device that the kernel has left unusable
        raise
    # An illegal access or a trap leaves no use of the device to this process. After running out of memory it holds
    # all that it could get, which the others lack.
    if done.verdict is Verdict.NOT_RUN or (done.verdict is Verdict.ERROR and job.device == "cuda"):
        retire()
    elif job.device == "cuda":
        give_back_gpu_memory()
    return done


class _Timed:
    """A kernel whose calls count against the time limit, until the device has done them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        with kernel_call():
            output = self._kernel.run(inputs, out)
            if inputs.device.type == "cuda":
                import torch

                torch.cuda.synchronize(inputs.device)
            return output


_made: dict[Job, MLAInputs] = {}  # the last one: kernels of one case follow each other, in all layouts


def _inputs(job: Job) -> MLAInputs:
    split = replace(job, layout="split", only=None)
    if split not in _made:
        _made.clear()  # first: two large cases may be more than the device holds
        _made[split] = split.inputs()
    if job.only is None:
        return _made[split]
    from mla_verify.inputs import alone

    return alone(_made[split], job.only)


def _in_its_process(
    kernel: Kernel, device: str, function: Callable[..., _T], *args: object, watch: Watch | None = None
) -> _T:
    environment = kernel.own_process(device)
    if environment is None:
        return function(kernel, *args)
    answer: _T = ask(environment, _by_name, function, kernel.name, args, watch=watch)
    return answer


_kernel = lru_cache(load_kernel_here)


def _by_name(function: Callable[..., _T], name: str, args: tuple[object, ...]) -> _T:
    return function(_kernel(name), *args)
