"""RunConfig -> Plan: which cases run on which kernels, and which claims of theirs the run has to decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mla_verify.calls import availability
from mla_verify.cases import CaseSpec
from mla_verify.config import RunConfig
from mla_verify.errors import UsageError
from mla_verify.kernels import kernel_names, load_kernel
from mla_verify.kernels.contract import Kernel
from mla_verify.suites import SUITES, suite_cases


@dataclass(frozen=True)
class PlanEntry:
    """One case on one kernel."""

    spec: CaseSpec | None  # None: the case of an --inputs file
    case_id: str
    kernel: Kernel
    claim: str
    form: str
    dtype: str
    phase: str
    unavailable: str | None = None  # why the kernel can run no case of this dtype here
    observed: bool = True  # whether the kernel is called again, to see whether its bits repeat


@dataclass(frozen=True)
class Plan:
    entries: tuple[PlanEntry, ...]  # case by case, kernels inside: they share inputs and reference
    kernels: tuple[Kernel, ...]  # selected, with entries or without
    named: tuple[str, ...] = ()  # kernels that --kernel or --require asked for
    required: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)  # kernel -> why; selected only when named
    dtypes_not_here: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # kernel -> dtype -> why
    named_cases: tuple[str, ...] = ()  # ids; with --case or --inputs
    # kernel -> ("phase", "decode"), ("dtype", "bf16"), ...: what it claims and this run has to decide.
    claims: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """What the user should know before the run: kernels that cannot run, or have nothing to run."""
        notes = []
        for name, why in self.unavailable.items():
            if name in self.required:
                notes.append(f"warning: {name} is required and unavailable here: {why}")
                notes.append("hint: the rest runs, but the run ends inconclusive (exit 3); mla-verify list kernels")
            elif name in self.named:
                notes.append(f"warning: {name} is unavailable here, its cases are UNSUPPORTED: {why}")
        left_out: dict[str, list[str]] = {}
        for name, why in self.unavailable.items():
            if name not in self.named:
                left_out.setdefault(why, []).append(name)
        for why, names in left_out.items():
            notes.append(f"note: {_some(names)} left out, unavailable here: {why}")
        default = "form absorbed, every dtype and phase, no LSE, no rounding but that of the result"
        notes += [
            f"note: {kernel.name} declares no contract and is held to the default one ({default}): "
            "@mla_kernel(Contract(...)) declares one"
            for kernel in self.kernels
            if not getattr(kernel, "has_contract", True)
        ]
        notes += _dtype_notes(self)
        idle = [kernel for kernel in self.kernels if all(entry.kernel is not kernel for entry in self.entries)]
        for name, contract in ((kernel.name, kernel.contract) for kernel in idle if kernel.name in self.named):
            kind = f"form {contract.form}, phase {' or '.join(contract.phases)}"
            notes.append(f"note: no selected case is of {name}'s kind: {kind}")
        return tuple(notes)


def _some(names: Sequence[str]) -> str:
    """A list that stays in one line; `mla-verify list kernels` has every one."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


@dataclass(frozen=True)
class _Case:
    spec: CaseSpec | None
    id: str
    claim: str
    form: str
    dtype: str
    phase: str

    @classmethod
    def of(cls, spec: CaseSpec, claim: str) -> _Case:
        return cls(spec, spec.id, claim, spec.form, spec.dtype, spec.phase)


def build_plan(config: RunConfig) -> Plan:
    """Every selected case on every selected kernel of its form. Raises UsageError when that is nothing."""
    named = tuple(dict.fromkeys([*config.kernels, *config.required]))
    selected = dict.fromkeys([*(config.kernels or kernel_names()), *config.required])
    loaded, broken = _load(selected, named, config.device)
    found = {name: availability(kernel, config.device) for name, kernel in loaded.items()}
    unavailable = broken | {name: one.why_not for name, one in found.items() if one.why_not}
    kernels = tuple(kernel for name, kernel in loaded.items() if name in named or name not in unavailable)
    all_cases = _cases(config)
    cases = [case for case in all_cases if not config.dtypes or case.dtype in config.dtypes]
    entries = tuple(
        PlanEntry(
            case.spec,
            case.id,
            kernel,
            case.claim,
            case.form,
            case.dtype,
            case.phase,
            found[kernel.name].why_not or found[kernel.name].dtypes.get(case.dtype),
            # Whether bits repeat hangs on shapes: one seed shows it.
            config.seeds is None or case.spec is None or case.spec.seed == config.seeds[0],
        )
        for case in cases
        for kernel in kernels
        if _belongs(kernel, case, config)
    )
    if not entries:
        raise _nothing_planned(config, kernels, all_cases, cases)
    return Plan(
        entries=entries,
        kernels=kernels,
        named=named,
        required=config.required,
        named_cases=() if config.suite is not None else tuple(dict.fromkeys(case.id for case in cases)),
        unavailable=unavailable,
        dtypes_not_here={kernel.name: found[kernel.name].dtypes for kernel in kernels if found[kernel.name].dtypes},
        claims={kernel.name: _claims(config, kernel, entries, found[kernel.name].dtypes) for kernel in kernels},
    )


def _load(selected: Iterable[str], named: Sequence[str], device: str) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Kernels by name, and those that another package registers and that do not load, with the reason.

    Raises UsageError for one of the latter that was named.
    """
    loaded: dict[str, Kernel] = {}
    broken: dict[str, str] = {}
    for name in selected:
        try:
            loaded[name] = load_kernel(name, device)
        except UsageError as error:
            if name in named:
                raise
            broken[name] = error.message
    return loaded, broken


def why_outside(entry: PlanEntry) -> str | None:
    """Why a case is outside its kernel's contract, or cannot run here, or None. The kernel itself is not asked."""
    contract = entry.kernel.contract
    if entry.unavailable:
        return entry.unavailable
    if entry.dtype not in contract.dtypes:
        return f"dtype {entry.dtype} is not among {', '.join(contract.dtypes)}"
    if entry.phase not in contract.phases:
        return f"phase {entry.phase} is not among {', '.join(contract.phases)}"
    return contract.why_not(entry.spec) if entry.spec else None


def _belongs(kernel: Kernel, case: _Case, config: RunConfig) -> bool:
    """Whether a kernel is of a case's kind.

    A suite has cases of every kind, and a decode kernel has no business with prefill, nor a bf16 kernel with fp16; but
    who names a case is told when a kernel cannot take it.
    """
    contract, named = kernel.contract, config.suite is None
    return contract.form == case.form and (named or (case.phase in contract.phases and case.dtype in contract.dtypes))


def _dtype_notes(plan: Plan) -> list[str]:
    """One note for each reason, with the kernels that it concerns."""
    concerned: dict[tuple[str, str], list[str]] = {}
    for name, reasons in plan.dtypes_not_here.items():
        for dtype, why in reasons.items():
            if any(entry.kernel.name == name and entry.dtype == dtype for entry in plan.entries):
                concerned.setdefault((dtype, why), []).append(name)
    return [
        f"note: {dtype} cases of {', '.join(names)} are UNSUPPORTED here: {why}"
        for (dtype, why), names in concerned.items()
    ]


def _cases(config: RunConfig) -> list[_Case]:
    if config.inputs is not None:
        from mla_verify.inputs_file import read_inputs_file

        case = read_inputs_file(config.inputs)
        claim = f"the tensors of {config.inputs.name} give the reference's result"
        return [_Case(None, case.spec_id, claim, case.form, case.dtype, case.phase)]
    if config.suite is not None:
        named = [(case.spec, case.claim) for case in suite_cases(config.suite)]
    else:
        known = {case.spec: case.claim for suite in SUITES for case in suite_cases(suite)}
        named = [(spec, known.get(spec, "named on the command line, in no suite")) for spec in config.cases]
    if config.seed is not None:
        named = [(spec.with_seed(config.seed), claim) for spec, claim in named]
    if config.seeds is not None:
        named = [(spec.with_seed(seed), claim) for spec, claim in named for seed in config.seeds]
    # By spec, each once: with --seed or --seeds, cases that differed in their seed alone are one case.
    return [_Case.of(spec, claim) for spec, claim in dict(named).items()]


def _claims(
    config: RunConfig, kernel: Kernel, entries: Sequence[PlanEntry], not_here: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    contract = kernel.contract
    # What no machine like this one can decide, and the notes say so, does not keep every run here from a verdict.
    phases, dtypes = list(contract.phases), [dtype for dtype in contract.dtypes if dtype not in not_here]
    if config.dtypes:
        dtypes = [dtype for dtype in dtypes if dtype in config.dtypes]
    if config.suite is None and kernel.name not in (*config.kernels, *config.required):
        return ()  # single cases were asked for, and this kernel was not: each has to be decided, by whichever kernel
    if config.suite is None or config.dtypes:
        # Part of a suite, or single cases, were asked for: what none of them touches is no business of this run.
        planned = [entry for entry in entries if entry.kernel is kernel and entry.unavailable is None]
        phases = [phase for phase in phases if any(entry.phase == phase for entry in planned)]
        dtypes = [dtype for dtype in dtypes if any(entry.dtype == dtype for entry in planned)]
    return (*(("phase", phase) for phase in phases), *(("dtype", dtype) for dtype in dtypes))


def _nothing_planned(
    config: RunConfig, kernels: Sequence[Kernel], all_cases: Sequence[_Case], cases: Sequence[_Case]
) -> UsageError:
    """Which of the selections left nothing, and what to change."""
    if not kernels:
        return UsageError(f"no kernel is available on {config.device}", "mla-verify list kernels says why")
    if all_cases and not cases:
        there = " ".join(sorted({case.dtype for case in all_cases}))
        return UsageError(f"no selected case has dtype {' or '.join(config.dtypes)}", f"they have: {there}")
    forms = sorted({case.form for case in cases})
    names = " or ".join(kernel.name for kernel in kernels)
    takes = " or ".join(sorted({kernel.contract.form for kernel in kernels}))
    if any(kernel.contract.form in forms for kernel in kernels):
        taken = [(c.phases, c.dtypes) for c in (kernel.contract for kernel in kernels) if c.form in forms]
        if any(case.phase in phases for case in cases for phases, _ in taken):
            wanted = f"dtype {' or '.join(dict.fromkeys(dtype for _, dtypes in taken for dtype in dtypes))}"
        else:
            wanted = f"phase {' or '.join(dict.fromkeys(phase for phases, _ in taken for phase in phases))}"
        return UsageError(f"{names} takes {wanted}, which no selected case has", "select more cases")
    able = [
        name for name, kernel in _load(kernel_names(), (), config.device)[0].items() if kernel.contract.form in forms
    ]
    hint = f"kernels of that form: {', '.join(able)}" if able else "mla-verify list kernels shows each kernel's form"
    return UsageError(f"{names} takes form {takes}, and the selected cases have form {' or '.join(forms)}", hint)
