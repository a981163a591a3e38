"""RunConfig: the flags of `mla-verify kernels` as one value, checked before anything runs. No torch until a device is
asked for."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mla_verify.cases import CaseSpec
from mla_verify.dump import Dump, read_dump, why_no_dump
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.formats import DTYPES
from mla_verify.kernels import KERNELS, load_kernel
from mla_verify.report.files import why_unwritable
from mla_verify.suites import SUITES, suite_cases
from mla_verify.watch import DEFAULT_TIMEOUT

DEFAULT_SUITE = "smoke"
_MAX_SEEDS = 10**6
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
    seeds: range | None = None  # every case with each of them
    json: Path | None = None
    junit: Path | None = None
    summary: Path | None = None
    dump: Path | None = None
    against: Dump | None = None
    bit_equal: bool = False  # any bit that differs from `against` is wrong
    jobs: int = 1  # processes that judge cases
    fail_fast: bool = False
    timeout: float = DEFAULT_TIMEOUT  # seconds of one kernel call in a worker, without compilation


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
    seeds: str | None = None,
    json: Path | None = None,
    junit: Path | None = None,
    summary: Path | None = None,
    dump: Path | None = None,
    against: Path | None = None,
    bit_equal: bool = False,
    jobs: int = 1,
    fail_fast: bool = False,
    timeout: float | None = None,
) -> RunConfig:
    """The flags as given, checked. Raises UsageError for what cannot work, before anything is run or written."""
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    if not timeout > 0:
        raise UsageError(f"--timeout is {timeout:g}", "give seconds, more than 0; inf for no limit")
    if suite is not None and cases:
        raise UsageError("--suite and --case exclude each other", "a case is named in full: leave out --suite")
    if seed is not None and seeds is not None:
        raise UsageError("--seed and --seeds exclude each other", "--seeds 10 runs every case with seeds 0 to 9")
    if inputs is not None and (suite is not None or cases or seed is not None or seeds is not None):
        other = "--suite" if suite is not None else "--case" if cases else "--seed" if seeds is None else "--seeds"
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
    _check_outputs(inputs, json, junit, summary, dump)
    if bit_equal and against is None:
        raise UsageError("--bit-equal has no effect without --against", "name the other build's dump: --against DIR")
    if dump is not None and (why := why_no_dump(dump)):
        raise UsageError(f"--dump {dump}: {why[0]}", why[1])
    return RunConfig(
        suite=suite,
        cases=_once(specs),
        inputs=inputs,
        kernels=_once(kernels),
        required=_once(required),
        dtypes=_once(dtypes),
        device=resolve_device(device),  # last: it imports torch
        seed=seed,
        seeds=None if seeds is None else _parse_seeds(seeds),
        json=json,
        junit=junit,
        summary=summary,
        dump=dump,
        against=None if against is None else read_dump(against),
        bit_equal=bit_equal,
        jobs=jobs,
        fail_fast=fail_fast,
        timeout=timeout,
    )


def _parse_seeds(text: str) -> range:
    """Of "10": 0 to 9; of "3-5": 3 to 5."""
    hint = "give a number of seeds, --seeds 10 for 0 to 9, or the first and the last one, --seeds 10-19"
    match = re.fullmatch(r"(?:(\d{1,18})-)?(\d{1,18})", text.strip())
    if match is None:
        raise UsageError(f"--seeds {text}: neither a number nor two", hint)
    first, last = int(match[1] or 0), int(match[2])
    seeds = range(last) if match[1] is None else range(first, last + 1)
    if not 0 < len(seeds) <= _MAX_SEEDS:
        raise UsageError(f"--seeds {text}: that is {len(seeds)} seeds; 1 to {_MAX_SEEDS} are allowed", hint)
    return seeds


def repeat_command(
    kernel: str, case: str, device: str, inputs_file: Path | None = None, timeout: float = DEFAULT_TIMEOUT
) -> str:
    """The command line that repeats one case on one kernel, quoted for a shell."""
    which = ["--case", case] if inputs_file is None else ["--inputs", str(inputs_file)]
    limit = [] if timeout == DEFAULT_TIMEOUT else ["--timeout", f"{timeout:g}"]
    return shlex.join(["mla-verify", "kernels", "--kernel", kernel, *which, "--device", device, *limit])


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


def _check_outputs(
    inputs: Path | None, json: Path | None, junit: Path | None, summary: Path | None, dump: Path | None
) -> None:
    taken = {path.resolve(): flag for flag, path in (("--inputs", inputs), ("--dump", dump)) if path}
    for flag, path in (("--json", json), ("--junit", junit), ("--summary", summary)):
        if path is None:
            continue
        why = why_unwritable(path)
        if why:
            raise UsageError(f"{flag} {path}: {why}", "name a file in a folder that exists and can be written")
        other = taken.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(f"{other} and {flag} name the same place, {path}", "give each one of its own")


def _once(values: Iterable[_T]) -> tuple[_T, ...]:
    """Without repetitions, in order."""
    return tuple(dict.fromkeys(values))
