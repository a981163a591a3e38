"""RunConfig: the flags of `mla-verify kernels` as one value, checked before anything runs. No torch until a device is
asked for."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mla_verify.cases import CaseSpec
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.formats import DTYPES
from mla_verify.kernels import KERNELS, load_kernel
from mla_verify.report.files import why_unwritable
from mla_verify.suites import SUITES, suite_cases

DEFAULT_SUITE = "smoke"
DEVICES = ("auto", "cpu", "cuda")

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunConfig:
    """What to run, where, and where the results go. Exactly one of suite, cases and inputs is given."""

    suite: str | None = None
    cases: tuple[CaseSpec, ...] = ()
    inputs: Path | None = None
    kernels: tuple[str, ...] = ()  # named with --kernel; with `required` empty too: every one available
    required: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()  # empty: every one
    device: str = "cpu"  # "cpu" or "cuda"
    seed: int | None = None  # None: as the cases have it
    json: Path | None = None
    junit: Path | None = None
    fail_fast: bool = False


def make_config(
    *,
    suite: str | None = None,
    cases: Sequence[str] = (),
    inputs: Path | None = None,
    kernels: Sequence[str] = (),
    required: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "auto",
    seed: int | None = None,
    json: Path | None = None,
    junit: Path | None = None,
    fail_fast: bool = False,
) -> RunConfig:
    """The flags as given, checked. Raises UsageError for what cannot work, before anything is run or written."""
    if suite is not None and cases:
        raise UsageError("--suite and --case exclude each other", "a case is named in full: leave out --suite")
    if inputs is not None and (suite is not None or cases or seed is not None):
        other = "--suite" if suite is not None else "--case" if cases else "--seed"
        raise UsageError(f"--inputs and {other} exclude each other", f"the file is the one case: leave out {other}")
    if inputs is None and not cases:
        suite = suite or DEFAULT_SUITE
    if suite is not None:
        _check_known("suite", [suite], SUITES)
    _check_known("dtype", dtypes, DTYPES)
    if not {*kernels, *required} <= set(KERNELS):
        device = resolve_device(device)  # in whose process they are loaded
    for name in (*kernels, *required):
        load_kernel(name, device)
    specs = [_parse_case(case) for case in cases]
    if inputs is not None and not inputs.is_file():
        raise UsageError(f"--inputs {inputs}: there is no such file", "give a .safetensors file, see docs/kernels.md")
    _check_outputs(inputs, json, junit)
    return RunConfig(
        suite=suite,
        cases=_once(specs),
        inputs=inputs,
        kernels=_once(kernels),
        required=_once(required),
        dtypes=_once(dtypes),
        device=resolve_device(device),  # last: it imports torch
        seed=seed,
        json=json,
        junit=junit,
        fail_fast=fail_fast,
    )


def repeat_command(kernel: str, case: str, device: str, inputs_file: Path | None = None) -> str:
    """The command line that repeats one case on one kernel, quoted for a shell."""
    which = ["--case", case] if inputs_file is None else ["--inputs", str(inputs_file)]
    return shlex.join(["mla-verify", "kernels", "--kernel", kernel, *which, "--device", device])


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda" for one of DEVICES. Raises UsageError for a "cuda" that torch does not see."""
    if device == "cpu":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    cuda = torch.version.cuda
    why = f"torch {torch.__version__} is built " + (f"for CUDA {cuda} but finds no device" if cuda else "without CUDA")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        why += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    hint = (
        "check nvidia-smi, or run with --device cpu" if cuda else "install a CUDA build of torch, or use --device cpu"
    )
    raise UsageError(f"--device cuda: torch sees no CUDA device ({why})", hint)


def _check_known(what: str, values: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for value in values:
        if value not in known:
            raise UsageError(f"unknown {what} {value!r}", did_you_mean(value, known, f"known: {', '.join(known)}"))


def _parse_case(case_id: str) -> CaseSpec:
    try:
        return CaseSpec.parse(case_id)
    except UsageError as error:
        known = [case.spec.id for suite in SUITES for case in suite_cases(suite)]
        # Ids share most of their letters: below 0.9 the nearest one is another case and not the one that was meant.
        close = difflib.get_close_matches(case_id, known, n=1, cutoff=0.9)
        if close:
            raise UsageError(error.message, f"did you mean {close[0]}? {error.hint}") from error
        raise


def _check_outputs(inputs: Path | None, json: Path | None, junit: Path | None) -> None:
    taken = {inputs.resolve(): "--inputs"} if inputs else {}
    for flag, path in (("--json", json), ("--junit", junit)):
        if path is None:
            continue
        why = why_unwritable(path)
        if why:
            raise UsageError(f"{flag} {path}: {why}", "name a file in a folder that exists and can be written")
        other = taken.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(f"{other} and {flag} name the same file, {path}", "give each a file of its own")


def _once(values: Iterable[_T]) -> tuple[_T, ...]:
    """Without repetitions, in order."""
    return tuple(dict.fromkeys(values))
